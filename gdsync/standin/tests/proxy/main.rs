//! gdsync's own tests of verbs, queues, streams, graphs and processes, through the CPU proxy on the stand-in: `ibv_post_send`,
//! `ibv_poll_cq` and completion channels of a device.

#![allow(clippy::duplicate_mod, reason = "each file of tests brings what it shares with others")]

#[path = "../../../tests/batch_run.rs"]
mod batch_run;
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
#[path = "../../../tests/verbs.rs"]
mod verbs;
#[path = "../../../tests/verbs_device.rs"]
mod verbs_device;

/// Runs before `main`.
#[used]
#[unsafe(link_section = ".init_array")]
static BEFORE_MAIN: extern "C" fn() = before_main;

extern "C" fn before_main() {
    setup::use_the_stand_in("proxy");
}

#[test]
fn the_rings_are_read_by_the_proxy() {
    let (used, wire) = setup::used();
    assert!(used.contains("proxy") && wire.contains("RoCE v2"), "{used}, {wire}");
}
