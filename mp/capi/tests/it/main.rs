//! The C interface: layouts and symbols, headers, and C programs of two ranks on a simulated GPU, on the software HCA and the
//! emulated card.

use std::mem::offset_of;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use gdsync_testkit::c::Package;
use gdsync_testkit::card;
use gdsync_testkit::process::printed;
use mp_c::{Handle, VERSION, mp_exchange, mp_send_words, mp_wait_words, mp_word_words};

const PACKAGE: Package = Package {
    root: env!("CARGO_MANIFEST_DIR"),
    scratch: env!("CARGO_TARGET_TMPDIR"),
    includes: &[
        "include",
        "../../gdsync/capi/include",
        "../../gdrcopy/capi/include",
        "tests/c/include",
        "../../gdsync/capi/tests/c/include",
    ],
    file: "libmp_c.so",
    name: "libmp",
    version: 2,
    limit: Duration::from_secs(300),
};

/// Whether `mp/device.cuh` compiles, which includes `gdsync.h`.
fn has_verbs_header() -> bool {
    let found = Path::new("/usr/include/infiniband/verbs.h").exists();
    if !found {
        eprintln!("skipped: infiniband/verbs.h is not installed (libibverbs-dev)");
    }
    found
}

/// A device that programs run on.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Hca {
    Soft,
    Card,
}

/// A compiled program of `tests/c`, in a directory with links to the libraries under the names that it looks for.
struct Program(PathBuf);

impl Program {
    fn compile(name: &str) -> Self {
        Self::of(name, &format!("tests/c/{name}.c"), &[])
    }

    /// Of this source, relative to the package.
    fn of(name: &str, source: &str, flags: &[&str]) -> Self {
        let directory = PACKAGE.linked_with_cuda(name);
        let mut compiler = PACKAGE.compiler("gcc", &["-std=gnu11", "-pedantic"]);
        compiler.args(flags);
        PACKAGE.compile(compiler, &[source], &directory, &["-lmp", "-lcuda"]);
        Self(directory)
    }

    /// What runs it on a device.
    fn command(&self, hca: Hca) -> Command {
        let preloaded = if hca == Hca::Card { vec![card::library()] } else { Vec::new() };
        let mut command = PACKAGE.program(&self.0, &preloaded);
        for variable in [
            "MP_ENABLE_DEBUG",
            "MP_ENABLE_UD",
            "MP_USE_IB_HCA",
            "GDSYNC_CAPI_WAIT_LIMIT",
            "GDSYNC_FAULTS",
            "RANK",
            "MASTER_ADDR",
        ] {
            command.env_remove(variable);
        }
        match hca {
            Hca::Soft => command.env("GDSYNC_DEVICE", "soft0"),
            Hca::Card => command.env("MP_USE_IB_HCA", "lx5_"),
        };
        command
    }

    /// What it says on a device. It must pass there.
    fn passes(&self, hca: Hca, environment: &[(&str, &str)]) -> String {
        let output = PACKAGE.finish(self.command(hca).envs(environment.iter().copied()));
        assert!(output.status.success(), "{hca:?} {environment:?}: {}: {}", output.status, printed(&output));
        printed(&output)
    }
}

#[test]
fn the_headers_compile_as_c_and_cplusplus() {
    for (header, mpi) in
        [("mp.h", ""), ("mp.h", "#define MP_NO_MPI\n"), ("mp/device.cuh", ""), ("comm.h", "")]
    {
        let text = format!("{mpi}#include <{header}>\nint main(void) {{ return 0; }}\n");
        for compiler in ["gcc", "g++"] {
            if compiler == "gcc" && header.ends_with(".cuh") {
                continue;
            }
            if compiler == "g++" && header != "mp.h" && !has_verbs_header() {
                continue;
            }
            PACKAGE.check_standards(compiler, &text, &["-Wno-unused-function"]);
        }
    }
}

#[test]
fn layouts_and_numbers_agree() {
    let here = [
        ("sizeof mp_exchange", size_of::<mp_exchange>()),
        ("offsetof mp_exchange rank", offset_of!(mp_exchange, rank)),
        ("offsetof mp_exchange self", offset_of!(mp_exchange, own)),
        ("offsetof mp_exchange allgather", offset_of!(mp_exchange, allgather)),
        ("offsetof mp_exchange release", offset_of!(mp_exchange, release)),
        ("sizeof mp_word_words", size_of::<mp_word_words>()),
        ("offsetof mp_word_words value", offset_of!(mp_word_words, value)),
        ("sizeof mp_send_words", size_of::<mp_send_words>()),
        ("offsetof mp_send_words db_ptr", offset_of!(mp_send_words, db_ptr)),
        ("offsetof mp_send_words dbrec_value", offset_of!(mp_send_words, dbrec_value)),
        ("sizeof mp_wait_words", size_of::<mp_wait_words>()),
        ("offsetof mp_wait_words sema_value", offset_of!(mp_wait_words, sema_value)),
        ("offsetof mp_wait_words cond", offset_of!(mp_wait_words, cond)),
        ("sizeof mp_request_t", size_of::<Handle>()),
        ("MP_API_VERSION", usize::try_from(VERSION).unwrap()),
    ];
    PACKAGE.check_layout(&["-std=c11"], &here);
}

#[test]
fn only_the_functions_of_the_header_are_exported() {
    let dynamic = PACKAGE.check_exports(&["mp.h"], &[]);
    for needed in ["libmpi", "libcuda", "libibverbs"] {
        assert!(!dynamic.contains(needed), "{dynamic}");
    }
}

#[test]
fn ranks_exchange_messages_in_every_way() {
    let program = Program::compile("messages");
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port().to_string();
    let launcher = [
        ("WORLD_SIZE", "2"),
        ("MASTER_ADDR", "127.0.0.1"),
        ("MASTER_PORT", &port),
        ("GDSYNC_CAPI_WAIT_LIMIT", "5s"),
    ];
    let lossy = [("GDSYNC_FAULTS", "seed=1,drop=0.01,duplicate=0.01")];
    let (ethernet, infiniband) = ([("GDASYNC_CARD_LINK", "eth")], [("GDASYNC_CARD_LINK", "ib")]);
    // The CPU does not reach the memory of a simulated GPU. MP_INIT_RX_CQ_ON_GPU
    let on_gpu = [("INIT_FLAGS", "2")];
    type Run<'a> = (Hca, &'a [(&'a str, &'a str)], &'a str);
    let mut runs: Vec<Run<'_>> = vec![
        (Hca::Soft, &lossy, ""),
        (Hca::Soft, &launcher, "GDSYNC_CAPI_WAIT_LIMIT is '5s': expected seconds"),
        (Hca::Soft, &[("MP_ENABLE_UD", "1")], "reliable also with MP_ENABLE_UD"),
        (Hca::Soft, &on_gpu, "mp: mp_init: the queues are in host memory: "),
    ];
    if card::has_rdma_core() {
        runs.extend([(Hca::Card, &ethernet[..], ""), (Hca::Card, &infiniband, "")]);
    }
    // They wait more than they compute.
    std::thread::scope(|scope| {
        for (hca, environment, expected) in runs {
            let program = &program;
            scope.spawn(move || {
                let said = program.passes(hca, environment);
                assert_eq!(said.is_empty(), expected.is_empty(), "{environment:?}: {said}");
                assert!(said.lines().all(|line| line.contains(expected)), "{environment:?}: {said}");
            });
        }
    });
}

#[test]
fn misuse_has_an_error_number_and_a_line() {
    let program = Program::compile("misuse");
    for hca in [Hca::Soft, Hca::Card] {
        if hca == Hca::Card && !card::has_rdma_core() {
            continue;
        }
        let log = program.passes(hca, &[]);
        assert!(log.lines().count() > 150, "{log}");
        for line in log.lines() {
            assert!(line.starts_with("mp: mp") && !line.contains("::"), "{line}");
        }
        assert!(!log.contains("panicked"), "{log}");
        let line = "mp: mp_wait: rank 1: ";
        assert!(log.contains(line), "{log}");
    }
}

#[test]
fn ranks_tell_each_other_when_they_are_ready() {
    let program = Program::compile("comm");
    let mut said = program.passes(Hca::Soft, &[]);
    if card::has_rdma_core() {
        said += &program.passes(Hca::Card, &[]);
    }
    // Two misuses of each rank, and a wait that is late, on purpose.
    let expected = |line: &str| line.contains("no such peer") || line.contains("mp_wait32: ");
    assert!(said.lines().count().is_multiple_of(5) && said.lines().all(expected), "{said}");
}

#[test]
fn the_example_plays_ping_pong_on_streams() {
    let program = Program::of("pingpong", "../../examples/c/pingpong_mp.c", &["-DMP_NO_MPI"]);
    let said = PACKAGE.job(2, || program.command(Hca::Soft));
    assert!(said[0].starts_with("1000 rounds of 4096 bytes, ") && said[1].is_empty(), "{said:?}");
}

#[test]
fn lanes_of_a_kernel_signal_in_any_order() {
    if !has_verbs_header() {
        return;
    }
    let directory = PACKAGE.linked_with_cuda("lanes");
    let compiler = PACKAGE.compiler("g++", &["-std=c++11"]);
    PACKAGE.compile(compiler, &["tests/c/lanes.cpp"], &directory, &["-lmp", "-lcuda"]);
    let output = PACKAGE.finish(&mut PACKAGE.program(&directory, &[]));
    assert!(output.status.success(), "{}", printed(&output));
}
