//! Sends and waits that are submitted one by one. They need no batch: there is one operation, and one thing to take back.

use std::sync::Arc;

use super::prepared::{Asked, PreparedSend, PreparedWait};
use super::{Batch, State, Stream, note_use};
use crate::error::Result;
use crate::nvtx::DOMAIN;
use crate::recorder::Stage;
use crate::verbs::end::QueueEnd;
use crate::verbs::{Completion, Qp, SendWr};

impl Stream {
    /// Sends in stream order.
    ///
    /// # Errors
    /// As [`Batch::send`] and [`Stream::submit`].
    pub fn send(&self, qp: &Qp, wr: &SendWr<'_>) -> Result<Completion> {
        let send = |state: &mut State| {
            let queue = &qp.send;
            let sent = queue.prepare_one(wr, self.0.id)?;
            if !sent.is_told {
                queue.note(Stage::Submitted, sent.sends.range.clone(), self.0.id);
            }
            let (source, bell) = (queue.end.source(), queue.bell());
            match self.0.engine.trigger(&mut state.turn, source, bell, sent.sends.ring()) {
                Ok(seq) => note_use(&mut state.used, &queue.end.qp, seq),
                Err(error) => {
                    PreparedSend::of(queue, sent.prepared()).refuse(self.0.id);
                    return Err(error);
                }
            }
            if !self.0.signals {
                queue.watch(&sent.sends);
            }
            Ok(queue.end.completion(sent.sends.range.start))
        };
        self.single(send, |batch| batch.send(qp, wr))
    }

    /// Holds the stream until the next send completion of `qp`.
    ///
    /// # Errors
    /// As [`Batch::wait_send`] and [`Stream::submit`].
    pub fn wait_send(&self, qp: &Qp) -> Result<Completion> {
        self.single(|state| self.wait_next(state, &qp.send.end), |batch| batch.wait_send(qp))
    }

    /// Holds the stream until the next receive completion of `qp`.
    ///
    /// # Errors
    /// As [`Batch::wait_recv`] and [`Stream::submit`].
    pub fn wait_recv(&self, qp: &Qp) -> Result<Completion> {
        self.single(|state| self.wait_next(state, &qp.recv.end), |batch| batch.wait_recv(qp))
    }

    #[inline(always)]
    fn wait_next(&self, state: &mut State, end: &Arc<QueueEnd>) -> Result<Completion> {
        let n = PreparedWait::claim_next(end, self.0.id)?;
        let claim = end.completion(n);
        claim.note_wait(Stage::WaitSubmitted, self.0.id);
        match self.0.engine.wait(&mut state.turn, end.source(), &end.cq.arrival(n), n) {
            Ok(seq) => note_use(&mut state.used, &end.qp, seq),
            Err(error) => {
                PreparedWait::of((n, claim), Asked::Next, Some(self.0.id)).refuse(self.0.id);
                return Err(error);
            }
        }
        if !self.0.signals {
            end.cq.attend(n, self.0.engine.kicker());
        }
        Ok(claim)
    }

    /// Does it by `put`; while the stream is being captured, in a batch.
    #[inline(always)]
    fn single<T>(
        &self,
        put: impl FnOnce(&mut State) -> Result<T>,
        add: impl FnOnce(&mut Batch) -> Result<T>,
    ) -> Result<T> {
        let mut state = self.state()?;
        if state.recording.is_some() {
            drop(state);
            return self.one(add);
        }
        let _range = DOMAIN.range(c"submit");
        let done = put(&mut state);
        state.end();
        done
    }
}
