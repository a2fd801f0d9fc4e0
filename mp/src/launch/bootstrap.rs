//! The exchange of this crate: a star of TCP connections through rank 0.
//!
//! Every call has a time limit, and the first error is final: the rank that sees it tells the others through rank 0, and each
//! later call returns it again. The connections stay open after an exchange, so that [`Bootstrap::check`] sees when a rank is
//! gone. A rank that drops its `Bootstrap` is gone for the others; call [`Bootstrap::barrier`] first if they are to finish before.
//!
//! The token keeps jobs apart, not attackers out: use it on networks you trust, as any launcher does.

use std::net::TcpListener;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use gdsync::error::rounded;
use gdsync_device::env::variable;
use gdsync_device::own_rank;

use super::binding;
use super::connection::{
    Conn, FIX_DEAD, FIX_ROOT, Failure, Job, Kind, MAX_PAYLOAD, Step, announce, drive, send_to_all,
};
use super::environment::{Launch, Launcher, Root};
use super::pmi;
use super::rendezvous::{self, Listeners, Rendezvous, RootListener};
use super::spawn::{Children, SPAWNED, spawn_bound};
use crate::builder::CommunicatorBuilder;
use crate::communicator::Communicator;
use crate::error::{Error, Result, SECOND_INIT};
use crate::exchange::{CommonCall, Exchange};
use crate::wait::Deadline;

/// The connections of one rank: rank 0 has one to each, the others one to rank 0.
#[derive(Debug)]
pub struct Bootstrap {
    pub(super) rank: u32,
    pub(super) job: Job,
    /// Rank 0: ranks 1 and up, in order. Others: rank 0.
    pub(super) peers: Vec<Conn>,
    pub(super) failed: Option<Error>,
    pub(super) is_closed: Arc<AtomicBool>,
    /// The flag of the listener that has accepted it, until it is part of a communicator.
    pub(super) accepted_by: Weak<Arc<AtomicBool>>,
    /// Where the ranks find each other without rank 0.
    pub(super) listeners: Option<Arc<Listeners>>,
    /// Those of the larger job before, open so that none of its ranks takes this one for dead.
    pub(super) _former: Option<Arc<Listeners>>,
}

impl Bootstrap {
    pub(super) fn new(rank: u32, job: Job, peers: Vec<Conn>) -> Self {
        let (is_closed, accepted_by) = (Arc::default(), Weak::new());
        Self { rank, job, peers, failed: None, is_closed, accepted_by, listeners: None, _former: None }
    }

    /// Connects all ranks of the job: rank 0 listens at [`Launch::root`], the others dial until it answers. Returns when all ranks
    /// are connected. A job of one rank opens no socket.
    ///
    /// Rank 0 listens on all addresses of its host, or on loopback only if `root` is a loopback address. Name resolution is done by
    /// the system, and may exceed `timeout`.
    ///
    /// # Errors
    /// [`Error::Launch`] for a contradictory `launch`, [`Error::Bootstrap`] when rank 0 cannot listen,
    /// cannot be reached or refuses this rank, a rank that had connected is gone, or the launcher does not help;
    /// [`Error::Deadline`] names the ranks that are missing (at rank 0).
    pub fn connect(launch: &Launch, timeout: Duration) -> Result<Self> {
        let mut job = job_of(launch)?;
        let deadline = Deadline::after(timeout);
        if launch.size == 1 {
            return Ok(Self::new(0, job, Vec::new()));
        }
        let rendezvous = match &launch.root {
            Root::Pmi { host } => {
                let (rendezvous, token) = pmi::session(launch.rank, host.as_deref(), &deadline)?;
                if job.token == 0 {
                    job.token = token;
                }
                rendezvous
            }
            root => rendezvous::of(root, launch.rank)?,
        };
        let (stream, root) = match rendezvous {
            Rendezvous::Listen(root) => return Self::accept(root, job, &deadline, &mut || Ok(())),
            Rendezvous::Dial(target) => target.dial(&deadline)?,
        };
        let peer = format!("rank 0 ({root})");
        let mut conn = Conn::new(stream, peer.clone())
            .map_err(|error| Error::bootstrap_os(peer, "cannot use the socket", error, FIX_ROOT))?;
        conn.max_payload = MAX_PAYLOAD;
        let rank = u32::try_from(launch.rank).expect("checked to be below the size");
        conn.send(job.frame(Kind::Hello, rank, &[]));
        let mut bootstrap = Self::new(rank, job, vec![conn]);
        let welcomed = bootstrap.guarded(|this| this.exchange_with_root(Kind::Welcome, 1, &deadline));
        welcomed.map_err(|error| match error {
            Error::Bootstrap { peer, what, cause, fix: FIX_DEAD } => {
                let fix = "it ended, or had all its ranks already: see that each RANK is started once";
                Error::Bootstrap { peer, what, cause, fix }
            }
            other => other,
        })?;
        bootstrap.peers.iter_mut().for_each(|root| root.peer = "rank 0".to_owned());
        Ok(bootstrap)
    }

    /// As [`Bootstrap::connect`], for rank 0 of `launch` with a socket that listens already: no other process can take its port.
    ///
    /// # Errors
    /// [`Error::Bootstrap`] and [`Error::Deadline`], as [`Bootstrap::connect`]; [`Error::Launch`] when `launch` is not rank 0.
    pub fn root(listener: TcpListener, launch: &Launch, timeout: Duration) -> Result<Self> {
        Self::root_while(listener, launch, timeout, &mut || Ok(()))
    }

    /// As [`Bootstrap::root`], until `check` returns an error: it is called now and then to look after the awaited ranks.
    pub(super) fn root_while(
        listener: TcpListener,
        launch: &Launch,
        timeout: Duration,
        check: &mut dyn FnMut() -> Result<()>,
    ) -> Result<Self> {
        let job = job_of(launch)?;
        if launch.rank != 0 {
            let what = format!("rank {} holds the socket of rank 0", launch.rank);
            return Err(Error::launch(what, "call Bootstrap::connect in all ranks but 0"));
        }
        Self::accept(RootListener::new(listener), job, &Deadline::after(timeout), check)
    }

    fn accept(
        root: RootListener,
        job: Job,
        deadline: &Deadline,
        check: &mut dyn FnMut() -> Result<()>,
    ) -> Result<Self> {
        let peers = rendezvous::accept(&root.listener, job, deadline, check)?;
        // Before the welcome: a rank that comes back for the next exchange must not connect here.
        drop(root);
        let mut bootstrap = Self::new(0, job, peers);
        let welcome = job.frame(Kind::Welcome, 0, &[]);
        bootstrap.guarded(|this| send_to_all(&mut this.peers, &welcome, Kind::Welcome.name(), deadline))?;
        Ok(bootstrap)
    }

    /// This rank.
    pub fn rank(&self) -> usize {
        self.rank as usize
    }

    /// Ranks of the job.
    pub fn size(&self) -> usize {
        self.job.size as usize
    }

    /// Gives every rank the bytes of every rank, in rank order; lengths may differ and be 0. All ranks
    /// must call it. A rank that dies after all bytes have reached rank 0 may go unnoticed until the next call.
    ///
    /// # Errors
    /// [`Error::Bootstrap`] for more than [`MAX_PAYLOAD`] bytes (nothing is sent and the call may be
    /// repeated), for a rank that is gone or does something else; [`Error::Deadline`] names late
    /// ranks. All but the first are final.
    pub fn allgather(&mut self, bytes: &[u8], timeout: Duration) -> Result<Vec<Vec<u8>>> {
        if bytes.len() > MAX_PAYLOAD {
            let what = format!("{} bytes are too large a message: {MAX_PAYLOAD} are the limit", bytes.len());
            return Err(Error::bootstrap(
                "this rank",
                what,
                "exchange addresses here, and data over the network",
            ));
        }
        self.exchange(CommonCall::current_or(CommonCall::Exchange), bytes, timeout)
    }

    /// Returns after every rank has called it.
    ///
    /// # Errors
    /// [`Error::Bootstrap`] and [`Error::Deadline`], as [`Bootstrap::allgather`].
    pub fn barrier(&mut self, timeout: Duration) -> Result<()> {
        self.exchange(CommonCall::current_or(CommonCall::Barrier), &[], timeout).map(drop)
    }

    /// Checks, without waiting, whether the other ranks are alive. Rank 0 sees all of them, and reports to the others; these see
    /// rank 0 and its report.
    ///
    /// # Errors
    /// [`Error::Bootstrap`] names the rank that is gone. It is final.
    pub fn check(&mut self) -> Result<()> {
        self.guarded(|this| {
            // The others have rank 0 alone.
            let mut ranks = this.peers.iter_mut().zip(u32::from(this.rank == 0)..);
            ranks.try_for_each(|(conn, rank)| conn.check().map_err(|error| Failure { rank, error }))
        })
    }

    /// Runs `operation` unless an earlier one failed. Keeps its error, and reports it to the peers.
    fn guarded<T>(
        &mut self,
        operation: impl FnOnce(&mut Self) -> std::result::Result<T, Failure>,
    ) -> Result<T> {
        if let Some(error) = &self.failed {
            return Err(error.clone().of_earlier_call());
        }
        operation(self).map_err(|mut failure| {
            if self.rank != 0 {
                // For the others this rank is the one that leaves.
                failure.rank = self.rank;
            }
            announce(&mut self.peers, &self.job, &failure);
            self.failed.insert(failure.error).clone()
        })
    }

    pub(super) fn exchange(
        &mut self,
        call: CommonCall,
        bytes: &[u8],
        timeout: Duration,
    ) -> Result<Vec<Vec<u8>>> {
        let (kind, deadline) = (Kind::Call(call), Deadline::after(timeout));
        self.guarded(|this| {
            if this.rank == 0 {
                let parts = this.collect(kind, bytes, &deadline)?;
                let mut all = Vec::new();
                for (part, rank) in parts.iter().zip(0..) {
                    this.job.put(&mut all, kind, rank, part);
                }
                match send_to_all(&mut this.peers, &all.into(), kind.name(), &deadline) {
                    // All have contributed, and the others go on: the next call reports the rank that missed the answer.
                    Err(failure) if !matches!(failure.error, Error::Deadline { .. }) => {
                        announce(&mut this.peers, &this.job, &failure);
                        this.failed = Some(failure.error);
                    }
                    other => other?,
                }
                return Ok(parts);
            }
            let frame = this.job.frame(kind, this.rank, bytes);
            this.peers.iter_mut().for_each(|root| root.send(frame.clone()));
            this.exchange_with_root(kind, this.job.size, &deadline)
        })
    }

    /// Rank 0: collects the bytes of all, its own first.
    fn collect(
        &mut self,
        kind: Kind,
        own: &[u8],
        deadline: &Deadline,
    ) -> std::result::Result<Vec<Vec<u8>>, Failure> {
        let mut parts: Vec<Option<Vec<u8>>> = vec![None; self.peers.len()];
        let (is_closed, accepted_by) = (&*self.is_closed, &self.accepted_by);
        let driven = drive(&mut self.peers, 1, kind.name(), deadline, |index, conn| {
            refuse_closed(is_closed)?;
            if accepted_by.upgrade().is_some_and(|listener| listener.load(Ordering::Relaxed)) {
                return Err(Error::Closed { what: "the listener" });
            }
            if parts[index].is_none() && conn.fill()? {
                parts[index] = Some(conn.take(kind)?.payload);
            }
            if parts[index].is_some() {
                // It sends nothing more before it gets its answer, but it may die.
                conn.expect_silence(kind)?;
            }
            Ok(Step { done: parts[index].is_some(), events: libc::POLLIN })
        });
        if let Err(Failure { rank, error: Error::Deadline { after, .. } }) = &driven {
            let (name, limit) = (kind.name(), rounded(*after));
            for (conn, part) in self.peers.iter_mut().zip(&parts) {
                conn.told = Some(match part {
                    None => (
                        0,
                        format!(
                            "it waited {limit} for this rank in {name}, and gave up (call it earlier, or allow more time there)"
                        ),
                    ),
                    Some(_) => (*rank, format!("it did not call {name} within {limit}, and rank 0 gave up")),
                });
            }
        }
        driven?;
        Ok(std::iter::once(own.to_vec()).chain(parts.into_iter().flatten()).collect())
    }

    /// Other ranks: sends what is queued and takes `count` frames, about ranks 0 and up.
    fn exchange_with_root(
        &mut self,
        kind: Kind,
        count: u32,
        deadline: &Deadline,
    ) -> std::result::Result<Vec<Vec<u8>>, Failure> {
        let mut ranks = 0..count;
        let mut parts = Vec::new();
        let what = format!("{} (rank 0 answers when all ranks have called it)", kind.name());
        let is_closed = &*self.is_closed;
        let driven = drive(&mut self.peers, 0, &what, deadline, |_, root| {
            refuse_closed(is_closed)?;
            // Read first: if rank 0 gave up, its reason is better than a failed write.
            while !ranks.is_empty() && root.fill()? {
                let frame = root.take(kind)?;
                if ranks.next() != Some(frame.header.rank) {
                    return Err(Error::bootstrap(&root.peer, "sent its frames out of order", FIX_ROOT));
                }
                parts.push(frame.payload);
            }
            let write = if root.flush()? { 0 } else { libc::POLLOUT };
            Ok(Step { done: ranks.is_empty(), events: libc::POLLIN | write })
        });
        if let Err(Failure { error: Error::Deadline { after, .. }, .. }) = &driven {
            let what =
                format!("it waited {} for the others in {}, and gave up", rounded(*after), kind.name());
            self.peers.iter_mut().for_each(|root| root.told = Some((self.rank, what.clone())));
        }
        driven?;
        Ok(parts)
    }
}

pub(super) fn refuse_closed(is_closed: &AtomicBool) -> Result<()> {
    if is_closed.load(Ordering::Relaxed) { Err(Error::Closed { what: "the communicator" }) } else { Ok(()) }
}

impl Exchange for Bootstrap {
    fn rank(&self) -> usize {
        self.rank()
    }

    fn size(&self) -> usize {
        self.size()
    }

    fn allgather(&mut self, bytes: &[u8], timeout: Duration) -> Result<Vec<Vec<u8>>> {
        self.allgather(bytes, timeout)
    }

    fn barrier(&mut self, timeout: Duration) -> Result<()> {
        self.barrier(timeout)
    }

    fn regroup(&mut self, without: &[usize], timeout: Duration) -> Result<(Box<dyn Exchange>, Vec<usize>)> {
        let (next, former) = Self::regroup(self, without, timeout)?;
        Ok((Box::new(next), former))
    }

    fn close_flag(&self) -> Arc<AtomicBool> {
        self.is_closed.clone()
    }
}

fn job_of(launch: &Launch) -> Result<Job> {
    launch.check("rank", "size")?;
    let size = u32::try_from(launch.size).expect("checked to be at most 65536");
    Ok(Job { size, token: launch.token })
}

impl CommunicatorBuilder {
    /// Joins the job. Every rank must call this.
    ///
    /// # Errors
    /// [`Error::Launch`] when there is no launcher, and nothing to spawn, and for another [size](CommunicatorBuilder::size);
    /// [`Error::Bootstrap`] and [`Error::Deadline`] name the rank or address at fault; [`Error::Child`] when a process of
    /// [`CommunicatorBuilder::spawn`] ends before; [`Error::Device`] from the RDMA device, for a setting out of range, or for an
    /// `MP_REG_CACHE`, `MP_LOCAL`, `MP_GPU_PATH` or `MP_BIND` that means nothing.
    pub fn init(self) -> Result<Communicator> {
        // What comes of the error need not run on the CPUs of one rank.
        self.start().inspect_err(|_| binding::unbind())
    }

    fn start(self) -> Result<Communicator> {
        let _call = CommonCall::Init.enter();
        let deadline = Deadline::after(self.0.timeout);
        let resolved = self.resolve()?;
        let (mut bootstrap, mut children) = self.join()?;
        let opened = bootstrap.open_listeners(deadline.remaining());
        let communicator = opened.and_then(|()| self.build(Box::new(bootstrap), resolved, deadline));
        let communicator = communicator.map_err(|error| match &mut children {
            Some(children) => children.explain_by_child(error),
            None => error,
        })?;
        *communicator.0.children.lock() = children.map(|children| Box::new(children) as _);
        Ok(communicator)
    }

    fn join(&self) -> Result<(Bootstrap, Option<Children>)> {
        let has_joined = own_rank::get().is_some();
        if let Some(launch) = Launch::detect()? {
            own_rank::set(launch.rank);
            self.check_size(launch.size)?;
            // Its rank 0 meets the ranks once, and spawns others for another job.
            if has_joined && launch.launcher == Launcher::Env && variable(SPAWNED).is_some() {
                return Err(Error::launch("this process has joined its job already", SECOND_INIT));
            }
            let connected = Bootstrap::connect(&launch, self.0.timeout);
            return Ok((
                connected.map_err(|error| if has_joined { error.of_second_init() } else { error })?,
                None,
            ));
        }
        if has_joined && self.0.spawn.is_none() {
            return Err(Error::launch("this process has joined its job already", SECOND_INIT));
        }
        let fix = "start the ranks with mpirun, srun or torchrun, set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, or let rank 0 \
                   start the others (CommunicatorBuilder::spawn)";
        let size = self.0.spawn.ok_or_else(|| Error::launch("no launcher started this process", fix))?;
        self.check_size(size)?;
        binding::unbind();
        let shares = if binding::is_wanted(self.0.bind && self.0.queues.gpu.is_none())? {
            binding::shares(size)
        } else {
            Vec::new()
        };
        let (launch, listener, mut children) = spawn_bound(size, &shares)?;
        own_rank::set(launch.rank);
        if let Some(own) = shares.first() {
            binding::bind(own)?;
            tracing::info!(shares = ?shares, "each rank is bound to CPUs of its own; MP_BIND=0 leaves them unbound");
        }
        let check = &mut || children.check_all_run();
        let bootstrap = Bootstrap::root_while(listener, &launch, self.0.timeout, check)
            .map_err(|error| children.explain_by_child(error))?;
        Ok((bootstrap, Some(children)))
    }
}

impl Communicator {
    /// Joins the job of the launcher that started this process.
    ///
    /// # Errors
    /// [`Error::Launch`], [`Error::Bootstrap`], [`Error::Deadline`] and [`Error::Device`], as [`CommunicatorBuilder::init`].
    pub fn init() -> Result<Self> {
        Self::builder().init()
    }
}
