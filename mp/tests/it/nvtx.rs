//! NVTX ranges, as an injection library gets them.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, exit};

use crate::common::{DONE, LONG, is_part_of, myself};
use gdsync::memory::Memory;
use gdsync::stream::{HostStreamConfig, Stream};
use mp::Communicator;

const NAME: &str = "ranges_reach_the_profiler";
const VARIABLE: &str = "NVTX_INJECTION64_PATH";

/// A message to itself by the CPU, one on a stream, and a graph.
fn work() -> mp::Result<()> {
    let comm = Communicator::builder().spawn(1).init()?;
    let buffer = comm.register(&Memory::alloc(64)?)?;
    let receive = comm.irecv(&buffer, 32..40, 0)?;
    let send = comm.isend(&buffer, 0..8, 0)?;
    comm.wait_all([&send, &receive], LONG)?;
    let stream = Stream::host(HostStreamConfig::default())?;
    let receive = comm.irecv(&buffer, 32..40, 0)?;
    let send = comm.isend_on_stream(&stream, &buffer, 0..8, 0)?;
    comm.wait_all_on_stream(&stream, [&send, &receive])?;
    stream.synchronize(LONG)?;
    let word = Memory::alloc(8)?.word64(0)?;
    let graph = stream.capture(|stream| stream.write_value64(&word, 1))?;
    graph.launch(&stream)?;
    stream.synchronize(LONG)?;
    comm.finalize(LONG)
}

/// The injection library and its log. `None`, after printing the reason, where there is no C compiler.
fn profiler() -> Option<(PathBuf, PathBuf)> {
    let directory = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let named = |what: &str| directory.join(format!("nvtx-{}.{what}", std::process::id()));
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/it/nvtx/injection.c");
    let mut cc = Command::new("cc");
    cc.args(["-shared", "-fPIC", "-Wall", "-Werror", "-o"]).arg(named("so")).arg(source);
    match cc.status() {
        Ok(status) => assert!(status.success(), "{cc:?}"),
        Err(error) => {
            eprintln!("skipped: no C compiler: cc: {error}");
            return None;
        }
    }
    Some((named("so"), named("log")))
}

#[test]
fn ranges_reach_the_profiler() {
    if is_part_of(NAME) {
        work().unwrap();
        exit(DONE);
    }
    let Some((library, log)) = profiler() else { return };
    let output = myself(NAME).env(VARIABLE, &library).env("NVTX_TEST_LOG", &log).output().unwrap();
    assert_eq!(output.status.code(), Some(DONE), "{output:?}");
    let told = fs::read_to_string(&log).unwrap();
    let has = |line: &str| told.lines().any(|told| told == line);
    for line in ["domain gdsync", "domain mp", "push mp irecv", "push mp isend", "push mp isend_on_stream"] {
        assert!(has(line), "{line}: {told}");
    }
    for call in ["post_send", "post_recv", "submit", "launch", "synchronize"] {
        assert!(has(&format!("push gdsync {call}")), "{call}: {told}");
    }
    let count = |word: &str| told.lines().filter(|line| line.starts_with(word)).count();
    assert_eq!(count("push"), count("pop"), "{told}");
    assert!(!told.contains('?'), "{told}");
    for file in [library, log] {
        let _ = fs::remove_file(file);
    }
}

#[test]
fn without_a_profiler_nothing_happens() {
    const NAME: &str = "without_a_profiler_nothing_happens";
    if is_part_of(NAME) {
        work().unwrap();
        exit(DONE);
    }
    // No library, a missing one, and one without the entry point.
    for library in ["", "/no/such/library.so", "libc.so.6"] {
        let output = myself(NAME).env(VARIABLE, library).output().unwrap();
        assert_eq!(output.status.code(), Some(DONE), "{library}: {output:?}");
    }
}
