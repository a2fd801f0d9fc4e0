//! Builds a communicator of gdsync-mp from the ranks of an MPI communicator, for MPI applications that also want messages on GPU
//! streams.
//!
//! ```no_run
//! use gdsync_bootstrap_mpi::OverMpi;
//!
//! let universe = mpi::initialize().expect("MPI is initialized once");
//! let exchange = OverMpi::new(&universe.world());
//! let comm = mp::Communicator::builder().init_over(exchange)?;
//! // ... messages of both, side by side ...
//! comm.finalize(std::time::Duration::from_secs(10))?; // before MPI ends
//! # Ok::<(), mp::Error>(())
//! ```
//!
//! MPI exchanges addresses, and serves [`mp::Communicator::barrier`] and what is built on it; messages do not use it. MPI reports ranks
//! that fail: by default it ends the job.

use std::fmt;
use std::mem::{self, ManuallyDrop};
use std::thread::{self, ThreadId, sleep};
use std::time::{Duration, Instant};

use mp::Error;
use mp::Exchange;
use mpi::datatype::PartitionMut;
use mpi::environment::threading_support;
use mpi::topology::SimpleCommunicator;
use mpi::traits::{Communicator, CommunicatorCollectives};
use mpi::{Count, Threading};

/// How often a barrier polls MPI.
const TICK: Duration = Duration::from_micros(50);

/// An exchange over a duplicate of an MPI communicator, which is never freed.
pub struct OverMpi {
    comm: ManuallyDrop<SimpleCommunicator>,
    rank: usize,
    size: usize,
    /// The only thread that may call MPI, if there is one.
    thread: Option<ThreadId>,
    failed: Option<Error>,
}

// SAFETY: a communicator of MPI is a handle that any thread may use if MPI was initialized with Threading::Multiple.
// Otherwise `ready` refuses all threads but the one that made this, and dropping it does not call MPI.
unsafe impl Send for OverMpi {}

impl fmt::Debug for OverMpi {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "OverMpi(rank {} of {})", self.rank, self.size)
    }
}

fn fault(what: impl Into<String>, fix: &'static str) -> Error {
    Error::Bootstrap { peer: "MPI".to_owned(), what: what.into(), cause: None, fix }
}

impl OverMpi {
    /// Duplicates `comm`: all its ranks must call this. Blocks until they do, as MPI has no time limits.
    ///
    /// Unless MPI was initialized with [`Threading::Multiple`], only this thread may then make the communicator, call its
    /// barriers and finalize it.
    pub fn new(comm: &impl Communicator) -> Self {
        let number = |count: i32| usize::try_from(count).expect("MPI counts from 0");
        let (rank, size) = (number(comm.rank()), number(comm.size()));
        let thread = (threading_support() < Threading::Multiple).then(|| thread::current().id());
        Self { comm: ManuallyDrop::new(comm.duplicate()), rank, size, thread, failed: None }
    }

    fn ready(&self) -> mp::Result<()> {
        if let Some(error) = &self.failed {
            return Err(error.clone());
        }
        match self.thread {
            Some(owner) if owner != thread::current().id() => Err(fault(
                "was not initialized for calls from several threads",
                "call it from the thread that made the exchange, or initialize MPI with Threading::Multiple",
            )),
            _ => Ok(()),
        }
    }

    /// A barrier. After a timeout MPI is not used any more, as the barrier cannot be cancelled.
    fn barrier_within(&mut self, timeout: Duration) -> mp::Result<()> {
        self.ready()?;
        let start = Instant::now();
        let mut request = self.comm.immediate_barrier();
        loop {
            request = match request.test() {
                Ok(_) => return Ok(()),
                Err(request) => request,
            };
            if start.elapsed() >= timeout {
                mem::forget(request);
                let fix = "see what holds up a rank that has not called it";
                let what = format!("barrier over MPI: waiting for some of {} ranks", self.size);
                return Err(self.failed.insert(Error::Deadline { what, after: timeout, fix }).clone());
            }
            sleep(TICK);
        }
    }
}

impl Exchange for OverMpi {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.size
    }

    fn allgather(&mut self, bytes: &[u8], timeout: Duration) -> mp::Result<Vec<Vec<u8>>> {
        // MPI counts in 32 bits, also the sum of all parts.
        let limit = i32::MAX as usize / self.size;
        if bytes.len() > limit {
            let what = format!("{} bytes are too large a message: {limit} are the limit", bytes.len());
            return Err(fault(what, "exchange addresses here, and data over the network"));
        }
        self.barrier_within(timeout)?;
        let mut counts = vec![0; self.size];
        self.comm.all_gather_into(&Count::try_from(bytes.len()).expect("below the limit"), &mut counts[..]);
        let displacements: Vec<Count> =
            counts.iter().scan(0, |end, count| Some(mem::replace(end, *end + count))).collect();
        let lengths: Vec<usize> = counts.iter().map(|count| usize::try_from(*count).unwrap_or(0)).collect();
        let mut all = vec![0_u8; lengths.iter().sum()];
        if all.is_empty() {
            // MPI refuses two empty buffers, as they may have one address.
            return Ok(vec![Vec::new(); self.size]);
        }
        self.comm
            .all_gather_varcount_into(bytes, &mut PartitionMut::new(&mut all[..], counts, displacements));
        let mut rest = all.as_slice();
        Ok(lengths
            .into_iter()
            .map(|length| rest.split_off(..length).expect("the sum of the lengths").to_vec())
            .collect())
    }

    fn barrier(&mut self, timeout: Duration) -> mp::Result<()> {
        self.barrier_within(timeout)
    }
}
