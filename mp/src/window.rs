//! Windows: memory that other ranks read and write by themselves.

mod lane;
mod rma;
mod start;
mod wait;

use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use gdsync::memory::{Word32, Word64};
use gdsync::mlx5::RemoteAddr;
use gdsync::verbs::{Access, QpAddress};

pub(crate) use lane::{Lane, Lanes};
pub use rma::{MAX_INLINE, Rma, Signal};

use crate::communicator::{Communicator, Registration};
use crate::deadline::Deadline;
use crate::ends::{Ends, agree, row};
use crate::error::{Error, Result};
use crate::path::BufferPath;

/// Elements of a list of pieces that one work request takes: as many as need no more room than inline data.
const MAX_SGES: usize = 6;

/// A part of each rank's memory that all ranks may read and write by themselves. Clones share it; any thread may use it.
///
/// Puts and signals from one rank to another take effect in the order they were started in. Gets and operations on words
/// may be overtaken by what is started later, unless that says [`Rma::fence`].
///
/// A window has connections of its own: it waits for no message and for no other window, and a stream that
/// puts through it is in nobody's way. Windows that share them, so that their operations are ordered too, are made with
/// [`Window::beside`].
///
/// Where all ranks are on one host, and reach each other through a device for that ([`Communicator::path`]), so do windows. If
/// any does not, all of a window goes through the device of the communicator: what two devices do to a word would not be in one
/// step for each other.
///
/// Dropping the last clone takes nothing back that is under way, but ends the others' access: see [`Window::destroy`].
#[derive(Clone)]
pub struct Window(Arc<Inner>);

struct Inner {
    comm: Communicator,
    /// The own part.
    registration: Registration,
    range: Range<usize>,
    /// The parts of all ranks.
    parts: Vec<Part>,
    lanes: Arc<Lanes>,
}

/// The part of one rank.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Part {
    at: RemoteAddr,
    size: usize,
}

impl Part {
    const BYTES: usize = 20;

    fn to_bytes(self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        bytes[..8].copy_from_slice(&self.at.addr.to_le_bytes());
        bytes[8..16].copy_from_slice(&(self.size as u64).to_le_bytes());
        bytes[16..].copy_from_slice(&self.at.rkey.to_le_bytes());
        bytes
    }

    fn from_bytes(bytes: &[u8; Self::BYTES]) -> Option<Self> {
        let (addr, rest) = bytes.split_first_chunk::<8>()?;
        let (size, rkey) = rest.split_first_chunk::<8>()?;
        let size = usize::try_from(u64::from_le_bytes(*size)).ok()?;
        let rkey = u32::from_le_bytes(*rkey.first_chunk()?);
        let at = RemoteAddr { addr: u64::from_le_bytes(*addr), rkey };
        at.addr.checked_add(size as u64).map(|_| Self { at, size })
    }
}

impl fmt::Debug for Window {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let sizes: Vec<_> = self.0.parts.iter().map(|part| part.size).collect();
        write!(f, "Window({sizes:?} bytes)")
    }
}

impl Communicator {
    /// Makes the bytes `range` of a registration, which may be none, the part of this rank in a new window. Every rank must
    /// call this, for all windows in the same order; the parts may have different sizes.
    ///
    /// # Errors
    /// [`Error::Device`] for a range outside the registration, for GPU memory that the device does not reach (what is put from
    /// there, and what is got into it, is staged), and from the device; [`Error::Bootstrap`] names a rank that
    /// is gone or could not make its part, [`Error::Deadline`] one that is late.
    pub fn window(
        &self,
        registration: &Registration,
        range: Range<usize>,
        timeout: Duration,
    ) -> Result<Window> {
        let deadline = Deadline::after(timeout);
        let (rank, size) = (self.rank(), self.size());
        let mut bootstrap = self.0.bootstrap.lock();
        let near = self.0.is_all_near();
        let ours = part(registration, &range, near).and_then(|part| {
            let build = || {
                let queues = self.0.builder.queue_pair(self.0.plane(near).1).max_recv_wr(1);
                queues.max_send_sge(MAX_SGES).max_inline(MAX_INLINE)
            };
            let ends = (0..size).map(|peer| Ends::build(peer == rank, build));
            Ok((part, ends.collect::<gdsync::Result<Vec<_>>>()?))
        });
        let record = match &ours {
            Ok((part, ends)) => {
                let addresses = ends.iter().flat_map(|ends| ends.address().to_bytes());
                part.to_bytes().into_iter().chain(addresses).collect()
            }
            Err(_) => Vec::new(),
        };
        let records = bootstrap.allgather(&record, deadline.remaining())?;
        // What is wrong here all ranks see alike, and none goes on.
        let ends = ours.map(|(_, ends)| ends)?;
        let parts = parts_of(&records)?;
        let connect = |(peer, ((_, table), ends)): (usize, (&(Part, &[u8]), &Ends))| {
            let failed = |source| Error::Message { rank: peer, operation: "connect a window", source };
            let theirs = QpAddress::from_bytes(row(table, peer, rank, size)?).map_err(failed)?;
            ends.name_ranks(rank, peer);
            ends.connect(theirs).map_err(failed)
        };
        let lanes = parts.iter().zip(&ends).enumerate().try_for_each(connect);
        let lanes = lanes.and_then(|()| Lanes::new(self, near, ends));
        // Nobody may write before everybody is connected.
        let lanes = agree(&mut **bootstrap, lanes, "its window", &deadline)?;
        drop(bootstrap);
        let parts = parts.into_iter().map(|(part, _)| part).collect();
        Ok(Window::of(self, registration, range, parts, lanes))
    }
}

impl Window {
    /// As [`Communicator::window`], over the connections of this window: operations through both are ordered as if they were
    /// through one, and signals behind puts through one may be in the other. So data can be on a GPU and its signals in
    /// host memory.
    ///
    /// # Errors
    /// As [`Communicator::window`].
    pub fn beside(
        &self,
        registration: &Registration,
        range: Range<usize>,
        timeout: Duration,
    ) -> Result<Self> {
        let deadline = Deadline::after(timeout);
        let comm = &self.0.comm;
        let ours = part(registration, &range, self.0.lanes.near);
        let record = ours.as_ref().map(|part| part.to_bytes().to_vec()).unwrap_or_default();
        let records = comm.0.bootstrap.lock().allgather(&record, deadline.remaining())?;
        ours?;
        let parts = parts_of(&records)?.into_iter().map(|(part, _)| part).collect();
        Ok(Self::of(comm, registration, range, parts, self.0.lanes.clone()))
    }

    fn of(
        comm: &Communicator,
        registration: &Registration,
        range: Range<usize>,
        parts: Vec<Part>,
        lanes: Arc<Lanes>,
    ) -> Self {
        lanes.lead_to(registration.memory());
        let (comm, registration) = (comm.clone(), registration.clone());
        Self(Arc::new(Inner { comm, registration, range, parts, lanes }))
    }

    /// Ends the window after all that is under way: waits for the own operations, then for all ranks, which must call
    /// this too. Clones that are left keep the memory accessible.
    ///
    /// # Errors
    /// As [`Window::flush_all`] and [`Communicator::barrier`].
    pub fn destroy(self, timeout: Duration) -> Result<()> {
        let deadline = Deadline::after(timeout);
        let flushed = self.0.lanes.flush(&deadline);
        let met = self.0.comm.barrier(deadline.remaining());
        flushed.and(met)
    }

    /// The ranks that share it.
    pub fn communicator(&self) -> &Communicator {
        &self.0.comm
    }

    /// What a put of the bytes `range` of `buffer` would take to a rank now, and why: as [`Communicator::path_of`], by the device
    /// of the window. What a get brings leaves the target as the target's [`Communicator::path_of`] says, but that nothing is
    /// fetched by a copy engine of the receiver: it is staged.
    ///
    /// # Errors
    /// As [`Communicator::path_of`].
    pub fn path_of(&self, buffer: &Registration, range: Range<usize>, rank: usize) -> Result<BufferPath> {
        let Inner { comm, lanes, .. } = &*self.0;
        self.part(rank)?;
        let path = comm.path(rank)?.of_windows(lanes.near, comm.context());
        BufferPath::new(path, &lanes.lanes[rank].ends.send, buffer, &range)
    }

    /// Bytes of the window of a rank.
    ///
    /// # Errors
    /// [`Error::NoSuchRank`].
    pub fn size_of(&self, rank: usize) -> Result<usize> {
        self.part(rank).map(|part| part.size)
    }

    /// The 32-bit word at `offset` of the own part, for waits: see [`wait_value32`](crate::wait_value32) and
    /// [`Stream::wait_value32`](gdsync::stream::Stream::wait_value32).
    ///
    /// # Errors
    /// [`Error::OutsideWindow`]; [`Error::Device`] for memory that the CPU cannot reach, or an address that is not a multiple
    /// of 4.
    pub fn word32(&self, offset: usize) -> Result<Word32> {
        Ok(self.0.registration.memory().word32(self.own("word", offset, 4)?)?)
    }

    /// As [`Window::word32`], of 64 bits.
    ///
    /// # Errors
    /// As [`Window::word32`].
    pub fn word64(&self, offset: usize) -> Result<Word64> {
        Ok(self.0.registration.memory().word64(self.own("word", offset, 8)?)?)
    }

    /// Where an access to the own part is in its registration.
    fn own(&self, operation: &'static str, offset: usize, len: usize) -> Result<usize> {
        self.remote(operation, self.0.comm.rank(), offset, len)?;
        Ok(self.0.range.start + offset)
    }

    #[inline(always)]
    fn part(&self, rank: usize) -> Result<&Part> {
        let parts = &self.0.parts;
        match parts.get(rank) {
            Some(part) => Ok(part),
            // Made only here: what is made for nothing has to be dropped.
            None => Err(Error::NoSuchRank { rank, size: parts.len() }),
        }
    }

    /// Where `len` bytes at `offset` of the window of a rank are.
    #[inline(always)]
    fn remote(&self, operation: &'static str, rank: usize, offset: usize, len: usize) -> Result<RemoteAddr> {
        let &Part { at, size } = self.part(rank)?;
        if offset.checked_add(len).is_none_or(|end| end > size) {
            return Err(Error::OutsideWindow { rank, operation, offset, len, size });
        }
        Ok(RemoteAddr { addr: at.addr + offset as u64, rkey: at.rkey })
    }
}

/// The part of this rank.
fn part(registration: &Registration, range: &Range<usize>, near: bool) -> Result<Part> {
    let size = registration.memory().len();
    let registration = registration.on(near);
    let access = registration.access();
    if access != Access::all() {
        return Err(Error::Device(gdsync::Error::InvalidArgument {
            what: "the registration of the window",
            value: format!("one from the cache, for {access:?}"),
            expected: "one of Communicator::register: peers have no rights to what is cached",
        }));
    }
    match range.end.checked_sub(range.start) {
        Some(len) if range.end <= size => Ok(Part { at: registration.remote(range.start)?, size: len }),
        Some(len) => Err(gdsync::Error::OutOfBounds { offset: range.start, len, size }.into()),
        None => Err(Error::Device(gdsync::Error::InvalidArgument {
            what: "the range of the window",
            value: format!("{range:?}"),
            expected: "one that does not end before it starts",
        })),
    }
}

/// The parts of all ranks, and what follows them in their records.
fn parts_of(records: &[Vec<u8>]) -> Result<Vec<(Part, &[u8])>> {
    let part = |(rank, record): (usize, &'_ Vec<u8>)| {
        let (what, fix) = match record.is_empty() {
            true => ("it could not make its part of the window", "see the error of that rank"),
            false => ("its part of the window has a wrong form", "run the same version everywhere"),
        };
        let wrong = || Error::bootstrap(format!("rank {rank}"), what, fix);
        let (part, _) = record.split_first_chunk().ok_or_else(wrong)?;
        Part::from_bytes(part).map(|part| (part, rank)).ok_or_else(wrong)
    };
    let parts = records.iter().enumerate().map(part).collect::<Result<Vec<_>>>()?;
    Ok(parts.into_iter().map(|(part, rank)| (part, &records[rank][Part::BYTES..])).collect())
}
