//! gdsync's own tests of queues, streams, graphs and processes, through mlx5 direct verbs on the stand-in. Those of verbs and wraps
//! are in `direct`.

#![allow(clippy::duplicate_mod, reason = "each file of tests brings what it shares with others")]

#[path = "../../../tests/devices.rs"]
mod devices;
#[path = "../../../tests/forks.rs"]
mod forks;
#[path = "../../../tests/graphs.rs"]
mod graphs;
#[path = "../../../tests/graphs_model.rs"]
mod graphs_model;
#[path = "../../../tests/processes.rs"]
mod processes;
#[path = "../../../tests/queues.rs"]
mod queues;
#[path = "../setup/mod.rs"]
mod setup;
#[path = "../../../tests/stream_queues.rs"]
mod stream_queues;
#[path = "../../../tests/streams.rs"]
mod streams;
#[path = "../../../tests/verbs_device.rs"]
mod verbs_device;

/// Runs before `main`.
#[used]
#[unsafe(link_section = ".init_array")]
static BEFORE_MAIN: extern "C" fn() = before_main;

extern "C" fn before_main() {
    setup::use_the_stand_in("direct");
}

#[test]
fn the_rings_are_read_by_the_card() {
    assert_eq!(setup::used(), ("mlx5 card mlx5_standin".into(), "RoCE v2".into()));
}
