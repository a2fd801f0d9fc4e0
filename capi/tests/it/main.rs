//! The C interface: header, layouts and symbols, and programs in C as the ranks of jobs.

use std::mem::offset_of;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use gdasync_c::{VERSION, gda_buf, gda_config, gda_exchange, gda_info_t, gda_signal, gda_status};
use gdsync::memory::ExportedMemory;
use gdsync_testkit::c::Package;
use gdsync_testkit::process::printed;

const PACKAGE: Package = Package {
    root: env!("CARGO_MANIFEST_DIR"),
    scratch: env!("CARGO_TARGET_TMPDIR"),
    includes: &["include", "../gdsync/capi/tests/c/include"],
    file: "libgdasync_c.so",
    name: "libgdasync",
    version: 0,
    limit: Duration::from_secs(300),
};

/// A compiled program, in a directory with links to the libraries under the names that it looks for.
struct Program(PathBuf);

impl Program {
    /// Of these sources, relative to this package.
    fn compile(name: &str, sources: &[&str]) -> Self {
        let directory = PACKAGE.linked_with_cuda(name);
        let compiler = PACKAGE.compiler("gcc", &["-std=gnu11", "-pedantic", "-O1"]);
        // With CUDA also where a program does not use it, as applications for GPUs have it.
        PACKAGE.compile(compiler, sources, &directory, &["-Wl,--no-as-needed", "-lgdasync", "-lcuda"]);
        Self(directory)
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = PACKAGE.program(&self.0, &[]);
        command.args(arguments);
        command
    }

    /// Runs it as all ranks of a job, and returns what they print, by rank.
    fn job(&self, size: usize, arguments: &[&str]) -> Vec<String> {
        PACKAGE.job(size, || self.command(arguments))
    }
}

#[test]
fn the_header_compiles_as_c_and_cplusplus() {
    for compiler in ["gcc", "g++"] {
        let text = "#include <gdasync.h>\nint main(void) { return 0; }\n";
        PACKAGE.check_standards(compiler, text, &["-pedantic"]);
    }
}

#[test]
fn layouts_and_numbers_agree() {
    let here = [
        ("sizeof gda_config", size_of::<gda_config>()),
        ("offsetof gda_config device", offset_of!(gda_config, device)),
        ("offsetof gda_config max_pieces", offset_of!(gda_config, max_pieces)),
        ("sizeof gda_info", size_of::<gda_info_t>()),
        ("offsetof gda_info device", offset_of!(gda_info_t, device)),
        ("sizeof gda_exchange", size_of::<gda_exchange>()),
        ("offsetof gda_exchange self", offset_of!(gda_exchange, this)),
        ("offsetof gda_exchange release", offset_of!(gda_exchange, release)),
        ("sizeof gda_buf", size_of::<gda_buf>()),
        ("offsetof gda_buf len", offset_of!(gda_buf, len)),
        ("sizeof gda_status", size_of::<gda_status>()),
        ("offsetof gda_status tag", offset_of!(gda_status, tag)),
        ("sizeof gda_signal", size_of::<gda_signal>()),
        ("offsetof gda_signal add", offset_of!(gda_signal, add)),
        ("GDA_VERSION", usize::try_from(VERSION).unwrap()),
        ("GDA_EXPORT_BYTES", ExportedMemory::BYTES),
    ];
    PACKAGE.check_layout(&["-std=c11"], &here);
}

#[test]
fn only_the_functions_of_the_header_are_exported() {
    PACKAGE.check_exports(&["gdasync.h"], &[]);
}

/// Runs a program of `tests/c` as all ranks: one whose check fails ends with an error, and so does the test.
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
