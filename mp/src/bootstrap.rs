//! The exchange of addresses, used before any queue exists. [`Exchange`] is what a communicator needs; whoever has ranks
//! that can talk already, by MPI or a store of their own, implements it for
//! [`Builder::init_over`](crate::Builder::init_over).
//!
//! [`Bootstrap`] is the one of this crate: a star of TCP connections through rank 0. Every call has a time limit, and the first error is final: the rank that sees it tells the others
//! through rank 0, and each later call returns it again. The connections stay open after an exchange,
//! so that [`Bootstrap::check`] sees when a rank is gone. A rank that drops its `Bootstrap` is gone for
//! the others; call [`Bootstrap::barrier`] first if they are to finish before.
//!
//! The token keeps jobs apart, not attackers out: use it on networks you trust, as any launcher does.

mod checked;
mod conn;
mod doors;
mod frame;
mod lobby;
mod meet;
mod pmi;
mod regroup;

use std::fmt;
use std::net::TcpListener;
use std::sync::Arc;
use std::time::Duration;

pub(crate) use checked::Checked;
use conn::{Conn, Failure, Step, drive};
use doors::Doors;
use frame::{Job, Kind};
use meet::{Door, FIX_ROOT, Place, dial};

use crate::deadline::Deadline;
use crate::error::{Error, Result};
use crate::launch::{Launch, Root};

/// Most bytes one rank may contribute to an exchange.
pub const MAX_PAYLOAD: usize = 64 << 20;

/// Ranks that can exchange a few bytes: addresses and keys, not data.
///
/// All ranks make the same calls in the same order.
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
    /// As [`Exchange::allgather`].
    fn barrier(&mut self, timeout: Duration) -> Result<()> {
        self.allgather(&[], timeout).map(drop)
    }

    /// Makes an exchange of the ranks that are left, in their order, and returns their former ranks too: those whose process
    /// is there, but for those of `without` of any rank. All of them call it: [`Communicator::shrink`](crate::Communicator::shrink)
    /// does. It works after failures of this exchange, and may be called again after one of its own.
    ///
    /// # Errors
    /// [`Error::Bootstrap`] where it is not possible, as with what is provided; [`Error::Deadline`] names who is late.
    fn regroup(&mut self, without: &[usize], timeout: Duration) -> Result<(Box<dyn Exchange>, Vec<usize>)> {
        let _ = (without, timeout);
        let what = "its exchange cannot leave ranks out";
        Err(Error::bootstrap("this rank", what, "build it with Communicator::init, or restart the job"))
    }
}

/// The connections of one rank: rank 0 has one to everybody, the others one to rank 0.
#[derive(Debug)]
pub struct Bootstrap {
    rank: u32,
    job: Job,
    /// Rank 0: ranks 1 and up, in order. Others: rank 0.
    peers: Vec<Conn>,
    failed: Option<Error>,
    /// Where the ranks find each other without rank 0.
    doors: Option<Arc<Doors>>,
    /// Those of the ranks that were before, open so that none of them takes this one for gone.
    _former: Option<Arc<Doors>>,
}

impl Bootstrap {
    fn new(rank: u32, job: Job, peers: Vec<Conn>) -> Self {
        Self { rank, job, peers, failed: None, doors: None, _former: None }
    }

    /// Connects all ranks of the job: rank 0 listens, the others dial until it answers, at the place that
    /// [`Launch::root`] says. Returns when all ranks are there. A job of one rank opens no socket.
    ///
    /// Rank 0 listens on all addresses of its host, or on loopback only if `root` is there. Name
    /// resolution is the system's and may exceed `timeout`.
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
        let place = match &launch.root {
            Root::Pmi { host } => {
                let session = pmi::session(launch.rank, host.as_deref(), &deadline)?;
                if job.token == 0 {
                    job.token = session.token;
                }
                session.place
            }
            root => meet::place(root, launch.rank)?,
        };
        let (stream, root) = match place {
            Place::Here(door) => return Self::assemble(door, job, &deadline, &mut || Ok(())),
            Place::There(root) => dial(&root, &deadline)?,
        };
        let peer = format!("rank 0 ({root})");
        let mut conn = Conn::new(stream, peer.clone())
            .map_err(|error| Error::bootstrap_os(peer, "cannot use the socket", error, FIX_ROOT))?;
        conn.max_payload = MAX_PAYLOAD;
        let rank = u32::try_from(launch.rank).expect("checked to be below the size");
        conn.send(job.frame(Kind::Hello, rank, &[]));
        let mut bootstrap = Self::new(rank, job, vec![conn]);
        bootstrap.guarded(|this| this.exchange_with_root(Kind::Welcome, 1, &deadline)).map(drop)?;
        Ok(bootstrap)
    }

    /// Makes rank 0 of `launch` from a socket that listens already, so that nobody else can take its
    /// port. Otherwise as [`Bootstrap::connect`].
    ///
    /// # Errors
    /// As [`Bootstrap::connect`]; [`Error::Launch`] when `launch` is not rank 0.
    pub fn root(listener: TcpListener, launch: &Launch, timeout: Duration) -> Result<Self> {
        Self::root_while(listener, launch, timeout, &mut || Ok(()))
    }

    /// As [`Bootstrap::root`], as long as `can_come` has no error: it looks now and then at who is awaited.
    pub(crate) fn root_while(
        listener: TcpListener,
        launch: &Launch,
        timeout: Duration,
        can_come: &mut dyn FnMut() -> Result<()>,
    ) -> Result<Self> {
        let job = job_of(launch)?;
        if launch.rank != 0 {
            let what = format!("rank {} holds the socket of rank 0", launch.rank);
            return Err(Error::launch(what, "call Bootstrap::connect in all ranks but 0"));
        }
        Self::assemble(Door::new(listener), job, &Deadline::after(timeout), can_come)
    }

    fn assemble(
        door: Door,
        job: Job,
        deadline: &Deadline,
        can_come: &mut dyn FnMut() -> Result<()>,
    ) -> Result<Self> {
        let peers = lobby::assemble(&door.listener, job, deadline, can_come)?;
        // Before anybody is let in: who comes back for the next exchange must not knock here.
        drop(door);
        let mut bootstrap = Self::new(0, job, peers);
        let welcome = job.frame(Kind::Welcome, 0, &[]);
        bootstrap.guarded(|this| this.send_to_all(&welcome, Kind::Welcome, deadline))?;
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
    /// must call it. A rank that dies after everybody's bytes are at rank 0 may go unnoticed until the
    /// next call.
    ///
    /// # Errors
    /// [`Error::Bootstrap`] for more than [`MAX_PAYLOAD`] bytes (nothing is sent and the call may be
    /// repeated), for a rank that is gone or does something else; [`Error::Deadline`] names who is
    /// late. All but the first are final.
    pub fn allgather(&mut self, bytes: &[u8], timeout: Duration) -> Result<Vec<Vec<u8>>> {
        if bytes.len() > MAX_PAYLOAD {
            let what = format!("{} bytes are too large a message: {MAX_PAYLOAD} are the limit", bytes.len());
            return Err(Error::bootstrap(
                "this rank",
                what,
                "exchange addresses here, and data over the network",
            ));
        }
        self.exchange(Kind::Allgather, bytes, timeout)
    }

    /// Returns after every rank has called it.
    ///
    /// # Errors
    /// As [`Bootstrap::allgather`].
    pub fn barrier(&mut self, timeout: Duration) -> Result<()> {
        self.exchange(Kind::Barrier, &[], timeout).map(drop)
    }

    /// Looks, without waiting, whether the other ranks are there. Rank 0 sees all of them, and tells
    /// the others what it sees; these see rank 0 itself and its report.
    ///
    /// # Errors
    /// [`Error::Bootstrap`] names the rank that is gone. It is final.
    pub fn check(&mut self) -> Result<()> {
        self.guarded(|this| {
            let first = this.first_peer();
            let mut ranks = this.peers.iter_mut().zip(first..);
            ranks.try_for_each(|(conn, rank)| conn.check().map_err(|error| Failure { rank, error }))
        })
    }

    fn first_peer(&self) -> u32 {
        u32::from(self.rank == 0)
    }

    /// Runs `operation` unless an earlier one failed; keeps its error, and tells the peers.
    fn guarded<T>(
        &mut self,
        operation: impl FnOnce(&mut Self) -> std::result::Result<T, Failure>,
    ) -> Result<T> {
        if let Some(error) = &self.failed {
            return Err(error.clone());
        }
        operation(self).map_err(|mut failure| {
            if self.rank != 0 {
                // For the others it is this rank that leaves.
                failure.rank = self.rank;
            }
            announce(&mut self.peers, &self.job, &failure);
            self.failed.insert(failure.error).clone()
        })
    }

    fn exchange(&mut self, kind: Kind, bytes: &[u8], timeout: Duration) -> Result<Vec<Vec<u8>>> {
        let deadline = Deadline::after(timeout);
        self.guarded(|this| {
            if this.rank == 0 {
                let parts = this.collect(kind, bytes, &deadline)?;
                let mut all = Vec::new();
                for (part, rank) in parts.iter().zip(0..) {
                    this.job.put(&mut all, kind, rank, part);
                }
                match this.send_to_all(&all.into(), kind, &deadline) {
                    // All were in it, and the others go on: what one of them has missed comes out of the next call.
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

    /// Rank 0: everybody's bytes, its own first.
    fn collect(
        &mut self,
        kind: Kind,
        own: &[u8],
        deadline: &Deadline,
    ) -> std::result::Result<Vec<Vec<u8>>, Failure> {
        let mut parts: Vec<Option<Vec<u8>>> = vec![None; self.peers.len()];
        drive(&mut self.peers, 1, kind.name(), deadline, |index, conn| {
            if parts[index].is_none() && conn.fill()? {
                parts[index] = Some(conn.take(kind)?.payload);
            }
            if parts[index].is_some() {
                // It says nothing more before it gets its answer, but it may die.
                conn.expect_silence(kind)?;
            }
            Ok(Step { done: parts[index].is_some(), events: libc::POLLIN })
        })?;
        Ok(std::iter::once(own.to_vec()).chain(parts.into_iter().flatten()).collect())
    }

    /// Rank 0: the same bytes for everybody, also after one was found to be gone.
    fn send_to_all(
        &mut self,
        bytes: &Arc<[u8]>,
        kind: Kind,
        deadline: &Deadline,
    ) -> std::result::Result<(), Failure> {
        self.peers.iter_mut().for_each(|conn| conn.send(bytes.clone()));
        let mut failed = None;
        drive(&mut self.peers, 1, kind.name(), deadline, |index, conn| {
            let done = conn.flush().unwrap_or_else(|error| {
                let rank = u32::try_from(index + 1).expect("a rank");
                failed.get_or_insert(Failure { rank, error });
                conn.drop_output();
                true
            });
            Ok(Step { done, events: if done { 0 } else { libc::POLLOUT } })
        })?;
        failed.map_or(Ok(()), Err)
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
        let what = format!("{} (rank 0 answers when all ranks are in it)", kind.name());
        drive(&mut self.peers, 0, &what, deadline, |_, root| {
            // First what rank 0 has to say: if it gave up, sending to it would fail with less of a reason.
            while !ranks.is_empty() && root.fill()? {
                let frame = root.take(kind)?;
                if ranks.next() != Some(frame.header.rank) {
                    return Err(Error::bootstrap(&root.peer, "sent its frames out of order", FIX_ROOT));
                }
                parts.push(frame.payload);
            }
            let write = if root.flush()? { 0 } else { libc::POLLOUT };
            Ok(Step { done: ranks.is_empty(), events: libc::POLLIN | write })
        })?;
        Ok(parts)
    }
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
}

fn job_of(launch: &Launch) -> Result<Job> {
    launch.check("rank", "size")?;
    let size = u32::try_from(launch.size).expect("checked to be at most 65536");
    Ok(Job { size, token: launch.token })
}

/// Tells the peers that the job cannot go on, as far as they still listen.
fn announce(peers: &mut [Conn], job: &Job, failure: &Failure) {
    let frame = job.frame(Kind::Failed, failure.rank, failure.reason().as_bytes());
    peers.iter_mut().for_each(|conn| conn.farewell(frame.clone()));
}
