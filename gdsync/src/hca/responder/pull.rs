//! Payload in host memory of the peer's process: read from there, a piece in each step, so that nobody waits long for the HCA.

use std::io;
use std::time::{Duration, Instant};

use smallvec::SmallVec;

use crate::memory::{Memory, Process};

/// Bytes of a piece: 20 to 50 us.
const PIECE: usize = 512 << 10;

/// A copy under way.
#[derive(Debug)]
pub(super) struct Pull {
    of: Process,
    /// What comes next there.
    from: u64,
    /// Where the rest goes: memory, first byte, length.
    to: SmallVec<[(Memory, usize, usize); 1]>,
    began: Option<Instant>,
}

impl Pull {
    pub(super) fn new(of: Process, from: u64, to: SmallVec<[(Memory, usize, usize); 1]>) -> Self {
        Self { of, from, to, began: None }
    }

    /// Copies the next piece. Returns how long it all took when it was the last.
    pub(super) fn go_on(&mut self) -> io::Result<Option<Duration>> {
        let began = *self.began.get_or_insert_with(Instant::now);
        let mut left = PIECE;
        while let Some((memory, at, len)) = self.to.first_mut().filter(|_| left > 0) {
            let take = left.min(*len);
            memory.pull(*at, take, &self.of, self.from)?;
            self.from += take as u64;
            left -= take;
            (*at, *len) = (*at + take, *len - take);
            if *len == 0 {
                self.to.remove(0);
            }
        }
        Ok(self.to.is_empty().then(|| began.elapsed()))
    }
}
