//! The exchange of addresses between ranks, before any queue exists. A communicator is built over an [`Exchange`].

use std::cell::Cell;
use std::fmt;
use std::io::{self, Write};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::thread::panicking;
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};

use crate::error::{Error, Result};
use crate::wait::Deadline;

/// Ranks that can exchange a few bytes: addresses and keys, not data. All ranks make the same calls in the same order.
///
/// [`Bootstrap`](crate::launch::Bootstrap) is the one of this crate. Ranks that can talk already, by MPI or a store of their own,
/// implement it for [`CommunicatorBuilder::init_over`](crate::CommunicatorBuilder::init_over).
pub trait Exchange: fmt::Debug + Send {
    /// This rank, 0 to `size - 1`.
    fn rank(&self) -> usize;

    /// The number of ranks, at least 1.
    fn size(&self) -> usize;

    /// Gives every rank the bytes of every rank, in rank order: as many parts as there are ranks. Lengths may differ and be 0.
    ///
    /// # Errors
    /// [`Error::Bootstrap`] names a rank that is gone, [`Error::Deadline`] one that is late: it returns after
    /// `timeout`, where what is below it can.
    fn allgather(&mut self, bytes: &[u8], timeout: Duration) -> Result<Vec<Vec<u8>>>;

    /// Returns after every rank has called it.
    ///
    /// # Errors
    /// [`Error::Bootstrap`] and [`Error::Deadline`], as [`Exchange::allgather`].
    fn barrier(&mut self, timeout: Duration) -> Result<()> {
        self.allgather(&[], timeout).map(drop)
    }

    /// Makes an exchange of the surviving ranks, in their order, and returns their former ranks too. Survivors are the ranks whose
    /// process is alive, except those that any rank lists in `without`. All survivors call it, through
    /// [`Communicator::shrink`](crate::Communicator::shrink). It works after failures of this exchange, and may be called again
    /// after one of its own.
    ///
    /// # Errors
    /// [`Error::Bootstrap`] where it is not possible, which is the default; [`Error::Deadline`] names late ranks.
    fn regroup(&mut self, without: &[usize], timeout: Duration) -> Result<(Box<dyn Exchange>, Vec<usize>)> {
        let _ = (without, timeout);
        let what = "its exchange cannot leave ranks out";
        Err(Error::bootstrap("this rank", what, "build it with Communicator::init, or restart the job"))
    }

    /// What another thread sets to end a call, with [`Error::Closed`], and to refuse later ones. The calls of an exchange that does not
    /// look at it, which is the default, end by their deadlines alone.
    fn close_flag(&self) -> Arc<AtomicBool> {
        Arc::default()
    }
}

/// The calls that all ranks make together, which exchange once or more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CommonCall {
    Init,
    InitOver,
    Barrier,
    Exchange,
    Window,
    WindowBeside,
    WindowDestroy,
    Channels,
    TaggedNew,
    TaggedDestroy,
    CollectivesNew,
    CollectivesDestroy,
    Shrink,
    Finalize,
    Split,
}

thread_local! {
    static CURRENT: Cell<Option<CommonCall>> = const { Cell::new(None) };
}

impl CommonCall {
    /// The order is that of the wire.
    pub(crate) const ALL: [Self; 15] = [
        Self::Init,
        Self::InitOver,
        Self::Barrier,
        Self::Exchange,
        Self::Window,
        Self::WindowBeside,
        Self::WindowDestroy,
        Self::Channels,
        Self::TaggedNew,
        Self::TaggedDestroy,
        Self::CollectivesNew,
        Self::CollectivesDestroy,
        Self::Shrink,
        Self::Finalize,
        Self::Split,
    ];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Init => "CommunicatorBuilder::init",
            Self::InitOver => "CommunicatorBuilder::init_over",
            Self::Barrier => "barrier",
            Self::Exchange => "exchange",
            Self::Window => "window",
            Self::WindowBeside => "Window::beside",
            Self::WindowDestroy => "Window::destroy",
            Self::Channels => "channels",
            Self::TaggedNew => "Tagged::new",
            Self::TaggedDestroy => "Tagged::destroy",
            Self::CollectivesNew => "Collectives::new",
            Self::CollectivesDestroy => "Collectives::destroy",
            Self::Shrink => "shrink",
            Self::Split => "split",
            Self::Finalize => "finalize",
        }
    }

    /// The exchanges of this thread are of this call until the result is dropped, unless they are of another one that makes it.
    pub(crate) fn enter(self) -> InCall {
        let before = CURRENT.get();
        CURRENT.set(before.or(Some(self)));
        InCall(before)
    }

    /// The call that this thread is in.
    pub(crate) fn current_or(other: Self) -> Self {
        CURRENT.get().unwrap_or(other)
    }
}

/// See [`CommonCall::enter`].
#[must_use]
pub(crate) struct InCall(Option<CommonCall>);

impl Drop for InCall {
    fn drop(&mut self) {
        CURRENT.set(self.0);
    }
}

/// A foreign exchange, whose answers are checked for their number of parts.
#[derive(Debug)]
pub(crate) struct CheckedExchange(pub(crate) Box<dyn Exchange>);

impl Exchange for CheckedExchange {
    fn rank(&self) -> usize {
        self.0.rank()
    }

    fn size(&self) -> usize {
        self.0.size()
    }

    fn allgather(&mut self, bytes: &[u8], timeout: Duration) -> Result<Vec<Vec<u8>>> {
        let parts = self.0.allgather(bytes, timeout)?;
        let (count, size) = (parts.len(), self.size());
        if count == size {
            return Ok(parts);
        }
        let what = format!("gave the bytes of {count} ranks, not of {size}");
        Err(Error::bootstrap("the exchange", what, "let allgather return a part of every rank"))
    }

    fn barrier(&mut self, timeout: Duration) -> Result<()> {
        self.0.barrier(timeout)
    }

    fn regroup(&mut self, without: &[usize], timeout: Duration) -> Result<(Box<dyn Exchange>, Vec<usize>)> {
        let (next, former) = self.0.regroup(without, timeout)?;
        Ok((Box::new(Self(next)), former))
    }

    fn close_flag(&self) -> Arc<AtomicBool> {
        self.0.close_flag()
    }
}

/// Processes that were started for the other ranks, as far as a communicator has to do with them.
pub(crate) trait ChildProcesses: fmt::Debug + Send {
    /// The process id of a rank, also after it ended; `None` for a rank that is no child.
    fn pid(&self, rank: usize) -> Option<u32>;

    /// The failure of a child in place of what this process has seen of it.
    fn explain(&mut self, error: Error) -> Error;

    /// Keeps those that are ranks of a smaller job, whose ranks were `former` before, and ends the others.
    fn keep(self: Box<Self>, former: &[usize]) -> Box<dyn ChildProcesses>;

    /// Waits until all have ended well.
    fn wait(self: Box<Self>, timeout: Duration) -> Result<()>;

    /// The ranks that still run; none in a process that did not start them.
    fn running(&mut self) -> Vec<usize>;

    /// Waits until all have ended, kills those that have not after `limit`, and says so on standard error. If `is_silent` is not
    /// set, it also names those that failed, and the exit code of this process tells it.
    fn leave(self: Box<Self>, limit: Duration, is_silent: bool);
}

/// How long processes may take to end after another one has failed, so that they can say what they have seen of it.
pub(crate) const LAST_MOMENTS: Duration = Duration::from_secs(2);

/// The processes that a communicator has started, if it has: they may end after it.
#[derive(Debug)]
pub(crate) struct Spawned {
    processes: Mutex<Option<Box<dyn ChildProcesses>>>,
    /// [`Communicator::finalize`](crate::Communicator::finalize) was called.
    pub(crate) is_finalized: AtomicBool,
    /// How long they have to end if it was not.
    limit: Duration,
}

impl Spawned {
    pub(crate) fn new(limit: Duration) -> Self {
        Self { processes: Mutex::default(), is_finalized: AtomicBool::new(false), limit }
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, Option<Box<dyn ChildProcesses>>> {
        self.processes.lock()
    }

    /// Whether the ranks were started otherwise, and this one leaves them without saying so.
    pub(crate) fn are_left_by_surprise(&mut self) -> bool {
        self.processes.get_mut().is_none() && !*self.is_finalized.get_mut() && !panicking()
    }

    pub(crate) fn are_running(&mut self) -> bool {
        self.processes.get_mut().as_mut().is_some_and(|processes| !processes.running().is_empty())
    }
}

impl Drop for Spawned {
    fn drop(&mut self) {
        let Some(processes) = self.processes.get_mut().take() else { return };
        let is_finalized = *self.is_finalized.get_mut();
        let limit = if is_finalized || panicking() { self.limit.min(LAST_MOMENTS) } else { self.limit };
        processes.leave(limit, is_finalized);
    }
}

/// Says something on standard error, which may be closed.
pub(crate) fn say(text: &str) {
    let _ = writeln!(io::stderr(), "mp: {text}");
}

/// Takes the first bytes of a record, whose length was checked.
pub(crate) fn take<const N: usize>(record: &mut &[u8]) -> [u8; N] {
    let (first, rest) = record.split_first_chunk().expect("the record is long enough");
    *record = rest;
    *first
}

/// What rank `from` has for this one in its table, which has `N` bytes for each of `size` ranks.
pub(crate) fn table_row<const N: usize>(
    table: &[u8],
    from: usize,
    rank: usize,
    size: usize,
) -> Result<&[u8; N]> {
    let (rows, rest) = table.as_chunks::<N>();
    rows.get(rank).filter(|_| rows.len() == size && rest.is_empty()).ok_or_else(|| {
        let fix = "run the same version and number of ranks everywhere";
        Error::bootstrap(format!("rank {from}"), "its address table has the wrong size", fix)
    })
}

/// Returns what this rank has made and connected, if all ranks have.
pub(crate) fn agree<T>(
    exchange: &mut dyn Exchange,
    made: Result<T>,
    what: &str,
    deadline: &Deadline,
) -> Result<T> {
    let answers = exchange.allgather(&[u8::from(made.is_ok())], deadline.remaining());
    let made = made?;
    match answers?.iter().position(|answer| answer[..] != [1]) {
        Some(rank) => {
            let (what, fix) = (format!("it could not connect {what}"), "see the error of that rank");
            Err(Error::bootstrap(format!("rank {rank}"), what, fix))
        }
        None => Ok(made),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_have_a_row_for_each_rank() {
        let table = [1, 2, 3, 4, 5, 6];
        assert_eq!(table_row::<2>(&table, 7, 1, 3).unwrap(), &[3, 4]);
        for (table, size) in [(&table[..], 2), (&table[..], 4), (&table[..5], 3), (&table[..5], 2), (&[], 3)]
        {
            let error = table_row::<2>(table, 7, 1, size).unwrap_err().to_string();
            assert!(error.contains("rank 7") && error.contains("wrong size"), "{error}");
        }
    }
}
