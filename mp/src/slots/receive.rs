//! Receiving through slots.
//!
//! While slots are open a receive is only kept here. What the slots end with has its receive here, too; those behind it are
//! posted to the queue pair, in order: bound.

use std::collections::VecDeque;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::yield_now;
use std::time::Duration;

use gdsync::mlx5::Syndrome;
use gdsync::protocol::shm_fifo::{Next, Receiver};
use gdsync::verbs::{Completion, CompletionError, RecvWr, Sge};
use parking_lot::MutexGuard;

use super::Slots;
use super::region::{LONGEST, Region};
use crate::communicator::Registration;
use crate::deadline::Deadline;
use crate::few::Few;
use crate::link::Link;
use crate::peer::{DRAIN, Piece, Way};
use crate::request::Order;

/// Messages in a row that could take slots before they do; more after each change that was not for patience.
const FEW: u32 = 32;
const MANY: u32 = 512;

/// Looks of the watching thread, a millisecond apart, in which nothing comes: then receives are bound, and it may sleep.
const LOOKS: u32 = 50;

/// How long a message that was claimed may take to be there: its sender is in the middle of copying it.
const CLAIMED: Duration = Duration::from_secs(5);

/// In place of the bytes of a receive: it is kept, or bound, or has failed.
const KEPT: u64 = u64::MAX;
const BOUND: u64 = u64::MAX - 1;
const FAILED: u64 = u64::MAX - 2;

/// A receive, as its request has it.
#[derive(Debug)]
pub(crate) struct Receive {
    /// The bytes that came, or one of the above.
    state: AtomicU64,
    error: OnceLock<gdsync::Error>,
    /// In the queue, if it was bound.
    bound: OnceLock<Completion>,
}

impl Receive {
    fn new() -> Self {
        Self { state: AtomicU64::new(KEPT), error: OnceLock::new(), bound: OnceLock::new() }
    }

    /// The bytes that came, once the CPU knows that they have.
    #[inline]
    pub(crate) fn known(&self) -> Option<usize> {
        match self.state.load(Ordering::Acquire) {
            KEPT | BOUND | FAILED => None,
            bytes => usize::try_from(bytes).ok(),
        }
    }

    /// Whether its message may still come through a slot.
    #[inline]
    pub(crate) fn is_kept(&self) -> bool {
        self.state.load(Ordering::Acquire) == KEPT
    }

    /// The bytes that came, or `None` while it is under way.
    pub(crate) fn outcome(&self) -> gdsync::Result<Option<usize>> {
        match self.state.load(Ordering::Acquire) {
            KEPT => Ok(None),
            FAILED => self.error.get().map_or(Ok(None), |error| Err(error.clone())),
            BOUND => match self.bound.get().map(Completion::status) {
                // Whoever lets the queue forget it has kept what came of it.
                Some(Err(gdsync::Error::Forgotten { .. })) if self.known().is_some() => Ok(self.known()),
                Some(status) => Ok(status?.map(|wc| wc.byte_len as usize)),
                None => Ok(None),
            },
            _ => Ok(self.known()),
        }
    }

    /// Its place in the queue, if it was bound.
    pub(crate) fn bound(&self) -> Option<&Completion> {
        self.bound.get()
    }

    fn bind(&self, completion: Completion) {
        let _ = self.bound.set(completion);
        self.state.store(BOUND, Ordering::Release);
    }

    fn finish(&self, outcome: gdsync::Result<usize>) {
        let state = match outcome {
            Ok(bytes) => bytes as u64,
            Err(error) => {
                let _ = self.error.set(error);
                FAILED
            }
        };
        self.state.store(state, Ordering::Release);
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
    /// Those that are over: to let them go is left to the next receives, which use them again, and to the watching thread, as a wait
    /// is in a hurry. There are not more than were under way at a time.
    spent: VecDeque<Kept>,
    /// What was posted last before slots opened: nothing is taken out of them before.
    before: Vec<Before>,
    /// What was posted elsewhere and under way then. It holds the connection, and so this, until [`Slots::forget_orders`].
    ahead: Vec<Arc<Order>>,
    /// Receives in a row that could be filled by the CPU.
    run: u32,
    /// Length of a run behind which slots open.
    wanted: u32,
    /// The message that was next when they opened last.
    opened: u64,
    /// The message that was next when the watching thread looked, and how often it was the same.
    idle: (u64, u32),
}

/// A receive of the queue pair.
#[derive(Debug)]
enum Before {
    Posted(Completion),
    Bound(Arc<Receive>),
}

impl Before {
    /// Whether it is complete, or has failed.
    fn is_over(&self) -> bool {
        match self {
            // Also if the queue has forgotten it.
            Self::Posted(receive) => !matches!(receive.status(), Ok(None)),
            Self::Bound(receive) => !matches!(receive.outcome(), Ok(None)),
        }
    }
}

impl Default for Inbox {
    fn default() -> Self {
        let ([kept, bound, spent], before) = <_>::default();
        let (side, wanted) = (Receiver::default(), FEW);
        Self { side, kept, bound, spent, before, ahead: Vec::new(), run: 0, wanted, opened: 0, idle: (0, 0) }
    }
}

impl Inbox {
    /// Receives under way.
    fn len(&self) -> usize {
        self.kept.len() + self.bound.len()
    }

    /// Whether one more receive would be more than the queue pair takes, if all have to be posted there.
    fn is_full(&mut self, depth: usize) -> bool {
        let ahead = if self.is_first() { 0 } else { self.ahead.len() };
        self.len() + ahead >= depth
    }

    /// Whether the message for one more receive is in a slot, or will be.
    fn is_next_here(&self) -> bool {
        let number = self.side.next() + self.kept.len() as u64;
        self.side.end().is_none_or(|end| number < end)
    }

    /// Whether all that was posted before slots opened is complete.
    #[inline]
    fn is_first(&mut self) -> bool {
        self.before.is_empty() || {
            self.before.retain(|before| !before.is_over());
            let is_first = self.before.is_empty();
            if is_first {
                // They count no more: by the time that somebody asks, the queue may have forgotten them.
                self.ahead.drain(..).for_each(|order| _ = order.keep());
            }
            is_first
        }
    }

    /// Slots are closed for a reason that is likely to come again.
    fn be_slower(&mut self) {
        let taken = self.side.next() - self.opened;
        let wanted = if taken / 16 > u64::from(self.wanted) { FEW } else { self.wanted * 2 };
        (self.run, self.wanted) = (0, wanted.min(MANY));
    }

    /// A receive for the next request, out of one that is over if nobody has its request any more.
    fn make(&mut self) -> Arc<Receive> {
        if let Some(Kept { mut receive, .. }) = self.spent.pop_front()
            && let Some(again) = Arc::get_mut(&mut receive)
        {
            *again = Receive::new();
            return receive;
        }
        Arc::new(Receive::new())
    }
}

/// The inbox, locked. When it is dropped, those without the lock are shown what there is to wait for.
struct Locked<'a> {
    slots: &'a Slots,
    inbox: MutexGuard<'a, Inbox>,
}

impl Deref for Locked<'_> {
    type Target = Inbox;
    #[inline]
    fn deref(&self) -> &Inbox {
        &self.inbox
    }
}

impl DerefMut for Locked<'_> {
    #[inline]
    fn deref_mut(&mut self) -> &mut Inbox {
        &mut self.inbox
    }
}

impl Drop for Locked<'_> {
    #[inline]
    fn drop(&mut self) {
        let Self { slots, inbox } = self;
        slots.next.store(inbox.side.next(), Ordering::Relaxed);
        slots.kept.store(inbox.kept.len(), Ordering::Relaxed);
        slots.under_way.store(inbox.len(), Ordering::Relaxed);
        slots.is_next_here.store(inbox.is_next_here(), Ordering::Relaxed);
    }
}

impl Slots {
    /// Whether the message for one more receive seems to come through a slot.
    #[inline]
    pub(crate) fn may_receive(&self) -> bool {
        self.is_next_here.load(Ordering::Relaxed)
    }

    /// Keeps a receive for a message that comes through a slot; `None` if its message takes the other way.
    ///
    /// # Errors
    /// What ended the connection; [`gdsync::Error::QueueFull`].
    pub(crate) fn keep(&self, link: &Link, pieces: &[Piece<'_>]) -> gdsync::Result<Option<Arc<Receive>>> {
        let mut inbox = self.lock();
        if inbox.side.end().is_none() && !can_be_filled(pieces) {
            self.close_slowly(link, &mut inbox);
        }
        if inbox.is_full(link.depth) {
            self.pump(link, &mut inbox, true);
            settle(link, &mut inbox);
        }
        if !inbox.is_next_here() {
            return Ok(None);
        }
        if link.is_ended() {
            link.check()?;
        }
        if inbox.is_full(link.depth) {
            let (qpn, full) = (link.ends.recv.qpn(), link.depth as u64);
            let queue = "receive queue";
            return Err(gdsync::Error::QueueFull { queue, qpn, outstanding: full, depth: full, untaken: 0 });
        }
        let receive = inbox.make();
        let part = |(buffer, range): &Piece<'_>| ((*buffer).clone(), range.start, range.len());
        let buffers = pieces.iter().map(part).collect();
        inbox.kept.push_back(Kept { receive: receive.clone(), buffers });
        drop(inbox);
        link.credits.ring();
        Ok(Some(receive))
    }

    /// Counts a receive that is about to be posted elsewhere, and opens slots if many could have been filled by the CPU and the
    /// sender wants it too. `others` says what is under way there, oldest first; nothing can be posted while this runs.
    pub(crate) fn open(&self, link: &Link, pieces: &[Piece<'_>], others: impl FnOnce() -> Vec<Arc<Order>>) {
        let mut inbox = self.lock();
        inbox.run = if can_be_filled(pieces) { inbox.run.saturating_add(1) } else { 0 };
        let is_wanted = inbox.run >= inbox.wanted && self.rx.run() >= inbox.wanted;
        if !is_wanted || inbox.side.end() != Some(inbox.side.next()) || link.is_ended() {
            return;
        }
        settle(link, &mut inbox);
        let bound = inbox.bound.back().map(|last| Before::Bound(last.receive.clone()));
        inbox.ahead = others();
        let last = inbox.ahead.last().map(|last| Before::Posted(last.completion().clone()));
        inbox.before = last.into_iter().chain(bound).collect();
        inbox.side.open(&self.rx, link.credits.posted());
        inbox.opened = inbox.side.next();
        if link.is_ended() {
            self.close(link, &mut inbox);
        }
    }

    fn lock(&self) -> Locked<'_> {
        Locked { slots: self, inbox: self.inbox.lock() }
    }

    /// No receive is posted any more, nor anything sent.
    pub(super) fn forget_receives(&self) {
        self.lock().ahead.clear();
    }

    /// Receives under way.
    pub(crate) fn under_way(&self) -> usize {
        self.under_way.load(Ordering::Relaxed)
    }

    /// Messages that have come through slots.
    pub(crate) fn received(&self) -> u64 {
        self.next.load(Ordering::Relaxed)
    }

    /// Takes what has come; binds receives if slots turn out to be closed, which is looked at if there is a reason, or `look`.
    /// Returns whether receives are still kept.
    pub(crate) fn take(&self, link: &Link, look: bool) -> bool {
        // Most calls find nothing to do.
        if self.kept.load(Ordering::Relaxed) == 0 {
            return false;
        }
        let mut inbox = self.lock();
        self.pump(link, &mut inbox, look);
        !inbox.kept.is_empty()
    }

    /// As [`Slots::take`], and lets go of what is complete. Returns whether receives are under way.
    pub(crate) fn recycle(&self, link: &Link) -> bool {
        let mut inbox = self.lock();
        self.pump(link, &mut inbox, true);
        settle(link, &mut inbox);
        inbox.spent.clear();
        if link.is_ended() {
            // Their requests say why.
            inbox.kept.clear();
        }
        inbox.len() > 0
    }

    /// As [`Slots::take`], by the watching thread: binds receives for which nothing comes, so that it need not look again. Returns
    /// whether it must.
    pub(crate) fn watch(&self, link: &Link) -> bool {
        if self.kept.load(Ordering::Relaxed) == 0 {
            return false;
        }
        let mut inbox = self.lock();
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
        self.close(link, &mut self.lock());
    }

    /// Before a stream waits for a receive, or one that was posted behind those here: fills or binds all.
    ///
    /// # Errors
    /// [`gdsync::Error::Deadline`] where a sender does not finish what it has begun; what ended the connection.
    pub(crate) fn settle_for_stream(&self, link: &Link) -> gdsync::Result<()> {
        let mut inbox = self.lock();
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
                return Err(error);
            }
            if deadline.is_over() {
                let what = "waiting for the sender to finish a message";
                return Err(gdsync::Error::Deadline { what, after: deadline.limit() });
            }
            drop(inbox);
            yield_now();
            inbox = self.lock();
        }
    }

    #[cold]
    fn close_slowly(&self, link: &Link, inbox: &mut Inbox) {
        inbox.be_slower();
        self.close(link, inbox);
    }

    #[cold]
    fn close(&self, link: &Link, inbox: &mut Inbox) {
        inbox.side.close(&self.rx);
        bind(link, inbox);
    }

    /// Fills receives, oldest first.
    #[inline]
    fn pump(&self, link: &Link, inbox: &mut Inbox, look: bool) {
        if !inbox.is_first() {
            return;
        }
        while let Some(first) = inbox.kept.front() {
            match inbox.side.peek(&self.rx) {
                Next::Message(len) => {
                    let number = inbox.side.next();
                    let filled = self.fill(link, &first.buffers, number, len as usize);
                    // Only of this receive, and nothing was lost but what it was for.
                    let is_refused = filled.as_ref().is_err_and(|error| !is_own_fault(error));
                    if let Err(error) = &filled
                        && is_refused
                    {
                        inbox.side.refuse(&self.rx);
                        link.fail(error);
                    }
                    first.receive.finish(filled);
                    inbox.side.take(&self.rx);
                    let over = inbox.kept.pop_front();
                    inbox.spent.extend(over);
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
    }

    #[cold]
    fn look(&self, link: &Link, inbox: &mut Inbox) {
        if inbox.side.end().is_none() {
            inbox.side.look(&self.rx);
            if inbox.side.end().is_some() {
                // Not only full: it has something that takes the other way.
                if inbox.side.peek(&self.rx) == Next::Closed {
                    inbox.be_slower();
                }
                bind(link, inbox);
            }
        }
    }

    /// Copies a message out, and returns its length.
    #[inline]
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
            if !memory.is_host() {
                memory.flush()?;
            }
            (from, rest) = (from + part, rest - part);
        }
        Ok(len)
    }
}

/// Posts the receives behind the last slot, once that is known.
fn bind(link: &Link, inbox: &mut Inbox) {
    let Some(end) = inbox.side.end() else { return };
    let left = usize::try_from(end.saturating_sub(inbox.side.next())).unwrap_or(usize::MAX);
    let posts = inbox.kept.len() > left;
    while inbox.kept.len() > left {
        let kept = inbox.kept.remove(left).expect("there are more");
        match post(link, &kept.buffers) {
            Ok(completion) => {
                kept.receive.bind(completion);
                inbox.bound.push_back(kept);
            }
            Err(error) => {
                // Its message would be taken for that of the next one.
                link.fail(&error);
                kept.receive.finish(Err(error));
            }
        }
    }
    if posts {
        // The sender has waited for them long enough.
        link.credits.catch_up();
    }
}

/// Whether the CPU can write all of it.
fn can_be_filled(pieces: &[Piece<'_>]) -> bool {
    pieces.iter().all(|(buffer, _)| buffer.memory().is_host())
}

/// Whether an error is about the memory of one receive alone: the next ones can be filled.
#[cold]
fn is_own_fault(error: &gdsync::Error) -> bool {
    matches!(error, gdsync::Error::NotMapped { .. })
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
    link.credits.grant(completion.index());
    Ok(completion)
}

fn settle(link: &Link, inbox: &mut Inbox) {
    while let Some(first) = inbox.bound.front() {
        match first.receive.outcome() {
            Ok(None) => break,
            Ok(Some(bytes)) => first.receive.finish(Ok(bytes)),
            // The queue pair is broken, and stays so.
            Err(_) => {}
        }
        if let Some(completion) = first.receive.bound.get() {
            link.credits.arrived(completion.index());
            if completion.index().is_multiple_of(DRAIN) {
                link.queue(Way::Recv).drain();
            }
        }
        inbox.bound.pop_front();
    }
}
