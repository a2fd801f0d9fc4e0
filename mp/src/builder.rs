//! Building a communicator: who takes part, over which device.

use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::Duration;

use gdsync::Device;
use gdsync::cuda::Gpu;
use gdsync::rdma::DeviceConfig;
use gdsync::verbs::{Context, OnGpu, Pd, QpBuilder};
use parking_lot::Mutex;

use crate::bootstrap::{Bootstrap, Checked, Exchange};
use crate::cache::{Cache, CacheConfig};
use crate::communicator::{Communicator, Inner};
use crate::connect::connect;
use crate::deadline::Deadline;
use crate::ends::ACK_TIMEOUT;
use crate::error::{Error, Result};
use crate::launch::Launch;
use crate::link::Most;
use crate::path::{GpuPath, Local, Planes};
use crate::peer::Peer;
use crate::spawn::{Children, explain, spawn_self};
use crate::watch::{Alarm, Watch};

/// Builds a [`Communicator`].
#[derive(Clone, Debug)]
#[must_use]
pub struct Builder {
    context: Option<Context>,
    spawn: Option<usize>,
    depth: usize,
    timeout: Duration,
    max_pieces: u32,
    watch: bool,
    gpu: Option<Gpu>,
    on_gpu: OnGpu,
    cache: CacheConfig,
    local: Local,
    gpu_path: GpuPath,
}

/// What the environment has a say in.
struct Settings {
    cache: Cache,
    local: Local,
    gpu_path: GpuPath,
}

impl Default for Builder {
    fn default() -> Self {
        Self {
            context: None,
            spawn: None,
            depth: 512,
            timeout: Duration::from_secs(30),
            max_pieces: 2,
            watch: true,
            gpu: None,
            on_gpu: OnGpu::empty(),
            cache: CacheConfig::default(),
            local: Local::Soft,
            gpu_path: GpuPath::BySize,
        }
    }
}

impl Builder {
    /// Uses this device instead of the default one.
    pub fn context(mut self, context: &Context) -> Self {
        self.context = Some(context.clone());
        self
    }

    /// Where no launcher started this process, starts the program again as ranks 1 to `size - 1` of this host. They are killed
    /// with the *thread* that calls [`Builder::init`] (a rule of Linux): call it on one that stays, best the main thread.
    pub fn spawn(mut self, size: usize) -> Self {
        self.spawn = Some(size);
        self
    }

    /// Messages that can be under way to and from each rank (default 512, at most 32768).
    pub fn depth(mut self, depth: usize) -> Self {
        self.depth = depth;
        self
    }

    /// Pieces that a message can have (default 2, at most 30).
    pub fn max_pieces(mut self, pieces: u32) -> Self {
        self.max_pieces = pieces;
        self
    }

    /// Whether a thread of the communicator looks after it four times a second (default yes): it takes back what finished
    /// messages held, and asks ranks that are silent whether they are there; of receives that were posted in a row it tells
    /// the other ranks a millisecond later, if no call has before. Without it the program calls [`Communicator::progress`] now
    /// and then, or a stream that waits for a rank that is gone only goes on after its limit, and one of another rank that
    /// waits for the last receives of a row not before the next wait of this one.
    pub fn watch(mut self, watch: bool) -> Self {
        self.watch = watch;
        self
    }

    /// How long the ranks may take to find each other (default 30 s).
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// Makes the queues ready for streams of this GPU. Without this they are when a stream of a GPU first uses them.
    pub fn gpu(mut self, gpu: &Gpu) -> Self {
        self.gpu = Some(gpu.clone());
        self
    }

    /// What of the queues is in the memory of [`Builder::gpu`] (default nothing).
    pub fn on_gpu(mut self, what: OnGpu) -> Self {
        self.on_gpu = what;
        self
    }

    /// What the messages between ranks of the same host go through (default [`Local::Soft`]): where the other messages go
    /// through an RDMA device, a software HCA beside it; short ones from CPU to CPU through slots of shared memory, unless
    /// [`Builder::watch`] is off at a rank. `MP_LOCAL` in the environment overrides it.
    pub fn local(mut self, local: Local) -> Self {
        self.local = local;
        self
    }

    /// How payload in GPU memory leaves, through a software HCA and through an RDMA device that a thread posts to (default
    /// [`GpuPath::BySize`]). `MP_GPU_PATH` in the environment overrides it.
    pub fn gpu_path(mut self, path: GpuPath) -> Self {
        self.gpu_path = path;
        self
    }

    /// What the registration cache keeps (default see [`CacheConfig`]). `MP_REG_CACHE` in the environment overrides it.
    pub fn cache(mut self, config: CacheConfig) -> Self {
        self.cache = config;
        self
    }

    /// Joins the job. Every rank must call this.
    ///
    /// # Errors
    /// [`Error::Launch`] when nobody said who takes part; [`Error::Bootstrap`] and [`Error::Deadline`] name the rank or
    /// address at fault; [`Error::Child`] when a process that [`Builder::spawn`] has started ends before; [`Error::Device`] from
    /// the RDMA device, for a depth or a number of pieces out of range, for queues on a GPU that was not given, or for an
    /// `MP_REG_CACHE`, `MP_LOCAL` or `MP_GPU_PATH` that means nothing.
    pub fn init(self) -> Result<Communicator> {
        let deadline = Deadline::after(self.timeout);
        let settings = self.check()?;
        let (mut bootstrap, mut children) = self.join()?;
        let opened = bootstrap.open_doors(deadline.remaining());
        let communicator = opened.and_then(|()| self.finish(Box::new(bootstrap), settings, deadline));
        let communicator = communicator.map_err(|error| explain(children.as_mut(), error))?;
        *communicator.0.children.lock() = children;
        Ok(communicator)
    }

    /// As [`Builder::init`], but the ranks are those of `exchange`, and no launcher is asked: for ranks that can talk to
    /// each other already.
    ///
    /// # Errors
    /// As [`Builder::init`], and what `exchange` returns; [`Error::Launch`] when its rank and size make no
    /// sense, [`Error::Bootstrap`] when it does not give a part of every rank.
    pub fn init_over(self, exchange: impl Exchange + 'static) -> Result<Communicator> {
        let deadline = Deadline::after(self.timeout);
        let settings = self.check()?;
        let (rank, size) = (exchange.rank(), exchange.size());
        if rank >= size {
            let what = format!("the exchange says that this is rank {rank} of {size}");
            return Err(Error::launch(what, "number the ranks from 0 to size - 1"));
        }
        self.finish(Box::new(Checked(Box::new(exchange))), settings, deadline)
    }

    /// As [`Builder::init_over`], again.
    pub(crate) fn rebuild(self, exchange: Box<dyn Exchange>, deadline: &Deadline) -> Result<Communicator> {
        let settings = self.check()?;
        self.finish(exchange, settings, Deadline::after(deadline.remaining()))
    }

    /// Before anybody is waited for.
    fn check(&self) -> Result<Settings> {
        let within = |what, value: usize, range: RangeInclusive<usize>, expected| match range.contains(&value)
        {
            true => Ok(()),
            false => Err(gdsync::Error::InvalidArgument { what, value: value.to_string(), expected }),
        };
        within("Builder::depth", self.depth, 1..=32768, "1 to 32768")?;
        within("Builder::max_pieces", self.max_pieces as usize, 1..=30, "1 to 30")?;
        if self.gpu.is_none() && !self.on_gpu.is_empty() {
            return Err(Error::Device(gdsync::Error::InvalidArgument {
                what: "what of the queues is on the GPU",
                value: format!("{:?} without a GPU", self.on_gpu),
                expected: "nothing, or a builder that was given a GPU",
            }));
        }
        Ok(Settings {
            cache: Cache::new(self.cache.clone().in_environment()?),
            local: self.local.clone().in_environment()?,
            gpu_path: self.gpu_path.in_environment()?,
        })
    }

    fn join(&self) -> Result<(Bootstrap, Option<Children>)> {
        if let Some(launch) = Launch::detect()? {
            return Ok((Bootstrap::connect(&launch, self.timeout)?, None));
        }
        let fix = "start it with mpirun or srun, set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, or let it spawn its peers";
        let size = self.spawn.ok_or_else(|| Error::launch("no launcher started this process", fix))?;
        let (launch, listener, mut children) = spawn_self(size)?;
        let bootstrap =
            Bootstrap::root_while(listener, &launch, self.timeout, &mut || children.check_all_run())
                .map_err(|error| children.explain(error))?;
        Ok((bootstrap, Some(children)))
    }

    fn finish(
        self,
        mut bootstrap: Box<dyn Exchange>,
        settings: Settings,
        deadline: Deadline,
    ) -> Result<Communicator> {
        let context = match &self.context {
            Some(context) => context.clone(),
            None => self.open()?,
        };
        let Settings { cache, local, gpu_path } = settings;
        let wishes = (&local, gpu_path, self.gpu.as_ref());
        let planes = Planes::agree(&context, wishes, self.watch, &mut *bootstrap, deadline.remaining())?;
        self.connect(planes, bootstrap, cache, deadline)
    }

    /// The ranks of `comm` again, with connections of their own over the same devices: what is registered with either is for
    /// both. All ranks must call it.
    pub(crate) fn beside(self, comm: &Communicator, deadline: Deadline) -> Result<Communicator> {
        let mut bootstrap = Box::new(comm.clone());
        let planes = Planes::again(&comm.0, self.watch, &mut *bootstrap, deadline.remaining())?;
        let cache = Cache::new(self.cache.clone());
        self.connect(planes, bootstrap, cache, deadline)
    }

    fn connect(
        self,
        mut planes: Planes,
        mut bootstrap: Box<dyn Exchange>,
        cache: Cache,
        deadline: Deadline,
    ) -> Result<Communicator> {
        let build = |pd: &Pd| self.queue_pair(pd);
        let most = Most { depth: self.depth, pieces: self.max_pieces as usize };
        let alarm = Arc::new(Alarm::new(self.watch));
        let (links, credits) =
            connect(&mut planes, &mut *bootstrap, most, build, &alarm, deadline.remaining())?;
        // Nobody may send before everybody can receive.
        bootstrap.barrier(deadline.remaining())?;
        let peers: Arc<[Peer]> = links.into_iter().map(Peer::new).collect();
        let lanes: Arc<Mutex<Vec<_>>> = Arc::default();
        let watch = self.watch.then(|| Watch::start(alarm.clone(), peers.clone(), lanes.clone())).transpose();
        let fix = "allow the process another thread, or build with watch(false)";
        let watch = watch.map_err(|error| Error::spawn("cannot start the watching thread", error, fix))?;
        Ok(Communicator(Arc::new(Inner {
            rank: bootstrap.rank(),
            context: planes.far.context,
            pd: planes.far.pd,
            near: planes.near,
            paths: planes.paths,
            cache,
            alarm,
            _watch: watch,
            peers,
            _credits: credits,
            bootstrap: Mutex::new(bootstrap),
            children: Mutex::default(),
            builder: self,
            lanes,
        })))
    }

    /// With room for so many pieces of a message, or more.
    pub(crate) fn at_least_pieces(self, pieces: u32) -> Self {
        let pieces = self.max_pieces.max(pieces);
        self.max_pieces(pieces)
    }

    /// The default device, for streams of the GPU if one was given.
    fn open(&self) -> gdsync::Result<Context> {
        let config = DeviceConfig { gpu: self.gpu.clone(), ..DeviceConfig::from_env()? };
        Device::find(None)?.open_with(&config)
    }

    pub(crate) fn queue_depth(&self) -> usize {
        self.depth
    }

    /// A queue pair to build, as was asked for.
    pub(crate) fn queue_pair(&self, pd: &Pd) -> QpBuilder {
        // A receive that is late is waited for: the deadlines of waits end what never comes.
        let builder = pd.build_qp().max_send_wr(self.depth).max_recv_wr(self.depth).rnr_retry(7);
        let builder = builder.timeout(ACK_TIMEOUT);
        let builder = builder.max_send_sge(self.max_pieces as usize).max_recv_sge(self.max_pieces);
        match &self.gpu {
            Some(gpu) => builder.on_gpu(gpu, self.on_gpu),
            None => builder,
        }
    }
}
