//! Pool of link mappings.
//!
//! Threads without the lock may read the rings of a link that was just removed. Its mapping therefore stays and is
//! remapped: to zero pages at first, later to the file of another link.

use std::os::fd::BorrowedFd;
use std::sync::Arc;

use parking_lot::Mutex;

use super::ring::Peek;
use gdsync_device::error::Result;
use gdsync_device::memory::Memory;

/// Mappings of an HCA, as many as it ever had links at once. Clones share them.
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

/// A mapping of a link's file; returns to the pool on drop.
#[derive(Debug)]
pub(super) struct Span {
    place: Place,
    spans: Spans,
}

impl Spans {
    /// Maps `len` bytes of a link's file. All files of an HCA have the same length.
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
    /// Slot number, counted from 0.
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
            // Leaked: its content is unknown.
            Err(error) => {
                tracing::warn!(%error, "software HCA: memory of a closed link leaks")
            }
        }
    }
}
