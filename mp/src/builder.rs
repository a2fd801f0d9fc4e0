//! Building a communicator: who takes part, over which device.

use std::sync::Arc;
use std::time::Duration;

use gdsync::cuda::Gpu;
use gdsync::verbs::{Context, Device, OnGpu, Pd, QpBuilder};
use parking_lot::Mutex;

use crate::bootstrap::Bootstrap;
use crate::communicator::{Communicator, Inner};
use crate::deadline::Deadline;
use crate::error::{Error, Result};
use crate::launch::Launch;
use crate::link::Link;
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

    /// Joins the job. Every rank must call this.
    ///
    /// # Errors
    /// [`Error::Launch`] when nobody said who takes part; [`Error::Bootstrap`] and [`Error::Deadline`] name the rank or
    /// address at fault; [`Error::Device`] from the RDMA device, or for queues on a GPU that was not given.
    pub fn init(self) -> Result<Communicator> {
        let deadline = Deadline::after(self.timeout);
        if self.gpu.is_none() && !self.on_gpu.is_empty() {
            return Err(Error::Device(gdsync::Error::InvalidArgument {
                what: "what of the queues is on the GPU",
                value: format!("{:?} without a GPU", self.on_gpu),
                expected: "nothing, or a builder that was given a GPU",
            }));
        }
        let (bootstrap, children) = self.join()?;
        let context = match &self.context {
            Some(context) => context.clone(),
            None => Device::find(None)?.open()?,
        };
        self.connect(bootstrap, children, context, deadline)
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
        deadline: Deadline,
    ) -> Result<Communicator> {
        let (rank, size) = (bootstrap.rank(), bootstrap.size());
        let pd = context.alloc_pd()?;
        let links = Link::all(&pd, rank, size, |pd| self.queues(pd))?;
        let tables = bootstrap.allgather(&Link::table(&links), deadline.remaining())?;
        links.iter().zip(&tables).try_for_each(|(link, table)| link.connect(table, rank, size))?;
        let peers = links.into_iter().map(|link| Peer::new(link, self.depth)).collect();
        // Nobody may send before everybody can receive.
        bootstrap.barrier(deadline.remaining())?;
        let bootstrap = Mutex::new(bootstrap);
        Ok(Communicator(Arc::new(Inner {
            rank,
            context,
            pd,
            peers,
            bootstrap,
            children: Mutex::new(children),
            builder: self,
            lanes: Mutex::default(),
        })))
    }

    /// The queue pairs to build, as they were asked for.
    pub(crate) fn queues(&self, pd: &Pd) -> QpBuilder {
        // A receive that is late is waited for: the deadlines of waits end what never comes.
        let builder = pd.build_qp().max_send_wr(self.depth).max_recv_wr(self.depth).rnr_retry(7);
        match &self.gpu {
            Some(gpu) => builder.on_gpu(gpu, self.on_gpu),
            None => builder,
        }
    }

    pub(crate) fn queue_depth(&self) -> usize {
        self.depth
    }
}
