//! Waits: conditions, limits and CPU cost.

use super::*;

#[test]
fn a_store_releases_a_wait() {
    let engine = engine();
    let ([word, after], wide) = (words32(), word64());
    submit(
        &engine,
        [
            Op::Wait32 { at: word.clone(), value: 7, cond: Cond::Geq, of: None },
            Op::Write32 { at: after.clone(), value: 1 },
            Op::Wait64 { at: wide.clone(), value: 1 << 40, cond: Cond::And },
            Op::Write32 { at: after.clone(), value: 2 },
        ],
    );
    word.store(6);
    assert!(!engine.wait_completed(1, Instant::now() + Duration::from_millis(20)));
    assert_eq!(after.load(), 0);
    word.store(8);
    until("the first write", || after.load() == 1);
    wide.store(1 << 39);
    assert!(!engine.wait_completed(1, Instant::now() + Duration::from_millis(20)));
    assert_eq!(after.load(), 1);
    wide.store(3 << 40);
    drain(&engine);
    assert_eq!(after.load(), 2);
}

#[test]
fn conditions_compare_word_to_value_in_that_order() {
    // Each pair satisfies the condition in one order only, or not at all.
    let engine = engine();
    let ([word], wide) = (words32(), word64());
    for (cond, holds, fails, value) in
        [(Cond::Geq, 2, 0, 1), (Cond::Eq, 1, 2, 1), (Cond::And, 6, 8, 2), (Cond::Nor, 1, u32::MAX - 2, 2)]
    {
        word.store(fails);
        wide.store(u64::from(fails) | (u64::from(fails >> 31) * (u64::from(u32::MAX) << 32)));
        let narrow = Op::Wait32 { at: word.clone(), value, cond, of: None };
        let seq = submit(&engine, [narrow]);
        assert!(!engine.wait_completed(seq, Instant::now() + Duration::from_millis(5)), "{cond:?}");
        word.store(holds);
        drain(&engine);
        let broad = Op::Wait64 { at: wide.clone(), value: value.into(), cond };
        let seq = submit(&engine, [broad]);
        assert!(!engine.wait_completed(seq, Instant::now() + Duration::from_millis(5)), "{cond:?}");
        wide.store(holds.into());
        drain(&engine);
    }
}

#[test]
fn a_host_function_of_another_stream_releases_a_wait() {
    let (waiting, helping) = (engine(), engine());
    let [word, payload, copy] = words32();
    let (from, to) = (payload.clone(), copy.clone());
    submit(&waiting, [wait_for(&word, 1), host_fn(move || to.store(from.load()))]);
    submit(
        &helping,
        [host_fn(move || {
            payload.store(99);
            word.store(1);
        })],
    );
    drain(&waiting);
    assert_eq!(copy.load(), 99);
}

#[test]
fn two_streams_play_ping_pong() {
    const ROUNDS: u32 = 10_000;
    let (left, right) = (engine(), engine());
    let [ping, pong] = words32();
    for first in (1..=ROUNDS).step_by(100) {
        let mut ops: [Vec<Op>; 2] = Default::default();
        for round in first..first + 100 {
            ops[0].push(Op::Write32 { at: ping.clone(), value: round });
            ops[0].push(wait_for(&pong, round));
            ops[1].push(wait_for(&ping, round));
            ops[1].push(Op::Write32 { at: pong.clone(), value: round });
        }
        let [there, back] = ops;
        submit(&left, there);
        submit(&right, back);
    }
    drain(&left);
    drain(&right);
    assert_eq!((ping.load(), pong.load()), (ROUNDS, ROUNDS));
    assert!(left.error().is_none() && right.error().is_none());
}

#[test]
fn a_satisfied_wait_does_not_call_its_source() {
    let engine = engine();
    let [word] = words32();
    let source = Fake::idle();
    submit(&engine, [wait_on(&word, 0, &source)]);
    drain(&engine);
    assert_eq!((source.asked(Ask::Progress), source.parks(), source.asked(Ask::Fail)), (0, 0, 0));
}

#[test]
fn a_spinning_wait_runs_its_source() {
    let engine = start(HostStreamConfig { spin: LONG, ..HostStreamConfig::default() });
    let [word] = words32();
    let at = word.clone();
    let source = Fake::new(move |ask, number| {
        if (ask, number) == (Ask::Progress, 100) {
            at.store(1);
        }
        false
    });
    submit(&engine, [wait_on(&word, 1, &source)]);
    drain(&engine);
    assert_eq!((source.asked(Ask::Progress), source.parks()), (100, 0));
}

#[test]
fn a_wait_that_spun_enough_sleeps_in_its_source() {
    let engine = start(HostStreamConfig { spin: Duration::ZERO, ..HostStreamConfig::default() });
    let [word] = words32();
    let at = word.clone();
    let source = Fake::new(move |ask, number| {
        if let Ask::Park(timeout) = ask {
            assert!(timeout > Duration::ZERO && timeout <= Duration::from_millis(10), "{timeout:?}");
            if number == 5 {
                at.store(1);
            }
        }
        false
    });
    submit(&engine, [wait_on(&word, 1, &source)]);
    drain(&engine);
    assert!(engine.error().is_none());
    assert_eq!(source.parks(), 5);
    assert_eq!(source.asked(Ask::Progress), 6, "once before each park, once after the last");
}

#[test]
fn a_wait_does_not_sleep_while_its_source_has_work() {
    let engine = start(HostStreamConfig { spin: Duration::ZERO, ..HostStreamConfig::default() });
    let [word] = words32();
    let at = word.clone();
    let source = Fake::new(move |ask, number| {
        if (ask, number) == (Ask::Progress, 50) {
            at.store(1);
        }
        true
    });
    submit(&engine, [wait_on(&word, 1, &source)]);
    drain(&engine);
    assert_eq!((source.asked(Ask::Progress), source.parks()), (50, 0));
}

#[test]
fn a_source_that_is_always_busy_does_not_outlive_the_wait_limit() {
    let wait_limit = Duration::from_millis(20);
    let engine = start(HostStreamConfig { wait_limit, ..HostStreamConfig::default() });
    let [word] = words32();
    submit(&engine, [wait_on(&word, 1, &Fake::new(|_, _| true))]);
    drain(&engine);
    assert!(matches!(engine.error(), Some(Error::StreamWait { .. })));
}

#[test]
fn the_wait_limit_error_names_the_wait() {
    let wait_limit = Duration::from_millis(30);
    let config = HostStreamConfig { name: "tired".into(), wait_limit, ..HostStreamConfig::default() };
    let [word] = words32();
    let wide = word64();
    word.store(0xab);
    wide.store(u64::MAX);
    let source = Fake::idle();
    let cases: [(Op, String); 3] = [
        (wait_for(&word, 0x11), format!("WAIT32 [{:#x}] Eq 0x11 (the word is 0xab)", word.addr())),
        (
            Op::Wait64 { at: wide.clone(), value: 0, cond: Cond::Nor },
            format!("WAIT64 [{:#x}] Nor 0x0 (the word is 0xffffffffffffffff)", wide.addr()),
        ),
        (wait_on(&word, 0x11, &source), "send completion 7 of QP 0x123".to_owned()),
    ];
    for (op, expected) in cases {
        let engine = start(config.clone());
        let begin = Instant::now();
        submit(&engine, [op]);
        drain(&engine);
        assert!(begin.elapsed() >= wait_limit);
        let Some(Error::StreamWait { stream, what, after }) = engine.error() else {
            panic!("{:?}", engine.error())
        };
        assert_eq!((stream.as_str(), after), ("tired", wait_limit));
        assert!(what.starts_with(&expected), "{what}");
    }
    assert_eq!(source.asked(Ask::Fail), 1);
    assert!(matches!(*source.reason.lock(), Some(Error::StreamWait { .. })));
}

#[test]
fn each_wait_has_the_full_limit() {
    let wait_limit = Duration::from_secs(1);
    let engine = start(HostStreamConfig { wait_limit, ..HostStreamConfig::default() });
    let [word] = words32();
    let geq = |value| Op::Wait32 { at: word.clone(), value, cond: Cond::Geq, of: None };
    let begin = Instant::now();
    submit(&engine, (1..=12).map(geq).collect::<Vec<_>>());
    for value in 1..=12 {
        thread::sleep(Duration::from_millis(100));
        word.store(value);
    }
    drain(&engine);
    assert!(begin.elapsed() > wait_limit, "together they took longer");
    assert!(engine.error().is_none(), "{:?}", engine.error());
}

/// CPU time of the calling thread.
fn cpu_time() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is a valid place for the answer.
    let rc = unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) };
    assert_eq!(rc, 0);
    Duration::new(time.tv_sec.unsigned_abs(), u32::try_from(time.tv_nsec).expect("below a billion"))
}

/// A host function that records the CPU time of its thread.
fn note(times: &Arc<Mutex<Vec<Duration>>>) -> Op {
    let times = times.clone();
    host_fn(move || times.lock().push(cpu_time()))
}

#[test]
fn blocked_waits_use_little_cpu() {
    let blocked = Duration::from_millis(300);
    let [word] = words32();
    let source = Fake::idle();
    let streams = [(); 8].map(|()| (engine(), Arc::new(Mutex::new(Vec::new()))));
    for (i, (engine, times)) in streams.iter().enumerate() {
        let wait = if i % 2 == 0 { wait_for(&word, 1) } else { wait_on(&word, 1, &source) };
        submit(engine, [note(times), wait, note(times)]);
    }
    until("all begin to wait", || streams.iter().all(|(_, times)| times.lock().len() == 1));
    thread::sleep(blocked);
    word.store(1);
    let mut used = Duration::ZERO;
    for (engine, times) in &streams {
        drain(engine);
        let times = times.lock();
        used += times[1] - times[0];
    }
    assert!(used < blocked / 5, "8 streams used {used:?} in {blocked:?}");
}

#[test]
fn an_idle_engine_uses_no_cpu() {
    let engine = engine();
    let times = Arc::new(Mutex::new(Vec::new()));
    submit(&engine, [note(&times)]);
    thread::sleep(Duration::from_millis(300));
    submit(&engine, [note(&times)]);
    drain(&engine);
    let times = times.lock();
    let used = times[1] - times[0];
    assert!(used < Duration::from_millis(10), "{used:?}");
}
