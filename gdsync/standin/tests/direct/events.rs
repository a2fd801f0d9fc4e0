//! What the card tells besides completions.

use gdsync::Error;
use gdsync::verbs::{QpState, SendWr};

use crate::common::{pair, sent, until};

/// The side whose memory was asked for wrongly has no completion to learn from.
#[test]
fn a_refused_peer_is_the_root_cause_of_the_other_side() {
    let (a, b) = pair(64, |q| q);
    let mut wrong = b.mr.remote(0).unwrap();
    wrong.rkey ^= 1;
    a.qp.post_send(&[SendWr::write_inline(wrong, &[1; 4])]).unwrap();
    sent(&a).ok().unwrap_err();
    until(|| b.qp.state() == QpState::ERR);
    let error = b.qp.check().unwrap_err();
    assert!(matches!(error, Error::Device { .. }), "{error:?}");
    let text = error.to_string();
    assert!(
        text.contains("IBV_EVENT_QP_ACCESS_ERR") && text.contains(&format!("{:#x}", b.qp.qpn())),
        "{text}"
    );
    // Others are not concerned.
    let (c, d) = pair(64, |q| q);
    crate::ends::message(&c, &d, 1);
    // A new life begins without it.
    crate::common::reconnect(&a.qp, &b.qp);
    crate::ends::message(&a, &b, 1);
}
