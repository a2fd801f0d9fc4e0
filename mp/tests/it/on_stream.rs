//! Messages between processes, started and awaited by streams.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::common::{LONG, buffer, bytes, gpu, job_test, message, says, send_and_wait, stream, until};
use gdsync::memory::Memory;
use gdsync::stream::{Batch, Cond, HostStreamConfig, Stream};
use mp::{Communicator, Rma, Status};

/// Rounds that both sides post ahead. A stream of a GPU takes 24 host functions.
const AHEAD: usize = 12;

job_test!(streams_play_ping_pong, 2, |comm| {
    let (me, peer) = (comm.rank(), 1 - comm.rank());
    let (outbox, inbox) = (buffer(comm, 5000), buffer(comm, AHEAD * 5000));
    let s = stream("game");
    let right = Arc::new(AtomicUsize::new(0));
    for round in 0..4 {
        let receive = |i: usize| comm.irecv(&inbox, i * 5000..(i + 1) * 5000, peer).unwrap();
        let received: Vec<_> = (0..AHEAD).map(receive).collect();
        comm.barrier(LONG).unwrap();
        let mut sent = Vec::new();
        for (i, receive) in received.iter().enumerate() {
            let n = round * AHEAD + i;
            let len = 1 + n * 97 % 5000;
            if me == 1 {
                comm.wait_on_stream(&s, receive).unwrap();
            }
            // Written in stream order: the message has what the buffer holds when the stream sends it.
            let memory = outbox.memory().clone();
            s.host_fn(move || memory.write(0, &message(me, peer, n, len)).unwrap()).unwrap();
            sent.push(send_and_wait(comm, &s, &outbox, 0..len, peer));
            if me == 0 {
                comm.wait_on_stream(&s, receive).unwrap();
            }
            let (memory, right) = (inbox.memory().clone(), right.clone());
            s.host_fn(move || {
                let mut came = vec![0; len];
                memory.read(i * 5000, &mut came).unwrap();
                right.fetch_add(usize::from(came == message(peer, me, n, len)), Ordering::Relaxed);
            })
            .unwrap();
        }
        s.synchronize(LONG).unwrap();
        for (i, (sent, received)) in sent.iter().zip(&received).enumerate() {
            let expected = Some(Status { rank: peer, bytes: 1 + (round * AHEAD + i) * 97 % 5000, tag: 0 });
            assert_eq!((sent.test().unwrap(), received.test().unwrap()), (expected, expected));
        }
    }
    assert_eq!(right.load(Ordering::Relaxed), 4 * AHEAD);
});

// A window of a ping-pong is one submission on each side.
job_test!(batches_play_ping_pong, 2, |comm| {
    let (me, peer) = (comm.rank(), 1 - comm.rank());
    let (outbox, inbox) = (buffer(comm, AHEAD * 100), buffer(comm, AHEAD * 100));
    let range = |i: usize| i * 100..(i + 1) * 100;
    let s = stream("batches");
    for round in 0..4 {
        let received: Vec<_> = (0..AHEAD).map(|i| comm.irecv(&inbox, range(i), peer).unwrap()).collect();
        let mut batch = Batch::new();
        let mut sent = Vec::new();
        for (i, receive) in received.iter().enumerate() {
            outbox.memory().write(i * 100, &message(me, peer, round * AHEAD + i, 100)).unwrap();
            if me == 1 {
                comm.wait_in_batch(&mut batch, receive).unwrap();
            }
            sent.push(comm.isend_in_batch(&mut batch, &outbox, range(i), peer).unwrap());
            if me == 0 {
                comm.wait_in_batch(&mut batch, receive).unwrap();
            }
        }
        assert!(received.iter().chain(&sent).all(|r| r.test().unwrap().is_none()), "nothing leaves before");
        comm.barrier(LONG).unwrap();
        s.submit(&mut batch).unwrap();
        s.synchronize(LONG).unwrap();
        comm.wait_all(&sent, LONG).unwrap();
        for i in 0..AHEAD {
            assert!(bytes(&inbox, range(i)) == message(peer, me, round * AHEAD + i, 100), "{round}, {i}");
        }
    }
});

job_test!(batches_are_submitted_in_the_order_of_their_messages, 1, |comm| {
    let (memory, s) = (buffer(comm, 64), stream("order"));
    let received = [0, 8].map(|at| comm.irecv(&memory, at..at + 8, 0).unwrap());
    let mut batches = [Batch::new(), Batch::new()];
    let sent = batches.each_mut().map(|batch| comm.isend_in_batch(batch, &memory, 32..40, 0).unwrap());
    let error = s.submit(&mut batches[1]).unwrap_err();
    says(&error, &["to rank 0: an earlier message was prepared or added to a batch, and is not posted"]);
    batches.iter_mut().for_each(|batch| s.submit(batch).unwrap());
    comm.wait_all(received.iter().chain(&sent), LONG).unwrap();
});

job_test!(messages_longer_than_their_receive_tell_both_lengths_on_streams, 2, |comm| {
    let (memory, s) = (buffer(comm, 64), stream("longer"));
    if comm.rank() == 0 {
        comm.send_on_stream(&s, &memory, 0..16, 1).unwrap();
        says(
            &s.synchronize(LONG).unwrap_err(),
            &["to rank 1: the message of 16 bytes is longer than its receive there"],
        );
    } else {
        comm.recv_on_stream(&s, &memory, 0..8, 0).unwrap();
        says(
            &s.synchronize(LONG).unwrap_err(),
            &["to rank 0: the message is longer than its receive of 8 bytes"],
        );
    }
    comm.barrier(LONG).unwrap();
});

// Messages of a dropped batch are not sent.
job_test!(dropped_batches_do_no_harm, 2, Communicator::builder().depth(16), |comm| {
    let (me, peer) = (comm.rank(), 1 - comm.rank());
    let (outbox, inbox) = (buffer(comm, 64), buffer(comm, 64));
    let s = stream("dropped");
    for n in 0..40 {
        let received = comm.irecv(&inbox, 0..64, peer).unwrap();
        outbox.memory().write(0, &message(me, peer, n, 64)).unwrap();
        let mut dropped = Batch::new();
        let _taken_back = comm.isend_in_batch(&mut dropped, &outbox, 0..32, peer).unwrap();
        comm.wait_in_batch(&mut dropped, &received).unwrap();
        drop(dropped);
        let mut batch = Batch::new();
        let sent = comm.isend_in_batch(&mut batch, &outbox, 0..64, peer).unwrap();
        comm.wait_in_batch(&mut batch, &received).unwrap();
        comm.wait_in_batch(&mut batch, &sent).unwrap();
        s.submit(&mut batch).unwrap();
        s.synchronize(LONG).unwrap();
        assert_eq!(received.test().unwrap(), Some(Status { rank: peer, bytes: 64, tag: 0 }));
        assert!(bytes(&inbox, 0..64) == message(peer, me, n, 64), "message {n}");
        comm.progress();
    }
});

/// One stream sends to all and waits for all in one submission, itself included.
fn all_to_all(comm: &Communicator) {
    let (me, all) = (comm.rank(), comm.size());
    let (outbox, inbox) = (buffer(comm, all * 10_000), buffer(comm, all * 10_000));
    let s = stream("all");
    for n in 0..20 {
        let range = |rank: usize| rank * 10_000..rank * 10_000 + 10 + n * 500;
        let received: Vec<_> = (0..all).map(|peer| comm.irecv(&inbox, range(peer), peer).unwrap()).collect();
        let memory = outbox.memory().clone();
        let sent: Vec<_> = (0..all)
            .map(|peer| {
                let (memory, range) = (memory.clone(), range(peer));
                s.host_fn(move || memory.write(range.start, &message(me, peer, n, range.len())).unwrap())
                    .unwrap();
                comm.isend_on_stream(&s, &outbox, peer * 10_000..peer * 10_000 + 10 + n * 500, peer).unwrap()
            })
            .collect();
        comm.wait_all_on_stream(&s, received.iter().chain(&sent)).unwrap();
        s.synchronize(LONG).unwrap();
        for peer in 0..all {
            assert!(
                bytes(&inbox, range(peer)) == message(peer, me, n, 10 + n * 500),
                "from {peer}, round {n}"
            );
            let expected = Some(Status { rank: peer, bytes: 10 + n * 500, tag: 0 });
            assert_eq!((sent[peer].test().unwrap(), received[peer].test().unwrap()), (expected, expected));
        }
    }
    comm.wait_all_on_stream(&s, []).unwrap();
}

job_test!(streams_exchange, [3, 5], all_to_all);

job_test!(sends_are_in_stream_order, 2, |comm| {
    let buffer = buffer(comm, 64);
    if comm.rank() == 1 {
        let received = comm.irecv(&buffer, 0..8, 0).unwrap();
        comm.barrier(LONG).unwrap();
        assert_eq!(received.test().unwrap(), None, "the stream of rank 0 is held");
        comm.barrier(LONG).unwrap();
        comm.wait(&received, LONG).unwrap();
        assert_eq!(bytes(&buffer, 0..8), b"released");
        comm.wait(&comm.irecv(&buffer, 0..8, 0).unwrap(), LONG).unwrap();
        return;
    }
    let s = stream("held");
    let word = buffer.memory().word32(32).unwrap();
    s.wait_value32(&word, 1, Cond::Eq).unwrap();
    buffer.memory().write(0, b"too soon").unwrap();
    let sent = comm.isend_on_stream(&s, &buffer, 0..8, 1).unwrap();
    comm.barrier(LONG).unwrap();
    comm.barrier(LONG).unwrap();
    assert_eq!(sent.test().unwrap(), None);
    let error = comm.isend(&buffer, 0..8, 1).unwrap_err();
    assert!(
        matches!(error, mp::Error::Message { rank: 1, cause: gdsync::Error::Busy { .. }, .. }),
        "the CPU may not overtake the stream: {error}"
    );
    let text = error.to_string();
    assert!(text.contains("wait for its requests") && !text.contains("one QP per stream"), "{text}");
    buffer.memory().write(0, b"released").unwrap();
    word.store(1);
    comm.wait(&sent, LONG).unwrap();
    // The sends of the stream are complete, so that the CPU can send.
    comm.wait(&comm.isend(&buffer, 0..8, 1).unwrap(), LONG).unwrap();
    s.synchronize(LONG).unwrap();
});

// The CPU and two streams alternate on one connection, each waiting for messages of the others too.
job_test!(cpu_and_streams_mix, 2, |comm| {
    let (me, peer) = (comm.rank(), 1 - comm.rank());
    let (outbox, inbox) = (buffer(comm, 4096), buffer(comm, 4096));
    let streams = [stream("one"), stream("two")];
    for n in 0..120 {
        let len = 1 + n * 31 % 4000;
        outbox.memory().write(0, &message(me, peer, n, len)).unwrap();
        let received = comm.irecv(&inbox, 0..4096, peer).unwrap();
        let s = &streams[n / 3 % 2];
        let sent = match n % 3 {
            0 => comm.isend(&outbox, 0..len, peer).unwrap(),
            1 => comm.isend_on_stream(s, &outbox, 0..len, peer).unwrap(),
            _ => send_and_wait(comm, s, &outbox, 0..len, peer),
        };
        if n % 2 == 0 {
            comm.wait_on_stream(s, &received).unwrap();
            s.synchronize(LONG).unwrap();
        }
        assert_eq!(comm.wait(&received, LONG).unwrap(), Status { rank: peer, bytes: len, tag: 0 });
        comm.wait(&sent, LONG).unwrap();
        assert!(bytes(&inbox, 0..len) == message(peer, me, n, len), "message {n}");
        if n % 2 == 1 {
            // A message that the CPU has received does not hold a stream.
            comm.wait_all_on_stream(s, [&received, &sent]).unwrap();
            s.synchronize(LONG).unwrap();
        }
    }
});

// Only streams wait; the requests are tested long after the queues have wrapped.
job_test!(requests_of_streams_outlive_the_queue_depth, 2, Communicator::builder().depth(16), |comm| {
    let peer = 1 - comm.rank();
    let buffer = buffer(comm, 9 * 8);
    let s = stream("round and round");
    let mut requests = Vec::new();
    for n in 0..300 {
        let slot = n % 8 * 8;
        let received = comm.irecv(&buffer, 8 + slot..16 + slot, peer).unwrap();
        requests.push((send_and_wait(comm, &s, &buffer, 0..n % 9, peer), n % 9));
        comm.wait_on_stream(&s, &received).unwrap();
        requests.push((received, n % 9));
        if n % 8 == 7 {
            s.synchronize(LONG).unwrap();
        }
    }
    s.synchronize(LONG).unwrap();
    for (request, bytes) in &requests {
        assert_eq!(request.test().unwrap(), Some(Status { rank: peer, bytes: *bytes, tag: 0 }));
    }
});

// Nothing counts what is under way, and all queues are shorter than the loop.
job_test!(loops_wait_for_room, 2, Communicator::builder().depth(8), |comm| {
    const COUNT: usize = 300;
    let (me, peer) = (comm.rank(), 1 - comm.rank());
    let s = match gpu() {
        Some(_) => stream("short"),
        None => Stream::host(HostStreamConfig { wait_limit: LONG, depth: 8, ..Default::default() }).unwrap(),
    };
    let (outbox, inbox, place) = (buffer(comm, 8 * COUNT), buffer(comm, 8 * COUNT), buffer(comm, 8));
    // Peers do not reach staged GPU memory.
    let exposed = comm.register(&Memory::alloc(8 * COUNT).unwrap()).unwrap();
    outbox.memory().write(0, &message(me, peer, 0, 8 * COUNT)).unwrap();
    let window = comm.window(&exposed, 0..8 * COUNT, LONG).unwrap();
    let channel = comm.channel(peer, &[(&place, 0..8)], LONG).unwrap();
    for n in 0..COUNT {
        let at = 8 * n..8 * n + 8;
        drop(comm.irecv_on_stream(&s, &inbox, at.clone(), peer).unwrap());
        drop(comm.isend_on_stream(&s, &outbox, at.clone(), peer).unwrap());
        drop(window.start_on_stream(&s, &Rma::put(&outbox, at.clone(), peer, at.start)).unwrap());
        channel.post_recv_on_stream(&s).unwrap();
        drop(channel.isend_on_stream(&s, &outbox, at).unwrap());
        drop(channel.wait_recv_on_stream(&s).unwrap());
    }
    s.synchronize(LONG).unwrap();
    window.flush(peer, LONG).unwrap();
    comm.barrier(LONG).unwrap();
    let expected = message(peer, me, 0, 8 * COUNT);
    until("messages are lost", || {
        comm.progress();
        bytes(&inbox, 0..8 * COUNT) == expected
    });
    assert_eq!(bytes(&exposed, 0..8 * COUNT), expected);
    assert_eq!(bytes(&place, 0..8), expected[8 * COUNT - 8..]);
});
