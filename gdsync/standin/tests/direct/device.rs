//! The card as a device: chosen, described, opened with settings, with limits that are explained.

use gdsync::Device;
use gdsync::Error;
use gdsync::hca::FaultPlan;
use gdsync::memory::Memory;
use gdsync::rdma::{DeviceConfig, GidKind, Route};
use gdsync::verbs::{Access, Context};

use crate::common::{Side, connect, hca};
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
fn a_domain_stays_as_long_as_something_of_it() {
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
    fn once(context: &Context) {
        let (a, b) = connect(Side::new(context, 64, |q| q), Side::new(context, 64, |q| q));
        crate::ends::message(&a, &b, 5);
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
