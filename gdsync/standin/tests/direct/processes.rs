//! Two processes, each with its card.

use gdsync::verbs::{RecvWr, SendWr};

use crate::common::{PATIENCE, Side, bytes, hca, pattern, received, sent};
use crate::peer::{self, Peer};

const TEST: &str = "processes::child";

fn side() -> Side {
    Side::new(&hca(), 1 << 16, |q| q.timeout(14).retry_cnt(7))
}

/// What the child does: echoes messages until it is told to end.
#[test]
fn child() {
    if peer::role().as_deref() != Some("echo") {
        return;
    }
    let side = side();
    side.qp.init().unwrap();
    let post = |n: u64| side.qp.post_recv(&[RecvWr { wr_id: n, sges: &[side.mr.sge(0, 30_000).unwrap()] }]);
    post(0).unwrap();
    peer::meet_parent(&side);
    println!("ready");
    for round in 1.. {
        let Ok(wc) = side.qp.recv_cq().wait(PATIENCE) else { return };
        let Ok(wc) = wc.ok() else { return };
        let len = usize::try_from(wc.byte_len).unwrap();
        let data = bytes(&side, 0, len);
        side.memory().write(30_000, &data).unwrap();
        post(round).unwrap();
        side.qp.post_send(&[SendWr::send(&[side.mr.sge(30_000, len).unwrap()])]).unwrap();
        sent(&side).ok().unwrap();
    }
}

#[test]
fn messages_go_to_another_process_and_back() {
    let side = side();
    let (mut peer, _) = Peer::start(TEST, "echo", &side);
    for round in 0..200usize {
        let data = pattern(1 + round * 149 % 30_000, round);
        side.memory().write(0, &data).unwrap();
        let receive = RecvWr { wr_id: 1, sges: &[side.mr.sge(30_000, 30_000).unwrap()] };
        side.qp.post_recv(&[receive]).unwrap();
        side.qp.post_send(&[SendWr::send(&[side.mr.sge(0, data.len()).unwrap()])]).unwrap();
        sent(&side).ok().unwrap();
        let wc = received(&side).ok().unwrap();
        assert_eq!(usize::try_from(wc.byte_len).unwrap(), data.len());
        assert!(bytes(&side, 30_000, data.len()) == data, "round {round}");
    }
    peer.kill();
    side.qp.post_send(&[SendWr::send_inline(&[1])]).unwrap();
    sent(&side).ok().unwrap_err();
}
