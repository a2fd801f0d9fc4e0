//! A forked child has what its parent made, and can neither use nor harm it.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use crate::child::own_process;
use crate::common::{PATIENCE, Side, hca, is_device_named, loopback, pair, stream, until};
use gdsync::error::Error;
use gdsync::memory::Memory;
use gdsync::stream::{Batch, Cond, CudaStreamConfig, Stream, StreamOrder};
use gdsync::verbs::{Access, OnGpu, QpBuilder, RecvWr, SendWr};
use gdsync_testkit::driver::Control;
use gdsync_testkit::process::{self, End};

/// Runs `child` in a forked child; whether it returned, and true. It must not print: another thread of this process may have held a
/// lock that is needed for that.
fn in_child(child: impl FnOnce() -> bool) -> bool {
    // A panic would leave the child in the middle of the test program.
    process::in_child(|| catch_unwind(AssertUnwindSafe(child)).unwrap_or(false)) == End::Said(true)
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
    own_process!();
    let (a, b) = pair(4096, |q| q);
    let (c, d) = loopback(4096, |q| q);
    let s = stream("parent");
    let go = Memory::alloc(8).unwrap();
    works(&a, &b, 1);
    // The stream holds a send and a wait of the first pair, and there are prepared ones of the second.
    s.wait_value32(&go.word32(0).unwrap(), 1, Cond::Eq).unwrap();
    let held = s.send(&a.qp, &SendWr::nop()).unwrap();
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
    own_process!();
    let (a, b) = pair(4096, |q| q);
    let s = stream("parent");
    works(&a, &b, 1);
    let done = a.qp.post_send(&[SendWr::nop()]).unwrap();
    done.wait(PATIENCE).unwrap();
    let receive = || RecvWr::new(&[]).id(1);
    let pending = b.qp.post_recv(&[receive()]).unwrap();
    let calls: [(&str, &dyn Fn() -> bool); 14] = [
        ("post_send", &|| is_refused(a.qp.post_send(&[SendWr::nop()]))),
        ("post_recv", &|| is_refused(a.qp.post_recv(&[receive()]))),
        ("prepare_send", &|| is_refused(a.qp.prepare_send(&[SendWr::nop()]))),
        ("a stream's send", &|| is_refused(s.send(&a.qp, &SendWr::nop()))),
        ("a stream's wait", &|| is_refused(s.wait(&pending))),
        ("synchronize", &|| is_refused(s.synchronize(PATIENCE))),
        ("wait", &|| is_refused(pending.wait(PATIENCE))),
        ("status", &|| is_refused(done.status())),
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
    assert!(in_child(|| b.qp.poll_recv().is_none()));
    // Before Linux 5.12 libibverbs takes registered memory out of children altogether.
    assert!(is_device_named() || in_child(|| b.memory().to_vec() == [0; 4096]));
    works(&a, &b, 2);
}

#[test]
fn child_opens_a_device_of_its_own() {
    own_process!();
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

/// Whether all threads but the caller sleep.
fn others_sleep() -> bool {
    // SAFETY: gettid has no arguments and cannot fail.
    let own = unsafe { libc::gettid() }.to_string();
    std::fs::read_dir("/proc/self/task").unwrap().map(|task| task.unwrap()).all(|task| {
        let stat = std::fs::read_to_string(task.path().join("stat")).unwrap_or_default();
        *task.file_name() == *own || stat.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with('S'))
    })
}

/// The system gives threads of the child the numbers that threads of the parent have.
#[test]
fn what_a_child_drops_is_none_of_its_own_threads() {
    own_process!();
    let mut parents: Vec<_> = (0..4).map(|_| stream("parent")).collect();
    parents.iter().try_for_each(|parent| parent.synchronize(PATIENCE)).unwrap();
    // A thread that runs may hold a lock, which nobody releases in the child.
    until(others_sleep);
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

/// What another thread of the parent was at when it forked, none ends in the child.
#[test]
fn what_others_have_locked_is_not_waited_for() {
    own_process!();
    let (a, b) = pair(4096, |q| q);
    let mut batch = Batch::new();
    batch.send(&a.qp, &SendWr::nop()).unwrap();
    batch.wait_send(&a.qp).unwrap();
    let prepared = a.qp.prepare_send(&[SendWr::nop()]).unwrap();
    let pending = b.qp.post_recv(&[RecvWr::new(&[]).id(1)]).unwrap();
    let (order, mut following) = (StreamOrder::new(&a.qp), Batch::new());
    _ = following.follow(&order);
    let mut all = Some((batch, prepared, following));
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            while !is_over.load(Ordering::Relaxed) {
                // The locks of completion queues, and those of the queues behind them.
                let known = (a.qp.poll_send(), b.qp.poll_recv(), pending.status().unwrap());
                assert_eq!(known, (None, None, None));
                assert!(!order.is_busy());
            }
        });
        let fine = (0..50).all(|_| {
            in_child(|| {
                drop(all.take());
                b.qp.recv_cq().drain();
                a.qp.poll_send().is_none()
                    && is_refused(pending.status())
                    && is_refused(pending.wait(PATIENCE))
                    && is_refused(a.qp.check())
                    && is_refused(a.qp.prepare_wait_send())
            })
        });
        is_over.store(true, Ordering::Relaxed);
        assert!(fine);
    });
    drop(all);
    works(&a, &b, 1);
}

/// Rings on a GPU are not mapped in a child, which would be ended if it touched them.
#[test]
fn rings_on_a_gpu_are_left_alone() {
    own_process!();
    if is_device_named() {
        return println!("skipped: the GPU is simulated, for the software HCA");
    }
    let gpu = crate::simulated::gpu(0).unwrap();
    let on_gpu = |q: QpBuilder| q.on_gpu(&gpu, OnGpu::all());
    let ((a, b), (c, d)) = (pair(4096, on_gpu), loopback(4096, on_gpu));
    works(&a, &b, 1);
    // Or the stream would wait for what has completed.
    a.qp.send_cq().drain();
    let s = Stream::cuda(&gpu, CudaStreamConfig::default()).unwrap();
    let graph =
        s.capture(|s| s.send(&a.qp, &SendWr::nop()).and_then(|_| s.wait_send(&a.qp)).map(drop)).unwrap();
    graph.launch(&s).unwrap();
    s.synchronize(PATIENCE).unwrap();
    let word = a.memory().word32(0).unwrap();
    let pending = b.qp.post_recv(&[RecvWr::new(&[]).id(1)]).unwrap();
    let calls: [(&str, &dyn Fn() -> bool); 13] = [
        ("poll", &|| c.qp.poll_send().is_none() && b.qp.poll_recv().is_none()),
        ("drain", &|| {
            b.qp.recv_cq().drain();
            true
        }),
        ("status", &|| is_refused(pending.status())),
        ("wait", &|| is_refused(pending.wait(PATIENCE))),
        ("wait on a queue", &|| is_refused(b.qp.recv_cq().wait(PATIENCE))),
        ("check", &|| is_refused(a.qp.check())),
        ("prepare_wait_recv", &|| is_refused(b.qp.prepare_wait_recv())),
        ("a stream's send", &|| is_refused(s.send(&a.qp, &SendWr::nop()))),
        ("a stream's wait", &|| is_refused(s.wait_recv(&b.qp)) && is_refused(s.wait(&pending))),
        ("a stream's write", &|| is_refused(s.write_value32(&word, 1))),
        ("synchronize", &|| is_refused(s.synchronize(PATIENCE))),
        ("capture", &|| is_refused(s.capture(|_| Ok(())))),
        ("launch", &|| is_refused(graph.launch(&s))),
    ];
    for (what, call) in calls {
        assert!(in_child(call), "{what}");
    }
    let prepared = (c.qp.prepare_send(&[SendWr::nop()]).unwrap(), c.qp.prepare_wait_send().unwrap());
    let mut batch = Batch::new();
    batch.send(&d.qp, &SendWr::nop()).unwrap();
    batch.wait_send(&d.qp).unwrap();
    let mut all = Some((prepared, batch, graph, pending, s, a, b, c, d));
    assert!(in_child(|| {
        drop(all.take());
        true
    }));
    let (prepared, batch, graph, _, s, a, b, c, d) = all.unwrap();
    drop((prepared, batch));
    graph.launch(&s).unwrap();
    s.synchronize(PATIENCE).unwrap();
    works(&a, &b, 2);
    works(&c, &d, 3);
}

/// CUDA does not work in a child, and what was made with it is the parent's.
#[test]
fn child_gives_nothing_back_to_cuda() {
    const CALLS: [&str; 5] = [
        "cuMemFree",
        "cuDevicePrimaryCtxRelease",
        "cuCtxPushCurrent",
        "cuMemHostUnregister",
        "cuStreamDestroy",
    ];
    own_process!();
    let control = Control::take();
    // Of one nothing but the GPU itself.
    let (gpu, bare) = (crate::simulated::gpu(0).unwrap(), crate::simulated::gpu(1).unwrap());
    let on_gpu = |q: QpBuilder| if is_device_named() { q } else { q.on_gpu(&gpu, OnGpu::all()) };
    let (mapped, side) = (gpu.alloc(4096).unwrap(), Side::new(&hca(), 64, on_gpu));
    let mut all = Some((side, mapped, gpu, bare));
    assert!(in_child(|| {
        let before = CALLS.map(|name| control.calls(name));
        drop(all.take());
        // Nor does a thread begin that would.
        let is_alone = std::fs::read_dir("/proc/self/task").unwrap().count() == 1;
        is_alone && before == CALLS.map(|name| control.calls(name))
    }));
    let (side, mapped, gpu, bare) = all.unwrap();
    drop((side, mapped, bare));
    gpu.reclaim(PATIENCE).unwrap();
    assert!(CALLS[..2].iter().all(|name| control.calls(name) > 0), "the parent does");
}
