//! What the measurements run on: words that CPU and GPU share, gated streams, load on other streams, and a watchdog.

use std::cell::Cell;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use gdasync::gdrcopy::cuda::raw::layout::Handle;
use gdasync::gdrcopy::{BackendKind, Gdr, Mapping};
use gdasync::note;
use gdasync::results::Result;

use super::Figure;
use super::gpu::{Call, Gpu, Kernel, Stream, write};

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

    /// Whether it is no longer 0.
    #[inline]
    pub(super) fn is_set(self) -> Result<bool> {
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

/// Bytes of each kind of memory; a run with eight levels of `--busy` uses a fifth.
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
    /// Whether the streams are idle.
    pub(super) idle: Ask,
    /// Load on another stream.
    pub(super) load: Option<(&'static Gpu, BusyStream)>,
}

pub(super) enum End {
    Word(Word),
    Ask(Ask),
    Returns(Step),
}

/// Random pauses, so that the gate does not open in step with the polling of the GPU.
pub(super) struct Pauses(u64);

const PAUSE: std::ops::Range<u64> = 20_000..60_000;

impl Default for Pauses {
    fn default() -> Self {
        Self(0x9e37_79b9_7f4a_7c15)
    }
}

impl Pauses {
    fn next(&mut self) -> Duration {
        // Marsaglia's xorshift.
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        Duration::from_nanos(PAUSE.start + self.0 % (PAUSE.end - PAUSE.start))
    }
}

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
    fn round(&mut self, watchdog: &Watchdog, pauses: &mut Pauses) -> Result<Duration> {
        let limit = watchdog.limit;
        let over = if let End::Word(word) = self.end { Some(word) } else { None };
        [Some(self.gate), self.ready, over].into_iter().flatten().try_for_each(Word::clear)?;
        (self.enqueue)()?;
        if let Some(ready) = self.ready {
            until(limit, "the stream did not come to its wait", || ready.is_set())?;
        }
        let (pause, start) = (pauses.next(), Instant::now());
        while start.elapsed() < pause {
            std::hint::spin_loop();
        }
        let is_early = match &mut self.end {
            End::Word(word) => word.is_set()?,
            End::Ask(ask) => ask()?,
            End::Returns(_) => false,
        };
        if is_early {
            return Err("it was over before the gate was opened".into());
        }
        let start = Instant::now();
        self.gate.store(1);
        if let Some(act) = &mut self.act {
            act()?;
        }
        match &mut self.end {
            End::Word(word) => until(limit, "the CPU did not see the word", || word.is_set())?,
            End::Ask(ask) => until(limit, "the answer was no", ask)?,
            End::Returns(call) => call()?,
        }
        let time = start.elapsed();
        if watchdog.has_released() {
            return Err(format!("something did not return within {limit:?}").into());
        }
        until(limit, "the stream did not end", &mut self.idle)?;
        watchdog.progress();
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
    pub(super) fn slice(&mut self, rounds: u64, watchdog: &Watchdog, pauses: &mut Pauses) -> Result<()> {
        let Some(gated) = &mut self.gated else { return Ok(()) };
        watchdog.begin(self.figure.name, &[gated.gate]);
        let load = gated.load.as_ref().map(|(gpu, stream)| Load::start(gpu, vec![*stream]));
        let measured = (0..WARM_UP + rounds).try_for_each(|round| {
            let time = gated.round(watchdog, pauses)?;
            if round >= WARM_UP {
                self.figure.samples.add(time);
            }
            Ok(())
        });
        let stopped = load.map_or(Ok(()), |load| load.stop(watchdog.limit).map(drop));
        let Err(error) = measured.and(stopped) else { return Ok(()) };
        let reason = error.to_string();
        self.figure.end(Err(error));
        watchdog.progress();
        gated.gate.store(1);
        // Kernels and host functions time out later.
        let settled = until(watchdog.limit * 5, "the stream stayed blocked", &mut gated.idle);
        self.gated = None;
        settled.map_err(|settled| format!("{}: {reason}, and then {settled}", self.figure.name).into())
    }
}

/// What keeps a stream busy: one submission of it.
#[derive(Clone, Copy)]
pub(super) enum BusyWork {
    /// A graph of [`KERNELS`] kernels: single launches of such short kernels would not fill a stream.
    Graph(Handle),
    /// One kernel of [`SPIN`].
    Kernel,
    /// A batch of [`WRITES`] write MemOps.
    Writes,
}

const SPIN: Duration = Duration::from_micros(5);
const KERNELS: u32 = 64;
const WRITES: u32 = 64;
const STREAMS: usize = 4;

impl BusyWork {
    /// Pending submissions: a few hundred microseconds of work.
    fn depth(self) -> u32 {
        match self {
            Self::Graph(_) => 3,
            Self::Kernel => 48,
            Self::Writes => 4,
        }
    }
}

/// A stream that is kept busy.
#[derive(Clone, Copy)]
pub(super) struct BusyStream {
    stream: Stream,
    work: BusyWork,
    /// Counts completed submissions.
    done: Word,
    /// Target of writes without meaning.
    scratch: Word,
}

impl BusyStream {
    /// What makes `number` submissions done.
    fn submit(&self, gpu: &Gpu, number: u32) -> Result<()> {
        let call = match self.work {
            BusyWork::Graph(graph) => Call::Graph(graph),
            BusyWork::Kernel => Call::Kernel(Kernel::Spin { count: Some(self.done), time: SPIN }),
            BusyWork::Writes => {
                let writes = (1..WRITES).map(|_| write(self.scratch, number));
                Call::MemOps(writes.chain([write(self.done, number)]).collect())
            }
        };
        gpu.calls(self.stream, &mut [call])
    }

    fn feed(gpu: &Gpu, streams: &[Self], stop: &AtomicBool) -> Result<()> {
        let _current = gpu.enter()?;
        let mut issued: Vec<_> = streams.iter().map(|stream| stream.done.load()).collect();
        while !stop.load(Ordering::Acquire) {
            for (one, issued) in streams.iter().zip(&mut issued) {
                while issued.wrapping_sub(one.done.load()) < one.work.depth() && !stop.load(Ordering::Acquire)
                {
                    *issued = issued.wrapping_add(1);
                    one.submit(gpu, *issued)?;
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
    /// The same with other priorities.
    pub(super) low: Stream,
    pub(super) high: Stream,
    /// Where the CPU submits work to nudge the GPU.
    pub(super) nudge: Stream,
    pub(super) nudge_high: Stream,
    /// A stream that some variants keep busy.
    beside: Stream,
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
        let [low, default, high] = gpu.priorities;
        let busy_stream = |_| {
            let (stream, done) = (gpu.stream(default)?, arena.host()?);
            let spin = |i| Kernel::Spin { count: (i == KERNELS).then_some(done), time: SPIN };
            let mut kernels: Vec<_> = (1..=KERNELS).map(|i| Call::Kernel(spin(i))).collect();
            let work = BusyWork::Graph(gpu.graph(stream, &mut kernels)?);
            Ok(BusyStream { stream, work, done, scratch })
        };
        Ok(Self {
            work: gpu.stream(default)?,
            low: gpu.stream(low)?,
            high: gpu.stream(high)?,
            nudge: gpu.stream(default)?,
            nudge_high: gpu.stream(high)?,
            beside: gpu.stream(default)?,
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

    /// A stream to be kept busy beside the measured one.
    pub(super) fn beside(&self, work: BusyWork) -> Result<BusyStream> {
        Ok(BusyStream { stream: self.beside, work, done: self.arena.host()?, scratch: self.scratch })
    }

    /// A kernel that waits for the gate.
    pub(super) fn await_gate(&self, ready: Option<Word>, gate: Word, over: Option<Word>) -> Call {
        Call::Kernel(Kernel::AwaitGate { ready, gate, over, limit: self.give_up })
    }

    /// A stream with these calls, which ends when the nudge streams are idle too.
    pub(super) fn gated(
        &self,
        stream: Stream,
        ready: Option<Word>,
        gate: Word,
        end: End,
        mut calls: Vec<Call>,
    ) -> Gated {
        let (gpu, streams) = (self.gpu, [stream, self.nudge, self.nudge_high]);
        let enqueue = Box::new(move || gpu.calls(stream, &mut calls));
        let idle =
            Box::new(move || streams.into_iter().try_fold(true, |all, stream| Ok(all && gpu.idle(stream)?)));
        Gated { ready, gate, enqueue, act: None, end, idle, load: None }
    }
}

/// A watchdog thread. After the limit without progress it opens all gates; if that does not help, it ends the process.
pub(super) struct Watchdog {
    /// How long a step may take.
    pub(super) limit: Duration,
    watched: Arc<Mutex<Watched>>,
}

struct Watched {
    what: String,
    gates: Vec<Word>,
    /// When there was progress last.
    progress: Instant,
    /// Whether the gates had to be opened.
    released: bool,
}

const PERIOD: Duration = Duration::from_millis(20);
/// Time for the driver after the gates are opened.
const GRACE: Duration = Duration::from_secs(60);

#[derive(Debug, PartialEq, Eq)]
enum Action {
    Fine,
    Release,
    End,
}

/// The action after `still` without progress. Waits with their own deadline end first.
fn action(still: Duration, limit: Duration) -> Action {
    match still {
        still if still < limit + limit / 4 => Action::Fine,
        still if still < limit + limit / 4 + GRACE => Action::Release,
        _ => Action::End,
    }
}

impl Watchdog {
    /// Begins to watch; ends when dropped.
    pub(super) fn start(limit: Duration) -> Self {
        let (what, gates, progress, released) = (String::new(), Vec::new(), Instant::now(), false);
        let watched = Arc::new(Mutex::new(Watched { what, gates, progress, released }));
        let weak = Arc::downgrade(&watched);
        thread::spawn(move || {
            while let Some(watched) = weak.upgrade() {
                lock(&watched).look(limit);
                drop(watched);
                thread::sleep(PERIOD);
            }
        });
        Self { limit, watched }
    }

    /// Starts `what`, during which these gates may block a stream.
    pub(super) fn begin(&self, what: &str, gates: &[Word]) {
        let (what, gates, progress) = (what.to_owned(), gates.to_vec(), Instant::now());
        *lock(&self.watched) = Watched { what, gates, progress, released: false };
    }

    pub(super) fn progress(&self) {
        lock(&self.watched).progress = Instant::now();
    }

    /// Whether the gates had to be opened since [`begin`](Watchdog::begin).
    pub(super) fn has_released(&self) -> bool {
        lock(&self.watched).released
    }
}

fn lock(watched: &Mutex<Watched>) -> MutexGuard<'_, Watched> {
    watched.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Watched {
    fn look(&mut self, limit: Duration) {
        match action(self.progress.elapsed(), limit) {
            Action::Fine => (),
            Action::Release => {
                self.released = true;
                self.gates.iter().for_each(|gate| gate.store(1));
            }
            Action::End => {
                let what = &self.what;
                note!(
                    "gdasync: {what}: a call into the CUDA driver did not return; see the kernel log (dmesg) for Xid lines"
                );
                // SAFETY: ends the process at once, without the driver's own clean-up, which would wait as well.
                unsafe { libc::_exit(1) };
            }
        }
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
            load: None,
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
            variant.slice(20, &Watchdog::start(limit), &mut Pauses::default()).unwrap();
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
        let watchdog = Watchdog::start(Duration::from_millis(20));
        let error = Variant::new("stuck", Ok(gated)).slice(1, &watchdog, &mut Pauses::default());
        let error = error.unwrap_err().to_string();
        assert!(error.contains("stuck") && error.contains("stayed blocked"), "{error}");
    }

    #[test]
    fn pauses_vary_within_their_range() {
        let mut pauses = Pauses::default();
        let mut all: Vec<_> = (0..1000).map(|_| pauses.next().as_nanos()).collect();
        assert!(all.iter().all(|&pause| (20_000..60_000).contains(&pause)));
        all.sort_unstable();
        assert!(all[100] < 30_000 && all[900] > 50_000, "{} {}", all[100], all[900]);
    }

    #[test]
    fn watchdog_opens_gates_then_ends_the_process() {
        let limit = Duration::from_secs(2);
        assert_eq!(action(limit, limit), Action::Fine, "others have this deadline");
        assert_eq!(action(limit * 2, limit), Action::Release);
        assert_eq!(action(limit * 2 + GRACE, limit), Action::End);
        static GATE: AtomicU32 = AtomicU32::new(0);
        let watchdog = Watchdog::start(Duration::from_millis(1));
        watchdog.begin("test", &[Word::Host(&GATE)]);
        until(Duration::from_secs(30), "the gate did not open", || Word::Host(&GATE).is_set()).unwrap();
        assert!(watchdog.has_released());
        let slow = Watchdog::start(Duration::from_secs(3600));
        slow.begin("test", &[]);
        assert!(!slow.has_released());
    }
}
