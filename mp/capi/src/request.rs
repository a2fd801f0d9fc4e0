//! Peers and the requests to them.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use gdsync::stream::PreparedSend;
use gdsync::verbs::{Completion, Qp};
use gdsync::{Error, shm::Backoff};
use gdsync_capi_support::guard::wait_limit;
use gdsync_capi_support::handles::{Handle, MARK, Table};
use parking_lot::{Mutex, MutexGuard};

use crate::abi::KINDS;
use crate::failure::{Failure, LIBRARY, Result};

/// How long a call of the CPU waits for room in a queue, and any call for a queue that another stream uses, unless the limit of waits
/// is shorter.
const PATIENCE: Duration = Duration::from_secs(10);

pub(crate) static REQUESTS: Table<Arc<Request>> = Table::new(1, &KINDS);

/// The request of a handle, marked or not; `None` if it was ended.
pub(crate) fn find(handle: Handle) -> Result<Option<Arc<Request>>> {
    let handle = handle & !MARK;
    loop {
        match REQUESTS.get(handle) {
            Ok(request) => return Ok(Some(request.clone())),
            // Another thread is about to end it.
            Err(refusal) if refusal.errno == libc::EBUSY => std::thread::yield_now(),
            Err(_) if REQUESTS.has_ended(handle).unwrap_or(false) => return Ok(None),
            Err(refusal) => return Err(refusal.into()),
        }
    }
}

/// A rank that this one is connected with.
#[derive(Debug)]
pub(crate) struct Peer {
    pub(crate) rank: usize,
    pub(crate) qp: Qp,
    /// The submit lock: held from the preparation of sends until the device or a stream has them, so that it gets them in order.
    submit: Mutex<()>,
    sends: Flow,
    receives: Flow,
}

/// Requests of one direction whose completions were not taken, in order.
type Flow = Mutex<VecDeque<Arc<Request>>>;

/// A message, put or get.
#[derive(Debug)]
pub(crate) struct Request {
    pub(crate) peer: Arc<Peer>,
    pub(crate) is_send: bool,
    /// A put without a handle to wait for.
    pub(crate) is_unwaited: bool,
    pub(crate) completion: Completion,
    /// A kernel starts it.
    is_of_kernel: AtomicBool,
    state: Mutex<State>,
}

#[derive(Debug)]
pub(crate) enum State {
    Prepared(PreparedSend),
    /// A list of operations has it.
    Listed,
    Posted,
    Done(Result<()>),
}

/// [`PATIENCE`], or the limit of waits.
pub(crate) fn patience() -> Duration {
    PATIENCE.min(wait_limit())
}

/// Waits a moment between two polls.
pub(crate) fn pause(backoff: &Backoff) {
    if !backoff.spin() {
        std::thread::sleep(Duration::from_micros(50));
    }
}

impl Peer {
    pub(crate) fn new(rank: usize, qp: Qp) -> Arc<Self> {
        Arc::new(Self {
            rank,
            qp,
            submit: Mutex::default(),
            sends: Mutex::default(),
            receives: Mutex::default(),
        })
    }

    fn flow(&self, is_send: bool) -> &Flow {
        if is_send { &self.sends } else { &self.receives }
    }

    /// Locks out other threads that send.
    pub(crate) fn lock_submit(&self, patience: Duration) -> Result<MutexGuard<'_, ()>> {
        self.submit.try_lock_for(patience).ok_or_else(|| {
            let owner = "another thread, which waits for room in it or in a stream".into();
            Error::Busy { queue: "send", qpn: self.qp.qpn(), owner }.into()
        })
    }

    /// Makes a request by `post`. While a queue is full, or busy, progresses and tries again. Of `in_turn` sends, none may be
    /// prepared and not posted before it: a full queue would have no room before that is.
    pub(crate) fn add(
        self: &Arc<Self>,
        (is_send, is_unwaited): (bool, bool),
        in_turn: bool,
        patience: Duration,
        post: impl Fn(&Qp) -> gdsync::Result<(Completion, State)>,
    ) -> Result<Arc<Request>> {
        let backoff = Backoff::new(Duration::from_micros(50));
        loop {
            let mut flow = self.flow(is_send).lock();
            match post(&self.qp) {
                Ok((completion, state)) => {
                    let (peer, state) = (self.clone(), Mutex::new(state));
                    let is_of_kernel = AtomicBool::new(false);
                    let request = Request { peer, is_send, is_unwaited, completion, is_of_kernel, state };
                    let request = Arc::new(request);
                    flow.push_back(request.clone());
                    return Ok(request);
                }
                Err(Error::QueueFull { .. }) if in_turn && flow.iter().any(|before| before.is_unposted()) => {
                    let value = "behind one that is prepared and not posted";
                    return Err(Failure::invalid("send", value, "the prepared ones to be posted first"));
                }
                Err(Error::QueueFull { .. } | Error::Busy { .. }) if backoff.waited() < patience => {}
                Err(error) => return Err(error.into()),
            }
            drop(flow);
            self.progress();
            pause(&backoff);
        }
    }

    /// [`Peer::add`] for calls of the CPU.
    pub(crate) fn add_now(
        self: &Arc<Self>,
        kind: (bool, bool),
        post: impl Fn(&Qp) -> gdsync::Result<Completion>,
    ) -> Result<Arc<Request>> {
        let request = self.add(kind, true, patience(), |qp| Ok((post(qp)?, State::Posted)))?;
        request.note_posted();
        Ok(request)
    }

    /// Takes completions.
    pub(crate) fn progress(&self) {
        for flow in [&self.sends, &self.receives] {
            let mut flow = flow.lock();
            while let Some(request) = flow.front() {
                let Some(outcome) = self.outcome(&request.completion) else { break };
                let request = flow.pop_front().expect("it is the first");
                if let Err(failure) = &outcome
                    && request.is_unwaited
                {
                    LIBRARY.report("a put with MP_PUT_NOWAIT", failure, true);
                }
                request.finish(outcome);
            }
        }
    }

    fn outcome(&self, completion: &Completion) -> Option<Result<()>> {
        let failed = |error: Error| {
            let text = format!("rank {}: {error}", self.rank);
            Some(Err(Failure::new(text)))
        };
        match completion.take() {
            Ok(Some(wc)) => wc.ok().map_or_else(|error| failed(error.into()), |_| Some(Ok(()))),
            Ok(None) if !self.qp.is_broken() => None,
            // What was lost with the connection has no completion.
            Ok(None) => completion.status().map_or_else(failed, |_| None),
            Err(error) => failed(error),
        }
    }

    /// Retries `attempt` for a while if another stream uses a queue.
    pub(crate) fn while_busy(&self, mut attempt: impl FnMut() -> gdsync::Result<()>) -> gdsync::Result<()> {
        let backoff = Backoff::new(Duration::from_micros(50));
        loop {
            match attempt() {
                Err(Error::Busy { .. }) if backoff.waited() < patience() => {}
                other => return other,
            }
            self.progress();
            pause(&backoff);
        }
    }

    /// Hands a prepared send to a kernel by `hand_over`, when the sends of others before it are complete. If that fails, it is
    /// taken back; meanwhile nobody prepares others, which could get its number.
    pub(crate) fn hand_over<T>(
        &self,
        request: &Arc<Request>,
        hand_over: impl FnOnce() -> gdsync::Result<T>,
    ) -> Result<T> {
        let is_of_others = |other: &Arc<Request>| {
            let is_of_kernel = other.is_of_kernel.load(Ordering::Relaxed);
            !is_of_kernel && matches!(other.completion.status(), Ok(None))
        };
        let backoff = Backoff::new(Duration::from_micros(50));
        let mut flow = loop {
            let flow = self.sends.lock();
            let mut before = flow.iter().take_while(|other| !Arc::ptr_eq(other, request));
            if backoff.waited() > patience() || !before.any(is_of_others) {
                break flow;
            }
            drop(flow);
            pause(&backoff);
        };
        let done = hand_over().map_err(Failure::from);
        match &done {
            Ok(_) => {
                request.is_of_kernel.store(true, Ordering::Relaxed);
                request.note_posted();
            }
            Err(failure) => request.forget(&mut flow, failure),
        }
        done
    }

    /// Disconnects.
    pub(crate) fn stop(&self) {
        self.qp.stop(&Error::GivenUp);
        for flow in [&self.sends, &self.receives] {
            // Threads may wait for them.
            let ended =
                || Err(Failure::new(format!("rank {}: mp_finalize has ended the request", self.rank)));
            flow.lock().drain(..).for_each(|request| request.finish(ended()));
        }
    }
}

impl Request {
    /// Ends with this outcome, unless it has ended.
    fn finish(&self, outcome: Result<()>) {
        let state = &mut *self.state.lock();
        if !matches!(state, State::Done(_)) {
            *state = State::Done(outcome);
        }
    }

    /// Its outcome, if it is complete.
    pub(crate) fn outcome(&self) -> Option<Result<()>> {
        if let State::Done(outcome) = &*self.state.lock() { Some(outcome.clone()) } else { None }
    }

    /// Whether it is prepared and not posted.
    fn is_unposted(&self) -> bool {
        matches!(&*self.state.lock(), State::Prepared(_) | State::Listed)
    }

    /// Takes the prepared send, to post it or for a list.
    pub(crate) fn take_prepared(&self, next: State) -> Result<PreparedSend> {
        let state = &mut *self.state.lock();
        if !matches!(state, State::Prepared(_)) {
            return Err(Failure::invalid("request", "one that is not prepared", "a prepared send or put"));
        }
        match std::mem::replace(state, next) {
            State::Prepared(send) => Ok(send),
            _ => unreachable!("checked above"),
        }
    }

    /// A stream, kernel or the device has it.
    pub(crate) fn note_posted(&self) {
        let state = &mut *self.state.lock();
        match state {
            State::Done(_) => {}
            _ if self.is_unwaited => *state = State::Done(Ok(())),
            _ => *state = State::Posted,
        }
    }

    /// Ends a prepared send that is taken back: before it is, as others get its number then.
    pub(crate) fn take_back(&self, failure: &Failure) {
        self.forget(&mut self.peer.sends.lock(), failure);
    }

    fn forget(&self, flow: &mut VecDeque<Arc<Self>>, failure: &Failure) {
        flow.retain(|other| !std::ptr::eq(&raw const **other, self));
        self.finish(Err(failure.clone()));
    }

    /// Refuses a request that cannot be waited for. A `list` may come to post it.
    pub(crate) fn check_waitable(&self, list: bool) -> Result<()> {
        let value = match &*self.state.lock() {
            _ if self.is_unwaited => "a put with MP_PUT_NOWAIT",
            State::Prepared(_) => "one that is prepared and not posted",
            State::Listed if !list => "one of a list that is not posted",
            _ => return Ok(()),
        };
        Err(Failure::invalid("request to wait for", value, "a posted request"))
    }

    /// Waits until it is complete.
    pub(crate) fn wait(&self) -> Result<()> {
        let backoff = Backoff::new(Duration::from_micros(50));
        let limit = wait_limit();
        loop {
            self.peer.progress();
            if let Some(outcome) = self.outcome() {
                return outcome;
            }
            if backoff.waited() > limit {
                let what = if self.is_send { "a send, put or get" } else { "a receive" };
                let awaited = format!("rank {}, or a stream that waits for the request", self.peer.rank);
                return Err(Error::late(what, limit, awaited).into());
            }
            pause(&backoff);
        }
    }
}
