//! Messages between processes, sent and awaited by the CPU.

use std::time::Duration;

use crate::common::{LONG, buffer, bytes, job_test, message, says, stream, until};
use mp::{Communicator, Status};

/// From no byte to many packets.
const SIZES: [usize; 9] = [0, 1, 7, 64, 4095, 4096, 4097, 70_000, 1 << 20];

/// Every rank sends messages of all sizes to every rank, itself included.
fn all_pairs(comm: &Communicator) {
    let (me, all) = (comm.rank(), comm.size());
    for (n, len) in SIZES.into_iter().enumerate() {
        let slot = len.max(1);
        let (outbox, inbox) = (buffer(comm, all * slot), buffer(comm, all * slot));
        let range = |rank: usize| rank * slot..rank * slot + len;
        for peer in 0..all {
            outbox.memory().write(peer * slot, &message(me, peer, n, len)).unwrap();
        }
        let received: Vec<_> = (0..all).map(|peer| comm.irecv(&inbox, range(peer), peer).unwrap()).collect();
        let sent: Vec<_> = (0..all).map(|peer| comm.isend(&outbox, range(peer), peer).unwrap()).collect();
        let expected: Vec<_> = (0..all).map(|rank| Status { rank, bytes: len, tag: 0 }).collect();
        assert_eq!(comm.wait_all(&received, LONG).unwrap(), expected, "received, {len} bytes");
        assert_eq!(comm.wait_all(&sent, LONG).unwrap(), expected, "sent, {len} bytes");
        for peer in 0..all {
            assert!(bytes(&inbox, range(peer)) == message(peer, me, n, len), "{len} bytes of rank {peer}");
            assert_eq!((received[peer].rank(), sent[peer].rank()), (peer, peer));
        }
    }
}

job_test!(ranks_exchange_all_sizes, [1, 2, 3, 5], all_pairs);

job_test!(requests_are_pending_until_their_message_arrives, 2, |comm| {
    let buffer = buffer(comm, 64);
    if comm.rank() == 0 {
        let received = comm.irecv(&buffer, 0..64, 1).unwrap();
        assert_eq!(received.test().unwrap(), None, "rank 1 sends after the barrier");
        let error = received.wait(std::time::Duration::from_millis(5)).unwrap_err();
        assert!(
            matches!(error, mp::Error::Message { rank: 1, cause: gdsync::Error::Deadline { .. }, .. }),
            "{error}"
        );
        comm.barrier(LONG).unwrap();
        until("the message does not come", || received.test().unwrap().is_some());
        let status = Status { rank: 1, bytes: 5, tag: 0 };
        assert_eq!(received.test().unwrap(), Some(status), "as often as one asks");
        assert_eq!(received.clone().wait(LONG).unwrap(), status);
        assert_eq!(comm.wait(&received, LONG).unwrap(), status);
    } else {
        buffer.memory().write(10, b"hello").unwrap();
        comm.barrier(LONG).unwrap();
        comm.wait(&comm.isend(&buffer, 10..15, 0).unwrap(), LONG).unwrap();
    }
    comm.barrier(LONG).unwrap();
    if comm.rank() == 0 {
        assert_eq!(bytes(&buffer, 0..6), b"hello\0");
    }
});

job_test!(sends_wait_for_late_receives, 2, |comm| {
    let buffer = buffer(comm, 1 << 16);
    if comm.rank() == 0 {
        buffer.memory().write(0, &message(0, 1, 0, 1 << 16)).unwrap();
        let sent = comm.isend(&buffer, 0..1 << 16, 1).unwrap();
        until("the receiver is asked", || comm.context().stats().wqes > 0);
        assert_eq!(sent.test().unwrap(), None, "nobody receives");
        comm.barrier(LONG).unwrap();
        comm.wait(&sent, LONG).unwrap();
    } else {
        comm.barrier(LONG).unwrap();
        // Longer than the retry interval of the sender.
        std::thread::sleep(std::time::Duration::from_millis(20));
        let received = comm.irecv(&buffer, 0..1 << 16, 0).unwrap();
        assert_eq!(comm.wait(&received, LONG).unwrap(), Status { rank: 0, bytes: 1 << 16, tag: 0 });
        assert!(bytes(&buffer, 0..1 << 16) == message(0, 1, 0, 1 << 16));
    }
});

// More messages than the queues are deep; all requests are kept and tested at the end.
job_test!(requests_outlive_the_queue_depth, 2, Communicator::builder().depth(8), |comm| {
    const COUNT: usize = 500;
    let (me, peer) = (comm.rank(), 1 - comm.rank());
    let (outbox, inbox) = (buffer(comm, 8 * COUNT), buffer(comm, 8 * COUNT));
    let length = |n: usize| n % 9;
    let (mut received, mut sent) = (Vec::new(), Vec::new());
    for n in 0..COUNT {
        outbox.memory().write(8 * n, &message(me, peer, n, length(n))).unwrap();
        received.push(comm.irecv(&inbox, 8 * n..8 * n + 8, peer).unwrap());
        sent.push(comm.isend(&outbox, 8 * n..8 * n + length(n), peer).unwrap());
    }
    for (n, (sent, received)) in sent.iter().zip(&received).enumerate() {
        let expected = Status { rank: peer, bytes: length(n), tag: 0 };
        assert_eq!(comm.wait(received, LONG).unwrap(), expected, "receive {n}");
        assert_eq!(comm.wait(sent, LONG).unwrap(), expected, "send {n}");
        assert_eq!(sent.test().unwrap(), Some(expected));
        assert_eq!(bytes(&inbox, 8 * n..8 * n + expected.bytes), message(peer, me, n, expected.bytes));
    }
});

job_test!(
    more_messages_than_the_depth_are_refused_while_none_is_received,
    2,
    Communicator::builder().depth(5),
    |comm| {
        let buffer = buffer(comm, 64);
        let (peer, first) = (1 - comm.rank(), comm.rank() == 0);
        if first {
            let sent: Vec<_> = (0..5).map(|_| comm.isend(&buffer, 0..8, peer).unwrap()).collect();
            for timeout in [Duration::ZERO, Duration::from_millis(30)] {
                let error = comm.with_timeout(timeout).isend(&buffer, 0..8, peer).unwrap_err();
                says(&error, &["rank 1", "5 of 5"]);
                says(&error, &["wait for requests, or raise CommunicatorBuilder::depth"]);
            }
            comm.barrier(LONG).unwrap();
            comm.wait_all(&sent, LONG).unwrap();
            comm.wait(&comm.isend(&buffer, 0..8, peer).unwrap(), LONG).unwrap();
        } else {
            comm.barrier(LONG).unwrap();
            for _ in 0..6 {
                comm.wait(&comm.irecv(&buffer, 0..8, peer).unwrap(), LONG).unwrap();
            }
        }
    }
);

job_test!(four_threads_share_a_communicator, 2, |comm| {
    const COUNT: usize = 500;
    let (me, peer) = (comm.rank(), 1 - comm.rank());
    // Threads of a rank race for the order of messages, so each message has its number.
    let seen = std::sync::Mutex::new(vec![0; 4 * COUNT]);
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let (comm, seen) = (comm.clone(), &seen);
            scope.spawn(move || {
                let buffer = buffer(&comm, 16);
                for i in 0..COUNT {
                    let n = thread * COUNT + i;
                    buffer.memory().write(0, &n.to_le_bytes()).unwrap();
                    let received = comm.irecv(&buffer, 8..16, peer).unwrap();
                    let sent = comm.isend(&buffer, 0..8, peer).unwrap();
                    assert_eq!(comm.wait(&received, LONG).unwrap(), Status { rank: peer, bytes: 8, tag: 0 });
                    comm.wait(&sent, LONG).unwrap();
                    let word = bytes(&buffer, 8..16);
                    let came = usize::from_le_bytes(*word.first_chunk().unwrap());
                    seen.lock().unwrap()[came] += 1;
                }
            });
        }
    });
    assert!(seen.into_inner().unwrap().iter().all(|&count| count == 1), "rank {me}: each came once");
});

job_test!(exchanges_and_barriers_work, 3, |comm| {
    let all = comm.exchange(&message(comm.rank(), 0, 0, 10 * comm.rank()), LONG).unwrap();
    let expected: Vec<_> = (0..3).map(|rank| message(rank, 0, 0, 10 * rank)).collect();
    assert_eq!(all, expected);
    comm.barrier(LONG).unwrap();
    let pids = [1, 2].map(|rank| comm.child(rank));
    assert_eq!(pids.map(|pid| pid.is_some()), [comm.rank() == 0; 2], "only rank 0 has children");
    assert_eq!(comm.child(0), None);
    assert_eq!(comm.child(3), None);
});

// Both send first: neither waits for ever. In a ring of the own rank, too.
job_test!(ranks_send_and_receive_at_once, 3, |comm| {
    let (me, size) = (comm.rank(), comm.size());
    let (buffer, s) = (buffer(comm, 128), stream("exchange"));
    for n in 0..20 {
        let (left, right) = ((me + size - n % size) % size, (me + n) % size);
        buffer.memory().write(0, &message(me, right, n, 64)).unwrap();
        let (send, receive) = ((&buffer, 0..64), (&buffer, 64..128));
        if n < 10 {
            let received = comm.sendrecv(send, right, receive, left, LONG).unwrap();
            assert_eq!(received, Status { rank: left, bytes: 64, tag: 0 });
        } else {
            comm.sendrecv_on_stream(&s, send, right, receive, left).unwrap();
            s.synchronize(LONG).unwrap();
        }
        assert_eq!(bytes(&buffer, 64..128), message(left, me, n, 64));
    }
});

job_test!(sendrecv_refuses_ranges_that_overlap, 2, |comm| {
    let (peer, buffer, s) = (1 - comm.rank(), buffer(comm, 128), stream("exchange"));
    let part = buffer.slice(32, 64).unwrap();
    let refused =
        [(&buffer, 0..64, &buffer, 0..64), (&buffer, 8..9, &buffer, 0..64), (&buffer, 0..40, &part, 0..16)];
    for (out, send, into, receive) in refused {
        let words =
            [&format!("sendrecv to rank {peer}"), &format!("{send:?}"), &format!("{receive:?}"), "overlap"];
        let error = comm.sendrecv((out, send.clone()), peer, (into, receive.clone()), peer, LONG);
        says(&error.unwrap_err(), &words);
        says(&comm.sendrecv_on_stream(&s, (out, send), peer, (into, receive), peer).unwrap_err(), &words);
    }
    comm.sendrecv((&buffer, 32..64), peer, (&part, 32..64), peer, LONG).unwrap();
});

job_test!(a_second_init_says_so, 2, |comm| {
    // At once, also in the ranks that were started.
    let error = Communicator::builder().timeout(LONG).init().unwrap_err();
    says(&error, &["launch: this process has joined its job already; use that Communicator"]);
    comm.barrier(LONG).unwrap();
});

job_test!(waits_without_a_timeout_take_that_of_the_communicator, 2, |comm| {
    let (peer, buffer) = (1 - comm.rank(), buffer(comm, 16));
    let received = comm.irecv(&buffer, 0..8, peer).unwrap();
    let soon = comm.with_timeout(Duration::from_millis(30));
    says(&soon.wait(&received, None).unwrap_err(), &["not complete within 30 ms"]);
    let late = soon.wait_all([&received], Duration::from_millis(20)).unwrap_err();
    says(&late, &["not complete within 20 ms"]);
    comm.barrier(None).unwrap();
    let sent = comm.isend(&buffer, 8..16, peer).unwrap();
    comm.wait_all([&sent, &received], None).unwrap();
});

// The count of the queue is not that of the messages where some came through the FIFO.
job_test!(late_sends_say_what_they_wait_for, 2, |comm| {
    let (peer, buffer) = (1 - comm.rank(), buffer(comm, 20_000));
    for _ in 0..100 {
        comm.sendrecv((&buffer, 0..8), peer, (&buffer, 64..72), peer, LONG).unwrap();
    }
    let sent = comm.isend(&buffer, 0..10_000, peer).unwrap();
    let error = comm.wait(&sent, Duration::from_millis(30)).unwrap_err().to_string();
    says(&error, &["not complete within 30 ms", "post one there (Communicator::irecv)"]);
    assert!(!comm.path(peer).unwrap().has_fifo() || !error.contains("has posted "), "{error}");
    comm.barrier(LONG).unwrap();
    let received = comm.irecv(&buffer, 10_000..20_000, peer).unwrap();
    comm.wait_all([&received, &sent], LONG).unwrap();
});
