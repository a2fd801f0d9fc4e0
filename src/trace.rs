//! `gdasync trace`: what the flight recorder of a process tells, while it runs, hangs, or after it was killed.

mod messages;
mod perfetto;
mod report;
mod text;

use gdasync::note;
use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use gdasync::gdsync::Error;
use gdasync::gdsync::error::printable;
use gdasync::gdsync::recorder::Recording;

use report::Report;

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

const STUCK: u8 = 3;

/// Options of `gdasync trace`.
#[derive(Args)]
#[command(
    after_help = "Exit status: 0 nothing is stuck, 3 a wait is stuck, 1 a recording cannot be read, 2 wrong arguments.\n\
                  A wait is stuck that has lasted for --stuck-after seconds, or that its process died in.\n\
                  Recordings are in /dev/shm, or where GDSYNC_RECORDER_DIR says; GDSYNC_RECORDER=off makes none. Of processes\n\
                  that are dead the newest eight are kept when the next one begins: copy those of larger jobs first."
)]
pub(crate) struct Options {
    /// Processes, or files of recordings.
    #[arg(value_name = "PID|FILE", required_unless_present_any = ["list", "clean"])]
    targets: Vec<String>,
    /// Lists the recordings of this machine.
    #[arg(long, conflicts_with_all = ["targets", "clean", "perfetto", "timeline"])]
    list: bool,
    /// Removes the recordings of your processes that have ended.
    #[arg(long, conflicts_with_all = ["targets", "perfetto", "timeline", "json"])]
    clean: bool,
    /// Shows so many records of each process, the last ones; of --timeline, so many messages.
    #[arg(short = 'n', long, value_name = "COUNT", default_value_t = 20)]
    records: usize,
    /// Seconds after which a wait counts as stuck.
    #[arg(long, value_name = "SECONDS", default_value_t = 1, value_parser = clap::value_parser!(u64).range(0..=86_400))]
    stuck_after: u64,
    /// Prints all of it as JSON.
    #[arg(long)]
    json: bool,
    /// Writes all records to this file as Chrome trace events, which ui.perfetto.dev opens.
    #[arg(long, value_name = "FILE")]
    perfetto: Option<PathBuf>,
    /// Prints the stages of the last messages as JSON, in microseconds, for a picture: only messages that have all stages.
    #[arg(long, conflicts_with = "json")]
    timeline: bool,
}

impl Options {
    pub(crate) fn run(&self) -> ExitCode {
        match self.try_run() {
            Ok(true) => ExitCode::from(STUCK),
            Ok(false) => ExitCode::SUCCESS,
            // Whoever reads has seen enough.
            Err(error) if is_closed_pipe(&*error) => ExitCode::SUCCESS,
            Err(error) => {
                note!("gdasync: {error}");
                ExitCode::FAILURE
            }
        }
    }

    fn try_run(&self) -> Result<bool> {
        let mut out = io::stdout().lock();
        if self.clean {
            for path in Recording::clean() {
                writeln!(out, "{}", path.display())?;
            }
            return Ok(false);
        }
        let recordings = if self.list { Recording::all(left_out) } else { self.recordings()? };
        if let Some(path) = &self.perfetto {
            let written =
                File::create(path).map_err(Into::into).and_then(|file| perfetto::write(&recordings, file));
            written.map_err(|error| format!("--perfetto {}: {error}", path.display()))?;
        }
        let others = if self.list { Vec::new() } else { Recording::all(|_, _| {}) };
        let report = Report::of(&recordings, &others, Duration::from_secs(self.stuck_after), self.records);
        if self.timeline {
            let timeline = messages::timeline(&recordings, self.records);
            if timeline.messages.is_empty() {
                return Err("no message has all stages from enqueue to release: a card does not tell of doorbells, and \
                            a send must be waited for on a stream or polled"
                    .into());
            }
            serde_json::to_writer(&mut out, &timeline)?;
            writeln!(out)?;
        } else if self.json {
            serde_json::to_writer_pretty(&mut out, &report)?;
            writeln!(out)?;
        } else if self.list {
            text::list(&report, &mut out)?;
        } else {
            text::print(&report, &mut out)?;
        }
        Ok(!self.list && report.stuck > 0)
    }

    fn recordings(&self) -> Result<Vec<Recording>> {
        let mut recordings = Vec::new();
        for target in &self.targets {
            match target.parse() {
                Ok(pid) => recordings.extend(Recording::of_process(pid, left_out)?),
                Err(_) => {
                    let recording = Recording::read(Path::new(target));
                    recordings.push(recording.map_err(|error| format!("{}: {error}", printable(target)))?);
                }
            }
        }
        Ok(recordings)
    }
}

/// Tells of a file that is called as a recording is and is not shown.
fn left_out(path: &Path, error: Error) {
    note!("gdasync: left out {}: {}", printable(&path.to_string_lossy()), printable(&error.to_string()));
}

fn is_closed_pipe(error: &(dyn std::error::Error + 'static)) -> bool {
    let kind = match (error.downcast_ref::<io::Error>(), error.downcast_ref::<serde_json::Error>()) {
        (Some(error), _) => Some(error.kind()),
        (_, Some(error)) => error.io_error_kind(),
        _ => None,
    };
    kind == Some(io::ErrorKind::BrokenPipe)
}
