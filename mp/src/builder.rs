//! Building a communicator: settings, devices, and the connections between all ranks; and a smaller one of the survivors.

use std::ops::RangeInclusive;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::sleep;
use std::time::Duration;

use gdsync::Device;
use gdsync::cuda::Gpu;
use gdsync::env::variable;
use gdsync::rdma::DeviceConfig;
use gdsync::recorder::Traffic;
use gdsync::verbs::{Access, Context, OnGpu, Qp, QpAddress, RemoteAddr};
use gdsync_device::fork_guard::ForkGuard;
use gdsync_device::own_rank;
use parking_lot::Mutex;

use crate::cache::{Cache, CacheConfig};
use crate::communicator::{Communicator, Inner, Settings};
use crate::credit::{self, CreditFlag, CreditRoute, Credits};
use crate::error::{Error, Result};
use crate::exchange::{CheckedExchange, CommonCall, Exchange, Spawned, table_row, take};
use crate::offer::zeroed;
use crate::path::{DeviceDomain, Devices, GpuPath, IntraHostPath, NearPath};
use crate::peer::Peer;
use crate::places::{ARRIVAL_BYTES, Places};
use crate::registration::Registration;
use crate::rma_queue::AllRmaQueues;
use crate::transport::{QpPair, QueueConfig, Transport, ack_timeout};
use crate::wait::Deadline;
use crate::watchdog::{AllWatched, Watchdog};

/// Builds a [`Communicator`].
#[derive(Clone, Debug)]
#[must_use]
pub struct CommunicatorBuilder(pub(crate) Settings);

/// Settings that the environment may override.
pub(crate) struct Resolved {
    cache: Cache,
    intra_host: IntraHostPath,
    gpu_path: GpuPath,
    near: NearPath,
}

impl Default for CommunicatorBuilder {
    fn default() -> Self {
        Self(Settings {
            context: None,
            spawn: None,
            size: None,
            bind: true,
            timeout: Duration::from_secs(30),
            watch: true,
            queues: QueueConfig {
                depth: 512,
                max_pieces: 2,
                traffic: Traffic::Messages,
                gpu: None,
                on_gpu: OnGpu::empty(),
                ack_timeout: 0,
            },
            cache: CacheConfig::default(),
            intra_host: IntraHostPath::Soft,
            gpu_path: GpuPath::BySize,
            near: NearPath::Auto,
            allow_overlap: false,
        })
    }
}

impl CommunicatorBuilder {
    /// Uses this device instead of the default one.
    pub fn context(mut self, context: &Context) -> Self {
        self.0.context = Some(context.clone());
        self
    }

    /// Starts the program again as ranks 1 to `size - 1` on this host, if no launcher started this process, each on CPUs of its own:
    /// see [`CommunicatorBuilder::bind`]. Linux kills them with the *thread* that calls [`CommunicatorBuilder::init`]: call it on a
    /// thread that stays, best the main thread.
    pub fn spawn(mut self, size: usize) -> Self {
        self.0.spawn = Some(size);
        self
    }

    /// How many ranks the program needs: with another number, as a launcher may start, [`CommunicatorBuilder::init`] fails at once.
    pub fn size(mut self, size: usize) -> Self {
        self.0.size = Some(size);
        self
    }

    /// Whether [`CommunicatorBuilder::spawn`] gives each rank CPUs of its own (default yes): an equal share of those that the calling
    /// thread may use, whole cores next to each other if there are enough. It binds the calling thread of rank 0 until the job is
    /// over, and the other ranks as a whole; threads that they start stay in their share. Nothing is bound if there are more ranks
    /// than CPUs, if the builder has a [`GPU`](CommunicatorBuilder::gpu), or by a launcher's ranks. `MP_BIND` in the environment
    /// (`1` or `0`) overrides it.
    pub fn bind(mut self, bind: bool) -> Self {
        self.0.bind = bind;
        self
    }

    /// Messages that can be under way to and from each rank (default 512, at most 32768). With more a call
    /// [waits for room](Communicator#full-queues).
    pub fn depth(mut self, depth: usize) -> Self {
        self.0.queues.depth = depth;
        self
    }

    /// Pieces that a message can have (default 2, at most 30).
    pub fn max_pieces(mut self, pieces: u32) -> Self {
        self.0.queues.max_pieces = pieces;
        self
    }

    /// Whether the communicator has a watchdog thread (default yes). Four times a second it releases what complete messages held,
    /// and asks silent ranks whether they are alive; receives that were held back it announces within a millisecond. Without it the
    /// program has to call [`Communicator::progress`] now and then: a stream that waits for a rank whose death the device does not notice
    /// goes on only after its limit, and a stream of another rank that waits for a receive of this one only after this rank's next wait.
    pub fn watch(mut self, watch: bool) -> Self {
        self.0.watch = watch;
        self
    }

    /// How long the ranks may take to find each other, and to end after a communicator that was dropped without
    /// [`Communicator::finalize`], and how long calls wait without a [timeout](Communicator#timeouts) of their own (default 30 s).
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.0.timeout = timeout;
        self
    }

    /// Whether outstanding receives may overlap in memory (default no: [`Error::OverlappingReceives`]). Only for programs whose ranks
    /// cannot send a message into memory before what is there was used, such as a ping-pong over two buffers with receives posted
    /// far ahead.
    pub fn allow_overlap(mut self, allow: bool) -> Self {
        self.0.allow_overlap = allow;
        self
    }

    /// Prepares the queues for streams of this GPU. Without this the first use by a stream of a GPU does.
    pub fn gpu(mut self, gpu: &Gpu) -> Self {
        self.0.queues.gpu = Some(gpu.clone());
        self
    }

    /// Which parts of the queues are in the memory of [`CommunicatorBuilder::gpu`] (default nothing).
    pub fn on_gpu(mut self, what: OnGpu) -> Self {
        self.0.queues.on_gpu = what;
        self
    }

    /// What the messages between ranks of the same host go through (default [`IntraHostPath::Soft`]). FIFOs need
    /// [`CommunicatorBuilder::watch`] at both ranks. `MP_LOCAL` in the environment overrides it.
    pub fn intra_host(mut self, path: IntraHostPath) -> Self {
        self.0.intra_host = path;
        self
    }

    /// How payload in GPU memory is sent, through a software HCA and through an RDMA device that a thread posts to (default
    /// [`GpuPath::BySize`]). `MP_GPU_PATH` in the environment overrides it.
    pub fn gpu_path(mut self, path: GpuPath) -> Self {
        self.0.gpu_path = path;
        self
    }

    /// Whether CUDA streams write and read the windows of ranks of the same host by peer copies (default [`NearPath::Auto`]).
    /// `MP_NEAR` in the environment overrides it.
    pub fn near(mut self, path: NearPath) -> Self {
        self.0.near = path;
        self
    }

    /// What the registration cache keeps (default: see [`CacheConfig`]). `MP_REG_CACHE` in the environment overrides it.
    pub fn cache(mut self, config: CacheConfig) -> Self {
        self.0.cache = config;
        self
    }

    /// Builds a communicator of the ranks of `exchange`, without asking for a launcher: for ranks that can talk to each other already.
    ///
    /// # Errors
    /// [`Error::Launch`] when the rank and size of the exchange make no sense, or the size is another
    /// [one](CommunicatorBuilder::size); [`Error::Bootstrap`] when it does not give a part of every rank, and what else it returns;
    /// [`Error::Device`] from the RDMA device, for a setting out of range, or for a variable of the environment that means nothing.
    pub fn init_over(self, exchange: impl Exchange + 'static) -> Result<Communicator> {
        let _call = CommonCall::InitOver.enter();
        let deadline = Deadline::after(self.0.timeout);
        let resolved = self.resolve()?;
        let (rank, size) = (exchange.rank(), exchange.size());
        if rank >= size {
            let what = format!("the exchange says that this is rank {rank} of {size}");
            return Err(Error::launch(what, "number the ranks from 0 to size - 1"));
        }
        own_rank::set(rank);
        self.check_size(size)?;
        self.build(Box::new(CheckedExchange(Box::new(exchange))), resolved, deadline)
    }

    /// Refuses a job of another size than the program needs.
    pub(crate) fn check_size(&self, size: usize) -> Result<()> {
        match self.0.size {
            Some(needed) if needed != size => {
                let what = format!("this job has {size} ranks, and the program needs {needed}");
                Err(Error::launch(what, "start as many (mpirun -n, srun -n, CommunicatorBuilder::spawn)"))
            }
            _ => Ok(()),
        }
    }

    /// Checks the settings before anybody is waited for.
    pub(crate) fn resolve(&self) -> Result<Resolved> {
        let Settings { queues, cache, intra_host, gpu_path, near, .. } = &self.0;
        let within = |what, value: usize, range: RangeInclusive<usize>, expected| match range.contains(&value)
        {
            true => Ok(()),
            false => Err(gdsync::Error::InvalidArgument { what, value: value.to_string(), expected }),
        };
        within("CommunicatorBuilder::depth", queues.depth, 1..=32768, "1 to 32768")?;
        within("CommunicatorBuilder::max_pieces", queues.max_pieces as usize, 1..=30, "1 to 30")?;
        if queues.gpu.is_none() && !queues.on_gpu.is_empty() {
            return Err(Error::Device(gdsync::Error::InvalidArgument {
                what: "the parts of the queues on the GPU",
                value: format!("{:?} without a GPU", queues.on_gpu),
                expected: "nothing, or a builder that was given a GPU",
            }));
        }
        Ok(Resolved {
            cache: Cache::new(cache.clone().or(variable("MP_REG_CACHE").as_deref())?),
            intra_host: intra_host.clone().or(variable("MP_LOCAL").as_deref())?,
            gpu_path: gpu_path.or(variable("MP_GPU_PATH").as_deref())?,
            near: near.or(variable("MP_NEAR").as_deref())?,
        })
    }

    /// Chooses devices with the other ranks, and connects to them.
    pub(crate) fn build(
        mut self,
        mut exchange: Box<dyn Exchange>,
        resolved: Resolved,
        deadline: Deadline,
    ) -> Result<Communicator> {
        let (context, is_default) = match &self.0.context {
            Some(context) => (context.clone(), false),
            None => {
                let config = DeviceConfig { gpu: self.0.queues.gpu.clone(), ..DeviceConfig::from_env()? };
                let is_named = variable("GDSYNC_DEVICE").is_some();
                (Device::find(None)?.open_with(&config)?, !is_named && config.route.is_none())
            }
        };
        let Resolved { cache, intra_host, gpu_path, near } = resolved;
        self.0.near = near;
        let wanted = (&intra_host, gpu_path);
        let devices = Devices::agree(
            (&context, is_default),
            wanted,
            (self.0.watch, self.0.has_places()),
            &mut *exchange,
            deadline.remaining(),
        )?;
        self.connect(devices, exchange, cache, deadline)
    }

    /// Builds another communicator of the ranks of `comm`, with connections of its own over the same devices: a registration with
    /// either is for both. All ranks must call it.
    pub(crate) fn build_beside(self, comm: &Communicator, deadline: Deadline) -> Result<Communicator> {
        let mut exchange = Box::new(comm.clone());
        let inner = &comm.0;
        let main = DeviceDomain { context: inner.context.clone(), pd: inner.pd.clone() };
        let (intra_host, limit) = ((inner.intra_host.clone(), inner.domain), deadline.remaining());
        let devices =
            Devices::share_again(main, intra_host, &inner.paths, self.0.watch, &mut *exchange, limit)?;
        let cache = Cache::new(self.0.cache.clone());
        let beside = self.connect(devices, exchange, cache, deadline)?;
        // The ranks meet in `comm`.
        beside.0.children.is_finalized.store(true, Ordering::Relaxed);
        Ok(beside)
    }

    fn connect(
        mut self,
        mut devices: Devices,
        mut exchange: Box<dyn Exchange>,
        cache: Cache,
        deadline: Deadline,
    ) -> Result<Communicator> {
        let (flag, near) = (Arc::new(CreditFlag::new(self.0.watch)), self.0.near);
        self.0.queues.ack_timeout = ack_timeout(&devices.main.context);
        let (transports, credits) =
            connect(&mut devices, &mut *exchange, (&self.0.queues, near), &flag, deadline.remaining())?;
        // No rank may send before all can receive.
        exchange.barrier(deadline.remaining())?;
        let peers: Arc<[Arc<Peer>]> = transports.into_iter().map(Peer::new).map(Arc::new).collect();
        let (rma, watched): (AllRmaQueues, AllWatched) = Default::default();
        let watchdog =
            self.0.watch.then(|| Watchdog::start(flag.clone(), peers.clone(), rma.clone(), watched.clone()));
        let watchdog = watchdog.transpose();
        let fix = "allow the process another thread, or build with watch(false)";
        let watchdog = watchdog.map_err(|error| Error::spawn("cannot start the watchdog", error, fix))?;
        let timeout = self.0.timeout;
        let inner = Inner {
            rank: exchange.rank(),
            fork_guard: ForkGuard::default(),
            context: devices.main.context,
            pd: devices.main.pd,
            intra_host: devices.intra_host,
            domain: devices.domain,
            paths: devices.paths,
            cache,
            flag,
            _watchdog: watchdog,
            peers,
            credits,
            besides: Mutex::default(),
            is_closed: exchange.close_flag(),
            exchange: Arc::new(Mutex::new(exchange)),
            outstanding: (!self.0.allow_overlap).then(Arc::default),
            children: Spawned::new(self.0.timeout),
            is_over: Arc::default(),
            settings: self.0,
            rma,
            exports: Mutex::default(),
            watched,
        };
        Ok(Communicator(Arc::new(inner), timeout))
    }
}

impl Communicator {
    /// Starts to build a communicator.
    pub fn builder() -> CommunicatorBuilder {
        CommunicatorBuilder::default()
    }
}

/// What a rank reports to another one: the queue pairs of its messages and credits, and the word that the other one writes.
struct Card {
    messages: QpAddress,
    credits: [QpAddress; 2],
    word: RemoteAddr,
}

impl Card {
    const BYTES: usize = 3 * QpAddress::BYTES + 12;

    fn to_bytes(&self) -> Vec<u8> {
        let [credits, probes] = self.credits;
        let mut bytes = [self.messages, credits, probes].map(|qp| qp.to_bytes()).concat();
        bytes.extend(self.word.addr.to_be_bytes());
        bytes.extend(self.word.rkey.to_be_bytes());
        bytes
    }

    fn from_bytes(bytes: &[u8; Self::BYTES]) -> gdsync::Result<Self> {
        let rest = &mut &bytes[..];
        let [messages, credits, probes] = [take(rest), take(rest), take(rest)];
        let messages = QpAddress::from_bytes(&messages)?;
        let credits = [QpAddress::from_bytes(&credits)?, QpAddress::from_bytes(&probes)?];
        let (addr, rkey) = (u64::from_be_bytes(take(rest)), u32::from_be_bytes(take(rest)));
        Ok(Self { messages, credits, word: RemoteAddr { addr, rkey } })
    }
}

/// Builds queue pairs to each rank and connects them. The registration must live as long as the transports: the other ranks write
/// to it.
fn connect(
    devices: &mut Devices,
    exchange: &mut dyn Exchange,
    (queues, near): (&QueueConfig, NearPath),
    flag: &Arc<CreditFlag>,
    timeout: Duration,
) -> Result<(Vec<Transport>, Registration)> {
    let (rank, size) = (exchange.rank(), exchange.size());
    let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ;
    let table = credit::table(size)?;
    let intra_host = devices.intra_host.as_ref().map(|device| device.pd.register(&table, access));
    let table =
        Registration::new(devices.main.pd.register(&table, access)?, intra_host.transpose()?, devices.domain);
    let pairs = (0..size)
        .map(|peer| {
            let pd = devices.pd(peer);
            let words = |depth: usize| {
                let words = pd.build_qp().max_send_wr(depth.max(2)).max_recv_wr(1).max_inline(credit::INLINE);
                words.timeout(queues.ack_timeout).build()
            };
            let messages = QpPair::build(peer == rank, || queues.build_qp(pd))?;
            Ok((messages, [words(queues.depth)?, words(credit::PROBES)?]))
        })
        .collect::<Result<Vec<_>>>()?;
    let mut cards = Vec::with_capacity(size * Card::BYTES);
    for (peer, (messages, credits)) in pairs.iter().enumerate() {
        let word = table.mr(devices.paths[peer].is_intra_host()).remote(credit::offset(peer))?;
        let credits = credits.each_ref().map(Qp::address);
        let card = Card { messages: messages.address(), credits, word };
        cards.extend(card.to_bytes());
    }
    let cards = exchange.allgather(&cards, timeout)?;
    // The arrival words of all ranks: now, as CUDA may wait for streams.
    let gpu = queues.gpu.as_ref().filter(|_| devices.places.iter().any(Option::is_some));
    let arrivals = gpu.and_then(|gpu| {
        let made = zeroed(gpu, size * ARRIVAL_BYTES);
        made.inspect_err(|error| tracing::info!(%error, "streams wait for completions of receives")).ok()
    });
    let transports =
        pairs.into_iter().zip(&cards).enumerate().map(|(peer, ((messages, credits), theirs))| {
            let failed = |cause| Error::message(peer, "connect", cause);
            let theirs = Card::from_bytes(table_row(theirs, peer, rank, size)?).map_err(failed)?;
            messages.name_ranks(rank, peer, [queues.traffic; 2]);
            credits.iter().for_each(|credits| credits.name_ranks(rank, peer, Traffic::Announcements));
            messages.connect(theirs.messages).map_err(failed)?;
            let tables = devices.places.get_mut(peer).and_then(Option::take);
            let places = queues.gpu.as_ref().zip(tables).map(|(gpu, tables)| {
                let arrivals = arrivals.as_ref().map(|all| all.slice(peer * ARRIVAL_BYTES, ARRIVAL_BYTES));
                Places::new(gpu, near, tables, arrivals.transpose()?)
            });
            let places = places.transpose()?;
            let [ready, shared] = places.as_ref().map_or([None, None], |places| places.ready().map(Some));
            let route = match peer == rank {
                true => CreditRoute::Own,
                false => {
                    for (credits, theirs) in credits.iter().zip(theirs.credits) {
                        credits.connect(theirs).map_err(failed)?;
                    }
                    let [qp, probe] = credits;
                    CreditRoute::Remote { qp, probe, word: theirs.word, shared }
                }
            };
            let of_queue = (queues.depth, queues.traffic);
            let credits = Credits::new(table.memory(), peer, of_queue, (route, ready), flag.clone())?;
            let fifo = devices.fifos.get_mut(peer).and_then(Option::take);
            let via = (devices.paths[peer].is_intra_host(), devices.domain);
            Ok(Transport::new(peer, via, messages, queues, credits, (fifo, places)))
        });
    Ok((transports.collect::<Result<_>>()?, table))
}

/// The pause between two attempts: another rank has just died.
const PAUSE: Duration = Duration::from_millis(10);

/// What [`Communicator::shrink`] returns.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Shrunk {
    /// The surviving ranks, numbered from 0 in their order.
    pub communicator: Communicator,
    /// The former rank of each of them, ascending.
    pub former: Vec<usize>,
}

impl Communicator {
    /// Makes a communicator of the surviving ranks, built as this one, after ranks have died ([`Error::is_rank_lost`]). All
    /// survivors must call it. Ranks that die meanwhile are left out too, or show by the first use of the new communicator, which
    /// can shrink again. Registrations belong to this communicator: register memory with the new one.
    /// [`Tagged`](crate::tagged::Tagged) has a [`shrink`](crate::tagged::Tagged::shrink) of its own, to be called afterwards.
    ///
    /// It ends all connections of this communicator, and its barriers and exchanges: ranks that wait for this one get an error within
    /// a second, as after [`Communicator::give_up`]. A rank whose process is alive is waited for, unless any rank has
    /// [given it up](Communicator::give_up): then it is left out, and gets an error if it calls this. Processes that
    /// [`CommunicatorBuilder::spawn`] started here belong to the new communicator; those of ranks that are left out are killed.
    ///
    /// The ranks find each other by sockets that [`CommunicatorBuilder::init`] opens at each of them. A dead process is known by
    /// a refused connection: if a whole host is gone, or a firewall drops packets in its place, give its ranks up.
    ///
    /// # Errors
    /// [`Error::Deadline`] names ranks that are alive and have not called this: it may be called again, by all.
    /// [`Error::Closed`] after [`Communicator::close`].
    /// [`Error::Bootstrap`] for a rank that the others leave out, and for an exchange of
    /// [`CommunicatorBuilder::init_over`] that cannot regroup; [`Error::Device`] from the RDMA device. A rank that dies in the very
    /// last step may leave some ranks with an error and others with a communicator, in which the next call fails.
    pub fn shrink(&self, timeout: impl Into<Option<Duration>>) -> Result<Shrunk> {
        let _call = CommonCall::Shrink.enter();
        let deadline = Deadline::after(self.limit(timeout));
        let transports = self.0.peers.iter().map(|peer| &peer.transport);
        let without: Vec<usize> =
            transports.clone().filter(|one| one.is_given_up()).map(|one| one.rank).collect();
        transports.for_each(|one| one.fail(&gdsync::Error::GivenUp));
        loop {
            let (exchange, former) = self.regroup(&without, &deadline)?;
            let rank = exchange.rank();
            let builder = CommunicatorBuilder(self.0.settings.clone());
            let built = builder.resolve().and_then(|resolved| {
                builder.build(exchange, resolved, Deadline::after(deadline.remaining()))
            });
            match built {
                Ok(communicator) => {
                    own_rank::change(rank);
                    let children = self.0.children.lock().take();
                    *communicator.0.children.lock() = children.map(|children| children.keep(&former));
                    return Ok(Shrunk { communicator, former });
                }
                // Another one has died: the others see that as well, and try again.
                Err(Error::Bootstrap { .. } | Error::Message { .. }) if !deadline.is_over() => sleep(PAUSE),
                Err(error) => return Err(error),
            }
        }
    }

    pub(crate) fn regroup(
        &self,
        without: &[usize],
        deadline: &Deadline,
    ) -> Result<(Box<dyn Exchange>, Vec<usize>)> {
        self.0.fork_guard.check()?;
        self.lock_exchange(deadline)?.regroup(without, deadline.remaining())
    }
}
