//! The end of an engine: dropping the last handle, from any thread.

use std::sync::mpsc;

use super::*;

#[test]
fn a_drop_aborts_pending_work() {
    let engine = engine();
    let [word, after] = words32();
    let source = Fake::idle();
    let dropped = Arc::new(AtomicU64::new(0));
    let mark = Dropped(dropped.clone());
    submit(&engine, [wait_on(&word, 1, &source), Op::Write32 { at: after.clone(), value: 1 }]);
    submit(&engine, [wait_for(&word, 1), host_fn(move || drop(mark))]);
    until("the wait", || source.parks() > 0);
    let begin = Instant::now();
    drop(engine);
    assert!(begin.elapsed() < LONG / 2, "it did not wait for the word");
    // Certain once the drop returns, because it joins the thread.
    assert_eq!(source.asked(Ask::Fail), 1);
    assert!(matches!(&*source.reason.lock(), Some(Error::StreamAborted { stream }) if stream == "stream"));
    assert_eq!((after.load(), dropped.load(Ordering::SeqCst), Arc::strong_count(&source)), (0, 1, 1));
}

#[test]
fn a_drop_joins_the_thread() {
    for busy in [false, true] {
        let engine = engine();
        let shared = Arc::downgrade(&engine.shared);
        if busy {
            let [word] = words32();
            submit(&engine, [wait_for(&word, 1)]);
        }
        drop(engine);
        assert!(shared.upgrade().is_none(), "the thread would hold it");
    }
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
    until("the thread ends", || shared.upgrade().is_none());
    assert_eq!(ran.load(Ordering::SeqCst), 1, "what was pending is dropped, not run");
}

#[test]
fn a_pending_closure_may_hold_the_last_handle() {
    let engine = engine();
    let shared = Arc::downgrade(&engine.shared);
    let [word] = words32();
    let own = engine.clone();
    submit(&engine, [wait_for(&word, 1), host_fn(move || drop(own))]);
    engine.fail(Error::StreamAborted { stream: "user".into() });
    drop(engine);
    until("the thread ends", || shared.upgrade().is_none());
}
