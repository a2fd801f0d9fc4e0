//! The C interface: layouts and symbols, headers, and C programs on the emulated card and a simulated GPU.

mod headers;
mod programs;

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::Duration;

use gdsync_testkit::card;
use gdsync_testkit::process::{built, printed, run_within};

/// The longest that a program may run; it is ended then and the test fails.
const DEADLINE: Duration = Duration::from_secs(300);

fn package(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

/// An empty directory of one test alone.
fn fresh_directory(name: &str) -> PathBuf {
    let directory = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    // It is there if the test ran before.
    let _ = fs::remove_dir_all(&directory);
    fs::create_dir_all(&directory).expect("a directory for a test");
    directory
}

fn finish(command: &mut Command) -> Output {
    run_within(command, DEADLINE)
}

/// What checks the memory of programs: "valgrind", or "address", gcc's sanitizer. `.ci/long c_memory` sets it.
fn checker() -> Option<String> {
    std::env::var("C_CHECK").ok()
}

/// The compiler with every warning an error, and the headers. Those of rdma-core are not ours to check.
fn compiler(compiler: &str, flags: &[&str]) -> Command {
    let mut command = Command::new(compiler);
    command.args(flags).args(["-Wall", "-Wextra", "-Werror", "-g", "-pthread"]);
    for headers in ["include", "tests/c/include", "../../gdrcopy/capi/include"] {
        command.arg("-I").arg(package(headers));
    }
    command
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
        let directory = fresh_directory(name);
        let link = |library: &str, name: &str| symlink(built(library), directory.join(name)).expect("a link");
        ["libgdsync.so", "libgdsync.so.2"].into_iter().for_each(|name| link("libgdsync_c.so", name));
        ["libcuda.so", "libcuda.so.1"].into_iter().for_each(|name| link("libsimulated_cuda.so", name));
        let mut command = compiler("gcc", &["-std=gnu11", "-pedantic"]);
        if checker().as_deref() == Some("address") {
            command.args(["-fsanitize=address", "-fno-omit-frame-pointer"]);
        }
        command.arg(package(&format!("tests/c/{name}.c"))).arg("-o").arg(directory.join("program"));
        let output = finish(command.arg("-L").arg(&directory).args(["-lgdsync", "-lcuda", "-libverbs"]));
        assert!(output.status.success(), "{name}.c: {}", printed(&output));
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
                let found = finish(Command::new("gcc").arg("-print-file-name=libasan.so")).stdout;
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
        finish(command.envs(environment.iter().copied()))
    }
}
