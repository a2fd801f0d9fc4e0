//! Places in the address space for the rings of links.
//!
//! Whether packets wait is seen without a lock, also by threads that have not heard yet that a link is gone. So the place of
//! its rings stays mapped: from then on it shows nothing, and later the rings of another link.

use std::os::fd::BorrowedFd;
use std::sync::Arc;

use parking_lot::Mutex;

use super::ring::Peek;
use gdsync_device::error::Result;
use gdsync_device::memory::Memory;

/// The places of an HCA, as many as it ever had links at a time. Clones share them.
#[derive(Clone, Debug, Default)]
pub(super) struct Spans(Arc<Mutex<Pool>>);

#[derive(Debug, Default)]
struct Pool {
    free: Vec<Place>,
    made: usize,
}

#[derive(Clone, Debug)]
struct Place {
    number: usize,
    memory: Memory,
    peek: Arc<Peek>,
}

/// A place that shows the file of a link. It is given back when this is dropped.
#[derive(Debug)]
pub(super) struct Span {
    place: Place,
    spans: Spans,
}

impl Spans {
    /// Maps `len` bytes of a shared memory file; all files of an HCA are of the same length.
    pub(super) fn map(&self, file: BorrowedFd<'_>, len: usize) -> Result<Arc<Span>> {
        let known = self.0.lock().free.pop();
        let place = match known {
            Some(place) => {
                if let Err(error) = place.memory.show(Some(file)) {
                    self.0.lock().free.push(place);
                    return Err(error);
                }
                place
            }
            None => {
                let memory = Memory::map_shared(file, len)?;
                let mut pool = self.0.lock();
                pool.made += 1;
                Place { number: pool.made - 1, peek: Arc::new(Peek::into(memory.clone())), memory }
            }
        };
        Ok(Arc::new(Span { place, spans: self.clone() }))
    }
}

impl Span {
    /// Counted from 0, the same for every link in this place.
    pub(super) fn number(&self) -> usize {
        self.place.number
    }

    pub(super) fn memory(&self) -> &Memory {
        &self.place.memory
    }

    pub(super) fn peek(&self) -> &Arc<Peek> {
        &self.place.peek
    }
}

impl Drop for Span {
    fn drop(&mut self) {
        match self.place.memory.show(None) {
            Ok(()) => self.spans.0.lock().free.push(self.place.clone()),
            // Nobody gets it then.
            Err(error) => {
                tracing::warn!(%error, "software HCA: the memory of a link that is gone is not freed")
            }
        }
    }
}
