//! Requests of all kinds together: the first that is complete, functions, and the descriptor of an event loop.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use mp::tagged::{Source, Tagged};
use mp::{AnyRequest, Communicator, Error, Registration, RequestSet, Rma, Status, wait_any};
use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags, poll};

use crate::common::{LONG, buffer, job_test, says, until};

/// Whether a descriptor can be read, at once or within the patience of a test.
fn is_readable(set: &RequestSet, waits: bool) -> bool {
    let limit = rustix::event::Timespec { tv_sec: if waits { 120 } else { 0 }, tv_nsec: 0 };
    let fd = set.event_fd();
    poll(&mut [PollFd::new(&fd.as_fd(), PollFlags::IN)], Some(&limit)).unwrap() == 1
}

job_test!(whichever_is_complete_first, 2, |comm| {
    let peer = 1 - comm.rank();
    let (tagged, memory) = (Tagged::new(comm, LONG).unwrap(), buffer(comm, 4096));
    let window = comm.window(&memory, 2048..4096, LONG).unwrap();
    let late = tagged.irecv(&memory, 0..8, peer, 1).unwrap();
    let plain = comm.irecv(&memory, 8..16, peer).unwrap();
    let put = window.start(&Rma::put(&memory, 512..520, peer, 0)).unwrap();
    let error = wait_any(&[&late, &plain], Duration::ZERO).unwrap_err();
    says(&error, &["waiting for one of 2 operations"]);
    comm.barrier(LONG).unwrap();
    let all: [&dyn AnyRequest; 3] = [&late, &plain, &put];
    let (which, outcome) = wait_any(&all, LONG).unwrap();
    assert_eq!((which, outcome.unwrap()), (2, Status { rank: peer, bytes: 8, tag: 0 }));
    comm.barrier(LONG).unwrap();
    comm.isend(&memory, 512..517, peer).map(drop).unwrap();
    let (which, outcome) = wait_any(&all[..2], LONG).unwrap();
    assert_eq!((which, outcome.unwrap()), (1, Status { rank: peer, bytes: 5, tag: 0 }));
    assert!(late.cancel());
    let (which, outcome) = wait_any(&all[..1], LONG).unwrap();
    assert!(which == 0 && matches!(outcome, Err(Error::Cancelled)));
    tagged.destroy(LONG).unwrap();
});

/// Ping-pong by functions, each of which starts the next message.
fn play(set: &Arc<RequestSet>, tagged: &Tagged, memory: &Registration, peer: usize, left: usize) {
    let receive = tagged.irecv(memory, 64..128, Source::Any, 3).unwrap();
    tagged.isend(memory, 0..64, peer, 3).map(drop).unwrap();
    let again = (Arc::downgrade(set), tagged.clone(), memory.clone());
    set.add(receive, move |outcome| {
        assert_eq!(outcome.unwrap(), Status { rank: peer, bytes: 64, tag: 3 });
        let (set, tagged, memory) = again;
        if let Some(set) = set.upgrade().filter(|_| left > 1) {
            play(&set, &tagged, &memory, peer, left - 1);
        }
    });
}

job_test!(functions_are_called_and_the_descriptor_wakes_a_loop, 2, |comm| {
    let peer = 1 - comm.rank();
    let (tagged, memory) = (Tagged::new(comm, LONG).unwrap(), buffer(comm, 4096));
    let set = Arc::new(RequestSet::new().unwrap());
    assert!(set.is_empty() && set.progress() == 0 && !is_readable(&set, false));
    play(&set, &tagged, &memory, peer, 100);
    let mut calls = 0;
    while !set.is_empty() {
        calls += set.progress();
        if !set.is_empty() && set.arm().unwrap() {
            assert!(is_readable(&set, true));
        }
    }
    assert_eq!(calls, 100);
    comm.barrier(LONG).unwrap();
    tagged.destroy(LONG).unwrap();
});

fn complete(comm: &Communicator, memory: &Registration) -> mp::Request {
    let me = comm.rank();
    let receive = comm.irecv(memory, 0..8, me).unwrap();
    comm.isend(memory, 8..16, me).map(drop).unwrap();
    receive
}

job_test!(arming_tells_what_is_complete_already, 1, |comm| {
    let (set, memory) = (RequestSet::new().unwrap(), buffer(comm, 64));
    let order = Arc::new(Mutex::new(Vec::new()));
    // Added after the set was armed.
    assert!(set.arm().unwrap());
    for n in 0..2 {
        let order = order.clone();
        set.add(complete(comm, &memory), move |outcome| order.lock().push((n, outcome.unwrap().bytes)));
    }
    assert!(is_readable(&set, true));
    until("both are complete", || !set.arm().unwrap());
    assert!(order.lock().is_empty(), "progress alone calls functions");
    until("both are called", || {
        set.progress();
        set.is_empty()
    });
    assert_eq!(order.lock()[..], [(0, 8), (1, 8)]);
    assert!(!is_readable(&set, false), "progress clears it");
    // It ends while it is armed, with what is in it.
    let (dropped, counter) = (Arc::new(AtomicUsize::new(0)), comm.irecv(&memory, 0..8, 0).unwrap());
    let seen = dropped.clone();
    set.add(counter, move |_| _ = seen.fetch_add(1, Ordering::Relaxed));
    assert!(set.arm().unwrap());
    drop(set);
    assert_eq!((dropped.load(Ordering::Relaxed), Arc::strong_count(&dropped)), (0, 1));
    comm.isend(&memory, 8..16, 0).map(drop).unwrap();
});
