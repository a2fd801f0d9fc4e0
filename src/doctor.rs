//! `gdasync doctor`: what works on this machine, what does not, why it matters and what to do.
//!
//! Probes try things rather than compare versions. What may block or crash (CUDA, libibverbs) runs in separate processes,
//! each with a deadline. Nothing needs root, and nothing is changed.
//!
//! [`Doctor::run`] exits with 0 where nothing failed, 1 where something that is there does not work, 2 for wrong
//! options and output that cannot be written.

mod areas;
mod live;
mod machine;
mod requirements;
#[cfg(test)]
mod tests;

use crate::results::JsonFile;
use crate::{note, out};
use std::collections::BTreeMap;
use std::fmt::{self, Write};
use std::io::{self, IsTerminal};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

use clap::Args;
use serde::Serialize;

use areas::process::conclusion;
use areas::rdma::Limits;
use areas::{AREAS, Area, area_of, is_wanted};
pub use areas::{Probe, Status};
use gdsync::rdma::gpus;
use live::{Answer, Live, ProbeProcess, limit};
use machine::{Machine, System};

use crate::measure::Machine as Description;

/// What the kernel may take at least, when devices have answered late.
const LOOKING: Duration = Duration::from_secs(2);

/// The options of `gdasync doctor`.
#[derive(Args, Debug)]
pub struct Doctor {
    /// Write the results as JSON to FILE, or to standard output in place of the text
    #[arg(long, value_name = "FILE", num_args = 0..=1, default_missing_value = "-")]
    json: Option<PathBuf>,
    /// Only these probes or areas, by their names in --list
    #[arg(long, value_name = "NAME", value_delimiter = ',')]
    only: Vec<String>,
    /// List the probes: what each tries, and why it matters
    #[arg(long)]
    list: bool,
    /// Seconds in which GPUs and RDMA devices have to answer [default: 4, and 1 for each GPU beyond the first]
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=3600))]
    timeout: Option<u64>,
    /// Where sys, proc and dev are
    #[arg(long, value_name = "DIR", default_value = "/", hide = true)]
    root: PathBuf,
    /// Find out one thing, as a process of its own
    #[arg(long, hide = true)]
    live: Option<Live>,
}

#[derive(Debug, Serialize)]
struct Report {
    machine: Description,
    probes: Vec<Probe>,
    /// What works here and what to try first; empty if only other areas were looked at.
    conclusion: String,
}

impl Doctor {
    /// Does what the options say.
    pub fn run(&self) -> ExitCode {
        if let Some(what) = self.live {
            return live::run(what);
        }
        let done = if self.list { list() } else { self.examine() };
        done.unwrap_or_else(|error| {
            note!("gdasync doctor: {error}");
            ExitCode::from(2)
        })
    }

    fn examine(&self) -> crate::results::Result<ExitCode> {
        let names: Vec<_> = AREAS.iter().flat_map(|area| area.checks).map(|check| check.name).collect();
        if let Some(unknown) = self
            .only
            .iter()
            .find(|wanted| !names.iter().any(|name| is_wanted(name, std::slice::from_ref(wanted))))
        {
            return Err(format!("--only {unknown}: there is no such probe or area; --list names them").into());
        }
        let is_json = self.json.as_ref().is_some_and(|path| path.as_os_str() == "-");
        let file = JsonFile::create(self.json.as_deref().filter(|_| !is_json))?;
        let report = self.report();
        file.write(&report)?;
        let shown = if is_json { serde_json::to_string_pretty(&report)? } else { text(&report)? };
        out!("{}", shown.trim_end())?;
        let failed = report.probes.iter().any(|probe| probe.status == Status::Fail);
        Ok(if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS })
    }

    fn report(&self) -> Report {
        let began = Instant::now();
        let by_gpus = || limit(gpus(&System::at(&self.root).sysfs()).len());
        let timeout = self.timeout.map_or_else(by_gpus, Duration::from_secs);
        let wanted = |area: &&Area| area.checks.iter().any(|check| is_wanted(check.name, &self.only));
        let areas: Vec<_> = AREAS.iter().filter(wanted).collect();
        // libfabric, whose constructors do much, is loaded for those who name it.
        let is_for_fabric = !self.only.is_empty()
            || gdsync::env::variable("GDSYNC_DEVICE").is_some_and(|name| name.starts_with("fabric:"));
        let asks = areas.iter().flat_map(|area| area.asks).copied();
        let asks: Vec<_> = asks.filter(|ask| is_for_fabric || *ask != Live::Fabric).collect();
        let machine = Arc::new(self.machine(&asks, timeout));
        let looks: Vec<_> = areas.iter().map(|&area| look(&machine, area.probe)).collect();
        let choice = areas.iter().any(|area| area.name == "choice");
        let deadline = (began + timeout).max(Instant::now() + LOOKING);
        let mut probes: Vec<_> =
            areas.iter().zip(looks).flat_map(|(area, look)| seen(area, &look, deadline)).collect();
        probes.retain(|probe| is_wanted(probe.name, &self.only));
        let conclusion = if choice { conclusion(&machine) } else { String::new() };
        Report { machine: Description::here(), probes, conclusion }
    }

    /// Asks the probing processes. Those that use GPUs run one after the other: a GPU may be for one process at a time.
    fn machine(&self, asks: &[Live], limit: Duration) -> Machine {
        let ask = |what: Live| asks.contains(&what).then(|| ProbeProcess::this_program(what, limit));
        let verbs = ask(Live::Verbs);
        Machine {
            system: System::at(&self.root),
            limits: Limits::here(),
            is_root: rustix::process::geteuid().is_root(),
            environment: std::env::vars_os()
                .map(|(name, value)| (lossy(name), lossy(value)))
                .collect::<BTreeMap<_, _>>(),
            cuda: answer(ask(Live::Cuda)),
            mapping: answer(ask(Live::Mapping)),
            choice: answer(ask(Live::Choice)),
            verbs: answer(verbs),
            fabric: ask(Live::Fabric).map(|asked| answer(Some(asked))),
        }
    }
}

fn lossy(text: std::ffi::OsString) -> String {
    text.to_string_lossy().into_owned()
}

fn answer<T: serde::de::DeserializeOwned + Default>(
    asked: Option<std::io::Result<ProbeProcess>>,
) -> Answer<T> {
    match asked {
        None => Answer::default(),
        Some(Ok(asked)) => asked.answer(),
        Some(Err(error)) => {
            Answer { facts: T::default(), trouble: Some(format!("the probe could not be started: {error}")) }
        }
    }
}

/// Runs probes in a separate thread: reading the kernel's files blocks where a card hangs.
fn look<T: Send + 'static>(machine: &Arc<Machine>, at: fn(&Machine) -> T) -> Receiver<T> {
    let (send, seen) = channel();
    let machine = machine.clone();
    // Not joined, for it may never end. Nobody listens any more then.
    thread::spawn(move || drop(send.send(at(&machine))));
    seen
}

/// The probes of an area, or their failure.
fn seen(area: &Area, look: &Receiver<Vec<Probe>>, deadline: Instant) -> Vec<Probe> {
    look.recv_timeout(deadline.saturating_duration_since(Instant::now())).unwrap_or_else(|error| {
        let why = match error {
            RecvTimeoutError::Timeout => "the kernel did not answer in time",
            RecvTimeoutError::Disconnected => "the probe panicked",
        };
        let fix = "look into `dmesg` for messages of drivers, and at each device by itself; try again with `--timeout 60`";
        area.checks.iter().map(|check| check.fail(why, fix)).collect()
    })
}

/// Names of the widest probe fit.
const NAME: usize = 24;

fn list() -> crate::results::Result<ExitCode> {
    for check in AREAS.iter().flat_map(|area| area.checks) {
        out!("{:NAME$}  {}\n{:NAME$}  why: {}", check.name, check.tried, "", check.why)?;
    }
    Ok(ExitCode::SUCCESS)
}

/// The report, by area: a line for each probe, and below it what to do.
fn text(report: &Report) -> Result<String, fmt::Error> {
    let mut out = String::new();
    let color = io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none();
    let machine = &report.machine;
    let Description { version, cpus, cpu, kernel, .. } = machine;
    writeln!(out, "gdasync doctor {version}: {cpus} x {cpu}, Linux {kernel}")?;
    for area in AREAS {
        let probes: Vec<_> = report.probes.iter().filter(|probe| area_of(probe.name) == area.name).collect();
        if probes.is_empty() {
            continue;
        }
        writeln!(out, "\n{}", area.title)?;
        let order = |line: &Line| area.checks.iter().position(|check| check.name == line.names[0]);
        let mut lines = alike(&probes);
        lines.sort_by_key(order);
        for line in merged(lines) {
            write_line(&mut out, &line, color)?;
        }
    }
    let count = |status| report.probes.iter().filter(|probe| probe.status == status).count();
    let (fail, warn, skip, ok) =
        (count(Status::Fail), count(Status::Warn), count(Status::Skip), count(Status::Ok));
    writeln!(out, "\n{ok} ok, {warn} warn, {fail} fail, {skip} skip")?;
    if fail > 0 {
        writeln!(out, "Repair what says FAIL first.")?;
    }
    if !report.conclusion.is_empty() {
        writeln!(out, "{}", report.conclusion)?;
    }
    Ok(out)
}

/// A line: what a probe says, of some devices; or what some say that were skipped.
#[derive(Debug)]
struct Line<'a> {
    names: Vec<&'a str>,
    subjects: Vec<&'a str>,
    probe: &'a Probe,
}

/// Probes that say the same of several devices are one line.
fn alike<'a>(probes: &[&'a Probe]) -> Vec<Line<'a>> {
    let words = |probe: &Probe| Probe { subject: None, ..probe.clone() };
    let mut lines: Vec<Line<'_>> = Vec::new();
    for probe in probes {
        let subject = probe.subject.as_deref();
        match lines.iter_mut().find(|line| words(line.probe) == words(probe)) {
            Some(line) => line.subjects.extend(subject),
            None => {
                lines.push(Line { names: vec![probe.name], subjects: subject.into_iter().collect(), probe })
            }
        }
    }
    lines
}

/// Probes that were skipped for one reason are one line.
fn merged(lines: Vec<Line<'_>>) -> Vec<Line<'_>> {
    let mut rows: Vec<Line<'_>> = Vec::new();
    for line in lines {
        let is_plain = |probe: &Probe| probe.status == Status::Skip && probe.fix.is_none();
        let same = |row: &&mut Line<'_>| is_plain(row.probe) && row.probe.found == line.probe.found;
        match rows.iter_mut().find(same).filter(|_| is_plain(line.probe)) {
            Some(row) => row.names.extend(line.names),
            None => rows.push(line),
        }
    }
    rows
}

fn write_line(out: &mut String, line: &Line<'_>, color: bool) -> fmt::Result {
    let probe = line.probe;
    let (on, off) = match probe.status {
        _ if !color => ("", ""),
        Status::Ok => ("\x1b[32m", "\x1b[0m"),
        Status::Skip => ("\x1b[2m", "\x1b[0m"),
        Status::Warn => ("\x1b[33m", "\x1b[0m"),
        Status::Fail => ("\x1b[1;31m", "\x1b[0m"),
    };
    let (name, names) = match line.names[..] {
        [name] => (name.to_owned(), String::new()),
        _ => {
            let short = |name: &&str| name.split_once('.').map_or(*name, |(_, short)| short).to_owned();
            let names: Vec<_> = line.names.iter().map(short).collect();
            (format!("{}.*", area_of(probe.name)), format!(" ({})", names.join(", ")))
        }
    };
    let of = match line.subjects[..] {
        [] => String::new(),
        _ => format!("{}: ", line.subjects.join(", ")),
    };
    writeln!(out, "  {on}{:4}{off}  {name:NAME$}  {of}{}{names}", probe.status, probe.found)?;
    let is_wrong = probe.status >= Status::Warn;
    let mut note = |what: &str, text: &str| writeln!(out, "        {what}: {text}");
    if is_wrong {
        note("why", probe.why)?;
    }
    match &probe.fix {
        Some(fix) => note(if is_wrong { "fix" } else { "advice" }, fix),
        None => Ok(()),
    }
}
