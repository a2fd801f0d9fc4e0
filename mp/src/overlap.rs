//! The memory of outstanding receives: messages of two that overlap would overwrite each other.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use parking_lot::Mutex;
use smallvec::SmallVec;

use crate::error::{Error, Result};
use crate::registration::{Piece, Registration};

/// The memory of the outstanding receives of a communicator, by address: disjoint ranges.
#[derive(Debug, Default)]
pub(crate) struct OutstandingReceives(Mutex<BTreeMap<u64, Outstanding>>);

/// The memory of one receive, or of a piece of it.
#[derive(Debug)]
struct Outstanding {
    end: u64,
    /// `None` for any rank.
    rank: Option<usize>,
    /// Its first byte in the registration that it was given with.
    offset: usize,
}

/// A range of memory that only one receive may write. Dropping it frees the range.
#[derive(Debug)]
pub(crate) struct ReceiveClaim {
    all: Arc<OutstandingReceives>,
    start: u64,
}

/// Of the pieces of a receive: mostly one.
pub(crate) type ReceiveClaims = SmallVec<[ReceiveClaim; 1]>;

impl Drop for ReceiveClaim {
    fn drop(&mut self) {
        self.all.0.lock().remove(&self.start);
    }
}

impl OutstandingReceives {
    /// Claims the memory of a receive. Before it refuses, `complete` is called with the rank of each receive that is in the way, to
    /// release those that are complete. The pieces lie inside their buffers.
    ///
    /// # Errors
    /// [`Error::OverlappingReceives`].
    pub(crate) fn claim(
        self: &Arc<Self>,
        pieces: &[Piece<'_>],
        rank: Option<usize>,
        complete: impl Fn(Option<usize>),
    ) -> Result<ReceiveClaims> {
        let mut claims = ReceiveClaims::new();
        for (buffer, range) in pieces.iter().filter(|(_, range)| !range.is_empty()) {
            let start = buffer.memory().addr() + range.start as u64;
            let mut refused = None;
            while let Err((at, error)) = self.try_claim(start, range, rank) {
                if refused.replace(at) == Some(at) {
                    return Err(error);
                }
                let Error::OverlappingReceives { other_rank, .. } = error else { return Err(error) };
                complete(other_rank);
            }
            claims.push(ReceiveClaim { all: self.clone(), start });
        }
        Ok(claims)
    }

    /// Claims one range, or returns the address of one in the way, and the error.
    fn try_claim(
        &self,
        start: u64,
        range: &Range<usize>,
        rank: Option<usize>,
    ) -> std::result::Result<(), (u64, Error)> {
        let end = start + range.len() as u64;
        let mut all = self.0.lock();
        if let Some((&at, other)) = all.range(..end).next_back()
            && other.end > start
        {
            let len = usize::try_from(other.end - at).expect("it is the length of a range");
            let other_range = other.offset..other.offset + len;
            let (range, other_rank) = (range.clone(), other.rank);
            return Err((at, Error::OverlappingReceives { rank, range, other_rank, other_range }));
        }
        all.insert(start, Outstanding { end, rank, offset: range.start });
        Ok(())
    }
}

/// Whether two pieces have bytes in common.
pub(crate) fn overlap((one, range): &Piece<'_>, (other, other_range): &Piece<'_>) -> bool {
    let at = |buffer: &Registration, offset| buffer.memory().addr().saturating_add(offset as u64);
    !range.is_empty()
        && !other_range.is_empty()
        && at(one, range.start) < at(other, other_range.end)
        && at(other, other_range.start) < at(one, range.end)
}
