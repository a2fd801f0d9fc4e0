//! The real libibverbs and libmlx5, on the emulated card: the tests that need a device run again over it, by both routes, and those
//! of cards, GPUs that ring doorbells, and what differs between cards.

mod devx;
mod direct;
mod lifecycle;
mod modes;
mod pages;
mod setup;
mod staged;

use crate::common::tier;
use gdsync_testkit::card;

/// Modules that run on any device. The slow ones run as in the fast tier.
const MODULES: &[&str] = &[
    "batch_run::",
    "devices::",
    "errors::",
    "forks::",
    "graphs::",
    "interop::",
    "prepared::",
    "processes::",
    "queues::",
    "raw_doorbells::",
    "regressions::",
    "room::",
    "stream_receives::",
    "streams::",
    "syndromes::",
    "verbs::",
    "verbs_device::",
    "wraps::",
];

/// Modules of the card, whose tests do not run without it.
const OF_CARDS: &[&str] = &[
    "card::devx::",
    "card::direct::",
    "card::lifecycle::",
    "card::modes::",
    "card::pages::",
    "card::staged::",
];

/// Those of them that do without dma-bufs: memory of GPUs goes by nvidia-peermem then.
const WITHOUT_DMA_BUFS: &[&str] = &["card::lifecycle::", "card::modes::", "card::pages::"];

/// Tests that need the software HCA of this process. (A filter is a part of a name: `processes::` has one of `cuda_payload`.)
const LEFT_OUT: &[&str] = &[
    "errors::fault_plans_and_stream_configurations_are_checked",
    "cuda_payload::",
    // They use no device.
    "peer_copies::",
    // They inject faults.
    "regressions::late_packet_of_the_former_connection_is_not_taken",
    "regressions::long_read_survives_losses",
    "regressions::longest_timeouts_are_no_panic",
    // It knows at once that a peer is gone.
    "regressions::hot_poller_learns_of_the_death_of_its_peer",
    "regressions::queue_pair_in_error_leaves_it_by_reset_only",
    // A card acknowledges for a process that is stopped.
    "processes::stopped_peer_costs_the_timeouts",
    "processes::peer_that_is_stopped_with_a_full_ring_costs_the_timeouts_too",
];

/// Whether the installed rdma-core takes dma-bufs: from 34 on. Says on standard error if it does not.
pub(crate) fn has_dma_bufs() -> bool {
    let has = rdma_core_sys::Verbs::load().is_ok_and(|verbs| verbs.ibv_reg_dmabuf_mr.is_some());
    if !has {
        eprintln!("the installed rdma-core takes no dma-bufs");
    }
    has
}

/// What the card may find wrong about rings.
const VIOLATION: &str = "violation of the ring formats";

/// Runs tests of this program in another process on the card, which finds posted sends as `modes` says and checks what it reads; not in the
/// fast tier.
fn run(route: &str, modes: &str, filters: &[&str]) {
    if tier(true, false, false) {
        return;
    }
    let Some(mut again) = card::command(std::env::current_exe().unwrap()) else { return };
    again.arg("--include-ignored").args(filters).args(LEFT_OUT.iter().flat_map(|test| ["--skip", test]));
    again.env("GDSYNC_PATH", route).env("GDSYNC_TEST_DEVICE", card::DEVICE);
    again.env("GDASYNC_CARD_MODES", modes).env("GDASYNC_CARD_LOG", "-").env("GDSYNC_STRICT", "1");
    let output = again.env("GDSYNC_TEST_TIER", "fast").output().unwrap();
    let [out, err] = [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text));
    let ran = output.status.success() && !out.contains("running 0 tests");
    let violations: Vec<_> = err.lines().filter(|line| line.contains(VIOLATION)).collect();
    // The causes last: logs are cut.
    assert!(ran && violations.is_empty(), "{err}\n{out}{}\n{violations:#?}", output.status);
}

/// The library chooses the direct route. The card looks at the doorbell registers.
#[test]
fn direct_route_passes_the_same_tests() {
    // It counts what the whole process has.
    run("direct", "", &["verbs_cycles::"]);
    match has_dma_bufs() {
        true => run("", "register,no-peermem", &[MODULES, OF_CARDS].concat()),
        false => run("", "register", &[MODULES, WITHOUT_DMA_BUFS].concat()),
    }
}

#[test]
fn proxy_passes_the_same_tests() {
    run("proxy", "", &["verbs_cycles::"]);
    run("proxy", "", MODULES);
}
