//! The small examples print what they are to show.

use std::fs::File;
use std::process::Command;

use super::common::{example, fails, gdasync, run, succeeds};

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

/// What prints, with little to do: the examples, a benchmark and a tool.
fn printing() -> Vec<Command> {
    let with = |mut command: Command, args: &[&str]| {
        command.args(args);
        command
    };
    vec![
        example("mapping"),
        example("putget"),
        example("sendrecv"),
        with(example("producer_consumer"), &["--blocks", "20"]),
        with(example("pingpong"), &["--sizes", "8", "--iters", "20", "--modes", "cpu"]),
        with(example("jacobi2d"), &["--nx", "16", "--ny", "16", "--iters", "20"]),
        with(gdasync(), &["bench", "latency", "--sizes", "8", "--iters", "20", "--ahead", "10"]),
        with(
            gdasync(),
            &["bench", "messages", "--work-us", "5", "--sizes", "8", "--iters", "20", "--calls", "20"],
        ),
        with(gdasync(), &["gdrcopy", "copylat", "--backend", "host", "-s", "64"]),
    ]
}

#[test]
fn output_that_cannot_be_written_is_an_error() {
    for mut command in printing() {
        command.stdout(File::options().write(true).open("/dev/full").unwrap());
        let (output, _, err) = run(command);
        assert_eq!(output.status.code(), Some(1), "{output:?}");
        assert_eq!(err.lines().count(), 1, "{err}");
        assert!(err.contains("cannot write the output: No space left on device"), "{err}");
    }
}

#[test]
fn a_reader_that_has_seen_enough_is_no_failure() {
    for mut command in printing() {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        command.stdout(writer);
        let (output, _, err) = run(command);
        assert!(output.status.success(), "{output:?}");
        assert_eq!(err, "");
    }
}

#[test]
fn a_failure_is_told_also_where_nobody_can_read_of_it() {
    for name in ["pingpong", "jacobi2d", "producer_consumer"] {
        let mut command = example(name);
        // A launcher that is not there.
        command
            .envs([("RANK", "1"), ("WORLD_SIZE", "two")])
            .stderr(File::options().write(true).open("/dev/full").unwrap());
        assert_eq!(run(command).0.status.code(), Some(1), "{name}");
    }
}
