//! The C interface: header, layouts and symbols, and programs in C as the ranks of jobs.

mod header;
mod programs;

use std::fs;
use std::net::TcpListener;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::thread::scope;
use std::time::Duration;

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

/// The compiler with every warning an error, and the headers.
fn compiler(compiler: &str, flags: &[&str]) -> Command {
    let mut command = Command::new(compiler);
    command.args(flags).args(["-Wall", "-Wextra", "-Werror", "-g", "-pthread"]);
    for headers in ["include", "../gdsync/capi/tests/c/include"] {
        command.arg("-I").arg(package(headers));
    }
    command
}

/// A compiled program, in a directory with links to the libraries under the names that it looks for.
struct Program(PathBuf);

impl Program {
    /// Of these sources, relative to this package.
    fn compile(name: &str, sources: &[&str]) -> Self {
        let directory = fresh_directory(name);
        let link = |library: &str, name: &str| symlink(built(library), directory.join(name)).expect("a link");
        ["libgdasync.so", "libgdasync.so.0"].into_iter().for_each(|name| link("libgdasync_c.so", name));
        ["libcuda.so", "libcuda.so.1"].into_iter().for_each(|name| link("libsimulated_cuda.so", name));
        let mut command = compiler("gcc", &["-std=gnu11", "-pedantic", "-O1"]);
        command.args(sources.iter().map(|source| package(source))).arg("-o").arg(directory.join("program"));
        let output = finish(command.arg("-L").arg(&directory).args(["-lgdasync", "-lcuda"]));
        assert!(output.status.success(), "{name}: {}", printed(&output));
        Self(directory)
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(self.0.join("program"));
        command.args(arguments).env("LD_LIBRARY_PATH", &self.0);
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
            finish(&mut command)
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
