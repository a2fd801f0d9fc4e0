//! Sends and waits on streams: order, batches, prepared requests, ownership.

mod common;

use common::{PATIENCE, loopback, pair, stream};
use gdsync::verbs::{RecvWr, SendWr};

#[test]
fn a_stream_sends_and_another_receives() {
    for (a, b) in [pair(4096, |q| q), loopback(4096, |q| q)] {
        let (sa, sb) = (stream("a"), stream("b"));
        a.memory().write(0, b"over the stream").unwrap();
        b.qp.post_recv(&[RecvWr { wr_id: 9, sges: &[b.mr.sge(100, 50).unwrap()] }]).unwrap();
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
        assert_eq!(a.context.stats().violations + b.context.stats().violations, 0);
    }
}

#[test]
fn what_a_stream_took_is_not_polled_and_the_ring_goes_round() {
    let (a, b) = loopback(64, |q| q.max_send_wr(4).max_recv_wr(4));
    let stream = stream("takes");
    for round in 0..100u64 {
        // By turns the stream waits and the CPU polls.
        let completion = a.qp.post_send(&[SendWr::nop().id(round)]).unwrap();
        if round % 3 == 0 {
            assert_eq!(a.qp.send_cq().wait(PATIENCE).unwrap().wr_id, round);
        } else {
            stream.wait(&completion).unwrap();
            stream.synchronize(PATIENCE).unwrap();
            assert_eq!(a.qp.poll_send(), None, "the stream has taken {round}");
        }
        assert_eq!(completion.status().unwrap().unwrap().wr_id, round);
    }
    drop(b);
}
