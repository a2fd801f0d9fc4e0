//! C programs that check themselves, on the emulated card and the simulated CUDA driver.

use gdsync_testkit::process::printed;

use crate::{Program, has_rdma_core};

/// What a program says, which must pass in each environment.
fn passes(name: &str, environments: &[&[(&str, &str)]]) -> Option<String> {
    if !has_rdma_core() {
        return None;
    }
    let program = Program::compile(name);
    let run = |environment: &&[(&str, &str)]| {
        let output = program.run(environment);
        assert!(output.status.success(), "{environment:?}: {}: {}", output.status, printed(&output));
        printed(&output)
    };
    Some(environments.iter().map(run).collect())
}

#[test]
fn two_processes_play_ping_pong() {
    let lossy = [("GDASYNC_CARD_LINK", "ib"), ("GDSYNC_FAULTS", "seed=1,drop=0.02,duplicate=0.02")];
    let said = passes("pingpong", &[&[("GDASYNC_CARD_LINK", "eth")], &lossy]);
    assert!(said.is_none_or(|said| said.is_empty()));
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
