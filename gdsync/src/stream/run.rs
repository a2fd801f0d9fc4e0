//! Batches that the calling thread runs itself.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::time::{Duration, Instant};
use std::{mem, thread};

use super::execute::{Runner, Unsatisfied, execute, message_of};
use super::op::Op;
use super::{Batch, deadline};
use gdsync_device::error::{Error, Result};
use gdsync_device::recorder::{By, Log};

/// The stream that the CPU counts as while it runs a batch. Streams are numbered from 1.
const CPU: u64 = 0;

/// How long a wait spins before it sleeps, as the default of host streams.
const SPIN: Duration = Duration::from_micros(50);

impl Batch {
    /// Runs the batch on the calling thread, in order, and empties it. Waits help the HCA, then sleep.
    ///
    /// The queues it sends or waits on must not be in use by a stream, nor by another thread's `run` at the same time.
    ///
    /// # Errors
    /// Leaves the batch as it was when a queue refuses it, with the errors of [`submit`](super::Stream::submit).
    /// [`Error::Deadline`] when not all is done after `timeout`: the queue pairs of the batch are stopped, and the rest
    /// is dropped. When all has run, the root cause of the first broken queue pair of the batch: what it waited for
    /// has *not* arrived then.
    ///
    /// # Panics
    /// As a host function of the batch does, after the queue pairs of the batch are stopped.
    pub fn run(&mut self, timeout: Duration) -> Result<()> {
        self.ops().iter().try_for_each(Op::check)?;
        self.mark(CPU, false)?;
        let cores: Vec<_> = self.cores().cloned().collect();
        let ops = mem::take(self.ops());
        self.hand_over();
        let runner = Caller { deadline: deadline(timeout), log: Log::current() };
        let all = || ops.into_iter().try_for_each(|op| execute(op, &runner));
        let outcome = catch_unwind(AssertUnwindSafe(all));
        let failure = match &outcome {
            Ok(Ok(())) => return cores.iter().try_for_each(|core| core.check()),
            Ok(Err(Unsatisfied::Lost(error))) => error.clone(),
            Ok(Err(Unsatisfied::Late(what))) => {
                tracing::debug!(what, "batch not satisfied in time");
                Error::Deadline { what: "running a batch", after: timeout }
            }
            Err(panic) => Error::HostFnPanicked {
                stream: "the caller of Batch::run".into(),
                message: message_of(panic.as_ref()),
            },
        };
        cores.iter().for_each(|core| core.stop(&failure));
        match outcome {
            Err(panic) => resume_unwind(panic),
            Ok(_) => Err(failure),
        }
    }
}

/// The calling thread.
struct Caller {
    deadline: Instant,
    log: Log,
}

impl Runner for Caller {
    fn failed(&self) -> bool {
        false
    }

    fn released(&self) -> bool {
        false
    }

    fn left(&self, _waited: Duration) -> Duration {
        self.deadline.saturating_duration_since(Instant::now())
    }

    fn log(&self) -> (&Log, By) {
        (&self.log, By::Cpu)
    }

    fn spin(&self) -> Duration {
        SPIN
    }

    fn nap(&self, nap: Duration) {
        thread::sleep(nap);
    }
}
