//! What streams do to the queues they use: prepared requests, claims, ownership, credits, and batches run by the CPU.

use std::time::{Duration, Instant};

use crate::common::{PATIENCE, Side, assert_wqes, gate, hca, loopback, pair, stream, tier};
use gdsync::error::Error;
use gdsync::stream::{Batch, Cond, Stream};
use gdsync::verbs::{RecvWr, SendWr};

/// A write of one byte, `value`, to byte `at` of the other side.
fn write<'a>(to: &Side, at: usize, value: &'a [u8; 1]) -> SendWr<'a> {
    SendWr::write_inline(to.mr.remote(at).unwrap(), value).id(value[0].into())
}

/// What the queue pair's send completions, in order, were for.
fn polled(side: &Side, count: usize) -> Vec<u64> {
    let cq = side.qp.send_cq();
    (0..count).map(|_| cq.wait(PATIENCE).unwrap().ok().unwrap().wr_id).collect()
}

fn run(s: &Stream, fill: impl FnOnce(&mut Batch)) {
    let mut batch = Batch::new();
    fill(&mut batch);
    s.submit(&mut batch).unwrap();
    s.synchronize(PATIENCE).unwrap();
}

#[test]
fn prepared_sends_must_be_posted_in_order() {
    let (a, b) = pair(64, |q| q);
    let s = stream("order");
    let first = a.qp.prepare_send(&[write(&b, 0, &[1])]).unwrap();
    let second = a.qp.prepare_send(&[write(&b, 0, &[2])]).unwrap();
    let mut wrong = Batch::new();
    wrong.post(second);
    for _ in 0..2 {
        let error = s.submit(&mut wrong).unwrap_err();
        assert!(matches!(error, Error::OutOfOrder { expected: 0, got: 1, .. }), "{error}");
        assert!(error.to_string().contains("post in prepare order, or drop the earlier one"), "{error}");
    }
    let error = a.qp.post_send(&[SendWr::nop()]).unwrap_err();
    assert!(matches!(error, Error::OutOfOrder { .. }), "the CPU would expose them too: {error}");
    run(&s, |right| drop(right.post(first)));
    s.submit(&mut wrong).unwrap();
    s.synchronize(PATIENCE).unwrap();
    assert_eq!(polled(&a, 2), [1, 2]);
    assert_eq!(b.memory().to_vec()[0], 2);
    assert_eq!(a.context.stats().violations, 0);
}

#[test]
fn one_doorbell_starts_sends_in_a_row() {
    let (a, b) = pair(64, |q| q);
    let s = stream("row");
    let mut batch = Batch::new();
    for value in [[1], [2], [3]] {
        batch.send(&a.qp, &write(&b, 0, &value)).unwrap();
    }
    assert_eq!(batch.len(), 1);
    batch.wait_all_sends(&a.qp).unwrap();
    batch.send(&a.qp, &write(&b, 1, &[4])).unwrap();
    assert_eq!(batch.len(), 3, "none before a wait rings for what comes behind it");
    s.submit(&mut batch).unwrap();
    s.synchronize(PATIENCE).unwrap();
    assert_eq!(polled(&a, 1), [4]);
    assert_eq!(b.memory().to_vec()[..2], [3, 4]);
}

#[test]
fn batch_with_one_part_out_of_order_marks_nothing() {
    let ((a, b), (c, d)) = (pair(64, |q| q), pair(64, |q| q));
    let s = stream("order");
    let first = c.qp.prepare_send(&[write(&d, 0, &[1])]).unwrap();
    let second = c.qp.prepare_send(&[write(&d, 0, &[2])]).unwrap();
    let mut batch = Batch::new();
    batch.send(&a.qp, &write(&b, 0, &[9])).unwrap();
    batch.post(second);
    assert!(matches!(s.submit(&mut batch), Err(Error::OutOfOrder { .. })));
    // The send that came before the bad one is not marked either: another stream may go first there.
    let done = first.completion();
    run(&stream("other"), |right| drop(right.post(first)));
    done.wait(PATIENCE).unwrap();
    s.submit(&mut batch).unwrap();
    s.synchronize(PATIENCE).unwrap();
    assert_eq!((polled(&a, 1), polled(&c, 2)), (vec![9], vec![1, 2]));
}

#[test]
fn claims_must_be_posted_in_order() {
    let (a, _b) = pair(64, |q| q);
    let s = stream("claims");
    a.qp.post_send(&[SendWr::nop().id(0), SendWr::nop().id(1)]).unwrap();
    let first = a.qp.prepare_wait_send().unwrap();
    let second = a.qp.prepare_wait_send().unwrap();
    assert!(matches!(a.qp.prepare_wait_send(), Err(Error::NothingToWaitFor { queue: "send", .. })));
    let nothing = a.qp.prepare_wait_recv().unwrap_err();
    assert!(matches!(nothing, Error::NothingToWaitFor { queue: "receive", .. }), "{nothing}");
    assert!(nothing.to_string().contains("post it before the wait"), "{nothing}");
    let (one, two) = (first.completion(), second.completion());
    let mut batch = Batch::new();
    batch.post_wait(second);
    assert!(matches!(s.submit(&mut batch), Err(Error::OutOfOrder { expected: 0, got: 1, .. })));
    run(&s, |right| drop(right.post_wait(first)));
    s.submit(&mut batch).unwrap();
    s.synchronize(PATIENCE).unwrap();
    assert_eq!([one, two].map(|c| c.status().unwrap().unwrap().wr_id), [0, 1]);
    assert!(a.qp.poll_send().is_none(), "a stream took them");
}

#[test]
fn send_dropped_in_the_middle_completes_silently() {
    let (a, b) = pair(64, |q| q.max_send_wr(8).max_inline(16));
    let s = stream("middle");
    for round in 0..50u8 {
        let values = [[3 * round], [3 * round + 1], [3 * round + 2]];
        let [first, dropped, last] =
            values.each_ref().map(|v| a.qp.prepare_send(&[write(&b, 0, v)]).unwrap());
        drop(dropped);
        let mut batch = Batch::new();
        batch.post(first);
        batch.post(last);
        if round % 2 == 0 {
            let got = [batch.wait_send(&a.qp).unwrap(), batch.wait_send(&a.qp).unwrap()];
            assert!(matches!(batch.wait_send(&a.qp), Err(Error::NothingToWaitFor { .. })));
            s.submit(&mut batch).unwrap();
            s.synchronize(PATIENCE).unwrap();
            let ids = got.map(|c| c.status().unwrap().unwrap().wr_id);
            assert_eq!(ids, [values[0][0], values[2][0]].map(u64::from));
        } else {
            s.submit(&mut batch).unwrap();
            s.synchronize(PATIENCE).unwrap();
            assert_eq!(polled(&a, 2), [u64::from(values[0][0]), values[2][0].into()]);
        }
        assert_eq!(b.memory().to_vec()[0], values[2][0]);
        assert!(a.qp.poll_send().is_none());
    }
    assert_eq!(a.context.stats().violations, 0);
}

#[test]
fn dropped_wait_gives_the_completion_back() {
    let (a, _b) = pair(64, |q| q.max_send_wr(4));
    let s = stream("back");
    let nops = |ids: &[u64]| {
        let wrs: Vec<_> = ids.iter().map(|id| SendWr::nop().id(*id)).collect();
        a.qp.post_send(&wrs).unwrap();
    };
    for _ in 0..20 {
        // Before poll comes by.
        nops(&[1]);
        drop(a.qp.prepare_wait_send().unwrap());
        assert_eq!(polled(&a, 1), [1]);
        // After poll has gone past it.
        nops(&[2, 3]);
        let wait = a.qp.prepare_wait_send().unwrap();
        assert_eq!(polled(&a, 1), [3]);
        assert!(a.qp.poll_send().is_none());
        drop(wait);
        assert_eq!(polled(&a, 1), [2]);
        // Not the last claim: poll gets it, the later ones stay with the stream.
        nops(&[4, 5, 6]);
        let [four, five, six] = std::array::from_fn(|_| a.qp.prepare_wait_send().unwrap());
        drop(five);
        assert_eq!(polled(&a, 1), [5]);
        run(&s, |batch| {
            batch.post_wait(four);
            batch.post_wait(six);
        });
        assert!(a.qp.poll_send().is_none());
        // In the order of claims, all can be claimed again.
        nops(&[7, 8]);
        let (seven, eight) = (a.qp.prepare_wait_send().unwrap(), a.qp.prepare_wait_send().unwrap());
        drop(seven);
        drop(eight);
        let again = s.wait_send(&a.qp).unwrap();
        s.synchronize(PATIENCE).unwrap();
        assert_eq!(again.status().unwrap().unwrap().wr_id, 7);
        assert_eq!(polled(&a, 1), [8]);
        // Behind poll too, unless a later one was polled.
        nops(&[9]);
        let wait = a.qp.prepare_wait_send().unwrap();
        wait.completion().wait(PATIENCE).unwrap();
        assert!(a.qp.poll_send().is_none());
        drop(wait);
        run(&s, |batch| drop(batch.wait_send(&a.qp).unwrap()));
        assert!(a.qp.poll_send().is_none());
        // One claim over several.
        nops(&[9, 10, 11]);
        let mut batch = Batch::new();
        let _last = batch.wait_all_sends(&a.qp).unwrap();
        drop(batch);
        assert_eq!(polled(&a, 3), [9, 10, 11]);
        assert!(matches!(Batch::new().wait_all_sends(&a.qp), Err(Error::NothingToWaitFor { .. })));
    }
}

#[test]
fn dropped_batch_takes_everything_back() {
    let (a, b) = pair(64, |q| q);
    let s = stream("batch");
    for _ in 0..20 {
        let mut batch = Batch::new();
        for i in 0..3 {
            batch.send(&a.qp, &write(&b, 0, &[i])).unwrap();
            batch.wait_send(&a.qp).unwrap();
        }
        drop(batch);
        let done = {
            s.send(&a.qp, &SendWr::nop().id(40)).unwrap();
            s.wait_send(&a.qp).unwrap()
        };
        s.synchronize(PATIENCE).unwrap();
        assert_eq!(done.status().unwrap().unwrap().wr_id, 40);
    }
    assert_wqes(&a.context, 20, "what was dropped is not sent");
}

#[test]
fn cpu_waits_for_all_sends_but_those_only_prepared() {
    let (a, b) = pair(64, |q| q.max_send_wr(8));
    let (s, held) = (stream("waited for"), gate());
    a.qp.wait_all_sends(PATIENCE).unwrap();
    for n in 0..20 {
        a.qp.post_send(&[write(&b, 0, &[n]), write(&b, 1, &[n])]).unwrap();
        a.qp.wait_all_sends(PATIENCE).unwrap();
        assert_eq!(b.memory().to_vec()[..2], [n; 2]);
        // What a stream has not got to yet counts, what no stream has does not.
        held.store(0);
        s.wait_value32(&held, 1, Cond::Eq).unwrap();
        let last = s.send(&a.qp, &write(&b, 0, &[n + 1])).unwrap();
        let prepared = a.qp.prepare_send(&[write(&b, 0, &[255])]).unwrap();
        let error = a.qp.wait_all_sends(Duration::from_millis(5)).unwrap_err();
        assert!(matches!(error, Error::Deadline { .. }), "{error}");
        held.store(1);
        a.qp.wait_all_sends(PATIENCE).unwrap();
        assert_eq!(last.status().unwrap().unwrap().wr_id, u64::from(n + 1));
        let taken_back = prepared.completion();
        assert!(!taken_back.is_taken_back() && !last.is_taken_back());
        drop(prepared);
        assert!(taken_back.is_taken_back() && !last.is_taken_back());
        assert!(matches!(taken_back.wait(PATIENCE), Err(Error::TakenBack { .. })));
        last.wait(PATIENCE).unwrap();
        assert_eq!(b.memory().to_vec()[0], n + 1);
        s.synchronize(PATIENCE).unwrap();
        while a.qp.poll_send().is_some() {}
    }
    a.qp.abort().unwrap();
    a.qp.wait_all_sends(PATIENCE).unwrap();
}

#[test]
fn waiting_for_all_sends_tells_what_failed() {
    let (a, b) = pair(64, |q| q);
    let gone = b.mr.remote(0).unwrap();
    let wrong = SendWr::write_inline(gdsync::verbs::RemoteAddr { rkey: !gone.rkey, ..gone }, &[1]);
    a.qp.post_send(&[wrong.id(3), SendWr::nop()]).unwrap();
    for _ in 0..2 {
        let error = a.qp.wait_all_sends(PATIENCE).unwrap_err();
        assert!(matches!(&error, Error::Completion(c) if c.wr_id == 3 && !c.is_flush()), "{error}");
    }
}

/// The CPU looks at few of the completions that a stream has passed; each says what it says all the same.
#[test]
fn what_a_stream_has_passed_can_be_asked_for() {
    let (a, b) = pair(64, |q| q.max_send_wr(8).max_recv_wr(8));
    let s = stream("passed");
    for round in 0..50u32 {
        let place = [b.mr.sge(0, 64).unwrap()];
        let receives: Vec<_> = (0..8).map(|wr_id| RecvWr::new(&place).id(wr_id)).collect();
        let last = b.qp.post_recv(&receives).unwrap().index();
        let mut batch = Batch::new();
        let (mut sent, mut received) = (Vec::new(), Vec::new());
        for i in 0..8u32 {
            let payload = [a.mr.sge(0, usize::try_from(i).unwrap()).unwrap()];
            let send = SendWr::send(&payload).imm(100 * round + i).id(i.into());
            sent.push(batch.send(&a.qp, &send).unwrap());
            received.push(batch.wait_recv(&b.qp).unwrap());
        }
        batch.wait_all_sends(&a.qp).unwrap();
        s.submit(&mut batch).unwrap();
        s.synchronize(PATIENCE).unwrap();
        assert_eq!(received[7].index(), last);
        for i in [7, 3, 0, 5, 5] {
            let at = usize::try_from(i).unwrap();
            let [sent, received] = [&sent, &received].map(|all| all[at].status().unwrap().unwrap());
            assert_eq!((sent.wr_id, received.wr_id), (i.into(), i.into()));
            assert_eq!((received.byte_len, received.imm), (i, Some(100 * round + i)), "round {round}");
        }
    }
    assert!(a.qp.poll_send().is_none() && b.qp.poll_recv().is_none());
}

#[test]
fn failure_among_completions_that_a_stream_has_passed_is_told() {
    let (a, b) = pair(64, |q| q);
    let s = stream("passed");
    let gone = b.mr.remote(0).unwrap();
    let gone = gdsync::verbs::RemoteAddr { rkey: !gone.rkey, ..gone };
    let mut batch = Batch::new();
    let mut sent = Vec::new();
    for i in 0..8u8 {
        let value = [i];
        let send = if i == 4 { SendWr::write_inline(gone, &value).id(4) } else { write(&b, 0, &value) };
        sent.push(batch.send(&a.qp, &send).unwrap());
    }
    batch.wait_all_sends(&a.qp).unwrap();
    s.submit(&mut batch).unwrap();
    let error = s.synchronize(PATIENCE).unwrap_err();
    assert!(matches!(&error, Error::Completion(c) if c.wr_id == 4 && !c.is_flush()), "{error}");
    for (i, sent) in (0..).zip(&sent) {
        match sent.status() {
            Ok(Some(wc)) => assert!(i < 4 && wc.wr_id == i),
            Err(Error::Completion(c)) => assert!(i >= 4 && c.wr_id == i && c.is_flush() == (i > 4)),
            other => panic!("send {i}: {other:?}"),
        }
    }
}

#[test]
fn queue_pair_belongs_to_one_stream_until_it_is_idle() {
    let (a, b) = pair(64, |q| q);
    let (one, two) = (stream("one"), stream("two"));
    let held = gate();
    one.wait_value32(&held, 1, Cond::Eq).unwrap();
    one.send(&a.qp, &write(&b, 0, &[1])).unwrap();
    let error = two.send(&a.qp, &write(&b, 0, &[2])).unwrap_err();
    assert!(matches!(&error, Error::Busy { queue: "send", .. }), "{error}");
    let text = error.to_string();
    assert!(text.contains("still belongs to stream") && text.contains("one QP per stream"), "{text}");
    let error = a.qp.post_send(&[write(&b, 0, &[3])]).unwrap_err();
    assert!(matches!(&error, Error::Busy { queue: "send", .. }), "{error}");
    let mut batch = Batch::new();
    batch.send(&a.qp, &write(&b, 0, &[4])).unwrap();
    assert!(matches!(batch.run(PATIENCE), Err(Error::Busy { .. })));
    drop(batch);
    one.wait_send(&a.qp).unwrap();
    one.send(&a.qp, &write(&b, 1, &[5])).unwrap();
    // The wait is held by the first stream: the second may not wait here, even for a later completion.
    let error = two.wait_send(&a.qp).unwrap_err();
    assert!(matches!(&error, Error::Busy { .. }), "{error}");
    held.store(1);
    one.synchronize(PATIENCE).unwrap();
    assert_eq!(polled(&a, 1), [5], "the refused wait was given back");
    two.send(&a.qp, &write(&b, 2, &[6])).unwrap();
    two.wait_send(&a.qp).unwrap();
    two.synchronize(PATIENCE).unwrap();
    a.qp.post_send(&[write(&b, 3, &[7])]).unwrap();
    assert_eq!(polled(&a, 1), [7]);
    run(&one, |batch| {
        batch.send(&a.qp, &write(&b, 4, &[8])).unwrap();
        batch.wait_send(&a.qp).unwrap();
    });
    assert_eq!(b.memory().to_vec()[..5], [1, 5, 6, 7, 8]);
}

#[test]
fn streams_do_not_wait_on_shared_completion_queues() {
    let context = hca();
    let cq = context.create_cq(64).unwrap();
    let sides = [(); 2].map(|()| Side::new(&context, 64, |q| q.send_cq(&cq).recv_cq(&cq)));
    sides[0].qp.connect(sides[1].qp.address()).unwrap();
    sides[1].qp.connect(sides[0].qp.address()).unwrap();
    let s = stream("shared");
    s.send(&sides[0].qp, &SendWr::nop().id(3)).unwrap();
    for result in [s.wait_send(&sides[0].qp), s.wait_recv(&sides[1].qp)] {
        assert!(matches!(result, Err(Error::Unsupported { .. })), "{result:?}");
    }
    assert_eq!(cq.wait(PATIENCE).unwrap().wr_id, 3, "the CPU polls it");
}

#[test]
fn completions_tell_pending_done_forgotten_and_failed() {
    let (a, b) = pair(64, |q| q.max_send_wr(4));
    let s = stream("status");
    let held = gate();
    let mut batch = Batch::new();
    batch.wait_value32(&held, 1, Cond::Eq);
    let sent = batch.send(&a.qp, &write(&b, 0, &[1])).unwrap();
    let waited = batch.wait_send(&a.qp).unwrap();
    s.submit(&mut batch).unwrap();
    assert!(sent.status().unwrap().is_none() && waited.status().unwrap().is_none());
    assert!(matches!(sent.wait(Duration::from_millis(1)), Err(Error::Deadline { .. })));
    held.store(1);
    assert_eq!(sent.wait(PATIENCE).unwrap().wr_id, 1);
    s.synchronize(PATIENCE).unwrap();
    assert_eq!(waited.status().unwrap().unwrap().wr_id, 1);
    for _ in 0..64 {
        s.send(&a.qp, &SendWr::nop()).unwrap();
        s.wait_send(&a.qp).unwrap();
        s.synchronize(PATIENCE).unwrap();
    }
    assert!(matches!(sent.status(), Err(Error::Forgotten { qpn }) if qpn == a.qp.qpn()));
    let bad = s
        .send(&a.qp, &SendWr::write_inline(gdsync::verbs::RemoteAddr { addr: 0, rkey: 1 }, &[1]).id(66))
        .unwrap();
    let error = bad.wait(PATIENCE).unwrap_err();
    assert!(matches!(error, Error::Completion(e) if e.wr_id == 66), "{error}");
    assert!(matches!(sent.status(), Err(Error::Completion(_))), "the root cause says more than `forgotten`");
}

#[test]
fn full_queues_recover_when_the_stream_moves_on() {
    let (a, b) = pair(64, |q| q.max_send_wr(4).max_inline(0).max_recv_wr(4));
    let s = stream("credits");
    let held = gate();
    for round in 1..=10u32 {
        s.wait_value32(&held, round, Cond::Eq).unwrap();
        let mut sent = 0;
        let full = loop {
            match s.with_timeout(Duration::ZERO).send(&a.qp, &SendWr::nop()) {
                Ok(_) => sent += 1,
                Err(error) => break error,
            }
        };
        assert!(matches!(full, Error::QueueFull { queue: "send queue", .. }), "{full}");
        assert!((4..=8).contains(&sent), "{sent}");
        held.store(round);
        s.synchronize(PATIENCE).unwrap();
        // The sends are done and their blocks free, but nobody has taken the completions.
        let start = Instant::now();
        let full = loop {
            let result = s.with_timeout(Duration::ZERO).send(&a.qp, &SendWr::nop());
            assert!(start.elapsed() < PATIENCE, "not full: {result:?}");
            match result {
                Err(error @ Error::QueueFull { queue: "send completion queue", .. }) => break error,
                _ => s.synchronize(PATIENCE).unwrap(),
            }
        };
        assert!(full.to_string().contains(&format!("{:#x}", a.qp.qpn())), "{full}");
        // Waits by the stream free them; the CPU never polls.
        s.wait_send(&a.qp).unwrap();
        run(&s, |batch| drop(batch.wait_all_sends(&a.qp).unwrap()));
        run(&s, |batch| {
            batch.send(&a.qp, &write_of(&b)).unwrap();
            batch.wait_send(&a.qp).unwrap();
        });
    }
    let receive = || b.qp.post_recv(&[RecvWr::new(&[])]);
    let posted = (0..).take_while(|_| receive().is_ok()).count();
    assert_eq!(posted, 4);
    assert!(matches!(receive(), Err(Error::QueueFull { queue: "receive queue", .. })));
}

fn write_of(to: &Side) -> SendWr<'static> {
    SendWr::write(to.mr.remote(0).unwrap(), &[])
}

#[test]
fn streams_alone_keep_the_queues_going() {
    const BATCH: u32 = 25;
    let (a, b) = loopback(64, |q| q.max_send_wr(64).max_recv_wr(64));
    let (sa, sb) = (stream("send"), stream("receive"));
    let patient = |what: &mut dyn FnMut() -> Result<(), Error>| {
        let start = Instant::now();
        while let Err(error) = what() {
            assert!(matches!(error, Error::QueueFull { .. }), "{error}");
            assert!(start.elapsed() < PATIENCE, "no credit comes back");
            std::thread::yield_now();
        }
    };
    let messages = tier(5000, 50_000, 1_000_000);
    for _ in 0..messages / BATCH {
        let (mut sends, mut receives) = (Batch::new(), Batch::new());
        for _ in 0..BATCH {
            patient(&mut || b.qp.post_recv(&[RecvWr::new(&[])]).map(drop));
            receives.wait_recv(&b.qp).unwrap();
        }
        sb.submit(&mut receives).unwrap();
        for _ in 0..BATCH {
            patient(&mut || sends.send(&a.qp, &SendWr::send(&[])).map(drop));
            sends.wait_send(&a.qp).unwrap();
        }
        sa.submit(&mut sends).unwrap();
    }
    sa.synchronize(PATIENCE).unwrap();
    sb.synchronize(PATIENCE).unwrap();
    assert_wqes(&a.context, messages.into(), "each one once");
    assert_eq!(a.context.stats().violations, 0);
}
