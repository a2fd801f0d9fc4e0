//! `gdasync trace`: reads the flight recorders of processes that run, hang, or were killed.

mod report;
mod text;

use gdasync::{note, out};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use gdasync::gdsync::Error;
use gdasync::gdsync::error::printable;
use gdasync::gdsync::recorder::{Event, Queue, Record, Recording, Stage};
use gdasync::results::Result;
use serde_json::{Value, json};

use report::{micros, report, status};

const STUCK: u8 = 3;

#[derive(Args)]
#[command(
    after_help = "Exit status: 0 nothing is stuck, 3 a wait is stuck, 1 a recording cannot be read, 2 wrong arguments.\n\
                  A wait is stuck that has lasted for --stuck-after seconds, or that its process died in.\n\
                  Recordings are in /dev/shm, or where GDSYNC_RECORDER_DIR says; GDSYNC_RECORDER=off makes none. Of processes\n\
                  that are dead the newest eight are kept when the next one begins: copy those of larger jobs first."
)]
pub(crate) struct Options {
    /// Processes, or files of recordings; without one, as --list.
    #[arg(value_name = "PID|FILE")]
    targets: Vec<String>,
    /// Lists the recordings of this machine.
    #[arg(long, conflicts_with_all = ["targets", "clean", "perfetto"])]
    list: bool,
    /// Removes the recordings of your processes that have ended.
    #[arg(long, conflicts_with_all = ["targets", "perfetto", "json"])]
    clean: bool,
    /// Shows this many of the last records of each process, without the sends of mp's watchdog (--perfetto has them).
    #[arg(short = 'n', long, value_name = "COUNT", default_value_t = 20)]
    records: usize,
    /// Seconds after which a wait counts as stuck.
    #[arg(long, value_name = "SECONDS", default_value_t = 1, value_parser = clap::value_parser!(u64).range(0..=86_400))]
    stuck_after: u64,
    /// Prints all of it as JSON.
    #[arg(long)]
    json: bool,
    /// Writes all records to this file as Chrome trace events, which ui.perfetto.dev opens.
    #[arg(long, value_name = "FILE", requires = "targets")]
    perfetto: Option<PathBuf>,
}

impl Options {
    pub(crate) fn run(&self) -> Result<ExitCode> {
        if self.clean {
            for path in Recording::clean() {
                out!("{}", path.display())?;
            }
            return Ok(ExitCode::SUCCESS);
        }
        let is_list = self.list || self.targets.is_empty();
        let recordings = if is_list { Recording::all(left_out) } else { self.recordings()? };
        if let Some(path) = &self.perfetto {
            let written =
                File::create(path).map_err(Into::into).and_then(|file| write_perfetto(&recordings, file));
            written.map_err(|error| format!("--perfetto {}: {error}", path.display()))?;
        }
        let others = if is_list { Vec::new() } else { Recording::all(|_, _| {}) };
        let report = report(&recordings, &others, Duration::from_secs(self.stuck_after), self.records);
        if self.json {
            out!("{}", serde_json::to_string_pretty(&report)?)?;
        } else if is_list {
            text::list(&report)?;
        } else {
            text::print(&report)?;
        }
        Ok(if !is_list && report["stuck"] != 0 { ExitCode::from(STUCK) } else { ExitCode::SUCCESS })
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

/// Reports a file that has the name of a recording and cannot be read.
fn left_out(path: &Path, error: Error) {
    note!("gdasync: left out {}: {}", printable(&path.to_string_lossy()), printable(&error.to_string()));
}

/// The sends of a process in the order in which they were enqueued: that record, and that of the last stage that it reached.
fn sends(recording: &Recording) -> Vec<(&Record, Option<&Record>)> {
    let mut all = Vec::new();
    // Where the send of a number is, the last one of it: after a reset numbers are given again.
    let mut places = BTreeMap::new();
    for record in recording.records.iter().filter(|record| record.event.queue == Queue::Send) {
        let Event { stage, device, qpn, number, .. } = record.event;
        let key = (device, qpn, number);
        if stage == Stage::Prepared {
            places.insert(key, all.len());
            all.push((record, None));
        } else if let Some(&place) = places.get(&key)
            && matches!(stage, Stage::Fetched | Stage::Completed | Stage::Released)
        {
            all[place].1 = Some(record);
        }
    }
    all
}

/// Writes Chrome trace events, as ui.perfetto.dev reads them: one process for each recording, a track for each thread with what
/// it recorded and waited for, and the sends of each queue pair from enqueue to release.
fn write_perfetto(recordings: &[Recording], out: impl Write) -> Result<()> {
    let zero = recordings.iter().map(|recording| recording.begun).min().unwrap_or(0);
    let events: Vec<_> = recordings.iter().flat_map(|recording| events(recording, zero)).collect();
    let mut out = BufWriter::new(out);
    serde_json::to_writer(&mut out, &json!({ "displayTimeUnit": "ns", "traceEvents": events }))?;
    Ok(out.flush()?)
}

fn events(recording: &Recording, zero: u64) -> Vec<Value> {
    let pid = recording.pid;
    let at = |time: u64| micros(time.saturating_sub(zero));
    let rank = recording.rank.map_or_else(String::new, |rank| format!(" rank {rank}"));
    let mut all = vec![json!({
        "ph": "M", "pid": pid, "name": "process_name", "args": { "name": format!("{}{rank}", recording.command) },
    })];
    for thread in recording.threads.iter().filter(|thread| thread.tid != 0) {
        let name = json!({ "name": thread.name });
        all.push(json!({ "ph": "M", "pid": pid, "tid": thread.tid, "name": "thread_name", "args": name }));
    }
    all.extend(recording.records.iter().map(|record| {
        let event = &record.event;
        let (phase, name) = match event.stage {
            Stage::WaitBegun => ("B", "wait"),
            Stage::WaitEnded | Stage::WaitGivenUp => ("E", "wait"),
            stage => ("i", stage.name()),
        };
        json!({
            "ph": phase, "s": "t", "pid": pid, "tid": recording.threads[record.thread].tid, "ts": at(record.at),
            "cat": event.queue.name(), "name": format!("{name} {} {}", event.queue, event.number),
            "args": {
                "by": event.by.name(), "qpn": event.qpn, "number": event.number, "len": event.len,
                "stream": event.stream, "status": status(event),
            },
        })
    }));
    for (begun, ended) in sends(recording) {
        let Some(ended) = ended else { continue };
        let Event { device, qpn, number, len, .. } = begun.event;
        let id = format!("{pid}.{device}.{qpn:#x}.{number}.{}", begun.at);
        let name = format!("QP {qpn:#x} send {number}");
        let both = [("b", begun.at), ("e", ended.at.max(begun.at))];
        all.extend(both.map(|(phase, time)| {
            json!({
                "ph": phase, "pid": pid, "tid": 0, "id": id, "cat": "send", "name": name, "ts": at(time),
                "args": { "bytes": len, "status": status(&ended.event) },
            })
        }));
    }
    all
}
