//! Requests: waiting, functions to call, and cancelling.

use std::ffi::{c_int, c_void};
use std::sync::Arc;
use std::thread::Builder;
use std::time::{Duration, Instant};

use gdsync_capi_support::guard::no_panic;
use gdsync_capi_support::handles::{Borrowed, Table};
use mp::{AnyRequest, Status, tagged, wait_any};
use parking_lot::{Condvar, Mutex};

use crate::abi::{IN_PROGRESS, KINDS, Raw, gda_status};
use crate::comm::Comm;
use crate::context::context;
use crate::guard::{
    Error, Foreign, Result, checked_size, invalid, non_null, number, output, place, report, status, timeout,
};
use crate::stream::on;

/// An operation under way.
pub(crate) enum Request {
    Message(Arc<Comm>, mp::Request),
    Tagged(Arc<Comm>, tagged::Request),
    Join(Join),
}

pub(crate) static REQUESTS: Table<Request> = Table::new(5, &KINDS);

/// How long a wait goes on before it looks whether the communicator was destroyed.
pub(crate) const LOOK: Duration = Duration::from_millis(100);

impl AnyRequest for Request {
    fn outcome(&self) -> Option<mp::Result<Status>> {
        let outcome = match self {
            Self::Message(_, request) => request.outcome(),
            Self::Tagged(_, request) => request.outcome(),
            Self::Join(join) => join.outcome(Duration::ZERO),
        };
        match outcome {
            Some(Ok(outcome)) => Some(Ok(outcome)),
            // The connections end with the communicator.
            Some(Err(error)) if !error.is_rank_lost() => Some(Err(error)),
            lost if self.comm().is_none_or(|comm| !comm.is_gone()) => lost,
            _ => Some(Err(mp::Error::Cancelled)),
        }
    }
}

impl Request {
    fn comm(&self) -> Option<&Arc<Comm>> {
        match self {
            Self::Message(comm, _) | Self::Tagged(comm, _) => Some(comm),
            Self::Join(_) => None,
        }
    }

    /// Goes on after a wait of [`LOOK`], and looks now and then whether the communicator was destroyed.
    #[cold]
    fn wait_longer(
        &self,
        mut outcome: Option<mp::Result<Status>>,
        timeout: Duration,
    ) -> Option<mp::Result<Status>> {
        let (start, timeout) = (Instant::now(), timeout.saturating_sub(LOOK));
        let mut left = timeout;
        while outcome.is_none() && !left.is_zero() {
            outcome = self.wait_once(left.min(LOOK));
            left = timeout.saturating_sub(start.elapsed());
        }
        outcome
    }

    fn wait_once(&self, timeout: Duration) -> Option<mp::Result<Status>> {
        match self {
            _ if timeout.is_zero() => self.outcome(),
            Self::Join(join) => join.outcome(timeout),
            Self::Message(comm, request) => self.settle(comm.comm.wait(request, timeout)),
            Self::Tagged(_, request) => self.settle(request.wait(timeout)),
        }
    }

    /// What a wait says of it.
    fn settle(&self, done: mp::Result<Status>) -> Option<mp::Result<Status>> {
        match done {
            // Late, or failed so.
            Err(
                mp::Error::Deadline { .. } | mp::Error::Message { cause: gdsync::Error::Deadline { .. }, .. },
            ) => self.outcome(),
            Err(error) if error.is_rank_lost() => self.outcome(),
            done => Some(done),
        }
    }
}

/// Hands a request to the caller, if it wants one.
#[inline]
pub(crate) fn give(req: *mut Raw, request: impl FnOnce() -> Request) -> Result<()> {
    // SAFETY: null, or writable: the header asks for it.
    if let Some(req) = unsafe { req.as_mut() } {
        *req = REQUESTS.insert(request())?;
    }
    Ok(())
}

/// As [`give`], of a send, which may be complete.
#[inline]
pub(crate) fn give_send(req: *mut Raw, sent: mp::Request, comm: &Arc<Comm>) -> Result<()> {
    // SAFETY: null, or writable: the header asks for it.
    if let Some(req) = unsafe { req.as_mut() } {
        *req = match sent.test()? {
            Some(_) => 0,
            None => REQUESTS.insert(Request::Message(comm.clone(), sent))?,
        };
    }
    Ok(())
}

/// The handle of a communicator.
pub(crate) type Joined = Raw;

/// A communicator that a thread makes.
pub(crate) struct Join(Arc<JoinState>);

struct JoinState {
    outcome: Mutex<Option<mp::Result<Status>>>,
    done: Condvar,
    /// Where the communicator goes; `None` if the request was dropped.
    to: Mutex<Option<Foreign>>,
}

impl Join {
    fn outcome(&self, timeout: Duration) -> Option<mp::Result<Status>> {
        let mut outcome = self.0.outcome.lock();
        self.0.done.wait_while_for(&mut outcome, |outcome| outcome.is_none(), timeout);
        outcome.clone()
    }
}

impl Drop for Join {
    fn drop(&mut self) {
        *self.0.to.lock() = None;
    }
}

/// Has a thread make a communicator and put its handle into `to`.
pub(crate) fn join(
    to: Foreign,
    req: &mut Raw,
    make: impl FnOnce() -> Result<Joined> + Send + 'static,
) -> Result<()> {
    let (outcome, done, to) = (Mutex::default(), Condvar::new(), Mutex::new(Some(to)));
    let state = Arc::new(JoinState { outcome, done, to });
    let run = {
        let state = state.clone();
        move || {
            let outcome = match no_panic(make) {
                Ok(Ok(comm)) => {
                    let to = state.to.lock();
                    match &*to {
                        // SAFETY: valid until the request ends, and it lives while `to` is there.
                        Some(to) => unsafe { to.get().cast::<Raw>().write(comm) },
                        // It is dropped.
                        None => _ = crate::comm::COMMS.take(comm),
                    }
                    Ok(Status::default())
                }
                Ok(Err(Error::Mp(error))) => Err(error),
                Ok(Err(Error::Own(_, what))) => {
                    Err(mp::Error::Launch { what, fix: "end communicators that are not used" })
                }
                Err(panicked) => Err(mp::Error::Launch {
                    what: format!("the thread that makes the communicator {panicked}"),
                    fix: "report it, with the lines that it has printed",
                }),
            };
            *state.outcome.lock() = Some(outcome);
            state.done.notify_all();
        }
    };
    let thread = Builder::new().name("gda-connect".into()).spawn(run);
    thread.map_err(|error| Error::Own(libc::EAGAIN, format!("no thread to connect: {error}")))?;
    *req = REQUESTS.insert(Request::Join(Join(state)))?;
    Ok(())
}

fn fill(outcome: Status) -> impl FnOnce(&mut gda_status) {
    move |status| {
        status.rank = c_int::try_from(outcome.rank).unwrap_or(-1);
        status.len = outcome.bytes as u64;
        status.tag = outcome.tag;
    }
}

/// The error of an operation of this communicator.
fn explain(comm: Option<&Arc<Comm>>, error: mp::Error) -> Error {
    match error {
        mp::Error::Cancelled if comm.is_some_and(|comm| comm.is_gone()) => {
            let text = "the communicator was destroyed before this operation was complete; wait for it first";
            Error::Own(libc::ECANCELED, text.into())
        }
        other => other.into(),
    }
}

/// Refuses a place for the status that is none.
fn check(place: *mut gda_status) -> Result<()> {
    if place.is_null() { Ok(()) } else { checked_size("status", place).map(drop) }
}

/// Ends a request with its outcome.
///
/// # Safety
/// `place` must be checked.
unsafe fn finish(
    request: Borrowed<Request>,
    outcome: mp::Result<Status>,
    place: *mut gda_status,
) -> Result<()> {
    let outcome = outcome.map_err(|error| explain(request.comm(), error));
    request.discard();
    // SAFETY: its size was checked.
    unsafe { output(place, fill(outcome?)) };
    Ok(())
}

/// See the header.
///
/// # Safety
/// `status` must be null or as long as it says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gda_req_wait(req: Raw, timeout_ns: i64, status: *mut gda_status) -> c_int {
    number("gda_req_wait", || {
        check(status)?;
        if req == 0 {
            return Ok(0);
        }
        let (request, timeout) = (REQUESTS.borrow(req)?, timeout(timeout_ns)?);
        let first = timeout.min(LOOK);
        let outcome = match &*request {
            // Messages that are soon complete take no clock, and their outcome is not moved: that costs as much as the rest.
            Request::Message(comm, message) if !first.is_zero() => match comm.comm.wait(message, first) {
                Ok(done) => {
                    request.discard();
                    // SAFETY: its size was checked.
                    unsafe { output(status, fill(done)) };
                    return Ok(0);
                }
                failed => request.settle(failed),
            },
            other => other.wait_once(first),
        };
        match request.wait_longer(outcome, timeout) {
            None => Ok(IN_PROGRESS),
            // SAFETY: its size was checked.
            Some(outcome) => unsafe { finish(request, outcome, status) }.map(|()| 0),
        }
    })
}

/// See the header.
///
/// # Safety
/// `reqs` must be valid for `n` handles, `which` for a write, `status` null or as long as it says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gda_req_wait_any(
    reqs: *mut Raw,
    n: c_int,
    timeout_ns: i64,
    which: *mut c_int,
    status: *mut gda_status,
) -> c_int {
    number("gda_req_wait_any", || {
        check(status)?;
        let which = place("which", which)?;
        let count = usize::try_from(n).map_err(|_| invalid("n", n, "a number that is not negative"))?;
        let all: &mut [Raw] = match count {
            0 => &mut [],
            _ => {
                let first = non_null("reqs", reqs)?;
                // SAFETY: valid for as many: the caller guarantees it.
                unsafe { std::slice::from_raw_parts_mut(first, count) }
            }
        };
        let places: Vec<_> = (0..count).filter(|&place| all[place] != 0).collect();
        *which = -1;
        if places.is_empty() {
            return Ok(0);
        }
        let borrowed = places.iter().map(|&place| REQUESTS.borrow(all[place]));
        let borrowed = borrowed.collect::<std::result::Result<Vec<_>, _>>()?;
        let requests: Vec<_> = borrowed.iter().map(|one| &**one as &dyn AnyRequest).collect();
        let (index, outcome) = match wait_any(&requests, timeout(timeout_ns)?) {
            Err(mp::Error::Deadline { .. }) => return Ok(IN_PROGRESS),
            other => other?,
        };
        let place = places[index];
        (*which, all[place]) = (c_int::try_from(place).unwrap_or(c_int::MAX), 0);
        let request = borrowed.into_iter().nth(index).expect("one of them");
        // SAFETY: its size was checked.
        unsafe { finish(request, outcome, status) }.map(|()| 0)
    })
}

/// A function for the outcome of a request.
pub type OnDone = unsafe extern "C" fn(*mut c_void, c_int, *const gda_status);

/// See the header.
///
/// # Safety
/// The function must stay callable with `this` until it was called.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gda_req_on_done(
    ctx: Raw,
    req: Raw,
    done: Option<OnDone>,
    this: *mut c_void,
) -> c_int {
    status("gda_req_on_done", || {
        let done = done.ok_or_else(|| invalid("done", "NULL", "a function"))?;
        let (ctx, this) = (context(ctx)?, Foreign(this));
        let request = if req == 0 { None } else { Some(REQUESTS.take(req)?) };
        let comm = request.as_ref().and_then(|request| request.comm().cloned());
        let call = move |outcome: mp::Result<Status>| {
            let struct_size = u32::try_from(size_of::<gda_status>()).unwrap_or(0);
            let mut status = gda_status { struct_size, rank: -1, len: 0, tag: 0 };
            let result = match outcome {
                Ok(outcome) => {
                    fill(outcome)(&mut status);
                    0
                }
                Err(error) => report("gda_req_on_done", &explain(comm.as_ref(), error)),
            };
            // SAFETY: the caller's function, once.
            unsafe { done(this.get(), result, &raw const status) };
        };
        match request {
            None => call(Ok(Status::default())),
            Some(request) => ctx.requests.add(request, call),
        }
        Ok(())
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn gda_req_on_stream(req: Raw, stream: Raw) -> c_int {
    status("gda_req_on_stream", || {
        if req == 0 {
            return Ok(());
        }
        let request = REQUESTS.borrow(req)?;
        match &*request {
            Request::Message(comm, request) => {
                on(stream, |batch| Ok(comm.comm.wait_in_batch(batch, request)?))
            }
            _ => {
                let text = "streams wait for messages without tags and one-sided operations only".into();
                Err(Error::Own(libc::EOPNOTSUPP, text))
            }
        }
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn gda_req_cancel(req: Raw) -> c_int {
    number("gda_req_cancel", || match &*REQUESTS.borrow(req)? {
        Request::Tagged(_, request) => Ok(if request.cancel() { 0 } else { IN_PROGRESS }),
        _ => Err(Error::Own(libc::EOPNOTSUPP, "only receives with tags can be cancelled".into())),
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn gda_req_free(req: Raw) -> c_int {
    status("gda_req_free", || {
        if req != 0 {
            REQUESTS.borrow(req)?.discard();
        }
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use std::ptr::null_mut;

    use super::*;

    #[test]
    fn a_request_ends_where_its_thread_panics() {
        let (mut comm, mut req): (Raw, Raw) = (0, 0);
        join(Foreign((&raw mut comm).cast()), &mut req, || panic!("for this test")).unwrap();
        // SAFETY: no status is asked for.
        let failed = unsafe { gda_req_wait(req, 60_000_000_000, null_mut()) };
        assert!(failed < 0 && comm == 0, "{failed}, {comm}");
    }
}
