//! Single messages between two sides, and those that the other side refuses.
#![allow(unreachable_pub, reason = "part of a test binary")]

use std::time::Duration;

use gdsync::verbs::{QpState, RecvWr, SendWr, Wc};

use super::common::{Side, sent};

/// Posts a receive of `len` bytes at `offset`.
pub fn receive(b: &Side, id: u64, offset: usize, len: usize) {
    b.qp.post_recv(&[RecvWr { wr_id: id, sges: &[b.mr.sge(offset, len).unwrap()] }]).unwrap();
}

/// Posts a send of `len` bytes from `offset`.
pub fn send(a: &Side, id: u64, offset: usize, len: usize) {
    a.qp.post_send(&[SendWr::send(&[a.mr.sge(offset, len).unwrap()]).id(id)]).unwrap();
}

pub fn ok(wc: &Wc, id: u64) {
    assert_eq!((wc.wr_id, wc.syndrome), (id, None), "{wc:?}");
}

/// Posts, between two sides, a message of so many bytes that is refused before any are written.
pub type Ask = fn(&Side, &Side, usize);

pub const REFUSED: [Ask; 4] = [
    // The receive names a dead key.
    |a, b, len| {
        let mut sge = b.mr.sge(0, len).unwrap();
        sge.lkey ^= 1;
        b.qp.post_recv(&[RecvWr { wr_id: 1, sges: &[sge] }]).unwrap();
        send(a, 1, 0, len);
    },
    // The write does.
    |a, b, len| {
        let mut remote = b.mr.remote(0).unwrap();
        remote.rkey ^= 1;
        a.qp.post_send(&[SendWr::write(remote, &[a.mr.sge(0, len).unwrap()]).id(1)]).unwrap();
    },
    // It begins outside of the region.
    |a, b, len| {
        let mut remote = b.mr.remote(0).unwrap();
        remote.addr -= 1;
        a.qp.post_send(&[SendWr::write(remote, &[a.mr.sge(0, len).unwrap()]).id(1)]).unwrap();
    },
    // The sender's key is dead.
    |a, b, len| {
        receive(b, 1, 0, len);
        let mut sge = a.mr.sge(0, len).unwrap();
        sge.lkey ^= 1;
        a.qp.post_send(&[SendWr::send(&[sge]).id(1)]).unwrap();
    },
];

/// What both sides see of what was refused.
#[derive(Debug, PartialEq)]
pub struct Refusal {
    pub sent: Wc,
    received: Option<Wc>,
    state: QpState,
}

/// What comes of something that is refused.
pub fn refusal(a: &Side, b: &Side) -> Refusal {
    let sent = Wc { qpn: 0, ..sent(a) };
    let received = b.qp.recv_cq().wait(Duration::from_millis(200)).ok().map(|wc| Wc { qpn: 0, ..wc });
    Refusal { sent, received, state: a.qp.state() }
}
