//! What the objects of a communicator share: the communicator itself, and tensors of operations that nobody waits for. Calls raise the
//! exception of the operation, or of a signal handler.

use std::collections::VecDeque;
use std::mem::ManuallyDrop;
use std::sync::Arc;
use std::thread::sleep;
use std::time::Duration;

use gdsync::Error as Cause;
use gdsync::stream::Batch;
use mp::collective::Collectives;
use mp::{Communicator, Request};
use parking_lot::{Mutex, MutexGuard};
use pyo3::prelude::*;

use crate::buffer::Part;
use crate::error::{OrRaise, exception};
use crate::stream::Submitter;
use crate::wait::{is_full, is_late, on_thread, seconds_or, sliced};

/// A communicator, with what it keeps.
pub(crate) struct Shared {
    /// Dropped before `kept`: then no device uses its memory any more.
    pub(crate) comm: ManuallyDrop<Communicator>,
    kept: Mutex<VecDeque<(Request, Arc<Part>)>>,
    /// Streams of other ranks may write there: places of channels, and windows that are not closed.
    reached: Mutex<Vec<Arc<Part>>>,
    /// Made by the first collective.
    collectives: Mutex<Option<Arc<Collectives>>>,
}

impl Shared {
    pub(crate) fn new(comm: Communicator) -> Arc<Self> {
        let (kept, reached, collectives) = Default::default();
        Arc::new(Self { comm: ManuallyDrop::new(comm), kept, reached, collectives })
    }

    /// Keeps the memory of an operation until that is complete. Each call looks at two of those that are kept.
    pub(crate) fn keep(&self, pending: Request, part: Arc<Part>) {
        let mut over = Vec::new();
        let mut kept = self.kept.lock();
        for _ in 0..kept.len().min(2) {
            match kept.pop_front() {
                Some((pending, part)) if is_over(&pending) => over.push(part),
                other => kept.extend(other),
            }
        }
        if !is_over(&pending) {
            kept.push_back((pending, part));
        }
        // Unlocked first: dropping a tensor may run code of Python.
        drop(kept);
    }

    /// Keeps memory that other ranks reach, until the communicator ends.
    pub(crate) fn expose(&self, parts: impl IntoIterator<Item = Arc<Part>>) {
        self.reached.lock().extend(parts);
    }

    /// Keeps a part no longer: no rank reaches it any more.
    pub(crate) fn conceal(&self, part: &Arc<Part>) {
        let mut reached = self.reached.lock();
        let found = reached.iter().position(|exposed| Arc::ptr_eq(exposed, part));
        let concealed = found.map(|at| reached.swap_remove(at));
        // Unlocked first: dropping a tensor may run code of Python.
        drop(reached);
        drop(concealed);
    }

    /// The limit of a call: its own, or the communicator's.
    pub(crate) fn limit(&self, timeout: Option<f64>) -> PyResult<Duration> {
        seconds_or(timeout, self.comm.timeout())
    }

    /// What collectives use, when no thread is in one.
    pub(crate) fn collectives(
        &self,
        limit: Duration,
    ) -> mp::Result<MutexGuard<'_, Option<Arc<Collectives>>>> {
        let late = || mp::Error::Deadline {
            what: "a collective of another thread has not ended".into(),
            after: limit,
            fix: "call collectives from one thread",
        };
        self.collectives.try_lock_for(limit).ok_or_else(late)
    }

    /// Runs a call of all ranks with its limit.
    pub(crate) fn with_all<T: Send + 'static>(
        self: &Arc<Self>,
        py: Python<'_>,
        operation: &str,
        timeout: Option<f64>,
        call: impl FnOnce(&Self, Duration) -> mp::Result<T> + Send + 'static,
    ) -> PyResult<T> {
        let (shared, limit) = (self.clone(), self.limit(timeout)?);
        let done = on_thread(py, move || call(&shared, limit))?;
        let is_known = |_| {
            sleep(Duration::from_millis(10));
            !self.comm.lost().is_empty()
        };
        // An error of the exchange does not tell whether the rank is gone; its connection does, soon.
        let is_gone =
            matches!(done, Err(mp::Error::Bootstrap { .. })) && py.detach(|| (0..100).any(is_known));
        done.map_err(|error| exception(py, operation, None, &error, is_gone))
    }

    /// Waits by the CPU.
    pub(crate) fn wait<T: Send>(
        &self,
        py: Python<'_>,
        (operation, rank): (&str, Option<usize>),
        timeout: Option<f64>,
        wait: impl FnMut(Duration) -> mp::Result<T> + Send,
    ) -> PyResult<T> {
        sliced(py, self.limit(timeout)?, is_late, wait)?.or_raise(py, operation, rank)
    }

    /// Starts an operation of the CPU, and waits for room.
    pub(crate) fn start<T: Send>(
        &self,
        py: Python<'_>,
        (operation, rank): (&str, usize),
        mut start: impl FnMut(&Communicator) -> mp::Result<T> + Send,
    ) -> PyResult<T> {
        let attempt = |slice| start(&self.comm.with_timeout(slice));
        sliced(py, self.comm.timeout(), is_full, attempt)?.or_raise(py, operation, Some(rank))
    }

    /// Has a stream do what `record` adds to a batch, and waits for room.
    pub(crate) fn submit<T: Send>(
        &self,
        py: Python<'_>,
        (operation, rank): (&str, Option<usize>),
        stream: &Submitter,
        mut record: impl FnMut(&Communicator, &mut Batch) -> mp::Result<T> + Send,
    ) -> PyResult<T> {
        let attempt = |slice| {
            let _order = stream.order.lock();
            let mut batch = Batch::new();
            let made = record(&self.comm.with_timeout(slice), &mut batch)?;
            stream.queue.with_timeout(slice).submit(&mut batch)?;
            Ok(made)
        };
        sliced(py, self.comm.timeout(), may_end, attempt)?.or_raise(py, operation, rank)
    }
}

/// Full, or the last announcement of a receive by another stream is still under way.
fn may_end(error: &mp::Error) -> bool {
    is_full(error)
        || matches!(
            error,
            mp::Error::Message {
                operation: "receive in a batch",
                cause: Cause::Busy { queue: "send", .. },
                ..
            }
        )
}

impl Drop for Shared {
    fn drop(&mut self) {
        let collectives = self.collectives.get_mut().take();
        let comm = &mut self.comm;
        let end = move || {
            drop(collectives);
            // SAFETY: dropped once, here, and not used after.
            unsafe { ManuallyDrop::drop(comm) }
        };
        // It may wait for threads and children. Not attached: at the end of the interpreter.
        let mut end = Some(end);
        Python::try_attach(|py| py.detach(|| end.take().map(|end| end())));
        if let Some(end) = end {
            end();
        }
    }
}

/// Whether nothing is under way any more.
fn is_over(pending: &Request) -> bool {
    !matches!(pending.test(), Ok(None))
}
