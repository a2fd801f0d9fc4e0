//! The buffers of a rank, and the host functions or kernels that fill and check them and take the times.

use super::{Cost, Measured, Options};
use crate::app_stream::{AppStream, Kernel, Kernels, Placed, ptx};
use crate::measure::{Pattern, Samples, thread_cpu};
use crate::results::{Checks, Result, expected};
use gdsync::memory::Memory;
use gdsync::stream::{Batch, Stream};
use mp::{Communicator, Registration};
use std::ffi::CStr;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// The buffers of a rank for messages of one size: a slot to send from, and two to receive into alternately.
#[derive(Clone, Debug)]
pub(super) struct Buffers {
    rank: usize,
    checks: Checks,
    pub(super) bytes: usize,
    pub(super) outgoing: Registration,
    pub(super) incoming: Registration,
}

impl Buffers {
    pub(super) fn new(comm: &Communicator, placed: &Placed, bytes: usize, checks: &Checks) -> Result<Self> {
        let outgoing = comm.register(&placed.outgoing(stride(bytes))?)?;
        let incoming = comm.register(&placed.incoming(2 * stride(bytes))?)?;
        Ok(Self { rank: comm.rank(), checks: checks.clone(), bytes, outgoing, incoming })
    }

    fn slot(&self, slot: usize) -> Range<usize> {
        let start = slot * stride(self.bytes);
        start..start + self.bytes
    }

    pub(super) fn send_slot(&self) -> Range<usize> {
        self.slot(0)
    }

    pub(super) fn receive_slot(&self, n: u64) -> Range<usize> {
        self.slot(usize::from(n % 2 == 1))
    }

    /// That of both slots that receive.
    fn received(&self) -> &Memory {
        self.incoming.memory()
    }

    /// What this rank receives as message `n`.
    fn theirs(&self, n: u64) -> Pattern {
        expected(1 - self.rank, n)
    }

    /// Before iteration `n`: the message to send.
    fn fill(&self, n: u64) -> gdsync::Result<()> {
        let ours = self.checks.sent(self.rank, n);
        ours.fill(self.outgoing.memory(), self.send_slot().start, self.bytes)
    }

    /// Overwrites the place where message `n` arrives.
    fn spoil(&self, n: u64, at: Range<usize>) -> gdsync::Result<()> {
        self.theirs(n).spoil(self.received(), at.start, self.bytes)
    }

    fn arrived(&self, n: u64, at: Range<usize>) -> gdsync::Result<bool> {
        self.theirs(n).check(self.received(), at.start, self.bytes)
    }

    pub(super) fn prepare(&self) -> gdsync::Result<()> {
        self.fill(0)?;
        self.spoil(0, self.receive_slot(0))?;
        self.spoil(1, self.receive_slot(1))?;
        self.flush()
    }

    fn flush(&self) -> gdsync::Result<()> {
        self.outgoing.memory().flush()?;
        self.received().flush()
    }

    /// After iteration `n`: checks what arrived, and prepares the next two. False for wrong data.
    fn turn(&self, n: u64) -> gdsync::Result<bool> {
        let right = self.arrived(n, self.receive_slot(n))?;
        self.spoil(n + 2, self.receive_slot(n + 2))?;
        self.fill(n + 1)?;
        Ok(right)
    }

    /// Before a window whose messages are all the same, number `n`; both slots receive.
    pub(super) fn prepare_window(&self, n: u64) -> gdsync::Result<()> {
        self.fill(n)?;
        self.spoil(n, self.slot(0))?;
        self.spoil(n, self.slot(1))?;
        self.flush()
    }

    /// After such a window: the number of slots with wrong data.
    pub(super) fn wrong_of_window(&self, n: u64, used: usize) -> gdsync::Result<u64> {
        (0..used).try_fold(0, |wrong, slot| Ok(wrong + u64::from(!self.arrived(n, self.slot(1 - slot))?)))
    }

    /// Where a message of such a window arrives: the last has a slot for itself.
    pub(super) fn window_slot(&self, is_last: bool) -> Range<usize> {
        self.slot(usize::from(is_last))
    }
}

/// Slots start on cache lines.
fn stride(bytes: usize) -> usize {
    bytes.next_multiple_of(64)
}

/// Times and errors of all iterations.
pub(super) struct Checked {
    /// Nanoseconds of each.
    times: Vec<u64>,
    errors: u64,
}

/// Fills and checks the buffers of a rank, and takes the times.
pub(super) trait Checker {
    /// Whether it does so on the stream in the modes too whose messages the CPU posts.
    fn always_on_stream(&self) -> bool;

    /// On the stream: the clock starts.
    fn start(&self) -> Result<()>;

    /// On the stream, also in a capture, after an iteration: the clock stops, what arrived is checked, the next message is
    /// prepared, the clock starts. Iterations are counted where they run.
    fn turn(&self) -> Result<()>;

    /// After an iteration that the CPU posted and timed. Returns the CPU time of checking.
    fn turn_by_cpu(&self, time: Duration) -> Result<Duration>;

    /// When all is done.
    fn checked(&self) -> Result<Checked>;
}

pub(super) fn checker<'a>(
    options: &Options,
    app: &'a AppStream,
    buffers: &Buffers,
    total: u64,
) -> Result<Box<dyn Checker + 'a>> {
    buffers.prepare()?;
    Ok(match &app.kernels {
        Some(kernels) if !options.no_kernels => Box::new(KernelChecker::new(kernels, app, buffers, total)?),
        _ => Box::new(HostChecker::new(&app.stream, buffers, total)),
    })
}

/// Host functions, or the thread that posts.
struct HostChecker<'a> {
    stream: &'a Stream,
    record: Arc<Record>,
}

struct Record {
    buffers: Buffers,
    origin: Instant,
    started: AtomicU64,
    turns: AtomicU64,
    times: Vec<AtomicU64>,
    errors: AtomicU64,
}

impl Record {
    fn now(&self) -> u64 {
        u64::try_from(self.origin.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }

    fn turn(&self, time: u64) {
        let n = self.turns.fetch_add(1, Ordering::Relaxed);
        if let Some(place) = usize::try_from(n).ok().and_then(|n| self.times.get(n)) {
            place.store(time, Ordering::Relaxed);
        }
        if !matches!(self.buffers.turn(n), Ok(true)) {
            self.errors.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn start(&self) {
        self.started.store(self.now(), Ordering::Relaxed);
    }
}

impl<'a> HostChecker<'a> {
    pub(super) fn new(stream: &'a Stream, buffers: &Buffers, total: u64) -> Self {
        let times = (0..total).map(|_| AtomicU64::new(0)).collect();
        let (buffers, origin) = (buffers.clone(), Instant::now());
        let [started, turns, errors] = [0; 3].map(AtomicU64::new);
        Self { stream, record: Arc::new(Record { buffers, origin, started, turns, times, errors }) }
    }
}

impl Checker for HostChecker<'_> {
    fn always_on_stream(&self) -> bool {
        false
    }

    fn start(&self) -> Result<()> {
        let record = self.record.clone();
        Ok(self.stream.host_fn(move || record.start())?)
    }

    fn turn(&self) -> Result<()> {
        let record = self.record.clone();
        let mut batch = Batch::new();
        batch.repeatable_host_fn(move || {
            record.turn(record.now() - record.started.load(Ordering::Relaxed));
            record.start();
        });
        Ok(self.stream.submit(&mut batch)?)
    }

    fn turn_by_cpu(&self, time: Duration) -> Result<Duration> {
        let start = thread_cpu();
        self.record.turn(u64::try_from(time.as_nanos())?);
        Ok(thread_cpu() - start)
    }

    fn checked(&self) -> Result<Checked> {
        let (turns, total) = (self.record.turns.load(Ordering::Relaxed), self.record.times.len());
        if usize::try_from(turns)? != total {
            return Err(format!("{turns} of {total} messages were checked").into());
        }
        let times = self.record.times.iter().map(|time| time.load(Ordering::Relaxed)).collect();
        Ok(Checked { times, errors: self.record.errors.load(Ordering::Relaxed) })
    }
}

/// The compiled kernels.
pub const PTX: &CStr = ptx(concat!(include_str!("../../examples/kernels/pingpong.ptx"), "\0"));

/// The arguments of `turn`, as in the source.
#[derive(Clone, Copy)]
#[repr(C)]
struct Turn {
    record: u64,
    times: u64,
    total: u64,
    received: [u64; 2],
    sent: u64,
    bytes: u64,
    rank: u64,
    sends_wrong: u64,
}

/// The arguments of `initiate`, as in the source.
#[derive(Clone, Copy)]
#[repr(C)]
struct Initiate {
    turn: Turn,
    program: u64,
    iterations: u64,
    work_ns: u64,
    waits_first: u64,
}

const _: () = assert!(size_of::<Turn>() == 72 && size_of::<Initiate>() == 104, "as in the source");

/// Places in `struct Record` of the source.
mod record {
    pub(super) const START: usize = 0;
    pub(super) const TURNS: usize = 8;
    pub(super) const ERRORS: usize = 16;
    pub(super) const SIZE: usize = 32;
}

/// Threads of a block of `turn`, and the most blocks: enough for the memory's bandwidth, and all run at once.
const THREADS: u32 = 256;
const MOST_BLOCKS: usize = 128;
/// Bytes for each thread before there is another block.
const BYTES_PER_THREAD: usize = 32;
/// Threads that wait and send by themselves: a warp for short messages, a thread for each word of long ones.
const INITIATORS: std::ops::RangeInclusive<u64> = 32..=1024;

/// Kernels on the stream, in every mode.
pub(super) struct KernelChecker<'a> {
    app: &'a AppStream,
    kernels: &'a Kernels,
    /// The record, then the times.
    memory: Memory,
    arguments: Turn,
    /// What the arguments name, kept until the stream is idle.
    _buffers: Buffers,
    blocks: u32,
    stamp: Kernel<u64>,
    turn: Kernel<Turn>,
    initiate: Kernel<Initiate>,
}

impl<'a> KernelChecker<'a> {
    pub(super) fn new(
        kernels: &'a Kernels,
        app: &'a AppStream,
        buffers: &Buffers,
        total: u64,
    ) -> Result<Self> {
        let gpu = app.gpu()?;
        let memory = gpu.alloc(record::SIZE + 8 * usize::try_from(total)?)?;
        memory.fill(0, memory.len(), 0)?;
        memory.flush()?;
        let addr = memory.gpu_addr(gpu)?;
        let outgoing = buffers.outgoing.memory().gpu_addr(gpu)?;
        let incoming = buffers.incoming.memory().gpu_addr(gpu)?;
        let arguments = Turn {
            record: addr,
            times: addr + record::SIZE as u64,
            total,
            received: [0, 1].map(|n| incoming + buffers.receive_slot(n).start as u64),
            sent: outgoing + buffers.send_slot().start as u64,
            bytes: buffers.bytes as u64,
            rank: buffers.rank as u64,
            sends_wrong: buffers.checks.is_wrong(buffers.rank).into(),
        };
        let blocks = buffers.bytes.div_ceil(THREADS as usize * BYTES_PER_THREAD).min(MOST_BLOCKS);
        let blocks = u32::try_from(blocks)?;
        // SAFETY: the parameter is one address.
        let stamp = unsafe { kernels.find(c"stamp") }?;
        // SAFETY: the parameter has the layout of `Turn`.
        let turn = unsafe { kernels.find(c"turn") }?;
        // SAFETY: the parameter has the layout of `Initiate`.
        let initiate = unsafe { kernels.find(c"initiate") }?;
        let _buffers = buffers.clone();
        Ok(Self { app, kernels, memory, arguments, _buffers, blocks, stamp, turn, initiate })
    }

    /// Launches the kernel that runs iterations by itself, with the steps of this program, and with work before each send.
    /// `waits_first`: the wait before the work is a step of its own.
    pub(super) fn initiate(
        &self,
        program: u64,
        iterations: u64,
        work: Duration,
        waits_first: bool,
    ) -> Result<()> {
        let (turn, work_ns) = (self.arguments, u64::try_from(work.as_nanos())?);
        let threads = turn.bytes.div_ceil(8).next_multiple_of(32);
        let threads = u32::try_from(threads.clamp(*INITIATORS.start(), *INITIATORS.end()))?;
        let arguments = Initiate { turn, program, iterations, work_ns, waits_first: waits_first.into() };
        // SAFETY: as for `turn`; the stream keeps the program until the kernel has ended.
        unsafe { self.kernels.launch(&self.initiate, 1, threads, arguments) }
    }

    fn word(&self, at: usize) -> Result<u64> {
        let mut bytes = [0; 8];
        self.memory.read(at, &mut bytes)?;
        Ok(u64::from_ne_bytes(bytes))
    }
}

impl Checker for KernelChecker<'_> {
    fn always_on_stream(&self) -> bool {
        true
    }

    fn start(&self) -> Result<()> {
        // SAFETY: a word of the record, which the checker keeps until the stream is idle.
        unsafe { self.kernels.launch(&self.stamp, 1, 1, self.arguments.record + record::START as u64) }
    }

    fn turn(&self) -> Result<()> {
        // SAFETY: the slots have that many bytes, there is a time for each iteration, and the checker keeps both until the
        // stream is idle.
        unsafe { self.kernels.launch(&self.turn, self.blocks, THREADS, self.arguments) }
    }

    fn turn_by_cpu(&self, _time: Duration) -> Result<Duration> {
        self.turn().map(|()| Duration::ZERO)
    }

    fn checked(&self) -> Result<Checked> {
        let (turns, total) = (self.word(record::TURNS)?, self.arguments.total);
        if turns != total {
            return Err(format!("{turns} of {total} kernels checked their message").into());
        }
        let mut bytes = vec![0; 8 * usize::try_from(total)?];
        self.memory.read(record::SIZE, &mut bytes)?;
        let times = bytes.as_chunks::<8>().0.iter().map(|time| u64::from_ne_bytes(*time)).collect();
        Ok(Checked { times, errors: self.word(record::ERRORS)? })
    }
}

impl Drop for KernelChecker<'_> {
    fn drop(&mut self) {
        self.app.settle();
    }
}

impl Measured {
    /// What a checker found, without the iterations that warm up.
    pub(super) fn checked(checker: &dyn Checker, cost: Cost, warm_up: u64) -> Result<Self> {
        let Checked { times, errors } = checker.checked()?;
        let measured = times.iter().skip(usize::try_from(warm_up)?);
        let samples = Samples::of(measured.map(|time| Duration::from_nanos(*time)));
        Ok(Self { samples, cost, iterations: times.len() as u64, errors })
    }
}
