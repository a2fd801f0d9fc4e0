//! The card as a device: chosen, described, opened with settings, with limits that are explained.

use gdsync::Device;
use gdsync::Error;
use gdsync::hca::FaultPlan;
use gdsync::memory::Memory;
use gdsync::rdma::{DeviceConfig, GidKind, Route};
use gdsync::verbs::{Access, Context, RecvWr, SendWr};

use crate::child::{Peer, is_own_process, meet_parent, role};
use crate::common::{PATIENCE, Side, bytes, connect, hca, pattern, received, sent};
use crate::setup::CARD;

fn card() -> Device {
    Device::find(Some(CARD)).unwrap()
}

#[test]
fn it_is_preferred_and_reads_its_rings_itself() {
    assert_eq!(Device::find(None).unwrap().name(), CARD);
    let context = card().open().unwrap();
    assert_eq!((context.description(), context.wire()), ("mlx5 card mlx5_standin", "RoCE v2"));
    assert_eq!(context.not_direct(), None);
    let best = card().ports()[0].best_gid().unwrap();
    assert_eq!((best.gid, best.kind), (context.gid(), GidKind::RoceV2));
}

#[test]
fn routes_can_be_forced() {
    let open = |route| card().open_with(&DeviceConfig { route: Some(route), ..DeviceConfig::default() });
    assert_eq!(open(Route::Direct).unwrap().description(), "mlx5 card mlx5_standin");
    assert_eq!(open(Route::Soft).unwrap().description(), "software HCA");
}

#[test]
fn what_a_card_does_not_do_is_refused() {
    let context = hca();
    context.inject(FaultPlan::default()).unwrap();
    let faults = FaultPlan { drop: 0.5, ..FaultPlan::default() };
    let error = context.inject(faults).unwrap_err();
    assert!(matches!(error, Error::Unsupported { by: "an mlx5 card", .. }), "{error:?}");
}

#[test]
fn domain_stays_as_long_as_something_of_it() {
    let context = hca();
    let pd = context.alloc_pd().unwrap();
    let mr = pd.register(&Memory::alloc(100).unwrap(), Access::all()).unwrap();
    let qp = pd.build_qp().build().unwrap();
    drop((pd, context));
    assert!(qp.address().mtu.is_some() && mr.lkey() != 0);
    qp.connect(qp.address()).unwrap();
}

#[test]
fn queues_of_every_size_can_be_made() {
    let context = hca();
    let pd = context.alloc_pd().unwrap();
    for (sends, receives, sges, inline) in [
        (1, 1, 1, 0),
        (1, 1, 32, 512),
        (2, 3, 3, 60),
        (100, 1, 2, 100),
        (1000, 4000, 1, 64),
        (32768, 32768, 1, 0),
    ] {
        let qp = pd.build_qp().max_send_wr(sends).max_recv_wr(receives).max_recv_sge(sges);
        let qp = qp.max_inline(inline).build().unwrap();
        assert!(qp.send_cq().entries() >= sends && qp.recv_cq().entries() >= receives, "{sends} {receives}");
    }
    for entries in [1, 2, 3, 4096] {
        assert!(context.create_cq(entries).unwrap().entries() >= entries);
    }
}

/// Domains, registers and memory come back.
#[test]
fn queue_pairs_come_and_go() {
    if !is_own_process() {
        return;
    }
    fn once(context: &Context) {
        let (a, b) = connect(Side::new(context, 64, |q| q), Side::new(context, 64, |q| q));
        crate::lifecycle::message(&a, &b, 5);
    }
    let context = hca();
    for _ in 0..64 {
        once(&context);
    }
    for _ in 0..8 {
        once(&hca());
    }
    assert_eq!(crate::setup::complaints(), "");
}

fn side() -> Side {
    Side::new(&hca(), 1 << 16, |q| q.timeout(14).retry_cnt(7))
}

/// Not a test of its own: the other process, which echoes messages until it is told to end.
#[test]
fn child() {
    if role().as_deref() != Some("echo") {
        return;
    }
    let side = side();
    side.qp.init().unwrap();
    let post = |n: u64| side.qp.post_recv(&[RecvWr { wr_id: n, sges: &[side.mr.sge(0, 30_000).unwrap()] }]);
    post(0).unwrap();
    meet_parent(&side);
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
    let (mut peer, _) = Peer::start("direct::device::child", "echo", &side);
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
