//! Requests and registrations that are dropped while their messages are under way.

use crate::common::{LONG, buffer, bytes, gpu, job_test, mapped, message, stream, until};
use gdsync::memory::Memory;
use mp::Communicator;

job_test!(dropped_requests_still_arrive, 2, |comm| {
    let (me, peer) = (comm.rank(), 1 - comm.rank());
    let (outbox, inbox, s) = (buffer(comm, 2 << 16), buffer(comm, 2 << 16), stream("dropping"));
    drop(comm.irecv(&inbox, 0..1 << 16, peer).unwrap());
    let last = comm.irecv(&inbox, 1 << 16..2 << 16, peer).unwrap();
    for n in 0..2 {
        outbox.memory().write(n << 16, &message(me, peer, n, 1 << 16)).unwrap();
    }
    drop(comm.isend_on_stream(&s, &outbox, 0..1 << 16, peer).unwrap());
    drop(comm.isend_on_stream(&s, &outbox, 1 << 16..2 << 16, peer).unwrap());
    comm.wait(&last, LONG).unwrap();
    for n in 0..2 {
        assert!(bytes(&inbox, n << 16..(n + 1) << 16) == message(peer, me, n, 1 << 16), "message {n}");
    }
    s.synchronize(LONG).unwrap();
});

// 10,000 messages without a wait: the queues must not stay full, and nothing may be lost.
job_test!(dropped_requests_are_recycled, 2, Communicator::builder().depth(64), |comm| {
    const COUNT: usize = 10_000;
    let (me, peer) = (comm.rank(), 1 - comm.rank());
    let (outbox, inbox) = (buffer(comm, COUNT), buffer(comm, COUNT));
    outbox.memory().write(0, &message(me, peer, 0, COUNT)).unwrap();
    for n in 0..COUNT {
        drop(comm.irecv(&inbox, n..n + 1, peer).unwrap());
        drop(comm.isend(&outbox, n..n + 1, peer).unwrap());
    }
    let expected = message(peer, me, 0, COUNT);
    until("messages are lost", || {
        comm.progress();
        bytes(&inbox, 0..COUNT) == expected
    });
});

// Streams wait, and the requests are dropped: buffers are released while the streams go on.
job_test!(dropped_requests_of_streams_release_their_buffers, 2, Communicator::builder().depth(64), |comm| {
    const SIZE: usize = 1 << 20;
    let (peer, s) = (1 - comm.rank(), stream("recycling"));
    let before = mapped();
    for n in 1..=5000 {
        // Never touched, so that it costs address space only.
        let once = buffer(comm, SIZE);
        let received = comm.irecv(&once, 0..8, peer).unwrap();
        comm.send_on_stream(&s, &once, 8..16, peer).unwrap();
        comm.wait_on_stream(&s, &received).unwrap();
        drop(received);
        if n % 50 == 0 {
            s.synchronize(LONG).unwrap();
        }
    }
    // A queue of buffers each way, and some for the allocator: not 5000.
    let grown = mapped() - before;
    // CUDA reserves address space of its own.
    assert!(gpu().is_some() || grown < 400 * SIZE, "{grown} bytes of buffers are held");
});

// A dead key would break the connection.
job_test!(registrations_are_held_until_their_messages_are_complete, 2, |comm| {
    let peer = 1 - comm.rank();
    let memory = Memory::alloc(1 << 16).unwrap();
    for n in 0..10 {
        let start = n % 2 == comm.rank();
        let registration = comm.register(&memory).unwrap();
        if start {
            memory.write(0, &message(comm.rank(), peer, n, 1 << 16)).unwrap();
            let request = comm.isend(&registration, 0..1 << 16, peer).unwrap();
            drop(registration);
            assert_eq!(request.test().unwrap(), None, "the peer receives after the barrier");
            comm.barrier(LONG).unwrap();
            comm.wait(&request, LONG).unwrap();
        } else {
            comm.barrier(LONG).unwrap();
            let request = comm.irecv(&registration, 0..1 << 16, peer).unwrap();
            drop(registration);
            comm.wait(&request, LONG).unwrap();
            assert!(memory.to_vec() == message(peer, comm.rank(), n, 1 << 16));
        }
        comm.barrier(LONG).unwrap();
    }
});

// Two messages of one buffer: taking the newer one back must not unpin it for the older one.
job_test!(taken_back_messages_do_not_unpin_earlier_ones, 2, |comm| {
    const SIZE: usize = 1 << 16;
    let peer = 1 - comm.rank();
    let memory = Memory::alloc(SIZE).unwrap();
    let registration = comm.register(&memory).unwrap();
    if comm.rank() == 0 {
        memory.write(0, &message(0, 1, 0, SIZE)).unwrap();
        let sent = comm.isend(&registration, 0..SIZE, peer).unwrap();
        drop(comm.prepare_send(&registration, 0..8, peer).unwrap());
        drop(registration);
        comm.progress();
        assert_eq!(sent.test().unwrap(), None, "the peer receives after the barrier");
        comm.barrier(LONG).unwrap();
        comm.wait(&sent, LONG).unwrap();
    } else {
        comm.barrier(LONG).unwrap();
        let received = comm.irecv(&registration, 0..SIZE, peer).unwrap();
        comm.wait(&received, LONG).unwrap();
        assert!(memory.to_vec() == message(0, 1, 0, SIZE));
    }
});
