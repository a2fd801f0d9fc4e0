//! C programs that check themselves, on the emulated card and the simulated CUDA driver.

use gdsync_testkit::process::printed;

use crate::{Program, has_rdma_core};

/// What a program says, which must pass in each environment.
fn passes(name: &str, environments: &[&[(&str, &str)]]) -> Option<String> {
    if !has_rdma_core() {
        return None;
    }
    Some(run(&Program::compile(name), environments))
}

fn run(program: &Program, environments: &[&[(&str, &str)]]) -> String {
    let run = |environment: &&[(&str, &str)]| {
        let output = program.run(environment);
        assert!(output.status.success(), "{environment:?}: {}: {}", output.status, printed(&output));
        printed(&output)
    };
    environments.iter().map(run).collect()
}

#[test]
fn the_example_plays_ping_pong() {
    if !has_rdma_core() {
        return;
    }
    let program = Program::of("pingpong", "../../examples/c/pingpong_gds.c");
    let lossy = [("GDASYNC_CARD_LINK", "ib"), ("GDSYNC_FAULTS", "seed=1,drop=0.02,duplicate=0.02")];
    let said = run(&program, &[&[("GDASYNC_CARD_LINK", "eth")], &lossy]);
    assert_eq!(said, "1000 rounds of 64 bytes, 8 queued ahead: all right\n".repeat(2));
}

#[test]
fn requests_are_posted_waited_for_and_polled_in_every_way() {
    passes("requests", &[&[]]);
}

#[test]
fn datagrams_are_sent_to_an_address_handle() {
    passes("datagrams", &[&[("GDASYNC_CARD_LINK", "ib")], &[("GDASYNC_CARD_LINK", "eth")]]);
}

#[test]
fn threads_do_not_hold_up_each_other() {
    passes("threads", &[&[]]);
}

#[test]
fn misuse_has_an_error_number_and_a_line() {
    let Some(log) = passes("misuse", &[&[]]) else { return };
    let lines: Vec<_> = log.lines().collect();
    assert!(lines.len() > 80, "{log}");
    for line in &lines {
        assert!(line.starts_with("gdsync: gds_"), "{line}");
    }
    assert!(!log.contains("panicked"), "{log}");
}
