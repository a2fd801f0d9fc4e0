//! Credits: messages of streams never meet a missing receive. Prepared and vectored messages.

use std::time::{Duration, Instant};

use crate::common::{LONG, buffer, bytes, job_test, message, says, send_and_wait, stream, until};
use gdsync::stream::{Batch, Stream};
use mp::{
    Communicator, CommunicatorBuilder, Error, IntraHostPath, Registration, Request, Rma, Signal, Status,
};

/// How long a stream is watched not to go on.
const HELD: Duration = Duration::from_millis(30);

/// Messages of 8 bytes from rank 0 to rank 1, each in a cell of its own.
fn send_on_stream(comm: &Communicator, s: &Stream, buffer: &Registration, count: usize) -> Vec<Request> {
    let send = |n: usize| {
        buffer.memory().write(n * 8, &message(0, 1, n, 8)).unwrap();
        comm.isend_on_stream(s, buffer, n * 8..n * 8 + 8, 1).unwrap()
    };
    (0..count).map(send).collect()
}

job_test!(a_stream_waits_for_receives, 2, |comm| {
    const COUNT: usize = 40;
    let (buffer, s) = (buffer(comm, COUNT * 8), stream("sender"));
    let slot = |n: usize| n * 8..n * 8 + 8;
    if comm.rank() == 0 {
        let sent = send_on_stream(comm, &s, &buffer, COUNT);
        assert!(matches!(s.synchronize(HELD), Err(gdsync::Error::Deadline { .. })), "nobody receives");
        comm.barrier(LONG).unwrap();
        s.synchronize(LONG).unwrap();
        comm.wait_all(&sent, LONG).unwrap();
    } else {
        comm.barrier(LONG).unwrap();
        for n in 0..COUNT {
            let received = comm.irecv(&buffer, slot(n), 0).unwrap();
            assert_eq!(comm.wait(&received, LONG).unwrap(), Status { rank: 0, bytes: 8, tag: 0 });
            assert_eq!(bytes(&buffer, slot(n)), message(0, 1, n, 8), "{n}");
        }
        assert_eq!(comm.context().stats().rnr_naks, 0, "no message came before its receive");
    }
    comm.barrier(LONG).unwrap();
});

job_test!(messages_of_batches_are_sent_when_submitted, 2, |comm| {
    let (buffer, s) = (buffer(comm, 64), stream("batches"));
    let slot = |n: usize| n * 8..n * 8 + 8;
    if comm.rank() == 0 {
        let batch = |n: usize| {
            let mut batch = Batch::new();
            let sent = comm.isend_in_batch(&mut batch, &buffer, slot(n), 1).unwrap();
            (batch, sent)
        };
        let [(mut first, sent), second, third] = [0, 1, 2].map(batch);
        comm.barrier(LONG).unwrap();
        // The buffer is read when they are sent.
        for n in 0..8 {
            buffer.memory().write(n * 8, &message(0, 1, n, 8)).unwrap();
        }
        assert_eq!(sent.test().unwrap(), None);
        s.submit(&mut first).unwrap();
        // The newest are taken back, and free their places.
        drop(third);
        drop(second);
        let [(mut one, sent_one), (mut other, sent_other)] = [1, 2].map(batch);
        s.submit(&mut one).unwrap();
        s.submit(&mut other).unwrap();
        let [late, (mut early, _)] = [4, 5].map(batch);
        let error = s.submit(&mut early).unwrap_err();
        assert!(matches!(without_rank(&error), gdsync::Error::OutOfOrder { .. }), "{error}");
        assert!(
            error.to_string().contains("an earlier message was prepared or added to a batch, and is not")
        );
        drop(early);
        drop(late);
        let (mut last, sent_last) = batch(3);
        s.submit(&mut last).unwrap();
        comm.wait_all([&sent, &sent_one, &sent_other, &sent_last], LONG).unwrap();
        s.synchronize(LONG).unwrap();
    } else {
        let received: Vec<_> = (0..4).map(|n| comm.irecv(&buffer, slot(n), 0).unwrap()).collect();
        comm.barrier(LONG).unwrap();
        comm.wait_all(&received, LONG).unwrap();
        for n in 0..4 {
            assert_eq!(bytes(&buffer, slot(n)), message(0, 1, n, 8), "{n}");
        }
    }
    comm.barrier(LONG).unwrap();
});

/// What failed, of the connection to a rank.
fn without_rank(error: &gdsync::Error) -> &gdsync::Error {
    match error {
        gdsync::Error::Rank { reason, .. } => reason,
        other => other,
    }
}

job_test!(messages_are_vectored, 2, Communicator::builder().max_pieces(5), |comm| {
    let (one, two) = (buffer(comm, 4096), buffer(comm, 4096));
    let whole = message(0, 1, 7, 3000);
    let s = stream("pieces");
    if comm.rank() == 0 {
        one.memory().write(1000, &whole[..700]).unwrap();
        two.memory().write(5, &whole[700..701]).unwrap();
        one.memory().write(0, &whole[701..1001]).unwrap();
        two.memory().write(2000, &whole[1001..]).unwrap();
        let pieces = [(&one, 1000..1700), (&two, 5..6), (&one, 9..9), (&one, 0..300), (&two, 2000..3999)];
        comm.wait(&comm.isend_vectored(&pieces, 1).unwrap(), LONG).unwrap();
        let mut batch = Batch::new();
        let sent = [(); 2].map(|()| comm.isend_vectored_in_batch(&mut batch, &pieces, 1).unwrap());
        s.submit(&mut batch).unwrap();
        comm.wait_all(&sent, LONG).unwrap();
        let error = comm.isend_vectored(&vec![(&one, 0..1); 6], 1).unwrap_err();
        assert!(matches!(error, Error::Message { rank: 1, .. }), "{error}");
        says(&error, &["max_pieces"]);
        comm.wait(&comm.isend_vectored(&[], 1).unwrap(), LONG).unwrap();
    } else {
        let pieces = [(&two, 100..1100), (&one, 0..2000)];
        for by_stream in [false, false, true] {
            let received = match by_stream {
                true => {
                    let mut batch = Batch::new();
                    let received = comm.irecv_vectored_in_batch(&mut batch, &pieces, 0).unwrap();
                    s.submit(&mut batch).unwrap();
                    received
                }
                false => comm.irecv_vectored(&pieces, 0).unwrap(),
            };
            assert_eq!(comm.wait(&received, LONG).unwrap().bytes, 3000);
            assert!(bytes(&two, 100..1100) == whole[..1000] && bytes(&one, 0..2000) == whole[1000..]);
        }
        let empty = comm.irecv_vectored(&[], 0).unwrap();
        assert_eq!(comm.wait(&empty, LONG).unwrap().bytes, 0);
    }
    comm.barrier(LONG).unwrap();
});

/// What was received into a cell, read without a call.
fn is_here(buffer: &Registration, n: usize) -> bool {
    bytes(buffer, n * 8..n * 8 + 8) == message(0, 1, n, 8)
}

// The receiver makes no calls: the stream of its peer goes on.
job_test!(single_receives_are_announced_at_once, 2, unwatched(), |comm| {
    let (buffer, s) = (buffer(comm, 5 * 8), stream("lonely"));
    for n in 0..5 {
        let slot = n * 8..n * 8 + 8;
        if comm.rank() == 0 {
            buffer.memory().write(n * 8, &message(0, 1, n, 8)).unwrap();
            let sent = send_and_wait(comm, &s, &buffer, slot, 1);
            s.synchronize(LONG).unwrap();
            comm.wait(&sent, LONG).unwrap();
        } else {
            let received = comm.irecv(&buffer, slot, 0).unwrap();
            until("the message comes", || is_here(&buffer, n));
            comm.wait(&received, LONG).unwrap();
        }
    }
    comm.barrier(LONG).unwrap();
});

/// Of three receives in a row the third is held back; only `go_on` announces it.
fn held_back(comm: &Communicator, go_on: impl Fn(&Request)) {
    let (all, told, s) = (buffer(comm, 3 * 8), buffer(comm, 8), stream("held back"));
    let slot = |n: usize| n * 8..n * 8 + 8;
    let window = comm.window(&told, 0..8, LONG).unwrap();
    if comm.rank() == 0 {
        let send = |n: usize| {
            all.memory().write(n * 8, &message(0, 1, n, 8)).unwrap();
            send_and_wait(comm, &s, &all, slot(n), 1)
        };
        let sent: Vec<_> = (0..3).map(send).collect();
        comm.wait_all(&sent[..2], LONG).unwrap();
        assert!(matches!(s.synchronize(HELD), Err(gdsync::Error::Deadline { .. })), "the third is held");
        window.start(&Rma::signal(1, Signal::set(0, 1))).unwrap().wait(LONG).unwrap();
        s.synchronize(LONG).unwrap();
        comm.wait_all(&sent, LONG).unwrap();
    } else {
        let received: Vec<_> = (0..3).map(|n| comm.irecv(&all, slot(n), 0).unwrap()).collect();
        let word = window.word64(0).unwrap();
        until("the sender sees that it is held", || word.load() == 1);
        assert!(is_here(&all, 0) && is_here(&all, 1) && !is_here(&all, 2));
        go_on(&received[2]);
        until("the third comes", || is_here(&all, 2));
        comm.wait_all(&received, LONG).unwrap();
    }
    comm.barrier(LONG).unwrap();
}

fn unwatched() -> CommunicatorBuilder {
    Communicator::builder().watch(false)
}

job_test!(progress_announces_held_back_receives, 2, unwatched(), |comm| {
    held_back(comm, |_| comm.progress());
});

job_test!(waits_announce_held_back_receives, 2, unwatched(), |comm| {
    held_back(comm, |last| _ = comm.wait(last, LONG).unwrap());
});

job_test!(waits_of_requests_announce_held_back_receives, 2, unwatched(), |comm| {
    held_back(comm, |last| _ = last.wait(LONG).unwrap());
});

job_test!(waits_on_streams_announce_held_back_receives, 2, unwatched(), |comm| {
    let s = stream("waiting");
    held_back(comm, |last| comm.wait_on_stream(&s, last).unwrap());
});

/// Work requests of this rank so far: receives that are posted are none.
fn work_requests(comm: &Communicator) -> u64 {
    comm.context().stats().wqes
}

// Only the watchdog announces receives that the peer does not wait for.
job_test!(
    only_the_watchdog_announces_to_ranks_without_sending_streams,
    2,
    Communicator::builder().intra_host(IntraHostPath::Queues),
    |comm| {
        const COUNT: usize = 300;
        let (peer, buffer) = (1 - comm.rank(), buffer(comm, 8 * (COUNT + 1)));
        let (start, before) = (Instant::now(), work_requests(comm));
        let received: Vec<_> =
            (1..=COUNT).map(|n| comm.irecv(&buffer, 8 * n..8 * n + 8, peer).unwrap()).collect();
        let (posted, looks) = (work_requests(comm) - before, start.elapsed().as_millis());
        assert!(u128::from(posted) <= looks + 1, "{posted} announcements in {looks} ms");
        for _ in 0..COUNT {
            comm.wait(&comm.isend(&buffer, 0..8, peer).unwrap(), LONG).unwrap();
        }
        comm.wait_all(&received, LONG).unwrap();
        comm.barrier(LONG).unwrap();
    }
);

// Also with a watchdog, once a stream of the sender has sent something.
job_test!(
    receives_are_announced_at_once_to_sending_streams,
    2,
    Communicator::builder().intra_host(IntraHostPath::Queues),
    |comm| {
        const COUNT: usize = 20;
        let (buffer, s) = (buffer(comm, 16), stream("sender"));
        let mut told = 0;
        for _ in 0..COUNT {
            if comm.rank() == 0 {
                let sent = send_and_wait(comm, &s, &buffer, 0..8, 1);
                s.synchronize(LONG).unwrap();
                comm.wait(&sent, LONG).unwrap();
                comm.barrier(LONG).unwrap();
            } else {
                let before = work_requests(comm);
                let received = comm.irecv(&buffer, 8..16, 0).unwrap();
                // Another thread may run the HCA, and count it a little later.
                told += usize::from(work_requests(comm) > before);
                comm.wait(&received, LONG).unwrap();
                comm.barrier(LONG).unwrap();
            }
        }
        assert!(comm.rank() == 0 || told >= COUNT / 2, "{told} of {COUNT} receives were announced at once");
    }
);

// The receiver makes no calls.
job_test!(the_watchdog_announces_held_back_receives, 2, |comm| {
    const COUNT: usize = 100;
    let (buffer, s) = (buffer(comm, COUNT * 8), stream("watched"));
    let slot = |n: usize| n * 8..n * 8 + 8;
    if comm.rank() == 0 {
        let sent = send_on_stream(comm, &s, &buffer, COUNT);
        s.synchronize(LONG).unwrap();
        comm.wait_all(&sent, LONG).unwrap();
    } else {
        let received: Vec<_> = (0..COUNT).map(|n| comm.irecv(&buffer, slot(n), 0).unwrap()).collect();
        until("all messages come", || (0..COUNT).all(|n| is_here(&buffer, n)));
        comm.wait_all(&received, LONG).unwrap();
        assert_eq!(comm.context().stats().rnr_naks, 0, "no message came before its receive");
    }
    comm.barrier(LONG).unwrap();
});
