//! Sending through slots.

use std::sync::Arc;

use gdsync::protocol::shm_fifo::Sender;

use super::Slots;
use super::region::{LONGEST, Region};
use crate::peer::Piece;
use crate::request::Order;

/// Looks, for some microseconds, whether the receiver makes room: it is often just about to.
const LOOKS: u32 = 1000;

/// The sender's side.
#[derive(Debug, Default)]
pub(super) struct Outbox {
    side: Sender,
    /// Messages in a row that could have taken slots.
    run: u32,
    /// The last that did not, while it may be under way.
    last: Option<Arc<Order>>,
    /// How many did.
    pub(super) count: u64,
}

/// Bytes of a message that the CPU could copy into a slot; `None` for any other.
pub(crate) fn fitting(pieces: &[Piece<'_>]) -> Option<usize> {
    let mut len = 0_usize;
    for (buffer, range) in pieces {
        if !buffer.memory().is_host() {
            return None;
        }
        len = len.checked_add(range.len())?;
    }
    (len <= LONGEST).then_some(len)
}

impl Slots {
    /// Sends a message through a slot, if it can now. Returns its length, and the send before it if that is under way: they are
    /// complete in this order. The pieces lie inside their buffers.
    #[inline]
    pub(crate) fn send(&self, pieces: &[Piece<'_>]) -> Option<(usize, Option<Arc<Order>>)> {
        let len = fitting(pieces)?;
        let mut outbox = self.outbox.lock();
        let number = outbox.side.claim(&self.tx, Region::room(len), LOOKS)?;
        let mut to = Region::body(number, len);
        for (buffer, range) in pieces {
            let copied = self.tx.0.copy_from(to, buffer.memory(), range.start, range.len());
            copied.expect("the piece was checked, and the message fits");
            to += range.len();
        }
        outbox.side.publish(&self.tx, number, u32::try_from(len).expect("at most a page"));
        outbox.count += 1;
        if outbox.last.is_some() {
            outbox.forget_last();
        }
        Some((len, outbox.last.clone()))
    }

    /// Sends a message the other way by `post`. It must not be called by two threads at a time.
    pub(crate) fn send_other<T>(&self, post: impl FnOnce() -> gdsync::Result<T>) -> gdsync::Result<T> {
        self.begin(0, || Ok((post()?, None)))
    }

    /// As [`Slots::send_other`], and `post` is by the CPU and returns the message's number among those that took this way.
    pub(crate) fn send_counted<T>(
        &self,
        pieces: &[Piece<'_>],
        post: impl FnOnce() -> gdsync::Result<(T, u32)>,
    ) -> gdsync::Result<T> {
        let step = u32::from(fitting(pieces).is_some());
        self.begin(step, || post().map(|(posted, number)| (posted, Some(number))))
    }

    /// Sends a message the other way; `step` is 1 if it could have taken a slot, and 0 if not.
    fn begin<T>(
        &self,
        step: u32,
        post: impl FnOnce() -> gdsync::Result<(T, Option<u32>)>,
    ) -> gdsync::Result<T> {
        let mut outbox = self.outbox.lock();
        let was_uncertain = outbox.side.begin(&self.tx);
        match post() {
            Ok((posted, number)) => {
                if let Some(number) = number {
                    outbox.side.count(&self.tx, number);
                }
                outbox.run = outbox.run.saturating_add(step) * step;
                self.tx.set_run(outbox.run);
                Ok(posted)
            }
            Err(error) => {
                outbox.side.undo(&self.tx, was_uncertain);
                Err(error)
            }
        }
    }

    /// Nothing is sent any more, nor received: lets go of messages of the queue pair, each of which holds the connection.
    pub(crate) fn forget_orders(&self) {
        self.outbox.lock().last = None;
        self.forget_receives();
    }

    /// What was sent the other way last.
    pub(crate) fn sent(&self, order: &Arc<Order>) {
        self.outbox.lock().last = Some(order.clone());
    }

    /// Whether the receiver has refused a message.
    pub(crate) fn is_refused(&self) -> bool {
        Sender::is_broken(&self.tx)
    }
}

impl Outbox {
    /// Forgets what was sent the other way last once it is complete.
    #[cold]
    fn forget_last(&mut self) {
        self.last.take_if(|last| !matches!(last.outcome(), Ok(None)));
    }
}
