//! REMOVE

use std::io;

use smallvec::SmallVec;

use gdsync_device::memory::{Memory, Process};

/// Bytes per step: 20 to 50 us under the HCA's lock.
const PIECE: usize = 512 << 10;

/// A cross-memory attach read (`process_vm_readv`), a piece per HCA step.
///
/// Only the receiver copies, so a stopped or killed peer delays nothing, and the queue pair may be destroyed between
/// two pieces. [`Process`] verifies the peer's identity.
#[derive(Debug)]
pub(super) struct CmaRead {
    of: Process,
    /// Next source address.
    from: u64,
    /// Remaining destinations: memory, offset, length.
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
