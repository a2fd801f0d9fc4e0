//! A forked child of a rank can neither use nor harm the job of its parent.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::exit;

use gdsync_testkit::process::{self, End};
use mp::collective::{Collectives, Reduction};
use mp::tagged::Tagged;
use mp::{Communicator, Error};

use crate::common::{DONE, LONG, bytes, host_buffer, is_part_of, message, myself, stream, succeeds};
use crate::shm_fifo::open;

/// Runs `child` in a forked child; whether it returned, and true.
fn in_child(child: impl FnOnce() -> bool) -> bool {
    process::in_child(|| catch_unwind(AssertUnwindSafe(child)).unwrap_or(false)) == End::Said(true)
}

fn is_refused<T>(result: Result<T, Error>) -> bool {
    let Err(Error::Device(cause) | Error::Message { cause, .. }) = result else { return false };
    matches!(cause, gdsync::Error::OtherProcess { caller, .. } if caller == std::process::id())
}

#[test]
fn forked_children_leave_the_job_alone() {
    const NAME: &str = "forked_children_leave_the_job_alone";
    if !is_part_of(NAME) {
        return succeeds(&mut myself(NAME));
    }
    let comm = Communicator::builder().spawn(2).timeout(LONG).init().unwrap();
    let (me, peer) = (comm.rank(), 1 - comm.rank());
    let (buffer, s) = (host_buffer(&comm, 16_384), stream("parent"));
    let tagged = Tagged::new(&comm, LONG).unwrap();
    let collectives = Collectives::new(&comm, LONG).unwrap();
    let window = comm.window(&buffer, 48..64, LONG).unwrap();
    open(&comm, &buffer);
    // Its message comes when the children have ended.
    let received = comm.irecv(&buffer, 8..16, peer).unwrap();
    buffer.memory().write(0, &message(me, peer, 1, 8)).unwrap();
    let check = || assert_eq!(bytes(&buffer, 8..16), message(peer, me, 1, 8));
    let calls: [(&str, &dyn Fn() -> bool); 18] = [
        ("barrier", &|| is_refused(comm.barrier(LONG))),
        ("exchange", &|| is_refused(comm.exchange(b"child", LONG))),
        ("isend", &|| is_refused(comm.isend(&buffer, 0..8, peer))),
        ("irecv", &|| is_refused(comm.irecv(&buffer, 16..24, peer))),
        ("test", &|| is_refused(received.test())),
        ("wait", &|| is_refused(received.wait(LONG)) && is_refused(comm.wait(&received, LONG))),
        ("a stream's send", &|| is_refused(comm.isend_on_stream(&s, &buffer, 0..8, peer))),
        ("a stream's wait", &|| is_refused(comm.wait_on_stream(&s, &received))),
        ("finalize", &|| is_refused(comm.clone().finalize(LONG))),
        ("shrink", &|| is_refused(comm.shrink(LONG))),
        ("window", &|| is_refused(comm.window(&buffer, 32..48, LONG))),
        ("Collectives::new", &|| is_refused(Collectives::new(&comm, LONG))),
        ("a collective", &|| is_refused(collectives.allreduce::<u64>(&buffer, 16..24, Reduction::Sum, LONG))),
        ("Tagged::new", &|| is_refused(Tagged::new(&comm, LONG))),
        ("a tagged send", &|| is_refused(tagged.isend(&buffer, 0..8, peer, 1))),
        ("Tagged::destroy", &|| is_refused(tagged.clone().destroy(LONG))),
        ("check", &|| is_refused(comm.check(peer))),
        ("progress", &|| {
            comm.progress();
            tagged.progress();
            comm.give_up(peer).is_ok()
        }),
    ];
    for (what, call) in calls {
        assert!(in_child(call), "{what}");
    }
    let mut all = Some((window, collectives, tagged, comm));
    assert!(in_child(|| {
        drop(all.take());
        true
    }));
    assert!(in_child(|| is_refused(all.take().unwrap().0.destroy(LONG))));
    assert!(in_child(|| is_refused(all.take().unwrap().1.destroy(LONG))));
    let (window, collectives, tagged, comm) = all.unwrap();
    comm.barrier(LONG).unwrap();
    let sent = comm.isend(&buffer, 0..8, peer).unwrap();
    received.wait(LONG).unwrap();
    sent.wait(LONG).unwrap();
    check();
    let sent = tagged.isend(&buffer, 0..8, peer, 1).unwrap();
    tagged.irecv(&buffer, 8..16, peer, 1).unwrap().wait(LONG).unwrap();
    sent.wait(LONG).unwrap();
    check();
    collectives.barrier(LONG).unwrap();
    tagged.destroy(LONG).unwrap();
    collectives.destroy(LONG).unwrap();
    window.destroy(LONG).unwrap();
    comm.finalize(LONG).unwrap();
    if me == 0 {
        exit(DONE);
    }
}
