//! The job: what `mp_init` makes and `mp_finalize` ends.

use std::ffi::c_int;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use gdsync::Device;
use gdsync::cuda::Gpu;
use gdsync::memory::Memory;
use gdsync::recorder::Traffic;
use gdsync::verbs::{Context, OnGpu, Pd, QpAddress};
use gdsync_capi_support::guard::wait_limit;
use gdsync_capi_support::{process, streams};
use mp::Exchange;
use mp::launch::{Bootstrap, Launch};
use parking_lot::{Mutex, RwLock};

use crate::abi::mp_exchange;
use crate::failure::{Failure, LIBRARY, Result};
use crate::memory::WINDOWS;
use crate::request::{Peer, REQUESTS};
use crate::submission::LISTS;

/// How long ranks wait for each other where the exchange can tell.
const PATIENCE: Duration = Duration::from_secs(120);
/// How long the end waits for streams.
const END: Duration = Duration::from_secs(10);
/// Each rank gets the places of the queue pairs of all: 2 GB of so many.
const MAX_RANKS: usize = 8192;
/// As in LibMP.
const DEPTH: usize = 512;
pub(crate) const MAX_PIECES: u32 = 30;
const MAX_INLINE: usize = 64;
/// Acknowledge timeout: 1.07 s, and retries for a missing receive without end.
const ACK_TIMEOUT: u8 = 18;
const RNR_RETRY: u8 = 7;

/// This rank among the others.
#[derive(Debug)]
pub(crate) struct Job {
    /// Jobs of this process that were before.
    pub(crate) number: u64,
    exchange: Mutex<Box<dyn Exchange>>,
    context: Context,
    pub(crate) pd: Pd,
    pub(crate) gpu: Gpu,
    /// By rank.
    peers: Vec<Option<Arc<Peer>>>,
    /// Two words that are 0: what kernels get that wait for a complete request.
    pub(crate) complete: Memory,
}

static JOB: RwLock<Option<Arc<Job>>> = RwLock::new(None);

/// The job of this process.
pub(crate) fn job() -> Result<Arc<Job>> {
    let job = JOB.read().clone();
    job.ok_or_else(|| Failure::new("this process has no job: call mp_init first, mp_finalize last"))
}

/// The limit of an exchange.
pub(crate) fn exchange_limit() -> Duration {
    PATIENCE.min(wait_limit())
}

impl Job {
    /// Has the ranks exchange bytes.
    pub(crate) fn exchange<T>(&self, run: impl FnOnce(&mut dyn Exchange) -> Result<T>) -> Result<T> {
        // The exchange may call back.
        let locked = self.exchange.try_lock_for(exchange_limit());
        run(&mut **locked.ok_or_else(|| Failure::new("another call uses the exchange: let it return"))?)
    }

    /// Runs work of a device without a thread that waits for it at once.
    pub(crate) fn progress(&self) -> bool {
        self.context.progress()
    }

    pub(crate) fn peer(&self, rank: c_int) -> Result<&Arc<Peer>> {
        let peer = usize::try_from(rank).ok().and_then(|rank| self.peers.get(rank)?.as_ref());
        peer.ok_or_else(|| Failure::invalid("peer", rank, "a rank of the list that mp_init was given"))
    }
}

/// The exchange of a program.
struct Callbacks(mp_exchange);

// SAFETY: the program lets the library call these functions in the calls of any of its threads.
unsafe impl Send for Callbacks {}

impl fmt::Debug for Callbacks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl Drop for Callbacks {
    fn drop(&mut self) {
        if let Some(release) = self.0.release {
            // SAFETY: as the program promises.
            unsafe { release(self.0.own) };
        }
    }
}

impl Callbacks {
    /// The result of a function; 0 is success.
    fn check(name: &str, result: Option<c_int>) -> mp::Result<()> {
        if result == Some(0) {
            return Ok(());
        }
        let what = format!("{name} of the exchange returned {}", result.unwrap_or(-1));
        let (peer, fix) = ("this rank".into(), "see the errors of MPI, or of what the exchange uses");
        Err(mp::Error::Bootstrap { peer, what, cause: None, fix })
    }
}

impl Exchange for Callbacks {
    fn rank(&self) -> usize {
        usize::try_from(self.0.rank).unwrap_or(usize::MAX)
    }

    fn size(&self) -> usize {
        usize::try_from(self.0.size).unwrap_or(0)
    }

    fn allgather(&mut self, bytes: &[u8], _: Duration) -> mp::Result<Vec<Vec<u8>>> {
        let mut all = vec![0; bytes.len() * self.size()];
        let (mine, len, place) = (bytes.as_ptr().cast(), bytes.len(), all.as_mut_ptr().cast());
        // SAFETY: as the program promises; `all` has `len` bytes for each rank.
        let result = self.0.allgather.map(|allgather| unsafe { allgather(self.0.own, mine, len, place) });
        Self::check("allgather", result)?;
        Ok(all.chunks(len.max(1)).map(<[u8]>::to_vec).collect())
    }

    fn barrier(&mut self, _: Duration) -> mp::Result<()> {
        // SAFETY: as the program promises.
        Self::check("barrier", self.0.barrier.map(|barrier| unsafe { barrier(self.0.own) }))
    }
}

/// Joins the job that this exchange is of.
pub(crate) fn init_with<'a>(
    exchange: &mp_exchange,
    peers: impl FnOnce() -> Result<&'a [c_int]>,
    flags: c_int,
    gpu: c_int,
) -> Result<()> {
    if exchange.struct_size as usize != size_of::<mp_exchange>() {
        let expected = "the size of struct mp_exchange: compile with the mp.h of this library";
        return Err(Failure::invalid("struct_size", exchange.struct_size, expected));
    }
    let callbacks = Callbacks(*exchange);
    if exchange.allgather.is_none() || exchange.barrier.is_none() {
        return Err(Failure::invalid("function of struct mp_exchange", "NULL", "allgather and barrier"));
    }
    init(|| Ok(Box::new(callbacks)), peers, flags, gpu)
}

/// Joins the job of the launcher.
pub(crate) fn init_env<'a>(
    peers: impl FnOnce() -> Result<&'a [c_int]>,
    flags: c_int,
    gpu: c_int,
) -> Result<()> {
    let connect = || -> Result<Box<dyn Exchange>> {
        let none = || {
            Failure::new(
                "no launcher has started this process: use mpirun, srun, torchrun, or set RANK, WORLD_SIZE",
            )
        };
        let launch = Launch::detect()?.ok_or_else(none)?;
        Ok(Box::new(Bootstrap::connect(&launch, exchange_limit())?))
    };
    init(connect, peers, flags, gpu)
}

fn init<'a>(
    connect: impl FnOnce() -> Result<Box<dyn Exchange>>,
    peers: impl FnOnce() -> Result<&'a [c_int]>,
    flags: c_int,
    gpu: c_int,
) -> Result<()> {
    static ONCE: Mutex<()> = Mutex::new(());
    // Not waited for: the exchange may call back.
    let Some(_once) = ONCE.try_lock() else {
        return Err(Failure::new("another call initialises this process: let it return"));
    };
    if JOB.read().is_some() {
        return Err(Failure::new("this process has a job: call mp_finalize before mp_init"));
    }
    let mut exchange = connect()?;
    let (rank, size) = (exchange.rank(), exchange.size());
    if rank >= size || size > MAX_RANKS {
        let value = format!("{rank} of {size}");
        return Err(Failure::invalid(
            "rank of the exchange",
            value,
            "less than its size, which is at most 8192",
        ));
    }
    // All ranks exchange, also those that have failed.
    let made = peers().and_then(|peers| make(rank, size, peers, flags, gpu));
    let mut table = vec![0; size * QpAddress::BYTES];
    for peer in made.iter().flat_map(|made| made.peers.iter()) {
        let row = peer.rank * QpAddress::BYTES..(peer.rank + 1) * QpAddress::BYTES;
        table[row].copy_from_slice(&peer.qp.address().to_bytes());
    }
    let tables = exchange.allgather(&table, exchange_limit());
    let connected = made.and_then(|made| {
        let tables = tables?;
        made.peers.iter().try_for_each(|peer| join(peer, rank, &tables[peer.rank]))?;
        Ok(made)
    });
    let answers = exchange.allgather(&[u8::from(connected.is_ok())], exchange_limit());
    let Made { gpu, context, pd, peers: all } = connected?;
    if let Some(failed) = answers?.iter().position(|answer| answer != &[1]) {
        return Err(Failure::new(format!("rank {failed} could not connect: see its error")));
    }
    let mut peers = vec![None; size];
    for peer in all {
        let rank = peer.rank;
        peers[rank] = Some(peer);
    }
    let complete = Memory::alloc(8)?;
    static NUMBERS: AtomicU64 = AtomicU64::new(0);
    let (exchange, number) = (Mutex::new(exchange), NUMBERS.fetch_add(1, Ordering::Relaxed));
    let job = Job { number, exchange, context, pd, gpu, peers, complete };
    *JOB.write() = Some(Arc::new(job));
    Ok(())
}

/// Connects to the queue pair that a rank has for this one.
fn join(peer: &Peer, rank: usize, table: &[u8]) -> Result<()> {
    let (rows, _) = table.as_chunks::<{ QpAddress::BYTES }>();
    let row = rows.get(rank).filter(|row| row.iter().any(|&byte| byte != 0)).ok_or_else(|| {
        let why = "it has failed, see its error, or its list of peers lacks this rank";
        Failure::new(format!("rank {} has no connection to rank {rank}: {why}", peer.rank))
    })?;
    Ok(peer.qp.connect(QpAddress::from_bytes(row)?)?)
}

/// What this rank has before it connects.
struct Made {
    gpu: Gpu,
    context: Context,
    pd: Pd,
    peers: Vec<Arc<Peer>>,
}

/// Opens the device, and makes a queue pair for each peer.
fn make(rank: usize, size: usize, peers: &[c_int], flags: c_int, gpu: c_int) -> Result<Made> {
    let places = [OnGpu::empty(), OnGpu::SEND_QUEUE, OnGpu::RECV_CQ, OnGpu::SEND_CQ, OnGpu::RECORDS];
    let wanted = usize::try_from(flags).ok().and_then(|at| places.get(at).copied());
    let mut on_gpu = wanted
        .ok_or_else(|| Failure::invalid("flags", flags, "one of MP_INIT_DEFAULT to MP_INIT_DBREC_ON_GPU"))?;
    process::claim();
    if gdsync::env::variable("MP_ENABLE_UD").is_some_and(|value| value.trim() != "0") {
        LIBRARY.announce(
            "mp_init: connections are reliable also with MP_ENABLE_UD, and deliver all that datagrams would",
        );
    }
    let gpu = Gpu::open(gpu)?;
    let device = match gdsync::env::variable("MP_USE_IB_HCA") {
        None => Device::near(&gpu)?,
        Some(part) => {
            let found = Device::list().into_iter().find(|device| device.name().contains(&part));
            found.ok_or_else(|| Failure::new(format!("no device has {part} in its name (MP_USE_IB_HCA)")))?
        }
    };
    let context = device.open()?;
    let pd = context.alloc_pd()?;
    let mut all: Vec<Arc<Peer>> = Vec::new();
    for &number in peers {
        let peer = usize::try_from(number).unwrap_or(usize::MAX);
        if peer >= size || all.iter().any(|known| known.rank == peer) {
            return Err(Failure::invalid("peers", number, "each a rank of the job, once"));
        }
        let build = |on_gpu| {
            let builder = pd.build_qp().max_send_wr(DEPTH).max_recv_wr(DEPTH).max_inline(MAX_INLINE);
            let builder = builder.max_send_sge(MAX_PIECES as usize).max_recv_sge(MAX_PIECES);
            builder.rnr_retry(RNR_RETRY).timeout(ACK_TIMEOUT).on_gpu(&gpu, on_gpu).build()
        };
        let qp = match build(on_gpu) {
            Err(error) if !on_gpu.is_empty() => {
                LIBRARY.announce(&format!("mp_init: the queues are in host memory: {error}"));
                on_gpu = OnGpu::empty();
                build(on_gpu)?
            }
            built => built?,
        };
        qp.name_ranks(rank, peer, Traffic::Messages);
        all.push(Peer::new(peer, qp));
    }
    Ok(Made { gpu, context, pd, peers: all })
}

/// Waits for all ranks, and disconnects.
pub(crate) fn finalize() -> Result<()> {
    job()?;
    let Some(job) = JOB.write().take() else {
        return Err(Failure::new("another thread has called mp_finalize"));
    };
    let arrived = job.exchange(|exchange| Ok(exchange.barrier(exchange_limit())?));
    LISTS.clear();
    WINDOWS.clear();
    let peers: Vec<_> = job.peers.iter().flatten().cloned().collect();
    peers.iter().for_each(|peer| peer.stop());
    REQUESTS.clear();
    peers.iter().for_each(|peer| streams::forget(&peer.qp));
    drop(job);
    for peer in peers {
        let rank = peer.rank;
        // Otherwise a thread is in a call with it.
        if let Some(peer) = Arc::into_inner(peer)
            && let Err(error) = peer.qp.destroy(END)
        {
            LIBRARY.report("mp_finalize", format!("rank {rank}: {error}"), true);
        }
    }
    arrived
}
