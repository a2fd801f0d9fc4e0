//! Requests of any kind together: which is complete first, functions that are called then, and a descriptor to sleep on.

use std::fmt;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

use gdsync::shm::back_off;
use gdsync_device::fork_guard::ForkGuard;
use gdsync_device::memory::{clear_eventfd, eventfd, signal_eventfd};
use parking_lot::{Condvar, Mutex};

use crate::error::{Error, Result};
use crate::request::{self, Status};
use crate::tagged;
use crate::wait::Deadline;

/// An operation under way, of whichever kind.
pub trait AnyRequest: Send {
    /// What became of it; `None` while it is under way. Moves messages along.
    fn outcome(&self) -> Option<Result<Status>>;
}

impl AnyRequest for request::Request {
    fn outcome(&self) -> Option<Result<Status>> {
        let known = self.test().transpose()?;
        self.finish();
        Some(known)
    }
}

impl AnyRequest for tagged::Request {
    fn outcome(&self) -> Option<Result<Status>> {
        self.test().transpose()
    }
}

/// Blocks until one of several operations is complete or has failed, and returns its place among them, and what became of it.
///
/// # Errors
/// [`Error::Deadline`] after `timeout`: all go on.
pub fn wait_any(requests: &[&dyn AnyRequest], timeout: Duration) -> Result<(usize, Result<Status>)> {
    let deadline = Deadline::after(timeout);
    loop {
        let known =
            requests.iter().enumerate().find_map(|(place, request)| Some((place, request.outcome()?)));
        if let Some(known) = known {
            return Ok(known);
        }
        if deadline.is_over() {
            let what = format!("waiting for one of {} operations", requests.len());
            return Err(deadline.error(what, "see that the ranks at the other end take part"));
        }
        back_off(deadline.elapsed(), deadline.remaining());
    }
}

type OnDone = Box<dyn FnOnce(Result<Status>) + Send>;

struct Entry {
    request: Box<dyn AnyRequest>,
    outcome: Option<Result<Status>>,
    on_done: OnDone,
}

impl Entry {
    fn is_complete(&mut self) -> bool {
        if self.outcome.is_none() {
            self.outcome = self.request.outcome();
        }
        self.outcome.is_some()
    }
}

/// Operations under way, each with a function that [`RequestSet::progress`] calls when it is complete. A program with an event loop
/// sleeps on [`RequestSet::event_fd`] while there is nothing to do. Any thread may use it.
///
/// ```no_run
/// # use std::os::fd::AsRawFd;
/// # use mp::{Communicator, Registration, RequestSet};
/// # fn poll(fd: i32) {}
/// # fn example(comm: &Communicator, buffer: &Registration) -> mp::Result<()> {
/// let set = RequestSet::new()?;
/// set.add(comm.irecv(buffer, 0..64, 1)?, |outcome| println!("{outcome:?}"));
/// while set.len() > 0 {
///     if set.progress() == 0 && set.arm()? {
///         poll(set.event_fd().as_raw_fd()); // epoll, libuv, ...
///     }
/// }
/// # Ok(())
/// # }
/// ```
pub struct RequestSet {
    shared: Arc<Shared>,
    watcher: Mutex<Option<JoinHandle<()>>>,
    fork_guard: ForkGuard,
}

struct Shared {
    entries: Mutex<Vec<Entry>>,
    watch: Mutex<Watch>,
    changed: Condvar,
    fd: OwnedFd,
}

/// What the thread behind the descriptor has to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Watch {
    Idle,
    /// Signal the descriptor when an operation is complete.
    Armed,
    Signalled,
    Ended,
}

impl fmt::Debug for RequestSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RequestSet({} operations, {:?})", self.len(), self.shared.watch.lock())
    }
}

impl Shared {
    fn has_complete(&self) -> bool {
        self.entries.lock().iter_mut().any(Entry::is_complete)
    }

    fn run(&self) {
        loop {
            let mut watch = self.watch.lock();
            while matches!(*watch, Watch::Idle | Watch::Signalled) {
                self.changed.wait(&mut watch);
            }
            drop(watch);
            let start = Instant::now();
            while *self.watch.lock() == Watch::Armed && !self.has_complete() {
                back_off(start.elapsed(), Duration::MAX);
            }
            let mut watch = self.watch.lock();
            match *watch {
                Watch::Ended => return,
                Watch::Armed => {
                    *watch = Watch::Signalled;
                    signal_eventfd(&self.fd);
                }
                Watch::Idle | Watch::Signalled => {}
            }
        }
    }
}

impl RequestSet {
    /// An empty one.
    ///
    /// # Errors
    /// [`Error::Device`] if the system has no descriptor left.
    pub fn new() -> Result<Self> {
        let (entries, watch, changed) = (Mutex::default(), Mutex::new(Watch::Idle), Condvar::new());
        let shared = Shared { entries, watch, changed, fd: eventfd()? };
        Ok(Self { shared: Arc::new(shared), watcher: Mutex::default(), fork_guard: ForkGuard::default() })
    }

    /// Adds an operation, and what to call when it is complete or has failed.
    pub fn add(
        &self,
        request: impl AnyRequest + 'static,
        on_done: impl FnOnce(Result<Status>) + Send + 'static,
    ) {
        let entry = Entry { request: Box::new(request), outcome: None, on_done: Box::new(on_done) };
        self.shared.entries.lock().push(entry);
    }

    /// Operations whose function was not called yet.
    pub fn len(&self) -> usize {
        self.shared.entries.lock().len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Moves the operations along, and calls the functions of those that are complete, on this thread and without a lock: they may
    /// use the set. Returns how many were complete. Ends what [`RequestSet::arm`] began.
    pub fn progress(&self) -> usize {
        {
            let mut watch = self.shared.watch.lock();
            if *watch == Watch::Signalled {
                clear_eventfd(&self.shared.fd);
            }
            if *watch != Watch::Ended {
                *watch = Watch::Idle;
            }
        }
        let complete: Vec<_> = self.shared.entries.lock().extract_if(.., Entry::is_complete).collect();
        let count = complete.len();
        for Entry { outcome, on_done, .. } in complete {
            outcome.map(on_done);
        }
        count
    }

    /// Readable when an operation has become complete since [`RequestSet::arm`]. It is not to be read: [`RequestSet::progress`] clears
    /// it.
    pub fn event_fd(&self) -> BorrowedFd<'_> {
        self.shared.fd.as_fd()
    }

    /// Has a thread make [`RequestSet::event_fd`] readable when the next operation is complete, those added later included. Returns
    /// false if one is complete already: call [`RequestSet::progress`] then, and do not sleep.
    ///
    /// The thread polls: at first all the time, after some milliseconds a thousand times a second.
    ///
    /// # Errors
    /// [`Error::Spawn`] if the system has no thread left; [`Error::Device`] in a forked child.
    pub fn arm(&self) -> Result<bool> {
        self.fork_guard.check()?;
        if self.shared.has_complete() {
            return Ok(false);
        }
        let mut watcher = self.watcher.lock();
        if watcher.is_none() {
            let shared = self.shared.clone();
            let fix = "allow the process another thread";
            let spawned = Builder::new().name("mp-events".into()).spawn(move || shared.run());
            *watcher = Some(spawned.map_err(|error| Error::spawn("cannot start a thread", error, fix))?);
        }
        let mut watch = self.shared.watch.lock();
        // Signalled and not cleared: it is readable already.
        if *watch == Watch::Idle {
            *watch = Watch::Armed;
            self.shared.changed.notify_all();
        }
        Ok(true)
    }
}

impl Drop for RequestSet {
    fn drop(&mut self) {
        if !self.fork_guard.may_end(&self.shared) {
            std::mem::forget(self.watcher.get_mut().take());
            return;
        }
        if let Some(watcher) = self.watcher.get_mut().take() {
            *self.shared.watch.lock() = Watch::Ended;
            self.shared.changed.notify_all();
            // A panic of a request has been printed.
            let _ = watcher.join();
        }
    }
}
