//! Collectives between processes, blocking and on streams, with every byte checked.

use std::time::Duration;

use crate::common::{LONG, buffer, bytes, gpu, job_test, message, says, stream};
use gdsync::stream::{Cond, HostStreamConfig, Stream};
use mp::collective::{Collectives, Number, Pending, Reduction};
use mp::{Communicator, Error, Registration};

/// The bytes of a buffer of `parts` parts, part r being what rank `from(r)` has for rank `to(r)` in round `n`.
fn parts(parts: usize, len: usize, n: usize, ends: impl Fn(usize) -> (usize, usize)) -> Vec<u8> {
    (0..parts).flat_map(|r| message(ends(r).0, ends(r).1, n, len)).collect()
}

fn collectives(comm: &Communicator) -> Collectives {
    Collectives::new(comm, LONG).unwrap()
}

/// The two forms of each collective as one.
struct Form<'a> {
    all: &'a Collectives,
    stream: Option<Stream>,
}

impl Form<'_> {
    fn done(&self, pending: mp::Result<Pending>) {
        let pending = pending.unwrap();
        self.stream.as_ref().unwrap().synchronize(LONG).unwrap();
        pending.wait(LONG).unwrap();
    }

    fn barrier(&self) {
        match &self.stream {
            None => self.all.barrier(LONG).unwrap(),
            Some(s) => self.done(self.all.barrier_on_stream(s)),
        }
    }

    fn broadcast(&self, buffer: &Registration, len: usize, root: usize) {
        match &self.stream {
            None => self.all.broadcast(buffer, 3..3 + len, root, LONG).unwrap(),
            Some(s) => self.done(self.all.broadcast_on_stream(s, buffer, 3..3 + len, root)),
        }
    }

    fn allgather(&self, buffer: &Registration, len: usize) {
        match &self.stream {
            None => self.all.allgather(buffer, 8..8 + len, LONG).unwrap(),
            Some(s) => self.done(self.all.allgather_on_stream(s, buffer, 8..8 + len)),
        }
    }

    fn alltoall(&self, from: &Registration, to: &Registration, len: usize) {
        match &self.stream {
            None => self.all.alltoall((from, 0..len), (to, 1..1 + len), LONG).unwrap(),
            Some(s) => self.done(self.all.alltoall_on_stream(s, (from, 0..len), (to, 1..1 + len))),
        }
    }

    fn allreduce<T: Number>(&self, buffer: &Registration, len: usize, how: Reduction) {
        match &self.stream {
            None => self.all.allreduce::<T>(buffer, 4..4 + len, how, LONG).unwrap(),
            Some(s) => self.done(self.all.allreduce_on_stream::<T>(s, buffer, 4..4 + len, how)),
        }
    }

    /// Every collective with parts of `len` bytes.
    fn play(&self, n: usize, len: usize) {
        let comm = self.all.communicator();
        let (me, size) = (comm.rank(), comm.size());
        let (one, other) = (buffer(comm, size * len + 64), buffer(comm, size * len + 64));
        self.barrier();
        for root in 0..size {
            one.memory().write(3, &message(me, 0, n, len)).unwrap();
            self.broadcast(&one, len, root);
            assert!(
                bytes(&one, 3..3 + len) == message(root, 0, n, len),
                "broadcast of {len} bytes by {root}"
            );
        }
        one.memory().fill(0, size * len + 64, 0xee).unwrap();
        one.memory().write(8 + me * len, &message(me, 0, n, len)).unwrap();
        self.allgather(&one, size * len);
        let expected = parts(size, len, n, |r| (r, 0));
        assert!(bytes(&one, 8..8 + size * len) == expected, "allgather of {len} bytes");
        assert_eq!(bytes(&one, 0..8), [0xee; 8]);
        one.memory().write(0, &parts(size, len, n, |r| (me, r))).unwrap();
        self.alltoall(&one, &other, size * len);
        let expected = parts(size, len, n, |r| (r, me));
        assert!(bytes(&other, 1..1 + size * len) == expected, "alltoall of {len} bytes");
    }

    fn reduce(&self, n: usize) {
        let comm = self.all.communicator();
        let size = comm.size();
        let buffer = buffer(comm, 256);
        let u = |rank: usize, i: usize| (rank * 1000 + i * 7 + n) as u64;
        let write = |values: &[u8]| buffer.memory().write(4, values).unwrap();
        let (me, ranks) = (comm.rank(), 0..size);
        for (how, fold) in [
            (Reduction::Sum, (|a, b| a + b) as fn(u64, u64) -> u64),
            (Reduction::Min, u64::min),
            (Reduction::Max, u64::max),
        ] {
            let expected = |i: usize| ranks.clone().map(|rank| u(rank, i)).reduce(fold).unwrap();
            write(&(0..5).flat_map(|i| u(me, i).to_ne_bytes()).collect::<Vec<_>>());
            self.allreduce::<u64>(&buffer, 40, how);
            let words: Vec<_> =
                bytes(&buffer, 4..44).as_chunks().0.iter().map(|w| u64::from_ne_bytes(*w)).collect();
            assert!(words.iter().copied().eq((0..5).map(expected)), "{how:?}: {words:?}");
            // Small whole numbers are exact, and negative ones turn smallest and largest round.
            write(&(0..3).flat_map(|i| (-(u(me, i) as f64)).to_ne_bytes()).collect::<Vec<_>>());
            self.allreduce::<f64>(&buffer, 24, how);
            let turned = match how {
                Reduction::Min => Reduction::Max,
                Reduction::Max => Reduction::Min,
                other => other,
            };
            let fold = match turned {
                Reduction::Sum => |a, b| a + b,
                Reduction::Min => u64::min,
                _ => u64::max,
            };
            let words: Vec<_> =
                bytes(&buffer, 4..28).as_chunks().0.iter().map(|w| f64::from_ne_bytes(*w)).collect();
            let expected = |i: usize| -(ranks.clone().map(|rank| u(rank, i)).reduce(fold).unwrap() as f64);
            assert!(words.iter().copied().eq((0..3).map(expected)), "{how:?}: {words:?}");
        }
        write(&[0; 0]);
        self.allreduce::<i32>(&buffer, 0, Reduction::Sum);
        self.same_bits(n);
    }

    /// Fractions round, in every rank alike.
    fn same_bits(&self, n: usize) {
        let comm = self.all.communicator();
        let buffer = buffer(comm, 64);
        let value = 0.1_f32 + 1e7 / (comm.rank() + n + 1) as f32;
        buffer.memory().write(4, &value.to_ne_bytes()).unwrap();
        self.allreduce::<f32>(&buffer, 4, Reduction::Sum);
        let all = comm.exchange(&bytes(&buffer, 4..8), LONG).unwrap();
        assert!(all.iter().all(|bits| *bits == all[0]), "{all:?}");
    }
}

fn all_forms(comm: &Communicator) {
    let all = collectives(comm);
    for n in 0..2 {
        for stream in [None, Some(stream("collective"))] {
            let form = Form { all: &all, stream };
            for len in [0, 13, 9000] {
                form.play(n, len);
            }
            form.reduce(n);
        }
    }
}

job_test!(ranks_use_all_forms, [1, 2, 3, 4, 5, 8], all_forms);

// Queues so shallow that the ring has no room to look ahead.
job_test!(a_ring_in_shallow_queues, 5, Communicator::builder().depth(2), |comm| {
    let all = collectives(comm);
    for stream in [None, Some(stream("shallow"))] {
        let form = Form { all: &all, stream };
        (0..5).for_each(|n| form.play(n, 100));
        form.reduce(0);
    }
});

// The CPUs are far ahead of the streams: no rank waits for the CPU of another, and buffers are not written before their stream arrives.
job_test!(streams_run_behind_the_cpu, 3, |comm| {
    // Two host functions each: a stream of a GPU takes 24.
    const COUNT: usize = 12;
    let all = collectives(comm);
    let (me, size) = (comm.rank(), comm.size());
    let (s, shared) = (stream("behind"), buffer(comm, 3 * 64));
    let seen = std::sync::Arc::new(std::sync::Mutex::new(Vec::new()));
    for n in 0..COUNT {
        // All rounds use the same buffer: a faster rank must not overwrite what another is about to read.
        let (memory, seen) = (shared.memory().clone(), seen.clone());
        s.host_fn(move || memory.write(me * 64, &message(me, 0, n, 64)).unwrap()).unwrap();
        all.allgather_on_stream(&s, &shared, 0..3 * 64).map(drop).unwrap();
        let memory = shared.memory().clone();
        s.host_fn(move || {
            if (n + me) % 5 == 0 {
                std::thread::sleep(Duration::from_millis(2));
            }
            seen.lock().unwrap().push(memory.to_vec());
        })
        .unwrap();
    }
    s.synchronize(LONG).unwrap();
    for (n, got) in seen.lock().unwrap().iter().enumerate() {
        assert!(got[..size * 64] == parts(size, 64, n, |r| (r, 0)), "turn {n}");
    }
    assert_eq!(seen.lock().unwrap().len(), COUNT);
});

job_test!(barriers_hold_streams_until_all_arrive, 3, |comm| {
    let all = collectives(comm);
    let (s, words) = (stream("held"), buffer(comm, 64));
    let (gate, passed) = (words.memory().word32(0).unwrap(), words.memory().word32(4).unwrap());
    if comm.rank() == 2 {
        s.wait_value32(&gate, 1, Cond::Eq).unwrap();
    }
    let pending = all.barrier_on_stream(&s).unwrap();
    s.write_value32(&passed, 1).unwrap();
    comm.barrier(LONG).unwrap();
    assert_eq!(passed.load(), 0, "the stream of rank 2 is held");
    comm.barrier(LONG).unwrap();
    gate.store(1);
    pending.wait(LONG).unwrap();
    s.synchronize(LONG).unwrap();
    assert_eq!(passed.load(), 1);
});

job_test!(two_communicators_at_once, 4, |first| {
    let second = Communicator::builder().timeout(LONG).init_over(first.clone()).unwrap();
    assert_eq!((second.rank(), second.size()), (first.rank(), first.size()));
    // Both share one exchange.
    let both = [first, &second].map(|comm| (comm, collectives(comm)));
    std::thread::scope(|scope| {
        for (comm, all) in &both {
            scope.spawn(move || {
                for n in 0..4 {
                    for stream in [None, Some(stream("one of two"))] {
                        let form = Form { all, stream };
                        form.play(n, 1000 * n);
                        let sum = buffer(comm, 64);
                        sum.memory().write(4, &1_i64.to_ne_bytes()).unwrap();
                        form.allreduce::<i64>(&sum, 8, Reduction::Sum);
                        assert_eq!(bytes(&sum, 4..12), (comm.size() as i64).to_ne_bytes());
                    }
                }
            });
        }
    });
    drop(both);
    // A rank that exits early breaks its connections.
    second.finalize(LONG).unwrap();
});

// Refused calls keep the ranks in step.
job_test!(bad_arguments_are_refused_before_anything_is_sent, 3, |comm| {
    let (all, buffer, s) = (collectives(comm), buffer(comm, 96), stream("refused"));
    let device = |result: mp::Result<()>, word: &str| match result.unwrap_err() {
        Error::Device(error) => assert!(error.to_string().contains(word), "{error}"),
        other => panic!("{other}"),
    };
    device(
        all.allgather(&buffer, 0..10, LONG),
        "10 bytes long, no multiple of the 3 ranks: expected one part",
    );
    device(all.broadcast(&buffer, 90..97, 0, LONG), "7 bytes at offset 90");
    #[expect(clippy::reversed_empty_ranges, reason = "that is the mistake")]
    device(all.broadcast(&buffer, 9..3, 0, LONG), "9..3");
    device(
        all.alltoall((&buffer, 0..30), (&buffer, 27..57), LONG),
        "bytes 27..57, which overlap those to send, bytes 0..30",
    );
    device(
        all.alltoall((&buffer, 0..30), (&buffer, 30..90), LONG),
        "60 bytes long, and the one to send 30: expected equal lengths",
    );
    device(
        all.allreduce::<f64>(&buffer, 0..12, Reduction::Sum, LONG),
        "12 bytes long, no multiple of 8, the bytes of f64",
    );
    device(all.allgather_on_stream(&s, &buffer, 0..10).map(drop), "one part of equal length");
    let no_root = "the root of the broadcast is rank 3, and the communicator has ranks 0 to 2: expected one";
    device(all.broadcast(&buffer, 0..1, 3, LONG), no_root);
    device(all.broadcast_on_stream(&s, &buffer, 0..1, 3).map(drop), no_root);
    let capture = s.begin_capture().unwrap();
    device(all.barrier_on_stream(&s).map(drop), "a collective is not supported by graphs");
    drop(capture);
    all.barrier_on_stream(&s).unwrap().wait(LONG).unwrap();
    all.barrier(LONG).unwrap();
});

// Too many at once are refused without harm; after a while there is room again.
job_test!(full_queues_keep_the_ranks_in_step, 2, Communicator::builder().depth(4), |comm| {
    let (all, words, s) = (collectives(&comm.with_timeout(Duration::ZERO)), buffer(comm, 64), stream("full"));
    let gate = words.memory().word32(0).unwrap();
    s.wait_value32(&gate, 1, Cond::Eq).unwrap();
    let mut queued = 0;
    let error = loop {
        match all.barrier_on_stream(&s) {
            Ok(_) => queued += 1,
            Err(error) => break error,
        }
    };
    assert!(
        matches!(&error, Error::Message { cause: gdsync::Error::QueueFull { depth: 4, .. }, .. }),
        "{error}"
    );
    assert_eq!(queued, 3, "each asks for room for two");
    gate.store(1);
    s.synchronize(LONG).unwrap();
    all.barrier_on_stream(&s).unwrap().wait(LONG).unwrap();
    all.barrier(LONG).unwrap();
});

// A stream that takes no more refuses before anything is posted. On a GPU its host functions are what is bounded.
job_test!(full_streams_keep_the_ranks_in_step, 2, |comm| {
    let (all, words) = (collectives(comm), buffer(comm, 64));
    let hasty = collectives(&comm.with_timeout(Duration::ZERO));
    let s = match gpu() {
        Some(_) => stream("full"),
        None => Stream::host(HostStreamConfig { wait_limit: LONG, depth: 4, ..Default::default() }).unwrap(),
    };
    let gate = words.memory().word32(0).unwrap();
    s.wait_value32(&gate, 1, Cond::Eq).unwrap();
    let mut queued: Vec<(Registration, Pending)> = Vec::new();
    let start = |all: &Collectives, n: u64| {
        let buffer = buffer(comm, 64);
        buffer.memory().write(0, &(n + comm.rank() as u64).to_ne_bytes()).unwrap();
        let pending = all.allreduce_on_stream::<u64>(&s, &buffer, 0..8, Reduction::Sum)?;
        Ok((buffer, pending))
    };
    let error = loop {
        match start(&hasty, queued.len() as u64) {
            Ok(one) => queued.push(one),
            Err(error) => break error,
        }
    };
    assert!(matches!(error, Error::Device(gdsync::Error::StreamFull { .. })), "{error}");
    assert_eq!(queued.len(), if gpu().is_some() { 24 } else { 3 });
    comm.barrier(LONG).unwrap();
    gate.store(1);
    queued.push(start(&all, queued.len() as u64).unwrap());
    s.synchronize(LONG).unwrap();
    for (n, (buffer, pending)) in queued.iter().enumerate() {
        pending.wait(LONG).unwrap();
        assert_eq!(bytes(buffer, 0..8), (2 * n as u64 + 1).to_ne_bytes(), "{n}");
    }
    all.barrier(LONG).unwrap();
});

/// What a mismatch says, with the calls of both.
fn differs(result: mp::Result<()>, rank: usize, texts: &[&str]) -> String {
    let error = result.unwrap_err();
    let text = error.to_string();
    assert!(matches!(error, Error::Collective { rank: other, .. } if other == rank), "{text}");
    says(&text, texts);
    text
}

const GAVE_UP: &str = "gave up its collectives, after an error or because it closed them";

job_test!(disagreeing_ranks_get_errors, 2, |comm| {
    let buffer = buffer(comm, 20000);
    // The header comes with the part, or before it.
    for (len, other) in [(8, 16), (16, 8), (8, 10000), (10000, 8), (9000, 10000)] {
        let all = collectives(comm);
        if comm.rank() == 0 {
            let called = |rank, len| format!("{rank} called broadcast(root 0) #1 of {len} bytes");
            // Rank 1 may not receive it: nobody is lost.
            let result = all.broadcast(&buffer, 0..len, 0, LONG).and_then(|()| all.barrier(LONG));
            differs(result, 1, &[&called("rank 1", other), &called("this rank", len)]);
        } else {
            let ours = format!("where this rank called broadcast(root 0) #1 of {other} bytes");
            let theirs = format!("rank 0 called broadcast(root 0) #1 of {len} bytes");
            let text = differs(all.broadcast(&buffer, 0..other, 0, LONG), 0, &[&ours, &theirs]);
            assert_eq!(all.barrier(LONG).unwrap_err().to_string(), text, "it stays so");
            let later = all.barrier_on_stream(&stream("late")).unwrap_err();
            assert_eq!(later.to_string(), text);
        }
        // Nothing else is lost.
        comm.check(1 - comm.rank()).unwrap();
        comm.barrier(LONG).unwrap();
    }
});

// Ranks that enter after the others have given up learn it, and lose nobody.
job_test!(late_ranks_learn_that_others_gave_up, 3, |comm| {
    let (all, buffer) = (collectives(comm), buffer(comm, 64));
    let len = if comm.rank() == 1 { 16 } else { 8 };
    if comm.rank() < 2 {
        let error = all.allreduce::<f64>(&buffer, 0..len, Reduction::Sum, LONG).unwrap_err();
        assert!(matches!(error, Error::Collective { .. }), "{error}");
    }
    // The connections of both have ended.
    comm.barrier(LONG).unwrap();
    if comm.rank() == 2 {
        let error = all.barrier(LONG).unwrap_err();
        assert!(matches!(error, Error::Collective { .. }) && !error.is_rank_lost(), "{error}");
        says(&error, &["called allreduce(f64, sum) #1", "this rank called barrier #1"]);
    }
    comm.barrier(LONG).unwrap();
});

// Rank 2 disagrees with the root, and rank 1 has done its part.
job_test!(failures_on_streams_are_told, 3, |comm| {
    for by_next_call in [false, true] {
        let (all, buffer, s) = (collectives(comm), buffer(comm, 64), stream("told"));
        let len = if comm.rank() == 2 { 16 } else { 8 };
        let pending = all.broadcast_on_stream(&s, &buffer, 0..len, 0).unwrap();
        if comm.rank() == 1 {
            let next = || pending.wait(LONG).and_then(|()| all.barrier_on_stream(&s)?.wait(LONG));
            let error = next().unwrap_err();
            assert!(matches!(error, Error::Collective { .. }) && !error.is_rank_lost(), "{error}");
            let text = error.to_string();
            // Whichever ends its connections first.
            let other = "rank 2 called broadcast_on_stream(root 0) #1 of 16 bytes";
            assert!(text.contains(other) || text.contains("rank 0") && text.contains(GAVE_UP), "{text}");
        } else if by_next_call {
            // It may end with the connections of the other rank.
            _ = s.synchronize(LONG);
            let error = all.barrier_on_stream(&s).unwrap_err();
            assert!(matches!(error, Error::Collective { .. }), "{error}");
        } else {
            let error = pending.wait(LONG).unwrap_err();
            assert!(matches!(error, Error::Collective { .. }), "{error}");
        }
        comm.barrier(LONG).unwrap();
    }
});

// The queues are those of the stream until then. Refused calls keep the ranks in step.
job_test!(collectives_wait_for_those_on_streams, 2, |comm| {
    let (all, words) = (collectives(comm), buffer(comm, 64));
    let (s, other) = (stream("first"), stream("other"));
    let gate = words.memory().word32(0).unwrap();
    s.wait_value32(&gate, 1, Cond::Eq).unwrap();
    let pending = all.barrier_on_stream(&s).unwrap();
    let error = all.barrier(Duration::from_millis(50)).unwrap_err();
    says(&error, &["barrier_on_stream #1"]);
    let error = all.barrier_on_stream(&other).unwrap_err();
    assert!(matches!(error, Error::Device(_)), "{error}");
    says(&error, &["another one than that of barrier_on_stream #1"]);
    comm.barrier(LONG).unwrap();
    let error = std::thread::scope(|scope| {
        let blocked = scope.spawn(|| all.barrier(LONG));
        // Whether the other thread is in its call or not.
        let error = all.barrier(Duration::from_millis(20)).unwrap_err();
        comm.barrier(LONG).unwrap();
        gate.store(1);
        blocked.join().unwrap().unwrap();
        error
    });
    assert!(matches!(error, Error::Deadline { .. } | Error::Message { .. }), "{error}");
    pending.wait(LONG).unwrap();
    all.barrier_on_stream(&other).unwrap().wait(LONG).unwrap();
    all.barrier(LONG).unwrap();
});

/// Another thread calls `end` while one of rank 0 waits in a barrier, without a deadline, that rank 1 does not call.
fn waits_until(all: &Collectives, end: impl FnOnce()) -> Error {
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| all.barrier(Duration::MAX));
        std::thread::sleep(Duration::from_millis(20));
        end();
        waits.join().unwrap().unwrap_err()
    })
}

job_test!(collectives_that_another_thread_closes_return, 2, |comm| {
    let (closed, destroyed, lost) = (collectives(comm), collectives(comm), collectives(comm));
    let is_closed = |error: &Error| assert!(matches!(error, Error::Closed { .. }), "{error}");
    if comm.rank() == 0 {
        is_closed(&waits_until(&closed, || closed.close()));
        comm.barrier(LONG).unwrap();
        is_closed(&closed.barrier(LONG).unwrap_err());
        is_closed(&waits_until(&destroyed, || is_closed(&destroyed.destroy(LONG).unwrap_err())));
        let error = waits_until(&lost, || comm.give_up(1).unwrap());
        assert!(error.is_rank_lost(), "{error}");
    } else {
        comm.barrier(LONG).unwrap();
        let error = closed.barrier(LONG).unwrap_err();
        assert!(matches!(error, Error::Collective { .. }), "{error}");
        says(&error, &["rank 0 gave up its collectives"]);
        destroyed.destroy(LONG).unwrap();
        is_closed(&destroyed.barrier(LONG).unwrap_err());
    }
    comm.barrier(LONG).unwrap();
});

job_test!(calls_of_all_ranks_wait_for_that_of_another_thread_until_their_deadline, 2, |comm| {
    let go = buffer(comm, 8);
    if comm.rank() == 0 {
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| comm.barrier(Duration::MAX));
            std::thread::sleep(Duration::from_millis(20));
            let short = Duration::from_millis(20);
            let error = comm.exchange(&[], short).unwrap_err();
            says(&error, &["another call of all ranks in another thread", "20 ms"]);
            assert!(matches!(comm.clone().finalize(short).unwrap_err(), Error::Deadline { .. }));
            comm.wait(&comm.isend(&go, 0..8, 1).unwrap(), LONG).unwrap();
            waits.join().unwrap().unwrap();
        });
    } else {
        comm.wait(&comm.irecv(&go, 0..8, 0).unwrap(), LONG).unwrap();
        comm.barrier(LONG).unwrap();
    }
});

// A receive of a late call must not be written after that.
job_test!(dropped_collectives_release_their_buffers, 2, |comm| {
    let (all, memory) = (collectives(comm), buffer(comm, 64));
    if comm.rank() == 0 {
        let error = all.broadcast(&memory, 0..8, 1, Duration::from_millis(50)).unwrap_err();
        assert!(matches!(error, Error::Message { cause: gdsync::Error::Deadline { .. }, .. }), "{error}");
        drop(all);
        comm.barrier(LONG).unwrap();
    } else {
        memory.memory().fill(0, 64, 0xee).unwrap();
        comm.barrier(LONG).unwrap();
        let error = all.broadcast(&memory, 0..8, 1, LONG).and_then(|()| all.barrier(LONG)).unwrap_err();
        assert!(matches!(error, Error::Collective { .. }) && !error.is_rank_lost(), "{error}");
    }
    comm.barrier(LONG).unwrap();
    if comm.rank() == 0 {
        assert_eq!(bytes(&memory, 0..8), [0; 8]);
    }
});

job_test!(collectives_are_given_back, 2, |comm| {
    let mapped = || std::fs::read_to_string("/proc/self/maps").unwrap().lines().count();
    let (mut before, s) = (0, stream("given back"));
    for n in 0..40 {
        let all = collectives(comm);
        all.barrier(LONG).unwrap();
        _ = all.barrier_on_stream(&s).unwrap();
        all.destroy(LONG).unwrap();
        s.synchronize(LONG).unwrap();
        if n == 9 {
            before = mapped();
        }
    }
    assert!(mapped() < before + 30, "each leaves memory behind: {before}, then {}", mapped());
    // After a failure, too.
    let (all, buffer) = (collectives(comm), buffer(comm, 64));
    let len = 8 * (1 + comm.rank());
    all.allreduce::<u64>(&buffer, 0..len, Reduction::Sum, LONG).unwrap_err();
    let error = all.destroy(LONG).unwrap_err();
    assert!(matches!(error, Error::Collective { .. }), "{error}");
});

// Of equal size: without headers each would take the messages of the other.
job_test!(other_collectives_of_equal_size_name_both, 2, |comm| {
    let (me, buffer) = (comm.rank(), buffer(comm, 64));
    let other = 1 - me;
    let sum = |all: &Collectives, how| all.allreduce::<f32>(&buffer, 0..8, how, LONG);
    let broadcast = "broadcast(root 0) #1 of 8 bytes";
    let all = collectives(comm);
    if me == 0 {
        all.broadcast(&buffer, 0..8, 0, LONG).unwrap();
        differs(
            all.barrier(LONG),
            1,
            &["rank 1 called allreduce(f32, sum) #1 of 8 bytes", "this rank called broadcast(root 0) #1"],
        );
    } else {
        differs(
            sum(&all, Reduction::Sum),
            0,
            &[broadcast, "this rank called allreduce(f32, sum) #1 of 8 bytes"],
        );
    }
    comm.barrier(LONG).unwrap();
    let all = collectives(comm);
    match me {
        0 => {
            differs(sum(&all, Reduction::Min), other, &["allreduce(f32, max) #1 ", "allreduce(f32, min) #1 "])
        }
        _ => {
            differs(sum(&all, Reduction::Max), other, &["allreduce(f32, min) #1 ", "allreduce(f32, max) #1 "])
        }
    };
    comm.barrier(LONG).unwrap();
    let (all, s) = (collectives(comm), stream("equal"));
    let pending = match me {
        0 => all.allgather_on_stream(&s, &buffer, 0..16),
        _ => all.alltoall_on_stream(&s, (&buffer, 0..16), (&buffer, 16..32)),
    };
    let pending = pending.unwrap();
    let texts = ["allgather_on_stream #1 of 16 bytes", "alltoall_on_stream #1 of 16 bytes"];
    // The rank that sees it first may end the connection before the other one has read the header.
    let error = pending.wait(LONG).unwrap_err();
    let text = error.to_string();
    assert!(matches!(error, Error::Collective { rank, .. } if rank == other), "{text}");
    assert!(text.contains(GAVE_UP) || texts.iter().all(|part| text.contains(part)), "{text}");
    assert_eq!(all.barrier(LONG).unwrap_err().to_string(), text, "the next call says it, too");
    comm.barrier(LONG).unwrap();
});

// The messages of the communicator are its own.
job_test!(receives_posted_before_a_collective_keep_their_messages, 2, |comm| {
    let (me, other, memory) = (comm.rank(), 1 - comm.rank(), buffer(comm, 256));
    let all = collectives(comm);
    for n in 0..4 {
        memory.memory().fill(0, 256, 0).unwrap();
        memory.memory().write(128, &message(me, other, n, 64)).unwrap();
        let received = comm.irecv(&memory, 0..64, other).unwrap();
        let sum = buffer(comm, 64);
        sum.memory().write(0, &7_u64.to_ne_bytes()).unwrap();
        all.allreduce::<u64>(&sum, 0..64, Reduction::Max, LONG).unwrap();
        all.barrier(LONG).unwrap();
        assert_eq!(bytes(&sum, 0..8), 7_u64.to_ne_bytes());
        assert!(received.test().unwrap().is_none(), "nothing was sent to it");
        all.barrier(LONG).unwrap();
        let sent = comm.isend(&memory, 128..192, other).unwrap();
        assert_eq!(comm.wait(&received, LONG).unwrap().bytes, 64);
        comm.wait(&sent, LONG).unwrap();
        assert!(bytes(&memory, 0..64) == message(other, me, n, 64));
    }
});

// What ends the connection to a rank ends its collectives.
job_test!(ranks_that_are_given_up_end_collectives, 2, |comm| {
    let all = collectives(comm);
    if comm.rank() == 0 {
        let error = all.barrier(LONG).unwrap_err();
        assert!(error.is_rank_lost() && error.to_string().contains("barrier with rank 1"), "{error}");
    } else {
        comm.give_up(0).unwrap();
        let error = all.barrier(LONG).unwrap_err();
        assert!(matches!(error, Error::Message { rank: 0, .. }) && error.is_rank_lost(), "{error}");
    }
    comm.barrier(LONG).unwrap();
});

job_test!(missing_ranks_are_named, 2, |comm| {
    let all = collectives(comm);
    if comm.rank() != 1 {
        let error = all.barrier(Duration::from_millis(300)).unwrap_err();
        let is_late = matches!(error, Error::Message { rank: 1, cause: gdsync::Error::Deadline { .. }, .. });
        assert!(is_late, "{error}");
        says(
            &error,
            &["barrier with rank 1: not complete within 300 ms: it waits for rank 1 to ", " barrier #1"],
        );
        assert_eq!(all.barrier(LONG).unwrap_err().to_string(), error.to_string(), "out of step");
    }
    comm.barrier(LONG).unwrap();
});

// No header of one comes to the other: each finds what the other has called by reading it.
job_test!(different_roots_are_found, 3, |comm| {
    for is_on_stream in [false, true] {
        let (all, buffer, s) = (collectives(comm), buffer(comm, 64), stream("roots"));
        let me = comm.rank();
        // The last rank agrees with the first one, and may be through before the error is found.
        let root = usize::from(me == 1);
        let form = if is_on_stream { "_on_stream" } else { "" };
        let called = |root| format!("called broadcast{form}(root {root}) #1 of 8 bytes");
        // Rank 1 may look at the last rank first, which then ends the call of rank 0.
        let theirs = match me {
            0 => [format!("rank 1 {}", called(1)), "rank 2 gave up its collectives".to_owned()],
            _ => [0, 2].map(|rank| format!("rank {rank} {}", called(0))),
        };
        let finds = |error: &dyn std::fmt::Display| {
            let text = error.to_string();
            assert!(theirs.iter().any(|theirs| text.contains(theirs)), "{text}");
            says(error, &[&format!("this rank {}", called(root))]);
        };
        let result = match is_on_stream {
            true => all.broadcast_on_stream(&s, &buffer, 0..8, root).and_then(|pending| {
                let synchronized = s.synchronize(LONG);
                let waited = pending.wait(LONG);
                if me < 2 {
                    finds(&synchronized.unwrap_err());
                }
                waited
            }),
            false => all.broadcast(&buffer, 0..8, root, LONG),
        };
        if me < 2 {
            let error = result.unwrap_err();
            assert!(matches!(error, Error::Collective { .. }), "{error}");
            finds(&error);
        }
        assert!(comm.lost().is_empty());
        comm.barrier(LONG).unwrap();
    }
});

// The streams of both get the messages that they wait for: their headers tell.
job_test!(synchronize_finds_other_calls, 2, |comm| {
    let (me, other) = (comm.rank(), 1 - comm.rank());
    for n in 0..3 {
        let (all, buffer, s) = (collectives(comm), buffer(comm, 64), stream("differ"));
        let how = if me == 0 { Reduction::Sum } else { Reduction::Max };
        let pending = match n {
            0 => all.broadcast_on_stream(&s, &buffer, 0..8, other),
            1 => all.allreduce_on_stream::<u64>(&s, &buffer, 0..8, how),
            _ => all.allgather_on_stream(&s, &buffer, 0..16 << me),
        };
        let pending = pending.unwrap();
        let error = s.synchronize(LONG).unwrap_err();
        let started = format!("rank {other} ");
        says(&error, &[&started, "_on_stream", "#1"]);
        assert!(matches!(pending.wait(LONG).unwrap_err(), Error::Collective { rank, .. } if rank == other));
        assert!(comm.lost().is_empty());
        comm.barrier(LONG).unwrap();
    }
});

// The root of a short broadcast waits for nobody: the next call is the first to find it.
job_test!(different_roots_are_found_by_the_next_call, 2, |comm| {
    let (all, buffer, me) = (collectives(comm), buffer(comm, 64), comm.rank());
    // Afterwards short messages go through the shared memory FIFO, if there is one.
    for _ in 0..4 {
        all.barrier(LONG).unwrap();
    }
    let error = all.broadcast(&buffer, 0..8, me, LONG).and_then(|()| all.barrier(LONG)).unwrap_err();
    let other = format!("rank {} called broadcast(root {}) #5", 1 - me, 1 - me);
    says(&error, &[&other, &format!("this rank called broadcast(root {me}) #5")]);
    comm.barrier(LONG).unwrap();
});

job_test!(late_calls_say_what_the_other_rank_has_called, 2, |comm| {
    let all = collectives(comm);
    all.allreduce::<u64>(&buffer(comm, 64), 0..8, Reduction::Sum, LONG).unwrap();
    if comm.rank() == 0 {
        // The watchdog looks four times a second.
        let error = all.barrier(Duration::from_secs(3)).unwrap_err();
        says(
            &error,
            &["rank 1 to call barrier #2, whose last call is #1", "Communicator::barrier is another one"],
        );
    }
    comm.barrier(LONG).unwrap();
});

job_test!(streams_name_the_collective_that_a_rank_has_not_called, 2, |comm| {
    let (all, buffer) = (collectives(comm), buffer(comm, 64));
    if comm.rank() == 0 {
        let wait_limit = Duration::from_millis(500);
        let s = Stream::host(HostStreamConfig { wait_limit, ..HostStreamConfig::default() }).unwrap();
        let pending = all.allreduce_on_stream::<u64>(&s, &buffer, 0..8, Reduction::Sum).unwrap();
        let error = s.synchronize(LONG).unwrap_err();
        says(&error, &["for rank 1 to call a collective", "call it there on a stream"]);
        assert!(!error.to_string().contains("irecv"), "{error}");
        says(
            &pending.wait(LONG).unwrap_err(),
            &["allreduce with rank 1: ", "for rank 1 to call a collective"],
        );
    }
    comm.barrier(LONG).unwrap();
});
