//! Tests of the host engine: shared fixtures, order, bounds and blocking calls.

mod failing;
mod lifetime;
mod waiting;
mod words;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};
use std::{fmt, thread};

use parking_lot::Mutex;
use proptest::prelude::*;

use super::{HostEngine, HostStreamConfig};
use crate::stream::SubmitGuard;
use crate::stream::engine::Engine;
use crate::stream::op::{Arrival, Cond, DoorbellValue, Op, Ops, Source};
use gdsync_device::error::{Error, Result};
use gdsync_device::memory::{Found, Memory, Word32, Word64};

/// Deadline that only a hang exceeds.
const LONG: Duration = Duration::from_secs(60);

fn deadline() -> Instant {
    Instant::now() + LONG
}

fn start(mut config: HostStreamConfig) -> Arc<HostEngine> {
    if config.name.is_empty() {
        config.name = "stream".into();
    }
    HostEngine::start(config).expect("a valid config starts")
}

fn engine() -> Arc<HostEngine> {
    start(HostStreamConfig { wait_limit: LONG, ..HostStreamConfig::default() })
}

fn submit(engine: &HostEngine, ops: impl IntoIterator<Item = Op>) -> u64 {
    let mut ops: Ops = ops.into_iter().collect();
    let seq = engine.submit(&mut SubmitGuard::default(), &mut ops).expect("the engine accepts it");
    assert!(ops.is_empty(), "accepted operations are taken");
    seq
}

/// Waits until everything submitted so far has completed.
fn drain(engine: &HostEngine) {
    assert!(engine.wait_completed(engine.submitted(), deadline()), "{engine:?} hangs");
    assert_eq!(engine.completed(), engine.submitted());
}

fn host_fn(f: impl FnOnce() + Send + 'static) -> Op {
    Op::HostFn(Mutex::new(Box::new(f)))
}

fn words32<const N: usize>() -> [Word32; N] {
    let memory = Memory::alloc(N * 4).expect("memory");
    std::array::from_fn(|i| memory.word32(i * 4).expect("in range"))
}

fn word64() -> Word64 {
    Memory::alloc(8).expect("memory").word64(0).expect("in range")
}

fn wait_for(at: &Word32, value: u32) -> Op {
    Op::Wait32 { at: at.clone(), value, cond: Cond::Eq, of: None }
}

/// A wait for the word of a source: that of its first call.
fn wait_on(at: &Word32, value: u32, source: &Arc<Fake>) -> Op {
    assert_eq!(source.at.get_or_init(|| at.clone()).addr(), at.addr(), "one word for each source");
    Op::Await(source.clone(), value.into())
}

/// Triggers a source that has no doorbell.
fn trigger(source: &Arc<Fake>) -> Op {
    Op::Trigger(source.clone(), DoorbellValue::default())
}

/// Spins until `happened` returns true.
fn until(what: &str, happened: impl Fn() -> bool) {
    let deadline = deadline();
    while !happened() {
        assert!(Instant::now() < deadline, "{what} did not happen");
        thread::yield_now();
    }
}

/// A value that counts its drops, for use in closures.
struct Dropped(Arc<AtomicU64>);

impl Drop for Dropped {
    fn drop(&mut self) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

/// The calls of an engine to a source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ask {
    Progress,
    Signal,
    Park(Duration),
    Fail,
}

type Act = Box<dyn Fn(Ask, u64) -> bool + Send + Sync>;

/// A source that counts the calls to it and runs `act` with the call and its number from 1. The result of `act` is that
/// of `progress`.
struct Fake {
    counts: [AtomicU64; 4],
    /// Its completion word and consumer index: a wait for completion `n` waits for the value `n`.
    at: OnceLock<Word32>,
    index: Word32,
    found: [Found; 2],
    act: Act,
    reason: Mutex<Option<Error>>,
}

impl Fake {
    fn new(act: impl Fn(Ask, u64) -> bool + Send + Sync + 'static) -> Arc<Self> {
        let [index] = words32();
        let (counts, at, found) = Default::default();
        Arc::new(Self { counts, at, index, found, act: Box::new(act), reason: Mutex::default() })
    }

    fn idle() -> Arc<Self> {
        Self::new(|_, _| false)
    }

    fn count(&self, ask: Ask) -> &AtomicU64 {
        match ask {
            Ask::Progress => &self.counts[0],
            Ask::Signal => &self.counts[1],
            Ask::Park(_) => &self.counts[2],
            Ask::Fail => &self.counts[3],
        }
    }

    fn asked(&self, ask: Ask) -> u64 {
        self.count(ask).load(Ordering::SeqCst)
    }

    fn parks(&self) -> u64 {
        self.asked(Ask::Park(Duration::ZERO))
    }

    fn on(&self, ask: Ask) -> bool {
        let number = self.count(ask).fetch_add(1, Ordering::SeqCst) + 1;
        (self.act)(ask, number)
    }
}

impl fmt::Debug for Fake {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Fake")
    }
}

impl Source for Fake {
    fn progress(&self) -> bool {
        self.on(Ask::Progress)
    }

    fn signal(&self) {
        self.on(Ask::Signal);
    }

    fn park(&self, ready: &dyn Fn() -> bool, timeout: Duration) {
        self.on(Ask::Park(timeout));
        if !ready() {
            thread::sleep(timeout.min(Duration::from_millis(1)));
        }
    }

    fn queue_pair(&self) -> usize {
        std::ptr::from_ref(self).addr()
    }

    fn fail(&self, reason: &Error) {
        self.reason.lock().get_or_insert_with(|| reason.clone());
        self.on(Ask::Fail);
    }

    fn arrival(&self, n: u64) -> Arrival<'_> {
        let value = u32::try_from(n).expect("waits are for 32 bits");
        let memory = self.at.get().expect("only what `wait_on` made is waited for").memory();
        let (index, found) = (&self.index, &self.found);
        Arrival { memory, offset: 0, found, cond: Cond::Eq, value, index, passed: !value }
    }

    fn describe(&self, _n: u64) -> String {
        "send completion 7 of QP 0x123".to_owned()
    }
}

#[test]
fn an_invalid_config_is_refused() {
    let good = HostStreamConfig::default();
    assert_eq!((good.depth, good.wait_limit), (512, Duration::from_secs(30)));
    assert_eq!(good.spin, Duration::from_micros(50));
    for (config, at) in [
        (HostStreamConfig { name: "a\0b".into(), ..good.clone() }, "stream name"),
        (HostStreamConfig { depth: 0, ..good.clone() }, "stream depth"),
        (HostStreamConfig { wait_limit: Duration::ZERO, ..good.clone() }, "stream wait limit"),
    ] {
        let refusal = HostEngine::start(config).expect_err("refused");
        assert!(matches!(refusal, Error::InvalidArgument { what, .. } if what == at), "{refusal}");
    }
    let extreme = HostStreamConfig {
        name: "ein sehr langer Name für einen Strom".into(),
        depth: usize::MAX,
        wait_limit: Duration::MAX,
        spin: Duration::MAX,
    };
    let engine = start(extreme);
    let [word] = words32();
    submit(&engine, [wait_for(&word, 1)]);
    word.store(1);
    drain(&engine);
    assert_eq!(engine.kind(), "host");
}

#[test]
fn the_thread_has_the_stream_name() {
    let engine = start(HostStreamConfig { name: "x".into(), ..HostStreamConfig::default() });
    let name = Arc::new(Mutex::new(String::new()));
    let out = name.clone();
    submit(
        &engine,
        [host_fn(move || *out.lock() = std::fs::read_to_string("/proc/thread-self/comm").expect("proc"))],
    );
    drain(&engine);
    assert_eq!(name.lock().trim_end(), "gdsync-stream-x");
}

#[test]
fn writes_and_signals_happen_in_order() {
    let engine = engine();
    let ([word], wide) = (words32(), word64());
    let seen = Arc::new(Mutex::new(Vec::new()));
    let (at, out) = (word.clone(), seen.clone());
    let doorbell = Fake::new(move |ask, _| {
        out.lock().push((ask, at.load()));
        false
    });
    let ops = [
        Op::Write32 { at: word.clone(), value: 1 },
        trigger(&doorbell),
        Op::Barrier,
        Op::Write32 { at: word.clone(), value: u32::MAX },
        Op::Write64 { at: wide.clone(), value: u64::MAX - 1 },
        trigger(&doorbell),
    ];
    assert_eq!(submit(&engine, ops), 1);
    drain(&engine);
    assert_eq!(*seen.lock(), [(Ask::Signal, 1), (Ask::Signal, u32::MAX)]);
    assert_eq!(wide.load(), u64::MAX - 1);
    assert_eq!(Arc::strong_count(&doorbell), 1, "a completed submission holds nothing");
}

#[test]
fn an_empty_submission_counts() {
    let engine = engine();
    assert_eq!((engine.submitted(), engine.completed()), (0, 0));
    assert_eq!(submit(&engine, []), 1);
    assert_eq!(submit(&engine, []), 2);
    drain(&engine);
    assert_eq!((engine.submitted(), engine.completed()), (2, 2));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// A random program, split randomly into submissions, has the effects of the same steps in sequence.
    #[test]
    fn programs_match_a_sequential_model(program in prop::collection::vec((0..5_u8, 0..4_usize, any::<u32>()), 0..120),
                                    cut in 1..20_usize) {
        let engine = engine();
        let words: [Word32; 4] = words32();
        let mut model = [0_u32; 4];
        let mut expected = Vec::new();
        let seen = Arc::new(Mutex::new(Vec::new()));
        let mut ops = Vec::new();
        for (kind, at, value) in program {
            ops.push(match kind {
                0 | 1 => {
                    model[at] = value;
                    Op::Write32 { at: words[at].clone(), value }
                }
                2 => {
                    expected.push(model);
                    let (words, out) = (words.clone(), seen.clone());
                    host_fn(move || out.lock().push(words.each_ref().map(Word32::load)))
                }
                3 => wait_for(&words[at], model[at]),
                _ => Op::Barrier,
            });
        }
        while !ops.is_empty() {
            let rest = ops.split_off(cut.min(ops.len()));
            submit(&engine, ops);
            ops = rest;
        }
        drain(&engine);
        prop_assert_eq!(&*seen.lock(), &expected);
        prop_assert_eq!(words.each_ref().map(Word32::load), model);
    }
}

#[test]
fn a_full_stream_leaves_the_operations_usable() {
    let engine = start(HostStreamConfig { name: "narrow".into(), depth: 2, ..HostStreamConfig::default() });
    let [gate, out] = words32();
    submit(&engine, [wait_for(&gate, 1)]);
    submit(&engine, []);
    let mut ops = Ops::from([Op::Barrier, Op::Write32 { at: out.clone(), value: 5 }]);
    let refusal = engine.submit(&mut SubmitGuard::default(), &mut ops);
    assert!(
        matches!(&refusal, Err(Error::StreamFull { stream, depth: 2 }) if stream == "narrow"),
        "{refusal:?}"
    );
    assert_eq!(ops.len(), 2);
    assert_eq!(engine.submitted(), 2);
    assert!(!engine.wait_room(Instant::now() + Duration::from_millis(5)));
    thread::scope(|scope| {
        let waiter = scope.spawn(|| engine.wait_room(deadline()));
        gate.store(1);
        assert!(waiter.join().expect("no panic"));
    });
    assert_eq!(submit(&engine, ops), 3);
    drain(&engine);
    assert_eq!(out.load(), 5);
}

#[test]
fn waiting_for_a_completion_ends_at_the_deadline() {
    let engine = engine();
    let [gate] = words32();
    let seq = submit(&engine, [wait_for(&gate, 1)]);
    for patience in [Duration::ZERO, Duration::from_millis(20)] {
        let start = Instant::now();
        assert!(!engine.wait_completed(seq, start + patience));
        assert!(start.elapsed() >= patience);
    }
    assert!(!engine.wait_completed(seq + 1, Instant::now()), "never submitted");
    assert!(engine.wait_completed(0, Instant::now()), "nothing to wait for");
    thread::scope(|scope| {
        let waiters = [(); 3].map(|()| scope.spawn(|| engine.wait_completed(seq, deadline())));
        thread::sleep(Duration::from_millis(5));
        gate.store(1);
        for waiter in waiters {
            assert!(waiter.join().expect("no panic"));
        }
    });
}

#[test]
fn each_thread_keeps_its_submission_order() {
    const THREADS: usize = 4;
    const EACH: usize = 500;
    let engine = start(HostStreamConfig { depth: 8, ..HostStreamConfig::default() });
    let seen = Arc::new(Mutex::new(Vec::new()));
    let submit_patiently = |mut ops: Ops| loop {
        match engine.submit(&mut SubmitGuard::default(), &mut ops) {
            Ok(seq) => return seq,
            Err(Error::StreamFull { .. }) => assert!(engine.wait_room(deadline())),
            Err(other) => panic!("{other}"),
        }
    };
    let mut seqs: Vec<u64> = thread::scope(|scope| {
        let threads: Vec<_> = (0..THREADS)
            .map(|thread| {
                let (seen, submit_patiently) = (&seen, &submit_patiently);
                scope.spawn(move || -> Vec<u64> {
                    let one = |i| {
                        let seen = seen.clone();
                        submit_patiently(Ops::from_iter([host_fn(move || seen.lock().push((thread, i)))]))
                    };
                    (0..EACH).map(one).collect()
                })
            })
            .collect();
        threads.into_iter().flat_map(|thread| thread.join().expect("no panic")).collect()
    });
    drain(&engine);
    seqs.sort_unstable();
    assert!(seqs.iter().copied().eq(1..=2000), "each submission has a number of its own");
    for thread in 0..THREADS {
        let own = seen.lock().iter().filter(|(t, _)| *t == thread).map(|(_, i)| *i).collect::<Vec<_>>();
        assert!(own.into_iter().eq(0..EACH), "thread {thread}");
    }
}

#[test]
fn host_functions_may_use_their_engine() {
    let engine = engine();
    let [word] = words32();
    let (own, at, result) = (engine.clone(), word.clone(), Arc::new(Mutex::new(None)));
    let out = result.clone();
    submit(
        &engine,
        [host_fn(move || {
            let seq: Result<u64> =
                own.submit(&mut SubmitGuard::default(), &mut Ops::from_iter([Op::Write32 { at, value: 3 }]));
            *out.lock() =
                Some((seq.expect("accepted"), own.completed(), own.wait_completed(1, Instant::now())));
        })],
    );
    assert!(engine.wait_completed(2, deadline()));
    assert_eq!(*result.lock(), Some((2, 0, false)));
    assert_eq!(word.load(), 3);
}
