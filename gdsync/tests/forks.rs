//! A forked child has what its parent made, and can neither use nor harm it.

mod common;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, MutexGuard, PoisonError};

use common::{PATIENCE, Side, is_device_named, loopback, pair, stream};
use gdsync::error::Error;
use gdsync::memory::Memory;
use gdsync::stream::{Batch, Cond};
use gdsync::verbs::{Access, RecvWr, SendWr};

/// Runs `child` in a forked child; whether it returned, and true. It must not print or panic: another thread of this process may
/// have held a lock that is needed for that.
fn in_child(child: impl FnOnce() -> bool) -> bool {
    // SAFETY: the child only calls what this test is about, and ends without running anything else.
    let pid = unsafe { libc::fork() };
    assert!(pid >= 0, "fork: {}", std::io::Error::last_os_error());
    if pid == 0 {
        // SAFETY: a number only; a child that hangs is ended.
        unsafe { libc::alarm(20) };
        // A panic would end the thread, which is the only one here, and so the process, with 0.
        let code = i32::from(!catch_unwind(AssertUnwindSafe(child)).unwrap_or(false));
        // SAFETY: ends this process at once.
        unsafe { libc::_exit(code) };
    }
    let mut status = -1;
    // SAFETY: a child of ours, and a place for the answer.
    assert_eq!(unsafe { libc::waitpid(pid, &raw mut status, 0) }, pid);
    status == 0
}

/// One at a time: a child has the locks of the process as other threads held them when it was forked.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A write that both sides see.
fn works(a: &Side, b: &Side, value: u64) {
    a.memory().word64(0).unwrap().store(value);
    let from = [a.mr.sge(0, 8).unwrap()];
    a.qp.post_send(&[SendWr::write(b.mr.remote(8).unwrap(), &from)]).unwrap().wait(PATIENCE).unwrap();
    assert_eq!(b.memory().word64(8).unwrap().load(), value);
}

fn is_refused<T>(result: Result<T, Error>) -> bool {
    matches!(result, Err(Error::OtherProcess { caller, .. }) if caller == std::process::id())
}

#[test]
fn what_a_child_drops_is_left_to_its_parent() {
    let _alone = alone();
    let (a, b) = pair(4096, |q| q);
    let (c, d) = loopback(4096, |q| q);
    let s = stream("parent");
    let go = Memory::alloc(8).unwrap();
    works(&a, &b, 1);
    // The stream holds a send and a wait of the first pair, and there are prepared ones of the second.
    s.wait_value32(&go.word32(0).unwrap(), 1, Cond::Eq).unwrap();
    let held = s.send(&a.qp, &SendWr::nop()).unwrap().completion();
    s.wait(&held).unwrap();
    let prepared = c.qp.prepare_send(&[SendWr::nop()]).unwrap();
    let mut batch = Batch::new();
    batch.send(&d.qp, &SendWr::nop()).unwrap();
    batch.wait_send(&d.qp).unwrap();

    let mut all = Some((a, b, c, d, s, go, held, prepared, batch));
    // What the child takes out is still there in the parent.
    assert!(in_child(|| {
        drop(all.take());
        true
    }));
    let (a, b, c, d, s, go, held, prepared, batch) = all.unwrap();
    go.word32(0).unwrap().store(1);
    held.wait(PATIENCE).unwrap();
    s.synchronize(PATIENCE).unwrap();
    drop((prepared, batch));
    works(&a, &b, 2);
    works(&c, &d, 3);
}

#[test]
fn calls_in_a_child_are_refused() {
    let _alone = alone();
    let (a, b) = pair(4096, |q| q);
    let s = stream("parent");
    works(&a, &b, 1);
    let done = a.qp.post_send(&[SendWr::nop()]).unwrap();
    done.wait(PATIENCE).unwrap();
    let receive = || RecvWr { wr_id: 1, sges: &[] };
    let pending = b.qp.post_recv(&[receive()]).unwrap();
    let calls: [(&str, &dyn Fn() -> bool); 13] = [
        ("post_send", &|| is_refused(a.qp.post_send(&[SendWr::nop()]))),
        ("post_recv", &|| is_refused(a.qp.post_recv(&[receive()]))),
        ("prepare_send", &|| is_refused(a.qp.prepare_send(&[SendWr::nop()]))),
        ("a stream's send", &|| is_refused(s.send(&a.qp, &SendWr::nop()))),
        ("a stream's wait", &|| is_refused(s.wait(&pending))),
        ("synchronize", &|| is_refused(s.synchronize(PATIENCE))),
        ("wait", &|| is_refused(pending.wait(PATIENCE))),
        ("wait on a queue", &|| is_refused(b.qp.recv_cq().wait(PATIENCE))),
        ("check", &|| is_refused(a.qp.check())),
        ("modify", &|| is_refused(a.qp.abort())),
        ("register", &|| is_refused(a.pd.register(&Memory::alloc(8).unwrap(), Access::all()))),
        ("build", &|| is_refused(a.pd.build_qp().build())),
        ("alloc_pd", &|| is_refused(a.context.alloc_pd())),
    ];
    for (what, call) in calls {
        assert!(in_child(call), "{what}");
    }
    assert!(in_child(|| done.wait(PATIENCE).is_ok()), "what the parent knew is known");
    assert!(in_child(|| b.qp.poll_recv().is_none() && b.memory().to_vec() == [0; 4096]));
    works(&a, &b, 2);
}

#[test]
fn a_child_opens_a_device_of_its_own() {
    let _alone = alone();
    if is_device_named() {
        return println!(
            "skipped: a card that is simulated is a thread of this process, and no child has it"
        );
    }
    let (a, b) = pair(4096, |q| q);
    works(&a, &b, 1);
    assert!(in_child(|| {
        drop((a.qp.clone(), a.mr.clone()));
        let (c, d) = pair(4096, |q| q);
        works(&c, &d, 2);
        true
    }));
    works(&a, &b, 3);
}

/// The system gives threads of the child the numbers that threads of the parent have.
#[test]
fn what_a_child_drops_is_none_of_its_own_threads() {
    let _alone = alone();
    let mut parents: Vec<_> = (0..4).map(|_| stream("parent")).collect();
    assert!(in_child(|| {
        let own: Vec<_> = (0..8).map(|_| stream("child")).collect();
        parents.clear();
        own.iter().try_for_each(|own| own.synchronize(PATIENCE)).unwrap();
        // Joins their threads.
        drop(own);
        true
    }));
    parents.iter().try_for_each(|parent| parent.synchronize(PATIENCE)).unwrap();
}
