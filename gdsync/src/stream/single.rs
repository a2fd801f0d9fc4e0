//! Sends and waits that are submitted one by one. They need no batch: there is one operation, and one thing to take back.

use std::sync::Arc;

use super::prepared::{Asked, PreparedSend, PreparedWait};
use super::{Batch, Held, State, Stream, note_use};
use crate::nvtx::DOMAIN;
use crate::verbs::end::QueueEnd;
use crate::verbs::sq::{SendQueue, Sent};
use crate::verbs::{Completion, Qp, SendWr, Submitted};
use gdsync_device::error::{Error, Result};
use gdsync_device::recorder::Stage;
use gdsync_shm::reset;

impl Stream {
    /// Sends in stream order.
    ///
    /// # Errors
    /// As [`Batch::send`] and [`Stream::submit`].
    pub fn send<'q>(&self, qp: &'q Qp, wr: &SendWr<'_>) -> Result<Submitted<'q>> {
        // Each way by itself: what was sent stays in registers where it is short.
        let send = |state: &mut State| match qp.send.send_short(wr, self.0.id, !self.0.signals) {
            Some(sent) => self.trigger(state, &qp.send, sent),
            None => self.send_any(state, &qp.send, wr),
        };
        let tell = |end| qp.send.watch_foreseen(end);
        self.single(&qp.send.end, send, tell, |batch| batch.send(qp, wr))
    }

    #[cold]
    #[inline(never)]
    fn send_any<'q>(
        &self,
        state: &mut State,
        queue: &'q Arc<SendQueue>,
        wr: &SendWr<'_>,
    ) -> Result<(Submitted<'q>, u64)> {
        let sent = queue.send_any(wr, self.0.id, !self.0.signals)?;
        self.trigger(state, queue, sent)
    }

    /// Returns what was submitted, and up to where it will be rung.
    #[inline(always)]
    fn trigger<'q>(
        &self,
        state: &mut State,
        queue: &'q Arc<SendQueue>,
        sent: Sent,
    ) -> Result<(Submitted<'q>, u64)> {
        if !sent.is_told {
            self.tell_sent(queue, sent.sends.range.start);
        }
        let (source, bell) = (queue.end.source(), queue.bell());
        match self.0.engine.trigger(&mut state.turn, source, bell, sent.sends.ring()) {
            Ok(seq) => note_use(&mut state.used, &queue.end.qp, seq),
            Err(error) => return Err(self.refuse_send(queue, sent, error)),
        }
        Ok((Submitted::new(&queue.end, sent.sends.range.start), sent.sends.end))
    }

    #[cold]
    #[inline(never)]
    fn tell_sent(&self, queue: &SendQueue, n: u64) {
        queue.note(Stage::Submitted, n..n + 1, self.0.id);
    }

    #[cold]
    #[inline(never)]
    fn refuse_send(&self, queue: &Arc<SendQueue>, sent: Sent, why: Error) -> Error {
        PreparedSend::of(queue, sent.prepared(), queue.end.hold()).refuse(self.0.id);
        why
    }

    #[cold]
    #[inline(never)]
    fn refuse_wait(&self, end: &Arc<QueueEnd>, n: u64, why: Error) -> Error {
        PreparedWait::of((n, end.completion(n)), end.hold(), Asked::Next, Some(self.0.id)).refuse(self.0.id);
        why
    }

    /// Holds the stream until the next send completion of `qp`.
    ///
    /// # Errors
    /// As [`Batch::wait_send`] and [`Stream::submit`].
    pub fn wait_send<'q>(&self, qp: &'q Qp) -> Result<Submitted<'q>> {
        self.wait_single(&qp.send.end, |batch| batch.wait_send(qp))
    }

    /// Holds the stream until the next receive completion of `qp`.
    ///
    /// # Errors
    /// As [`Batch::wait_recv`] and [`Stream::submit`].
    pub fn wait_recv<'q>(&self, qp: &'q Qp) -> Result<Submitted<'q>> {
        self.wait_single(&qp.recv.end, |batch| batch.wait_recv(qp))
    }

    #[inline(always)]
    fn wait_single<'q>(
        &self,
        end: &'q Arc<QueueEnd>,
        add: impl FnOnce(&mut Batch) -> Result<Completion>,
    ) -> Result<Submitted<'q>> {
        let tell = |n| end.cq.attend_foreseen(n, self.0.nudger.as_ref());
        self.single(end, |state| self.wait_next(state, end), tell, add)
    }

    /// Returns what was submitted, and the completion that is waited for.
    #[inline(always)]
    fn wait_next<'q>(&self, state: &mut State, end: &'q Arc<QueueEnd>) -> Result<(Submitted<'q>, u64)> {
        let n = PreparedWait::claim_next(end, self.0.id, !self.0.signals)?;
        end.note_wait(Stage::WaitSubmitted, n, self.0.id);
        match self.0.engine.wait(&mut state.turn, end.source(), &end.cq.arrival(n), n) {
            Ok(seq) => note_use(&mut state.used, &end.qp, seq),
            Err(error) => return Err(self.refuse_wait(end, n, error)),
        }
        Ok((Submitted::new(end, n), n))
    }

    /// Does it by `put`, which says what the device foresees, and tells it by `tell` where a GPU does it; while the stream is being
    /// captured, in a batch.
    #[inline(always)]
    fn single<'q>(
        &self,
        end: &'q Arc<QueueEnd>,
        put: impl FnOnce(&mut State) -> Result<(Submitted<'q>, u64)>,
        tell: impl FnOnce(u64),
        add: impl FnOnce(&mut Batch) -> Result<Completion>,
    ) -> Result<Submitted<'q>> {
        let mut state = self.state()?;
        if state.recording.is_some() {
            return self.captured(state, add).map(|n| Submitted::new(end, n));
        }
        let _range = DOMAIN.range(c"submit");
        let done = reset::hand_over(end.hold(), || put(&mut state));
        state.end();
        let (submitted, foreseen) = done?;
        // The turn was let go.
        if !self.0.signals {
            tell(foreseen);
        }
        Ok(submitted)
    }

    #[cold]
    #[inline(never)]
    fn captured(&self, state: Held<'_>, add: impl FnOnce(&mut Batch) -> Result<Completion>) -> Result<u64> {
        drop(state);
        self.one(add).map(|completion| completion.index())
    }
}
