//! `gdasync doctor`: what works on this machine, what does not, why it matters and what to do.
//!
//! Probes try things rather than compare versions. What may block or crash (CUDA, libibverbs) is tried by processes of their
//! own, all at once, with a deadline. Nothing needs root, and nothing is changed.
//!
//! [`Doctor::run`] exits with 0 where nothing failed, 1 where something that is there does not work, 2 for wrong
//! options and output that cannot be written.

mod areas;
mod live;
mod machine;
mod output;
mod probe;
mod requirements;
mod system;
#[cfg(test)]
mod tests;

use crate::note;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

use clap::Args;
use serde::Serialize;

use areas::limits::Limits;
use areas::topology::{Pair, pairs};
use areas::{AREAS, Area, is_wanted};
use gdsync::rdma::gpus;
use live::{Answer, Asked, Live, limit};
use machine::Machine;
pub use probe::{Probe, Status};
use system::System;

use crate::measure::Machine as Description;

/// What the kernel may take at least, when devices have answered late.
const LOOKING: Duration = Duration::from_secs(2);

/// The options of `gdasync doctor`.
#[derive(Args, Debug)]
pub struct Doctor {
    /// Write the results as JSON to FILE, or to standard output in place of the text
    #[arg(long, value_name = "FILE", num_args = 0..=1, default_missing_value = "-")]
    json: Option<PathBuf>,
    /// Only these probes or areas, by their names in --list, with commas between or repeated
    #[arg(long, value_name = "NAME", value_delimiter = ',')]
    only: Vec<String>,
    /// List the probes, and what each tries
    #[arg(long)]
    list: bool,
    /// Also why each probe matters and what it tried, not only where something is wrong
    #[arg(long, short)]
    verbose: bool,
    /// What GPUs and RDMA devices may take to answer, in seconds [default: 4, and 1 for each GPU beyond the first]
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=3600))]
    timeout: Option<u64>,
    /// Where sys, proc and dev are
    #[arg(long, value_name = "DIR", default_value = "/", hide = true)]
    root: PathBuf,
    /// Find out one thing, as a process of its own
    #[arg(long, hide = true)]
    live: Option<Live>,
}

/// All that was found.
#[derive(Debug, Serialize)]
struct Report {
    machine: Description,
    probes: Vec<Probe>,
    /// The PCI path of every pair of GPUs and cards.
    topology: Vec<Pair>,
}

impl Doctor {
    /// Does what the options say.
    pub fn run(&self) -> ExitCode {
        if let Some(what) = self.live {
            return live::run(what);
        }
        let done = if self.list { output::list() } else { self.examine() };
        done.unwrap_or_else(|message| {
            note!("gdasync doctor: {message}");
            ExitCode::from(2)
        })
    }

    fn examine(&self) -> Result<ExitCode, String> {
        let names: Vec<_> = AREAS.iter().flat_map(|area| area.checks).map(|check| check.name).collect();
        if let Some(unknown) = self
            .only
            .iter()
            .find(|wanted| !names.iter().any(|name| is_wanted(name, std::slice::from_ref(wanted))))
        {
            return Err(format!("--only {unknown}: there is no such probe or area; --list names them"));
        }
        let file = match self.json.as_deref() {
            Some(path) if path.as_os_str() != "-" => {
                Some(File::create(path).map_err(|error| format!("--json {}: {error}", path.display()))?)
            }
            _ => None,
        };
        let report = self.report();
        let write = |to: &mut dyn Write| -> std::io::Result<()> {
            serde_json::to_writer_pretty(&mut *to, &report)?;
            writeln!(to)
        };
        let mut out = std::io::stdout().lock();
        let written = match (&self.json, file) {
            (Some(path), Some(mut file)) => {
                write(&mut file).map_err(|error| format!("--json {}: {error}", path.display()))?;
                output::text(&mut out, &report, self.verbose)
            }
            (Some(_), None) => write(&mut out),
            (None, _) => output::text(&mut out, &report, self.verbose),
        };
        // A reader that has seen enough (`| head`) is no failure.
        written
            .or_else(|error| if error.kind() == std::io::ErrorKind::BrokenPipe { Ok(()) } else { Err(error) })
            .map_err(|error| format!("cannot write the output: {error}"))?;
        let failed = report.probes.iter().any(|probe| probe.status == Status::Fail);
        Ok(if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS })
    }

    fn report(&self) -> Report {
        let began = Instant::now();
        let by_gpus = || limit(gpus(&System::at(&self.root).sysfs()).len());
        let timeout = self.timeout.map_or_else(by_gpus, Duration::from_secs);
        let wanted = |area: &&Area| area.checks.iter().any(|check| is_wanted(check.name, &self.only));
        let areas: Vec<_> = AREAS.iter().filter(wanted).collect();
        let asks: Vec<_> = areas.iter().flat_map(|area| area.asks).copied().collect();
        let machine = Arc::new(self.machine(&asks, timeout));
        let looks: Vec<_> = areas.iter().map(|&area| look(&machine, area.probe)).collect();
        let paths = areas.iter().any(|area| area.name == "topology").then(|| look(&machine, pairs));
        let deadline = (began + timeout).max(Instant::now() + LOOKING);
        let mut probes: Vec<_> =
            areas.iter().zip(looks).flat_map(|(area, look)| seen(area, &look, deadline)).collect();
        probes.retain(|probe| is_wanted(probe.name, &self.only));
        let topology = paths.and_then(|look| await_look(&look, deadline).ok()).unwrap_or_default();
        Report { machine: Description::here(), probes, topology }
    }

    /// Asks all who are to be asked at once.
    fn machine(&self, asks: &[Live], limit: Duration) -> Machine {
        let ask = |what: Live| asks.contains(&what).then(|| Asked::this_program(what, limit));
        let (cuda, mapping) = (ask(Live::Cuda), ask(Live::Mapping));
        let (verbs, choice) = (ask(Live::Verbs), ask(Live::Choice));
        Machine {
            system: System::at(&self.root),
            limits: Limits::here(),
            is_root: rustix::process::geteuid().is_root(),
            environment: std::env::vars_os()
                .map(|(name, value)| (lossy(name), lossy(value)))
                .collect::<BTreeMap<_, _>>(),
            cuda: answer(cuda),
            mapping: answer(mapping),
            verbs: answer(verbs),
            choice: answer(choice),
        }
    }
}

fn lossy(text: std::ffi::OsString) -> String {
    text.to_string_lossy().into_owned()
}

fn answer<T: serde::de::DeserializeOwned + Default>(asked: Option<std::io::Result<Asked>>) -> Answer<T> {
    match asked {
        None => Answer::default(),
        Some(Ok(asked)) => asked.answer(),
        Some(Err(error)) => {
            Answer { facts: T::default(), trouble: Some(format!("the probe could not be started: {error}")) }
        }
    }
}

/// Looks at a machine in a thread of its own: the kernel may not answer, where a card hangs.
fn look<T: Send + 'static>(machine: &Arc<Machine>, at: fn(&Machine) -> T) -> Receiver<T> {
    let (send, seen) = channel();
    let machine = machine.clone();
    // Not joined, for it may never end. Nobody listens any more then.
    thread::spawn(move || drop(send.send(at(&machine))));
    seen
}

fn await_look<T>(look: &Receiver<T>, deadline: Instant) -> Result<T, RecvTimeoutError> {
    look.recv_timeout(deadline.saturating_duration_since(Instant::now()))
}

/// What was seen of an area, or that its probes fail.
fn seen(area: &Area, look: &Receiver<Vec<Probe>>, deadline: Instant) -> Vec<Probe> {
    await_look(look, deadline).unwrap_or_else(|error| {
        let why = match error {
            RecvTimeoutError::Timeout => "the kernel did not answer in time",
            RecvTimeoutError::Disconnected => "the probe panicked",
        };
        let fix = "look into `dmesg` for messages of drivers, and at each device by itself; try again with `--timeout 60`";
        area.checks.iter().map(|check| check.fail(why, fix)).collect()
    })
}
