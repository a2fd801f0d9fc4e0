//! What the measurements run on: words that CPU and GPU share, gated streams, and load on other streams.

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use gdasync::gdrcopy::cuda::raw::layout::Handle;
use gdasync::gdrcopy::{BackendKind, Gdr, Mapping};
use gdasync::measure::Random;
use gdasync::results::Result;

use super::Figure;
use super::gpu::{Call, Gpu, Kernel, Stream};

/// A word of 4 bytes, with room for 8, that CPU and GPU share. Words are never freed: a blocked stream may still use them.
#[derive(Clone, Copy)]
pub(super) enum Word {
    Host(&'static AtomicU32),
    /// GPU memory at an offset of a mapping.
    Gpu(&'static Mapping, usize),
}

const INSIDE: &str = "words are inside their mapping and aligned";

impl Word {
    /// The address for the GPU. CUDA host memory has the same address on the CPU.
    pub(super) fn addr(self) -> u64 {
        match self {
            Self::Host(cell) => cell.as_ptr().addr() as u64,
            Self::Gpu(mapping, offset) => mapping.addr() + offset as u64,
        }
    }

    #[inline]
    fn load(self) -> u32 {
        match self {
            Self::Host(cell) => cell.load(Ordering::Acquire),
            Self::Gpu(mapping, offset) => mapping.load(offset).expect(INSIDE),
        }
    }

    #[inline]
    fn is_set(self) -> Result<bool> {
        Ok(self.load() != 0)
    }

    #[inline]
    pub(super) fn store(self, value: u32) {
        match self {
            Self::Host(cell) => cell.store(value, Ordering::Release),
            Self::Gpu(mapping, offset) => mapping.store(offset, value).expect(INSIDE),
        }
    }

    /// Sets the word to 0, visible to the GPU on return.
    pub(super) fn clear(self) -> Result<()> {
        self.store(0);
        if let Self::Gpu(mapping, _) = self {
            mapping.flush()?;
        }
        Ok(())
    }
}

/// Bytes of each kind of memory; a run with eight levels of `--busy` uses a tenth.
pub(super) const ARENA: usize = 1 << 20;
/// The longest cache line of known CPUs and GPUs, bytes.
const LINE: usize = 128;

/// Allocates words, one per cache line.
pub(super) struct Arena {
    host: &'static [AtomicU32],
    gpu: &'static Mapping,
    used: Cell<usize>,
}

impl Arena {
    /// `host` is pinned memory.
    fn new(gdr: &Gdr, device: i32, host: &'static [AtomicU32]) -> Result<Self> {
        if gdr.backend() == BackendKind::Host {
            return Err("GDRCOPY_BACKEND=host: this benchmark needs a mapping of GPU memory".into());
        }
        let buffer = gdr.alloc(device, ARENA)?;
        let gpu = Box::leak(Box::new(buffer.map()?));
        std::mem::forget(buffer);
        Ok(Self { host, gpu, used: Cell::new(0) })
    }

    pub(super) fn cell(&self) -> Result<&'static AtomicU32> {
        Ok(&self.host[take_line(&self.used, ARENA)? / size_of::<u32>()])
    }

    pub(super) fn host(&self) -> Result<Word> {
        self.cell().map(Word::Host)
    }

    pub(super) fn gpu(&self) -> Result<Word> {
        Ok(Word::Gpu(self.gpu, take_line(&self.used, ARENA)?))
    }
}

/// The offset of the next cache line.
fn take_line(used: &Cell<usize>, len: usize) -> Result<usize> {
    let offset = used.get();
    if offset + LINE > len {
        return Err("more words are needed than there are: use fewer values of --busy".into());
    }
    used.set(offset + LINE);
    Ok(offset)
}

pub(super) type Step = Box<dyn FnMut() -> Result<()>>;
pub(super) type Ask = Box<dyn FnMut() -> Result<bool>>;

/// A stream blocked by a gate. The measured time is from opening the gate until the CPU sees the end.
pub(super) struct Gated {
    /// Becomes 1 before the stream waits; `None` if nothing waits.
    pub(super) ready: Option<Word>,
    /// The CPU opens it by storing 1.
    pub(super) gate: Word,
    /// Enqueues the wait and what follows.
    pub(super) enqueue: Step,
    /// An action right after opening the gate.
    pub(super) act: Option<Step>,
    pub(super) end: End,
    pub(super) idle: Ask,
}

pub(super) enum End {
    Word(Word),
    Returns(Step),
}

/// Pauses so that the gate does not open in step with the polling of the GPU, from this many nanoseconds, and up to that many longer.
const PAUSE: (u64, u64) = (20_000, 40_000);

/// Polls until the answer is yes; an error after the limit.
pub(super) fn until(limit: Duration, what: &str, mut ask: impl FnMut() -> Result<bool>) -> Result<()> {
    let start = Instant::now();
    // Reads the clock every 64 polls.
    for polls in 1_u32.. {
        if ask()? {
            return Ok(());
        }
        if polls.is_multiple_of(64) && start.elapsed() > limit {
            break;
        }
        std::hint::spin_loop();
    }
    Err(format!("{what} within {limit:?}").into())
}

impl Gated {
    /// Blocks the stream, opens the gate and measures the time until the end.
    fn round(&mut self, limit: Duration, random: &mut Random) -> Result<Duration> {
        let over = if let End::Word(word) = self.end { Some(word) } else { None };
        [Some(self.gate), self.ready, over].into_iter().flatten().try_for_each(Word::clear)?;
        (self.enqueue)()?;
        if let Some(ready) = self.ready {
            until(limit, "the stream did not come to its wait", || ready.is_set())?;
        }
        let (pause, start) = (Duration::from_nanos(PAUSE.0 + random.below(PAUSE.1)), Instant::now());
        while start.elapsed() < pause {
            std::hint::spin_loop();
        }
        if over.map_or(Ok(false), Word::is_set)? {
            return Err("it was over before the gate was opened".into());
        }
        let start = Instant::now();
        self.gate.store(1);
        if let Some(act) = &mut self.act {
            act()?;
        }
        match &mut self.end {
            End::Word(word) => until(limit, "the CPU did not see the word", || word.is_set())?,
            End::Returns(call) => call()?,
        }
        let time = start.elapsed();
        until(limit, "the stream did not end", &mut self.idle)?;
        Ok(time)
    }
}

/// Rounds before each slice that do not count.
const WARM_UP: u64 = 10;

pub(super) struct Variant {
    /// `None` after a failure.
    gated: Option<Gated>,
    pub(super) figure: Figure,
}

impl Variant {
    /// A gated stream, or the reason why it cannot run here.
    pub(super) fn new(name: &'static str, gated: Result<Gated>) -> Self {
        let mut figure = Figure::new(name);
        let gated = gated.map_err(|error| figure.end(Err(error))).ok();
        Self { gated, figure }
    }

    /// Runs more rounds. Returns an error only if the stream stays blocked, which ends the benchmark.
    pub(super) fn slice(&mut self, rounds: u64, limit: Duration, random: &mut Random) -> Result<()> {
        let Some(gated) = &mut self.gated else { return Ok(()) };
        let measured: Result<()> = (0..WARM_UP + rounds).try_for_each(|round| {
            let time = gated.round(limit, random)?;
            if round >= WARM_UP {
                self.figure.samples.add(time);
            }
            Ok(())
        });
        let Err(error) = measured else { return Ok(()) };
        let reason = error.to_string();
        self.figure.end(Err(error));
        gated.gate.store(1);
        // Kernels time out later.
        let settled = until(limit * 5, "the stream stayed blocked", &mut gated.idle);
        self.gated = None;
        settled.map_err(|settled| format!("{}: {reason}, and then {settled}", self.figure.name).into())
    }
}

const SPIN: Duration = Duration::from_micros(5);
/// Kernels of a submission, which is a graph: single launches of such short kernels would not fill a stream.
const KERNELS: u32 = 64;
/// Pending submissions: a few hundred microseconds of work.
const DEPTH: u32 = 3;
/// Streams that a thread keeps filled.
const STREAMS: usize = 4;

#[derive(Clone, Copy)]
pub(super) struct BusyStream {
    stream: Stream,
    graph: Handle,
    /// Counts completed submissions.
    done: Word,
}

impl BusyStream {
    fn feed(gpu: &Gpu, streams: &[Self], stop: &AtomicBool) -> Result<()> {
        let _current = gpu.enter()?;
        let mut issued: Vec<_> = streams.iter().map(|stream| stream.done.load()).collect();
        while !stop.load(Ordering::Acquire) {
            for (one, issued) in streams.iter().zip(&mut issued) {
                while issued.wrapping_sub(one.done.load()) < DEPTH && !stop.load(Ordering::Acquire) {
                    *issued = issued.wrapping_add(1);
                    gpu.call(one.stream, &mut Call::Graph(one.graph))?;
                }
            }
            thread::sleep(Duration::from_micros(1));
        }
        Ok(())
    }
}

pub(super) struct Load {
    gpu: &'static Gpu,
    streams: Vec<BusyStream>,
    start: Instant,
    /// Counts at the start.
    before: Vec<u32>,
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<std::result::Result<(), String>>>,
}

impl Load {
    pub(super) fn start(gpu: &'static Gpu, streams: Vec<BusyStream>) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let before = streams.iter().map(|stream| stream.done.load()).collect();
        let start = Instant::now();
        let feed = |streams: &[BusyStream]| {
            let (streams, stop) = (streams.to_vec(), stop.clone());
            thread::spawn(move || BusyStream::feed(gpu, &streams, &stop).map_err(|e| e.to_string()))
        };
        let threads = streams.chunks(STREAMS).map(feed).collect();
        Self { gpu, streams, start, before, stop, threads }
    }

    /// Stops, and returns the share of the time in which a kernel ran in each stream.
    pub(super) fn stop(self, limit: Duration) -> Result<f64> {
        let done = |(stream, before): (&BusyStream, &u32)| stream.done.load().wrapping_sub(*before);
        let submissions: u32 = self.streams.iter().zip(&self.before).map(done).sum();
        let ran = (KERNELS * SPIN).as_secs_f64() * f64::from(submissions);
        let streams = f64::from(u32::try_from(self.streams.len())?);
        let share = ran / self.start.elapsed().as_secs_f64() / streams;
        self.stop.store(true, Ordering::Release);
        for thread in self.threads {
            thread.join().map_err(|_| "a thread that keeps streams filled panicked")??;
        }
        for stream in &self.streams {
            until(limit, "a stream that was kept filled did not end", || self.gpu.idle(stream.stream))?;
        }
        Ok(share)
    }
}

/// What all variants share. Streams are few and shared: the driver maps them to channels (`CUDA_DEVICE_MAX_CONNECTIONS`), and
/// two streams of one channel would wait for each other.
pub(super) struct Rig {
    pub(super) gpu: &'static Gpu,
    pub(super) arena: Arena,
    /// The stream that is blocked and awaited.
    pub(super) work: Stream,
    /// Where the CPU submits work to nudge the GPU.
    pub(super) nudge: Stream,
    /// Streams kept busy during a level.
    busy: Vec<BusyStream>,
    /// When a waiting kernel or host function times out: later than the CPU.
    pub(super) give_up: Duration,
    /// Target of writes without meaning.
    pub(super) scratch: Word,
}

impl Rig {
    pub(super) fn new(gpu: &'static Gpu, gdr: &Gdr, device: i32, busy: u8, limit: Duration) -> Result<Self> {
        let arena = Arena::new(gdr, device, gpu.pinned()?)?;
        let scratch = arena.host()?;
        let busy_stream = |_| {
            let (stream, done) = (gpu.stream()?, arena.host()?);
            let spin = |i| Kernel::Spin { count: (i == KERNELS).then_some(done), time: SPIN };
            let mut kernels: Vec<_> = (1..=KERNELS).map(|i| Call::Kernel(spin(i))).collect();
            Ok(BusyStream { stream, graph: gpu.graph(stream, &mut kernels)?, done })
        };
        Ok(Self {
            work: gpu.stream()?,
            nudge: gpu.stream()?,
            busy: (0..busy).map(busy_stream).collect::<Result<_>>()?,
            give_up: limit * 4,
            gpu,
            scratch,
            arena,
        })
    }

    pub(super) fn busy(&self, streams: usize) -> Load {
        Load::start(self.gpu, self.busy[..streams].to_vec())
    }

    pub(super) fn await_gate(&self, ready: Option<Word>, gate: Word, over: Option<Word>) -> Call {
        Call::Kernel(Kernel::AwaitGate { ready, gate, over, limit: self.give_up })
    }

    /// A stream with these calls, which ends when the nudge stream is idle too.
    pub(super) fn gated(
        &self,
        stream: Stream,
        ready: Option<Word>,
        gate: Word,
        end: End,
        mut calls: Vec<Call>,
    ) -> Gated {
        let (gpu, streams) = (self.gpu, [stream, self.nudge]);
        let enqueue = Box::new(move || gpu.calls(stream, &mut calls));
        let idle =
            Box::new(move || streams.into_iter().try_fold(true, |all, stream| Ok(all && gpu.idle(stream)?)));
        Gated { ready, gate, enqueue, act: None, end, idle }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[test]
    fn words_have_separate_lines_and_need_a_gpu() {
        let used = Cell::new(0);
        assert_eq!([(); 3].map(|()| take_line(&used, 400).unwrap()), [0, LINE, 2 * LINE]);
        assert!(take_line(&used, 400).unwrap_err().to_string().contains("--busy"));
        let gdr = Gdr::builder().backend(BackendKind::Host).open().unwrap();
        assert!(Arena::new(&gdr, 0, &[]).err().unwrap().to_string().contains("GPU memory"));
    }

    /// A thread acts as the stream: sets `ready`, waits for the gate, sets `over`.
    fn simulated(over: Option<&'static AtomicU32>, gate_first: bool) -> Gated {
        let [ready, gate, seen]: [&'static AtomicU32; 3] = [(); 3].map(|()| &*Box::leak(Box::default()));
        let (send, receive) = mpsc::channel::<()>();
        let busy = Arc::new(AtomicBool::new(false));
        let running = busy.clone();
        thread::spawn(move || {
            while receive.recv().is_ok() {
                if gate_first {
                    seen.store(1, Ordering::Release);
                }
                ready.store(1, Ordering::Release);
                while gate.load(Ordering::Acquire) == 0 {
                    thread::yield_now();
                }
                over.unwrap_or(seen).store(1, Ordering::Release);
                running.store(false, Ordering::Release);
            }
        });
        let starting = busy.clone();
        Gated {
            ready: Some(Word::Host(ready)),
            gate: Word::Host(gate),
            enqueue: Box::new(move || {
                starting.store(true, Ordering::Release);
                Ok(send.send(())?)
            }),
            act: None,
            end: End::Word(Word::Host(seen)),
            idle: Box::new(move || Ok(!busy.load(Ordering::Acquire))),
        }
    }

    #[test]
    fn rounds_add_samples_or_tell_why_not() {
        static ELSEWHERE: AtomicU32 = AtomicU32::new(0);
        let (long, short) = (Duration::from_secs(30), Duration::from_millis(50));
        for (gated, limit, samples, expected) in [
            (Ok(simulated(None, false)), long, 20, None),
            (Ok(simulated(None, true)), short, 0, Some("before the gate")),
            (Ok(simulated(Some(&ELSEWHERE), false)), short, 0, Some("did not see the word within 50ms")),
            (Err("no such thing here".into()), short, 0, Some("no such thing here")),
        ] {
            let mut variant = Variant::new("test", gated);
            variant.slice(20, limit, &mut Random::default()).unwrap();
            let Figure { samples: found, failed, .. } = variant.figure;
            assert_eq!(found.count(), samples, "{failed:?}");
            assert_eq!(failed.is_some(), expected.is_some(), "{failed:?}");
            assert!(failed.unwrap_or_default().contains(expected.unwrap_or_default()));
        }
    }

    #[test]
    fn blocked_stream_ends_the_measurement() {
        let mut gated = simulated(None, true);
        gated.idle = Box::new(|| Ok(false));
        let limit = Duration::from_millis(20);
        let error = Variant::new("stuck", Ok(gated)).slice(1, limit, &mut Random::default());
        let error = error.unwrap_err().to_string();
        assert!(error.contains("stuck") && error.contains("stayed blocked"), "{error}");
    }
}
