//! Reads payload from host memory of the peer's process (`process_vm_readv`), a piece in each step of the HCA.
//!
//! The receiver alone copies: nobody else writes its memory, so a peer that is stopped or killed holds nothing up, and a
//! queue pair may be destroyed between two pieces. The kernel checks the process, [`Process`] its mark.

use std::io;

use smallvec::SmallVec;

use gdsync_device::memory::{Memory, Process};

/// Bytes of a piece: 20 to 50 us, in which this thread has the lock of the HCA.
const PIECE: usize = 512 << 10;

/// A copy under way.
#[derive(Debug)]
pub(super) struct CmaRead {
    of: Process,
    /// What comes next there.
    from: u64,
    /// Where the rest goes: memory, first byte, length.
    to: SmallVec<[(Memory, usize, usize); 1]>,
}

impl CmaRead {
    pub(super) fn new(of: Process, from: u64, to: SmallVec<[(Memory, usize, usize); 1]>) -> Self {
        Self { of, from, to }
    }

    /// Reads the next piece. Returns whether it was the last.
    pub(super) fn read_next(&mut self) -> io::Result<bool> {
        let Some((memory, at, left)) = self.to.first_mut() else { return Ok(true) };
        let len = PIECE.min(*left);
        memory.read_from_process(*at, len, &self.of, self.from)?;
        self.from += len as u64;
        (*at, *left) = (*at + len, *left - len);
        if *left == 0 {
            self.to.remove(0);
        }
        Ok(self.to.is_empty())
    }
}
