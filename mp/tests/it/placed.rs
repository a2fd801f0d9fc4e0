//! Messages of streams whose payload a kernel puts into the receive, on GPUs or simulated ones.

use gdsync::cuda::Gpu;
use gdsync::stream::{Batch, Stream, Via};
use mp::{Communicator, CommunicatorBuilder, Error, NearPath, Registration, Request};
use proptest::prelude::*;
use proptest::test_runner::{RngSeed, TestRunner};

use crate::common::{
    LONG, bytes, copying, host_buffer, host_stream, is_part_of, job_test, message, myself, of_gpu, own_gpu,
    prints, says, simulated_gpu, until,
};

/// Ranks with GPUs.
pub(crate) fn with_gpus(near: NearPath) -> CommunicatorBuilder {
    Communicator::builder().gpu(&own_gpu()).near(near)
}

fn fill(buffer: &Registration, at: usize, bytes: &[u8]) {
    buffer.memory().write(at, bytes).unwrap();
    buffer.memory().flush().unwrap();
}

/// Messages that this rank has got without payload.
pub(crate) fn placed(comm: &Communicator) -> u64 {
    comm.device(1 - comm.rank()).unwrap().stats().placed
}

/// The shortest payload for which a stream of memory operations launches a kernel.
const LEAST: usize = 4096;

/// Sends from rank 0 to rank 1 until they know each other's memory.
pub(crate) fn warm_up(comm: &Communicator, s: &Stream, outbox: &Registration, inbox: &Registration) {
    if comm.rank() == 0 {
        until("the other rank's memory to be open", || {
            let received = comm.irecv(outbox, 0..1, 1).unwrap();
            comm.send_on_stream(s, outbox, 0..LEAST, 1).unwrap();
            s.synchronize(LONG).unwrap();
            received.wait(LONG).unwrap();
            bytes(outbox, 0..1) == [1]
        });
    } else {
        until("a message to be placed", || {
            let before = placed(comm);
            comm.irecv(inbox, 0..LEAST, 0).unwrap().wait(LONG).unwrap();
            let is_placed = placed(comm) > before;
            fill(outbox, 0, &[is_placed.into()]);
            comm.isend(outbox, 0..1, 0).unwrap().wait(LONG).unwrap();
            is_placed
        });
    }
    comm.barrier(LONG).unwrap();
}

/// All lengths and alignments, and in which way the streams run.
fn messages(comm: &Communicator, via: Via, copies: Via) {
    const LEN: usize = 1_300_000;
    let gpu = &own_gpu();
    let (s, peer) = (copying(gpu, via, copies), 1 - comm.rank());
    let (outbox, inbox) = (of_gpu(comm, gpu, LEN), of_gpu(comm, gpu, LEN));
    let is_placed = copies != Via::MemOp;
    if is_placed {
        warm_up(comm, &s, &outbox, &inbox);
    }
    let (before, mut fitting) = (placed(comm), 0);
    for n in 0..40 {
        let (len, from, to) = (1 + n * n * n * 7919 % [150_000, 1_200_000][n / 35], n * 13 % 37, n * 29 % 41);
        fitting += u64::from(len >= LEAST || via == Via::Kernel);
        fill(&outbox, from, &message(comm.rank(), peer, n, len));
        let received = match n % 2 {
            0 => comm.irecv(&inbox, to..to + len + n, peer).unwrap(),
            _ => comm.irecv_on_stream(&s, &inbox, to..to + len + n, peer).unwrap(),
        };
        comm.send_on_stream(&s, &outbox, from..from + len, peer).unwrap();
        comm.wait_on_stream(&s, &received).unwrap();
        s.synchronize(LONG).unwrap();
        assert_eq!(received.wait(LONG).unwrap().bytes, len);
        assert!(bytes(&inbox, to..to + len) == message(peer, comm.rank(), n, len), "{n}");
        let rest = bytes(&inbox, to + len..to + len + 1);
        assert!(n > 0 || rest == [0], "nothing is written behind the message");
    }
    if is_placed && comm.rank() == 1 {
        // The device may be behind the streams.
        until("all of fitting lengths to be placed", || placed(comm) - before == fitting);
        let path = |len| comm.path_of(&outbox, 0..len, peer).unwrap();
        says(&path(LEAST), &["by CUDA streams with peer copies"]);
        says(&path(0), &["by CUDA streams no other way: the message is empty"]);
    } else if !is_placed {
        assert_eq!(placed(comm), 0, "the copy engine asks for no receive");
    }
}

job_test!(kernels_place_messages, 2, with_gpus(NearPath::PeerCopies), |comm| {
    messages(comm, Via::Kernel, Via::Auto);
});
job_test!(streams_of_memory_operations_place_messages, 2, with_gpus(NearPath::PeerCopies), |comm| {
    messages(comm, Via::MemOp, Via::Kernel);
});
job_test!(copy_engines_do_not, 2, with_gpus(NearPath::PeerCopies), |comm| {
    messages(comm, Via::Kernel, Via::MemOp);
});

// Of two batches the first is dropped: the second has its message, and all behind it theirs.
job_test!(batches_dropped_from_the_middle_shift_nothing, 2, with_gpus(NearPath::PeerCopies), |comm| {
    let gpu = &own_gpu();
    let s = copying(gpu, Via::Kernel, Via::Auto);
    let (outbox, inbox) = (of_gpu(comm, gpu, 4096), of_gpu(comm, gpu, 4096));
    warm_up(comm, &s, &outbox, &inbox);
    let place = |n: usize| n * 256..n * 256 + 200;
    if comm.rank() == 1 {
        let received = [1, 2, 3].map(|n| comm.irecv(&inbox, place(n), 0).unwrap());
        comm.barrier(LONG).unwrap();
        received.iter().for_each(|received| comm.wait_on_stream(&s, received).unwrap());
        s.synchronize(LONG).unwrap();
        for n in [1, 2, 3] {
            assert!(bytes(&inbox, place(n)) == message(0, 1, n, 200), "{n}");
        }
        received.iter().for_each(|received| assert_eq!(received.wait(LONG).unwrap().bytes, 200));
    } else {
        (1..4).for_each(|n| fill(&outbox, place(n).start, &message(0, 1, n, 200)));
        comm.barrier(LONG).unwrap();
        let [mut dropped, mut batch] = [(); 2].map(|()| Batch::new());
        let _taken_back = comm.isend_in_batch(&mut dropped, &outbox, 0..100, 1).unwrap();
        let first = comm.isend_in_batch(&mut batch, &outbox, place(1), 1).unwrap();
        drop(dropped);
        s.submit(&mut batch).unwrap();
        let [second, third] = [2, 3].map(|n| comm.isend_on_stream(&s, &outbox, place(n), 1).unwrap());
        [first, second, third].iter().for_each(|sent| _ = sent.wait(LONG).unwrap());
    }
    comm.barrier(LONG).unwrap();
});

#[derive(Clone, Copy, Debug, PartialEq)]
enum By {
    Cpu,
    Eager,
    Batch,
    HostStream,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Into {
    Gpu,
    Host,
    Pieces,
}

type Step = (By, By, Into, usize);

// Whoever sends and receives, and whatever moves the payload: messages come in order, each into its receive.
job_test!(order_holds_in_any_mixture, 2, with_gpus(NearPath::Auto), |comm| {
    let gpu = &own_gpu();
    let by = || prop::sample::select(vec![By::Cpu, By::Eager, By::Batch, By::HostStream]);
    let into = prop::sample::select(vec![Into::Gpu, Into::Gpu, Into::Gpu, Into::Host, Into::Pieces]);
    let steps = prop::collection::vec((by(), by(), into, 0..4_usize), 1..25);
    let config = ProptestConfig {
        cases: 16,
        failure_persistence: None,
        rng_seed: RngSeed::Fixed(31),
        max_shrink_iters: 0,
        ..ProptestConfig::default()
    };
    let rooms = [of_gpu(comm, gpu, 25 * ROOM), host_buffer(comm, 25 * ROOM)];
    warm_up(comm, &copying(gpu, Via::Kernel, Via::Auto), &rooms[0], &rooms[0]);
    let run = |steps: Vec<Step>| {
        mixture(comm, gpu, &rooms, &steps);
        Ok(())
    };
    TestRunner::new(config).run(&steps, run).unwrap();
    assert!(comm.rank() == 0 || placed(comm) > 10, "{} were placed", placed(comm));
});

const ROOM: usize = 40_064;

fn mixture(comm: &Communicator, gpu: &Gpu, [near, host]: &[Registration; 2], steps: &[Step]) {
    const LENGTHS: [usize; 4] = [8, 600, 5_001, 40_000];
    let (s, h) = (copying(gpu, Via::Kernel, Via::Auto), host_stream("mixed"));
    let mut last = None;
    let mut requests: Vec<Request> = Vec::new();
    for (i, &(sender, receiver, into, len)) in steps.iter().enumerate() {
        let (len, start) = (LENGTHS[len], i * ROOM + i % 3);
        let by = if comm.rank() == 0 { sender } else { receiver };
        let stream = if by == By::HostStream { &h } else { &s };
        // Queues are the CPU's or one stream's.
        let owner = match by {
            By::Cpu => 0,
            By::HostStream => 1,
            _ => 2,
        };
        if last.replace(owner).is_some_and(|last| last != owner) {
            [&s, &h].iter().for_each(|stream| stream.synchronize(LONG).unwrap());
            if comm.rank() == 0 {
                requests.drain(..).for_each(|request| _ = request.wait(LONG).unwrap());
            }
        }
        if comm.rank() == 0 {
            fill(near, start, &message(0, 1, i, len));
            let sent = match by {
                By::Cpu => comm.isend(near, start..start + len, 1),
                By::Eager | By::HostStream => comm.isend_on_stream(stream, near, start..start + len, 1),
                By::Batch => {
                    let mut batch = Batch::new();
                    // One that is taken back is no message.
                    let _taken_back = comm.isend_in_batch(&mut batch, near, start..start + 8, 1).unwrap();
                    drop(std::mem::take(&mut batch));
                    let sent = comm.isend_in_batch(&mut batch, near, start..start + len, 1);
                    stream.submit(&mut batch).unwrap();
                    sent
                }
            };
            requests.push(sent.unwrap());
            continue;
        }
        let buffer = if into == Into::Host { host } else { near };
        buffer.memory().fill(start, len, 0).unwrap();
        let pieces = match into {
            Into::Pieces => vec![(buffer, start..start + 3), (buffer, start + 3..start + len)],
            _ => vec![(buffer, start..start + len)],
        };
        let received = match by {
            By::Cpu => comm.irecv_vectored(&pieces, 0).unwrap(),
            _ => {
                // One that is taken back may have told of its place.
                drop(comm.irecv_in_batch(&mut Batch::new(), near, start..start + ROOM / 2, 0).unwrap());
                let mut batch = Batch::new();
                let received = comm.irecv_vectored_in_batch(&mut batch, &pieces, 0).unwrap();
                // The last announcement of another stream may be under way.
                until("the queue to be free", || match stream.submit(&mut batch) {
                    Err(gdsync::Error::Busy { .. }) => false,
                    submitted => submitted.map(|()| true).unwrap(),
                });
                received
            }
        };
        requests.push(received);
    }
    [&s, &h].iter().for_each(|stream| stream.synchronize(LONG).unwrap());
    for request in requests {
        request.wait(LONG).unwrap();
    }
    for (i, &(_, _, into, len)) in steps.iter().enumerate().filter(|_| comm.rank() == 1) {
        let (len, start) = (LENGTHS[len], i * ROOM + i % 3);
        let came = bytes(if into == Into::Host { host } else { near }, start..start + len);
        assert!(came == message(0, 1, i, len), "{i} of {steps:?}");
    }
    comm.barrier(LONG).unwrap();
}

// Memory that is freed gives its number to other memory.
job_test!(memory_comes_and_goes, 2, with_gpus(NearPath::PeerCopies), |comm| {
    let gpu = &own_gpu();
    let (s, peer) = (copying(gpu, Via::Kernel, Via::Auto), 1 - comm.rank());
    let outbox = of_gpu(comm, gpu, 8192);
    // Each rank opens the memory of the other in the background.
    let is_done = |n| n >= 150 && comm.exchange(&[(placed(comm) > 20).into()], LONG).unwrap() == [[1], [1]];
    for n in (0..10_000).take_while(|n| !is_done(*n)) {
        let inbox = of_gpu(comm, gpu, 8192);
        for k in 0..3 {
            fill(&outbox, 0, &message(comm.rank(), peer, n + k, 5000));
            let received = comm.irecv(&inbox, k..k + 5000, peer).unwrap();
            comm.send_on_stream(&s, &outbox, 0..5000, peer).unwrap();
            s.synchronize(LONG).unwrap();
            received.wait(LONG).unwrap();
            assert!(bytes(&inbox, k..k + 5000) == message(peer, comm.rank(), n + k, 5000), "{n} {k}");
        }
    }
    comm.barrier(LONG).unwrap();
    assert!(placed(comm) > 20, "{}", placed(comm));
});

// What does not fit is not placed, and fails at both ranks as always.
job_test!(longer_messages_fail, 2, with_gpus(NearPath::PeerCopies), |comm| {
    let gpu = &own_gpu();
    let s = copying(gpu, Via::Kernel, Via::Auto);
    let (outbox, inbox) = (of_gpu(comm, gpu, 8192), of_gpu(comm, gpu, 8192));
    warm_up(comm, &s, &outbox, &inbox);
    let error = if comm.rank() == 0 {
        let sent = comm.isend_on_stream(&s, &outbox, 0..5001, 1).unwrap();
        sent.wait(LONG).unwrap_err()
    } else {
        let received = comm.irecv(&inbox, 1000..6000, 0).unwrap();
        received.wait(LONG).unwrap_err()
    };
    assert!(matches!(error, Error::Message { rank, .. } if rank == 1 - comm.rank()), "{error}");
    says(&error, &["the message is longer than its receive"]);
    assert_eq!(bytes(&inbox, 1000..6100), [0; 5100], "nothing was written");
});

/// What `path_of` says, and that peer copies are missed where they are asked for.
#[test]
fn the_environment_chooses_for_messages() {
    const NAME: &str = "the_environment_chooses_for_messages";
    if !is_part_of(NAME) {
        for (value, words) in [
            ("auto", "by CUDA streams no other way: so far no receive there"),
            ("peer", "by CUDA streams no other way: so far no receive there"),
            ("queues", "no other way: this rank asked for queue pairs (MP_NEAR, or the builder)"),
        ] {
            prints(myself(NAME).env("MP_NEAR", value), words);
        }
        return;
    }
    let gpu = simulated_gpu(0).unwrap();
    let comm = Communicator::builder().gpu(&gpu).spawn(2).timeout(LONG).init().unwrap();
    let (peer, buffer) = (1 - comm.rank(), of_gpu(&comm, &gpu, LEAST));
    println!("{}", comm.path_of(&buffer, 0..LEAST, peer).unwrap());
    let host = host_buffer(&comm, 64);
    assert!(comm.path_of(&host, 0..8, peer).unwrap().peer_copies().is_err());
    comm.barrier(LONG).unwrap();
    comm.finalize(LONG).unwrap();
}
