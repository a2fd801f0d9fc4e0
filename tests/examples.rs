//! The small examples print what they are to show.

mod common;

use common::{example, fails, succeeds};

#[test]
fn sendrecv_delivers() {
    let out = succeeds(example("sendrecv"));
    let lines: Vec<_> = out.lines().collect();
    assert_eq!(lines.len(), 3, "{out}");
    assert_eq!(lines[0], "Bob's stream got: hello from Alice's");
    assert!(lines[1].starts_with("sent:     Some(Wc { wr_id: 2,"), "{out}");
    assert!(lines[2].starts_with("received: Some(Wc { wr_id: 1,"), "{out}");
    assert!(lines[2].contains("byte_len: 18,"), "{out}");
    assert!(lines[1..].iter().all(|line| line.contains("syndrome: None")), "{out}");
}

#[test]
fn putget_moves_bytes_both_ways() {
    let out = succeeds(example("putget"));
    assert_eq!(out.lines().collect::<Vec<_>>(), ["got back: PUT, THEN GOT BACK", "counter:  10"]);
}

#[test]
fn mapping_writes_through_and_outlives_its_buffer() {
    let out = succeeds(example("mapping"));
    assert!(out.contains("the GPU has: written by the CPU"), "{out}");
    assert!(out.contains("a write of 64 bytes goes by CPU"), "{out}");
}

#[test]
fn those_without_options_refuse_any() {
    for name in ["sendrecv", "putget", "mapping"] {
        let mut command = example(name);
        command.arg("--stream");
        let error = fails(command);
        assert!(error.contains("--stream") && error.contains(&format!("Usage: {name}")), "{error}");
    }
}

#[test]
fn they_keep_the_rules_of_strict_rings() {
    for name in ["sendrecv", "putget"] {
        let mut command = example(name);
        command.env("GDSYNC_STRICT", "1");
        succeeds(command);
    }
}

#[test]
fn a_producer_and_a_consumer_keep_pace() {
    // The slower of the two sets it, and in more turns than slots or blocks posted ahead.
    for args in [
        &["--blocks", "150", "--bytes", "5000"][..],
        &["--blocks", "40", "--slots", "1", "--produce-us", "100"],
        &["--blocks", "40", "--slots", "2", "--consume-us", "100", "--bytes", "1"],
    ] {
        let mut command = example("producer_consumer");
        command.args(args);
        let out = succeeds(command);
        assert!(out.contains(&format!("{} blocks of", args[1])) && out.contains(", 0 wrong"), "{out}");
    }
}

#[test]
fn a_producer_explains_itself() {
    let mut help = example("producer_consumer");
    help.arg("--help");
    let help = succeeds(help);
    for option in ["--blocks", "--bytes", "--slots", "--produce-us", "--consume-us", "--timeout", "Example:"]
    {
        assert!(help.contains(option), "{option} in {help}");
    }
    let mut wrong = example("producer_consumer");
    wrong.args(["--slots", "0"]);
    assert!(fails(wrong).contains("--slots"));
}
