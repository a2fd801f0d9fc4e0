//! Receives in stream order.

use std::process::abort;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use gdsync::cuda::Gpu;
use gdsync::memory::Memory;
use gdsync::stream::{Batch, Cond, CudaStreamConfig, Stream, Via};
use gdsync_testkit::driver;
use mp::{Communicator, Error, IntraHostPath, Registration};

use crate::common::{
    LONG, buffer, bytes, gpu, host_buffer, host_stream, job_test, kill, message, recv_and_wait, says,
    send_and_wait, stream, until,
};
use crate::shm_fifo::open;

/// A CUDA stream: of the GPU that the ranks use, else on the simulated driver.
fn cuda_stream() -> Stream {
    if gpu().is_some() {
        return stream("cuda");
    }
    let gpu = Gpu::open_with(driver::api(), 0, driver::gdr().ok()).unwrap();
    let config =
        CudaStreamConfig { wait_limit: LONG, via: Via::MemOp, depth: 512, ..CudaStreamConfig::default() };
    Stream::cuda(&gpu, config).unwrap()
}

/// What a stream has seen in memory.
#[derive(Clone, Default)]
struct Seen(Arc<Mutex<Vec<Vec<u8>>>>);

impl Seen {
    /// Has the stream look at the bytes of a buffer.
    fn look(&self, s: &Stream, buffer: &Registration, at: usize, len: usize) {
        let (seen, memory) = (self.0.clone(), buffer.memory().clone());
        s.host_fn(move || {
            let mut bytes = vec![0; len];
            memory.read(at, &mut bytes).unwrap();
            seen.lock().unwrap().push(bytes);
        })
        .unwrap();
    }

    #[track_caller]
    fn are(&self, from: usize, to: usize, len: usize, count: usize) {
        let seen = self.0.lock().unwrap();
        assert_eq!(seen.len(), count);
        for (n, seen) in seen.iter().enumerate() {
            assert!(*seen == message(from, to, n, len), "message {n} of {len} bytes");
        }
    }
}

/// The natural loop: compute, exchange with the neighbours, use what came; one buffer, and the CPU waits now and then only.
fn natural_loop(comm: &Communicator, s: &Stream, len: usize) {
    const COUNT: usize = 100;
    let (me, size) = (comm.rank(), comm.size());
    let (left, right) = ((me + size - 1) % size, (me + 1) % size);
    let (buffer, seen) = (host_buffer(comm, 2 * len), Seen::default());
    for n in 0..COUNT {
        let memory = buffer.memory().clone();
        s.host_fn(move || memory.write(0, &message(me, right, n, len)).unwrap()).unwrap();
        let received = comm.irecv_on_stream(s, &buffer, len..2 * len, left).unwrap();
        comm.send_on_stream(s, &buffer, 0..len, right).unwrap();
        comm.wait_on_stream(s, &received).unwrap();
        seen.look(s, &buffer, len, len);
        // A stream of a GPU takes 24 host functions.
        if n % 10 == 9 {
            s.synchronize(LONG).unwrap();
            assert_eq!(received.test().unwrap().map(|status| status.bytes), Some(len));
        }
    }
    seen.are(left, me, len, COUNT);
    comm.barrier(LONG).unwrap();
}

job_test!(the_natural_loop_is_right, [1, 2, 3], |comm| {
    for len in [8, 100_000] {
        natural_loop(comm, &stream("loop"), len);
        natural_loop(comm, &cuda_stream(), len);
    }
});

job_test!(
    the_natural_loop_is_right_through_queues,
    2,
    Communicator::builder().intra_host(IntraHostPath::Queues).watch(false).depth(16),
    |comm| natural_loop(comm, &stream("loop"), 1000)
);

// The sender knows nothing of the receiver's stream: its messages wait in the queue, or in the FIFO.
job_test!(messages_of_the_cpu_wait_for_the_stream, 2, |comm| {
    const COUNT: usize = 11;
    let (peer, buffer) = (1 - comm.rank(), host_buffer(comm, 16384));
    for (s, len) in [(stream("receiver"), 8), (cuda_stream(), 500), (stream("long"), 5000)] {
        open(comm, &buffer);
        if comm.rank() == 0 {
            let is_short = len <= 4096;
            let mut early = Vec::new();
            for n in 0..COUNT {
                let at = if is_short { n * len } else { 0 };
                buffer.memory().write(at, &message(0, 1, n, len)).unwrap();
                let sent = comm.isend(&buffer, at..at + len, peer).unwrap();
                if is_short {
                    // A wait may last until the receive is posted: the FIFO may close at any time.
                    early.push(sent);
                    continue;
                }
                if n == 0 {
                    comm.barrier(LONG).unwrap();
                }
                comm.wait(&sent, LONG).unwrap();
            }
            if is_short {
                comm.barrier(LONG).unwrap();
                comm.wait_all(&early, LONG).unwrap();
            }
        } else {
            comm.barrier(LONG).unwrap();
            let (gate, seen) = (Memory::alloc(4).unwrap().word32(0).unwrap(), Seen::default());
            s.wait_value32(&gate, 1, Cond::Geq).unwrap();
            let mut requests = Vec::new();
            for n in 0..COUNT {
                let received = comm.irecv_on_stream(&s, &buffer, 8192..16384, peer).unwrap();
                comm.wait_on_stream(&s, &received).unwrap();
                seen.look(&s, &buffer, 8192, len);
                requests.push(received);
                if n == 0 {
                    assert!(requests[0].test().unwrap().is_none(), "the stream is held");
                    gate.store(1);
                }
            }
            s.synchronize(LONG).unwrap();
            for status in comm.wait_all(&requests, LONG).unwrap() {
                assert_eq!(status.bytes, len);
            }
            seen.are(0, 1, len, COUNT);
        }
        comm.barrier(LONG).unwrap();
    }
});

// Blocking in stream order, as of NCCL.
job_test!(streams_play_ping_pong, 2, |comm| {
    let (me, peer, buffer, s) = (comm.rank(), 1 - comm.rank(), buffer(comm, 128), stream("ping"));
    buffer.memory().write(64 * me, &message(0, 1, 1, 64)).unwrap();
    for _ in 0..50 {
        if me == 0 {
            comm.send_on_stream(&s, &buffer, 0..64, peer).unwrap();
        }
        comm.recv_on_stream(&s, &buffer, 64..128, peer).unwrap();
        if me == 1 {
            comm.send_on_stream(&s, &buffer, 64..128, peer).unwrap();
        }
    }
    s.synchronize(LONG).unwrap();
    assert_eq!(bytes(&buffer, 64..128), message(0, 1, 1, 64));
    comm.barrier(LONG).unwrap();
});

fn is_busy(error: &Error) -> bool {
    matches!(error, Error::Message { cause: gdsync::Error::Busy { queue: "receive", .. }, .. })
}

// Messages match receives in the order of the calls, or the call is refused.
job_test!(receives_of_cpu_and_streams_keep_their_order, 2, |comm| {
    let (peer, buffer, s) = (1 - comm.rank(), host_buffer(comm, 1024), stream("mixed"));
    for turn in 0..30 {
        let n = 4 * turn;
        if comm.rank() == 0 {
            for n in n..n + 4 {
                buffer.memory().write(0, &message(0, 1, n, 8)).unwrap();
                if n % 3 == 0 {
                    let sent = send_and_wait(comm, &s, &buffer, 0..8, peer);
                    s.synchronize(LONG).unwrap();
                    comm.wait(&sent, LONG).unwrap();
                } else {
                    comm.wait(&comm.isend(&buffer, 0..8, peer).unwrap(), LONG).unwrap();
                }
            }
        } else {
            let gate = Memory::alloc(4).unwrap().word32(0).unwrap();
            let first = comm.irecv(&buffer, 0..8, peer).unwrap();
            s.wait_value32(&gate, 1, Cond::Geq).unwrap();
            let second = comm.irecv_on_stream(&s, &buffer, 8..16, peer).unwrap();
            let mut batch = Batch::new();
            let third = comm.irecv_in_batch(&mut batch, &buffer, 16..24, peer).unwrap();
            comm.wait_in_batch(&mut batch, &third).unwrap();
            // Those that were in the FIFO are matched already.
            let by_queue = comm.fifo_messages(peer).unwrap().1;
            match comm.irecv(&buffer, 24..32, peer) {
                Err(error) => assert!(is_busy(&error), "{error}"),
                Ok(_) => panic!("the stream has not got there; {by_queue} messages of the FIFO"),
            }
            s.submit(&mut batch).unwrap();
            gate.store(1);
            s.synchronize(LONG).unwrap();
            let last = comm.irecv(&buffer, 24..32, peer).unwrap();
            comm.wait_all([&first, &second, &third, &last], LONG).unwrap();
            for k in 0..4 {
                assert!(bytes(&buffer, 8 * k..8 * k + 8) == message(0, 1, n + k, 8), "{k} of turn {turn}");
            }
        }
        comm.barrier(LONG).unwrap();
    }
});

/// The calls that the refusal of a graph names, in its order.
const CALLS: [&str; 4] = [
    "comm.channel(rank, &[(&buffer, range)], None)",
    "channel.post_recv_on_stream(stream)",
    "channel.isend_on_stream(stream, &buffer, range)",
    "channel.wait_recv_on_stream(stream)",
];

// The loop is refused in a graph, with the calls to write instead; what these do is right in each launch, amid eager messages.
job_test!(graphs_refuse_the_loop_and_say_what_to_write, 2, |comm| {
    const LAUNCHES: u64 = 1000;
    let (me, peer, buffer, s) = (comm.rank(), 1 - comm.rank(), host_buffer(comm, 32), host_stream("graph"));
    let refused = |record: &dyn Fn() -> mp::Result<()>| {
        let capture = s.begin_capture().unwrap();
        let error = record().unwrap_err().to_string();
        drop(capture);
        let mut rest = &*error;
        for call in CALLS {
            rest = rest.split_once(call).unwrap_or_else(|| panic!("{call} is not in its place: {error}")).1;
        }
    };
    let (loop_in, loop_out) = ((&buffer, 8..16), (&buffer, 0..8));
    refused(&|| comm.recv_on_stream(&s, &buffer, 8..16, peer));
    refused(&|| comm.irecv_on_stream(&s, &buffer, 8..16, peer).map(drop));
    refused(&|| comm.send_on_stream(&s, &buffer, 0..8, peer));
    refused(&|| comm.sendrecv_on_stream(&s, loop_out.clone(), peer, loop_in.clone(), peer));

    let channel = comm.channel(peer, &[loop_in], LONG).unwrap();
    let [out, place, eager] = [0, 8, 24].map(|at| buffer.memory().word64(at).unwrap());
    let right = Arc::new(AtomicU64::new(0));
    let capture = s.begin_capture().unwrap();
    let repeat = |f: Box<dyn Fn() + Send + Sync>| {
        let mut batch = Batch::new();
        batch.repeatable_host_fn(f);
        s.submit(&mut batch).unwrap();
    };
    let value = out.clone();
    repeat(Box::new(move || value.store(value.load() + 2)));
    channel.post_recv_on_stream(&s).unwrap();
    let sent = channel.isend_on_stream(&s, &buffer, 0..8).unwrap();
    _ = channel.wait_recv_on_stream(&s).unwrap();
    comm.wait_on_stream(&s, &sent).unwrap();
    let (ours, count) = (out.clone(), right.clone());
    repeat(Box::new(move || {
        let is_right = place.load() + me as u64 == ours.load() + peer as u64;
        count.fetch_add(is_right.into(), Ordering::Relaxed);
    }));
    let graph = capture.end().unwrap();
    out.store(me as u64);
    for n in 1..=LAUNCHES {
        graph.launch(&s).unwrap();
        if n % 50 == 0 {
            comm.sendrecv_on_stream(&s, (&buffer, 0..8), peer, (&buffer, 24..32), peer).unwrap();
            s.synchronize(LONG).unwrap();
            assert_eq!(eager.load(), 2 * n + peer as u64);
        }
    }
    assert_eq!(right.load(Ordering::Relaxed), LAUNCHES);
    comm.barrier(LONG).unwrap();
});

// Also of messages that are in the FIFO.
job_test!(dropped_batches_take_their_receives_back, 2, |comm| {
    let (peer, buffer, s) = (1 - comm.rank(), host_buffer(comm, 16384), stream("again"));
    for is_open in [false, true] {
        if is_open {
            open(comm, &buffer);
        }
        if comm.rank() == 0 {
            let sent = comm.isend(&buffer, 0..8, peer).unwrap();
            comm.barrier(LONG).unwrap();
            comm.wait(&sent, LONG).unwrap();
        } else {
            comm.barrier(LONG).unwrap();
            for _ in 0..3 {
                let mut batch = Batch::new();
                let void = comm.irecv_in_batch(&mut batch, &buffer, 0..8, peer).unwrap();
                assert!(void.test().unwrap().is_none());
            }
            let received = recv_and_wait(comm, &s, &buffer, 8192..16384, peer);
            s.synchronize(LONG).unwrap();
            assert_eq!(comm.wait(&received, LONG).unwrap().bytes, 8);
        }
        comm.barrier(LONG).unwrap();
    }
    // The CPU again, announced to a stream.
    if comm.rank() == 0 {
        comm.send_on_stream(&s, &buffer, 0..8, peer).unwrap();
        s.synchronize(LONG).unwrap();
    } else {
        let mut batch = Batch::new();
        let _void = comm.irecv_in_batch(&mut batch, &buffer, 0..8, peer).unwrap();
        drop(batch);
        comm.wait(&comm.irecv(&buffer, 0..8, peer).unwrap(), LONG).unwrap();
    }
    comm.barrier(LONG).unwrap();
});

/// Ends a rank after some messages, while the stream of the other has more receives.
fn dead_ranks_end_receives(name: &str, stream: fn() -> Stream) {
    if !crate::common::is_part_of(name) {
        return crate::common::succeeds(&mut crate::common::myself(name));
    }
    let comm = crate::common::with_gpu(Communicator::builder()).spawn(2).timeout(LONG).init().unwrap();
    let (buffer, s) = (host_buffer(&comm, 16), stream());
    if comm.rank() == 1 {
        for _ in 0..3 {
            comm.send_on_stream(&s, &buffer, 0..8, 0).unwrap();
        }
        s.synchronize(LONG).unwrap();
        comm.barrier(LONG).unwrap();
        until("killed", || false);
        abort();
    }
    let requests: Vec<_> = (0..10).map(|_| recv_and_wait(&comm, &s, &buffer, 8..16, 1)).collect();
    comm.barrier(LONG).unwrap();
    kill(comm.child(1).unwrap());
    s.synchronize(LONG).unwrap_err();
    assert!(requests[..3].iter().all(|request| request.test().is_ok_and(|status| status.is_some())));
    for request in &requests[3..] {
        let error = comm.wait(request, LONG).unwrap_err();
        assert!(error.is_rank_lost(), "{error}");
    }
    assert_eq!(comm.lost(), [1]);
    std::process::exit(crate::common::DONE);
}

#[test]
fn dead_ranks_end_receives_of_streams() {
    dead_ranks_end_receives("dead_ranks_end_receives_of_streams", || stream("bereft"));
}

// No doorbell tells the device of a receive that such a stream posts after the connection has ended.
#[test]
fn dead_ranks_end_receives_of_gpu_streams() {
    dead_ranks_end_receives("dead_ranks_end_receives_of_gpu_streams", cuda_stream);
}

// The peer must not wait for a receive that will never be posted.
job_test!(aborted_streams_end_their_receives, 2, |comm| {
    let (peer, buffer, s) = (1 - comm.rank(), host_buffer(comm, 16), stream("aborted"));
    if comm.rank() == 0 {
        let gate = Memory::alloc(4).unwrap().word32(0).unwrap();
        s.wait_value32(&gate, 1, Cond::Geq).unwrap();
        let received = recv_and_wait(comm, &s, &buffer, 0..8, peer);
        comm.barrier(LONG).unwrap();
        s.abort();
        comm.wait(&received, LONG).unwrap_err();
        s.synchronize(LONG).unwrap_err();
        comm.irecv(&buffer, 0..8, peer).unwrap_err();
    } else {
        let sent = send_and_wait(comm, &s, &buffer, 0..8, peer);
        comm.barrier(LONG).unwrap();
        comm.wait(&sent, LONG).unwrap_err();
        s.synchronize(LONG).unwrap_err();
    }
});

job_test!(waits_for_messages_of_batches_without_a_stream_name_these, 1, |comm| {
    let (memory, mut batch) = (buffer(comm, 64), Batch::new());
    let received = comm.irecv_in_batch(&mut batch, &memory, 0..8, 0).unwrap();
    let sent = comm.isend_in_batch(&mut batch, &memory, 8..16, 0).unwrap();
    for request in [&received, &sent] {
        let error = comm.wait(request, LONG).unwrap_err();
        says(
            &error,
            &["this message is in a batch that was not submitted", "expected Stream::submit for it before"],
        );
    }
    drop(batch);
    let text = comm.wait(&received, LONG).unwrap_err().to_string();
    assert!(text.contains("the batch of this message is dropped before a stream got it"), "{text}");
});
