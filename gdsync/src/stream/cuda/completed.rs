//! What becomes of submissions that the GPU has completed.

use std::sync::atomic::{AtomicUsize, Ordering};

use super::shared::{Shared, State, Submission};
use crate::stream::op::Op;
use gdsync_device::recorder::By;

/// Submissions that are over, on their way to be dropped.
#[must_use = "to be dropped without the lock"]
pub(super) struct CompletedSubmissions<'s> {
    submissions: Vec<Submission>,
    /// Unless it is empty; dropped last.
    _counted: Option<Counted<'s>>,
}

/// It counts until it is dropped.
struct Counted<'s>(&'s AtomicUsize);

impl<'s> Counted<'s> {
    fn new(count: &'s AtomicUsize) -> Self {
        count.fetch_add(1, Ordering::Relaxed);
        Self(count)
    }
}

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Release);
    }
}

impl CompletedSubmissions<'_> {
    pub(super) fn nothing() -> Self {
        Self { submissions: Vec::new(), _counted: None }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.submissions.is_empty()
    }
}

/// Records that the stream has passed the waits of a submission.
fn note_passed(submission: &Submission) {
    for op in &submission.ops {
        if let Op::Await(source, n) = op {
            source.passed(*n, By::CudaStream);
        }
    }
    if let (more @ 1.., Some(Op::Await(source, n))) = (submission.more, submission.ops.last()) {
        (1..=more).for_each(|on| source.passed(n + on, By::CudaStream));
    }
}

impl Shared {
    /// Takes out of the queue what the GPU has completed; to be dropped without the lock.
    pub(super) fn retire(&self, state: &mut State) -> CompletedSubmissions<'_> {
        let completed = self.completed();
        if state.queue.front().is_none_or(|first| first.seq > completed) {
            return CompletedSubmissions::nothing();
        }
        let over = state.queue.partition_point(|submission| submission.seq <= completed);
        let submissions: Vec<_> = state.queue.drain(..over).collect();
        for submission in &submissions {
            note_passed(submission);
            state.calls -= submission.calls;
            state.host_fns -= submission.host_fns;
        }
        CompletedSubmissions { submissions, _counted: Some(Counted::new(&self.retiring)) }
    }

    /// Whether nothing is held any more for what the GPU has completed.
    pub(super) fn has_let_go(&self) -> bool {
        let mut state = self.lock();
        let done = self.retire(&mut state);
        drop(state);
        drop(done);
        self.retiring.load(Ordering::Acquire) == 0
    }
}
