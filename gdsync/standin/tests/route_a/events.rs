//! Asynchronous events.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use gdsync::mlx5::{Payload, RemoteAddr, SendOp, Syndrome};
use rdma_core_sys::verbs::*;

use crate::client::{Bed, Buffer, PATIENCE, errno, pair};

/// Makes the descriptor of events non-blocking, as pollers do.
fn unblock(bed: &Bed) {
    // SAFETY: the context is open.
    let fd = unsafe { (*bed.context).async_fd };
    // SAFETY: it is an open descriptor.
    let flags = unsafe { libc::fcntl(fd, libc::F_GETFL) };
    // SAFETY: as above.
    assert_eq!(unsafe { libc::fcntl(fd, libc::F_SETFL, flags | libc::O_NONBLOCK) }, 0);
}

fn next(bed: &Bed) -> Option<ibv_async_event> {
    let mut event = ibv_async_event::zeroed();
    // SAFETY: the context is open.
    let result = unsafe { bed.lib.verbs.ibv_get_async_event(bed.context, &raw mut event) };
    if result != 0 {
        assert_eq!(errno(), libc::EAGAIN);
    }
    (result == 0).then_some(event)
}

fn wait(bed: &Bed) -> ibv_async_event {
    let end = Instant::now() + PATIENCE;
    loop {
        if let Some(event) = next(bed) {
            return event;
        }
        assert!(Instant::now() < end, "no event came");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Has a peer write where it may not.
fn offend(bed: &Bed) -> (crate::client::Queue, crate::client::Queue, Buffer) {
    let (mut a, b) = pair(bed);
    let buffer = Buffer::new(bed, 64);
    let remote = RemoteAddr { rkey: buffer.key ^ 1, ..buffer.remote(0) };
    a.post(&SendOp::Write { remote, payload: Payload::Sges(&[buffer.sge(0, 8)]), imm: None });
    assert_eq!(a.send_cq.wait().syndrome, Syndrome::REM_ACCESS_ERR);
    (a, b, buffer)
}

#[test]
fn a_forbidden_access_is_told_to_its_victim() {
    let bed = Bed::new();
    unblock(&bed);
    assert!(next(&bed).is_none());
    let (a, b, buffer) = offend(&bed);
    let mut event = wait(&bed);
    assert_eq!(event.event_type, ibv_event_type::IBV_EVENT_QP_ACCESS_ERR);
    // SAFETY: an event of this type names a queue pair.
    assert_eq!(unsafe { event.element.qp }, b.raw);
    assert!(next(&bed).is_none(), "the one who did it has a completion, no event");

    // A queue pair that goes waits for this.
    let done = AtomicBool::new(false);
    let address = event.element;
    std::thread::scope(|scope| {
        let done = &done;
        // SAFETY: as above.
        let victim = unsafe { address.qp }.addr();
        let verbs = &bed.lib.verbs;
        scope.spawn(move || {
            // SAFETY: nothing else uses it but its event.
            assert_eq!(unsafe { verbs.ibv_destroy_qp(victim as *mut ibv_qp) }, 0);
            done.store(true, Ordering::Release);
        });
        std::thread::sleep(Duration::from_millis(200));
        assert!(!done.load(Ordering::Acquire), "it waits for the acknowledgement");
        // SAFETY: it is the event just got.
        unsafe { verbs.ibv_ack_async_event(&raw mut event) };
    });
    assert!(done.load(Ordering::Acquire));
    for cq in [b.send_cq.raw, b.recv_cq.raw] {
        // SAFETY: nothing uses it any more.
        assert_eq!(unsafe { bed.lib.verbs.ibv_destroy_cq(cq) }, 0);
    }
    a.destroy(&bed);
    bed.deregister(buffer.mr);
    bed.close();
}

#[test]
fn events_of_what_is_gone_are_gone() {
    let bed = Bed::new();
    unblock(&bed);
    let (a, b, buffer) = offend(&bed);
    b.destroy(&bed);
    std::thread::sleep(Duration::from_millis(50));
    assert!(next(&bed).is_none());
    a.destroy(&bed);
    bed.deregister(buffer.mr);
    bed.close();
}
