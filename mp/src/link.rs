//! The connection to one rank: the queue pair of the messages, the credits beside it, and whether the rank is there.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use gdsync::memory::Word32;
use gdsync::mlx5::{Opcode, Syndrome};
use gdsync::stream::{Batch, Cond, PreparedSend, Stream};
use gdsync::verbs::{Completion, CompletionError, Cq, MrGuard, Qp, SendWr, Sge};
use parking_lot::Mutex;

use crate::credit::{Credits, low32};
use crate::ends::Ends;
use crate::peer::Way;
use crate::slots::{Receive, Slots};

/// How long a rank may be silent before a wait asks whether it is there.
pub(crate) const SILENCE: Duration = Duration::from_millis(250);

/// What stays registered, by its key.
pub(crate) type Keepers = HashMap<u32, MrGuard>;

/// The connection to one rank.
#[derive(Debug)]
pub(crate) struct Link {
    pub(crate) rank: usize,
    /// Through the device for ranks of the same host.
    pub(crate) near: bool,
    pub(crate) ends: Ends,
    /// Messages that can be under way in each direction.
    pub(crate) depth: usize,
    /// Pieces that one may have.
    pub(crate) pieces: usize,
    pub(crate) credits: Credits,
    /// Beside the queue pair, for short messages of the CPU.
    pub(crate) slots: Option<Slots>,
    ended: AtomicBool,
    given_up: AtomicBool,
    /// The connections of windows and channels to the same rank.
    others: Mutex<Vec<Weak<Ends>>>,
    /// Of channels that were dropped here, and perhaps not by the rank yet; and what they still send.
    retired: Mutex<Vec<(Qp, Keepers)>>,
}

/// What a link has room for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Most {
    /// Messages in each direction.
    pub(crate) depth: usize,
    /// Pieces of a message.
    pub(crate) pieces: usize,
}

impl Link {
    pub(crate) fn new(
        rank: usize,
        near: bool,
        ends: Ends,
        most: Most,
        credits: Credits,
        slots: Option<Slots>,
    ) -> Self {
        let [ended, given_up] = [false; 2].map(AtomicBool::new);
        let (others, retired) = (Mutex::default(), Mutex::default());
        let Most { depth, pieces } = most;
        Self { rank, near, ends, depth, pieces, credits, slots, ended, given_up, others, retired }
    }

    /// Where messages of one direction complete.
    pub(crate) fn queue(&self, way: Way) -> Cq {
        match way {
            Way::Send => self.ends.send.send_cq(),
            Way::Recv => self.ends.recv.recv_cq(),
        }
    }

    /// Whether the rank can be reached, as far as is known.
    ///
    /// # Errors
    /// What ended the connection first.
    pub(crate) fn check(&self) -> gdsync::Result<()> {
        self.ends.send.check()?;
        self.ends.recv.check()
    }

    /// The number, from 1, of the message that the CPU has just put at this place of the queue, among those that were sent and
    /// not taken back.
    pub(crate) fn number_among_sent(&self, place: u64) -> u32 {
        low32((place + 1).wrapping_sub(self.ends.send.send_gaps()))
    }

    /// Sends a message by the CPU. Returns its place in the queue.
    #[inline]
    pub(crate) fn send(&self, sges: &[Sge]) -> gdsync::Result<u64> {
        let place = self.ends.send.post_send_index(&[SendWr::send(sges)])?;
        // The CPU does not wait for the receive: the device does, by asking again.
        self.credits.count(place, self.depth);
        Ok(place)
    }

    /// Adds a message to a batch.
    pub(crate) fn send_in_batch(&self, batch: &mut Batch, sges: &[Sge]) -> gdsync::Result<Completion> {
        let send = self.prepare_send(sges)?;
        let credit = self.credits.next(send.completion().index(), self.depth);
        Ok(post_behind(batch, credit, send))
    }

    /// Prepares a send that a stream starts.
    pub(crate) fn prepare_send(&self, sges: &[Sge]) -> gdsync::Result<PreparedSend> {
        let prepare = || self.ends.send.prepare_send(&[SendWr::send(sges)]);
        match &self.slots {
            Some(slots) => slots.send_other(prepare),
            None => prepare(),
        }
    }

    /// Adds a message that was prepared before to a batch.
    pub(crate) fn post_in_batch(&self, batch: &mut Batch, send: PreparedSend) -> Completion {
        post_behind(batch, self.credits.post(send.completion().index(), self.depth), send)
    }

    /// Takes what has come through slots. Returns whether receives wait for more.
    pub(crate) fn take(&self) -> bool {
        self.slots.as_ref().is_some_and(|slots| slots.take(self, true))
    }

    /// As [`Link::take`], and lets go of what is complete.
    pub(crate) fn recycle_slots(&self) -> bool {
        self.slots.as_ref().is_some_and(|slots| slots.recycle(self))
    }

    /// What came of a receive that is kept for slots, if the connection has ended: behind an error nothing is written to it.
    ///
    /// # Errors
    /// What ended the connection.
    pub(crate) fn outcome_at_end(&self, receive: &Receive) -> gdsync::Result<Option<usize>> {
        let Err(error) = self.check() else { return Ok(None) };
        // Takes what has come, and lets go of the other receives.
        self.recycle_slots();
        match receive.outcome()? {
            None if receive.is_kept() => Err(error),
            known => Ok(known),
        }
    }

    /// As [`Link::take`], by the watching thread.
    pub(crate) fn watch(&self) -> bool {
        self.slots.as_ref().is_some_and(|slots| slots.watch(self))
    }

    /// Asks whether the rank is still there, if it has been silent: a receive alone would never learn it.
    pub(crate) fn tend(&self) {
        let there = self.check().and_then(|()| self.is_refused()).and_then(|()| self.credits.tend(SILENCE));
        if let Err(error) = there {
            self.fail(&error);
        }
    }

    /// Whether the rank has refused a message that it got through a slot.
    fn is_refused(&self) -> gdsync::Result<()> {
        if self.slots.as_ref().is_some_and(Slots::is_refused) {
            let (qpn, operation) = (self.ends.send.qpn(), Some(Opcode::SEND));
            let syndrome = Syndrome::REM_INV_REQ_ERR;
            return Err(CompletionError { qpn, wr_id: 0, operation, syndrome, vendor: 0 }.into());
        }
        Ok(())
    }

    /// Ends the connection if the rank has refused a message that it got through a slot.
    pub(crate) fn end_if_refused(&self) {
        if let Err(error) = self.is_refused() {
            self.fail(&error);
        }
    }

    /// Ends the connection of a window or a channel when this one does.
    pub(crate) fn accompany(&self, ends: &Arc<Ends>) {
        let mut others = self.others.lock();
        others.retain(|ends| ends.strong_count() > 0);
        others.push(Arc::downgrade(ends));
        drop(others);
        if self.ended.load(Ordering::Relaxed)
            && let Err(error) = self.check()
        {
            ends.stop(&error);
        }
    }

    /// Keeps a queue pair that has little left to do but to answer.
    pub(crate) fn retire(&self, qp: &Qp, sends: Keepers) {
        self.retired.lock().push((qp.clone(), sends));
    }

    fn others(&self) -> Vec<Arc<Ends>> {
        self.others.lock().iter().filter_map(Weak::upgrade).collect()
    }

    /// Whether streams wait for the rank at connections beside this one.
    pub(crate) fn is_awaited_beside(&self) -> bool {
        self.others().iter().any(|ends| ends.is_awaited())
    }

    /// Ends the connection as the program wants.
    pub(crate) fn give_up(&self) {
        self.given_up.store(true, Ordering::Relaxed);
        self.fail(&gdsync::Error::GivenUp);
    }

    /// Whether it is known to have ended: [`Link::check`] says why.
    pub(crate) fn is_ended(&self) -> bool {
        self.ends.send.is_broken()
    }

    pub(crate) fn is_given_up(&self) -> bool {
        self.given_up.load(Ordering::Relaxed)
    }

    /// Ends the connection: all that is under way ends with this error, unless it has one of its own.
    pub(crate) fn fail(&self, error: &gdsync::Error) {
        if self.ended.swap(true, Ordering::Relaxed) {
            return;
        }
        self.ends.stop(error);
        if let Some(slots) = &self.slots {
            slots.shut();
        }
        self.credits.end(error);
        self.others().iter().for_each(|ends| ends.stop(error));
    }
}

/// Why graphs have no messages of a communicator, and what they can have.
const ONLY_ONCE: (&str, &str) =
    ("a message of a communicator, which is counted once", "send and receive through an mp::Channel");

/// Marks a batch that has to do with a message of a communicator: no graph can repeat it.
pub(crate) fn only_once(batch: &mut Batch) {
    let (what, fix) = ONLY_ONCE;
    batch.only_once(what, fix);
}

/// Refuses a message of a communicator on a stream that is being captured.
pub(crate) fn refuse_in_capture(stream: &Stream) -> gdsync::Result<()> {
    let (what, fix) = ONLY_ONCE;
    stream.refuse_in_capture(what, fix)
}

/// Adds a send to a batch, behind the wait for its receive if that is not posted yet.
fn post_behind(batch: &mut Batch, credit: Option<(&Word32, u32)>, send: PreparedSend) -> Completion {
    only_once(batch);
    if let Some((word, number)) = credit {
        batch.wait_value32(word, number, Cond::Geq);
    }
    batch.post(send)
}
