//! The order of what streams do beside a queue pair, as copies between GPUs: one stream has it at a time, as it has a queue.

use std::collections::VecDeque;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use parking_lot::{Mutex, MutexGuard};
use smallvec::SmallVec;

use super::engine::Progress;
use super::op::Op;
use super::{Batch, Cond, Stream, deadline};
use crate::verbs::end::QueueEnd;
use crate::verbs::qp::QpCore;
use crate::verbs::{Qp, stream_name};
use gdsync_device::error::{Error, Result};

/// The order of operations of streams that go beside a queue pair, such as [`Batch::put_peer`]. Batches that [follow](Batch::follow) it
/// are submitted in the order in which they did first, and to one stream at a time: with the errors of a queue, and with the failures
/// of this queue pair in [`Stream::synchronize`]. Graphs follow it in each launch. Clones share it.
///
/// The owner of the queue pair itself does not do for this: it ends with the last completion, and what goes beside has none, so the
/// order keeps the last submission.
#[derive(Clone)]
pub struct StreamOrder(Arc<Inner>);

struct Inner {
    end: Arc<QueueEnd>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Batches that no stream has got, oldest first, and how many numbers each takes.
    unsubmitted: VecDeque<(Weak<Place>, u64)>,
    last: Option<Position>,
    /// The last number that a stream has got.
    number: u64,
}

/// A submission of a stream.
#[derive(Clone)]
struct Position {
    stream: u64,
    /// The largest number while it is being submitted.
    seq: u64,
    progress: Arc<dyn Progress>,
}

impl Position {
    fn is_over(&self) -> bool {
        self.progress.completed() >= self.seq
    }

    fn wait(&self, what: &str, timeout: Duration, end: Instant) -> Result<()> {
        if self.is_over() || self.progress.wait_completed(self.seq, end) {
            return self.progress.is_done(self.seq).map(drop);
        }
        Err(Error::late(what, timeout, format!("{} to get there", stream_name::describe(self.stream))))
    }

    fn wait_in_batch(&self, batch: &mut Batch) -> Result<()> {
        let word = self.progress.word().ok_or(Error::Unsupported {
            what: "a wait of a stream for what a host stream does beside a queue pair",
            by: "this library",
            fix: "wait for it on the CPU",
        })?;
        batch.wait_value64(word, self.seq, Cond::Geq);
        self.progress.ask();
        Ok(())
    }

    fn wait_on_stream(&self, stream: &Stream) -> Result<()> {
        // Its order is enough: a mark for it would be a kernel of its own.
        if self.stream == stream.id() {
            return Ok(());
        }
        if self.progress.is_done(self.seq)? {
            return Ok(());
        }
        let mut batch = Batch::new();
        self.wait_in_batch(&mut batch)?;
        stream.submit(&mut batch)
    }
}

/// Where a batch is in its stream.
#[derive(Default)]
struct Place {
    at: OnceLock<Position>,
    numbers: OnceLock<Numbers>,
    is_dropped: AtomicBool,
}

/// The work of a batch, which a stream has got or will get: see [`Batch::follow`].
#[derive(Clone)]
pub struct Ticket {
    place: Arc<Place>,
    qpn: u32,
    /// The last number of its order through it.
    pub(super) taken: Number,
}

/// The last number of each order of a submission before it, by index.
pub(super) type Numbers = SmallVec<[u64; 4]>;

/// A number that a batch takes: so many behind the last one of the order before, by its index.
#[derive(Clone, Copy, Debug)]
pub(super) struct Number {
    pub(super) order: usize,
    pub(super) nth: u64,
}

impl Number {
    /// Its value in a submission.
    #[inline]
    pub(super) fn behind(self, before: &[u64]) -> u64 {
        before.get(self.order).map_or(0, |before| before.wrapping_add(self.nth))
    }

    /// The same number among those of a graph: see [`Orders::join`].
    pub(super) fn joined(self, before: &[Self]) -> Self {
        let Self { order, nth } = before[self.order];
        Self { order, nth: nth + self.nth }
    }
}

impl fmt::Debug for StreamOrder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "StreamOrder({:#x})", self.core().qpn)
    }
}

impl fmt::Debug for Ticket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Ticket({:#x}, {:?})", self.qpn, self.place.at.get().map(|at| (at.stream, at.seq)))
    }
}

impl StreamOrder {
    /// Beside a queue pair.
    pub fn new(qp: &Qp) -> Self {
        Self(Arc::new(Inner { end: qp.send.end.clone(), state: Mutex::default() }))
    }

    pub(super) fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// Refuses while a stream has not done what follows it, or a batch that does was not submitted.
    ///
    /// # Errors
    /// [`Error::Busy`]; [`Error::OutOfOrder`].
    pub fn check_idle(&self) -> Result<()> {
        let busy = {
            let mut state = self.0.state.lock();
            if state.oldest().is_some() {
                return Err(self.out_of_order());
            }
            state.busy_for(None)
        };
        busy.map_or(Ok(()), |last| Err(self.busy(&last)))
    }

    /// Whether a stream has not done what follows it, as far as is known. Unlike the checks it does not have a GPU tell, which may block
    /// the caller in the driver.
    pub fn is_busy(&self) -> bool {
        self.0.state.lock().busy_for(None).is_some()
    }

    /// Whether a batch that follows it, or a capture, was not submitted.
    pub fn has_unsubmitted(&self) -> bool {
        self.0.state.lock().oldest().is_some()
    }

    /// The last number that a batch takes for a message. Batches that were dropped take none.
    pub fn last_number(&self) -> u64 {
        let state = self.0.state.lock();
        let counts = state.unsubmitted.iter().filter(|(place, _)| is_there(place).is_some());
        counts.fold(state.number, |number, (_, count)| number.wrapping_add(*count))
    }

    /// Blocks until streams have done all that follows it and was submitted.
    ///
    /// # Errors
    /// [`Error::Deadline`]; why the last stream has failed.
    pub fn wait_idle(&self, timeout: Duration) -> Result<()> {
        let end = deadline(timeout);
        loop {
            match self.last() {
                None => return Ok(()),
                // Another thread is submitting it.
                Some(last) if last.seq == u64::MAX && Instant::now() < end => std::thread::yield_now(),
                Some(last) => return last.wait("waiting for the copies of a stream", timeout, end),
            }
        }
    }

    /// Refuses while another stream has not done what follows it. The stream that has will tell when it has done it.
    ///
    /// # Errors
    /// [`Error::Busy`].
    pub fn check_for(&self, stream: &Stream) -> Result<()> {
        match self.last().filter(|last| !last.is_over()) {
            Some(last) if last.stream == stream.id() => last.progress.ask(),
            Some(last) => return Err(self.busy(&last)),
            None => {}
        }
        Ok(())
    }

    /// The last submission, which another thread may be making.
    fn last(&self) -> Option<Position> {
        self.0.state.lock().last.clone()
    }

    /// Refuses unless it is the turn of a batch, on this stream.
    fn turn(&self, place: &Arc<Place>, stream: Option<u64>) -> Result<MutexGuard<'_, State>> {
        let mut state = self.0.state.lock();
        if state.oldest().is_none_or(|oldest| !Arc::ptr_eq(&oldest, place)) {
            return Err(self.out_of_order());
        }
        let Some(last) = state.busy_for(stream) else { return Ok(state) };
        drop(state);
        Err(self.busy(&last))
    }

    pub(super) fn core(&self) -> &Arc<QpCore> {
        &self.end().qp
    }

    pub(super) fn end(&self) -> &Arc<QueueEnd> {
        &self.0.end
    }

    fn out_of_order(&self) -> Error {
        Error::OutOfOrder { qpn: self.core().qpn, expected: 0, got: 1 }
    }

    fn busy(&self, last: &Position) -> Error {
        // So that a later look finds it over.
        last.progress.ask();
        Error::Busy { queue: "send", qpn: self.core().qpn, owner: stream_name::describe(last.stream) }
    }
}

impl State {
    /// The last submission, unless it is over, or of this stream.
    fn busy_for(&self, stream: Option<u64>) -> Option<Position> {
        self.last.clone().filter(|last| Some(last.stream) != stream && !last.is_over())
    }

    /// The batch that has to be submitted first.
    fn oldest(&mut self) -> Option<Arc<Place>> {
        while let Some(first) = self.unsubmitted.front() {
            match is_there(&first.0) {
                Some(place) => return Some(place),
                None => _ = self.unsubmitted.pop_front(),
            }
        }
        None
    }
}

/// The batch, unless it was dropped.
fn is_there(place: &Weak<Place>) -> Option<Arc<Place>> {
    place.upgrade().filter(|place| !place.is_dropped.load(Ordering::Acquire))
}

/// What a batch follows.
#[derive(Default)]
pub(super) struct Follows {
    place: Arc<Place>,
    orders: SmallVec<[Followed; 1]>,
}

/// One of its orders.
struct Followed {
    order: StreamOrder,
    /// The last submission before this one, once that has begun.
    before: Option<Position>,
    /// Numbers that the batch takes, and the last one before them.
    count: u64,
    number: u64,
}

impl fmt::Debug for Follows {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.orders()).finish()
    }
}

impl Drop for Follows {
    fn drop(&mut self) {
        // A batch that was submitted has its place.
        self.place.is_dropped.store(true, Ordering::Release);
    }
}

/// What each launch of a graph follows, with how many numbers it takes.
#[derive(Debug, Default)]
pub(super) struct Orders(Vec<(StreamOrder, u64)>);

impl Orders {
    /// Has launches follow what a batch follows, too. Returns the last number of each of its orders before it, among those of a launch.
    pub(super) fn join(&mut self, follows: &Follows) -> Vec<Number> {
        let join = |Followed { order, count, .. }: &Followed| {
            let known = self.0.iter().position(|(known, _)| known.is(order));
            let at = known.unwrap_or(self.0.len());
            if known.is_none() {
                self.0.push((order.clone(), 0));
            }
            let nth = self.0[at].1;
            self.0[at].1 += count;
            Number { order: at, nth }
        };
        follows.orders.iter().map(join).collect()
    }

    pub(super) fn cores(&self) -> impl Iterator<Item = &Arc<QpCore>> {
        self.0.iter().map(|(order, _)| order.core())
    }
}

impl Follows {
    fn orders(&self) -> impl Iterator<Item = &StreamOrder> {
        self.orders.iter().map(|followed| &followed.order)
    }

    /// None if it takes none.
    fn numbers(&self) -> Option<Numbers> {
        let takes_some = self.orders.iter().any(|followed| followed.count > 0);
        takes_some.then(|| self.orders.iter().map(|followed| followed.number).collect())
    }

    /// Refuses unless the CPU may do it now.
    pub(super) fn check(&self) -> Result<()> {
        self.orders().try_for_each(|order| order.turn(&self.place, None).map(drop))
    }

    /// Begins to submit to a stream, in all orders or none.
    pub(super) fn begin(&mut self, stream: u64, progress: &Arc<dyn Progress>) -> Result<()> {
        for at in 0..self.orders.len() {
            if let Err(error) = self.begin_in(at, stream, progress) {
                self.cancel(at);
                return Err(error);
            }
        }
        Ok(())
    }

    fn begin_in(&mut self, at: usize, stream: u64, progress: &Arc<dyn Progress>) -> Result<()> {
        let Followed { order, before, count, number } = &mut self.orders[at];
        let mut state = order.turn(&self.place, Some(stream))?;
        state.unsubmitted.pop_front();
        let position = Position { stream, seq: u64::MAX, progress: progress.clone() };
        *before = state.last.replace(position);
        *number = state.number;
        state.number = number.wrapping_add(*count);
        Ok(())
    }

    /// Follows an order that it does not yet, and takes so many numbers. Returns its index.
    fn add(&mut self, order: &StreamOrder, count: u64) -> usize {
        order.0.state.lock().unsubmitted.push_back((Arc::downgrade(&self.place), count));
        self.orders.push(Followed { order: order.clone(), before: None, count, number: 0 });
        self.orders.len() - 1
    }

    /// Undoes [`Follows::begin`] in the first orders, after a refusal.
    fn cancel(&mut self, orders: usize) {
        for Followed { order, before, count, number } in &mut self.orders[..orders] {
            let mut state = order.0.state.lock();
            state.last = before.take();
            state.number = *number;
            state.unsubmitted.push_front((Arc::downgrade(&self.place), *count));
        }
    }

    /// Undoes [`Follows::begin`].
    pub(super) fn refuse(&mut self) {
        self.cancel(self.orders.len());
    }

    /// The stream has got it, as this submission.
    pub(super) fn submitted(&mut self, seq: u64) {
        if let Some(numbers) = self.numbers() {
            self.place.numbers.get_or_init(|| numbers);
        }
        for order in self.orders() {
            let mut state = order.0.state.lock();
            if let Some(last) = &mut state.last {
                last.seq = seq;
                self.place.at.get_or_init(|| last.clone());
            }
        }
    }

    pub(super) fn cores(&self) -> impl Iterator<Item = &Arc<QpCore>> {
        self.orders().map(StreamOrder::core)
    }
}

impl Batch {
    /// Has the batch follow an order: it is submitted behind all that follow it already, and to the same stream until that has done
    /// them. The ticket says how far it is. A batch that is dropped no longer counts.
    pub fn follow(&mut self, order: &StreamOrder) -> Ticket {
        let (follows, at) = self.following(order);
        let taken = Number { order: at, nth: follows.orders[at].count };
        Ticket { place: follows.place.clone(), qpn: order.core().qpn, taken }
    }

    /// What it follows, and the index of the order there.
    fn following(&mut self, order: &StreamOrder) -> (&mut Follows, usize) {
        let follows = self.follows.get_or_insert_default();
        let known = follows.orders().position(|known| known.is(order));
        let at = known.unwrap_or_else(|| follows.add(order, 0));
        (follows, at)
    }

    /// Follows as a recorded batch did.
    pub(super) fn follow_again(&mut self, orders: &Orders) {
        if orders.0.is_empty() {
            return;
        }
        let follows = self.follows.insert(Box::default());
        for (order, count) in &orders.0 {
            follows.add(order, *count);
        }
    }

    /// Has the batch follow an order and take its next number, from 1 on: when a stream gets the batch, and in each launch of a graph
    /// anew, so a batch that was dropped has taken none.
    pub(super) fn number(&mut self, order: &StreamOrder) -> Ticket {
        let (follows, at) = self.following(order);
        let followed = &mut follows.orders[at];
        followed.count += 1;
        let mut state = order.0.state.lock();
        let own =
            state.unsubmitted.iter_mut().find(|(place, _)| place.as_ptr() == Arc::as_ptr(&follows.place));
        own.into_iter().for_each(|(_, count)| *count = followed.count);
        drop(state);
        self.follow(order)
    }

    /// Gives its messages numbers as if it were submitted next, for a capture.
    pub(super) fn expect_numbers(&mut self) {
        for followed in self.follows.iter_mut().flat_map(|follows| &mut follows.orders) {
            followed.number = followed.order.last_number().wrapping_sub(followed.count);
        }
        self.set_numbers();
    }

    /// Gives its messages their numbers, which are known.
    pub(super) fn set_numbers(&mut self) -> Numbers {
        let numbers = self.follows.as_ref().and_then(|follows| follows.numbers());
        let Some(numbers) = numbers else { return Numbers::new() };
        for op in &mut self.ops {
            if let Op::Message(message) = op {
                message.number = message.taken.behind(&numbers);
            }
        }
        numbers
    }
}

impl Ticket {
    /// The last number that its order has had through it, for a message its own, once a stream has got it.
    pub fn number(&self) -> Option<u64> {
        self.place.numbers.get().map(|before| self.taken.behind(before))
    }

    /// Whether no stream has got the batch, which may come.
    pub fn is_unsubmitted(&self) -> bool {
        self.place.at.get().is_none() && !self.is_taken_back()
    }

    /// Whether the batch was dropped.
    pub fn is_taken_back(&self) -> bool {
        self.place.is_dropped.load(Ordering::Acquire) && self.place.at.get().is_none()
    }

    /// Whether the stream is known to have done it. It may know later than it has: see [`Ticket::ask`].
    ///
    /// # Errors
    /// Why the stream has failed; [`Error::TakenBack`].
    pub fn is_done(&self) -> Result<bool> {
        match self.place.at.get() {
            Some(at) => at.progress.is_done(at.seq),
            None if self.is_taken_back() => Err(Error::TakenBack { qpn: self.qpn }),
            None => Ok(false),
        }
    }

    /// Has the stream tell when it has done it.
    pub fn ask(&self) {
        if let Some(at) = self.place.at.get().filter(|at| !at.is_over()) {
            at.progress.ask();
        }
    }

    /// Blocks until the stream has done it.
    ///
    /// # Errors
    /// [`Error::Deadline`] after `timeout`; as [`Ticket::is_done`].
    pub fn wait(&self, timeout: Duration) -> Result<()> {
        match self.place.at.get() {
            Some(at) => at.wait("waiting for a copy of a stream", timeout, deadline(timeout)),
            None if self.is_taken_back() => Err(Error::TakenBack { qpn: self.qpn }),
            None => Err(Error::InvalidArgument {
                what: "this operation",
                value: "in a batch that was not submitted".into(),
                expected: "Stream::submit for it before the wait",
            }),
        }
    }

    /// Holds the stream that gets a batch until it is done; nothing if it is in this batch, or in one of the same stream before it.
    ///
    /// # Errors
    /// [`Error::TakenBack`]; [`Error::Unsupported`] for what a stream of the host does.
    pub fn wait_in_batch(&self, batch: &mut Batch) -> Result<()> {
        match self.place.at.get() {
            Some(at) if !self.is_done()? => at.wait_in_batch(batch),
            None if self.is_taken_back() => Err(Error::TakenBack { qpn: self.qpn }),
            // It is in this batch, or in one that has to be submitted before.
            _ => Ok(()),
        }
    }

    /// As [`Ticket::wait_in_batch`], on a stream.
    ///
    /// # Errors
    /// As [`Ticket::wait_in_batch`] and [`Stream::wait_value64`].
    pub fn wait_on_stream(&self, stream: &Stream) -> Result<()> {
        match self.place.at.get() {
            Some(at) => at.wait_on_stream(stream),
            None if self.is_taken_back() => Err(Error::TakenBack { qpn: self.qpn }),
            None => Ok(()),
        }
    }
}

impl Stream {
    /// Begins to submit a batch in its orders.
    pub(super) fn begin_orders(&self, batch: &mut Batch) -> Result<()> {
        match &mut batch.follows {
            Some(follows) => follows.begin(self.id(), &self.0.engine.progress()),
            None => Ok(()),
        }
    }
}
