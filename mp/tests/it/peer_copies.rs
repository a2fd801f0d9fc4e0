//! Windows whose streams write and read the memory of other ranks themselves, on GPUs or simulated ones.

use std::process::{Command, exit};
use std::sync::{Arc, Barrier, Mutex};
use std::thread;
use std::time::Duration;

use gdsync::cuda::Gpu;
use gdsync::memory::Memory;
use gdsync::stream::{Batch, Cond, Stream, Via};
use mp::{Communicator, Error, Exchange, NearPath, Registration, Rma, Signal, Window};
use proptest::prelude::*;
use proptest::test_runner::{RngSeed, TestRunner};

use crate::common::{
    DONE, LONG, bytes, copying, failed_rank, host_buffer, host_stream, is_part_of, job_test, job_with, kill,
    message, myself, of_gpu, own_gpu, prints, says, simulated_gpu, succeeds,
};

/// Tests of a module run again with all buffers in GPU memory: by kernels, and by the copy engine.
fn hold_with_peer_copies(module: &str) {
    for via in ["kernel", "memop"] {
        let mut again = Command::new(std::env::current_exe().unwrap());
        again.args([module, "--skip", "hold_with_peer_copies"]);
        let output = again.env("GDSYNC_TEST_GPU", via).env("MP_NEAR", "peer").output().unwrap();
        let [out, err] = [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text));
        // The failures last: logs are cut.
        let is_right = output.status.success() && !out.contains("running 0 tests");
        assert!(is_right, "{via}: {err}\n{out}{}", output.status);
    }
}

#[test]
fn windows_and_messages_on_streams_hold_with_peer_copies() {
    hold_with_peer_copies("on_stream::");
}

#[test]
fn channels_hold_with_peer_copies() {
    hold_with_peer_copies("channels::");
}

fn on(gpu: &Gpu, via: Via) -> Stream {
    copying(gpu, via, Via::Auto)
}

/// Fails unless streams use peer copies.
#[track_caller]
fn is_near(window: &Window, buffer: &Registration, rank: usize) {
    let path = window.path_of(buffer, 0..8, rank).unwrap();
    assert_eq!(path.peer_copies(), Ok(()), "{path}");
    says(&path, &["by CUDA streams with peer copies"]);
}

/// Each rank puts to all, itself included, eagerly and in graphs, and gets it back.
fn exchange(comm: &Communicator, gpu: &Gpu, s: &Stream) {
    const LEN: usize = 70_000;
    let (me, all) = (comm.rank(), comm.size());
    let (outbox, target) = (of_gpu(comm, gpu, LEN), of_gpu(comm, gpu, 64 * all + all * LEN));
    let back = of_gpu(comm, gpu, LEN);
    let window = comm.window(&target, 0..target.memory().len(), LONG).unwrap();
    (0..all).for_each(|rank| is_near(&window, &outbox, rank));
    let put = |s: &Stream, peer: usize, n: u64, len: usize| {
        let put = Rma::put(&outbox, 0..len, peer, 64 * all + me * LEN);
        window.start_on_stream(s, &put.with_signal(Signal::set(64 * me, n))).unwrap()
    };
    let arrived = |peer: usize, n: usize, len: usize| {
        assert!(
            bytes(&target, 64 * all + peer * LEN..64 * all + peer * LEN + len) == message(peer, 0, n, len)
        );
    };
    let fill = |n: usize, len: usize| {
        outbox.memory().write(0, &message(me, 0, n, len)).unwrap();
        outbox.memory().flush().unwrap();
    };
    for n in 1..=10 {
        let len = 1 + (n * 7919) % LEN;
        fill(n, len);
        let puts: Vec<_> = (0..all).map(|peer| put(s, peer, n as u64, len)).collect();
        (0..all).for_each(|peer| {
            window.wait_signal_on_stream(s, 64 * peer, n as u64, Cond::Geq).unwrap();
        });
        s.synchronize(LONG).unwrap();
        (0..all).for_each(|peer| arrived(peer, n, len));
        for put in puts {
            assert_eq!(put.wait(LONG).unwrap().bytes, len);
        }
        let right = (me + 1) % all;
        let got = window.start_on_stream(s, &Rma::get(&back, 0..len, right, 64 * all + me * LEN)).unwrap();
        comm.wait_on_stream(s, &got).unwrap();
        s.synchronize(LONG).unwrap();
        assert!(bytes(&back, 0..len) == message(me, 0, n, len), "back from {right}");
        comm.barrier(LONG).unwrap();
    }
    let graph = s.capture(|s| {
        (0..all).for_each(|peer| drop(put(s, peer, 1000, LEN)));
        gdsync::Result::Ok(())
    });
    let graph = graph.unwrap();
    for n in 11..=15 {
        fill(n, LEN);
        (0..all).for_each(|peer| target.memory().word64(64 * peer).unwrap().store(0));
        target.memory().flush().unwrap();
        comm.barrier(LONG).unwrap();
        graph.launch(s).unwrap();
        (0..all).for_each(|peer| {
            window.wait_signal_on_stream(s, 64 * peer, 1000, Cond::Eq).unwrap();
        });
        s.synchronize(LONG).unwrap();
        (0..all).for_each(|peer| arrived(peer, n, LEN));
        comm.barrier(LONG).unwrap();
    }
    window.destroy(LONG).unwrap();
}

job_test!(ranks_exchange_by_kernels, 2, |comm| exchange_via(comm, Via::Kernel, Via::Kernel));
job_test!(streams_of_memory_operations_launch_kernels, 2, |comm| exchange_via(comm, Via::MemOp, Via::Kernel));
job_test!(streams_of_memory_operations_use_the_copy_engine, 2, |comm| exchange_via(
    comm,
    Via::MemOp,
    Via::MemOp
));
job_test!(streams_of_kernels_use_the_copy_engine, 2, |comm| exchange_via(comm, Via::Kernel, Via::MemOp));
job_test!(one_rank_reaches_itself, 1, |comm| exchange_via(comm, Via::Kernel, Via::Kernel));

fn exchange_via(comm: &Communicator, via: Via, copies: Via) {
    let gpu = own_gpu();
    exchange(comm, &gpu, &copying(&gpu, via, copies));
}

/// Ranks of one process that exchange through its memory.
#[derive(Debug)]
struct Threads {
    rank: usize,
    met: Arc<(Barrier, Mutex<Vec<Vec<u8>>>)>,
}

impl Exchange for Threads {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.met.1.lock().unwrap().len()
    }

    fn allgather(&mut self, bytes: &[u8], _timeout: Duration) -> mp::Result<Vec<Vec<u8>>> {
        let (barrier, all) = &*self.met;
        all.lock().unwrap()[self.rank] = bytes.to_vec();
        barrier.wait();
        let answer = all.lock().unwrap().clone();
        barrier.wait();
        Ok(answer)
    }
}

#[test]
fn ranks_of_one_process_have_two_gpus() {
    let met = Arc::new((Barrier::new(2), Mutex::new(vec![Vec::new(); 2])));
    let rank = |rank: usize| {
        let ordinal = i32::try_from(rank).unwrap();
        let gpu = match Gpu::count() {
            Ok(count) if count > 0 => Gpu::open(ordinal % count).unwrap(),
            _ => simulated_gpu(ordinal).unwrap(),
        };
        let met = met.clone();
        let builder = Communicator::builder().gpu(&gpu).timeout(LONG).near(NearPath::PeerCopies);
        let comm = builder.init_over(Threads { rank, met }).unwrap();
        exchange(&comm, &gpu, &on(&gpu, Via::Kernel));
        comm.finalize(LONG).unwrap();
    };
    thread::scope(|scope| {
        scope.spawn(|| rank(0));
        rank(1);
    });
}

// What `path_of` says where there are none, and that all works nevertheless.
job_test!(other_memory_goes_through_queues, 2, |comm| {
    let (gpu, peer) = (own_gpu(), 1 - comm.rank());
    let why = |window: &Window, buffer: &Registration| {
        let path = window.path_of(buffer, 0..8, peer).unwrap();
        path.peer_copies().unwrap_err().to_owned()
    };
    let (near, host) = (of_gpu(comm, &gpu, 4096), host_buffer(comm, 4096));
    // Rank 1 has its part in host memory: only rank 1 reaches the other one's.
    let part = if comm.rank() == 0 { &near } else { &host };
    let window = comm.window(part, 0..4096, LONG).unwrap();
    match comm.rank() {
        0 => says(&why(&window, &near), &["the memory of the other rank is not of a GPU"]),
        // With `GDSYNC_TEST_GPU` the communicator has a GPU.
        _ if crate::common::gpu().is_some() => is_near(&window, &near, peer),
        _ => says(&why(&window, &near), &["no GPU", "CommunicatorBuilder::gpu"]),
    }
    let both = comm.window(&near, 0..4096, LONG).unwrap();
    is_near(&both, &near, peer);
    says(&why(&both, &host), &["buffer is not in memory of the GPU"]);
    // From host memory, to host memory, bytes, and by a host stream: through the queue pair, in order with copies.
    let s = on(&gpu, Via::Kernel);
    host.memory().write(0, &[7; 64]).unwrap();
    comm.barrier(LONG).unwrap();
    let put = |s: &Stream, window: &Window, rma: &Rma<'_>| window.start_on_stream(s, rma).unwrap();
    _ = put(&s, &both, &Rma::put(&host, 0..64, peer, 1024));
    _ = put(&s, &both, &Rma::put_bytes(&[8; 32], peer, 1024));
    near.memory().write(2048, &[9; 16]).unwrap();
    near.memory().flush().unwrap();
    _ = put(&s, &both, &Rma::put(&near, 2048..2064, peer, 1024).with_signal(Signal::set(0, 1)));
    both.wait_signal_on_stream(&s, 0, 1, Cond::Eq).unwrap();
    s.synchronize(LONG).unwrap();
    let came = bytes(&near, 1024..1088);
    assert_eq!((&came[..16], &came[16..32], &came[32..]), (&[9; 16][..], &[8; 16][..], &[7; 32][..]));
    comm.barrier(LONG).unwrap();
    let h = host_stream("host");
    both.flush(peer, LONG).unwrap();
    _ = put(&h, &both, &Rma::put(&near, 2048..2056, peer, 8).with_signal(Signal::add(0, 1)));
    both.wait_signal(0, 2, Cond::Eq, LONG).unwrap();
    h.synchronize(LONG).unwrap();
    assert_eq!(bytes(&near, 8..16), [9; 8]);
    let mut batch = Batch::new();
    _ = both.start_in_batch(&mut batch, &Rma::put(&near, 2048..2056, peer, 8)).unwrap();
    says(&h.submit(&mut batch).unwrap_err(), &["memory of a peer", "stream of a GPU"]);
    drop(batch);
    // Steps of kernels go through the queue pair.
    let steps = s.record_steps(|s| {
        both.start_on_stream(s, &Rma::put(&near, 2048..2056, peer, 8)).map(drop).map_err(unwrapped)
    });
    assert!(steps.is_ok(), "{steps:?}");
    drop(steps);
    comm.barrier(LONG).unwrap();
});

fn unwrapped(error: Error) -> gdsync::Error {
    match error {
        Error::Message { cause, .. } => cause,
        other => panic!("{other}"),
    }
}

#[test]
fn the_environment_chooses() {
    const NAME: &str = "the_environment_chooses";
    if !is_part_of(NAME) {
        for (value, words) in [
            ("", "with peer copies"),
            ("auto", "with peer copies"),
            ("peer", "with peer copies"),
            ("queues", "no other way: this rank asked for queue pairs (MP_NEAR, or the builder)"),
            ("nvlink", "auto, peer or queues"),
        ] {
            prints(myself(NAME).env("MP_NEAR", value), words);
        }
        return;
    }
    match Communicator::builder().spawn(2).timeout(LONG).init() {
        Ok(comm) => {
            let buffer = of_gpu(&comm, &own_gpu(), 64);
            let window = comm.window(&buffer, 0..64, LONG).unwrap();
            println!("{}", window.path_of(&buffer, 0..8, 1 - comm.rank()).unwrap());
            comm.finalize(LONG).unwrap();
        }
        Err(error) => println!("{error}"),
    }
}

// The rank whose memory has no handle refuses nothing, unless peer copies are asked for.
job_test!(forced_peer_copies_are_missed, 2, Communicator::builder().near(NearPath::PeerCopies), |comm| {
    let (gpu, peer) = (own_gpu(), 1 - comm.rank());
    let buffer = of_gpu(comm, &gpu, 64);
    let opened = comm.window(&buffer, 0..64, LONG).unwrap();
    is_near(&opened, &buffer, peer);
    opened.destroy(LONG).unwrap();
    let alone = Communicator::builder().near(match comm.rank() {
        0 => NearPath::PeerCopies,
        _ => NearPath::Queues,
    });
    let other = alone.timeout(LONG).init_over(comm.clone()).unwrap();
    let buffer = of_gpu(&other, &gpu, 64);
    let host = host_buffer(&other, 64);
    let signals = other.window(&host, 0..64, LONG).unwrap();
    for window in [other.window(&buffer, 0..64, LONG), signals.beside(&buffer, 0..64, LONG)] {
        let error = window.unwrap_err();
        match comm.rank() {
            0 => says(
                &error,
                &["without peer copies to rank 1", "the other rank asked for queue pairs", "MP_NEAR=auto"],
            ),
            _ => says(&error, &["rank 0", "could not connect its window"]),
        }
    }
    other.finalize(LONG).unwrap();
});

#[derive(Clone, Copy, Debug)]
enum By {
    Cpu,
    Eager,
    Batch,
    Graph,
}

#[derive(Clone, Copy, Debug)]
enum What {
    Put,
    PutBytes,
    PutAndAdd,
    PutAndSet,
    Get,
}

/// Whoever starts an operation, and whatever carries it, comes after what was started before.
#[test]
fn nothing_overtakes_in_any_mixture() {
    const NAME: &str = "nothing_overtakes_in_any_mixture";
    job_with(NAME, 2, Communicator::builder(), |comm| {
        let gpu = own_gpu();
        let steps = prop::collection::vec(
            (
                prop_oneof![Just(By::Cpu), Just(By::Eager), Just(By::Batch), Just(By::Graph)],
                prop_oneof![
                    Just(What::Put),
                    Just(What::PutBytes),
                    Just(What::PutAndAdd),
                    Just(What::PutAndSet),
                    Just(What::Get)
                ],
                0..3_usize,
            ),
            1..25,
        );
        let config = ProptestConfig {
            cases: 12,
            failure_persistence: None,
            rng_seed: RngSeed::Fixed(29),
            max_shrink_iters: 0,
            ..ProptestConfig::default()
        };
        TestRunner::new(config)
            .run(&steps, |steps| {
                mixture(comm, &gpu, &steps);
                Ok(())
            })
            .unwrap();
    });
}

/// Rank 0 does all steps to one place of rank 1, which must have the last one; each is a number of its own.
fn mixture(comm: &Communicator, gpu: &Gpu, steps: &[(By, What, usize)]) {
    const LENGTHS: [usize; 3] = [16, 5_000, 40_000];
    const ADDED: usize = 0;
    const SET: usize = 8;
    const PLACE: usize = 64;
    let room = LENGTHS[2];
    let (target, outbox, back) =
        (of_gpu(comm, gpu, PLACE + room), of_gpu(comm, gpu, 26 * room), of_gpu(comm, gpu, room));
    let window = comm.window(&target, 0..PLACE + room, LONG).unwrap();
    is_near(&window, &outbox, 1 - comm.rank());
    let s = on(gpu, Via::Kernel);
    let (mut expected, mut added, mut set) = (vec![0; room], 0, 0);
    for (i, &(by, what, len)) in steps.iter().enumerate() {
        let len = LENGTHS[len];
        let n = u8::try_from(i + 1).unwrap();
        let small = [n; 16];
        match what {
            What::PutBytes => expected[..16].fill(n),
            What::Get => {}
            _ => expected[..len].fill(n),
        }
        added += u64::from(matches!(what, What::PutAndAdd)) * u64::from(n);
        if matches!(what, What::PutAndSet) {
            set = n.into();
        }
        if comm.rank() == 1 {
            continue;
        }
        outbox.memory().fill(i * room, len, n).unwrap();
        outbox.memory().flush().unwrap();
        let put = Rma::put(&outbox, i * room..i * room + len, 1, PLACE);
        let rma = match what {
            What::Put => put,
            What::PutBytes => Rma::put_bytes(&small, 1, PLACE),
            What::PutAndAdd => put.with_signal(Signal::add(ADDED, n.into())),
            What::PutAndSet => put.with_signal(Signal::set(SET, n.into())),
            What::Get => Rma::get(&back, 0..len, 1, PLACE).fence(),
        };
        // A queue pair is the CPU's or the stream's.
        let is_change = i > 0 && matches!(by, By::Cpu) != matches!(steps[i - 1].0, By::Cpu);
        if is_change {
            window.flush(1, LONG).unwrap();
        }
        match by {
            By::Cpu => _ = window.start(&rma).unwrap(),
            By::Eager => _ = window.start_on_stream(&s, &rma).unwrap(),
            By::Batch => {
                let mut batch = Batch::new();
                _ = window.start_in_batch(&mut batch, &rma).unwrap();
                s.submit(&mut batch).unwrap();
            }
            By::Graph => {
                let graph =
                    s.capture(|s| window.start_on_stream(s, &rma).map(drop).map_err(unwrapped)).unwrap();
                graph.launch(&s).unwrap();
            }
        }
        if matches!(what, What::Get) && !matches!(by, By::Cpu) {
            s.synchronize(LONG).unwrap();
            window.flush(1, LONG).unwrap();
            assert!(bytes(&back, 0..len) == expected[..len], "step {i} of {steps:?}");
        }
    }
    s.synchronize(LONG).unwrap();
    window.flush(1, LONG).unwrap();
    comm.barrier(LONG).unwrap();
    if comm.rank() == 1 {
        assert!(bytes(&target, PLACE..PLACE + room) == expected, "{steps:?}");
        let word = |at| target.memory().word64(at).unwrap().load();
        assert_eq!((word(ADDED), word(SET)), (added, set), "{steps:?}");
    }
    window.destroy(LONG).unwrap();
}

// Launches take completions that nobody waits for, without a watchdog.
job_test!(graphs_of_puts_are_launched_for_ever, 2, Communicator::builder().watch(false), |comm| {
    let (gpu, peer) = (own_gpu(), 1 - comm.rank());
    let (buffer, s) = (of_gpu(comm, &gpu, 64), on(&gpu, Via::Kernel));
    let window = comm.window(&buffer, 0..64, LONG).unwrap();
    is_near(&window, &buffer, peer);
    let graph = s.capture(|s| {
        (0..100).for_each(|_| drop(window.start_on_stream(s, &Rma::put(&buffer, 0..8, peer, 8)).unwrap()));
        gdsync::Result::Ok(())
    });
    let graph = graph.unwrap();
    for _ in 0..30 {
        graph.launch(&s).unwrap();
        s.synchronize(LONG).unwrap();
    }
    comm.barrier(LONG).unwrap();
});

// The owners may free the memory then: clones go through queue pairs, and graphs are refused.
job_test!(destroyed_windows_have_no_peer_copies, 2, |comm| {
    let (gpu, peer) = (own_gpu(), 1 - comm.rank());
    let (buffer, s) = (of_gpu(comm, &gpu, 64), on(&gpu, Via::Kernel));
    let window = comm.window(&buffer, 0..64, LONG).unwrap();
    is_near(&window, &buffer, peer);
    let put = |window: &Window, s: &Stream| {
        let put = Rma::put(&buffer, 0..8, peer, 8).with_signal(Signal::set(16, 3));
        drop(window.start_on_stream(s, &put).unwrap());
    };
    let graph = s.capture(|s| {
        put(&window, s);
        gdsync::Result::Ok(())
    });
    let (graph, clone) = (graph.unwrap(), window.clone());
    window.destroy(LONG).unwrap();
    says(&clone.path_of(&buffer, 0..8, peer).unwrap().peer_copies().unwrap_err(), &["was destroyed"]);
    says(&graph.launch(&s).unwrap_err(), &["window that was destroyed"]);
    put(&clone, &s);
    clone.wait_signal_on_stream(&s, 16, 3, Cond::Eq).unwrap();
    s.synchronize(LONG).unwrap();
    comm.barrier(LONG).unwrap();
});

/// What streams started over these connections, before there was a window with peer copies, could be overtaken: there are none then.
fn connections_in_use(comm: &Communicator) {
    let (gpu, peer) = (own_gpu(), 1 - comm.rank());
    let words = host_buffer(comm, 64);
    let signals = comm.window(&words, 0..64, LONG).unwrap();
    let s = on(&gpu, Via::Kernel);
    let buffer = of_gpu(comm, &gpu, 64);
    if comm.rank() == 0 {
        _ = signals.start_on_stream(&s, &Rma::signal(peer, Signal::set(0, 1))).unwrap();
        s.synchronize(LONG).unwrap();
    }
    let window = signals.beside(&buffer, 0..64, LONG).unwrap();
    match comm.rank() {
        0 => {
            let path = window.path_of(&buffer, 0..8, peer).unwrap();
            says(&path.peer_copies().unwrap_err(), &["streams have used these connections"]);
        }
        _ => is_near(&window, &buffer, peer),
    }
    // Data by a copy, the signal behind it through the queue pair into host memory; or both through the queue pair.
    buffer.memory().fill(0, 8, u8::try_from(comm.rank() + 1).unwrap()).unwrap();
    buffer.memory().flush().unwrap();
    comm.barrier(LONG).unwrap();
    _ = window
        .start_on_stream(&s, &Rma::put(&buffer, 0..8, peer, 8).with_signal(Signal::set(8, 5).of(&signals)))
        .unwrap();
    signals.wait_signal_on_stream(&s, 8, 5, Cond::Eq).unwrap();
    s.synchronize(LONG).unwrap();
    assert_eq!(bytes(&buffer, 8..16), [u8::try_from(peer + 1).unwrap(); 8]);
    comm.barrier(LONG).unwrap();
}

job_test!(connections_that_streams_have_used_stay_with_queues, 2, connections_in_use);

/// The memory of a window that was dropped stays as long as another rank may write to it.
fn dropped(comm: &Communicator) {
    let gpu = own_gpu();
    let (buffer, s) = (of_gpu(comm, &gpu, 4096), on(&gpu, Via::Kernel));
    let target = gpu.alloc(4096).unwrap();
    let registration = comm.register(&target).unwrap();
    let window = comm.window(&registration, 0..4096, LONG).unwrap();
    is_near(&window, &buffer, 1 - comm.rank());
    if comm.rank() == 1 {
        drop((window, registration, target));
        comm.barrier(LONG).unwrap();
        comm.barrier(LONG).unwrap();
        return;
    }
    comm.barrier(LONG).unwrap();
    for round in 0..20 {
        // It is written to memory that nothing else has, or refused by the queue pair.
        let put = window.start_on_stream(&s, &Rma::put(&buffer, 0..4096, 1, 0));
        assert!(put.is_ok(), "{round}: {put:?}");
    }
    s.synchronize(LONG).unwrap();
    comm.barrier(LONG).unwrap();
}

job_test!(memory_of_dropped_windows_stays, 2, dropped);

/// A rank dies while another one puts to it, and waits for its signal.
#[test]
fn dead_ranks_fail_streams() {
    const NAME: &str = "dead_ranks_fail_streams";
    if !is_part_of(NAME) {
        return succeeds(&mut myself(NAME));
    }
    let comm = Communicator::builder().spawn(3).timeout(LONG).init().unwrap();
    let gpu = own_gpu();
    let (buffer, s) = (of_gpu(&comm, &gpu, 1 << 16), on(&gpu, Via::Kernel));
    let window = comm.window(&buffer, 0..1 << 16, LONG).unwrap();
    let put = |rank| {
        window
            .start_on_stream(&s, &Rma::put(&buffer, 0..1 << 15, rank, 1 << 15).with_signal(Signal::set(0, 1)))
    };
    is_near(&window, &buffer, (comm.rank() + 1) % 3);
    comm.barrier(LONG).unwrap();
    if comm.rank() != 0 {
        // Rank 1 is killed here.
        window.wait_signal(0, 1, Cond::Eq, LONG).unwrap();
        loop {
            thread::park();
        }
    }
    let graph = s.capture(|s| {
        let put = Rma::put(&buffer, 0..1 << 15, 1, 1 << 15);
        window.start_on_stream(s, &put).map(drop).map_err(unwrapped)
    });
    let graph = graph.unwrap();
    _ = put(1).unwrap();
    s.synchronize(LONG).unwrap();
    kill(comm.child(1).unwrap());
    // Launches notice, too.
    let error = loop {
        match graph.launch(&s).and_then(|_| s.synchronize(LONG)) {
            Err(error) => break error.to_string(),
            Ok(()) => comm.progress(),
        }
    };
    says(&error, &["rank 1"]);
    // The copies themselves reach memory that the mapping keeps; what follows is refused.
    let error = loop {
        match put(1) {
            Err(error) => break error,
            Ok(request) => match request.wait(LONG) {
                Err(error) => break error,
                Ok(_) => comm.progress(),
            },
        }
    };
    failed_rank(&error, 1);
    assert!(comm.check(1).is_err() && comm.check(2).is_ok());
    // The other rank is reached by another stream, and by this one, if the failure was of the queue pair alone.
    let other = on(&gpu, Via::Kernel);
    let to_2 = Rma::put(&buffer, 0..1 << 15, 2, 1 << 15).with_signal(Signal::set(0, 1));
    let request = window.start_on_stream(&other, &to_2).unwrap();
    assert_eq!(request.wait(LONG).unwrap().bytes, 1 << 15);
    other.synchronize(LONG).unwrap();
    exit(DONE);
}

// The CPU, other streams and later batches are kept out by the order of the copies alone.
job_test!(copies_post_no_work_requests, 2, |comm| {
    let (gpu, peer) = (own_gpu(), 1 - comm.rank());
    let (buffer, s, other) = (of_gpu(comm, &gpu, 4096), on(&gpu, Via::Kernel), on(&gpu, Via::MemOp));
    let window = comm.window(&buffer, 0..4096, LONG).unwrap();
    is_near(&window, &buffer, peer);
    comm.barrier(LONG).unwrap();
    if comm.rank() == 0 {
        let wqes = || comm.context().stats().wqes;
        let before = wqes();
        let gate = Memory::alloc(8).unwrap().word64(0).unwrap();
        s.wait_value64(&gate, 1, Cond::Eq).unwrap();
        let put = || Rma::put(&buffer, 0..64, peer, 64).with_signal(Signal::set(8, 7));
        let busy = |refused: Error| assert!(matches!(unwrapped(refused), gdsync::Error::Busy { .. }));
        let held = window.start_on_stream(&s, &put()).unwrap();
        assert!(held.test().unwrap().is_none());
        busy(window.start_on_stream(&other, &put()).unwrap_err());
        busy(window.start(&put()).unwrap_err());
        busy(window.flush_on_stream(&other, peer).unwrap_err());
        assert!(matches!(
            unwrapped(window.flush(peer, Duration::ZERO).unwrap_err()),
            gdsync::Error::Deadline { .. }
        ));
        // Who started first goes first.
        let mut batch = Batch::new();
        let later = window.start_in_batch(&mut batch, &put()).unwrap();
        let refused = unwrapped(window.start_on_stream(&s, &put()).unwrap_err());
        assert!(matches!(refused, gdsync::Error::OutOfOrder { .. }), "{refused}");
        s.submit(&mut batch).unwrap();
        comm.wait_on_stream(&other, &later).unwrap();
        other.write_value64(&buffer.memory().word64(128).unwrap(), 9).unwrap();
        gate.store(1);
        assert_eq!(later.wait(LONG).unwrap().bytes, 64);
        assert_eq!(held.wait(LONG).unwrap().bytes, 64);
        other.synchronize(LONG).unwrap();
        assert_eq!(buffer.memory().word64(128).unwrap().load(), 9);
        window.flush(peer, LONG).unwrap();
        assert_eq!(wqes(), before, "nothing went through the queue pair");
        // Then it is free for others, by turns.
        let put = window.start(&put()).unwrap();
        comm.wait(&put, LONG).unwrap();
        window.start_on_stream(&other, &Rma::put(&buffer, 0..64, peer, 64)).unwrap().wait(LONG).unwrap();
        drop(window.start_in_batch(&mut Batch::new(), &Rma::put(&buffer, 0..64, peer, 64)));
        window.start_on_stream(&other, &Rma::put(&buffer, 0..64, peer, 64)).unwrap().wait(LONG).unwrap();
    }
    comm.barrier(LONG).unwrap();
});

/// The same ranks, with the GPU of this one.
fn with_gpu(comm: &Communicator, gpu: &Gpu, near: NearPath) -> Communicator {
    Communicator::builder().gpu(gpu).near(near).timeout(LONG).init_over(comm.clone()).unwrap()
}

// Each direction of a channel has its own way, and both ranks know it.
job_test!(directions_of_a_channel_are_independent, 2, |comm| {
    let (gpu, me) = (own_gpu(), comm.rank());
    let comm = &with_gpu(comm, &gpu, NearPath::Auto);
    let (outbox, inbox) = (of_gpu(comm, &gpu, 64), of_gpu(comm, &gpu, 64));
    let host = host_buffer(comm, 64);
    // The GPU of rank 0 puts the messages to rank 1.
    let places = [(&host, 0..64), (&inbox, 0..64)];
    let channel = comm.channel(1 - me, &places[me..=me], LONG).unwrap();
    let path = channel.path_of(&outbox, 0..64).unwrap();
    match me {
        0 => assert_eq!(path.peer_copies(), Ok(()), "{path}"),
        _ => says(&path, &["by CUDA streams no other way: the memory of the other rank is not of a GPU"]),
    }
    let s = on(&gpu, Via::Kernel);
    for n in 0..10 {
        outbox.memory().write(0, &message(me, 1 - me, n, 64)).unwrap();
        outbox.memory().flush().unwrap();
        channel.post_recv_on_stream(&s).unwrap();
        let sent = channel.isend_on_stream(&s, &outbox, 0..64 - n).unwrap();
        let came = channel.wait_recv_on_stream(&s).unwrap();
        assert_eq!(came.wait(LONG).unwrap().bytes, 64 - n);
        assert_eq!(sent.wait(LONG).unwrap().bytes, 64 - n);
        assert!(bytes(places[me].0, 0..64 - n) == message(1 - me, me, n, 64)[..64 - n], "{n}");
    }
    s.synchronize(LONG).unwrap();
    comm.clone().finalize(LONG).unwrap();
});

// Messages of random length and alignment, by calls, batches, batches that are dropped and graphs, whose places differ in each launch.
job_test!(messages_of_a_channel_come_in_order_in_any_mixture, 2, |comm| {
    const PLACES: usize = 3;
    const ROOM: usize = 40_000;
    let (gpu, me) = (own_gpu(), comm.rank());
    let comm = &with_gpu(comm, &gpu, NearPath::PeerCopies);
    let (outbox, inbox) = (of_gpu(comm, &gpu, ROOM), of_gpu(comm, &gpu, PLACES * ROOM));
    let places: Vec<_> = (0..PLACES * me).map(|at| (&inbox, at * ROOM..(at + 1) * ROOM)).collect();
    let channel = comm.channel(1 - me, &places, LONG).unwrap();
    let s = on(&gpu, Via::Kernel);
    let whole = 0..ROOM;
    let graph = (me == 0).then(|| {
        let capture = s.begin_capture().unwrap();
        let _void = channel.isend_on_stream(&s, &outbox, whole.clone()).unwrap();
        capture.end().unwrap()
    });
    let mut random = 1_u64;
    for n in 0..60 {
        random = random.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
        let bits = |shift: u32, end: usize| usize::try_from(random >> shift).unwrap() % end;
        let (kind, start) = (bits(60, 4), bits(40, 64));
        let range = if kind == 3 { whole.clone() } else { start..start + bits(20, ROOM - start) };
        if me == 0 {
            outbox.memory().write(0, &message(0, 1, n, ROOM)).unwrap();
            outbox.memory().flush().unwrap();
            if kind == 1 {
                _ = channel.isend_in_batch(&mut Batch::new(), &outbox, whole.clone()).unwrap();
            }
            match &graph {
                Some(graph) if kind == 3 => drop(graph.launch(&s).unwrap()),
                _ => _ = channel.isend_on_stream(&s, &outbox, range).unwrap(),
            }
            s.synchronize(LONG).unwrap();
            continue;
        }
        let mut batch = Batch::new();
        channel.post_recv_in_batch(&mut batch).unwrap();
        let came = channel.wait_recv_in_batch(&mut batch).unwrap();
        s.submit(&mut batch).unwrap();
        s.synchronize(LONG).unwrap();
        assert_eq!(came.test().unwrap().unwrap().bytes, range.len(), "{n}");
        let place = n % PLACES * ROOM;
        assert!(
            bytes(&inbox, place..place + range.len()) == message(0, 1, n, ROOM)[range.clone()],
            "{n}: {range:?}"
        );
    }
    if me == 1 {
        // Credit that is taken back leaves its wait without a message.
        let (mut credit, mut wait) = (Batch::new(), Batch::new());
        channel.post_recv_in_batch(&mut credit).unwrap();
        _ = channel.wait_recv_in_batch(&mut wait).unwrap();
        drop(credit);
        let refused = channel.wait_recv_in_batch(&mut Batch::new());
        assert!(matches!(refused, Err(Error::NoPostedReceive { rank: 0 })), "{refused:?}");
        channel.post_recv_in_batch(&mut Batch::new()).unwrap();
    }
    comm.clone().finalize(LONG).unwrap();
});

// Whoever wants queue pairs gets them, and both ranks know.
job_test!(channels_use_queue_pairs_where_a_rank_wants_them, 2, |comm| {
    let (gpu, me) = (own_gpu(), comm.rank());
    let over = with_gpu(comm, &gpu, [NearPath::Queues, NearPath::Auto][me]);
    let memory = of_gpu(&over, &gpu, 128);
    let channel = over.channel(1 - me, &[(&memory, 0..64)], LONG).unwrap();
    let path = channel.path_of(&memory, 64..128).unwrap();
    let why =
        ["this rank asked for queue pairs (MP_NEAR", "the other rank asked for queue pairs (MP_NEAR"][me];
    says(&path, &[why]);
    let s = on(&gpu, Via::Kernel);
    channel.post_recv_on_stream(&s).unwrap();
    let sent = channel.isend_on_stream(&s, &memory, 64..128).unwrap();
    _ = channel.wait_recv_on_stream(&s).unwrap();
    over.wait_on_stream(&s, &sent).unwrap();
    s.synchronize(LONG).unwrap();
    over.finalize(LONG).unwrap();
});
