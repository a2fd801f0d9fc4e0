//! Sends and waits on streams: order within a batch, across streams, what is told about it, and what waiting costs.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use gdsync::error::Error;
use gdsync::memory::Memory;
use gdsync::stream::{Batch, Cond, HostStreamConfig, Stream};
use gdsync::verbs::{QpAttr, QpState, RecvWr, SendWr};

use crate::child::is_own_process;
use crate::common::{
    PATIENCE, assert_clean, counts, gate, hca, is_device_named, loopback, pair, stream, stream_with, tier,
    until, wrong_key,
};
use crate::place::{Site, sites};

#[test]
fn stream_sends_and_another_receives() {
    for site in sites() {
        let (a, b) = site.pair(4096, |q| q);
        let (sa, sb) = (site.stream(PATIENCE), site.stream(PATIENCE));
        a.memory().write(0, b"over the stream").unwrap();
        b.qp.post_recv(&[RecvWr::new(&[b.mr.sge(100, 50).unwrap()]).id(9)]).unwrap();
        let got = sb.wait_recv(&b.qp).unwrap();
        sa.send(&a.qp, &SendWr::send(&[a.mr.sge(0, 15).unwrap()]).id(5).imm(77)).unwrap();
        let sent = sa.wait_send(&a.qp).unwrap();
        sa.synchronize(PATIENCE).unwrap();
        sb.synchronize(PATIENCE).unwrap();
        assert_eq!(sent.status().unwrap().unwrap().wr_id, 5);
        let wc = got.status().unwrap().unwrap();
        assert_eq!((wc.wr_id, wc.byte_len, wc.imm), (9, 15, Some(77)));
        let mut out = [0; 15];
        b.memory().read(100, &mut out).unwrap();
        assert_eq!(&out, b"over the stream");
        assert_clean(&[&a, &b]);
    }
}

/// The deadline of a call that comes before the wait limit.
#[test]
fn deadline_of_a_call_says_what_holds_the_stream() {
    for site in sites() {
        let (a, _b) = site.pair(64, |q| q);
        a.qp.post_recv(&[RecvWr::new(&[]).id(9)]).unwrap();
        let (stream, gate) = (site.stream(2 * PATIENCE), gate());
        // The wait may not have begun when the first calls end.
        let says = |call: &dyn Fn() -> Result<(), Error>, words: &[&str]| {
            until(|| {
                let error = call().unwrap_err();
                assert!(matches!(error, Error::Deadline { .. }), "{error}");
                words.iter().all(|words| error.to_string().contains(words))
            });
        };
        let soon = Duration::from_millis(1);
        let graph = stream.capture(|stream| stream.wait_value32(&gate, 1, Cond::Geq)).unwrap();
        let launch = graph.launch(&stream).unwrap();
        stream.wait_recv(&a.qp).unwrap();
        let word = format!("did not finish within 1 ms: it waits for WAIT32 [{:#x}] Geq 0x1", gate.addr());
        let limit = "; the stream's wait limit ends that in ";
        let trace = format!(" s; `gdasync trace {}` shows more", std::process::id());
        says(&|| stream.synchronize(soon), &["synchronizing stream '", &word, limit, &trace]);
        says(&|| launch.wait(&stream, soon), &["a launch on stream '", &word, limit, &trace]);
        gate.store(1);
        let receive = format!("it waits for receive 0 (wr_id 9) of QP {:#x} to complete; see", a.qp.qpn());
        says(&|| stream.synchronize(soon), &[&receive, limit, &trace]);
        stream.abort();
        until(|| stream.query().pending == 0);
    }
}

#[test]
fn deadline_of_a_call_on_a_stream_that_waits_for_nothing_says_so() {
    for site in sites() {
        let (open, gate) = std::sync::mpsc::channel::<()>();
        let stream = site.stream(PATIENCE);
        stream.host_fn(move || _ = gate.recv()).unwrap();
        let text = stream.synchronize(Duration::from_millis(5)).unwrap_err().to_string();
        assert!(text.contains("it waits for 1 submission(s), but for no message or word now"), "{text}");
        drop(open);
        stream.synchronize(PATIENCE).unwrap();
    }
}

#[test]
fn host_function_that_synchronizes_its_own_stream_is_refused() {
    for site in sites() {
        let stream = Arc::new(site.stream(PATIENCE));
        let (tell, told) = std::sync::mpsc::channel();
        let own = stream.clone();
        stream.host_fn(move || _ = tell.send(own.synchronize(PATIENCE))).unwrap();
        let error = told.recv().unwrap().unwrap_err();
        assert!(matches!(error, Error::Unsupported { .. }), "{error:?}");
        assert!(error.to_string().contains("on another thread"), "{error}");
        stream.synchronize(PATIENCE).unwrap();
    }
}

/// What the words of `memory` are at one point of a stream.
fn snapshot(log: &Arc<Mutex<Vec<Vec<u8>>>>, memory: &Memory) -> impl FnOnce() + Send + 'static + use<> {
    let (log, memory) = (log.clone(), memory.clone());
    move || log.lock().unwrap().push(memory.to_vec())
}

#[test]
fn batch_of_everything_runs_in_order() {
    let (a, b) = pair(64, |q| q);
    let gate = Memory::alloc(64).unwrap();
    let s = stream("order");
    let log = Arc::new(Mutex::new(Vec::new()));
    let mut batch = Batch::new();
    assert!(batch.is_empty());
    // Each step reads what the one before wrote: any two swapped would show, or hang.
    batch.wait_value32(&gate.word32(0).unwrap(), 7, Cond::Eq);
    batch.host_fn(snapshot(&log, a.memory()));
    batch.write_value32(&a.memory().word32(0).unwrap(), 0x1111_1111);
    batch.write_value64(&a.memory().word64(8).unwrap(), 0x2222_2222_2222_2222);
    batch.host_fn(snapshot(&log, a.memory()));
    batch.write_memory(a.memory(), 16, &[3; 12]).unwrap();
    batch.send(&a.qp, &SendWr::write(b.mr.remote(0).unwrap(), &[a.mr.sge(0, 28).unwrap()])).unwrap();
    batch.wait_send(&a.qp).unwrap();
    batch.host_fn(snapshot(&log, b.memory()));
    // This one must not be sent before the first has been looked at above.
    batch.write_value32(&a.memory().word32(0).unwrap(), 0x4444_4444);
    batch.barrier();
    batch.send(&a.qp, &SendWr::write(b.mr.remote(0).unwrap(), &[a.mr.sge(0, 4).unwrap()])).unwrap();
    batch.wait_value32(&b.memory().word32(0).unwrap(), 0x4444_4444, Cond::Eq);
    batch.wait_value64(&b.memory().word64(8).unwrap(), 1 << 61, Cond::And);
    batch.wait_send(&a.qp).unwrap();
    batch.host_fn(snapshot(&log, b.memory()));
    batch.write_value64(&gate.word64(8).unwrap(), 99);
    let len = batch.len();
    s.submit(&mut batch).unwrap();
    assert!(batch.is_empty() && len >= 17);

    assert_eq!(s.query().pending, 1);
    assert!(matches!(s.synchronize(Duration::from_millis(5)), Err(Error::Deadline { .. })));
    assert!(log.lock().unwrap().is_empty(), "nothing runs past the gate");
    gate.word32(0).unwrap().store(7);
    s.synchronize(PATIENCE).unwrap();
    assert_eq!((s.query().pending, s.query().error.is_none()), (0, true));
    assert_eq!(gate.word64(8).unwrap().load(), 99);
    let log = log.lock().unwrap();
    let image = |first: u8, second: u8, third: u8| {
        let mut image = vec![0; 64];
        image[..4].fill(first);
        image[8..16].fill(second);
        image[16..28].fill(third);
        image
    };
    let expected = [image(0, 0, 0), image(0x11, 0x22, 0), image(0x11, 0x22, 3), image(0x44, 0x22, 3)];
    assert_eq!(*log, expected);
}

#[test]
fn words_written_by_a_batch_are_checked_when_added() {
    let memory = Memory::alloc(16).unwrap();
    let mut batch = Batch::new();
    assert!(matches!(batch.write_memory(&memory, 12, &[0; 8]), Err(Error::OutOfBounds { .. })));
    assert!(matches!(batch.write_memory(&memory, 0, &[0; 3]), Err(Error::InvalidArgument { .. })));
    assert!(matches!(batch.write_memory(&memory, 2, &[0; 4]), Err(Error::InvalidArgument { .. })));
    assert!(batch.is_empty(), "a refused write adds nothing");
}

#[test]
fn wait_that_no_word_satisfies_is_refused() {
    let s = stream("endless");
    let words = Memory::alloc(16).unwrap();
    let (narrow, wide) = (words.word32(0).unwrap(), words.word64(8).unwrap());
    for refused in [
        s.wait_value32(&narrow, 0, Cond::And),
        s.wait_value32(&narrow, u32::MAX, Cond::Nor),
        s.wait_value64(&wide, 0, Cond::And),
        s.wait_value64(&wide, u64::MAX, Cond::Nor),
    ] {
        assert!(matches!(refused, Err(Error::InvalidArgument { .. })), "{refused:?}");
    }
    let captured = s.capture(|s| s.wait_value32(&narrow, 0, Cond::And));
    assert!(matches!(captured, Err(Error::InvalidArgument { .. })), "{captured:?}");
    s.synchronize(PATIENCE).unwrap();
}

#[test]
fn full_stream_leaves_the_batch_as_it_was() {
    let (a, b) = pair(64, |q| q);
    let gate = gate();
    let s = Stream::host(HostStreamConfig { name: "full".into(), depth: 2, ..HostStreamConfig::default() })
        .unwrap();
    s.wait_value32(&gate, 1, Cond::Eq).unwrap();
    s.write_value32(&gate, 2).unwrap();
    let mut batch = Batch::new();
    for i in 0..3 {
        a.memory().write(i, &[10 + u8::try_from(i).unwrap()]).unwrap();
        let sge = [a.mr.sge(i, 1).unwrap()];
        batch.send(&a.qp, &SendWr::write(b.mr.remote(i).unwrap(), &sge).id(i as u64)).unwrap();
    }
    let waits: Vec<_> = (0..3).map(|_| batch.wait_send(&a.qp).unwrap()).collect();
    let len = batch.len();
    for _ in 0..3 {
        let error = s.with_timeout(Duration::ZERO).submit(&mut batch).unwrap_err();
        assert!(matches!(&error, Error::StreamFull { stream, depth: 2 } if stream == "full"), "{error}");
        assert!(error.to_string().contains("wait longer for room (Stream::with_timeout)"), "{error}");
        let error = s.with_timeout(Duration::from_millis(2)).submit(&mut batch).unwrap_err();
        assert!(matches!(error, Error::StreamFull { .. }), "{error}");
        assert_eq!(batch.len(), len);
    }
    // Another stream may have it meanwhile: the refused one left no trace.
    let opener = gate.clone();
    let thread = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(10));
        opener.store(1);
    });
    s.submit(&mut batch).unwrap();
    thread.join().unwrap();
    s.synchronize(PATIENCE).unwrap();
    for (i, wait) in waits.iter().enumerate() {
        assert_eq!(wait.status().unwrap().unwrap().wr_id, i as u64);
    }
    assert_eq!(b.memory().to_vec()[..3], [10, 11, 12]);
}

#[test]
fn refused_batch_can_go_to_another_stream() {
    let (a, _b) = pair(64, |q| q);
    let gate = gate();
    let full =
        Stream::host(HostStreamConfig { name: "full".into(), depth: 1, ..HostStreamConfig::default() })
            .unwrap();
    full.wait_value32(&gate, 1, Cond::Eq).unwrap();
    let mut batch = Batch::new();
    let nops: [SendWr<'_>; 3] = std::array::from_fn(|i| SendWr::nop().id(i as u64));
    batch.sends(&a.qp, &nops).unwrap();
    let last = batch.wait_all_sends(&a.qp).unwrap();
    assert!(matches!(full.with_timeout(Duration::ZERO).submit(&mut batch), Err(Error::StreamFull { .. })));
    let other = stream("other");
    other.submit(&mut batch).unwrap();
    other.synchronize(PATIENCE).unwrap();
    assert_eq!(last.status().unwrap().unwrap().wr_id, 2);
    gate.store(1);
    full.synchronize(PATIENCE).unwrap();
}

/// A process ends though a dropped stream of it waits for ever.
#[test]
fn stuck_stream_does_not_keep_its_process() {
    if !is_own_process() {
        return;
    }
    let s = stream_with("stuck", Duration::MAX);
    s.wait_value32(&gate(), 1, Cond::Eq).unwrap();
}

/// A stream without a name has its number.
#[test]
fn errors_name_a_stream_alike() {
    for name in ["", "halo"] {
        let (a, _b) = pair(64, |q| q);
        let s = stream(name);
        let held = gate();
        s.wait_value32(&held, 1, Cond::Eq).unwrap();
        s.send(&a.qp, &SendWr::nop()).unwrap();
        let busy = a.qp.post_send(&[SendWr::nop()]).unwrap_err();
        let Error::Busy { owner, .. } = &busy else { panic!("{busy}") };
        s.abort();
        let aborted = s.synchronize(PATIENCE).unwrap_err().to_string();
        assert!(aborted.starts_with(&format!("{owner} was aborted")), "{aborted}, {busy}");
        assert_eq!(format!("{s:?}"), format!("Stream(host {owner})"));
        match name {
            "" => assert!(owner["stream ".len()..].parse::<u64>().is_ok(), "{owner}"),
            name => assert_eq!(*owner, format!("stream '{name}'")),
        }
    }
}

/// The pattern of round `i` that side `who` sends.
fn pattern(i: u32, who: u32) -> u32 {
    (i << 1 | who).wrapping_mul(0x9e37_79b9)
}

#[test]
fn two_streams_play_ping_pong_posted_ahead() {
    sites().for_each(|site| ping_pong(&site));
}

fn ping_pong(site: &Site) {
    const DEPTH: u32 = 64;
    let rounds = match site {
        Site::Host => tier(200, 2000, 100_000),
        Site::Gpu(_) => tier(100, 500, 20_000),
    };
    let (a, b) = site.pair(4096, |q| q.max_send_wr(256).max_recv_wr(128));
    let (sa, sb) = (site.stream(PATIENCE), site.stream(PATIENCE));
    let done = Arc::new(AtomicU32::new(0));
    let recv = |side: &crate::common::Side| {
        let sge = [side.mr.sge(8, 4).unwrap()];
        side.qp.post_recv(&[RecvWr::new(&sge)]).unwrap();
    };
    let check = |side: &crate::common::Side, expected: u32| {
        let (word, done) = (side.memory().word32(8).unwrap(), done.clone());
        move || {
            assert_eq!(word.load(), expected);
            done.fetch_add(1, Ordering::Relaxed);
        }
    };
    for i in 0..rounds {
        if i >= DEPTH && i % DEPTH == 0 {
            sa.synchronize(PATIENCE).unwrap();
            sb.synchronize(PATIENCE).unwrap();
        }
        recv(&a);
        recv(&b);
        let mut pong = Batch::new();
        pong.wait_recv(&b.qp).unwrap();
        pong.host_fn(check(&b, pattern(i, 0)));
        pong.write_value32(&b.memory().word32(0).unwrap(), pattern(i, 1));
        pong.send(&b.qp, &SendWr::send(&[b.mr.sge(0, 4).unwrap()])).unwrap();
        pong.wait_send(&b.qp).unwrap();
        sb.submit(&mut pong).unwrap();
        let mut ping = Batch::new();
        ping.write_value32(&a.memory().word32(0).unwrap(), pattern(i, 0));
        ping.send(&a.qp, &SendWr::send(&[a.mr.sge(0, 4).unwrap()])).unwrap();
        ping.wait_send(&a.qp).unwrap();
        ping.wait_recv(&a.qp).unwrap();
        ping.host_fn(check(&a, pattern(i, 1)));
        sa.submit(&mut ping).unwrap();
    }
    sa.synchronize(PATIENCE).unwrap();
    sb.synchronize(PATIENCE).unwrap();
    assert_eq!(done.load(Ordering::Relaxed), 2 * rounds);
    assert_clean(&[&a, &b]);
}

#[test]
fn eight_threads_each_with_stream_and_queue_pair() {
    const ROUNDS: u64 = 200;
    let context = hca();
    let sum = AtomicU64::new(0);
    std::thread::scope(|scope| {
        for t in 0..8u64 {
            let (context, sum) = (&context, &sum);
            scope.spawn(move || {
                let a = crate::common::Side::new(context, 64, |q| q);
                let b = crate::common::Side::new(context, 64, |q| q);
                a.qp.connect(b.qp.address()).unwrap();
                b.qp.connect(a.qp.address()).unwrap();
                let s = stream(&format!("t{t}"));
                for i in 0..ROUNDS {
                    b.qp.post_recv(&[RecvWr::new(&[b.mr.sge(0, 8).unwrap()]).id(i)]).unwrap();
                    let mut batch = Batch::new();
                    batch.write_value64(&a.memory().word64(0).unwrap(), t << 32 | i);
                    batch.send(&a.qp, &SendWr::send(&[a.mr.sge(0, 8).unwrap()]).id(i)).unwrap();
                    batch.wait_send(&a.qp).unwrap();
                    let got = batch.wait_recv(&b.qp).unwrap();
                    s.submit(&mut batch).unwrap();
                    s.synchronize(PATIENCE).unwrap();
                    assert_eq!(got.status().unwrap().unwrap().wr_id, i);
                    assert_eq!(b.memory().word64(0).unwrap().load(), t << 32 | i);
                    sum.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
    });
    assert_eq!(sum.load(Ordering::Relaxed), 8 * ROUNDS);
    assert_eq!(context.stats().violations, 0);
}

#[test]
fn threads_that_share_a_stream_and_a_queue_pair_cannot_mix_it_up() {
    let (a, b) = loopback(64, |q| q.max_send_wr(64));
    // Whoever finds the queue full takes a completion.
    let s = stream("shared").with_timeout(Duration::ZERO);
    let sent = AtomicU64::new(0);
    std::thread::scope(|scope| {
        for t in 0..4 {
            let (a, b, s, sent) = (&a, &b, &s, &sent);
            scope.spawn(move || {
                for _ in 0..300 {
                    let wr = SendWr::fetch_add(b.mr.remote(0).unwrap(), 1, a.mr.sge(8 * t, 8).unwrap());
                    match s.send(&a.qp, &wr) {
                        Ok(_) => drop(sent.fetch_add(1, Ordering::Relaxed)),
                        // Prepared in one order, submitted in the other.
                        Err(Error::OutOfOrder { .. }) => {}
                        Err(Error::QueueFull { .. }) => drop(a.qp.poll_send()),
                        Err(other) => panic!("{other}"),
                    }
                }
            });
        }
    });
    s.synchronize(PATIENCE).unwrap();
    // The sends given up in the middle need a doorbell behind them to get out of the way.
    until(|| {
        while a.qp.poll_send().is_some() {}
        match s.send(&a.qp, &SendWr::nop().id(u64::MAX)) {
            Ok(_) => true,
            // A card completes what the stream has rung a moment later.
            Err(Error::QueueFull { .. }) => false,
            Err(other) => panic!("{other}"),
        }
    });
    while a.qp.send_cq().wait(PATIENCE).unwrap().wr_id != u64::MAX {}
    assert_eq!(b.memory().word64(0).unwrap().load(), sent.load(Ordering::Relaxed));
    assert_eq!(a.context.stats().violations, 0);
}

#[test]
fn root_cause_is_what_happened_first_not_what_was_seen_first() {
    let (a, b) = pair(64, |q| q);
    if !counts(&a.context) {
        println!("skipped: nobody tells when the device has failed a send");
        return;
    }
    let s = stream_with("late", PATIENCE);
    let gate = gate();
    a.qp.post_recv(&[RecvWr::new(&[])]).unwrap();
    let mut batch = Batch::new();
    batch.wait_value32(&gate, 1, Cond::Eq);
    batch.wait_recv(&a.qp).unwrap();
    s.submit(&mut batch).unwrap();
    let wrong = wrong_key(&b);
    let before = a.context.stats().packets_received;
    a.qp.post_send(&[SendWr::write_inline(wrong, &[1; 4]).id(0xbad)]).unwrap();
    let start = std::time::Instant::now();
    while a.context.stats().packets_received == before {
        assert!(start.elapsed() < PATIENCE, "no answer");
        a.context.progress();
    }
    s.abort();
    let error = s.synchronize(PATIENCE).unwrap_err();
    assert!(matches!(error, Error::StreamAborted { .. }), "{error}");
    assert!(error.to_string().contains("by Stream::abort or by a panic"), "{error}");
    let text = a.qp.check().unwrap_err().to_string();
    assert!(text.contains("wr_id 2989"), "{text}");
}

/// One thread sends and waits on a stream, another resets the queue pair whenever it may: what the stream took is run as it was asked
/// for, or refused.
#[test]
fn reset_waits_for_what_a_stream_took() {
    let allowed = tier(50, 500, 20_000);
    let (a, b) = loopback(64, |q| q);
    let s = stream("resets");
    std::thread::scope(|scope| {
        let resetter = scope.spawn(|| {
            let mut resets = 0;
            while resets < allowed {
                match a.qp.modify(&QpAttr::to(QpState::RESET)) {
                    Ok(()) => {
                        a.qp.connect(b.qp.address()).unwrap();
                        resets += 1;
                    }
                    Err(Error::Busy { .. }) => {}
                    Err(error) => panic!("{error}"),
                }
            }
        });
        let mut id = 0;
        while !resetter.is_finished() {
            id += 1;
            match s.send(&a.qp, &SendWr::nop().id(id)) {
                Ok(sent) => match sent.wait(PATIENCE) {
                    Ok(wc) => assert_eq!(wc.wr_id, id),
                    // The stream had passed it, and nobody had polled.
                    Err(Error::Reset { .. }) => continue,
                    Err(error) => panic!("{error}"),
                },
                Err(Error::WrongState { .. }) => continue,
                Err(error) => panic!("{error}"),
            }
            match s.wait_send(&a.qp) {
                Ok(_) => s.synchronize(PATIENCE).unwrap(),
                Err(Error::NothingToWaitFor { .. }) => {}
                Err(error) => panic!("{error}"),
            }
        }
    });
    assert_eq!(a.context.stats().violations, 0);
}

/// CPU time of all threads of this process.
fn cpu() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the pointer is valid for one timespec.
    assert_eq!(unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &raw mut time) }, 0);
    Duration::new(time.tv_sec.try_into().unwrap(), time.tv_nsec.try_into().unwrap())
}

#[test]
fn four_streams_that_wait_use_little_cpu() {
    // The bound is that of the software HCA.
    if is_device_named() || !is_own_process() {
        return;
    }
    let pairs: Vec<_> = (0..4).map(|_| pair(64, |q| q)).collect();
    let streams: Vec<_> = (0..4).map(|i| stream(&format!("idle{i}"))).collect();
    for ((_, b), s) in pairs.iter().zip(&streams) {
        b.qp.post_recv(&[RecvWr::new(&[]).id(1)]).unwrap();
        s.wait_recv(&b.qp).unwrap();
    }
    let (start, before) = (Instant::now(), cpu());
    std::thread::sleep(Duration::from_millis(300));
    let (wall, used) = (start.elapsed(), cpu() - before);
    assert!(used < wall * 15 / 100, "{used:?} of CPU in {wall:?}");
    for ((a, _), s) in pairs.iter().zip(&streams) {
        a.qp.post_send(&[SendWr::send(&[])]).unwrap();
        s.synchronize(PATIENCE).unwrap();
    }
}
