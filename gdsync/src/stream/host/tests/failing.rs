//! Failures: which sources are stopped, in which order, and what does not run.

use std::sync::Weak;
use std::sync::atomic::AtomicBool;

use super::*;

fn aborted(name: &str) -> Error {
    Error::StreamAborted { stream: name.into() }
}

fn is_aborted(error: Option<&Error>, name: &str) -> bool {
    matches!(error, Some(Error::StreamAborted { stream }) if stream == name)
}

/// A host function that must be dropped without running.
fn never(dropped: &Arc<AtomicU64>) -> Op {
    let mark = Dropped(dropped.clone());
    host_fn(move || {
        let _held = mark;
        std::process::abort();
    })
}

#[test]
fn sources_are_stopped_once_and_before_the_wait_is_released() {
    let engine = engine();
    let [word, after] = words32();
    let watched: Weak<HostEngine> = Arc::downgrade(&engine);
    let early = Arc::new(AtomicBool::new(false));
    let flag = early.clone();
    let dropped = Arc::new(AtomicU64::new(0));
    let drops = dropped.clone();
    let stopped = Fake::new(move |ask, _| {
        if ask == Ask::Fail {
            let engine = watched.upgrade().expect("the test holds it");
            assert!(is_aborted(engine.error().as_ref(), "user"));
            // Time for a wait released too early to be noticed.
            thread::sleep(Duration::from_millis(30));
            flag.store(engine.completed() > 1 || drops.load(Ordering::SeqCst) > 0, Ordering::SeqCst);
        }
        false
    });
    let (passed, signalled, queued) = (Fake::idle(), Fake::idle(), Fake::idle());
    submit(&engine, [trigger(&passed)]);
    submit(
        &engine,
        [
            wait_on(&word, 0, &passed),
            wait_on(&word, 1, &stopped),
            Op::Write32 { at: after.clone(), value: 1 },
            trigger(&signalled),
            trigger(&stopped),
            never(&dropped),
        ],
    );
    submit(&engine, [wait_on(&word, 1, &stopped), trigger(&queued), never(&dropped)]);
    until("the second wait", || stopped.parks() > 0);
    engine.fail(aborted("user"));
    engine.fail(aborted("too late"));
    drain(&engine);
    assert!(!early.load(Ordering::SeqCst), "released before all sources were stopped");
    assert_eq!([&stopped, &signalled, &queued].map(|s| s.asked(Ask::Fail)), [1, 1, 1]);
    assert_eq!(passed.asked(Ask::Fail), 0, "its operations were over");
    for source in [&stopped, &signalled, &queued] {
        assert!(is_aborted(source.reason.lock().as_ref(), "user"));
        assert_eq!((source.asked(Ask::Signal), Arc::strong_count(source)), (0, 1));
    }
    assert_eq!((after.load(), dropped.load(Ordering::SeqCst)), (0, 2));
    assert_eq!((engine.submitted(), engine.completed()), (3, 3));
    assert!(is_aborted(engine.error().as_ref(), "user"), "the first error stays");
}

#[test]
fn completions_of_a_stopped_source_run_nothing_more() {
    // A stopped queue completes with errors: the wait is satisfied, yet nothing after it may run.
    let engine = engine();
    let [word] = words32();
    let (at, watched) = (word.clone(), Arc::downgrade(&engine));
    let dropped = Arc::new(AtomicU64::new(0));
    let early = Arc::new(AtomicBool::new(false));
    let (drops, flag) = (dropped.clone(), early.clone());
    let source = Fake::new(move |ask, _| {
        if ask == Ask::Fail {
            at.store(1);
            thread::sleep(Duration::from_millis(30));
            let completed = watched.upgrade().map(|engine| engine.completed());
            flag.store(completed != Some(0) || drops.load(Ordering::SeqCst) > 0, Ordering::SeqCst);
        }
        false
    });
    submit(&engine, [wait_on(&word, 1, &source), never(&dropped)]);
    submit(&engine, [never(&dropped)]);
    until("the wait", || source.parks() > 0);
    engine.fail(aborted("user"));
    drain(&engine);
    assert!(!early.load(Ordering::SeqCst), "dropped or counted before the source was stopped");
    assert_eq!(dropped.load(Ordering::SeqCst), 2);
}

#[test]
fn a_wait_without_a_source_is_released_too() {
    let engine = engine();
    let [word] = words32();
    submit(&engine, [wait_for(&word, 1)]);
    thread::sleep(Duration::from_millis(5));
    engine.fail(aborted("user"));
    drain(&engine);
}

#[test]
fn a_failed_engine_refuses_submissions() {
    let engine = engine();
    engine.fail(aborted("first"));
    let mut ops = Ops::from_iter([Op::Barrier]);
    let refusal = engine.submit(&mut SubmitGuard::default(), &mut ops).expect_err("refused");
    assert!(is_aborted(Some(&refusal), "first"));
    assert_eq!((ops.len(), engine.submitted(), engine.completed()), (1, 0, 0));
    assert!(engine.wait_room(Instant::now()), "so that the caller learns of the failure");
}

#[test]
fn a_failure_wakes_callers_that_wait_for_room_or_completion() {
    let engine = start(HostStreamConfig { depth: 1, wait_limit: LONG, ..HostStreamConfig::default() });
    let [word] = words32();
    submit(&engine, [wait_for(&word, 1)]);
    thread::scope(|scope| {
        let room = scope.spawn(|| engine.wait_room(deadline()));
        let completion = scope.spawn(|| engine.wait_completed(1, deadline()));
        thread::sleep(Duration::from_millis(10));
        engine.fail(aborted("user"));
        assert!(room.join().expect("no panic"));
        assert!(completion.join().expect("no panic"));
    });
}

#[test]
fn a_host_function_may_fail_its_engine() {
    let engine = engine();
    let [word] = words32();
    let (before, after) = (Fake::idle(), Fake::idle());
    let dropped = Arc::new(AtomicU64::new(0));
    let own = engine.clone();
    let still_here = Arc::new(AtomicBool::new(false));
    let flag = still_here.clone();
    submit(
        &engine,
        [
            trigger(&before),
            host_fn(move || {
                own.fail(aborted("self"));
                flag.store(true, Ordering::SeqCst);
            }),
            wait_on(&word, 1, &after),
            never(&dropped),
        ],
    );
    drain(&engine);
    assert!(still_here.load(Ordering::SeqCst));
    assert_eq!((before.asked(Ask::Fail), after.asked(Ask::Fail)), (0, 1));
    assert_eq!(dropped.load(Ordering::SeqCst), 1);
    assert!(is_aborted(engine.error().as_ref(), "self"));
}

#[test]
fn sources_may_call_back_into_a_failing_engine() {
    let engine = engine();
    let [word] = words32();
    let weak = Arc::downgrade(&engine);
    let source = Fake::new(move |ask, number| {
        let Some(engine) = weak.upgrade() else {
            return false;
        };
        match ask {
            // Fails on the engine's own thread, in a source.
            Ask::Park(_) if number == 2 => engine.fail(aborted("park")),
            Ask::Fail => {
                engine.fail(aborted("nested"));
                assert!(is_aborted(
                    Some(&engine.submit(&mut SubmitGuard::default(), &mut Ops::new()).expect_err("refused")),
                    "park"
                ));
                assert!(!engine.wait_completed(1, Instant::now()));
            }
            _ => {}
        }
        false
    });
    submit(&engine, [wait_on(&word, 1, &source)]);
    drain(&engine);
    assert!(is_aborted(engine.error().as_ref(), "park"));
    assert_eq!(source.asked(Ask::Fail), 1);
}

#[test]
fn a_panic_of_a_host_function_fails_the_engine() {
    let number = 3;
    let panics: [(Op, &str); 3] = [
        (host_fn(|| panic!("as the test wants")), "as the test wants"),
        (host_fn(move || panic!("number {number}")), "number 3"),
        (host_fn(|| std::panic::panic_any(5)), "(no message)"),
    ];
    for (op, expected) in panics {
        let engine = engine();
        let dropped = Arc::new(AtomicU64::new(0));
        let source = Fake::idle();
        submit(&engine, [Op::Barrier, op, never(&dropped), trigger(&source)]);
        drain(&engine);
        let Some(Error::HostFnPanicked { stream, message }) = engine.error() else {
            panic!("{:?}", engine.error())
        };
        assert_eq!((stream.as_str(), message.as_str()), ("stream", expected));
        assert_eq!((dropped.load(Ordering::SeqCst), source.asked(Ask::Fail)), (1, 1));
    }
}

#[test]
fn a_panic_in_a_source_or_drop_does_not_hang_the_stream() {
    struct Bomb;
    impl Drop for Bomb {
        fn drop(&mut self) {
            panic!("dropped");
        }
    }
    let [word, gate] = words32();
    let (dropped, bomb) = (Arc::new(AtomicU64::new(0)), Bomb);
    let engine = engine();
    submit(&engine, [wait_for(&gate, 1)]);
    let (bad, good) = (Fake::new(|ask, _| ask == Ask::Signal || panic!("source: {ask:?}")), Fake::idle());
    submit(&engine, [trigger(&bad), wait_on(&word, 1, &bad), host_fn(move || drop(bomb))]);
    submit(&engine, [trigger(&good), never(&dropped)]);
    gate.store(1);
    drain(&engine);
    assert!(
        matches!(engine.error(), Some(Error::HostFnPanicked { message, .. }) if message == "source: Progress")
    );
    assert_eq!((bad.asked(Ask::Fail), good.asked(Ask::Fail)), (1, 1), "one bad source does not hide another");
    assert_eq!(dropped.load(Ordering::SeqCst), 1);
}

#[test]
fn failures_race_with_submitters_and_each_other() {
    for round in 0..200_u64 {
        let engine = start(HostStreamConfig { depth: 16, ..HostStreamConfig::default() });
        let [word] = words32();
        let (over, made) = (Arc::new(AtomicU64::new(0)), AtomicU64::new(0));
        let source = Fake::idle();
        let stopped_late = AtomicBool::new(false);
        thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    for i in 0.. {
                        made.fetch_add(1, Ordering::SeqCst);
                        let mark = Dropped(over.clone());
                        let wait = wait_on(&word, u32::from(i == 5), &source);
                        match engine.submit(
                            &mut SubmitGuard::default(),
                            &mut Ops::from([wait, host_fn(move || drop(mark))]),
                        ) {
                            Ok(_) => {}
                            Err(Error::StreamFull { .. }) => assert!(engine.wait_room(deadline())),
                            Err(_) => return,
                        }
                    }
                });
            }
            for name in ["one", "two"] {
                let (engine, source, stopped_late) = (&engine, &source, &stopped_late);
                scope.spawn(move || {
                    thread::sleep(Duration::from_micros(round * 2));
                    engine.fail(aborted(name));
                    let seq = engine.submitted();
                    assert!(engine.wait_completed(seq, deadline()));
                    let stopped = source.asked(Ask::Fail);
                    thread::sleep(Duration::from_micros(100));
                    stopped_late.fetch_or(source.asked(Ask::Fail) != stopped, Ordering::SeqCst);
                });
            }
        });
        drain(&engine);
        assert!(
            !stopped_late.load(Ordering::SeqCst),
            "completions were announced before the sources were stopped"
        );
        assert!(source.asked(Ask::Fail) <= 1);
        assert_eq!(over.load(Ordering::SeqCst), made.load(Ordering::SeqCst), "run or dropped, each once");
        assert_eq!(Arc::strong_count(&source), 1);
    }
}
