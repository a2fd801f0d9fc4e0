//! Short messages between CPUs of a host through the shared-memory FIFO, and all the reasons to take the queue pair instead.

use std::collections::VecDeque;
use std::time::Duration;

use crate::common::{
    DONE, LONG, bytes, failed, host_buffer as buffer, is_part_of, job_test, kill, message, myself, says,
    send_and_wait, stream, succeeds, until,
};
use gdsync::cuda::Gpu;
use gdsync::hca::SoftHcaConfig;
use gdsync::mlx5::Syndrome;
use gdsync::stream::Batch;
use gdsync::verbs::Context;
use gdsync_testkit::driver;
use mp::{Communicator, CommunicatorBuilder, Error, IntraHostPath, Registration, Request, Status};

/// So many messages in a row open the FIFO, whatever happened before.
const MANY: usize = 64;

/// Microseconds until a rank is killed.
const DELAY: &str = "GDSYNC_TEST_DELAY";

fn play(comm: &Communicator, buffer: &Registration, n: usize, len: usize) {
    let (me, peer) = (comm.rank(), 1 - comm.rank());
    buffer.memory().write(0, &message(me, peer, n, len)).unwrap();
    let received = comm.irecv(buffer, 8192..8192 + 8192, peer).unwrap();
    let sent = comm.isend(buffer, 0..len, peer).unwrap();
    assert_eq!(comm.wait(&received, LONG).unwrap(), Status { rank: peer, bytes: len, tag: 0 }, "{n}");
    assert_eq!(comm.wait(&sent, LONG).unwrap(), Status { rank: peer, bytes: len, tag: 0 });
    assert!(bytes(buffer, 8192..8192 + len) == message(peer, me, n, len), "{n}");
}

/// Plays until messages in both directions take the FIFO, as both ranks see.
pub(crate) fn open(comm: &Communicator, buffer: &Registration) {
    open_with_receives_ahead(comm, buffer, 0, 0);
}

/// Plays until messages take the FIFO, always with so many receives under way, which are returned.
fn open_with_receives_ahead(
    comm: &Communicator,
    buffer: &Registration,
    ahead: usize,
    turn: usize,
) -> VecDeque<Request> {
    let (me, peer) = (comm.rank(), 1 - comm.rank());
    let place = |n: usize| 8192 + 512 * (n % 8)..8192 + 512 * (n % 8) + 512;
    let receive = |n: usize| comm.irecv(buffer, place(n), peer).unwrap();
    let mut received: VecDeque<_> = (0..ahead).map(receive).collect();
    let len = |n: usize| [8, 56, 57, 500][n % 4];
    let (mut n, before) = (0, comm.fifo_messages(peer).unwrap());
    until("the FIFO opens", || {
        for _ in 0..MANY {
            received.push_back(receive(n + ahead));
            buffer.memory().write(0, &message(me, peer, n + turn, len(n))).unwrap();
            let sent = comm.isend(buffer, 0..len(n), peer).unwrap();
            let status = comm.wait(&received.pop_front().unwrap(), LONG).unwrap();
            assert_eq!(status, Status { rank: peer, bytes: len(n), tag: 0 }, "{n}");
            let came = place(n).start..place(n).start + len(n);
            assert!(bytes(buffer, came) == message(peer, me, n + turn, len(n)), "{n} of turn {turn}");
            comm.wait(&sent, LONG).unwrap();
            n += 1;
        }
        let (sent, received) = comm.fifo_messages(peer).unwrap();
        let open = [u8::from(sent > before.0 && received > before.1)];
        comm.exchange(&open, LONG).unwrap().iter().all(|open| open == &[1])
    });
    received
}

/// FIFO memory that this process has mapped.
fn mapped() -> usize {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    maps.lines().filter(|map| map.contains("/memfd:gdsync-mp-")).count()
}

// The FIFO holds the last message of the queue pair, which must not hold the connection in turn.
job_test!(dropped_communicators_unmap_their_fifos, 2, |comm| {
    let before = mapped();
    let second = Communicator::builder().timeout(LONG).init_over(comm.clone()).unwrap();
    let buffer = buffer(&second, 16384);
    open(&second, &buffer);
    play(&second, &buffer, 0, 8192);
    assert!(mapped() > before);
    // The other rank still waits until its message is acknowledged.
    second.barrier(LONG).unwrap();
    drop((buffer, second));
    assert_eq!(mapped(), before);
});

// A FIFO that opened while receives were under way holds those, too, as later messages wait for them.
job_test!(dropped_communicators_unmap_fifos_with_receives_ahead, 2, |comm| {
    let before = mapped();
    let peer = 1 - comm.rank();
    let second = Communicator::builder().timeout(LONG).init_over(comm.clone()).unwrap();
    let buffer = buffer(&second, 8 * (2 * MANY + 2));
    let receive = |n: usize| second.irecv(&buffer, 8 * n + 8..8 * n + 16, peer).unwrap();
    let mut received: Vec<_> = (0..2 * MANY).map(receive).collect();
    second.barrier(LONG).unwrap();
    let sent: Vec<_> = (0..MANY).map(|_| second.isend(&buffer, 0..8, peer).unwrap()).collect();
    second.wait_all(&sent, LONG).unwrap();
    second.barrier(LONG).unwrap();
    // Both sides want the FIFO by now; the receives of the second half are under way.
    received.push(receive(2 * MANY));
    assert_eq!(received[2 * MANY - 1].test().unwrap(), None);
    second.barrier(LONG).unwrap();
    assert!(mapped() > before);
    drop((sent, received, buffer, second));
    assert_eq!(mapped(), before);
});

// As in queues: whoever has seen that the message is there.
job_test!(complete_receives_of_the_fifo_free_their_memory, 2, |comm| {
    let (peer, buffer) = (1 - comm.rank(), buffer(comm, 16384));
    open(comm, &buffer);
    for n in 0..MANY {
        let received = comm.irecv(&buffer, 8..16, peer).unwrap();
        let sent = comm.isend(&buffer, 0..8, peer).unwrap();
        match n % 2 {
            0 => until("the message is here", || received.test().unwrap().is_some()),
            _ => assert_eq!(comm.wait(&received, LONG).unwrap().bytes, 8),
        }
        comm.wait(&sent, LONG).unwrap();
    }
    comm.barrier(LONG).unwrap();
});

job_test!(messages_of_all_sizes_take_the_fifo_or_do_not, 2, |comm| {
    let buffer = buffer(comm, 16384);
    let path = comm.path(1 - comm.rank()).unwrap();
    assert!(
        path.has_fifo() && path.to_string().contains("short messages through a shared-memory FIFO"),
        "{path}"
    );
    assert!(!comm.path(comm.rank()).unwrap().has_fifo());
    for len in [0, 1, 7, 8, 55, 56, 57, 64, 1000, 4095, 4096] {
        let before = comm.fifo_messages(1 - comm.rank()).unwrap();
        (0..MANY).for_each(|n| play(comm, &buffer, n, len));
        open(comm, &buffer);
        assert!(comm.fifo_messages(1 - comm.rank()).unwrap() > before);
    }
    for n in 0..MANY {
        play(comm, &buffer, n, [8, 4097, 8, 8192][n % 4]);
    }
});

fn without_fifo(local: IntraHostPath) -> CommunicatorBuilder {
    let context = Context::soft(&SoftHcaConfig::default()).unwrap();
    Communicator::builder().context(&context).intra_host(local)
}

fn fifo_is_declined(comm: &Communicator) {
    let buffer = buffer(comm, 16384);
    assert!(!comm.path(1 - comm.rank()).unwrap().has_fifo());
    (0..MANY).for_each(|n| play(comm, &buffer, n, 8));
    assert_eq!(comm.fifo_messages(1 - comm.rank()).unwrap(), (0, 0));
}

job_test!(queues_have_no_fifo, 2, without_fifo(IntraHostPath::Queues), fifo_is_declined);
job_test!(the_device_alone_has_no_fifo, 2, without_fifo(IntraHostPath::Device), fifo_is_declined);

// Without a watchdog a receiver could block the stream of a sender.
job_test!(no_watchdog_means_no_fifo, 2, without_fifo(IntraHostPath::Soft).watch(false), fifo_is_declined);

// Messages without a receive wait in the FIFO, and when it is full in the queue pair.
job_test!(senders_ahead_of_receives_do_not_wait, 2, |comm| {
    const COUNT: usize = 300;
    let all = buffer(comm, COUNT * 64);
    let (me, peer) = (comm.rank(), 1 - comm.rank());
    for round in 0..3 {
        open(comm, &buffer(comm, 16384));
        if me == 0 {
            let send = |n: usize| {
                all.memory().write(n * 64, &message(0, 1, n + round, n % 60)).unwrap();
                comm.isend(&all, n * 64..n * 64 + n % 60, peer).unwrap()
            };
            let sent: Vec<_> = (0..COUNT).map(send).collect();
            comm.barrier(LONG).unwrap();
            comm.wait_all(&sent, LONG).unwrap();
        } else {
            comm.barrier(LONG).unwrap();
            for n in 0..COUNT {
                let received = comm.irecv(&all, n * 64..n * 64 + 64, peer).unwrap();
                assert_eq!(comm.wait(&received, LONG).unwrap(), Status { rank: 0, bytes: n % 60, tag: 0 });
                assert_eq!(bytes(&all, n * 64..n * 64 + n % 60), message(0, 1, n + round, n % 60), "{n}");
            }
        }
        comm.barrier(LONG).unwrap();
    }
});

// Receives are queued in the FIFO, and a stream sends: it needs no call of the receiver.
job_test!(streams_send_while_the_fifo_is_open, 2, |comm| {
    let (peer, s) = (1 - comm.rank(), stream("sender"));
    let buffer = buffer(comm, 16384);
    for round in 0..3 {
        open(comm, &buffer);
        if comm.rank() == 0 {
            comm.barrier(LONG).unwrap();
            buffer.memory().write(0, &message(0, 1, round, 8)).unwrap();
            let sent = send_and_wait(comm, &s, &buffer, 0..8, peer);
            s.synchronize(LONG).unwrap();
            comm.wait(&sent, LONG).unwrap();
        } else {
            let received = comm.irecv(&buffer, 0..8, peer).unwrap();
            comm.barrier(LONG).unwrap();
            // No call of this rank.
            until("the message comes", || bytes(&buffer, 0..8) == message(0, 1, round, 8));
            comm.wait(&received, LONG).unwrap();
        }
        comm.barrier(LONG).unwrap();
    }
});

// A stream waits for a receive of the FIFO: its message is there, comes later, or is behind others.
job_test!(streams_wait_while_the_fifo_is_open, 2, |comm| {
    let (peer, s) = (1 - comm.rank(), stream("receiver"));
    let buffer = buffer(comm, 16384);
    let slot = |n: usize| n * 8..n * 8 + 8;
    for round in 0..9 {
        open(comm, &buffer);
        // Messages that arrive before the stream waits.
        let early = round % 3;
        if comm.rank() == 0 {
            let send = |n: usize| {
                buffer.memory().write(n * 8, &message(0, 1, n + round, 8)).unwrap();
                comm.isend(&buffer, slot(n), peer).unwrap()
            };
            let mut sent: Vec<_> = (0..early).map(send).collect();
            comm.barrier(LONG).unwrap();
            comm.barrier(LONG).unwrap();
            sent.extend((early..3).map(send));
            comm.wait_all(&sent, LONG).unwrap();
        } else {
            buffer.memory().write(0, &[0; 24]).unwrap();
            comm.barrier(LONG).unwrap();
            let received: Vec<_> = (0..3).map(|n| comm.irecv(&buffer, slot(n), peer).unwrap()).collect();
            comm.wait_on_stream(&s, &received[round / 3]).unwrap();
            comm.barrier(LONG).unwrap();
            s.synchronize(LONG).unwrap();
            for n in 0..=round / 3 {
                assert_eq!(bytes(&buffer, slot(n)), message(0, 1, n + round, 8), "{round} {n}");
            }
            comm.wait_all(&received, LONG).unwrap();
        }
        comm.barrier(LONG).unwrap();
    }
});

// The message can be received after a wait that timed out.
job_test!(waits_that_time_out_lose_no_message, 2, |comm| {
    let (peer, buffer) = (1 - comm.rank(), buffer(comm, 16384));
    for limit in [0, 1, 100, 5000].map(Duration::from_micros) {
        open(comm, &buffer);
        if comm.rank() == 0 {
            let received = comm.irecv(&buffer, 0..8, peer).unwrap();
            assert_eq!(received.test().unwrap(), None);
            for error in [comm.wait(&received, limit), received.wait(limit)].map(Result::unwrap_err) {
                assert!(
                    matches!(error, Error::Message { rank: 1, cause: gdsync::Error::Deadline { after, .. }, .. }
                            if after == limit),
                    "{error}"
                );
                says(&error, &["it waits for a message from rank 1 (", "see that the rank sends it"]);
            }
            comm.barrier(LONG).unwrap();
            until("the message comes", || received.test().unwrap().is_some());
            assert_eq!(bytes(&buffer, 0..8), message(1, 0, 3, 8));
        } else {
            comm.barrier(LONG).unwrap();
            buffer.memory().write(0, &message(1, 0, 3, 8)).unwrap();
            comm.wait(&comm.isend(&buffer, 0..8, peer).unwrap(), LONG).unwrap();
        }
    }
});

fn is_given_up(error: &Error) -> bool {
    matches!(error, Error::Message { rank: 1, .. }) && error.to_string().contains("gave the peer up")
}

// A rank that was given up cannot send any more, although the FIFO was open, and nothing is written to failed receives.
job_test!(failed_receives_stay_failed, 2, |comm| {
    let (peer, buffer) = (1 - comm.rank(), buffer(comm, 16384));
    open(comm, &buffer);
    if comm.rank() == 0 {
        buffer.memory().write(0, &[0; 16]).unwrap();
        let received = [0, 8].map(|at| comm.irecv(&buffer, at..at + 8, peer).unwrap());
        comm.give_up(peer).unwrap();
        let error = comm.wait(&received[0], LONG).unwrap_err();
        assert!(is_given_up(&error), "{error}");
        comm.barrier(LONG).unwrap();
        comm.barrier(LONG).unwrap();
        for error in received.map(|received| received.test().unwrap_err()) {
            assert!(is_given_up(&error), "{error}");
        }
        assert_eq!(bytes(&buffer, 0..16), [0; 16]);
    } else {
        comm.barrier(LONG).unwrap();
        buffer.memory().write(0, &[7; 8]).unwrap();
        let before = comm.fifo_messages(peer).unwrap().0;
        let error = comm.isend(&buffer, 0..8, peer).and_then(|sent| comm.wait(&sent, LONG)).unwrap_err();
        says(&error, &[&gdsync::Error::GivenUpByPeer.to_string()]);
        assert_eq!(comm.fifo_messages(peer).unwrap().0, before);
        comm.barrier(LONG).unwrap();
    }
    assert_eq!(comm.lost(), [peer]);
});

job_test!(longer_messages_than_the_receive_end_the_connection, 2, |comm| {
    let (peer, buffer) = (1 - comm.rank(), buffer(comm, 16384));
    open(comm, &buffer);
    if comm.rank() == 0 {
        buffer.memory().write(0, &[0; 16]).unwrap();
        let received = [0..7, 8..16].map(|range| comm.irecv(&buffer, range, peer).unwrap());
        comm.barrier(LONG).unwrap();
        comm.barrier(LONG).unwrap();
        failed(&comm.wait(&received[0], LONG).unwrap_err(), peer, &[Syndrome::LOC_LEN_ERR]);
        failed(&received[0].test().unwrap_err(), peer, &[Syndrome::LOC_LEN_ERR]);
        // Its message would have fitted, but nothing behind the first one is taken.
        failed(&comm.wait(&received[1], LONG).unwrap_err(), peer, &[Syndrome::LOC_LEN_ERR]);
        assert_eq!(bytes(&buffer, 8..16), [0; 8]);
    } else {
        comm.barrier(LONG).unwrap();
        // Through the FIFO they are sent before the error is known.
        let sent = [0..8, 0..8].map(|range| comm.isend(&buffer, range, peer));
        comm.barrier(LONG).unwrap();
        let [first, second] = sent.map(|sent| sent.and_then(|sent| comm.wait(&sent, LONG)));
        let received = comm.irecv(&buffer, 0..8, peer).and_then(|received| comm.wait(&received, LONG));
        for error in [first.err(), second.err(), received.err()].into_iter().flatten() {
            failed(&error, peer, &[Syndrome::REM_INV_REQ_ERR]);
        }
        until("the rank is lost", || comm.lost() == [peer]);
    }
    for error in [comm.isend(&buffer, 0..1, peer), comm.irecv(&buffer, 0..1, peer)].map(Result::unwrap_err) {
        assert!(matches!(&error, Error::Message { rank, .. } if *rank == peer), "{error}");
    }
    assert_eq!(comm.lost(), [peer]);
});

// A rank that posts its next receive before it waits for the last one.
job_test!(the_fifo_opens_while_a_receive_is_always_under_way, 2, |comm| {
    let buffer = buffer(comm, 16384);
    for (turn, ahead) in [1, 2, 7].into_iter().enumerate() {
        let received = open_with_receives_ahead(comm, &buffer, ahead, turn);
        // By streams, so that the next turn starts with a closed FIFO.
        let (peer, s) = (1 - comm.rank(), stream("last"));
        for request in received {
            comm.send_on_stream(&s, &buffer, 0..8, peer).unwrap();
            comm.wait(&request, LONG).unwrap();
        }
        s.synchronize(LONG).unwrap();
        comm.barrier(LONG).unwrap();
    }
});

// A send that is taken back is not counted: both sides agree on the number of messages.
job_test!(taken_back_sends_do_not_count, 2, |comm| {
    let (peer, s, buffer) = (1 - comm.rank(), stream("sender"), buffer(comm, 16384));
    // The stream waits for one receive more than it needs: see `isend_in_batch`.
    let [received, more] = [0, 8].map(|at| comm.irecv(&buffer, 8192 + at..8200 + at, peer).unwrap());
    let [mut first, mut second] = [(); 2].map(|()| Batch::new());
    let _taken_back = comm.isend_in_batch(&mut first, &buffer, 0..8, peer).unwrap();
    let sent = comm.isend_in_batch(&mut second, &buffer, 0..8, peer).unwrap();
    drop(first);
    s.submit(&mut second).unwrap();
    comm.wait(&received, LONG).unwrap();
    comm.wait(&sent, LONG).unwrap();
    s.synchronize(LONG).unwrap();
    let sent = comm.isend(&buffer, 0..8, peer).unwrap();
    comm.wait(&more, LONG).unwrap();
    comm.wait(&sent, LONG).unwrap();
    for request in open_with_receives_ahead(comm, &buffer, 1, 0) {
        let sent = comm.isend(&buffer, 0..8, peer).unwrap();
        comm.wait(&request, LONG).unwrap();
        comm.wait(&sent, LONG).unwrap();
    }
    comm.barrier(LONG).unwrap();
});

/// GPU memory that the CPU does not reach, on the simulated driver.
fn unreached(comm: &Communicator) -> Registration {
    let gpu = Gpu::open_with(driver::api(), 0, None).unwrap();
    let mut addr = 0;
    let current = gpu.enter().unwrap();
    // SAFETY: a place for the answer.
    unsafe { gpu.api().mem_alloc(&mut addr, 4096) }.unwrap();
    drop(current);
    // SAFETY: it is never freed.
    let memory = unsafe { gpu.wrap(addr, 4096) }.unwrap();
    assert!(!memory.is_mapped());
    comm.register(&memory).unwrap()
}

// The message is in the FIFO when its receive turns out to be for memory that only copy engines reach.
job_test!(receives_that_the_cpu_cannot_fill_fail_alone, 2, |comm| {
    let (peer, buffer) = (1 - comm.rank(), buffer(comm, 16384));
    let memory = (comm.rank() == 0).then(|| unreached(comm));
    until("both messages take the FIFO", || {
        open(comm, &buffer);
        // A long wait may have closed the FIFO again.
        let before = comm.fifo_messages(peer).unwrap().0;
        let lens: &[usize] = if comm.rank() == 1 { &[8, 7] } else { &[] };
        let sent: Vec<_> = lens.iter().map(|&len| comm.isend(&buffer, 0..len, peer).unwrap()).collect();
        let taken = comm.fifo_messages(peer).unwrap().0 - before;
        let are_there = comm.exchange(&[u8::from(taken == 2)], LONG).unwrap()[1] == [1];
        if let Some(memory) = &memory {
            let first = if are_there { memory } else { &buffer };
            let received = comm.irecv(first, 0..8, peer).unwrap();
            if are_there {
                for error in [comm.wait(&received, LONG).unwrap_err(), received.test().unwrap_err()] {
                    let is_told = matches!(
                        error,
                        Error::Message { rank: 1, cause: gdsync::Error::NotMapped { .. }, .. }
                    );
                    assert!(is_told, "{error}");
                }
            } else {
                comm.wait(&received, LONG).unwrap();
            }
            let next = comm.irecv(&buffer, 0..8, peer).unwrap();
            assert_eq!(comm.wait(&next, LONG).unwrap().bytes, 7, "the one behind it");
        }
        comm.wait_all(&sent, LONG).unwrap();
        are_there
    });
    assert_eq!(comm.lost(), []);
    open(comm, &buffer);
});

// More receives than the depth are refused; all are used in the end.
job_test!(the_depth_bounds_receives_of_the_fifo, 2, Communicator::builder().depth(9), |comm| {
    let (peer, buffer) = (1 - comm.rank(), buffer(comm, 16384));
    open(comm, &buffer);
    let received: Vec<_> = (0..9).map(|n| comm.irecv(&buffer, n * 8..n * 8 + 8, peer).unwrap()).collect();
    let error = comm.with_timeout(Duration::ZERO).irecv(&buffer, 72..80, peer).unwrap_err();
    says(&error, &["9 of 9"]);
    comm.barrier(LONG).unwrap();
    for n in 0..9 {
        comm.wait(&comm.isend(&buffer, 8192..8192 + n, peer).unwrap(), LONG).unwrap();
    }
    let statuses = comm.wait_all(&received, LONG).unwrap();
    assert_eq!(statuses, (0..9).map(|bytes| Status { rank: peer, bytes, tag: 0 }).collect::<Vec<_>>());
    // Also of a request of long ago.
    (0..MANY).for_each(|n| play(comm, &buffer, n, 8));
    assert_eq!(received[5].test().unwrap(), Some(Status { rank: peer, bytes: 5, tag: 0 }));
});

job_test!(vectored_messages_take_the_fifo, 2, |comm| {
    let (peer, all) = (1 - comm.rank(), buffer(comm, 16384));
    for (round, len) in [(0, 10), (1, 56), (2, 3000)] {
        open(comm, &all);
        let before = comm.fifo_messages(peer).unwrap();
        let whole = message(comm.rank(), peer, round, len);
        all.memory().write(100, &whole[..len / 3]).unwrap();
        all.memory().write(4000, &whole[len / 3..]).unwrap();
        let received = comm.irecv_vectored(&[(&all, 8192..8195), (&all, 12000..16000)], peer).unwrap();
        let pieces = [(&all, 100..100 + len / 3), (&all, 4000..4000 + len - len / 3)];
        let sent = comm.isend_vectored(&pieces, peer).unwrap();
        assert_eq!(comm.wait(&received, LONG).unwrap().bytes, len);
        comm.wait(&sent, LONG).unwrap();
        let came = [bytes(&all, 8192..8195), bytes(&all, 12000..12000 + len - 3)].concat();
        assert_eq!(came, message(peer, comm.rank(), round, len));
        assert!(comm.fifo_messages(peer).unwrap() >= before);
    }
});

/// A rank is killed among messages of the FIFO: a wait of the other one fails.
#[test]
fn dead_ranks_end_waits_at_the_fifo() {
    const NAME: &str = "dead_ranks_end_waits_at_the_fifo";
    if !is_part_of(NAME) {
        return (0..4_u64).for_each(|n| succeeds(myself(NAME).env(DELAY, (n * n * 300).to_string())));
    }
    let comm = Communicator::builder().spawn(2).timeout(LONG).init().unwrap();
    let buffer = buffer(&comm, 16384);
    open(&comm, &buffer);
    let (me, peer) = (comm.rank(), 1 - comm.rank());
    let play = |n: usize| {
        let received = comm.irecv(&buffer, 8192..8200, peer)?;
        buffer.memory().write(0, &message(me, peer, n, 8)).unwrap();
        comm.wait(&comm.isend(&buffer, 0..8, peer)?, LONG)?;
        comm.wait(&received, LONG)?;
        assert_eq!(bytes(&buffer, 8192..8200), message(peer, me, n, 8), "{n}");
        mp::Result::Ok(())
    };
    if me == 1 {
        for n in 0.. {
            play(n).unwrap();
        }
    }
    let pid = comm.child(1).unwrap();
    let delay = Duration::from_micros(std::env::var(DELAY).unwrap().parse().unwrap());
    let killer = std::thread::spawn(move || {
        std::thread::sleep(delay);
        kill(pid);
    });
    let error = (0..).find_map(|n| play(n).err()).unwrap();
    failed(&error, 1, &[Syndrome::RETRY_EXC_ERR]);
    killer.join().unwrap();
    assert_eq!(comm.lost(), [1]);
    for error in [comm.isend(&buffer, 0..1, 1), comm.irecv(&buffer, 0..1, 1)].map(Result::unwrap_err) {
        assert!(matches!(error, Error::Message { rank: 1, .. }), "{error}");
    }
    std::process::exit(DONE);
}
