//! Building a communicator: who takes part, over which device.

use std::sync::Arc;
use std::time::Duration;

use gdsync::cuda::Gpu;
use gdsync::verbs::{Context, Device, OnGpu, Pd, Qp, QpAddress};
use parking_lot::Mutex;

use crate::bootstrap::Bootstrap;
use crate::cache::{Cache, CacheConfig};
use crate::communicator::{Communicator, Inner};
use crate::deadline::Deadline;
use crate::error::{Error, Result};
use crate::launch::Launch;
use crate::peer::Peer;
use crate::spawn::{Children, spawn_self};

/// Builds a [`Communicator`].
#[derive(Clone, Debug)]
#[must_use]
pub struct Builder {
    context: Option<Context>,
    spawn: Option<usize>,
    depth: usize,
    timeout: Duration,
    gpu: Option<Gpu>,
    on_gpu: OnGpu,
    cache: CacheConfig,
}

impl Default for Builder {
    fn default() -> Self {
        Self {
            context: None,
            spawn: None,
            depth: 512,
            timeout: Duration::from_secs(30),
            gpu: None,
            on_gpu: OnGpu::empty(),
            cache: CacheConfig::default(),
        }
    }
}

impl Builder {
    /// Uses this device instead of the default one.
    pub fn context(mut self, context: &Context) -> Self {
        self.context = Some(context.clone());
        self
    }

    /// Where no launcher started this process, starts the program again as ranks 1 to `size - 1` of this host.
    pub fn spawn(mut self, size: usize) -> Self {
        self.spawn = Some(size);
        self
    }

    /// Messages that can be under way to and from each rank (default 512).
    pub fn depth(mut self, depth: usize) -> Self {
        self.depth = depth;
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

    /// What the registration cache keeps (default see [`CacheConfig`]). `MP_REG_CACHE` in the environment overrides it.
    pub fn cache(mut self, config: CacheConfig) -> Self {
        self.cache = config;
        self
    }

    /// Joins the job. Every rank must call this.
    ///
    /// # Errors
    /// [`Error::Launch`] when nobody said who takes part; [`Error::Bootstrap`] and [`Error::Deadline`] name the rank or
    /// address at fault; [`Error::Device`] from the RDMA device, for queues on a GPU that was not given, or for an
    /// `MP_REG_CACHE` that means nothing.
    pub fn init(self) -> Result<Communicator> {
        let deadline = Deadline::after(self.timeout);
        if self.gpu.is_none() && !self.on_gpu.is_empty() {
            return Err(Error::Device(gdsync::Error::InvalidArgument {
                what: "what of the queues is on the GPU",
                value: format!("{:?} without a GPU", self.on_gpu),
                expected: "nothing, or a builder that was given a GPU",
            }));
        }
        let cache = Cache::new(self.cache.clone().in_environment()?);
        let (bootstrap, children) = self.join()?;
        let context = match &self.context {
            Some(context) => context.clone(),
            None => Device::find(None)?.open()?,
        };
        self.connect(bootstrap, children, context, cache, deadline)
    }

    fn join(&self) -> Result<(Bootstrap, Option<Children>)> {
        if let Some(launch) = Launch::detect()? {
            return Ok((Bootstrap::connect(&launch, self.timeout)?, None));
        }
        let fix = "start it with mpirun or srun, set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, or let it spawn its peers";
        let size = self.spawn.ok_or_else(|| Error::launch("no launcher started this process", fix))?;
        let (launch, listener, children) = spawn_self(size)?;
        Ok((Bootstrap::root(listener, &launch, self.timeout)?, Some(children)))
    }

    fn connect(
        self,
        mut bootstrap: Bootstrap,
        children: Option<Children>,
        context: Context,
        cache: Cache,
        deadline: Deadline,
    ) -> Result<Communicator> {
        let (rank, size) = (bootstrap.rank(), bootstrap.size());
        let pd = context.alloc_pd()?;
        let peers = (0..size)
            .map(|peer| {
                let send = self.queue_pair(&pd)?;
                let recv = if peer == rank { self.queue_pair(&pd)? } else { send.clone() };
                Ok(Peer::new(peer, send, recv, self.depth))
            })
            .collect::<Result<Vec<_>>>()?;
        let table: Vec<u8> = peers.iter().flat_map(|p| p.send.address().to_bytes()).collect();
        let tables = bootstrap.allgather(&table, deadline.remaining())?;
        for (peer, table) in peers.iter().zip(&tables) {
            let (addresses, rest) = table.as_chunks::<{ QpAddress::BYTES }>();
            let theirs = addresses.get(rank).filter(|_| addresses.len() == size && rest.is_empty());
            let theirs = theirs.ok_or_else(|| {
                let fix = "run the same version and number of ranks everywhere";
                Error::bootstrap(format!("rank {}", peer.rank), "its address table has the wrong size", fix)
            })?;
            let failed = |source| Error::Message { rank: peer.rank, operation: "connect", source };
            if peer.rank == rank {
                peer.recv.connect(peer.send.address()).map_err(failed)?;
                peer.send.connect(peer.recv.address()).map_err(failed)?;
            } else {
                let theirs = QpAddress::from_bytes(theirs).map_err(failed)?;
                peer.send.connect(theirs).map_err(failed)?;
            }
        }
        // Nobody may send before everybody can receive.
        bootstrap.barrier(deadline.remaining())?;
        let bootstrap = Mutex::new(bootstrap);
        Ok(Communicator(Arc::new(Inner {
            rank,
            context,
            pd,
            cache,
            peers,
            bootstrap,
            children: Mutex::new(children),
        })))
    }

    fn queue_pair(&self, pd: &Pd) -> Result<Qp> {
        // A receive that is late is waited for: the deadlines of waits end what never comes.
        let builder = pd.build_qp().max_send_wr(self.depth).max_recv_wr(self.depth).rnr_retry(7);
        let builder = match &self.gpu {
            Some(gpu) => builder.on_gpu(gpu, self.on_gpu),
            None => builder,
        };
        Ok(builder.build()?)
    }
}
