//! How the tests run the programs of this package.

use std::env;
use std::path::Path;
use std::process::{Command, Output};

use gdasync::results::{At, Series, Unit};
use serde_json::Value;
use tempfile::TempPath;

/// A program of this package as a user types it: `GDSYNC_STRICT=1 pingpong --sizes 8`.
pub(crate) fn command(line: &str) -> Command {
    let is_variable = |word: &&str| word.split('=').next().is_some_and(|name| name == name.to_uppercase());
    let variables = line.split_whitespace().take_while(is_variable);
    let mut words = line.split_whitespace().skip_while(is_variable);
    let name = words.next().unwrap();
    let tool = Path::new(env!("CARGO_BIN_EXE_gdasync")).with_file_name(name);
    // target/<profile>/deps/<this test>
    let here = env::current_exe().unwrap();
    let example = here.ancestors().nth(2).unwrap().join("examples").join(name);
    let path = if name.starts_with("gd") { tool } else { example };
    assert!(path.exists(), "{} is not built: run cargo test, or cargo build --examples", path.display());
    let mut command = program(path);
    command.args(words).envs(variables.map(|variable| variable.split_once('=').unwrap()));
    command
}

/// A program without what the surroundings of the tests have set.
pub(crate) fn program(path: impl AsRef<Path>) -> Command {
    let mut command = Command::new(path.as_ref());
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
pub(crate) fn run(mut command: Command) -> (Output, String, String) {
    let output = command.output().unwrap();
    let [out, err] =
        [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes).into_owned());
    (output, out, err)
}

/// What it wrote to standard output; it must succeed.
#[track_caller]
pub(crate) fn succeeds(command: Command) -> String {
    let (output, out, err) = run(command);
    assert!(output.status.success(), "{}\n{out}\n{err}", output.status);
    out
}

/// What it wrote to standard error; it must fail in its own words.
#[track_caller]
pub(crate) fn fails(command: Command) -> String {
    let (output, out, err) = run(command);
    assert!(output.status.code().is_some_and(|code| code != 0), "{}\n{out}\n{err}", output.status);
    assert!(!err.contains("panicked"), "{err}");
    err
}

/// What a command that succeeds writes with `--json`, and to standard output.
#[track_caller]
pub(crate) fn results(line: &str) -> (Value, String) {
    let json = Scratch::new("results");
    let mut command = command(line);
    command.arg("--json").arg(json.path());
    let out = succeeds(command);
    (json.json(), out)
}

/// A file for results, removed when the test is over.
pub(crate) struct Scratch(TempPath);

impl Scratch {
    /// A file that a program is to make.
    pub(crate) fn new(name: &str) -> Self {
        let mut named = tempfile::Builder::new();
        let named = named.prefix(name).suffix(".json").make_in(env!("CARGO_TARGET_TMPDIR"), |_| Ok(()));
        Self(named.unwrap().into_temp_path())
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }

    pub(crate) fn text(&self) -> &str {
        self.0.to_str().unwrap()
    }

    pub(crate) fn json(&self) -> Value {
        serde_json::from_slice(&std::fs::read(&self.0).unwrap()).unwrap()
    }
}

/// A pipe without a writer: opening it blocks.
pub(crate) fn fifo(path: &Path) {
    use rustix::fs::{CWD, FileType, Mode, mknodat};
    mknodat(CWD, path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
}

/// A number that says something: finite and above 0.
#[track_caller]
pub(crate) fn positive(value: &Value) -> f64 {
    let number = value.as_f64().unwrap_or_else(|| panic!("{value} is no number"));
    assert!(number.is_finite() && number > 0.0, "{number}");
    number
}

/// Checks positions, the order of percentiles, and ratios.
#[track_caller]
pub(crate) fn check_series(series: &Series, places: &[u64], has_ratios: bool) {
    let Series { name, unit, points, baseline, .. } = series;
    assert!(
        points.iter().map(|point| &point.x).eq(&places.iter().copied().map(At::Number).collect::<Vec<_>>()),
        "{series:?}"
    );
    for point in points {
        let (p50, p99, min) = (point.p50, point.p99, point.min);
        assert!([p50, p99, min].iter().all(|value| value.is_finite()), "{name}: {point:?}");
        let is_ordered = match unit {
            Unit::Micros => 0.0 < min && min <= p50 && p50 <= p99,
            Unit::PerSecond | Unit::GigabytesPerSecond => 0.0 < min && min <= p99 && p99 <= p50,
        };
        assert!(is_ordered, "{name}: {point:?}");
        if has_ratios {
            assert!(baseline.is_some() && point.ratio.is_some_and(|ratio| ratio > 0.0), "{name}: {point:?}");
        }
    }
}
