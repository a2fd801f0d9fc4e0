//! Sending through slots.

use std::sync::Arc;

use gdsync::protocol::slots::Sender;

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
        let memory = buffer.memory();
        if memory.gpu().is_some() || !memory.is_mapped() {
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
        if outbox.last.as_ref().is_some_and(|last| !matches!(last.outcome(), Ok(None))) {
            outbox.last = None;
        }
        Some((len, outbox.last.clone()))
    }

    /// Sends a message the other way by `post`. It must not be called by two threads at a time.
    pub(crate) fn send_other<T>(&self, post: impl FnOnce() -> gdsync::Result<T>) -> gdsync::Result<T> {
        let sent = self.outbox.lock().side.begin(&self.tx);
        let posted = post();
        let mut outbox = self.outbox.lock();
        match &posted {
            Ok(_) => {
                outbox.run = 0;
                self.tx.set_run(0);
            }
            Err(_) => outbox.side.undo(&self.tx, sent),
        }
        posted
    }

    /// As [`Slots::send_other`], and `post` is by the CPU and returns the message's number among those that took this way.
    pub(crate) fn send_counted<T>(
        &self,
        pieces: &[Piece<'_>],
        post: impl FnOnce() -> gdsync::Result<(T, u32)>,
    ) -> gdsync::Result<T> {
        let run = self.outbox.lock().run;
        let (posted, number) = self.send_other(post)?;
        let mut outbox = self.outbox.lock();
        outbox.side.count(&self.tx, number);
        outbox.run = fitting(pieces).map_or(0, |_| run.saturating_add(1));
        self.tx.set_run(outbox.run);
        Ok(posted)
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
