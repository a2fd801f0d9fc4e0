//! Programs in C that check themselves, on software devices and a simulated GPU.

use gdsync_testkit::process::printed;

use crate::{PACKAGE, Program};

fn job(name: &str, size: usize) -> Vec<String> {
    Program::compile(name, &[&format!("tests/c/{name}.c")]).job(size, &[])
}

#[test]
fn messages_go_by_cpus_and_streams() {
    job("messages", 2);
}

#[test]
fn windows_channels_and_collectives_work_on_all_streams() {
    job("windows", 2);
}

#[test]
fn ranks_are_split_and_survive_one_that_dies() {
    job("survive", 4);
}

#[test]
fn programs_bring_their_own_exchange_or_connect_in_pairs() {
    let output = PACKAGE.finish(&mut Program::compile("embedded", &["tests/c/embedded.c"]).command(&[]));
    assert!(output.status.success(), "{}: {}", output.status, printed(&output));
}

#[test]
fn the_example_plays_ping_pong_on_streams() {
    let said = Program::compile("pingpong", &["../examples/c/pingpong.c"]).job(2, &[]);
    assert!(said[0].starts_with("1000 rounds of 4096 bytes, ") && said[1].is_empty(), "{said:?}");
}

#[test]
fn the_small_mpi_runs_with_two_and_four_ranks() {
    let sources = ["../examples/c/minimpi/halo.c", "../examples/c/minimpi/minimpi.c"];
    let program = Program::compile("minimpi", &sources);
    for (size, sum) in [(2, 2_098_176), (4, 8_390_656)] {
        let said = program.job(size, &[]).concat();
        assert_eq!(said, format!("{size} ranks, 100 steps: sum {sum}, as it began\n"));
    }
}

#[test]
fn misuse_has_an_error_number_and_a_line() {
    let said = job("misuse", 1).swap_remove(0);
    let (lines, last) = said.trim_end().rsplit_once('\n').expect("several lines");
    let failures: usize = last.strip_suffix(" failures").expect("their number").parse().expect("a number");
    assert!(failures > 70 && lines.lines().count() >= failures, "{said}");
    assert!(lines.lines().all(|line| line.starts_with("gda_")), "{said}");
    assert!(!said.contains("panicked"), "{said}");
}
