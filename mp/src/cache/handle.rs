//! What the cache hands out.

use std::fmt;
use std::ops::{Deref, Range};
use std::sync::Arc;

use super::index::Entry;
use crate::communicator::Registration;

/// A [`Registration`] of the range that was asked for, from the cache. What it was registered for stays so in the cache when
/// the last clone and the last message of it are gone.
pub struct Cached {
    entry: Arc<Entry>,
    /// The range as a part of the entry's, unless it is all of that. In a box, as moving it costs more than a hit.
    part: Option<Box<Registration>>,
}

impl Cached {
    /// A handle of a range within an entry, whose memory is proved to be the entry's.
    #[inline]
    pub(super) fn new(entry: Arc<Entry>, range: &Range<u64>) -> gdsync::Result<Self> {
        let part = if *range == entry.range { None } else { Some(Box::new(entry.part(range)?)) };
        entry.count_handle(1);
        Ok(Self { entry, part })
    }
}

impl Deref for Cached {
    type Target = Registration;

    fn deref(&self) -> &Registration {
        self.part.as_deref().unwrap_or(&self.entry.registration)
    }
}

impl Clone for Cached {
    fn clone(&self) -> Self {
        self.entry.count_handle(1);
        Self { entry: self.entry.clone(), part: self.part.clone() }
    }
}

impl Drop for Cached {
    fn drop(&mut self) {
        self.entry.count_handle(-1);
    }
}

impl fmt::Debug for Cached {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Cached({:?})", self.memory())
    }
}
