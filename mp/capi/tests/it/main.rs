//! The C interface: layouts and symbols, headers, and C programs of two ranks on a simulated GPU, on the software HCA and the
//! emulated card.

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
    let directory = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("mp-{name}"));
    // It is there if the test ran before.
    let _ = fs::remove_dir_all(&directory);
    fs::create_dir_all(&directory).expect("a directory for a test");
    directory
}

fn finish(command: &mut Command) -> Output {
    run_within(command, DEADLINE)
}

/// The compiler with every warning an error, and the headers.
fn compiler(compiler: &str, flags: &[&str]) -> Command {
    let mut command = Command::new(compiler);
    command.args(flags).args(["-Wall", "-Wextra", "-Werror", "-g", "-pthread"]);
    let theirs = ["tests/c/include", "../../gdsync/capi/tests/c/include"];
    for headers in
        ["include", "../../gdsync/capi/include", "../../gdrcopy/capi/include"].iter().chain(&theirs)
    {
        command.arg("-I").arg(package(headers));
    }
    command
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
        let directory = fresh_directory(name);
        let link = |library: &str, name: &str| symlink(built(library), directory.join(name)).expect("a link");
        ["libmp.so", "libmp.so.2"].into_iter().for_each(|name| link("libmp_c.so", name));
        ["libcuda.so", "libcuda.so.1"].into_iter().for_each(|name| link("libsimulated_cuda.so", name));
        let mut command = compiler("gcc", &["-std=gnu11", "-pedantic"]);
        command.arg(package(&format!("tests/c/{name}.c"))).arg("-o").arg(directory.join("program"));
        let output = finish(command.arg("-L").arg(&directory).args(["-lmp", "-lcuda"]));
        assert!(output.status.success(), "{name}.c: {}", printed(&output));
        Self(directory)
    }

    /// What it says on a device. It must pass there.
    fn passes(&self, hca: Hca, environment: &[(&str, &str)]) -> String {
        let mut command = Command::new(self.0.join("program"));
        for variable in [
            "MP_ENABLE_DEBUG",
            "MP_USE_IB_HCA",
            "GDSYNC_CAPI_WAIT_LIMIT",
            "GDSYNC_FAULTS",
            "RANK",
            "MASTER_ADDR",
        ] {
            command.env_remove(variable);
        }
        command.env("LD_LIBRARY_PATH", &self.0);
        match hca {
            Hca::Soft => command.env("GDSYNC_DEVICE", "soft0"),
            Hca::Card => command.env("LD_PRELOAD", card::library()).env("MP_USE_IB_HCA", "lx5_"),
        };
        let output = finish(command.envs(environment.iter().copied()));
        assert!(output.status.success(), "{hca:?} {environment:?}: {}: {}", output.status, printed(&output));
        printed(&output)
    }
}
