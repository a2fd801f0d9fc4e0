//! Queues and queue pairs over their life: shared completion queues, full queues, reset and use again.

use crate::common::{
    PATIENCE, Side, assert_clean, bytes, connect, counts, hca, loopback, message, pair, pattern, received,
    reconnect, sent, stream, until,
};
use gdsync::Error;
use gdsync::mlx5::Syndrome;
use gdsync::stream::{Batch, Stream};
use gdsync::verbs::{QpAddress, QpAttr, QpState, RecvWr, SendWr};

fn reset(side: &Side) {
    side.qp.modify(&QpAttr::to(QpState::RESET)).unwrap();
}

/// Eight pairs complete all sends on one queue and all receives on another, which the CPU polls.
#[test]
fn shared_completion_queue_keeps_each_queue_pairs_order() {
    const PAIRS: usize = 8;
    const EACH: u64 = 100;
    let context = hca();
    let cq = context.create_cq(256).unwrap();
    let sides: Vec<_> = (0..PAIRS)
        .map(|_| {
            let side =
                || Side::new(&context, 4096, |q| q.max_send_wr(8).max_recv_wr(8).send_cq(&cq).recv_cq(&cq));
            connect(side(), side())
        })
        .collect();
    let (mut posted, mut taken) = ([[0; 2]; PAIRS], [[0; 2]; PAIRS]);
    while taken != [[EACH; 2]; PAIRS] {
        for (i, (a, b)) in sides.iter().enumerate() {
            let [sends, recvs] = &mut posted[i];
            while *recvs < EACH && b.qp.post_recv(&[RecvWr::new(&[]).id(*recvs)]).is_ok() {
                *recvs += 1;
            }
            while *sends < *recvs && a.qp.post_send(&[SendWr::send_inline(&[]).id(*sends)]).is_ok() {
                *sends += 1;
            }
        }
        let wc = cq.wait(PATIENCE).unwrap().ok().unwrap();
        let i = sides.iter().position(|(a, b)| [a.qp.qpn(), b.qp.qpn()].contains(&wc.qpn)).unwrap();
        let of = &mut taken[i][usize::from(!wc.is_send())];
        assert_eq!(wc.wr_id, *of, "pair {i}, {:?}", wc.opcode);
        *of += 1;
    }
    assert!(cq.poll().is_none());
}

#[test]
fn many_queue_pairs_of_two_hcas_work_side_by_side() {
    let (left, right) = (hca(), hca());
    let sides: Vec<_> = (0..100)
        .map(|_| {
            // The CPU proxy may bring a receive to the device after it was posted here, on a busy machine by milliseconds.
            let side = |context| Side::new(context, 4096, |q| q.max_send_wr(2).max_recv_wr(2).rnr_retry(7));
            connect(side(&left), side(&right))
        })
        .collect();
    let mut qpns: Vec<_> = sides.iter().map(|(a, _)| a.qp.qpn()).collect();
    qpns.dedup();
    assert_eq!(qpns.len(), 100);
    for round in 0..5usize {
        for (i, (a, b)) in sides.iter().enumerate() {
            a.memory().write(0, &pattern(64, i + round)).unwrap();
            b.qp.post_recv(&[RecvWr::new(&[b.mr.sge(0, 64).unwrap()])]).unwrap();
            a.qp.post_send(&[SendWr::send(&[a.mr.sge(0, 64).unwrap()])]).unwrap();
        }
        for (i, (a, b)) in sides.iter().enumerate().rev() {
            sent(a).ok().unwrap();
            assert_eq!(received(b).ok().unwrap().qpn, b.qp.qpn());
            assert_eq!(bytes(b, 0, 64), pattern(64, i + round));
        }
    }
    assert_clean(&[&sides[0].0, &sides[0].1]);
}

#[test]
fn addresses_lead_back_as_text_and_as_bytes() {
    let (a, b) = (Side::new(&hca(), 4096, |q| q), Side::new(&hca(), 4096, |q| q));
    assert_eq!((a.qp.state(), a.qp.address().gid), (QpState::RESET, a.context.gid()));
    let text: QpAddress = a.qp.address().to_string().parse().unwrap();
    b.qp.connect(text).unwrap();
    // Receives may be posted before the other side is known.
    a.qp.init().unwrap();
    assert_eq!(a.qp.state(), QpState::INIT);
    a.qp.post_recv(&[RecvWr::new(&[]).id(1)]).unwrap();
    a.qp.connect(QpAddress::from_bytes(&b.qp.address().to_bytes()).unwrap()).unwrap();
    assert_eq!((a.qp.state(), b.qp.state()), (QpState::RTS, QpState::RTS));
    b.qp.post_send(&[SendWr::send(&[])]).unwrap();
    assert_eq!(received(&a).ok().unwrap().wr_id, 1);
    message(&a, &b, 2);
}

/// With requests outstanding, completed but not polled, and polled, in every mixture that fits.
#[test]
fn after_a_reset_completions_belong_to_the_new_requests() {
    let build = |q: gdsync::verbs::QpBuilder| q.max_send_wr(4).max_recv_wr(4);
    for (a, b) in [loopback(4096, build), pair(4096, build)] {
        let mut id = 100;
        for round in 0..40u64 {
            let (done, polled, hanging) = (round % 4, round % 3, round % 2);
            for i in 0..done {
                b.qp.post_recv(&[RecvWr::new(&[]).id(1)]).unwrap();
                let last = a.qp.post_send(&[SendWr::send(&[]).id(i)]).unwrap();
                last.wait(PATIENCE).unwrap();
            }
            for i in 0..polled.min(done) {
                assert_eq!(sent(&a).ok().unwrap().wr_id, i);
                received(&b).ok().unwrap();
            }
            if hanging == 1 {
                // No receive is there for it, and the receives of this side find no sender.
                a.qp.post_send(&[SendWr::send(&[]).id(77)]).unwrap();
                a.qp.post_recv(&[RecvWr::new(&[]).id(78)]).unwrap();
            }
            reconnect(&a.qp, &b.qp);
            assert!(a.qp.poll_send().is_none() && b.qp.poll_recv().is_none(), "round {round}");
            for _ in 0..9 {
                message(&a, &b, id);
                message(&b, &a, id);
                id += 1;
            }
        }
        assert_clean(&[&a, &b]);
    }
}

#[test]
fn who_only_waits_is_told_that_nobody_takes_the_completions() {
    let (a, b) = loopback(64, |q| q.max_send_wr(4).max_recv_wr(4).max_inline(0));
    let send = || a.qp.post_send(&[SendWr::nop()]).and_then(|sent| sent.wait(PATIENCE));
    for _ in 0..4 {
        send().unwrap();
    }
    let text = send().unwrap_err().to_string();
    assert!(
        text.contains("(4 of 4 entries in use; 4 completed and not taken, or of other queues: poll_send, "),
        "{text}"
    );
    let receive = || {
        let received = b.qp.post_recv(&[RecvWr::new(&[])])?;
        a.qp.poll_send();
        a.qp.post_send(&[SendWr::send(&[])])?;
        received.wait(PATIENCE)
    };
    for _ in 0..4 {
        receive().unwrap();
    }
    let text = receive().unwrap_err().to_string();
    assert!(
        text.starts_with("receive completion queue") && text.contains("4 completed and not taken"),
        "{text}"
    );
    // As the guide has it.
    a.qp.send_cq().drain();
    for _ in 0..20 {
        send().unwrap();
        a.qp.poll_send().unwrap();
    }
}

#[test]
fn full_queues_say_so_and_have_room_again_after_a_poll() {
    let full = |result: Result<_, Error>, of: &str| match result {
        Err(error @ Error::QueueFull { .. }) => {
            let text = error.to_string();
            assert!(text.starts_with(of) && text.contains("take completions"), "{text}");
        }
        other => panic!("{of} should be full: {other:?}"),
    };
    let (a, b) = loopback(4096, |q| q.max_send_wr(4).max_recv_wr(4).max_inline(0));
    for lap in 0..20 {
        let recv = |wr_id| b.qp.post_recv(&[RecvWr::new(&[]).id(wr_id)]);
        (0..4).for_each(|i| drop(recv(i).unwrap()));
        full(recv(4), "receive queue");
        let send = |id| a.qp.post_send(&[SendWr::send(&[]).id(id)]);
        let four: Vec<_> = (0..4).map(|id| SendWr::send(&[]).id(id)).collect();
        a.qp.post_send(&four).unwrap();
        // Four completions that nobody polled fill the completion queue, whatever the send queue holds.
        full(send(4), "send ");
        full(a.qp.post_send(&four[..1]), "send ");
        assert_eq!(sent(&a).ok().unwrap().wr_id, 0, "lap {lap}");
        // All or none: two do not fit.
        full(a.qp.post_send(&four[..2]), "send ");
        send(4).unwrap();
        assert_eq!(received(&b).ok().unwrap().wr_id, 0);
        recv(4).unwrap();
        for i in 1..=4 {
            assert_eq!((sent(&a).ok().unwrap().wr_id, received(&b).ok().unwrap().wr_id), (i, i));
        }
    }
}

#[test]
fn small_shared_completion_queue_limits_what_is_posted() {
    let context = hca();
    let cq = context.create_cq(3).unwrap();
    assert_eq!(cq.entries(), 4);
    let side = || Side::new(&context, 4096, |q| q.send_cq(&cq).recv_cq(&cq));
    let (a, b) = connect(side(), side());
    for _ in 0..20 {
        (0..4).for_each(|id| drop(a.qp.post_send(&[SendWr::nop().id(id)]).unwrap()));
        let error = a.qp.post_send(&[SendWr::nop()]).unwrap_err().to_string();
        assert!(error.contains("send completion queue"), "{error}");
        let error = b.qp.post_recv(&[RecvWr::new(&[])]).unwrap_err().to_string();
        assert!(error.contains("receive completion queue"), "{error}");
        (0..4).for_each(|id| assert_eq!(cq.wait(PATIENCE).unwrap().ok().unwrap().wr_id, id));
    }
}

#[test]
fn queue_pair_that_is_gone_leaves_its_room_on_a_shared_completion_queue() {
    let context = hca();
    let cq = context.create_cq(4).unwrap();
    for _ in 0..10 {
        let side = Side::new(&context, 4096, |q| q.send_cq(&cq).recv_cq(&cq));
        side.qp.init().unwrap();
        (0..4).for_each(|wr_id| drop(side.qp.post_recv(&[RecvWr::new(&[]).id(wr_id)]).unwrap()));
    }
    let side = || Side::new(&context, 4096, |q| q.send_cq(&cq).recv_cq(&cq));
    let (a, b) = connect(side(), side());
    b.qp.post_recv(&[RecvWr::new(&[]).id(5)]).unwrap();
    a.qp.post_send(&[SendWr::send(&[]).id(6)]).unwrap();
    let mut ids = [(); 2].map(|()| cq.wait(PATIENCE).unwrap().ok().unwrap().wr_id);
    ids.sort_unstable();
    assert_eq!(ids, [5, 6]);
}

#[test]
fn reset_takes_no_completion_of_a_neighbour_on_the_same_completion_queue() {
    let context = hca();
    let cq = context.create_cq(16).unwrap();
    let side = || Side::new(&context, 4096, |q| q.send_cq(&cq));
    let (a, b) = connect(side(), side());
    let (c, d) = connect(side(), side());
    for (side, wr_id) in [(&a, 1), (&c, 2), (&a, 3), (&c, 4)] {
        side.qp.post_send(&[SendWr::nop().id(wr_id)]).unwrap().wait(PATIENCE).unwrap();
    }
    reset(&a);
    let ids = [(); 2].map(|()| cq.wait(PATIENCE).unwrap().wr_id);
    assert_eq!(ids, [2, 4]);
    assert!(cq.poll().is_none());
    drop((b, d));
}

#[test]
fn receive_that_was_half_filled_is_flushed_with_the_others() {
    for (a, b) in [loopback(1 << 18, |q| q.max_send_sge(2)), pair(1 << 18, |q| q.max_send_sge(2))] {
        for wr_id in [1, 2] {
            b.qp.post_recv(&[RecvWr::new(&[b.mr.sge(0, 1 << 18).unwrap()]).id(wr_id)]).unwrap();
        }
        // The second packet cannot be sent, so the message ends in its middle.
        let bad = gdsync::verbs::Sge { lkey: 0, ..a.mr.sge(0, 100).unwrap() };
        a.qp.post_send(&[SendWr::send(&[a.mr.sge(0, 64 << 10).unwrap(), bad])]).unwrap();
        assert_eq!(sent(&a).syndrome, Some(Syndrome::LOC_PROT_ERR));
        until(|| !counts(&b.context) || b.context.stats().packets_received > 0);
        b.qp.abort().unwrap();
        for wr_id in [1, 2] {
            let wc = received(&b);
            assert_eq!((wc.wr_id, wc.syndrome), (wr_id, Some(Syndrome::WR_FLUSH_ERR)));
        }
        reconnect(&a.qp, &b.qp);
        message(&a, &b, 3);
    }
}

#[test]
fn prepared_requests_from_before_a_reset_do_no_harm_after_it() {
    let (a, b) = loopback(4096, |q| q);
    message(&a, &b, 1);
    let prepared = a.qp.prepare_send(&[SendWr::nop()]).unwrap();
    match a.qp.modify(&QpAttr::to(QpState::RESET)) {
        Err(Error::Busy { queue: "send", .. }) => drop(prepared),
        other => panic!("a reset would pull the queue from under a prepared request: {other:?}"),
    }
    reconnect(&a.qp, &b.qp);
    message(&a, &b, 2);
}

/// The number of a completion is only that of its request while one queue alone has ever used the completion queue.
#[test]
fn stream_cannot_wait_on_a_completion_queue_that_another_queue_pair_used_before() {
    let context = hca();
    let cq = context.create_cq(16).unwrap();
    let side = || Side::new(&context, 4096, |q| q.send_cq(&cq));
    let peer = || Side::new(&context, 4096, |q| q);
    let (a, b) = connect(side(), peer());
    a.qp.post_send(&[SendWr::nop()]).unwrap();
    let wait = a.qp.prepare_wait_send().unwrap();
    drop(wait);
    sent(&a).ok().unwrap();
    drop((a, b));
    let (a, b) = connect(side(), peer());
    a.qp.post_send(&[SendWr::nop(), SendWr::nop()]).unwrap();
    let error = a.qp.prepare_wait_send().unwrap_err();
    assert!(matches!(error, Error::Unsupported { .. }), "{error}");
    drop(b);
}

#[test]
fn poll_never_sees_what_a_stream_has_waited_for() {
    let (a, b) = loopback(4096, |q| q.max_send_wr(4));
    let stream = stream("waits");
    for id in 0..20 {
        for i in 0..3 {
            stream.send(&a.qp, &SendWr::nop().id(10 * id + i)).unwrap();
        }
        stream.wait_send(&a.qp).unwrap();
        let last = stream_wait_all(&stream, &a);
        stream.synchronize(PATIENCE).unwrap();
        assert_eq!(last.status().unwrap().unwrap().wr_id, 10 * id + 2);
        a.qp.check().unwrap();
        assert_eq!(a.qp.poll_send(), None, "round {id}");
        a.qp.post_send(&[SendWr::nop().id(10 * id + 5)]).unwrap();
        assert_eq!(sent(&a).ok().unwrap().wr_id, 10 * id + 5);
    }
    drop(b);
}

fn stream_wait_all(stream: &Stream, side: &Side) -> gdsync::verbs::Completion {
    let mut batch = Batch::new();
    let last = batch.wait_all_sends(&side.qp).unwrap();
    stream.submit(&mut batch).unwrap();
    last
}
