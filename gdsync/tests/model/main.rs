//! Any legal list of work requests, through small real queues, against a model that does them one after the other.

#[path = "../common/mod.rs"]
mod common;
mod list;
#[path = "../common/mover.rs"]
mod mover;
mod run;
mod sequential;

use std::time::Duration;

use common::{Side, assert_clean, connect, hca, stream};
use gdsync::hca::{CmaPolicy, FaultPlan, SoftHcaConfig};
use gdsync::verbs::{Context, QpBuilder};
use proptest::prelude::*;

use list::{Drive, INLINE, REGION, Request, drive, requests};
use mover::{Engine, Habits};
use run::Run;
use sequential::{Outcome, model, start};

/// What payload is left to, and the least that is.
#[derive(Clone, Copy, Debug)]
enum Left {
    Nobody,
    Engine(Habits, usize),
    /// The CPU of the receiver, which reads it in place.
    Receiver(usize),
}

fn check(list: &[Request], drive: &Drive, faults: Option<FaultPlan>, left: Left) {
    let build = |q: QpBuilder| {
        let q =
            q.max_send_wr(drive.max_send_wr).max_recv_wr(drive.max_recv_wr).max_send_sge(3).max_recv_sge(3);
        q.max_inline(INLINE).timeout(13).retry_cnt(7).rnr_retry(7).min_rnr_timer(1)
    };
    let reading =
        |bytes| SoftHcaConfig { strict: true, cma: CmaPolicy::From(bytes), ..SoftHcaConfig::default() };
    let open: Box<dyn Fn() -> Context> = match left {
        Left::Nobody => Box::new(hca),
        Left::Engine(habits, bytes) => {
            let engine = Engine::start(habits);
            Box::new(move || engine.hca(bytes))
        }
        Left::Receiver(bytes) => Box::new(move || Context::soft(&reading(bytes)).unwrap()),
    };
    let first = open();
    let second = if drive.two_hcas { open() } else { first.clone() };
    let (a, b) = connect(Side::new(&first, REGION, build), Side::new(&second, REGION, build));
    for (side, seed) in [(&a, 1), (&b, 2)] {
        side.memory().write(0, &start(seed)).unwrap();
        side.context.inject(faults.clone().unwrap_or_default()).unwrap();
    }
    let (expected, words) = model(list);
    let run = Run {
        a: &a,
        b: &b,
        list,
        words,
        stream: drive.by_stream.then(|| stream("model")),
        next: 0,
        next_recv: 0,
        waited: vec![],
        outcome: Outcome::default(),
    };
    let outcome = run.go(drive, &expected);
    assert_eq!((&outcome.sent, &outcome.received), (&expected.sent, &expected.received));
    assert!(outcome.memories == expected.memories, "the memories differ");
    assert_clean(&[&a, &b]);
}

fn config(cases: u32) -> ProptestConfig {
    ProptestConfig { cases, failure_persistence: None, max_shrink_iters: 300, ..ProptestConfig::default() }
}

proptest! {
    #![proptest_config(config(150))]

    #[test]
    fn queues_do_what_the_model_does(list in requests(), drive in drive()) {
        check(&list, &drive, None, Left::Nobody);
    }
}

proptest! {
    #![proptest_config(config(100))]

    #[test]
    fn faults_of_the_network_change_nothing(list in requests(), drive in drive(), seed: u64) {
        let delay = (0.02, Duration::from_micros(100));
        let plan = FaultPlan { seed, drop: 0.02, duplicate: 0.05, reorder: 0.05, delay, ..FaultPlan::default() };
        check(&list, &drive, Some(plan), Left::Nobody);
    }
}

fn left() -> impl Strategy<Value = Left> {
    let bytes = prop_oneof![Just(1usize), 1usize..3000, Just(usize::MAX)];
    let rate = |most: u64| prop_oneof![Just(0u64), 0..most];
    let habits = (any::<u64>(), any::<bool>(), rate(200), rate(20), any::<bool>());
    let engine = (habits, bytes).prop_map(|((seed, shuffles, pause, fails, stages), bytes)| {
        Left::Engine(Habits { seed, shuffles, pause, fails, stages }, bytes)
    });
    prop_oneof![2 => engine, 1 => (1usize..3000).prop_map(Left::Receiver)]
}

proptest! {
    #![proptest_config(config(150))]

    #[test]
    fn payload_left_to_others_is_the_same(list in requests(), drive in drive(), left in left()) {
        check(&list, &drive, None, left);
    }
}

proptest! {
    #![proptest_config(config(100))]

    #[test]
    fn faults_change_nothing_where_payload_is_left_to_others(
        list in requests(), drive in drive(), left in left(), seed: u64
    ) {
        let delay = (0.02, Duration::from_micros(100));
        let plan = FaultPlan { seed, drop: 0.02, duplicate: 0.05, reorder: 0.05, delay, ..FaultPlan::default() };
        check(&list, &drive, Some(plan), left);
    }
}
