//! Receiving through slots.
//!
//! While slots are open a receive is only kept here. What the slots end with has its receive here, too; those behind it are
//! posted to the queue pair, in order: bound.

use std::collections::VecDeque;
use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock};
use std::thread::yield_now;
use std::time::Duration;

use gdsync::mlx5::Syndrome;
use gdsync::protocol::slots::{Next, Receiver};
use gdsync::verbs::{Completion, CompletionError, RecvWr, Sge};
use parking_lot::MutexGuard;

use super::Slots;
use super::region::{LONGEST, Region};
use crate::communicator::Registration;
use crate::deadline::Deadline;
use crate::few::Few;
use crate::link::Link;
use crate::peer::{DRAIN, Piece, Way};

/// Messages in a row that could take slots before they do; more after each change that was not for patience.
const FEW: u32 = 32;
const MANY: u32 = 512;

/// Looks of the watching thread, a millisecond apart, in which nothing comes: then receives are bound, and it may sleep.
const LOOKS: u32 = 50;

/// How long a message that was claimed may take to be there: its sender is in the middle of copying it.
const CLAIMED: Duration = Duration::from_secs(5);

/// A receive, as its request has it.
#[derive(Debug)]
pub(crate) struct Receive {
    /// What came of it.
    outcome: OnceLock<gdsync::Result<usize>>,
    /// In the queue, if it was bound.
    bound: OnceLock<Completion>,
}

impl Receive {
    /// The bytes that came, or `None` while it is under way.
    pub(crate) fn outcome(&self) -> gdsync::Result<Option<usize>> {
        if let Some(outcome) = self.outcome.get() {
            return outcome.clone().map(Some);
        }
        let Some(completion) = self.bound.get() else { return Ok(None) };
        match completion.status() {
            Err(gdsync::Error::Forgotten { .. }) if self.outcome.get().is_some() => self.outcome(),
            status => Ok(status?.map(|wc| wc.byte_len as usize)),
        }
    }

    /// Its place in the queue, if it was bound.
    pub(crate) fn bound(&self) -> Option<&Completion> {
        self.bound.get()
    }

    pub(crate) fn is_known(&self) -> bool {
        self.outcome.get().is_some()
    }
}

/// A receive that is not posted.
#[derive(Debug)]
struct Kept {
    receive: Arc<Receive>,
    buffers: Buffers,
}

/// Where bytes go: memory, and offset and length in it.
type Buffers = Few<(Registration, usize, usize)>;

/// The receiver's side.
#[derive(Debug)]
pub(super) struct Inbox {
    side: Receiver,
    /// Those not posted, oldest first: the next message is for the first of them.
    kept: VecDeque<Kept>,
    /// Those posted, and their buffers, oldest first.
    bound: VecDeque<Kept>,
    /// Receives in a row that could be filled by the CPU.
    run: u32,
    /// Length of a run behind which slots open.
    wanted: u32,
    /// The message that was next when they opened last.
    opened: u64,
    /// The message that was next when the watching thread looked, and how often it was the same.
    idle: (u64, u32),
}

impl Default for Inbox {
    fn default() -> Self {
        let (kept, bound) = <_>::default();
        Self { side: Receiver::default(), kept, bound, run: 0, wanted: FEW, opened: 0, idle: (0, 0) }
    }
}

impl Inbox {
    /// Receives under way.
    fn len(&self) -> usize {
        self.kept.len() + self.bound.len()
    }

    /// Whether the message for one more receive is in a slot, or will be.
    fn is_next_here(&self) -> bool {
        let number = self.side.next() + self.kept.len() as u64;
        self.side.end().is_none_or(|end| number < end)
    }

    /// Slots are closed for a reason that is likely to come again.
    fn be_slower(&mut self) {
        let taken = self.side.next() - self.opened;
        let wanted = if taken / 16 > u64::from(self.wanted) { FEW } else { self.wanted * 2 };
        (self.run, self.wanted) = (0, wanted.min(MANY));
    }
}

impl Slots {
    /// Whether the message for one more receive seems to come through a slot.
    #[inline]
    pub(crate) fn may_receive(&self) -> bool {
        self.is_next_here.load(Ordering::Relaxed)
    }

    /// Keeps a receive for a message that comes through a slot; `None` if its message takes the other way. `is_idle` says whether
    /// no receive is under way that was posted elsewhere: then nor can one be while this runs.
    pub(crate) fn receive(
        &self,
        link: &Link,
        pieces: &[Piece<'_>],
        is_idle: impl FnOnce() -> bool,
    ) -> gdsync::Result<Option<Arc<Receive>>> {
        let mut inbox = self.inbox.lock();
        inbox.run = if can_be_filled(pieces) { inbox.run.saturating_add(1) } else { 0 };
        if inbox.run == 0 && inbox.side.end().is_none() {
            self.close_slowly(link, &mut inbox);
        }
        if inbox.run >= inbox.wanted && !inbox.is_next_here() && is_idle() {
            self.open(link, &mut inbox);
        }
        if inbox.len() >= link.depth {
            self.pump(link, &mut inbox, true);
            settle(link, &mut inbox);
        }
        if !inbox.is_next_here() {
            return Ok(None);
        }
        if link.is_ended() {
            link.check()?;
        }
        if inbox.len() >= link.depth {
            let (qpn, full) = (link.ends.recv.qpn(), link.depth as u64);
            let queue = "receive queue";
            return Err(gdsync::Error::QueueFull { queue, qpn, outstanding: full, depth: full });
        }
        let receive = Arc::new(Receive { outcome: OnceLock::new(), bound: OnceLock::new() });
        let part = |(buffer, range): &Piece<'_>| ((*buffer).clone(), range.start, range.len());
        let buffers = pieces.iter().map(part).collect();
        inbox.kept.push_back(Kept { receive: receive.clone(), buffers });
        self.tell(&inbox);
        drop(inbox);
        link.credits.ring();
        Ok(Some(receive))
    }

    /// Opens slots, if the sender wants it too and nothing is under way here.
    fn open(&self, link: &Link, inbox: &mut Inbox) {
        settle(link, inbox);
        if inbox.len() == 0 && self.rx.run() >= inbox.wanted && !link.is_ended() {
            inbox.side.open(&self.rx, link.credits.posted());
            inbox.opened = inbox.side.next();
            if link.is_ended() {
                self.close(link, inbox);
            }
        }
        self.tell(inbox);
    }

    /// Receives under way.
    pub(crate) fn under_way(&self) -> usize {
        self.under_way.load(Ordering::Relaxed)
    }

    /// Messages that have come through slots.
    pub(crate) fn received(&self) -> u64 {
        self.inbox.lock().side.next()
    }

    /// Takes what has come; binds receives if slots turn out to be closed, which is looked at if there is a reason, or `look`.
    /// Returns whether receives are still kept.
    pub(crate) fn take(&self, link: &Link, look: bool) -> bool {
        // Most calls find nothing to do.
        if self.kept.load(Ordering::Relaxed) == 0 {
            return false;
        }
        let mut inbox = self.inbox.lock();
        self.pump(link, &mut inbox, look);
        !inbox.kept.is_empty()
    }

    /// As [`Slots::take`], and lets go of what was bound and is complete. Returns whether receives are under way.
    pub(crate) fn recycle(&self, link: &Link) -> bool {
        let mut inbox = self.inbox.lock();
        self.pump(link, &mut inbox, true);
        settle(link, &mut inbox);
        if link.is_ended() {
            // Their requests say why.
            inbox.kept.clear();
        }
        self.tell(&inbox);
        inbox.len() > 0
    }

    /// As [`Slots::take`], by the watching thread: binds receives for which nothing comes, so that it need not look again. Returns
    /// whether it must.
    pub(crate) fn watch(&self, link: &Link) -> bool {
        if self.kept.load(Ordering::Relaxed) == 0 {
            return false;
        }
        let mut inbox = self.inbox.lock();
        self.pump(link, &mut inbox, true);
        let next = inbox.side.next();
        inbox.idle = if inbox.idle.0 == next { (next, inbox.idle.1 + 1) } else { (next, 0) };
        if inbox.idle.1 >= LOOKS {
            inbox.idle.1 = 0;
            self.close(link, &mut inbox);
        }
        !inbox.kept.is_empty()
    }

    /// Binds the receives of messages that have taken no slot yet: what waits for them sleeps better so.
    pub(super) fn give_up(&self, link: &Link) {
        self.close(link, &mut self.inbox.lock());
    }

    /// Before a stream waits for a receive, or one that was posted behind those here: fills or binds all.
    ///
    /// # Errors
    /// [`gdsync::Error::Deadline`] where a sender does not finish what it has begun; what ended the connection.
    pub(crate) fn settle_for_stream(&self, link: &Link) -> gdsync::Result<()> {
        let mut inbox = self.inbox.lock();
        inbox.run = 0;
        if inbox.side.end().is_none() {
            self.close_slowly(link, &mut inbox);
        }
        if inbox.kept.is_empty() {
            return Ok(());
        }
        let deadline = Deadline::after(CLAIMED);
        loop {
            self.pump(link, &mut inbox, false);
            if inbox.kept.is_empty() {
                return Ok(());
            }
            if let Err(error) = link.check() {
                // Nothing is written to them any more.
                inbox.kept.clear();
                self.tell(&inbox);
                return Err(error);
            }
            if deadline.is_over() {
                let what = "waiting for the sender to finish a message";
                return Err(gdsync::Error::Deadline { what, after: deadline.limit() });
            }
            MutexGuard::unlocked(&mut inbox, yield_now);
        }
    }

    fn close_slowly(&self, link: &Link, inbox: &mut Inbox) {
        inbox.be_slower();
        self.close(link, inbox);
    }

    fn close(&self, link: &Link, inbox: &mut Inbox) {
        inbox.side.close(&self.rx);
        self.bind(link, inbox);
    }

    /// Fills receives, oldest first.
    fn pump(&self, link: &Link, inbox: &mut Inbox, look: bool) {
        while let Some(first) = inbox.kept.front() {
            match inbox.side.peek(&self.rx) {
                Next::Message(len) => {
                    let number = inbox.side.next();
                    let filled = self.fill(link, &first.buffers, number, len as usize);
                    if let Err(error) = &filled {
                        inbox.side.refuse(&self.rx);
                        link.fail(error);
                    }
                    let is_refused = filled.is_err();
                    let _ = first.receive.outcome.set(filled);
                    inbox.side.take(&self.rx);
                    inbox.kept.pop_front();
                    if is_refused {
                        // A queue pair takes nothing behind it either.
                        inbox.kept.clear();
                        break;
                    }
                }
                next => {
                    if look || next == Next::Closed {
                        self.look(link, inbox);
                    }
                    break;
                }
            }
        }
        self.tell(inbox);
    }

    fn look(&self, link: &Link, inbox: &mut Inbox) {
        if inbox.side.end().is_none() {
            inbox.side.look(&self.rx);
            if inbox.side.end().is_some() {
                // Not only full: it has something that takes the other way.
                if inbox.side.peek(&self.rx) == Next::Closed {
                    inbox.be_slower();
                }
                self.bind(link, inbox);
            }
        }
    }

    /// Copies a message out, and returns its length.
    fn fill(&self, link: &Link, buffers: &Buffers, number: u64, len: usize) -> gdsync::Result<usize> {
        let room: usize = buffers.as_slice().iter().map(|(_, _, room)| room).sum();
        if len > room || len > LONGEST {
            let (qpn, syndrome) = (link.ends.recv.qpn(), Syndrome::LOC_LEN_ERR);
            let error = CompletionError { qpn, wr_id: 0, operation: None, syndrome, vendor: 0 };
            return Err(error.into());
        }
        let (mut from, mut rest) = (Region::body(number, len), len);
        for (buffer, offset, room) in buffers.as_slice() {
            let part = rest.min(*room);
            let memory = buffer.memory();
            memory.copy_from(*offset, &self.rx.0, from, part)?;
            if memory.gpu().is_some() {
                memory.flush()?;
            }
            (from, rest) = (from + part, rest - part);
        }
        Ok(len)
    }

    /// Posts the receives behind the last slot, once that is known.
    fn bind(&self, link: &Link, inbox: &mut Inbox) {
        let Some(end) = inbox.side.end() else { return };
        let left = usize::try_from(end.saturating_sub(inbox.side.next())).unwrap_or(usize::MAX);
        let posts = inbox.kept.len() > left;
        while inbox.kept.len() > left {
            let kept = inbox.kept.remove(left).expect("there are more");
            match post(link, &kept.buffers) {
                Ok(completion) => {
                    let _ = kept.receive.bound.set(completion);
                    inbox.bound.push_back(kept);
                }
                Err(error) => {
                    let _ = kept.receive.outcome.set(Err(error));
                }
            }
        }
        if posts {
            // The sender has waited for them long enough.
            link.credits.catch_up();
        }
        self.tell(inbox);
    }

    /// Shows who has no lock what there is to wait for.
    fn tell(&self, inbox: &Inbox) {
        self.next.store(inbox.side.next(), Ordering::Relaxed);
        self.kept.store(inbox.kept.len(), Ordering::Relaxed);
        self.under_way.store(inbox.len(), Ordering::Relaxed);
        self.is_next_here.store(inbox.is_next_here(), Ordering::Relaxed);
    }

    /// Lets go of what was bound and is complete.
    pub(crate) fn finish(&self, link: &Link) {
        let mut inbox = self.inbox.lock();
        settle(link, &mut inbox);
        self.tell(&inbox);
    }
}

/// Whether the CPU can write all of it.
fn can_be_filled(pieces: &[Piece<'_>]) -> bool {
    pieces.iter().all(|(buffer, _)| buffer.memory().gpu().is_none() && buffer.memory().is_mapped())
}

fn post(link: &Link, buffers: &Buffers) -> gdsync::Result<Completion> {
    let sge = |(buffer, offset, len): &(Registration, usize, usize)| buffer.on(link.near).sge(*offset, *len);
    let sges = buffers.as_slice().iter().map(sge).collect::<gdsync::Result<Vec<Sge>>>()?;
    let post = || link.ends.recv.post_recv(&[RecvWr { wr_id: 0, sges: &sges }]);
    let completion = post().or_else(|error| match error {
        gdsync::Error::QueueFull { .. } => {
            link.queue(Way::Recv).drain();
            post()
        }
        other => Err(other),
    })?;
    link.credits.grant(&completion);
    Ok(completion)
}

fn settle(link: &Link, inbox: &mut Inbox) {
    while let Some(first) = inbox.bound.front() {
        match first.receive.outcome() {
            Ok(None) => break,
            Ok(Some(bytes)) => {
                let _ = first.receive.outcome.set(Ok(bytes));
            }
            // The queue pair is broken, and stays so.
            Err(_) => {}
        }
        if let Some(completion) = first.receive.bound.get() {
            link.credits.arrived(completion);
            if completion.index().is_multiple_of(DRAIN) {
                link.queue(Way::Recv).drain();
            }
        }
        inbox.bound.pop_front();
    }
}
