//! Requests and registrations that are dropped while their messages are under way.

use std::fmt;
use std::process::exit;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::common::{DONE, LONG, buffer, bytes, gpu, job_test, mapped, message, says, stream, until};
use gdsync::memory::Memory;
use gdsync::stream::{Batch, Cond, HostStreamConfig, Stream};
use mp::tagged::Tagged;
use mp::{Communicator, Error, Exchange};

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
    let grown = mapped().saturating_sub(before);
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
        let mut batch = Batch::new();
        let _taken_back = comm.isend_in_batch(&mut batch, &registration, 0..8, peer).unwrap();
        drop(batch);
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

/// Another communicator of the same ranks, which started no processes: it can be finalized more than once.
fn beside(comm: &Communicator) -> Communicator {
    Communicator::builder().timeout(LONG).init_over(comm.clone()).unwrap()
}

fn unfinished(comm: &Communicator, timeout: Duration, texts: &[&str]) {
    let error = comm.clone().finalize(timeout).unwrap_err();
    assert!(matches!(error, Error::Unfinished { .. }), "{error}");
    says(&error.to_string(), texts);
}

job_test!(finalize_names_messages_that_nobody_receives, 2, |comm| {
    let (me, comm) = (comm.rank(), beside(comm));
    let memory = buffer(&comm, 1 << 14);
    if me == 0 {
        let sends = [64, 10000].map(|len| comm.isend(&memory, 0..len, 1).unwrap());
        unfinished(&comm, LONG, &["2 sends to rank 1 (64, 10000 bytes) not received there"]);
        // Nothing is lost.
        comm.wait_all(&sends, LONG).unwrap();
    } else {
        comm.clone().finalize(LONG).unwrap();
        for len in [64, 10000] {
            let received = comm.irecv(&memory, 0..len, 0).unwrap();
            assert_eq!(comm.wait(&received, LONG).unwrap().bytes, len);
        }
    }
    comm.finalize(LONG).unwrap();
});

job_test!(finalize_names_messages_in_the_fifo, 2, |comm| {
    let (me, comm) = (comm.rank(), beside(comm));
    let memory = buffer(&comm, 128);
    for _ in 0..100 {
        comm.sendrecv((&memory, 0..8), 1 - me, (&memory, 64..72), 1 - me, LONG).unwrap();
    }
    comm.barrier(LONG).unwrap();
    let (before, _) = comm.fifo_messages(1 - me).unwrap();
    let sends: Vec<_> = (0..3).map(|_| comm.isend(&memory, 0..8, 1 - me).unwrap()).collect();
    let (sent, _) = comm.fifo_messages(1 - me).unwrap();
    let by_fifo = comm.exchange(&[u8::from(sent == before + 3)], LONG).unwrap();
    let has_fifo = by_fifo.iter().all(|by_fifo| by_fifo[..] == [1]);
    if has_fifo {
        unfinished(&comm, LONG, &["3 messages from rank ", " (8, 8, 8 bytes) not received here"]);
    }
    for _ in 0..3 {
        let received = comm.irecv(&memory, 64..72, 1 - me).unwrap();
        assert_eq!(comm.wait(&received, LONG).unwrap().bytes, 8);
    }
    comm.wait_all(&sends, LONG).unwrap();
    comm.finalize(LONG).unwrap();
});

/// Calls `before` once, before its next exchange.
#[derive(Clone)]
struct Hooked {
    comm: Communicator,
    before: Arc<Mutex<Option<Hook>>>,
}

type Hook = Box<dyn FnOnce() + Send>;

impl fmt::Debug for Hooked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Hooked")
    }
}

impl Exchange for Hooked {
    fn rank(&self) -> usize {
        self.comm.rank()
    }

    fn size(&self) -> usize {
        self.comm.size()
    }

    fn allgather(&mut self, bytes: &[u8], timeout: Duration) -> mp::Result<Vec<Vec<u8>>> {
        // Not in the condition: it may set another one.
        let before = self.before.lock().unwrap().take();
        if let Some(before) = before {
            before();
        }
        self.comm.exchange(bytes, timeout)
    }
}

// The other rank is in finalize already, and sends no more once this one is.
job_test!(finalize_names_messages_that_come_while_it_waits, 2, |base| {
    let (me, exchange) = (base.rank(), Hooked { comm: base.clone(), before: Arc::default() });
    let comm = Communicator::builder().timeout(LONG).init_over(exchange.clone()).unwrap();
    let memory = buffer(&comm, 128);
    for _ in 0..100 {
        comm.sendrecv((&memory, 0..8), 1 - me, (&memory, 64..72), 1 - me, LONG).unwrap();
    }
    let is_by_fifo = Arc::new(AtomicBool::new(false));
    let (base, sender, sends, by_fifo) = (base.clone(), comm.clone(), memory.clone(), is_by_fifo.clone());
    *exchange.before.lock().unwrap() = Some(Box::new(move || {
        base.barrier(LONG).unwrap();
        if me == 0 {
            let (before, _) = sender.fifo_messages(1).unwrap();
            drop(sender.isend(&sends, 0..8, 1).unwrap());
            by_fifo.store(sender.fifo_messages(1).unwrap().0 > before, Ordering::Relaxed);
        }
    }));
    let result = comm.clone().finalize(LONG);
    let has_fifo = comm.exchange(&[u8::from(is_by_fifo.load(Ordering::Relaxed))], LONG).unwrap()[0] == [1];
    match result {
        Err(error) if me == 1 && has_fifo => {
            says(&error, &["1 message from rank 0 (8 bytes) not received here"]);
        }
        other => assert!(other.is_ok() == (me == 0) || !has_fifo, "{other:?}"),
    }
    let received = (me == 1).then(|| comm.irecv(&memory, 64..72, 0).unwrap());
    received.iter().for_each(|received| _ = comm.wait(received, LONG).unwrap());
    comm.finalize(LONG).unwrap();
});

job_test!(finalize_notices_ranks_in_another_call, 2, |comm| {
    let result = match comm.rank() {
        0 => comm.clone().finalize(LONG),
        _ => comm.exchange(b"x", LONG).map(drop),
    };
    let error = result.unwrap_err();
    assert!(matches!(error, Error::Bootstrap { .. }), "{error}");
    let what = [
        "rank 1: it is in exchange, and rank 0 in finalize",
        "rank 0: it is in finalize, and this rank in exchange",
    ];
    says(&error, &[what[comm.rank()]]);
    // Nothing is left to meet in.
    exit(if comm.rank() == 0 { DONE } else { 0 });
});

job_test!(finalize_waits_for_streams_and_names_them, 2, |comm| {
    let (me, comm) = (comm.rank(), beside(comm));
    let (peer, memory, s) = (1 - me, buffer(&comm, 256), stream("late"));
    let gate = Memory::alloc(4).unwrap().word32(0).unwrap();
    memory.memory().write(0, &message(me, peer, 0, 64)).unwrap();
    s.wait_value32(&gate, 1, Cond::Eq).unwrap();
    comm.sendrecv_on_stream(&s, (&memory, 0..64), peer, (&memory, 128..192), peer).unwrap();
    let rank = format!("rank {peer}");
    comm.barrier(LONG).unwrap();
    // All ranks wait for the shortest timeout of any; a quarter of it is for meeting again.
    let timeout = if me == 0 { LONG } else { Duration::from_secs(6) };
    unfinished(&comm, timeout, &["work of a stream that waits for", &rank, "(64 bytes)"]);
    comm.barrier(LONG).unwrap();
    gate.store(1);
    comm.clone().finalize(LONG).unwrap();
    assert!(bytes(&memory, 128..192) == message(peer, me, 0, 64), "it waits");
});

job_test!(finalize_waits_for_nothing_that_no_stream_has_got, 2, |comm| {
    let (peer, comm) = (1 - comm.rank(), beside(comm));
    let (memory, s, mut batch) = (buffer(&comm, 64), stream("captured"), Batch::new());
    let channel = comm.channel(peer, &[(&memory, 0..8)], LONG).unwrap();
    let held = format!(
        "unfinished: a capture that has not ended, or a batch not submitted, has work with rank {peer}; "
    );
    let capture = s.begin_capture().unwrap();
    channel.post_recv_on_stream(&s).unwrap();
    unfinished(&comm, LONG, &[&held]);
    drop(capture);
    let _void = comm.isend_in_batch(&mut batch, &memory, 8..16, peer).unwrap();
    unfinished(&comm, LONG, &[&held]);
    drop(batch);
    comm.finalize(LONG).unwrap();
});

// Its failure is nowhere else: nobody synchronizes.
job_test!(finalize_names_streams_that_give_up_meanwhile, 2, |base| {
    let exchange = Hooked { comm: base.clone(), before: Arc::default() };
    let comm = Communicator::builder().timeout(LONG).init_over(exchange.clone()).unwrap();
    if base.rank() == 1 {
        return comm.finalize(LONG).unwrap();
    }
    let memory = buffer(&comm, 64);
    let config = HostStreamConfig { wait_limit: Duration::from_millis(50), ..HostStreamConfig::default() };
    let (s, go) = (Stream::host(config).unwrap(), Arc::new(AtomicBool::new(false)));
    let (begins, sender, before) = (go.clone(), comm.clone(), exchange.before.clone());
    s.host_fn(move || until("finalize does not come", || begins.load(Ordering::Relaxed))).unwrap();
    comm.send_on_stream(&s, &memory, 0..8, 1).unwrap();
    // Before the second exchange it is known what is under way.
    let hook: Hook = Box::new(move || {
        go.store(true, Ordering::Relaxed);
        until("it still waits", || sender.check(1).is_err());
    });
    *exchange.before.lock().unwrap() = Some(Box::new(move || *before.lock().unwrap() = Some(hook)));
    unfinished(&comm, LONG, &["messages with rank 1: ", "waited 50 ms for a receive of rank 1 (message 1)"]);
});

job_test!(finalize_names_tagged_messages_that_nobody_receives, 2, |comm| {
    let (me, comm) = (comm.rank(), beside(comm));
    let (tagged, memory) = (Tagged::new(&comm, LONG).unwrap(), buffer(&comm, 64));
    if me == 0 {
        for tag in 0..2 {
            tagged.isend(&memory, 0..8, 1, tag).unwrap().wait(LONG).unwrap();
        }
    }
    comm.barrier(LONG).unwrap();
    drop(tagged);
    let left =
        ["2 tagged messages to rank 1 not received there", "2 tagged messages from rank 0 not received here"];
    unfinished(&comm, LONG, &[left[me]]);
});

// As ever: no message was meant for it.
job_test!(finalize_drops_receives_without_a_message, 2, |comm| {
    let memory = buffer(comm, 64);
    drop(comm.irecv(&memory, 0..64, 1 - comm.rank()).unwrap());
});

// At once, also through a clone.
job_test!(nothing_starts_after_finalize, 2, |comm| {
    let peer = 1 - comm.rank();
    let over = Communicator::builder().timeout(LONG).init_over(comm.clone()).unwrap();
    let (memory, s, tagged) = (buffer(&over, 64), stream("late"), Tagged::new(&over, LONG).unwrap());
    let channel = over.channel(peer, &[(&memory, 0..8)], LONG).unwrap();
    let capture = s.begin_capture().unwrap();
    channel.post_recv_on_stream(&s).unwrap();
    _ = channel.isend_on_stream(&s, &memory, 8..16).unwrap();
    _ = channel.wait_recv_on_stream(&s).unwrap();
    let graph = capture.end().unwrap();
    graph.launch(&s).unwrap();
    s.synchronize(LONG).unwrap();
    over.clone().finalize(LONG).unwrap();
    let refused = |error: Error| says(&error, &["after Communicator::finalize; finalize last"]);
    says(&over.isend(&memory, 0..8, peer).unwrap_err(), &[&format!("send to rank {peer}: a message ")]);
    refused(over.isend(&memory, 0..8, peer).unwrap_err());
    refused(over.irecv(&memory, 0..8, peer).unwrap_err());
    refused(over.isend_on_stream(&s, &memory, 0..8, peer).unwrap_err());
    refused(over.irecv_on_stream(&s, &memory, 0..8, peer).unwrap_err());
    refused(tagged.isend(&memory, 0..8, peer, 1).unwrap_err());
    refused(tagged.irecv(&memory, 0..8, peer, 1).unwrap_err());
    refused(graph.launch(&s).unwrap_err().into());
    refused(over.barrier(LONG).unwrap_err());
    refused(Tagged::new(&over, LONG).unwrap_err());
    refused(over.channel(peer, &[(&memory, 0..8)], LONG).unwrap_err());
    refused(over.window(&memory, 0..8, LONG).unwrap_err());
    s.synchronize(LONG).unwrap();
});
