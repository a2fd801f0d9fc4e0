//! The small examples print what they are to show.

mod common;

use common::{example, succeeds};

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
fn they_keep_the_rules_of_strict_rings() {
    for name in ["sendrecv", "putget"] {
        let mut command = example(name);
        command.env("GDSYNC_STRICT", "1");
        succeeds(command);
    }
}
