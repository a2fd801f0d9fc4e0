//! Outstanding receives that overlap in memory.

use std::ops::Range;

use mp::tagged::{Source, Tag, Tagged};
use mp::{Communicator, Error, IntraHostPath, Registration};

use crate::common::{LONG, buffer, job_test, says, stream, until};

/// Checks that a receive is refused for the sake of an outstanding one.
#[track_caller]
fn overlaps<T: std::fmt::Debug>(result: mp::Result<T>, other: Range<usize>) {
    let error = result.unwrap_err();
    says(&error, &["rank", &format!("{other:?}"), "Communicator::irecv_on_stream", "wait_on_stream"]);
    assert!(
        matches!(&error, Error::OverlappingReceives { other_range, .. } if *other_range == other),
        "{error:?}"
    );
}

/// Sends 8 bytes to the own rank, and receives them into `range` once that is free.
fn exchange(comm: &Communicator, buffer: &Registration, range: Range<usize>) -> mp::Request {
    let mut received = None;
    until("the memory is free", || match comm.irecv(buffer, range.clone(), comm.rank()) {
        Ok(request) => received.insert(request).rank() == comm.rank(),
        Err(Error::OverlappingReceives { .. }) => false,
        Err(error) => panic!("{error}"),
    });
    comm.wait(&comm.isend(buffer, 0..8, comm.rank()).unwrap(), LONG).unwrap();
    received.unwrap()
}

// The overlap may be of other ranks, other registrations and parts of a message.
job_test!(overlapping_receives_are_refused, 2, |comm| {
    let (own, peer, buffer) = (comm.rank(), 1 - comm.rank(), buffer(comm, 128));
    let received = comm.irecv(&buffer, 32..64, peer).unwrap();
    for range in [0..33, 63..64, 40..50, 32..64, 0..128] {
        overlaps(comm.irecv(&buffer, range, own), 32..64);
    }
    let (part, again) = (buffer.slice(48, 40).unwrap(), comm.register(buffer.memory()).unwrap());
    overlaps(comm.irecv(&part, 0..40, peer), 32..64);
    overlaps(comm.irecv(&again, 0..40, peer), 32..64);
    overlaps(comm.irecv_vectored(&[(&buffer, 0..8), (&buffer, 56..72)], peer), 32..64);
    // Of the refused ones nothing is left, and of those that are taken no more than their bytes is.
    let error = comm.irecv_vectored(&[(&buffer, 0..8), (&buffer, 4..12)], peer).unwrap_err();
    says(&error, &[&format!("rank {peer}"), "0..8", "4..12"]);
    let beside = [0..32, 64..128].map(|range| comm.irecv(&buffer, range, peer).unwrap());
    let empty = comm.irecv(&buffer, 40..40, peer).unwrap();
    comm.barrier(LONG).unwrap();
    for len in [32, 32, 64, 0] {
        comm.wait(&comm.isend(&again, 0..len, peer).unwrap(), LONG).unwrap();
    }
    let all = [&received, &beside[0], &beside[1], &empty];
    let lens: Vec<_> = comm.wait_all(all, LONG).unwrap().iter().map(|status| status.bytes).collect();
    assert_eq!(lens, [32, 32, 64, 0]);
    comm.barrier(LONG).unwrap();
});

/// Memory is free again when its message is there, whoever has seen that.
fn complete_receives_free_their_memory(comm: &Communicator) {
    let (buffer, s) = (buffer(comm, 64), stream("receiver"));
    for n in 0..100 {
        let received = exchange(comm, &buffer, 8..16);
        match n % 4 {
            0 => _ = comm.wait(&received, LONG).unwrap(),
            1 => until("the message is here", || received.test().unwrap().is_some()),
            2 => {
                comm.wait_on_stream(&s, &received).unwrap();
                s.synchronize(LONG).unwrap();
            }
            // Nobody waits for it.
            _ => drop(received),
        }
    }
}

job_test!(complete_receives_free_their_memory_in_queues, 1, complete_receives_free_their_memory);

job_test!(
    complete_receives_free_their_memory_without_a_watchdog,
    1,
    Communicator::builder().intra_host(IntraHostPath::Queues).watch(false),
    complete_receives_free_their_memory
);

// What is given up does not come any more.
job_test!(lost_receives_free_their_memory, 2, |comm| {
    let buffer = buffer(comm, 64);
    if comm.rank() == 0 {
        let lost = comm.irecv(&buffer, 0..8, 1).unwrap();
        comm.give_up(1).unwrap();
        assert!(comm.wait(&lost, LONG).is_err());
        comm.wait(&exchange(comm, &buffer, 0..8), LONG).unwrap();
    }
});

job_test!(
    receives_may_overlap_where_the_program_says_so,
    1,
    Communicator::builder().allow_overlap(true),
    |comm| {
        let buffer = buffer(comm, 64);
        let received = [(); 2].map(|()| comm.irecv(&buffer, 8..16, 0).unwrap());
        for request in &received {
            comm.wait(&comm.isend(&buffer, 0..8, 0).unwrap(), LONG).unwrap();
            comm.wait(request, LONG).unwrap();
        }
    }
);

job_test!(overlapping_tagged_receives_are_refused, 1, |comm| {
    let (buffer, tagged) = (buffer(comm, 1 << 16), Tagged::new(comm, LONG).unwrap());
    // Eager, and read by RDMA.
    for len in [8, 1 << 14] {
        let received = tagged.irecv(&buffer, 0..len, Source::Any, Tag::Any).unwrap();
        overlaps(tagged.irecv(&buffer, 4..12, 0, 7), 0..len);
        assert!(tagged.irecv(&buffer, len..len + 8, 0, 8).unwrap().cancel());
        assert!(tagged.irecv(&buffer, len..len + 8, 0, 8).unwrap().cancel(), "the memory is free again");
        let sent = tagged.isend(&buffer, 1 << 15..(1 << 15) + len, 0, 7).unwrap();
        tagged.wait_all([&received, &sent], LONG).unwrap();
        assert!(tagged.irecv(&buffer, 4..12, 0, 7).unwrap().cancel());
    }
});
