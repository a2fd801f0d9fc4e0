//! The order of what streams do beside a queue pair, as copies between GPUs: one stream has it at a time, as it has a queue.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};
use std::{fmt, mem, ptr};

use parking_lot::{Mutex, MutexGuard};
use smallvec::SmallVec;

use super::batch::Replenish;
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
    /// See [`StreamOrder::before_launches`].
    hooks: OnceLock<Box<Hooks>>,
}

type Hooks = dyn Fn() -> Result<Vec<Arc<dyn Replenish>>> + Send + Sync;

#[derive(Default)]
struct State {
    /// Batches that no stream has got, oldest first, by the addresses of their places, and how many numbers each takes.
    unsubmitted: VecDeque<(usize, u64)>,
    /// The stream that is being given the oldest one.
    taker: Option<u64>,
    last: Option<Position>,
    /// The last number that a stream has got.
    number: u64,
}

/// A submission of a stream.
#[derive(Clone)]
struct Position {
    stream: u64,
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
        Err(late(what, timeout, self.stream))
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

/// The error of a wait for a stream.
fn late(what: &str, timeout: Duration, stream: u64) -> Error {
    Error::late(what, timeout, format!("{} to get there", stream_name::describe(stream)))
}

/// Where a batch is in its stream.
#[derive(Default)]
struct Place {
    /// With the last number of each order before it.
    got: OnceLock<(Position, Numbers)>,
    is_dropped: AtomicBool,
}

impl Place {
    fn at(&self) -> Option<&Position> {
        self.got.get().map(|(at, _)| at)
    }

    fn key(&self) -> usize {
        ptr::from_ref(self).addr()
    }
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
        write!(f, "Ticket({:#x}, {:?})", self.qpn, self.place.at().map(|at| (at.stream, at.seq)))
    }
}

impl StreamOrder {
    /// Beside a queue pair.
    pub fn new(qp: &Qp) -> Self {
        let (end, state, hooks) = (qp.send.end.clone(), Mutex::default(), OnceLock::new());
        Self(Arc::new(Inner { end, state, hooks }))
    }

    /// Has each capture of a batch that follows it, and each recording of steps, ask for hooks, as those of
    /// [`Batch::before_launches`]. Set once, before the first batch. `hooks` is called under the lock of a stream: it must not use streams.
    pub fn before_launches(
        &self,
        hooks: impl Fn() -> Result<Vec<Arc<dyn Replenish>>> + Send + Sync + 'static,
    ) {
        self.0.hooks.get_or_init(|| Box::new(hooks));
    }

    pub(super) fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// Refuses while a stream has not done what follows it, or a batch that does was not submitted.
    ///
    /// # Errors
    /// [`Error::Busy`]; [`Error::OutOfOrder`].
    pub fn check_idle(&self) -> Result<()> {
        self.turn(None, None).map(drop)
    }

    /// Whether a stream has not done what follows it, as far as is known. Unlike the checks it does not have a GPU tell, which may block
    /// the caller in the driver.
    pub fn is_busy(&self) -> bool {
        self.0.state.lock().holder(None).is_some()
    }

    /// Whether a batch that follows it, or a capture, was not submitted.
    pub fn has_unsubmitted(&self) -> bool {
        let state = self.0.state.lock();
        // One of them is being submitted.
        state.unsubmitted.len() > usize::from(state.taker.is_some())
    }

    /// The last number that a batch takes for a message. Batches that were dropped take none.
    pub fn last_number(&self) -> u64 {
        let state = self.0.state.lock();
        state.unsubmitted.iter().fold(state.number, |number, (_, count)| number.wrapping_add(*count))
    }

    /// Blocks until streams have done all that follows it and was submitted.
    ///
    /// # Errors
    /// [`Error::Deadline`]; why the last stream has failed.
    pub fn wait_idle(&self, timeout: Duration) -> Result<()> {
        const WHAT: &str = "waiting for the copies of a stream";
        let end = deadline(timeout);
        loop {
            let state = self.0.state.lock();
            let (taker, last) = (state.taker, state.last.clone());
            drop(state);
            match (taker, last) {
                // Another thread is submitting it.
                (Some(_), _) if Instant::now() < end => std::thread::yield_now(),
                (Some(taker), _) => return Err(late(WHAT, timeout, taker)),
                (None, Some(last)) => return last.wait(WHAT, timeout, end),
                (None, None) => return Ok(()),
            }
        }
    }

    /// Refuses while another stream has not done what follows it. The stream that has will tell when it has done it.
    ///
    /// # Errors
    /// [`Error::Busy`].
    pub fn check_for(&self, stream: &Stream) -> Result<()> {
        let state = self.0.state.lock();
        match state.holder(None) {
            Some(holder) if holder != stream.id() => return Err(self.busy(state, holder)),
            Some(_) => drop(state),
            None => return Ok(()),
        }
        stream.0.engine.progress().ask();
        Ok(())
    }

    /// Refuses unless it is the turn of a batch, on this stream. Without a batch, unless all were submitted and are done.
    fn turn(&self, place: Option<&Place>, stream: Option<u64>) -> Result<MutexGuard<'_, State>> {
        let state = self.0.state.lock();
        let is_taken = state.taker.is_some_and(|taker| Some(taker) != stream);
        if !is_taken && state.unsubmitted.front().map(|(key, _)| *key) != place.map(Place::key) {
            return Err(self.out_of_order());
        }
        match state.holder(stream) {
            None => Ok(state),
            Some(holder) => Err(self.busy(state, holder)),
        }
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

    fn busy(&self, state: MutexGuard<'_, State>, holder: u64) -> Error {
        let last = state.last.clone();
        drop(state);
        // So that a later look finds it over.
        last.iter().for_each(|last| last.progress.ask());
        Error::Busy { queue: "send", qpn: self.core().qpn, owner: stream_name::describe(holder) }
    }
}

impl State {
    /// The stream that has not done what follows, other than this one.
    fn holder(&self, stream: Option<u64>) -> Option<u64> {
        let last = self.last.as_ref().filter(|last| !last.is_over());
        self.taker.or(last.map(|last| last.stream)).filter(|holder| Some(*holder) != stream)
    }
}

/// What a batch follows.
#[derive(Default)]
pub(super) struct Follows {
    place: Arc<Place>,
    /// With the numbers that the batch takes.
    orders: SmallVec<[(StreamOrder, u64); 3]>,
    /// The last numbers before, once a stream is being given the batch.
    pub(super) numbers: Numbers,
}

impl fmt::Debug for Follows {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.orders()).finish()
    }
}

impl Drop for Follows {
    fn drop(&mut self) {
        if self.place.at().is_some() {
            return;
        }
        let key = self.place.key();
        // Nobody in a forked child releases what another thread had locked.
        for order in self.orders().filter(|order| order.core().is_here()) {
            let unsubmitted = &mut order.0.state.lock().unsubmitted;
            let at = unsubmitted.iter().position(|(other, _)| *other == key);
            at.map(|at| unsubmitted.remove(at));
        }
        self.place.is_dropped.store(true, Ordering::Release);
    }
}

/// What each launch of a graph follows, with how many numbers it takes.
#[derive(Debug, Default)]
pub(super) struct Orders(Vec<(StreamOrder, u64)>);

impl Orders {
    /// Has launches follow what a batch follows, too. Returns the last number of each of its orders before it, among those of a launch.
    pub(super) fn join(&mut self, follows: &Follows) -> Vec<Number> {
        let join = |(order, count): &(StreamOrder, u64)| {
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
        self.orders.iter().map(|(order, _)| order)
    }

    /// Refuses unless the CPU may do it now.
    pub(super) fn check(&self) -> Result<()> {
        self.orders().try_for_each(|order| order.turn(Some(&self.place), None).map(drop))
    }

    /// Begins to submit to a stream, in all orders or none.
    pub(super) fn begin(&mut self, stream: u64) -> Result<()> {
        self.numbers.clear();
        for (order, _) in &self.orders {
            match order.turn(Some(&self.place), Some(stream)) {
                Ok(mut state) => {
                    state.taker = Some(stream);
                    self.numbers.push(state.number);
                }
                Err(error) => {
                    self.refuse();
                    return Err(error);
                }
            }
        }
        Ok(())
    }

    /// Undoes [`Follows::begin`], also where that was refused.
    pub(super) fn refuse(&self) {
        for (order, _) in &self.orders[..self.numbers.len()] {
            order.0.state.lock().taker = None;
        }
    }

    /// The stream has got it, as this submission.
    pub(super) fn submitted(&mut self, stream: u64, seq: u64, progress: Arc<dyn Progress>) {
        let at = Position { stream, seq, progress };
        for (order, count) in &self.orders {
            // The position of another stream: its drop must not run under the lock.
            let mut _before = None;
            let mut state = order.0.state.lock();
            self.place.got.get_or_init(|| (at.clone(), mem::take(&mut self.numbers)));
            state.unsubmitted.pop_front();
            (state.taker, state.number) = (None, state.number.wrapping_add(*count));
            match &mut state.last {
                Some(last) if last.stream == stream => last.seq = seq,
                last => _before = last.replace(at.clone()),
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
        self.take_numbers(order, 0)
    }

    /// Has the batch follow an order and take its next number, from 1 on: when a stream gets the batch, and in each launch of a graph
    /// anew, so a batch that was dropped has taken none.
    pub(super) fn number(&mut self, order: &StreamOrder) -> Ticket {
        self.take_numbers(order, 1)
    }

    fn take_numbers(&mut self, order: &StreamOrder, count: u64) -> Ticket {
        let Follows { place, orders, .. } = self.follows.get_or_insert_default();
        let (key, mut state) = (place.key(), order.0.state.lock());
        let at = orders.iter().position(|(known, _)| known.is(order)).unwrap_or_else(|| {
            state.unsubmitted.push_back((key, 0));
            orders.push((order.clone(), 0));
            orders.len() - 1
        });
        let own = state.unsubmitted.iter_mut().rfind(|(other, _)| *other == key);
        own.into_iter().for_each(|(_, taken)| *taken += count);
        orders[at].1 += count;
        let taken = Number { order: at, nth: orders[at].1 };
        Ticket { place: place.clone(), qpn: order.core().qpn, taken }
    }

    /// Follows as a recorded batch did.
    pub(super) fn follow_again(&mut self, orders: &Orders) {
        for (order, count) in &orders.0 {
            self.take_numbers(order, *count);
        }
    }

    /// The hooks of its orders.
    pub(super) fn hooks(&self) -> Result<Vec<Arc<dyn Replenish>>> {
        let orders = self.follows.iter().flat_map(Follows::orders);
        let hooks = orders.filter_map(|order| order.0.hooks.get()).map(|hooks| hooks());
        Ok(hooks.collect::<Result<Vec<_>>>()?.into_iter().flatten().collect())
    }

    /// Gives its messages numbers as if it were submitted next, for a capture.
    pub(super) fn expect_numbers(&mut self) {
        if let Some(Follows { orders, numbers, .. }) = &mut self.follows {
            *numbers = orders.iter().map(|(order, count)| order.last_number().wrapping_sub(*count)).collect();
        }
        self.set_numbers();
    }

    /// Gives its messages their numbers, which are known.
    pub(super) fn set_numbers(&mut self) {
        let Some(Follows { numbers, .. }) = &self.follows else { return };
        for op in &mut self.ops {
            if let Op::Message(message) = op {
                message.number = message.taken.behind(numbers);
            }
        }
    }
}

impl Ticket {
    /// The last number that its order has had through it, for a message its own, once a stream has got it.
    pub fn number(&self) -> Option<u64> {
        self.place.got.get().map(|(_, before)| self.taken.behind(before))
    }

    /// Whether no stream has got the batch, which may come.
    pub fn is_unsubmitted(&self) -> bool {
        self.place.at().is_none() && !self.is_taken_back()
    }

    /// Whether the batch was dropped.
    pub fn is_taken_back(&self) -> bool {
        self.place.is_dropped.load(Ordering::Acquire)
    }

    /// Whether the stream is known to have done it. It may know later than it has: see [`Ticket::ask`].
    ///
    /// # Errors
    /// Why the stream has failed; [`Error::TakenBack`].
    pub fn is_done(&self) -> Result<bool> {
        match self.place.at() {
            Some(at) => at.progress.is_done(at.seq),
            None if self.is_taken_back() => Err(Error::TakenBack { qpn: self.qpn }),
            None => Ok(false),
        }
    }

    /// Has the stream tell when it has done it.
    pub fn ask(&self) {
        if let Some(at) = self.place.at().filter(|at| !at.is_over()) {
            at.progress.ask();
        }
    }

    /// Blocks until the stream has done it.
    ///
    /// # Errors
    /// [`Error::Deadline`] after `timeout`; as [`Ticket::is_done`].
    pub fn wait(&self, timeout: Duration) -> Result<()> {
        match self.place.at() {
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
        match self.place.at() {
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
        match self.place.at() {
            Some(at) => at.wait_on_stream(stream),
            None if self.is_taken_back() => Err(Error::TakenBack { qpn: self.qpn }),
            None => Ok(()),
        }
    }
}
