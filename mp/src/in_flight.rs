//! The in-flight list of a queue: its operations that are not complete, oldest first, and the registrations they pin.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use gdsync::verbs::{Completion, Keeper};
use smallvec::SmallVec;

use crate::registration::Piece;

/// Which of the two queues of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Direction {
    Send = 0,
    Recv = 1,
}

/// An operation that was posted to a queue pair.
#[derive(Debug)]
pub(crate) struct InFlightOp {
    pub(crate) direction: Direction,
    /// Its name in errors.
    pub(crate) operation: &'static str,
    pub(crate) completion: Completion,
    /// Work requests that it takes in the queue: the one of the completion and those right before it.
    wqes: usize,
    /// Bytes sent.
    bytes: usize,
    /// Bytes of a success, kept from before the queue forgets it; [`UNKNOWN`] until then.
    kept_bytes: AtomicU64,
}

const UNKNOWN: u64 = u64::MAX;

impl InFlightOp {
    pub(crate) fn new(
        direction: Direction,
        operation: &'static str,
        completion: Completion,
        wqes: usize,
        bytes: usize,
    ) -> Arc<Self> {
        let kept_bytes = AtomicU64::new(UNKNOWN);
        Arc::new(Self { direction, operation, completion, wqes, bytes, kept_bytes })
    }

    /// The index of its last work request in the queue.
    #[inline]
    pub(crate) fn index(&self) -> u64 {
        self.completion.index()
    }

    fn kept(&self) -> Option<usize> {
        let bytes = self.kept_bytes.load(Ordering::Relaxed);
        usize::try_from(bytes).ok().filter(|_| bytes != UNKNOWN)
    }

    /// Bytes sent or received, or `None` while it is under way.
    ///
    /// # Errors
    /// Why it failed.
    pub(crate) fn outcome(&self) -> gdsync::Result<Option<usize>> {
        match self.completion.status() {
            Ok(wc) => Ok(wc.map(|wc| if wc.is_send() { self.bytes } else { wc.byte_len as usize })),
            // The queue forgets successes; this one was kept.
            Err(gdsync::Error::Forgotten { .. }) if self.kept().is_some() => Ok(self.kept()),
            Err(error) => Err(error),
        }
    }

    /// Whether it is over. Keeps the length of a success, which the queue may forget.
    pub(crate) fn keep_outcome(&self) -> bool {
        match self.outcome() {
            Ok(None) => false,
            Ok(Some(bytes)) => {
                self.kept_bytes.store(bytes as u64, Ordering::Relaxed);
                true
            }
            // The queue pair is broken, and stays so.
            Err(_) => true,
        }
    }
}

/// Registrations that an operation pins: mostly one.
pub(crate) type Pins = SmallVec<[Keeper; 1]>;

/// Pins the buffers of a message with one of the devices.
pub(crate) fn pin(pieces: &[Piece<'_>], intra_host: bool) -> Pins {
    pieces.iter().map(|(buffer, _)| buffer.mr(intra_host).keeper()).collect()
}

/// Operations under way in one queue, in its order: the oldest leave before the queue forgets them.
#[derive(Debug, Default)]
pub(crate) struct InFlight {
    ops: VecDeque<(Arc<InFlightOp>, Pins)>,
    wqes: usize,
}

impl InFlight {
    /// Work requests that the operations take in the queue.
    pub(crate) fn wqes(&self) -> usize {
        self.wqes
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.ops.is_empty()
    }

    pub(crate) fn newest(&self) -> Option<&Arc<InFlightOp>> {
        self.ops.back().map(|(op, _)| op)
    }

    /// All operations, oldest first.
    pub(crate) fn ops(&self) -> impl Iterator<Item = &Arc<InFlightOp>> {
        self.ops.iter().map(|(op, _)| op)
    }

    pub(crate) fn push(&mut self, op: Arc<InFlightOp>, pins: Pins) {
        self.wqes += op.wqes;
        self.ops.push_back((op, pins));
    }

    /// Removes the newest operations that were taken back, by dropping their batch.
    pub(crate) fn drop_taken_back(&mut self) {
        while let Some((op, _)) = self.ops.pop_back_if(|(op, _)| op.completion.is_taken_back()) {
            self.wqes -= op.wqes;
        }
    }

    /// Removes what is complete, and keeps its outcome.
    pub(crate) fn retire(&mut self) {
        while let Some((op, _)) = self.ops.pop_front_if(|(op, _)| op.keep_outcome()) {
            self.wqes -= op.wqes;
        }
    }

    /// Somebody has seen that `op` is complete: so are those before it.
    pub(crate) fn retire_until(&mut self, op: &InFlightOp) {
        if self.ops.front().is_some_and(|(oldest, _)| oldest.index() <= op.index()) {
            self.retire();
        }
    }
}

#[cfg(test)]
mod tests;
