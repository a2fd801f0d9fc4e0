//! One way to do it, and how its time is taken.

use std::time::{Duration, Instant};

use gdasync::measure::Samples;

use super::feed::Feeder;
use super::report::Figure;
use super::watch::Watch;
use super::words::Word;
use crate::bench::Result;

/// Something that the CPU does.
pub(super) type Step = Box<dyn FnMut() -> Result<()>>;
/// Something that the CPU asks.
pub(super) type Ask = Box<dyn FnMut() -> Result<bool>>;

/// A stream that is blocked by a gate. The time is that from the CPU's opening it to the CPU's seeing that all is over.
pub(super) struct Scene {
    /// Becomes 1 when the stream is about to wait; none where nothing waits.
    pub(super) ready: Option<Word>,
    /// The CPU opens it by storing 1.
    pub(super) gate: Word,
    /// Puts the wait and all after it into the stream.
    pub(super) enqueue: Step,
    /// What the CPU does right after opening the gate.
    pub(super) act: Option<Step>,
    pub(super) see: See,
    /// Whether the streams have nothing to do any more.
    pub(super) idle: Ask,
    /// What else the GPU does meanwhile.
    pub(super) company: Option<Box<dyn Fn() -> Result<Feeder>>>,
}

/// How the CPU sees that it is over.
pub(super) enum See {
    /// The word becomes 1.
    Word(Word),
    /// The answer becomes yes.
    Ask(Ask),
    /// The call returns.
    Call(Step),
}

/// A way with its figure.
pub(super) struct Variant {
    /// None where it was given up.
    scene: Option<Scene>,
    figure: Figure,
}

/// Pauses of random length, so that the gate opens at no fixed moment of the GPU's polling.
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

    /// Keeps the CPU busy for a while.
    fn pause(&mut self) {
        let (length, start) = (self.next(), Instant::now());
        while start.elapsed() < length {
            std::hint::spin_loop();
        }
    }
}

/// Polls until the answer is yes; an error after the limit.
pub(super) fn until(limit: Duration, what: &str, mut ask: impl FnMut() -> Result<bool>) -> Result<()> {
    let start = Instant::now();
    // The clock is read only now and then.
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
    /// Blocks the stream and opens the gate; the time that passed from then until all was over.
    fn round(&mut self, watch: &Watch, pauses: &mut Pauses) -> Result<Duration> {
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
const WARM_UP: u64 = 10;

impl Variant {
    /// A way, or why it cannot be tried here.
    pub(super) fn new(name: &'static str, scene: Result<Scene>) -> Self {
        let mut figure = Figure::new(name);
        let scene = scene.map_err(|error| figure.end(Err(error))).ok();
        Self { scene, figure }
    }

    pub(super) fn name(&self) -> &'static str {
        self.figure.name
    }

    /// What was measured.
    pub(super) fn figure(self) -> Figure {
        self.figure
    }

    /// Some rounds more. An error is one after which the stream is still blocked: nothing can be measured any more.
    pub(super) fn slice(&mut self, rounds: u64, watch: &Watch, pauses: &mut Pauses) -> Result<()> {
        let Some(scene) = &mut self.scene else { return Ok(()) };
        watch.begin(self.figure.name, &[scene.gate]);
        let played = play(scene, &mut self.figure.samples, rounds, watch, pauses);
        let Err(error) = played else { return Ok(()) };
        let reason = error.to_string();
        self.figure.end(Err(error));
        watch.moved();
        scene.gate.store(1);
        // Kernels and host functions give up by themselves, but later.
        let settled = until(watch.limit() * 5, "the stream stayed blocked", &mut scene.idle);
        self.scene = None;
        settled.map_err(|settled| format!("{}: {reason}, and then {settled}", self.figure.name).into())
    }
}

fn play(
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

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
    use std::sync::{Arc, mpsc};
    use std::thread;

    use super::*;

    /// A thread plays the stream: says ready, waits for the gate, then makes `over` 1 unless it is broken.
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
    fn every_round_that_counts_gives_a_sample() {
        let figure = play_one(Ok(stage(None, false)), Duration::from_secs(30));
        assert_eq!((figure.samples.count(), figure.failed), (20, None));
    }

    #[test]
    fn what_fails_says_why_and_leaves_nothing_blocked() {
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
    fn a_stream_that_stays_blocked_ends_the_measurement() {
        let mut scene = stage(None, true);
        scene.idle = Box::new(|| Ok(false));
        let mut variant = Variant::new("stuck", Ok(scene));
        let watch = Watch::start(Duration::from_millis(20));
        let error = variant.slice(1, &watch, &mut Pauses::default()).unwrap_err().to_string();
        assert!(error.contains("stuck") && error.contains("stayed blocked"), "{error}");
    }

    #[test]
    fn pauses_differ_and_keep_their_range() {
        let mut pauses = Pauses::default();
        let mut all: Vec<_> = (0..1000).map(|_| pauses.next().as_nanos()).collect();
        assert!(all.iter().all(|&pause| (20_000..60_000).contains(&pause)));
        all.sort_unstable();
        assert!(all[100] < 30_000 && all[900] > 50_000, "{} {}", all[100], all[900]);
    }
}
