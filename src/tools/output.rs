//! Where the words, the progress and the JSON of a tool go.

use std::fmt::Arguments;
use std::fs::File;
use std::io::{self, Write};
use std::path::Path;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;

use super::tools_shared::{Failure, Result};
use crate::output;

/// The output of a tool.
pub(super) struct Output {
    json: Option<Json>,
    bar: ProgressBar,
}

enum Json {
    Stdout,
    File(File),
}

impl Output {
    /// Opens the JSON file first: a path that cannot be written to is better known before the measurement.
    pub(super) fn open(json: Option<&Path>) -> Result<Self> {
        let open = |path: &Path| match path.to_str() {
            Some("-") => Ok(Json::Stdout),
            _ => File::create(path)
                .map(Json::File)
                .map_err(|e| Failure::failed(format_args!("--json {}: {e}", path.display()))),
        };
        Ok(Self { json: json.map(open).transpose()?, bar: ProgressBar::hidden() })
    }

    /// Says one line.
    pub(super) fn line(&self, line: Arguments<'_>) -> Result<()> {
        self.bar.suspend(|| match self.json {
            Some(Json::Stdout) => output::line(io::stderr(), line),
            _ => output::line(io::stdout(), line),
        })?;
        Ok(())
    }

    /// Shows progress of so many steps on the terminal, if standard error is one.
    pub(super) fn steps(&mut self, steps: usize) {
        let style = ProgressStyle::with_template("{elapsed_precise} {wide_bar} {pos}/{len} {msg}");
        self.bar = ProgressBar::new(steps as u64).with_style(style.expect("a constant template"));
        self.bar.enable_steady_tick(Duration::from_millis(500));
    }

    /// Says what the next step is.
    pub(super) fn step(&self, what: impl Into<String>) {
        self.bar.set_message(what.into());
    }

    /// The step is done.
    pub(super) fn stepped(&self) {
        self.bar.inc(1);
    }

    /// Writes the JSON that was asked for.
    pub(super) fn finish(self, report: &impl Serialize) -> Result<()> {
        self.bar.finish_and_clear();
        let to: Box<dyn Write> = match self.json {
            Some(Json::Stdout) => Box::new(io::stdout()),
            Some(Json::File(file)) => Box::new(file),
            None => return Ok(()),
        };
        let report = serde_json::to_string_pretty(report)?;
        Ok(output::line(to, format_args!("{report}"))?)
    }
}

/// `say!(output, "{}", value)?` says one line.
macro_rules! say {
    ($output:expr, $($format:tt)*) => { $output.line(format_args!($($format)*)) };
}
pub(super) use say;
