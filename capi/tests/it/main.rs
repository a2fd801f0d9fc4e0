//! The C interface: header, layouts and symbols, and programs in C as the ranks of jobs.

mod header;
mod programs;

use std::net::TcpListener;
use std::path::PathBuf;
use std::process::Command;
use std::thread::scope;
use std::time::Duration;

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
        let free = TcpListener::bind("127.0.0.1:0").expect("a free port").local_addr().expect("its number");
        let one = |rank: usize| {
            let (rank, size) = (rank.to_string(), size.to_string());
            let mut command = self.command(arguments);
            command.env("RANK", rank).env("WORLD_SIZE", size);
            command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", free.port().to_string());
            PACKAGE.finish(&mut command)
        };
        let outputs: Vec<_> = scope(|scope| {
            let ranks: Vec<_> = (0..size).map(|rank| scope.spawn(move || one(rank))).collect();
            ranks.into_iter().map(|rank| rank.join().expect("it ended in time")).collect()
        });
        let said: Vec<_> = outputs.iter().map(printed).collect();
        assert!(outputs.iter().all(|output| output.status.success()), "{}", said.join("\n"));
        said
    }
}
