//! The end of an engine: dropping the last handle, from any thread.

use std::sync::{Weak, mpsc};

use super::*;
use crate::stream::host::Shared;

/// Whether the thread of a dropped engine has ended: it holds `shared`.
fn ends(shared: &Weak<Shared>) {
    until("the thread ends", || shared.upgrade().is_none());
}

#[test]
fn a_dropped_stream_finishes_its_work() {
    let engine = engine();
    let shared = Arc::downgrade(&engine.shared);
    let [word, gate, after] = words32();
    let source = Fake::idle();
    let ran = Arc::new(AtomicU64::new(0));
    let mark = Dropped(ran.clone());
    submit(&engine, [wait_on(&word, 1, &source), Op::Write32 { at: after.clone(), value: 1 }]);
    submit(&engine, [wait_for(&gate, 1), host_fn(move || drop(mark))]);
    until("the wait", || source.parks() > 0);
    drop(engine);
    assert_eq!((after.load(), ran.load(Ordering::SeqCst)), (0, 0), "the drop waits for nothing");
    word.store(1);
    until("the write", || after.load() == 1);
    gate.store(1);
    ends(&shared);
    assert_eq!((ran.load(Ordering::SeqCst), source.asked(Ask::Fail), Arc::strong_count(&source)), (1, 0, 1));
}

#[test]
fn waits_of_a_dropped_stream_keep_their_limit() {
    let wait_limit = Duration::from_millis(30);
    let engine = start(HostStreamConfig { wait_limit, ..HostStreamConfig::default() });
    let shared = Arc::downgrade(&engine.shared);
    let [word] = words32();
    let source = Fake::idle();
    submit(&engine, [wait_on(&word, 1, &source)]);
    drop(engine);
    ends(&shared);
    assert!(matches!(&*source.reason.lock(), Some(Error::StreamWait { .. })), "{:?}", source.reason);
}

#[test]
fn a_panic_that_drops_a_stream_aborts_it() {
    let engine = engine();
    let shared = Arc::downgrade(&engine.shared);
    let [word] = words32();
    let source = Fake::idle();
    submit(&engine, [wait_on(&word, 1, &source)]);
    let unwound = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        let _engine = engine;
        std::panic::resume_unwind(Box::new("for the test"));
    }));
    assert!(unwound.is_err());
    assert!(shared.upgrade().is_none(), "it joins the thread");
    assert!(matches!(&*source.reason.lock(), Some(Error::StreamAborted { stream }) if stream == "stream"));
}

#[test]
fn a_drop_joins_an_idle_thread() {
    let engine = start(HostStreamConfig { spin: LONG, ..HostStreamConfig::default() });
    let shared = Arc::downgrade(&engine.shared);
    submit(&engine, [Op::Barrier]);
    drain(&engine);
    drop(engine);
    assert!(shared.upgrade().is_none(), "the thread would hold it");
}

#[test]
fn a_drop_after_a_failure_joins_too() {
    let engine = engine();
    let shared = Arc::downgrade(&engine.shared);
    submit(&engine, [host_fn(|| panic!("as the test wants"))]);
    drain(&engine);
    drop(engine);
    assert!(shared.upgrade().is_none());
}

/// As in a panic that drops first the stream, then what its host function waits for.
#[test]
fn a_drop_after_a_failure_does_not_wait_for_a_host_function_for_ever() {
    let engine = engine();
    let shared = Arc::downgrade(&engine.shared);
    let (sender, receiver) = mpsc::channel::<()>();
    let (running_tx, running_rx) = mpsc::channel();
    submit(
        &engine,
        [host_fn(move || {
            running_tx.send(()).expect("the test listens");
            let _ = receiver.recv();
        })],
    );
    running_rx.recv_timeout(LONG).expect("it runs");
    engine.fail(Error::StreamAborted { stream: "stream".into() });
    let (done_tx, done_rx) = mpsc::channel();
    let dropping = thread::spawn(move || {
        drop(engine);
        drop(sender);
        done_tx.send(()).expect("the test listens");
    });
    done_rx.recv_timeout(LONG).expect("the drop returns");
    dropping.join().expect("no panic");
    ends(&shared);
}

#[test]
fn a_host_function_may_drop_the_last_handle() {
    let engine = engine();
    let shared = Arc::downgrade(&engine.shared);
    let (give, take) = mpsc::channel::<Arc<HostEngine>>();
    let (done_tx, done_rx) = mpsc::channel();
    let ran = Arc::new(AtomicU64::new(0));
    let (later, mark) = (ran.clone(), Dropped(ran.clone()));
    submit(
        &engine,
        [host_fn(move || {
            drop(take.recv().expect("the handle comes"));
            done_tx.send(()).expect("the test listens");
        })],
    );
    submit(
        &engine,
        [host_fn(move || {
            let _mark = mark;
            later.fetch_add(100, Ordering::SeqCst);
        })],
    );
    assert_eq!(Arc::strong_count(&engine), 1);
    give.send(engine).expect("the host function listens");
    done_rx.recv_timeout(LONG).expect("the drop returns on the engine's own thread");
    ends(&shared);
    assert_eq!(ran.load(Ordering::SeqCst), 101, "what was pending runs");
}

#[test]
fn a_pending_closure_may_hold_the_last_handle() {
    let engine = engine();
    let shared = Arc::downgrade(&engine.shared);
    let [word] = words32();
    let own = engine.clone();
    submit(&engine, [wait_for(&word, 1), host_fn(move || drop(own))]);
    drop(engine);
    word.store(1);
    ends(&shared);
}
