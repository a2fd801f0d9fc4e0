//! The rig of the measurements: words, gated streams, busy streams, and a watchdog.

use super::Figure;
use super::gpu::{Batch, Gpu, Graph, Kernel, Op, Priority, Stream};
use gdasync::gdrcopy::{BackendKind, Gdr, Mapping};
use gdasync::measure::Samples;
use gdasync::note;
use gdasync::results::Result;
use std::cell::Cell;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// A word of 4 bytes, with room for 8, that CPU and GPU share. Words are never freed: a blocked stream may still use them.
#[derive(Clone, Copy)]
pub(super) enum Word {
    /// Pinned host memory.
    Host(&'static AtomicU32),
    /// GPU memory at an offset of a mapping.
    Gpu(&'static Mapping, usize),
}

pub(super) const INSIDE: &str = "words are inside their mapping and aligned";

impl Word {
    /// The address for the GPU. CUDA host memory has the same address on the CPU.
    pub(super) fn addr(self) -> u64 {
        match self {
            Self::Host(cell) => cell.as_ptr().addr() as u64,
            Self::Gpu(mapping, offset) => mapping.addr() + offset as u64,
        }
    }

    #[inline]
    pub(super) fn load(self) -> u32 {
        match self {
            Self::Host(cell) => cell.load(Ordering::Acquire),
            Self::Gpu(mapping, offset) => mapping.load(offset).expect(INSIDE),
        }
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

/// Allocates words, one per cache line.
pub(super) struct Arena {
    pub(super) host: &'static [AtomicU32],
    pub(super) gpu: &'static Mapping,
    pub(super) host_used: Cell<usize>,
    pub(super) gpu_used: Cell<usize>,
}

/// Bytes of each kind of memory; a run with eight levels of `--busy` uses a tenth.
pub(super) const ARENA: usize = 1 << 20;
/// The longest cache line of known CPUs and GPUs, bytes.
pub(super) const LINE: usize = 128;

impl Arena {
    /// `host` is pinned memory.
    pub(super) fn new(gdr: &Gdr, device: i32, host: &'static [AtomicU32]) -> Result<Self> {
        if gdr.backend() == BackendKind::Host {
            return Err("GDRCOPY_BACKEND=host: this benchmark needs a mapping of GPU memory".into());
        }
        let buffer = gdr.alloc(device, ARENA)?;
        let gpu = Box::leak(Box::new(buffer.map()?));
        std::mem::forget(buffer);
        Ok(Self { host, gpu, host_used: Cell::new(0), gpu_used: Cell::new(0) })
    }

    /// A new word of host memory.
    pub(super) fn cell(&self) -> Result<&'static AtomicU32> {
        let index = take(&self.host_used, size_of_val(self.host))? / size_of::<u32>();
        Ok(&self.host[index])
    }

    /// A new word of host memory.
    pub(super) fn host(&self) -> Result<Word> {
        self.cell().map(Word::Host)
    }

    /// A new word of GPU memory.
    pub(super) fn gpu(&self) -> Result<Word> {
        Ok(Word::Gpu(self.gpu, take(&self.gpu_used, self.gpu.len())?))
    }
}

/// The offset of the next line.
pub(super) fn take(used: &Cell<usize>, len: usize) -> Result<usize> {
    let offset = used.get();
    if offset + LINE > len {
        return Err("more words are needed than there are: use fewer values of --busy".into());
    }
    used.set(offset + LINE);
    Ok(offset)
}

/// An action of the CPU.
pub(super) type Step = Box<dyn FnMut() -> Result<()>>;
/// A question of the CPU.
pub(super) type Ask = Box<dyn FnMut() -> Result<bool>>;

/// A stream blocked by a gate. The measured time is from opening the gate until the CPU sees the end.
pub(super) struct Scene {
    /// Becomes 1 before the stream waits; `None` if nothing waits.
    pub(super) ready: Option<Word>,
    /// The CPU opens it by storing 1.
    pub(super) gate: Word,
    /// Enqueues the wait and what follows.
    pub(super) enqueue: Step,
    /// An action right after opening the gate.
    pub(super) act: Option<Step>,
    pub(super) see: See,
    /// Whether the streams are idle.
    pub(super) idle: Ask,
    /// Other work of the GPU meanwhile.
    pub(super) company: Option<Box<dyn Fn() -> Result<Feeder>>>,
}

/// How the CPU sees the end.
pub(super) enum See {
    /// The word becomes 1.
    Word(Word),
    /// The answer becomes yes.
    Ask(Ask),
    /// The call returns.
    Call(Step),
}

/// A scene with its measurements.
pub(super) struct Variant {
    /// `None` after a failure.
    pub(super) scene: Option<Scene>,
    pub(super) figure: Figure,
}

/// Random pauses, so that the gate does not open in step with the polling of the GPU.
pub(super) struct Pauses(u64);

pub(super) const PAUSE: std::ops::Range<u64> = 20_000..60_000;

impl Default for Pauses {
    fn default() -> Self {
        Self(0x9e37_79b9_7f4a_7c15)
    }
}

impl Pauses {
    pub(super) fn next(&mut self) -> Duration {
        // Marsaglia's xorshift.
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        Duration::from_nanos(PAUSE.start + self.0 % (PAUSE.end - PAUSE.start))
    }

    /// Keeps the CPU busy for a while.
    pub(super) fn pause(&mut self) {
        let (length, start) = (self.next(), Instant::now());
        while start.elapsed() < length {
            std::hint::spin_loop();
        }
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

impl Scene {
    /// Blocks the stream, opens the gate and measures the time until the end.
    pub(super) fn round(&mut self, watch: &Watch, pauses: &mut Pauses) -> Result<Duration> {
        let limit = watch.limit();
        let over = if let See::Word(word) = self.see { Some(word) } else { None };
        for word in [Some(self.gate), self.ready, over].into_iter().flatten() {
            word.clear()?;
        }
        (self.enqueue)()?;
        if let Some(ready) = self.ready {
            until(limit, "the stream did not come to its wait", || Ok(ready.load() != 0))?;
        }
        pauses.pause();
        let early = match &mut self.see {
            See::Word(word) => word.load() != 0,
            See::Ask(ask) => ask()?,
            See::Call(_) => false,
        };
        if early {
            return Err("it was over before the gate was opened".into());
        }
        let start = Instant::now();
        self.gate.store(1);
        if let Some(act) = &mut self.act {
            act()?;
        }
        match &mut self.see {
            See::Word(word) => until(limit, "the CPU did not see the word", || Ok(word.load() != 0))?,
            See::Ask(ask) => until(limit, "the answer was no", ask)?,
            See::Call(call) => call()?,
        }
        let time = start.elapsed();
        if watch.released() {
            return Err(format!("something did not return within {limit:?}").into());
        }
        until(limit, "the stream did not end", &mut self.idle)?;
        watch.moved();
        Ok(time)
    }
}

/// Rounds before each slice that do not count.
pub(super) const WARM_UP: u64 = 10;

impl Variant {
    /// A scene, or the reason why it cannot run here.
    pub(super) fn new(name: &'static str, scene: Result<Scene>) -> Self {
        let mut figure = Figure::new(name);
        let scene = scene.map_err(|error| figure.end(Err(error))).ok();
        Self { scene, figure }
    }

    /// What was measured.
    pub(super) fn figure(self) -> Figure {
        self.figure
    }

    /// Runs more rounds. Returns an error only if the stream stays blocked, which ends the benchmark.
    pub(super) fn slice(&mut self, rounds: u64, watch: &Watch, pauses: &mut Pauses) -> Result<()> {
        let Some(scene) = &mut self.scene else { return Ok(()) };
        watch.begin(self.figure.name, &[scene.gate]);
        let played = play(scene, &mut self.figure.samples, rounds, watch, pauses);
        let Err(error) = played else { return Ok(()) };
        let reason = error.to_string();
        self.figure.end(Err(error));
        watch.moved();
        scene.gate.store(1);
        // Kernels and host functions time out later.
        let settled = until(watch.limit() * 5, "the stream stayed blocked", &mut scene.idle);
        self.scene = None;
        settled.map_err(|settled| format!("{}: {reason}, and then {settled}", self.figure.name).into())
    }
}

pub(super) fn play(
    scene: &mut Scene,
    samples: &mut Samples,
    rounds: u64,
    watch: &Watch,
    pauses: &mut Pauses,
) -> Result<()> {
    let company = scene.company.as_ref().map(|start| start()).transpose()?;
    let played = (0..WARM_UP + rounds).try_for_each(|round| {
        let time = scene.round(watch, pauses)?;
        if round >= WARM_UP {
            samples.add(time);
        }
        Ok(())
    });
    let stopped = company.map_or(Ok(()), |company| company.stop(watch.limit()).map(drop));
    played.and(stopped)
}

/// One submission.
#[derive(Clone, Copy)]
pub(super) enum BusyWork {
    /// A [`graph`] of kernels.
    Graph(Graph),
    /// One kernel of [`KERNEL`].
    Kernel,
    /// A batch of [`WRITES`] write MemOps.
    Writes,
}

/// How long a kernel spins.
pub(super) const KERNEL: Duration = Duration::from_micros(5);
/// Kernels of a graph.
pub(super) const KERNELS: u32 = 64;
/// Operations of a batch.
pub(super) const WRITES: u32 = 64;
/// Streams that one thread keeps busy.
pub(super) const STREAMS: usize = 4;

impl BusyWork {
    /// Pending submissions: a few hundred microseconds of work.
    pub(super) fn depth(self) -> u32 {
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
    pub(super) stream: Stream,
    pub(super) work: BusyWork,
    /// Counts completed submissions.
    pub(super) done: Word,
    /// Target of writes without meaning.
    pub(super) scratch: Word,
}

/// A graph of kernels, the last of which counts in `done`: single launches of such short kernels would not fill a stream.
pub(super) fn busy_graph(gpu: &Gpu, stream: Stream, done: Word) -> Result<Graph> {
    gpu.graph(stream, || {
        (1..=KERNELS).try_for_each(|i| {
            gpu.launch(stream, Kernel::Spin { count: (i == KERNELS).then_some(done), time: KERNEL })
        })
    })
}

/// Threads that keep streams busy.
pub(super) struct Feeder {
    pub(super) gpu: &'static Gpu,
    pub(super) streams: Vec<BusyStream>,
    pub(super) start: Instant,
    /// Counts at the start.
    pub(super) before: Vec<u32>,
    pub(super) stop: Arc<AtomicBool>,
    pub(super) threads: Vec<JoinHandle<std::result::Result<(), String>>>,
}

impl Feeder {
    pub(super) fn start(gpu: &'static Gpu, streams: Vec<BusyStream>) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let before = streams.iter().map(|stream| stream.done.load()).collect();
        let start = Instant::now();
        let feed_some = |streams: &[BusyStream]| {
            let (mut streams, stop) = (Vec::from(streams), stop.clone());
            thread::spawn(move || feed(gpu, &mut streams, &stop).map_err(|e| e.to_string()))
        };
        let threads = streams.chunks(STREAMS).map(feed_some).collect();
        Self { gpu, streams, start, before, stop, threads }
    }

    /// Stops, and returns the share of the time in which a kernel ran in each stream.
    pub(super) fn stop(self, limit: Duration) -> Result<f64> {
        let done = |(stream, before): (&BusyStream, &u32)| stream.done.load().wrapping_sub(*before);
        let submissions: u32 = self.streams.iter().zip(&self.before).map(done).sum();
        let ran = (KERNELS * KERNEL).as_secs_f64() * f64::from(submissions);
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

/// Keeps streams busy until `stop`.
pub(super) fn feed(gpu: &Gpu, streams: &mut [BusyStream], stop: &AtomicBool) -> Result<()> {
    let _current = gpu.enter()?;
    let mut issued: Vec<_> = streams.iter().map(|stream| stream.done.load()).collect();
    while !stop.load(Ordering::Acquire) {
        for (stream, issued) in streams.iter_mut().zip(&mut issued) {
            while issued.wrapping_sub(stream.done.load()) < stream.work.depth()
                && !stop.load(Ordering::Acquire)
            {
                *issued = issued.wrapping_add(1);
                stream.submit(gpu, *issued)?;
            }
        }
        thread::sleep(Duration::from_micros(1));
    }
    Ok(())
}

impl BusyStream {
    /// Submits work after which `number` submissions are done.
    pub(super) fn submit(&self, gpu: &Gpu, number: u32) -> Result<()> {
        match self.work {
            BusyWork::Graph(graph) => gpu.launch_graph(self.stream, graph),
            BusyWork::Kernel => {
                gpu.launch(self.stream, Kernel::Spin { count: Some(self.done), time: KERNEL })
            }
            BusyWork::Writes => {
                let writes = (1..WRITES).map(|_| Op::Write(self.scratch, number));
                gpu.batch(self.stream, &mut Batch::new(writes.chain([Op::Write(self.done, number)])))
            }
        }
    }
}

/// What all variants share. Streams are few and shared: the driver maps them to channels (`CUDA_DEVICE_MAX_CONNECTIONS`), and
/// two streams of one channel would wait for each other.
pub(super) struct Lab {
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
    pub(super) ticker: Stream,
    /// Streams kept busy during a level.
    pub(super) busy: Vec<BusyStream>,
    /// When a waiting kernel or host function times out: later than the CPU.
    pub(super) give_up: Duration,
    /// Target of writes without meaning.
    pub(super) scratch: Word,
}

impl Lab {
    /// With up to `busy` busy streams.
    pub(super) fn new(gpu: &'static Gpu, gdr: &Gdr, device: i32, busy: u32, limit: Duration) -> Result<Self> {
        let arena = Arena::new(gdr, device, gpu.pinned()?)?;
        let scratch = arena.host()?;
        let stream = |priority| gpu.stream(priority);
        let busy_stream = |_| {
            let (stream, done) = (stream(Priority::Default)?, arena.host()?);
            Ok(BusyStream { stream, work: BusyWork::Graph(busy_graph(gpu, stream, done)?), done, scratch })
        };
        Ok(Self {
            work: stream(Priority::Default)?,
            low: stream(Priority::Lowest)?,
            high: stream(Priority::Highest)?,
            nudge: stream(Priority::Default)?,
            nudge_high: stream(Priority::Highest)?,
            ticker: stream(Priority::Default)?,
            busy: (0..busy).map(busy_stream).collect::<Result<_>>()?,
            give_up: limit * 4,
            gpu,
            scratch,
            arena,
        })
    }

    /// Keeps `streams` streams busy.
    pub(super) fn busy(&self, streams: usize) -> Feeder {
        Feeder::start(self.gpu, self.busy[..streams].to_vec())
    }

    /// Keeps the ticker busy.
    pub(super) fn company(&self, work: BusyWork) -> Result<Box<dyn Fn() -> Result<Feeder>>> {
        let stream =
            BusyStream { stream: self.ticker, work, done: self.arena.host()?, scratch: self.scratch };
        let gpu = self.gpu;
        Ok(Box::new(move || Ok(Feeder::start(gpu, vec![stream]))))
    }

    /// A kernel that waits for the gate.
    pub(super) fn await_gate(&self, ready: Option<Word>, gate: Word, over: Option<Word>) -> Kernel {
        Kernel::AwaitGate { ready, gate, over, limit: self.give_up }
    }

    /// A scene on one stream and the nudge streams.
    pub(super) fn scene(
        &self,
        stream: Stream,
        ready: Option<Word>,
        gate: Word,
        see: See,
        enqueue: Step,
    ) -> Scene {
        let (gpu, streams) = (self.gpu, [stream, self.nudge, self.nudge_high]);
        let idle = move || {
            for stream in streams {
                if !gpu.idle(stream)? {
                    return Ok(false);
                }
            }
            Ok(true)
        };
        Scene { ready, gate, enqueue, act: None, see, idle: Box::new(idle), company: None }
    }
}

/// A watchdog thread. After the limit without progress it opens all gates; if that does not help, it ends the process.
pub(super) struct Watch(Arc<Shared>);

pub(super) struct Shared {
    pub(super) start: Instant,
    pub(super) limit: Duration,
    /// Nanoseconds from `start` to the last progress.
    pub(super) moved: AtomicU64,
    pub(super) released: AtomicBool,
    pub(super) watched: Mutex<Watched>,
}

#[derive(Default)]
pub(super) struct Watched {
    pub(super) what: String,
    pub(super) gates: Vec<Word>,
}

/// Polling interval.
pub(super) const PERIOD: Duration = Duration::from_millis(20);
/// Time for the driver after the gates are opened.
pub(super) const GRACE: Duration = Duration::from_secs(60);

#[derive(Debug, PartialEq, Eq)]
pub(super) enum Action {
    Fine,
    Release,
    End,
}

/// The action after `still` without progress. Waits with their own deadline end first.
pub(super) fn action(still: Duration, limit: Duration) -> Action {
    match still {
        still if still < limit + limit / 4 => Action::Fine,
        still if still < limit + limit / 4 + GRACE => Action::Release,
        _ => Action::End,
    }
}

impl Watch {
    /// Begins to watch; ends when dropped.
    pub(super) fn start(limit: Duration) -> Self {
        let shared = Arc::new(Shared {
            start: Instant::now(),
            limit,
            moved: AtomicU64::new(0),
            released: AtomicBool::new(false),
            watched: Mutex::default(),
        });
        let weak = Arc::downgrade(&shared);
        thread::spawn(move || {
            while let Some(shared) = weak.upgrade() {
                shared.look();
                drop(shared);
                thread::sleep(PERIOD);
            }
        });
        Self(shared)
    }

    /// Starts `what`, during which these gates may block a stream.
    pub(super) fn begin(&self, what: &str, gates: &[Word]) {
        *self.0.watched() = Watched { what: what.to_owned(), gates: gates.to_vec() };
        self.0.released.store(false, Ordering::Release);
        self.moved();
    }

    /// Reports progress.
    #[inline]
    pub(super) fn moved(&self) {
        self.0.moved.store(nanos(self.0.start.elapsed()), Ordering::Release);
    }

    /// Whether the gates had to be opened since [`begin`](Watch::begin).
    pub(super) fn released(&self) -> bool {
        self.0.released.load(Ordering::Acquire)
    }

    /// How long a step may take.
    pub(super) fn limit(&self) -> Duration {
        self.0.limit
    }
}

impl Shared {
    pub(super) fn watched(&self) -> MutexGuard<'_, Watched> {
        self.watched.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn look(&self) {
        let still = nanos(self.start.elapsed()).saturating_sub(self.moved.load(Ordering::Acquire));
        match action(Duration::from_nanos(still), self.limit) {
            Action::Fine => (),
            Action::Release => {
                let watched = self.watched();
                self.released.store(true, Ordering::Release);
                watched.gates.iter().for_each(|gate| gate.store(1));
            }
            Action::End => {
                note!(
                    "gdasync: {}: a call into the CUDA driver did not return; see the kernel log (dmesg) for Xid lines",
                    self.watched().what
                );
                // SAFETY: ends the process at once, without the driver's own clean-up, which would wait as well.
                unsafe { libc::_exit(1) };
            }
        }
    }
}

pub(super) fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
    use std::sync::{Arc, mpsc};
    use std::thread;

    use super::*;

    #[test]
    fn words_have_separate_cache_lines() {
        let used = Cell::new(0);
        assert_eq!([(); 3].map(|()| take(&used, 400).unwrap()), [0, LINE, 2 * LINE]);
        assert!(take(&used, 400).unwrap_err().to_string().contains("--busy"));
    }

    #[test]
    fn host_backend_is_rejected() {
        let gdr = Gdr::builder().backend(BackendKind::Host).open().unwrap();
        assert!(Arena::new(&gdr, 0, &[]).err().unwrap().to_string().contains("GPU memory"));
    }

    /// A thread acts as the stream: sets `ready`, waits for the gate, sets `over`.
    fn stage(over: Option<&'static AtomicU32>, gate_first: bool) -> Scene {
        let [ready, gate, seen]: [&'static AtomicU32; 3] = [(); 3].map(|()| &*Box::leak(Box::default()));
        let (send, receive) = mpsc::channel::<()>();
        let busy = Arc::new(AtomicBool::new(false));
        let playing = busy.clone();
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
                playing.store(false, Ordering::Release);
            }
        });
        let starting = busy.clone();
        Scene {
            ready: Some(Word::Host(ready)),
            gate: Word::Host(gate),
            enqueue: Box::new(move || {
                starting.store(true, Ordering::Release);
                Ok(send.send(())?)
            }),
            act: None,
            see: See::Word(Word::Host(seen)),
            idle: Box::new(move || Ok(!busy.load(Ordering::Acquire))),
            company: None,
        }
    }

    fn play_one(scene: Result<Scene>, limit: Duration) -> Figure {
        let mut variant = Variant::new("test", scene);
        variant.slice(20, &Watch::start(limit), &mut Pauses::default()).unwrap();
        variant.figure()
    }

    #[test]
    fn each_round_after_warm_up_adds_a_sample() {
        let figure = play_one(Ok(stage(None, false)), Duration::from_secs(30));
        assert_eq!((figure.samples.count(), figure.failed), (20, None));
    }

    #[test]
    fn failures_tell_the_reason_and_open_the_gate() {
        static ELSEWHERE: AtomicU32 = AtomicU32::new(0);
        for (scene, expected) in [
            (Ok(stage(None, true)), "before the gate"),
            (Ok(stage(Some(&ELSEWHERE), false)), "did not see the word within 50ms"),
            (Err("no such thing here".into()), "no such thing here"),
        ] {
            let figure = play_one(scene, Duration::from_millis(50));
            let failed = figure.failed.unwrap();
            assert!(failed.contains(expected), "{failed}");
            assert_eq!(figure.samples.count(), 0);
        }
    }

    #[test]
    fn blocked_stream_ends_the_measurement() {
        let mut scene = stage(None, true);
        scene.idle = Box::new(|| Ok(false));
        let mut variant = Variant::new("stuck", Ok(scene));
        let watch = Watch::start(Duration::from_millis(20));
        let error = variant.slice(1, &watch, &mut Pauses::default()).unwrap_err().to_string();
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
    }

    #[test]
    fn watchdog_opens_a_gate_without_progress() {
        static GATE: AtomicU32 = AtomicU32::new(0);
        let watch = Watch::start(Duration::from_millis(1));
        watch.begin("test", &[Word::Host(&GATE)]);
        let start = Instant::now();
        while GATE.load(Ordering::Acquire) == 0 {
            assert!(start.elapsed() < Duration::from_secs(30));
            thread::sleep(Duration::from_millis(1));
        }
        assert!(watch.released());
        let slow = Watch::start(Duration::from_secs(3600));
        slow.begin("test", &[]);
        assert!(!slow.released());
    }
}
