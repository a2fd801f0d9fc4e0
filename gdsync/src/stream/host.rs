//! The host engine: a thread that runs stream operations in order, where there is no GPU to do it.
//!
//! [`HostEngine`] is the handle; `shared` is what handle and thread have in common (the queue, the counters,
//! the failure); `worker` is the thread. The thread owns no handle, so dropping the last one ends it.

mod shared;
#[cfg(test)]
mod tests;
mod worker;

use std::fmt;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use self::shared::Shared;
use super::cuda::SubmitGuard;
use super::engine::Engine;
use super::op::{Op, Ops};
use gdsync_device::error::{Error, Result};
use gdsync_device::fork_guard::ForkGuard;
use gdsync_device::recorder::Log;

/// How a stream that runs on a host thread behaves.
///
/// A wait first spins. One for a completion of our queues then sleeps until the queue wakes it. One for any other
/// word, to which a plain store wakes nobody, sleeps and looks in turns: it notices a store late by an eighth of the
/// time the store took to come (at least 20 us, at most 20 ms). An idle stream uses no CPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostStreamConfig {
    /// The stream's name in errors, and the end of its thread's name. Not empty, no NUL.
    pub name: String,
    /// How many submissions may be pending, the one that runs included. At least 1.
    pub depth: usize,
    /// How long a single wait may hold the stream before the stream fails. Not zero.
    pub wait_limit: Duration,
    /// How long the thread spins, for a word or for the next submission, before it sleeps.
    pub spin: Duration,
}

impl Default for HostStreamConfig {
    fn default() -> Self {
        Self {
            name: "stream".to_owned(),
            depth: 512,
            wait_limit: Duration::from_secs(30),
            spin: Duration::from_micros(50),
        }
    }
}

impl HostStreamConfig {
    fn check(&self) -> Result<()> {
        if self.name.is_empty() || self.name.contains('\0') {
            return Err(Error::invalid(
                "stream name",
                format!("{:?}", self.name),
                "a non-empty name without NUL",
            ));
        }
        if self.depth == 0 {
            return Err(Error::invalid("stream depth", self.depth, "at least 1 submission"));
        }
        if self.wait_limit.is_zero() {
            return Err(Error::invalid("stream wait limit", "0", "a duration above 0"));
        }
        Ok(())
    }
}

/// A stream of operations on a thread of its own.
///
/// Dropping the last handle fails what is pending with [`Error::StreamAborted`] and joins the thread, which
/// ends after the host function it may be running. Dropped by that very host function, it is left to end.
pub(crate) struct HostEngine {
    fork_guard: ForkGuard,
    shared: Arc<Shared>,
    /// Always there until the drop.
    thread: Option<JoinHandle<()>>,
}

impl HostEngine {
    /// Starts the thread.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a config that its fields forbid, [`Error::Sys`] when the system has no
    /// thread to give.
    pub(crate) fn start(config: HostStreamConfig) -> Result<Arc<Self>> {
        config.check()?;
        // The kernel shows the first 15 bytes of it; Rust cuts them.
        let name = format!("gdsync-stream-{}", config.name);
        let shared = Arc::new(Shared::new(config, Log::open()?));
        let worker = shared.clone();
        let thread = thread::Builder::new().name(name).spawn(move || worker.work()).map_err(|e| {
            Error::os("pthread_create", e, "raise the thread limit (ulimit -u) or use fewer streams")
        })?;
        Ok(Arc::new(Self { fork_guard: ForkGuard::default(), shared, thread: Some(thread) }))
    }
}

impl Engine for HostEngine {
    fn signals(&self) -> bool {
        true
    }

    fn kind(&self) -> &'static str {
        "host"
    }

    fn submit(&self, _turn: &mut SubmitGuard, ops: &mut Ops) -> Result<u64> {
        self.fork_guard.check()?;
        ops.iter().try_for_each(Op::check)?;
        self.shared.submit(ops)
    }

    fn record(&self, _turn: &mut SubmitGuard, ops: &[Op]) -> Result<()> {
        self.fork_guard.check()?;
        ops.iter().try_for_each(Op::check)
    }

    fn completed(&self) -> u64 {
        self.shared.completed()
    }

    fn submitted(&self) -> u64 {
        self.shared.submitted()
    }

    fn wait_completed(&self, seq: u64, deadline: Instant) -> bool {
        !self.fork_guard.is_here()
            || self.shared.block_until(deadline, || self.shared.completed() >= seq, || seq)
    }

    fn ask_room(&self, _turn: &mut SubmitGuard, _ops: usize, _host_fns: usize) -> Result<()> {
        self.fork_guard.check()?;
        self.shared.ask_room()
    }

    /// A failed engine, or that of another process, has room: the submission that tries it learns the error.
    fn wait_room(&self, deadline: Instant) -> bool {
        let shared = &self.shared;
        !self.fork_guard.is_here()
            || shared.block_until(
                deadline,
                || shared.failed() || shared.has_room(),
                || shared.completed() + 1,
            )
    }

    fn fail(&self, error: Error) {
        if self.fork_guard.is_here() {
            self.shared.fail(error);
        }
    }

    fn error(&self) -> Option<Error> {
        self.fork_guard.check().err().or_else(|| self.shared.error())
    }
}

impl Drop for HostEngine {
    fn drop(&mut self) {
        // The thread is not in a forked child, where its hold on what is pending stays.
        let Some(thread) = self.fork_guard.take_thread(&mut self.thread) else { return };
        self.shared.fail(Error::StreamAborted { stream: self.shared.config.name.clone() });
        if thread.thread().id() != thread::current().id() {
            // The thread catches panics; should one escape, there is nobody to tell.
            let _ = thread.join();
        }
    }
}

impl fmt::Debug for HostEngine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostEngine")
            .field("name", &self.shared.config.name)
            .field("submitted", &self.submitted())
            .field("completed", &self.completed())
            .field("error", &self.error())
            .finish()
    }
}
