//! Faults that the transport survives: the data is right in the end, and the same seed meets the same faults.

use std::time::Duration;

use crate::child::is_own_process;
use crate::common::{PATIENCE, Side, connect, hca, received, stream, tier};
use gdsync::hca::{FaultPlan, HcaStats, SoftHcaConfig};
use gdsync::stream::Batch;
use gdsync::verbs::{Context, QpBuilder, RecvWr, SendWr, Wc};

/// Bytes of a message: several packets.
const BIG: usize = 40_000;

/// Sends again soon, but not so soon that a busy machine looks like a dead peer.
fn soon(q: QpBuilder) -> QpBuilder {
    q.timeout(13).retry_cnt(7).rnr_retry(7).min_rnr_timer(1)
}

fn byte(seed: u64, at: usize) -> u8 {
    (seed.wrapping_mul(0x9e37_79b9).wrapping_add(at as u64 * 7) >> 3).to_le_bytes()[0]
}

/// A message, a write and its answer read back, through faults on both sides: by the CPU, or by a stream.
fn exchange(by_stream: bool, a: &Side, b: &Side, seed: u64) {
    let data: Vec<u8> = (0..BIG).map(|i| byte(seed, i)).collect();
    a.memory().write(0, &data).unwrap();
    b.qp.post_recv(&[RecvWr { wr_id: 200, sges: &[b.mr.sge(0, BIG).unwrap()] }]).unwrap();
    let whole = [a.mr.sge(0, BIG).unwrap()];
    let back = [a.mr.sge(BIG, BIG).unwrap()];
    let wrs = [
        SendWr::send(&whole).id(100),
        SendWr::write(b.mr.remote(BIG).unwrap(), &whole).id(101),
        SendWr::fetch_add(b.mr.remote(2 * BIG).unwrap(), seed, a.mr.sge(2 * BIG, 8).unwrap()).id(102),
        SendWr::read(b.mr.remote(BIG).unwrap(), &back).id(103),
    ];
    if by_stream {
        let s = stream("lossy");
        let mut batch = Batch::new();
        wrs.iter().for_each(|wr| drop(batch.send(&a.qp, wr).unwrap()));
        batch.wait_all_sends(&a.qp).unwrap();
        batch.wait_recv(&b.qp).unwrap();
        s.submit(&mut batch).unwrap();
        s.synchronize(PATIENCE).unwrap();
    } else {
        a.qp.post_send(&wrs).unwrap();
        let cq = a.qp.send_cq();
        let ids = [(); 4].map(|()| cq.wait(PATIENCE).unwrap().ok().unwrap().wr_id);
        assert_eq!(ids, [100, 101, 102, 103], "seed {seed}");
        received(b).ok().unwrap();
    }
    for (memory, at) in [(b.memory(), 0), (b.memory(), BIG), (a.memory(), BIG)] {
        let mut out = vec![0; BIG];
        memory.read(at, &mut out).unwrap();
        assert!(out == data, "seed {seed}: wrong bytes at {at}");
    }
    assert_eq!(b.memory().word64(2 * BIG).unwrap().load(), seed, "seed {seed}: added once");
    assert_eq!(a.memory().word64(2 * BIG).unwrap().load(), 0);
}

fn survives(plan: impl Fn(u64) -> FaultPlan) {
    let (one, other) = (hca(), hca());
    for seed in 1..=tier(20, 200, 2000) {
        one.inject(plan(seed)).unwrap();
        other.inject(plan(seed)).unwrap();
        let side = |context| Side::new(context, 2 * BIG + 8, soon);
        let (a, b) = connect(side(&one), side(&other));
        exchange(seed % 2 == 0, &a, &b, seed);
    }
}

#[test]
fn lost_packets_are_sent_again() {
    survives(|seed| FaultPlan { seed, drop: 0.05, ..FaultPlan::default() });
}

#[test]
fn doubled_packets_count_once() {
    survives(|seed| FaultPlan { seed, duplicate: 0.3, ..FaultPlan::default() });
}

#[test]
fn overtaken_packets_are_put_in_order() {
    survives(|seed| FaultPlan { seed, reorder: 0.2, ..FaultPlan::default() });
}

#[test]
fn delayed_packets_arrive() {
    survives(|seed| FaultPlan { seed, delay: (0.2, Duration::from_micros(300)), ..FaultPlan::default() });
}

#[test]
fn everything_at_once() {
    survives(|seed| FaultPlan {
        seed,
        drop: 0.02,
        duplicate: 0.05,
        reorder: 0.05,
        delay: (0.05, Duration::from_micros(200)),
        ..FaultPlan::default()
    });
}

/// Writes, one at a time, on a fresh HCA that meets the faults of `seed`: what was counted.
fn counted(seed: u64) -> HcaStats {
    let faults = FaultPlan { seed, drop: 0.1, duplicate: 0.1, ..FaultPlan::default() };
    let context = Context::soft(&SoftHcaConfig { strict: true, faults, ..SoftHcaConfig::default() }).unwrap();
    // Far longer than one write takes: only a lost packet lets the time run out.
    let side = || Side::new(&context, 256, |q| q.timeout(11).retry_cnt(7));
    let (a, b) = connect(side(), side());
    for i in 0..100u8 {
        a.qp.post_send(&[SendWr::write_inline(b.mr.remote(usize::from(i)).unwrap(), &[i])]).unwrap();
        let wc: Wc = a.qp.send_cq().wait(PATIENCE).unwrap();
        wc.ok().unwrap();
    }
    assert!((0..100).eq(b.memory().to_vec()[..100].iter().copied()));
    // A doubled packet may still be on its way.
    while context.progress() {}
    context.stats()
}

#[test]
fn same_seed_meets_the_same_faults() {
    if !is_own_process() {
        return;
    }
    let known = |s: HcaStats| (s.packets_faulted, s.retransmissions);
    for seed in 1..4 {
        let first = known(counted(seed));
        assert!(first.0 > 0 && first.1 > 0, "seed {seed}: {first:?}");
        assert_eq!(first, known(counted(seed)), "seed {seed}");
    }
}
