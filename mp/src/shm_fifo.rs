//! The shared-memory FIFO: short messages between ranks of a host, copied from the CPU of one to the CPU of the other.
//!
//! Each pair of ranks has a FIFO in each direction beside its queue pair, and both ranks agree which message takes which: see
//! [`gdsync::shm::shm_fifo`]. A FIFO is closed at first. Messages take the queue pair whenever one side needs it: a stream sends
//! or waits, a message is long or in GPU memory, the FIFO is full, or a wait gets long, as the receiver can only sleep at the
//! queue pair. After some messages of CPUs in a row the receiver opens the FIFO again, for what comes after the receives that it
//! has posted.
//!
//! While the FIFO is open a receive is only queued here. When the FIFO closes, the messages that it still has are for the first
//! of them; the others are posted to the queue pair, in order.
//!
//! In the fast path of a message each side takes one uncontended lock, and the sender counts the message in the word that both
//! agree by. Between the cores move the cache line with the header and 56 bytes, and the page of a longer message. The receiver
//! reports the cells that it has emptied sixteen at a time, and reads the shared word only when nothing comes for a while.

use std::collections::VecDeque;
use std::hint::spin_loop;
use std::mem;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::yield_now;
use std::time::{Duration, Instant};

use gdsync::memory::{Memory, Word32};
use gdsync::mlx5::Syndrome;
use gdsync::shm::shm_fifo::{Next, Receiver, Sender, peek};
use gdsync::shm::{BACK_OFF_YIELDS, back_off};
use gdsync::verbs::{Completion, CompletionError, Sge};
use parking_lot::{Mutex, MutexGuard};
use smallvec::SmallVec;

use crate::credit::{OPEN, low32};
use crate::in_flight::{Direction, InFlightOp, Lengths, nonzero};
use crate::overlap::ReceiveClaims;
use crate::registration::{Piece, Registration, host_len};
use crate::shm_memory::{FifoMemory, FifoPair, LONGEST};
use crate::transport::{DRAIN, SILENCE, Transport};
use crate::wait::Deadline;

/// Messages in a row that could take the FIFO before it opens, and how often that number doubles: each time it closes for reasons that
/// may recur.
const SHORT_RUN: u32 = 32;
const MOST_DOUBLINGS: u32 = 4;

/// Polls of the watchdog, a millisecond apart, without a message: then receives are posted, and it may sleep.
const IDLE_POLLS: u32 = 50;

/// How long a claimed message may take to be there: its sender is in the middle of copying it.
const CLAIMED: Duration = Duration::from_secs(5);

/// Polls of a full FIFO, for some microseconds: the receiver often is about to make room.
const FULL_POLLS: u32 = 1000;

/// Polls of the next cell before a wait does anything else: about a microsecond. Reading the shared word would take its cache
/// line from the sender, and reading the clock takes as long as a message.
const FIRST_POLLS: u32 = 256;
/// The same, between looks at other things.
const POLLS: u32 = 64;

/// In place of the length of a receive that has not got one: it is queued here, posted to the queue pair, or has failed.
const QUEUED: u64 = u64::MAX;
const POSTED: u64 = u64::MAX - 1;
const FAILED: u64 = u64::MAX - 2;

/// Bytes of a message that the CPU could copy into the FIFO; `None` for any other message.
pub(crate) fn fitting(pieces: &[Piece<'_>]) -> Option<usize> {
    host_len(pieces).filter(|len| *len <= LONGEST)
}

/// Whether the CPU can write all of a receive.
fn can_be_filled(pieces: &[Piece<'_>]) -> bool {
    pieces.iter().all(|(buffer, _)| buffer.memory().is_host())
}

/// A receive of the FIFO, shared with its request.
#[derive(Debug)]
pub(crate) struct FifoReceive {
    /// The bytes that came, or one of the constants above.
    state: AtomicU64,
    error: OnceLock<gdsync::Error>,
    /// Bytes of a message that is longer than the receive, and those of the receive.
    too_long: OnceLock<(usize, usize)>,
    /// In the queue pair, if it was posted there.
    posted: OnceLock<Completion>,
}

impl FifoReceive {
    fn new() -> Self {
        let (error, too_long, posted) = Default::default();
        Self { state: AtomicU64::new(QUEUED), error, too_long, posted }
    }

    /// The bytes that came, once the CPU has seen them.
    #[inline]
    pub(crate) fn len(&self) -> Option<usize> {
        match self.state.load(Ordering::Acquire) {
            QUEUED | POSTED | FAILED => None,
            bytes => usize::try_from(bytes).ok(),
        }
    }

    /// Bytes of the message and of the receive, if the message is longer.
    pub(crate) fn lengths(&self) -> Lengths {
        self.too_long.get().map_or((None, None), |&(bytes, room)| (nonzero(bytes), nonzero(room)))
    }

    /// Whether its message may still come through the FIFO.
    #[inline]
    pub(crate) fn is_queued(&self) -> bool {
        self.state.load(Ordering::Acquire) == QUEUED
    }

    /// The bytes that came, or `None` while it is under way.
    pub(crate) fn outcome(&self) -> gdsync::Result<Option<usize>> {
        match self.state.load(Ordering::Acquire) {
            QUEUED => Ok(None),
            FAILED => self.error.get().map_or(Ok(None), |error| Err(error.clone())),
            POSTED => match self.posted.get().map(Completion::status) {
                // It was finished before the queue forgot it.
                Some(Err(gdsync::Error::Forgotten { .. })) if self.len().is_some() => Ok(self.len()),
                Some(status) => Ok(status?.map(|wc| wc.byte_len as usize)),
                None => Ok(None),
            },
            _ => Ok(self.len()),
        }
    }

    /// Its completion, if it was posted to the queue pair.
    pub(crate) fn posted(&self) -> Option<&Completion> {
        self.posted.get()
    }

    fn post(&self, completion: Completion) {
        let _ = self.posted.set(completion);
        self.state.store(POSTED, Ordering::Release);
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

/// Where the bytes of a receive go: memory, and offset and length in it.
type Buffers = SmallVec<[(Registration, usize, usize); 1]>;

fn buffers(pieces: &[Piece<'_>]) -> Buffers {
    pieces.iter().map(|(buffer, range)| ((*buffer).clone(), range.start, range.len())).collect()
}

/// A receive and its buffers.
#[derive(Debug)]
struct Entry {
    receive: Arc<FifoReceive>,
    buffers: Buffers,
    /// The memory, until the message is there.
    claims: ReceiveClaims,
    /// A stream has not got to it: its message, and those behind, stay in the FIFO.
    is_gated: bool,
}

/// The sender's side.
#[derive(Debug, Default)]
struct TxSide {
    sender: Sender,
    /// Messages in a row that could have taken the FIFO.
    run: u32,
    /// The last message of the queue pair, while it may be under way.
    last: Option<Arc<InFlightOp>>,
    /// Messages that took the FIFO.
    count: u64,
}

/// The receiver's side.
#[derive(Debug, Default)]
struct RxSide {
    receiver: Receiver,
    /// Receives that are not posted, oldest first: the next message is for the first of them.
    queued: VecDeque<Entry>,
    /// Those that were posted to the queue pair, oldest first.
    posted: VecDeque<Entry>,
    /// Those that are over. The next receives reuse them, and the watchdog drops them: a wait must not take the time. There are
    /// never more than were under way at a time.
    spent: VecDeque<Entry>,
    /// Receives of the queue pair that were under way when the FIFO opened: those that were posted elsewhere, and the last that was
    /// posted here. No message is taken out of the FIFO before they are over.
    ahead: Vec<Arc<InFlightOp>>,
    last_posted: Option<Arc<FifoReceive>>,
    /// Receives in a row that the CPU could have filled.
    run: u32,
    /// How often the run that opens the FIFO was doubled.
    doublings: u32,
    /// The message that was next when the FIFO was opened last.
    opened_at: u64,
    /// The message that was next at the last poll of the watchdog, and how many polls found the same.
    idle: (u64, u32),
    /// Nothing is received any more: streams that wait for it go on.
    is_over: bool,
}

impl RxSide {
    /// Whether the next message has a receive that is not behind a gate.
    fn is_open_queued(&self) -> bool {
        self.queued.front().is_some_and(|first| !first.is_gated)
    }

    /// Receives under way.
    fn len(&self) -> usize {
        self.queued.len() + self.posted.len()
    }

    /// Whether one more receive would be more than the queue pair takes, if all had to be posted there.
    fn is_full(&mut self, depth: usize) -> bool {
        self.is_in_order();
        self.len() + self.ahead.len() >= depth
    }

    /// The number of the message for a queued receive.
    fn number_of(&self, receive: &FifoReceive) -> u64 {
        let at = self.queued.iter().position(|entry| std::ptr::eq(&*entry.receive, receive));
        self.receiver.next() + at.unwrap_or(0) as u64
    }

    /// Whether the message for one more receive is in the FIFO, or will be.
    fn takes_next(&self) -> bool {
        let number = self.receiver.next() + self.queued.len() as u64;
        self.receiver.end().is_none_or(|end| number < end)
    }

    /// Whether all that was posted before the FIFO opened is over.
    #[inline]
    fn is_in_order(&mut self) -> bool {
        self.ahead.is_empty() && self.last_posted.is_none() || self.retire_ahead()
    }

    #[cold]
    fn retire_ahead(&mut self) -> bool {
        // The queue completes in order. It may forget them before anybody asks.
        if self.ahead.last().is_none_or(|last| last.keep_outcome()) {
            self.ahead.drain(..).for_each(|op| _ = op.keep_outcome());
        }
        self.last_posted.take_if(|last| !matches!(last.outcome(), Ok(None)));
        self.ahead.is_empty() && self.last_posted.is_none()
    }

    /// Drops all receives, at the end of the connection: their requests say why.
    fn drop_queued(&mut self) {
        self.queued.clear();
        self.is_over = true;
    }

    /// The FIFO is closed for a reason that is likely to recur: it opens later.
    fn open_later(&mut self) {
        let has_paid = (self.receiver.next() - self.opened_at) / 16 > u64::from(SHORT_RUN << self.doublings);
        self.doublings = if has_paid { 0 } else { MOST_DOUBLINGS.min(self.doublings + 1) };
        self.run = 0;
    }

    /// A receive for the next request, made of one that is over if no request has that any more.
    fn make_receive(&mut self) -> Arc<FifoReceive> {
        if let Some(Entry { mut receive, .. }) = self.spent.pop_front()
            && let Some(reused) = Arc::get_mut(&mut receive)
        {
            *reused = FifoReceive::new();
            return receive;
        }
        Arc::new(FifoReceive::new())
    }

    /// Finishes posted receives that are complete.
    fn retire(&mut self, transport: &Transport) {
        while let Some(first) = self.posted.front() {
            match first.receive.outcome() {
                Ok(None) => break,
                Ok(Some(bytes)) => first.receive.finish(Ok(bytes)),
                // The queue pair is broken, and stays so.
                Err(_) => {}
            }
            if let Some(completion) = first.receive.posted() {
                transport.credits.arrived(completion.index());
                if completion.index().is_multiple_of(DRAIN) {
                    transport.cq(Direction::Recv).drain();
                }
            }
            self.posted.pop_front();
        }
    }

    /// Posts the receives behind the last message of the FIFO to the queue pair, once that is known.
    fn post_rest(&mut self, transport: &Transport) {
        let Some(end) = self.receiver.end() else { return };
        let left = usize::try_from(end.saturating_sub(self.receiver.next())).unwrap_or(usize::MAX);
        if self.queued.len() <= left {
            return;
        }
        while self.queued.len() > left {
            let entry = self.queued.remove(left).expect("there are more");
            match post(transport, &entry.buffers) {
                Ok(completion) => {
                    entry.receive.post(completion);
                    self.posted.push_back(entry);
                }
                Err(error) => {
                    // Its message would be taken for that of the next one.
                    transport.fail(&error);
                    entry.receive.finish(Err(error));
                }
            }
        }
        // The sender has waited for them long enough.
        transport.credits.catch_up();
    }
}

/// The FIFOs between this rank and another one, in both directions.
#[derive(Debug)]
pub(crate) struct ShmFifo {
    memory: FifoPair,
    tx: Mutex<TxSide>,
    rx: Mutex<RxSide>,
    /// What is known of `rx` without its lock: the number of the next message, and how many receives are queued.
    next: AtomicU64,
    queued: AtomicUsize,
    /// For streams: the low bits of the number of the next message, once one waits for it.
    filled: OnceLock<Word32>,
}

/// The receiver's side, locked. Dropping it publishes what is read without the lock.
struct RxGuard<'a> {
    fifo: &'a ShmFifo,
    rx: MutexGuard<'a, RxSide>,
}

impl Deref for RxGuard<'_> {
    type Target = RxSide;
    #[inline]
    fn deref(&self) -> &RxSide {
        &self.rx
    }
}

impl DerefMut for RxGuard<'_> {
    #[inline]
    fn deref_mut(&mut self) -> &mut RxSide {
        &mut self.rx
    }
}

impl Drop for RxGuard<'_> {
    #[inline]
    fn drop(&mut self) {
        let Self { fifo, rx } = self;
        fifo.next.store(rx.receiver.next(), Ordering::Relaxed);
        fifo.queued.store(rx.queued.len(), Ordering::Relaxed);
        if let Some(filled) = fifo.filled.get() {
            filled.store(low32(rx.receiver.next()).wrapping_add(if rx.is_over { OPEN } else { 0 }));
        }
    }
}

/// Sending.
impl ShmFifo {
    pub(crate) fn new(memory: FifoPair) -> Self {
        let (tx, rx, next, queued, filled) = Default::default();
        Self { memory, tx, rx, next, queued, filled }
    }

    /// Messages that were sent through the FIFO.
    pub(crate) fn sent(&self) -> u64 {
        self.tx.lock().count
    }

    /// Sends a message through the FIFO, if that can be done now. Returns its length, and the last send of the queue pair if that is
    /// under way: sends complete in order. The pieces lie inside their buffers.
    #[inline]
    pub(crate) fn send(&self, pieces: &[Piece<'_>]) -> Option<(usize, Option<Arc<InFlightOp>>)> {
        let len = fitting(pieces)?;
        let mut tx = self.tx.lock();
        let memory = &self.memory.tx;
        let number = tx.sender.claim(memory, FifoMemory::capacity(len), FULL_POLLS)?;
        let mut to = FifoMemory::body(number, len);
        for (buffer, range) in pieces {
            let copied = memory.0.copy_from(to, buffer.memory(), range.start, range.len());
            copied.expect("the piece was checked, and the message fits");
            to += range.len();
        }
        tx.sender.publish(memory, number, u32::try_from(len).expect("at most a page"));
        tx.count += 1;
        tx.last.take_if(|last| !matches!(last.outcome(), Ok(None)));
        Some((len, tx.last.clone()))
    }

    /// Sends a message by the queue pair, with `post`, which two threads must not do at a time. `post` returns the number of the
    /// message among those of the queue pair, if it is known.
    pub(crate) fn send_by_queue<T>(
        &self,
        pieces: Option<&[Piece<'_>]>,
        post: impl FnOnce() -> gdsync::Result<(T, Option<u32>)>,
    ) -> gdsync::Result<T> {
        let mut tx = self.tx.lock();
        let was_uncertain = tx.sender.begin(&self.memory.tx);
        match post() {
            Ok((posted, number)) => {
                if let Some(number) = number {
                    tx.sender.count(&self.memory.tx, number);
                }
                let could_fit = pieces.is_some_and(|pieces| fitting(pieces).is_some());
                tx.run = if could_fit { tx.run.saturating_add(1) } else { 0 };
                self.memory.tx.set_run(tx.run);
                Ok(posted)
            }
            Err(error) => {
                tx.sender.undo(&self.memory.tx, was_uncertain);
                Err(error)
            }
        }
    }

    /// This was sent by the queue pair: later messages of the FIFO complete after it.
    pub(crate) fn set_last(&self, op: &Arc<InFlightOp>) {
        self.tx.lock().last = Some(op.clone());
    }
}

/// Receiving. The transport is the one of the same rank.
impl ShmFifo {
    fn lock(&self) -> RxGuard<'_> {
        RxGuard { fifo: self, rx: self.rx.lock() }
    }

    /// Receives under way.
    pub(crate) fn under_way(&self) -> usize {
        self.rx.lock().len()
    }

    /// Messages that have come through the FIFO.
    pub(crate) fn received(&self) -> u64 {
        self.next.load(Ordering::Relaxed)
    }

    /// Queues a receive whose message comes through the FIFO, with what it has claimed; `None` if its message takes the queue pair.
    ///
    /// # Errors
    /// What ended the connection; [`gdsync::Error::QueueFull`].
    pub(crate) fn receive(
        &self,
        transport: &Transport,
        pieces: &[Piece<'_>],
        claims: &mut ReceiveClaims,
    ) -> gdsync::Result<Option<Arc<FifoReceive>>> {
        let depth = transport.depth;
        let mut rx = self.lock();
        if rx.receiver.end().is_none() && !can_be_filled(pieces) {
            self.close_for_long(transport, &mut rx);
        }
        if rx.is_full(depth) {
            self.pump(transport, &mut rx, true);
            rx.retire(transport);
        }
        if !rx.takes_next() {
            return Ok(None);
        }
        if transport.has_ended() {
            transport.check()?;
        }
        if rx.is_full(depth) {
            return transport.refuse_full(Direction::Recv, depth);
        }
        let receive = rx.make_receive();
        let claims = mem::take(claims);
        let buffers = buffers(pieces);
        rx.queued.push_back(Entry { receive: receive.clone(), buffers, claims, is_gated: false });
        drop(rx);
        transport.credits.flag.set();
        Ok(Some(receive))
    }

    /// Counts a receive that is about to be posted, and opens the FIFO if many in a row could have been filled by the CPU and
    /// the sender wants it too. `others` returns the receives that are under way elsewhere, oldest first; none can be posted
    /// while this runs.
    pub(crate) fn maybe_open(
        &self,
        transport: &Transport,
        pieces: &[Piece<'_>],
        others: impl FnOnce() -> Vec<Arc<InFlightOp>>,
    ) {
        let mut rx = self.lock();
        rx.run = if can_be_filled(pieces) { rx.run.saturating_add(1) } else { 0 };
        let wanted = SHORT_RUN << rx.doublings;
        let is_wanted = rx.run >= wanted && self.memory.rx.run() >= wanted;
        if !is_wanted || rx.receiver.end() != Some(rx.receiver.next()) || transport.has_ended() {
            return;
        }
        rx.retire(transport);
        rx.last_posted = rx.posted.back().map(|last| last.receive.clone());
        rx.ahead = others();
        rx.receiver.open(&self.memory.rx, transport.credits.posted());
        rx.opened_at = rx.receiver.next();
        if transport.has_ended() {
            self.close(transport, &mut rx);
        }
    }

    /// Takes messages. Posts receives if the FIFO turns out to be closed, which is checked with a reason or if `look`.
    /// Returns whether receives are still queued.
    pub(crate) fn take(&self, transport: &Transport, look: bool) -> bool {
        if self.queued.load(Ordering::Relaxed) == 0 {
            return false;
        }
        let mut rx = self.lock();
        self.pump(transport, &mut rx, look);
        !rx.queued.is_empty()
    }

    /// Bytes of the messages that have no receive, as far as they are there.
    pub(crate) fn unread(&self) -> Vec<usize> {
        let rx = self.lock();
        let first = rx.receiver.next() + rx.queued.len() as u64;
        let message = |number| match peek(&self.memory.rx, number) {
            Next::Message(len) => Some(len as usize),
            _ => None,
        };
        (first..first + FifoMemory::capacity(0)).map_while(message).collect()
    }

    /// Takes the message in the next cell, if there is one.
    #[inline]
    pub(crate) fn take_next(&self, transport: &Transport) {
        if transport.fork_guard.is_here()
            && peek(&self.memory.rx, self.next.load(Ordering::Relaxed)) != Next::Nothing
        {
            self.take(transport, false);
        }
    }

    /// As [`ShmFifo::take`], and drops finished receives. Returns whether receives are under way.
    pub(crate) fn recycle(&self, transport: &Transport) -> bool {
        let mut rx = self.lock();
        self.pump(transport, &mut rx, true);
        rx.retire(transport);
        rx.spent.clear();
        if transport.has_ended() {
            rx.drop_queued();
        }
        rx.len() > 0
    }

    /// As [`ShmFifo::take`], by the watchdog: posts receives for which nothing comes, so that it need not poll for them. Returns
    /// whether it must.
    pub(crate) fn watch(&self, transport: &Transport) -> bool {
        if self.queued.load(Ordering::Relaxed) == 0 {
            return false;
        }
        let mut rx = self.lock();
        self.pump(transport, &mut rx, true);
        let next = rx.receiver.next();
        rx.idle = if rx.idle.0 == next { (next, rx.idle.1 + 1) } else { (next, 0) };
        if rx.idle.1 >= IDLE_POLLS {
            rx.idle.1 = 0;
            self.close(transport, &mut rx);
        }
        !rx.queued.is_empty()
    }

    /// The bytes of a queued receive at the end of the connection, after which nothing is written to it any more; `None` while the
    /// connection is there.
    ///
    /// # Errors
    /// What ended the connection.
    pub(crate) fn outcome_at_end(
        &self,
        transport: &Transport,
        receive: &FifoReceive,
    ) -> gdsync::Result<Option<usize>> {
        let Err(error) = transport.check() else { return Ok(None) };
        // Takes the messages, and drops the other receives.
        self.recycle(transport);
        match receive.outcome()? {
            None if receive.is_queued() => Err(error),
            known => Ok(known),
        }
    }

    /// Fills or posts all receives, but for those behind a gate, before a stream waits for one of them, or for one that was posted
    /// behind them.
    ///
    /// # Errors
    /// [`gdsync::Error::Deadline`] where a sender does not finish a message; what ended the connection.
    pub(crate) fn settle_for_stream(&self, transport: &Transport) -> gdsync::Result<()> {
        self.settle(transport).map(drop)
    }

    fn settle(&self, transport: &Transport) -> gdsync::Result<RxGuard<'_>> {
        let mut rx = self.lock();
        rx.run = 0;
        if rx.receiver.end().is_none() {
            self.close_for_long(transport, &mut rx);
        }
        let deadline = Deadline::after(CLAIMED);
        while rx.is_open_queued() {
            self.pump(transport, &mut rx, false);
            if !rx.is_open_queued() {
                break;
            }
            if let Err(error) = transport.check() {
                // Nothing is written to them any more.
                rx.drop_queued();
                return Err(error);
            }
            if deadline.is_over() {
                return Err(unfinished(transport.rank));
            }
            drop(rx);
            yield_now();
            rx = self.lock();
        }
        Ok(rx)
    }

    /// The CPU was refused a receive: it does not count in the run that opens the FIFO.
    pub(crate) fn count_again(&self) {
        self.lock().run = 0;
    }

    /// Closes the FIFO for a receive of a stream. If its message is in the FIFO already, queues it behind a gate; `None` if its message
    /// takes the queue pair.
    ///
    /// # Errors
    /// [`gdsync::Error::Deadline`] where a sender does not finish a message; what ended the connection; for memory that the CPU cannot
    /// write.
    pub(crate) fn receive_in_order(
        &self,
        transport: &Transport,
        pieces: &[Piece<'_>],
    ) -> gdsync::Result<Option<Arc<FifoReceive>>> {
        let mut rx = self.settle(transport)?;
        if !rx.takes_next() {
            return Ok(None);
        }
        transport.check()?;
        if !can_be_filled(pieces) {
            return Err(gdsync::Error::Unsupported {
                what: "a receive on a stream into memory that the CPU does not reach, of a message that is in the shared-memory FIFO",
                by: "the FIFO, which the CPU copies from",
                fix: "receive it into host memory, or build with IntraHostPath::Queues",
            });
        }
        let (receive, claims) = (rx.make_receive(), ReceiveClaims::new());
        let buffers = buffers(pieces);
        rx.queued.push_back(Entry { receive: receive.clone(), buffers, claims, is_gated: true });
        Ok(Some(receive))
    }

    /// A stream has got to the receive: waits until its message is in the buffer, which the sender has begun to copy.
    pub(crate) fn let_in(&self, transport: &Transport, receive: &Arc<FifoReceive>) {
        let mut rx = self.lock();
        let is_it = |entry: &&mut Entry| Arc::ptr_eq(&entry.receive, receive);
        rx.queued.iter_mut().find(is_it).into_iter().for_each(|entry| entry.is_gated = false);
        drop(rx);
        let deadline = Deadline::after(CLAIMED);
        while receive.is_queued() && !transport.has_ended() {
            self.take(transport, false);
            if deadline.is_over() {
                transport.fail(&unfinished(transport.rank));
            }
            back_off(deadline.elapsed(), deadline.remaining());
        }
    }

    /// The stream will not get to the receive, unless it has: the next receive gets its message.
    pub(crate) fn take_back(&self, transport: &Transport, receive: &Arc<FifoReceive>) {
        let mut rx = self.lock();
        let taken_back =
            rx.queued.iter().position(|entry| entry.is_gated && Arc::ptr_eq(&entry.receive, receive));
        if let Some(at) = taken_back {
            rx.queued.remove(at);
            drop(rx);
            receive.finish(Err(gdsync::Error::TakenBack { qpn: transport.qp.recv.qpn() }));
        }
    }

    /// What a stream has to wait for until a receive behind a gate is filled: a word, and the value that it must reach.
    ///
    /// # Errors
    /// No memory for the word.
    pub(crate) fn awaited(&self, receive: &Arc<FifoReceive>) -> gdsync::Result<Option<(Word32, u32)>> {
        let rx = self.lock();
        let position = rx.queued.iter().position(|entry| Arc::ptr_eq(&entry.receive, receive));
        let Some(position) = position.filter(|_| receive.is_queued()) else { return Ok(None) };
        let word = match self.filled.get() {
            Some(word) => word.clone(),
            None => {
                let word = Memory::alloc(4)?.word32(0)?;
                self.filled.get_or_init(|| word).clone()
            }
        };
        // The lock, when it is released, writes the word.
        Ok(Some((word, low32(rx.receiver.next() + position as u64 + 1))))
    }

    #[cold]
    fn close_for_long(&self, transport: &Transport, rx: &mut RxSide) {
        rx.open_later();
        self.close(transport, rx);
    }

    #[cold]
    fn close(&self, transport: &Transport, rx: &mut RxSide) {
        if transport.fork_guard.is_here() {
            rx.receiver.close(&self.memory.rx);
            rx.post_rest(transport);
        }
    }

    /// Fills receives, oldest first: not in a forked child, which has no such memory.
    #[inline]
    fn pump(&self, transport: &Transport, rx: &mut RxSide, look: bool) {
        if !transport.fork_guard.is_here() || !rx.is_in_order() {
            return;
        }
        while let Some(first) = rx.queued.front()
            && !first.is_gated
        {
            match rx.receiver.peek(&self.memory.rx) {
                Next::Message(len) => {
                    let filled = self.fill(transport, first, rx.receiver.next(), len as usize);
                    // The memory of one receive may be at fault: the next ones can be filled.
                    let failure = filled
                        .as_ref()
                        .err()
                        .filter(|e| !matches!(e, gdsync::Error::NotMapped { .. }))
                        .cloned();
                    if let Some(error) = &failure {
                        rx.receiver.refuse(&self.memory.rx);
                        transport.fail(error);
                    }
                    first.receive.finish(filled);
                    rx.receiver.take(&self.memory.rx);
                    let mut over = rx.queued.pop_front();
                    over.iter_mut().for_each(|over| over.claims.clear());
                    rx.spent.extend(over);
                    if failure.is_some() {
                        // As in a queue pair, nothing behind it is taken.
                        rx.drop_queued();
                        break;
                    }
                }
                next => {
                    if look || next == Next::Closed {
                        self.check_closed(transport, rx);
                    }
                    break;
                }
            }
        }
    }

    /// Looks whether the sender has closed the FIFO.
    #[cold]
    fn check_closed(&self, transport: &Transport, rx: &mut RxSide) {
        if rx.receiver.end().is_some() {
            return;
        }
        rx.receiver.check_closed(&self.memory.rx);
        if rx.receiver.end().is_some() {
            // Not because it is full: the sender needs the queue pair.
            if rx.receiver.peek(&self.memory.rx) == Next::Closed {
                rx.open_later();
            }
            rx.post_rest(transport);
        }
    }

    /// Copies a message out, and returns its length.
    #[inline]
    fn fill(
        &self,
        transport: &Transport,
        Entry { receive, buffers, .. }: &Entry,
        number: u64,
        len: usize,
    ) -> gdsync::Result<usize> {
        let room: usize = buffers.iter().map(|(_, _, room)| room).sum();
        if len > room || len > LONGEST {
            let _ = receive.too_long.set((len, room));
            let (qpn, syndrome) = (transport.qp.recv.qpn(), Syndrome::LOC_LEN_ERR);
            return Err(CompletionError::new(qpn, None, syndrome).into());
        }
        let (mut from, mut rest) = (FifoMemory::body(number, len), len);
        for (buffer, offset, room) in buffers {
            let part = rest.min(*room);
            let memory = buffer.memory();
            memory.copy_from(*offset, &self.memory.rx.0, from, part)?;
            if !memory.is_host() {
                memory.flush()?;
            }
            (from, rest) = (from + part, rest - part);
        }
        Ok(len)
    }
}

/// Waiting.
impl ShmFifo {
    /// Waits for about a microsecond; returns the bytes that came, if that was enough.
    #[inline]
    pub(crate) fn wait_shortly(&self, transport: &Transport, receive: &FifoReceive) -> Option<usize> {
        for _ in 0..FIRST_POLLS {
            if !receive.is_queued() {
                return receive.len();
            }
            self.take_next(transport);
        }
        None
    }

    /// Blocks until a receive is complete, or posted, to be waited for at the queue pair, or the connection has ended. Calls
    /// `meanwhile` once. Returns the time waited.
    ///
    /// # Errors
    /// [`gdsync::Error::Deadline`] after `timeout`.
    #[cold]
    pub(crate) fn wait(
        &self,
        transport: &Transport,
        receive: &FifoReceive,
        timeout: Duration,
        meanwhile: impl FnOnce(),
    ) -> gdsync::Result<Duration> {
        let start = Instant::now();
        let mut tended = start;
        meanwhile();
        loop {
            self.take(transport, true);
            let waited = start.elapsed();
            if waited > BACK_OFF_YIELDS {
                // Posts the receive, unless its message was claimed: the wait can sleep at the queue pair.
                self.close(transport, &mut self.lock());
            }
            for _ in 0..POLLS {
                if !receive.is_queued() {
                    return Ok(waited);
                }
                self.take_next(transport);
                spin_loop();
            }
            if transport.check().is_err() {
                // The request says what that means for it.
                return Ok(waited);
            }
            if waited >= timeout {
                let number = self.lock().number_of(receive);
                let awaited = format!(
                    "a message from rank {} (message {number} through shared memory); see that the rank sends it",
                    transport.rank
                );
                return Err(gdsync::Error::late("waiting for a message", timeout, awaited));
            }
            if tended.elapsed() >= SILENCE {
                // Its message was claimed, and the sender does not finish it.
                transport.tend();
                tended = Instant::now();
            }
            back_off(waited, timeout - waited);
        }
    }
}

/// The error for a message that its sender has begun, and does not finish.
fn unfinished(rank: usize) -> gdsync::Error {
    let awaited = format!(
        "rank {rank} to finish a message that it has begun; see that it lives and is not stopped (Communicator::check)"
    );
    gdsync::Error::late("receiving through shared memory", CLAIMED, awaited)
}

fn post(transport: &Transport, buffers: &Buffers) -> gdsync::Result<Completion> {
    let sge = |(buffer, offset, len): &(Registration, usize, usize)| {
        buffer.mr(transport.intra_host).sge(*offset, *len)
    };
    let sges = buffers.iter().map(sge).collect::<gdsync::Result<SmallVec<[Sge; 1]>>>()?;
    let pieces = buffers.iter().map(|(buffer, offset, len)| (buffer, *offset..offset + len));
    let place = transport.place(&pieces.collect::<SmallVec<[_; 1]>>())?;
    transport.receive(&sges, place).or_else(|error| match error {
        gdsync::Error::QueueFull { .. } => {
            transport.cq(Direction::Recv).drain();
            transport.receive(&sges, place)
        }
        other => Err(other),
    })
}
