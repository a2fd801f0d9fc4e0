//! Ranks on the emulated card, which does not reach the memory of their simulated GPUs: tests of messages run again with all
//! buffers there and all streams on GPUs, and those of what is different. The fast tier has only the latter.

mod staged;

use gdsync_testkit::{card, tier};

use crate::common::GPU_WITHOUT_DMA_BUF;

const AGAIN: &[&str] = &["messages::", "on_stream::", "tagged::"];

#[test]
fn messages_are_staged_on_the_card() {
    let Some(mut again) = card::command(std::env::current_exe().unwrap()) else { return };
    again.arg("card::staged::").args(tier(&[][..], AGAIN, AGAIN)).args([
        "--include-ignored",
        "--skip",
        "staged_on_the_card",
        "--skip",
        "windows_on_stream::",
    ]);
    // The card takes 17 s for its timeouts.
    again.args(tier(
        &["--skip", "dead_ranks_fail_their_messages_alone"][..],
        &["--skip", "dead_ranks_fail_their_messages_alone"],
        &[],
    ));
    again
        .env("GDASYNC_CARD_MODES", "no-peermem")
        .env("GDSYNC_DEVICE", card::DEVICE)
        .env("MP_LOCAL", "device");
    again.env("GDSYNC_TEST_GPU", "memop").env(GPU_WITHOUT_DMA_BUF, "1").env("GDSYNC_TEST_TIER", "fast");
    let output = again.output().unwrap();
    let [out, err] = [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text));
    // The failures last: logs are cut.
    assert!(output.status.success() && !out.contains("running 0 tests"), "{err}\n{out}{}", output.status);
}
