//! The C interface: header, layouts and symbols, and programs in C as the ranks of jobs.

mod header;
mod programs;

use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use gdsync_testkit::c::Package;

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
