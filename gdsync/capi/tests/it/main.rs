//! The C interface: layouts and symbols, headers, and C programs on the emulated card and a simulated GPU.

mod headers;
mod programs;

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::Duration;

use gdsync_testkit::c::Package;
use gdsync_testkit::card;

/// The headers of rdma-core are not ours to check.
const PACKAGE: Package = Package {
    root: env!("CARGO_MANIFEST_DIR"),
    scratch: env!("CARGO_TARGET_TMPDIR"),
    includes: &["include", "tests/c/include", "../../gdrcopy/capi/include"],
    file: "libgdsync_c.so",
    name: "libgdsync",
    version: 2,
    limit: Duration::from_secs(300),
};

/// What checks the memory of programs: "valgrind", or "address", gcc's sanitizer. `.ci/long c_memory` sets it.
fn checker() -> Option<String> {
    std::env::var("C_CHECK").ok()
}

/// Whether the headers and libraries of rdma-core are installed. Says so if they are not.
fn has_rdma_core() -> bool {
    if !card::has_rdma_core() {
        return false;
    }
    let has_header = Path::new("/usr/include/infiniband/verbs.h").exists();
    if !has_header {
        eprintln!("skipped: infiniband/verbs.h is not installed (libibverbs-dev)");
    }
    has_header
}

/// A compiled program of `tests/c`, in a directory with links to the libraries under the names that it looks for.
struct Program(PathBuf);

impl Program {
    fn compile(name: &str) -> Self {
        let directory = PACKAGE.linked_with_cuda(name);
        let mut compiler = PACKAGE.compiler("gcc", &["-std=gnu11", "-pedantic"]);
        if checker().as_deref() == Some("address") {
            compiler.args(["-fsanitize=address", "-fno-omit-frame-pointer"]);
        }
        let libraries = ["-lgdsync", "-lcuda", "-libverbs"];
        PACKAGE.compile(compiler, &[&format!("tests/c/{name}.c")], &directory, &libraries);
        Self(directory)
    }

    /// Runs on the emulated card.
    fn run(&self, environment: &[(&str, &str)]) -> Output {
        let (program, mut preloaded) = (self.0.join("program"), card::library().into_os_string());
        let mut command = Command::new(&program);
        match checker().as_deref() {
            Some("valgrind") => {
                command = Command::new("valgrind");
                command.args(["--quiet", "--error-exitcode=99"]).arg(program);
            }
            Some("address") => {
                let found = PACKAGE.finish(Command::new("gcc").arg("-print-file-name=libasan.so")).stdout;
                let runtime = String::from_utf8(found).expect("a path");
                preloaded = format!("{} {}", runtime.trim(), preloaded.display()).into();
                // Handles are never freed, so that no address is that of two.
                command.env("ASAN_OPTIONS", "detect_leaks=0");
            }
            _ => {}
        }
        for variable in ["GDS_ENABLE_DEBUG", "GDSYNC_CAPI_WAIT_LIMIT", "GDSYNC_FAULTS"] {
            command.env_remove(variable);
        }
        command.env("LD_LIBRARY_PATH", &self.0).env("LD_PRELOAD", preloaded);
        PACKAGE.finish(command.envs(environment.iter().copied()))
    }
}
