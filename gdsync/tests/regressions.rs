//! Mistakes that were found in review, as a user would have met them.

mod common;

use common::{pair, sent};
use gdsync::hca::FaultPlan;
use gdsync::verbs::SendWr;

/// Every response behind a lost one used to ask for the whole rest again: the requests piled up at the responder, which
/// then refused one as too many and broke the queue pair.
#[test]
fn a_long_read_survives_losses() {
    let len = 4 << 20;
    for (seed, rd_atomic) in (0..10).flat_map(|seed| [(seed, 1), (seed, 16)]) {
        let (a, b) = pair(len, |q| q.timeout(11).rd_atomic(rd_atomic));
        b.memory().fill(0, len, 7).unwrap();
        b.context.inject(FaultPlan { seed, drop: 0.02, ..FaultPlan::default() }).unwrap();
        a.qp.post_send(&[SendWr::read(b.mr.remote(0).unwrap(), &[a.mr.sge(0, len).unwrap()])]).unwrap();
        sent(&a).ok().unwrap();
        assert!(a.memory().to_vec().iter().all(|&byte| byte == 7));
        let (lost, again) = (b.context.stats().packets_faulted, a.context.stats().retransmissions);
        assert!(again <= 2 * lost + 8, "seed {seed}: {lost} packets lost, {again} times gone back");
    }
}
