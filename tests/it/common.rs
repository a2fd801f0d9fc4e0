//! How the tests run the binaries of this package.
#![allow(dead_code, unreachable_pub, reason = "every test binary uses its own part")]

use std::env;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::atomic::{AtomicU32, Ordering};

/// An example, built beside this test.
pub fn example(name: &str) -> Command {
    // target/<profile>/deps/<this test>
    let here = env::current_exe().unwrap();
    let path = here.ancestors().nth(2).unwrap().join("examples").join(name);
    assert!(path.exists(), "{} is not built: run cargo test, or cargo build --examples", path.display());
    clean(Command::new(path))
}

/// The command-line tool.
pub fn gdasync() -> Command {
    clean(Command::new(env!("CARGO_BIN_EXE_gdasync")))
}

/// A program of this package, by its path.
pub fn program(path: &str) -> Command {
    clean(Command::new(path))
}

/// Without what the surroundings of the tests have set.
fn clean(mut command: Command) -> Command {
    let set = env::vars_os().map(|(name, _)| name.to_string_lossy().into_owned());
    let theirs = [
        "RANK",
        "WORLD_SIZE",
        "MASTER_",
        "OMPI_COMM_WORLD_",
        "PMI_",
        "SLURM_",
        "GDSYNC_",
        "GDRCOPY_",
        "RUST_LOG",
    ];
    for name in set.filter(|name| theirs.iter().any(|prefix| name.starts_with(prefix))) {
        command.env_remove(name);
    }
    command
}

/// Runs it to its end; what it wrote to standard output and error.
pub fn run(mut command: Command) -> (Output, String, String) {
    let output = command.output().unwrap();
    let [out, err] =
        [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes).into_owned());
    (output, out, err)
}

/// What it wrote to standard output; it must succeed.
#[track_caller]
pub fn succeeds(command: Command) -> String {
    let (output, out, err) = run(command);
    assert!(output.status.success(), "{}\n{out}\n{err}", output.status);
    out
}

/// What it wrote to standard error; it must fail in its own words.
#[track_caller]
pub fn fails(command: Command) -> String {
    let (output, out, err) = run(command);
    assert!(output.status.code().is_some_and(|code| code != 0), "{}\n{out}\n{err}", output.status);
    assert!(!err.contains("panicked"), "{err}");
    err
}

/// A file for results, removed when the test is over.
pub struct Scratch(PathBuf);

impl Scratch {
    pub fn new(name: &str) -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let name = format!("{name}-{}-{count}.json", std::process::id());
        Self(Path::new(env!("CARGO_TARGET_TMPDIR")).join(name))
    }

    pub fn path(&self) -> &Path {
        &self.0
    }

    pub fn json(&self) -> serde_json::Value {
        serde_json::from_slice(&std::fs::read(&self.0).unwrap()).unwrap()
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // A test that failed early has not made it.
        let _ = std::fs::remove_file(&self.0);
    }
}

/// A number that says something: finite and above 0.
#[track_caller]
pub fn positive(value: &serde_json::Value) -> f64 {
    let number = value.as_f64().unwrap_or_else(|| panic!("{value} is no number"));
    assert!(number.is_finite() && number > 0.0, "{number}");
    number
}
