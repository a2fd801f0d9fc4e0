//! Windows: memory that other ranks read and write without taking part, and the operations on them.

mod near;
mod rma;

use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use gdsync::memory::{Memory, Word32, Word64};
use gdsync::recorder::{NamedWords, Purpose, Traffic};
use gdsync::stream::{Batch, Cond, PeerSignal, Stream, StreamOrder};
use gdsync::verbs::{Access, Qp, QpAddress, RemoteAddr, SendWr, Sge};

use crate::communicator::Communicator;
use crate::error::{Error, Result};
use crate::exchange::{CommonCall, agree, table_row, take};
use crate::in_flight::Done;
use crate::offer::Offer;
use crate::path::BufferPath;
use crate::registration::{DomainId, Registration};
use crate::request::Request;
use crate::rma_queue::RmaQueues;
use crate::transport::{QpPair, at_once};
use crate::wait::{Deadline, wait_value64_and};
use near::{Copy, Near, PeerCopies};
pub use rma::{MAX_INLINE, Rma, Signal};
use rma::{MAX_SGES, Plan, SendWrs, What, chunks};

/// A part of each rank's memory that all ranks may read and write without the owner. Clones share it; any thread may use it.
///
/// Puts and signals from one rank to another take effect in the order they were started in. Gets and operations on words
/// may be overtaken by what is started later, unless that says [`Rma::fence`].
///
/// A window has queue pairs of its own: it waits for no message and for no other window, and streams that put through it block
/// neither. [`Window::beside`] makes windows that share them, and so the order of operations.
///
/// If all ranks are on one host and reach each other through the intra-host device ([`Communicator::path`]), windows use it too. If
/// not, all of a window goes through the device of the communicator: operations of two devices on one word would not be atomic
/// to each other.
///
/// After the last clone is dropped, operations under way go on, but the other ranks lose access: see [`Window::destroy`].
///
/// # Peer copies
/// Where both ranks are on one host and the part of the target is memory of a GPU (of `cudaMalloc`) that the own GPU reaches, CUDA
/// streams put, get and set signals by kernels that access that memory themselves, over NVLink or PCIe, or by their copy engine
/// ([`CudaStreamConfig::copies`](gdsync::stream::CudaStreamConfig::copies), with what it does not promise): no queue and no CPU is on the way. [`Window::path_of`] says whether, or why not; [`NearPath`](crate::NearPath) and `MP_NEAR` choose. The own GPU is that of the own
/// part, else [`CommunicatorBuilder::gpu`](crate::CommunicatorBuilder::gpu).
///
/// Other operations go through the queue pairs: those of the CPU and of host streams, to or from several pieces or other memory, bytes,
/// words that are added to or swapped. The order is the same, as streams wait for what they start through a queue pair. A word that
/// ranks add to must not be set by another one at the same time.
///
/// Batches with such operations are for CUDA streams of this GPU; host streams refuse them ([`gdsync::Error::Unsupported`]). Steps of
/// kernels that a stream records go through the queue pair. Make windows before streams wait: CUDA may block meanwhile. Memory that others have opened stays
/// allocated until [`Window::destroy`], or until the communicator goes: [wrapped](gdsync::cuda::Gpu::wrap) memory must stay as long.
#[derive(Clone)]
pub struct Window(Arc<Inner>, Arc<RmaQueues>);

struct Inner {
    comm: Communicator,
    /// The part of this rank.
    registration: Registration,
    range: Range<usize>,
    /// The parts of all ranks.
    parts: Vec<Part>,
    /// Those that streams of the own GPU access.
    near: Near,
    /// Tells errors and recordings that the words of the own part are signals.
    _name: NamedWords,
}

/// The part of one rank.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Part {
    at: RemoteAddr,
    size: usize,
}

impl Part {
    const BYTES: usize = 20;

    fn to_bytes(self) -> Vec<u8> {
        let numbers = [self.at.addr, self.size as u64].map(u64::to_le_bytes);
        [numbers.as_flattened(), &self.at.rkey.to_le_bytes()].concat()
    }

    fn from_bytes(bytes: &[u8; Self::BYTES]) -> Option<Self> {
        let rest = &mut &bytes[..];
        let [addr, size] = [take(rest), take(rest)].map(u64::from_le_bytes);
        let at = RemoteAddr { addr, rkey: u32::from_le_bytes(take(rest)) };
        addr.checked_add(size)?;
        Some(Self { at, size: usize::try_from(size).ok()? })
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
        timeout: impl Into<Option<Duration>>,
    ) -> Result<Window> {
        let (_call, deadline) = (CommonCall::Window.enter(), Deadline::after(self.limit(timeout)));
        let (rank, size) = (self.rank(), self.size());
        let mut exchange = self.open_exchange(&deadline)?;
        let intra_host = self.0.is_all_intra_host();
        let (_, pd) = self.0.domain(intra_host);
        let ours = part(registration, &range, (intra_host, self.0.domain)).and_then(|part| {
            let build = || {
                let queues = self.0.settings.queues.build_qp(pd).max_recv_wr(1);
                queues.max_send_sge(MAX_SGES).max_inline(MAX_INLINE)
            };
            let pairs = (0..size).map(|peer| QpPair::build(peer == rank, build));
            Ok((part, pairs.collect::<gdsync::Result<Vec<_>>>()?))
        });
        let (record, exported) = match &ours {
            Ok((part, pairs)) => {
                let addresses = pairs.iter().flat_map(|pair| pair.address().to_bytes());
                let (mut record, exported) = self.record_of(part, registration, &range);
                record.extend(addresses);
                (record, exported)
            }
            Err(_) => Default::default(),
        };
        let records = exchange.allgather(&record, deadline.remaining())?;
        // An error here all ranks see alike, and none goes on.
        let pairs = ours.map(|(_, pairs)| pairs)?;
        let (parts, tables): (Vec<_>, Vec<_>) = parts_of(&records)?.into_iter().unzip();
        let connect = |(peer, (table, pair)): (usize, (&&[u8], &QpPair))| {
            let failed = |cause| Error::message(peer, "connect a window", cause);
            let theirs = QpAddress::from_bytes(table_row(table, peer, rank, size)?).map_err(failed)?;
            pair.name_ranks(rank, peer, [Traffic::Window; 2]);
            pair.connect(theirs).map_err(failed)
        };
        let connected = tables.iter().zip(&pairs).enumerate().try_for_each(connect);
        let depth = self.0.settings.queues.depth;
        let made = connected.and_then(|()| {
            let queues = RmaQueues::new(&self.0.peers, (intra_host, pd), depth, pairs, &self.0.rma)?;
            Ok((queues, Near::open(self, registration, &parts)?))
        });
        // No rank may write before all are connected.
        let (queues, near) = agree(&mut **exchange, made, "its window", &deadline)?;
        drop(exchange);
        Ok(Window::of(self, (registration, range, exported), (parts, near), queues))
    }

    /// What this rank tells the others of its part of a window, and the memory that their GPUs may access then.
    fn record_of(
        &self,
        part: &Part,
        registration: &Registration,
        range: &Range<usize>,
    ) -> (Vec<u8>, Option<Memory>) {
        let (offer, exported) = Offer::new(self.0.settings.near, registration.memory(), range);
        ([&part.to_bytes()[..], &offer.to_bytes()].concat(), exported)
    }
}

impl Window {
    /// As [`Communicator::window`], over the connections of this window: operations through both are ordered as if they were
    /// through one, and signals after puts through one may be in the other. So data can be on a GPU and its signals in
    /// host memory.
    ///
    /// # Errors
    /// [`Error::Device`], [`Error::Bootstrap`] and [`Error::Deadline`], as [`Communicator::window`].
    pub fn beside(
        &self,
        registration: &Registration,
        range: Range<usize>,
        timeout: impl Into<Option<Duration>>,
    ) -> Result<Self> {
        let (_call, comm) = (CommonCall::WindowBeside.enter(), &self.0.comm);
        let deadline = Deadline::after(comm.limit(timeout));
        let ours = part(registration, &range, (self.1.intra_host, comm.0.domain));
        let told = ours.as_ref().map(|part| comm.record_of(part, registration, &range));
        let (record, exported) = told.unwrap_or_default();
        let mut exchange = comm.open_exchange(&deadline)?;
        let records = exchange.allgather(&record, deadline.remaining())?;
        ours?;
        let parts: Vec<_> = parts_of(&records)?.into_iter().map(|(part, _)| part).collect();
        // What a rank opens stays until it knows that all go on.
        let near = agree(&mut **exchange, Near::open(comm, registration, &parts), "its window", &deadline)?;
        drop(exchange);
        Ok(Self::of(comm, (registration, range, exported), (parts, near), self.1.clone()))
    }

    fn of(
        comm: &Communicator,
        (registration, range, exported): (&Registration, Range<usize>, Option<Memory>),
        (parts, near): (Vec<(Part, Offer)>, Near),
        queues: Arc<RmaQueues>,
    ) -> Self {
        comm.0.exports.lock().extend(exported);
        queues.lead_to(registration.memory());
        near.ranks().for_each(|rank| queues.queues[rank].allow_copies());
        let parts = parts.into_iter().map(|(part, _)| part).collect();
        let (comm, registration) = (comm.clone(), registration.clone());
        let addr = registration.memory().addr() + range.start as u64;
        let name = NamedWords::new(addr, range.len() as u64, Purpose::Signals);
        Self(Arc::new(Inner { comm, registration, range, parts, near, _name: name }), queues)
    }

    /// This window over the connections of another one, at no cost: operations through it are ordered with those of the other, and not
    /// with those of this one. So several queues lead to the same memory.
    ///
    /// # Errors
    /// [`Error::Device`] for a window of another communicator.
    pub fn through(&self, other: &Window) -> Result<Self> {
        if !Arc::ptr_eq(&self.0.comm.0, &other.0.comm.0) {
            let cause = gdsync::Error::InvalidArgument {
                what: "the window whose connections are used",
                value: format!("{other:?}, of another communicator"),
                expected: "one of the same communicator",
            };
            return Err(Error::Device(cause));
        }
        other.1.lead_to(self.0.registration.memory());
        self.0.near.ranks().for_each(|rank| other.1.queues[rank].allow_copies());
        Ok(Self(self.0.clone(), other.1.clone()))
    }

    /// Ends the window after all that is under way: waits for the own operations, then for all ranks, which must call
    /// this too. Clones that are left go through queue pairs, for which they keep the memory accessible; graphs with peer copies are
    /// not launched any more. Batches with peer copies must have been submitted before.
    ///
    /// # Errors
    /// [`Error::Message`] for an operation that failed; [`Error::Bootstrap`] and [`Error::Deadline`] for another rank;
    /// [`Error::Device`] after [`Communicator::finalize`], which has done all that.
    pub fn destroy(self, timeout: impl Into<Option<Duration>>) -> Result<()> {
        let _call = CommonCall::WindowDestroy.enter();
        self.0.comm.refuse_finalized("the end of a window")?;
        let deadline = Deadline::after(self.0.comm.limit(timeout));
        self.0.near.end();
        let flushed = self.1.flush(&deadline);
        let met = self.0.comm.barrier(deadline.remaining());
        if met.is_ok() {
            let (memory, mut exports) = (self.0.registration.memory(), self.0.comm.0.exports.lock());
            let start = memory.addr() + self.0.range.start as u64;
            let own =
                exports.iter().position(|part| (part.addr(), part.len()) == (start, self.0.range.len()));
            own.map(|own| exports.swap_remove(own));
        }
        flushed.and(met)
    }

    /// The communicator of the ranks that share it.
    pub fn communicator(&self) -> &Communicator {
        &self.0.comm
    }

    /// What a put of the bytes `range` of `buffer` would take to a rank now, and why: as [`Communicator::path_of`], by the device
    /// of the window. Data of a get leaves the target as the target's [`Communicator::path_of`] says, but is staged where that names
    /// a copy engine of the receiver.
    ///
    /// # Errors
    /// [`Error::NoSuchRank`]; [`Error::Device`] for a range outside the buffer.
    pub fn path_of(&self, buffer: &Registration, range: Range<usize>, rank: usize) -> Result<BufferPath> {
        let (comm, queues) = (&self.0.comm, &self.1);
        self.part(rank)?;
        let path = comm.path(rank)?.of_windows(queues.intra_host, comm.context());
        let path = BufferPath::new(path, &queues.queues[rank].qp.send, buffer, &range)?;
        Ok(path.with_copies(match self.0.near.part(rank) {
            Err(why) => Err(why.to_owned().into()),
            Ok(_) if !queues.queues[rank].has_copies() => {
                Err("streams have used these connections before a window with GPU memory was made over them"
                    .into())
            }
            Ok(_) if !self.0.near.is_near(buffer.memory()) => {
                Err("the buffer is not in memory of the GPU of the window".into())
            }
            Ok(_) => Ok(()),
        }))
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
        Ok(self.0.registration.memory().word32(self.word_at(offset, 4)?)?)
    }

    /// As [`Window::word32`], of 64 bits.
    ///
    /// # Errors
    /// [`Error::OutsideWindow`] and [`Error::Device`], as [`Window::word32`], for an address that is not a multiple of 8.
    pub fn word64(&self, offset: usize) -> Result<Word64> {
        Ok(self.0.registration.memory().word64(self.word_at(offset, 8)?)?)
    }

    /// Where an access to the own part is in its registration.
    fn own(&self, operation: &'static str, offset: usize, len: usize) -> Result<usize> {
        self.remote(operation, self.0.comm.rank(), offset, len)?;
        Ok(self.0.range.start + offset)
    }

    /// Where a word of the own part is in its memory.
    fn word_at(&self, offset: usize, len: usize) -> Result<usize> {
        let at = self.own("word", offset, len)?;
        if (self.0.registration.memory().addr() + at as u64).is_multiple_of(len as u64) {
            return Ok(at);
        }
        Err(Error::Device(gdsync::Error::InvalidArgument {
            what: "the offset of the word in its window",
            value: offset.to_string(),
            expected: if len == 4 {
                "a word at a multiple of 4 bytes"
            } else {
                "a word at a multiple of 8 bytes"
            },
        }))
    }

    fn part(&self, rank: usize) -> Result<&Part> {
        let parts = &self.0.parts;
        match parts.get(rank) {
            Some(part) => Ok(part),
            None => Err(Error::NoSuchRank { rank, size: parts.len() }),
        }
    }

    /// Where `len` bytes at `offset` of the window of a rank are.
    fn remote(&self, operation: &'static str, rank: usize, offset: usize, len: usize) -> Result<RemoteAddr> {
        let &Part { at, size } = self.part(rank)?;
        if offset.checked_add(len).is_none_or(|end| end > size) {
            return Err(Error::OutsideWindow { rank, operation, offset, len, size });
        }
        Ok(RemoteAddr { addr: at.addr + offset as u64, rkey: at.rkey })
    }
}

/// The error of a range or a buffer that no window can be made of.
fn of_window(error: gdsync::Error) -> gdsync::Error {
    use gdsync::Error as E;
    match error {
        E::OutOfBounds { offset, len, size } => E::InvalidArgument {
            what: "the window",
            value: format!("{len} bytes at offset {offset} of a buffer of {size} bytes"),
            expected: "bytes inside the buffer",
        },
        E::InvalidArgument { value, expected, .. } => {
            E::InvalidArgument { what: "the buffer of the window", value, expected }
        }
        other => other,
    }
}

/// The part of this rank.
fn part(
    registration: &Registration,
    range: &Range<usize>,
    (intra_host, domain): (bool, DomainId),
) -> Result<Part> {
    registration.check_domain(domain).and_then(|()| registration.check_range(range)).map_err(of_window)?;
    let mr = registration.mr(intra_host);
    let access = mr.access();
    if access != Access::all() {
        return Err(Error::Device(gdsync::Error::InvalidArgument {
            what: "the registration of the window",
            value: format!("one from the cache, for {access:?}"),
            expected: "one of Communicator::register: peers have no access to cached registrations",
        }));
    }
    Ok(Part { at: mr.remote(range.start)?, size: range.len() })
}

/// The part of a rank, and what follows it in its record.
type Record<'a> = ((Part, Offer), &'a [u8]);

/// The parts of all ranks.
fn parts_of(records: &[Vec<u8>]) -> Result<Vec<Record<'_>>> {
    let part = |(rank, record): (usize, &Vec<u8>)| {
        let parsed = || {
            let (part, rest) = records[rank].split_first_chunk()?;
            let (offer, rest) = rest.split_first_chunk()?;
            Some(((Part::from_bytes(part)?, Offer::from_bytes(offer)), rest))
        };
        parsed().ok_or_else(|| {
            let (what, fix) = match record.is_empty() {
                true => ("it could not make its part of the window", "see the error of that rank"),
                false => ("its part of the window has a wrong form", "run the same version everywhere"),
            };
            Error::bootstrap(format!("rank {rank}"), what, fix)
        })
    };
    records.iter().enumerate().map(part).collect()
}

/// Starting operations.
impl Window {
    /// Starts an operation. The request is complete when it is done at the target too, and local buffers may be used
    /// again; a request that is dropped goes on, and its failure comes out of the next call for the same rank.
    ///
    /// # Errors
    /// [`Error::NoSuchRank`]; [`Error::OutsideWindow`];
    /// [`Error::Message`] with the reason: a range outside a buffer, a registration of another communicator, a communicator that was
    /// finalized, a word that is not aligned, too many inline bytes, a connection that broke, or
    /// that a stream uses now, or a [full](Communicator#full-queues) queue.
    pub fn start(&self, rma: &Rma<'_>) -> Result<Request> {
        self.post(rma, None, |qp, plan, _| Ok(qp.post_send(&plan.wrs)?.into()))
    }

    /// Queues an operation on a stream: it starts when the stream gets there, with what local buffers hold then. In a graph each
    /// launch does it again; its buffers must stay registered as long as the graph.
    ///
    /// # Errors
    /// [`Error::NoSuchRank`], [`Error::OutsideWindow`], [`Error::Device`] and [`Error::Message`], as [`Window::start`], also with the
    /// refusal of the stream.
    pub fn start_on_stream(&self, stream: &Stream, rma: &Rma<'_>) -> Result<Request> {
        let stream = at_once(stream);
        self.post(rma, Some(self.0.near.is_for(&stream)), |qp, plan, order| match &plan.wrs[..] {
            [wr] if plan.is_plain() => Ok(stream.send(qp, wr)?.into()),
            _ => {
                let mut batch = Batch::new();
                let done = plan.add(&mut batch, qp, order)?;
                stream.submit(&mut batch)?;
                Ok(done)
            }
        })
    }

    /// Prepares an operation in a batch: it starts when a stream that the batch is submitted to gets there.
    ///
    /// A batch that is dropped instead takes it back; the request is void then.
    ///
    /// # Errors
    /// [`Error::NoSuchRank`], [`Error::OutsideWindow`], [`Error::Device`] and [`Error::Message`], as [`Window::start`].
    pub fn start_in_batch(&self, batch: &mut Batch, rma: &Rma<'_>) -> Result<Request> {
        self.post(rma, Some(true), |qp, plan, order| plan.add(batch, qp, order))
    }

    /// Starts to write the bytes `range` of `from` to `offset` of the window of a rank: see [`Rma::put`].
    ///
    /// # Errors
    /// [`Error::NoSuchRank`], [`Error::OutsideWindow`], [`Error::Device`] and [`Error::Message`], as [`Window::start`].
    pub fn iput(
        &self,
        from: &Registration,
        range: Range<usize>,
        rank: usize,
        offset: usize,
    ) -> Result<Request> {
        self.start(&Rma::put(from, range, rank, offset))
    }

    /// As [`Window::iput`], without a request: [`Window::flush`] waits for all of a rank.
    ///
    /// # Errors
    /// [`Error::NoSuchRank`], [`Error::OutsideWindow`], [`Error::Device`] and [`Error::Message`], as [`Window::start`], also for
    /// earlier operations.
    pub fn put(&self, from: &Registration, range: Range<usize>, rank: usize, offset: usize) -> Result<()> {
        self.iput(from, range, rank, offset).map(drop)
    }

    /// Starts to read from `offset` of the window of a rank into the bytes `range` of `into`: see [`Rma::get`].
    ///
    /// # Errors
    /// [`Error::NoSuchRank`], [`Error::OutsideWindow`], [`Error::Device`] and [`Error::Message`], as [`Window::start`].
    pub fn iget(
        &self,
        into: &Registration,
        range: Range<usize>,
        rank: usize,
        offset: usize,
    ) -> Result<Request> {
        self.start(&Rma::get(into, range, rank, offset))
    }

    /// Checks an operation, and has it posted: by the CPU, or by a stream, which may take peer copies or not.
    fn post(
        &self,
        rma: &Rma<'_>,
        stream: Option<bool>,
        mut post: impl FnMut(&Qp, &Plan<'_>, &StreamOrder) -> gdsync::Result<Done>,
    ) -> Result<Request> {
        let intra_host = self.1.intra_host;
        let inner = &self.0.comm.0;
        let failed = |cause| Error::message(rma.rank, rma.name(), cause);
        self.0.comm.refuse_finalized("an operation on a window").map_err(failed)?;
        let sges = rma.sges((intra_host, inner.domain)).map_err(failed)?;
        let len = match rma.what {
            What::Put(_) | What::Get(_) => {
                // Only a long list could overflow.
                sges.iter().fold(0_usize, |len, sge| len.saturating_add(sge.len as usize))
            }
            What::PutBytes(bytes) => bytes.len(),
            What::Add { .. } | What::CompareSwap { .. } | What::Signal => 8,
        };
        let name = rma.name();
        let target = rma.signal.as_ref().filter(|_| matches!(rma.what, What::Signal));
        let at = match target.and_then(|signal| signal.window) {
            Some(window) => window.remote(name, rma.rank, rma.offset, len)?,
            None => self.remote(name, rma.rank, rma.offset, len)?,
        };
        let value = rma.signal.as_ref().map_or([0; 8], |signal| signal.value.to_ne_bytes());
        let mut plan = Plan::default();
        self.data(rma, at, &sges, &mut plan.wrs)?;
        if let Some(signal) = &rma.signal {
            plan.wrs.push(self.signal(rma, signal, &value)?);
        }
        if rma.fence
            && let Some(first) = plan.wrs.first_mut()
        {
            *first = first.fence();
        }
        let queue = &self.1.queues[rma.rank];
        if let Some(takes_copies) = stream
            && queue.starts_beside_copies()
        {
            plan.waits = true;
            if takes_copies {
                self.by_copies(rma, &mut plan);
            }
        }
        let buffers = (rma.pieces(), intra_host);
        self.0.comm.while_full(|| {
            let post = |qp: &Qp| post(qp, &plan, &queue.order);
            let posted = queue.post(name, len, buffers, plan.wrs.len(), stream.is_none(), post)?;
            Ok(Request::rma(queue, posted))
        })
    }

    /// Has the stream itself move the data, and set the signal, where the memory at both ends allows it. Words are added to through
    /// the queue pair alone: additions of GPUs and of the software HCA's CPU would not be atomic to each other.
    fn by_copies<'a>(&'a self, rma: &'a Rma<'_>, plan: &mut Plan<'a>) {
        let near = &self.0.near;
        let copy = match (&rma.what, near.part(rma.rank)) {
            (What::Signal, _) | (What::PutBytes([]), _) => None,
            (What::Put(pieces) | What::Get(pieces), Ok(target)) => match pieces.list() {
                [(buffer, range)] if near.is_near(buffer.memory()) => Some(Copy {
                    puts: matches!(rma.what, What::Put(_)),
                    local: buffer.memory(),
                    range: range.clone(),
                    target,
                    offset: rma.offset,
                }),
                _ => return,
            },
            _ => return,
        };
        let word = |signal: &Signal<'_>| {
            let to = signal.window.unwrap_or(self).0.near.part(rma.rank).ok()?;
            let &Signal { offset, value, add, .. } = signal;
            (!add).then(|| PeerSignal { to: to.clone(), offset, value, add })
        };
        let signal = rma.signal.as_ref().and_then(word);
        if copy.is_none() && signal.is_none() {
            return;
        }
        let wr = plan.wrs.pop().filter(|_| rma.signal.is_some() && signal.is_none());
        plan.waits = wr.is_some();
        plan.wrs = wr.into_iter().collect();
        let before_launches = [self.1.queues[rma.rank].clone(), near.before_launches()];
        plan.copies = Some(PeerCopies { copy, signal, before_launches });
    }

    /// The work requests that move data.
    fn data<'a>(&self, rma: &Rma<'a>, at: RemoteAddr, sges: &'a [Sge], wrs: &mut SendWrs<'a>) -> Result<()> {
        match rma.what {
            What::Put(_) => chunks(at, sges, |at, sges| wrs.push(SendWr::write(at, sges))),
            What::Get(_) => chunks(at, sges, |at, sges| wrs.push(SendWr::read(at, sges))),
            What::PutBytes(bytes) if bytes.len() > MAX_INLINE => {
                let expected = "at most mp::MAX_INLINE, or a registration";
                return Err(invalid(rma, "bytes to put", bytes.len().to_string(), expected));
            }
            What::PutBytes(bytes) if !bytes.is_empty() => wrs.push(SendWr::write_inline(at, bytes)),
            What::PutBytes(_) | What::Signal => {}
            What::Add { add, .. } => {
                let result = match sges {
                    [result] => *result,
                    _ => self.1.scratch(rma.rank)?,
                };
                wrs.push(SendWr::fetch_add(aligned(rma, at, rma.offset)?, add, result));
            }
            What::CompareSwap { compare, swap, .. } => {
                for &result in sges {
                    wrs.push(SendWr::compare_swap(aligned(rma, at, rma.offset)?, compare, swap, result));
                }
            }
        }
        // Nothing to move, but it completes in its place in the queue.
        if wrs.is_empty() && rma.signal.is_none() {
            wrs.push(SendWr::nop());
        }
        Ok(())
    }

    /// The work request that signals with a `value`.
    fn signal<'a>(&self, rma: &Rma<'_>, signal: &Signal<'_>, value: &'a [u8; 8]) -> Result<SendWr<'a>> {
        let window = signal.window.unwrap_or(self);
        if !Arc::ptr_eq(&window.1, &self.1) {
            let expected = "one that was made with Window::beside of the window of the operation";
            return Err(invalid(rma, "the window of the signal", format!("{window:?}"), expected));
        }
        let at = aligned(rma, window.remote("signal", rma.rank, signal.offset, 8)?, signal.offset)?;
        let wr = match signal.add {
            true => SendWr::fetch_add(at, signal.value, self.1.scratch(rma.rank)?),
            false => SendWr::write_inline(at, value),
        };
        // Writes need no fence among themselves.
        let is_overtaken = matches!(rma.what, What::Get(_) | What::Add { .. } | What::CompareSwap { .. });
        Ok(if is_overtaken { wr.fence() } else { wr })
    }
}

/// Waiting for operations, and for signals.
impl Window {
    /// Blocks until all operations on a rank are complete that were started, or that streams were given: at the target too.
    ///
    /// # Errors
    /// [`Error::NoSuchRank`]; [`Error::Message`] for the first that
    /// failed, also if its request was dropped, and after
    /// `timeout`: they go on then.
    pub fn flush(&self, rank: usize, timeout: impl Into<Option<Duration>>) -> Result<()> {
        self.part(rank)?;
        self.1.queues[rank].flush(self.0.comm.limit(timeout))
    }

    /// As [`Window::flush`] for all ranks, one after the other, also after one has failed.
    ///
    /// # Errors
    /// [`Error::Message`] for the first operation that failed, and after `timeout`.
    pub fn flush_all(&self, timeout: impl Into<Option<Duration>>) -> Result<()> {
        self.1.flush(&Deadline::after(self.0.comm.limit(timeout)))
    }

    /// Holds a stream until all operations on a rank are complete that were started so far, or prepared in a batch that is
    /// there.
    ///
    /// # Errors
    /// [`Error::NoSuchRank`]; [`Error::Message`]: the connection is broken,
    /// the stream is full or failed, or another stream waits for operations on this rank.
    pub fn flush_on_stream(&self, stream: &Stream, rank: usize) -> Result<()> {
        self.part(rank)?;
        let stream = &at_once(stream);
        self.0.comm.while_full(|| self.1.queues[rank].flush_on_stream(stream))
    }

    /// Blocks until the 64-bit word at `offset` of the own part satisfies a condition, and returns it. What was put before
    /// the [signal](Signal) is visible then. Wait for a counter with [`Cond::Geq`], which is cyclic. The wait does not know who
    /// signals: if that rank has died it goes on to its timeout, and the error names the ranks that are lost.
    ///
    /// # Errors
    /// [`Error::OutsideWindow`] and [`Error::Device`], as [`Window::word64`]; [`Error::Deadline`] after `timeout`.
    pub fn wait_signal(
        &self,
        offset: usize,
        value: u64,
        cond: Cond,
        timeout: impl Into<Option<Duration>>,
    ) -> Result<u64> {
        let context = &self.0.comm.0.domain(self.1.intra_host).0;
        let (word, limit) = (self.word64(offset)?, self.0.comm.limit(timeout));
        wait_value64_and(&word, value, cond, limit, || context.progress()).map_err(|error| match error {
            Error::Deadline { after, .. } => self.late_signal((offset, word.load()), value, cond, after),
            other => other,
        })
    }

    /// The error of a wait for a signal: in which rank's window, and who cannot signal it.
    #[cold]
    fn late_signal(&self, (offset, word): (usize, u64), value: u64, cond: Cond, after: Duration) -> Error {
        let comm = &self.0.comm;
        let lost: Vec<_> = comm.lost().iter().map(|rank| format!("rank {rank}")).collect();
        let lost = match &lost[..] {
            [] => "no rank is known to be lost".to_owned(),
            lost => format!("{} can signal no more", lost.join(", ")),
        };
        let what = format!(
            "wait for a signal at offset {offset} of the window of rank {}, until it is Cond::{cond:?} {value} (it is {word}; {lost})",
            comm.rank()
        );
        Error::Deadline {
            what,
            after,
            fix: "see that another rank signals it (Rma::signal, Rma::with_signal)",
        }
    }

    /// As [`Window::wait_signal`], and the stream waits: where the rank that was to signal has died, as long as the
    /// stream's limit for waits. A graph waits for the same value in each launch.
    ///
    /// # Errors
    /// [`Error::OutsideWindow`] and [`Error::Device`], as [`Window::word64`], also with the refusal of the stream.
    pub fn wait_signal_on_stream(
        &self,
        stream: &Stream,
        offset: usize,
        value: u64,
        cond: Cond,
    ) -> Result<()> {
        let (mut batch, stream) = (Batch::new(), at_once(stream));
        self.wait_signal_in_batch(&mut batch, offset, value, cond)?;
        self.0.comm.while_full(|| Ok(stream.submit(&mut batch)?))
    }

    /// As [`Window::wait_signal`], and the stream that the batch is submitted to waits.
    ///
    /// # Errors
    /// [`Error::OutsideWindow`] and [`Error::Device`], as [`Window::word64`].
    pub fn wait_signal_in_batch(
        &self,
        batch: &mut Batch,
        offset: usize,
        value: u64,
        cond: Cond,
    ) -> Result<()> {
        batch.wait_value64(&self.word64(offset)?, value, cond);
        // There is no completion here that makes the data visible.
        if self.1.needs_flush() {
            batch.flush();
        }
        Ok(())
    }
}

#[cold]
fn invalid(rma: &Rma<'_>, what: &'static str, value: String, expected: &'static str) -> Error {
    let cause = gdsync::Error::InvalidArgument { what, value, expected };
    Error::message(rma.rank, rma.name(), cause)
}

/// Refuses a word that the device could not change atomically.
fn aligned(rma: &Rma<'_>, at: RemoteAddr, offset: usize) -> Result<RemoteAddr> {
    if at.addr.is_multiple_of(8) {
        return Ok(at);
    }
    let value = format!("{:#x} (offset {offset} of its window)", at.addr);
    Err(invalid(rma, "the address of the word at the target", value, "a multiple of 8"))
}
