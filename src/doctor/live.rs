//! Trials in separate processes: one that blocks, or is killed by a driver, does not affect the others.
//!
//! Such a process is this program with a hidden option. It writes a line before each step and all facts after it, so its
//! parent knows how far it got.

mod cuda;
mod devices;

use std::cell::RefCell;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, ExitCode, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread::{self, sleep};
use std::time::{Duration, Instant};

use clap::ValueEnum;
use gdrcopy::Error;
use gdrcopy::cuda::CudaStatus;
use gdrcopy::cuda::raw::Api;
use gdrcopy::cuda::raw::layout::Handle;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

pub(super) use crate::nvml::Bar1;
#[cfg(test)]
pub(super) use cuda::explore;
pub(super) use cuda::{CudaFacts, GpuFacts, attribute};
pub(super) use devices::{ChoiceFacts, DeviceFacts, FabricFacts, MappingFacts, Route, VerbsFacts};

/// What can be asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub(super) enum Live {
    /// GPUs, through CUDA.
    Cuda,
    /// The ways to map GPU memory.
    Mapping,
    /// RDMA devices, through libibverbs.
    Verbs,
    /// The providers of libfabric.
    Fabric,
    /// What this library opens by default.
    Choice,
}

/// A line that a probing process writes.
#[derive(Debug, Deserialize, Serialize)]
enum Line<T> {
    /// What is tried next.
    Step(String),
    /// All that is known.
    Facts(T),
}

/// Where a probing process reports to.
pub(super) struct Reporter(RefCell<Box<dyn Write>>);

impl Reporter {
    pub(super) fn to(out: impl Write + 'static) -> Self {
        Self(RefCell::new(Box::new(out)))
    }

    fn step(&self, what: impl Into<String>) {
        self.line(&Line::<()>::Step(what.into()));
    }

    fn facts<T: Serialize>(&self, facts: &T) {
        self.line(&Line::Facts(facts));
    }

    fn line(&self, line: &impl Serialize) {
        let mut out = self.0.borrow_mut();
        let text = serde_json::to_string(line).unwrap_or_default();
        // The parent may be gone.
        let _ = writeln!(out, "{text}").and_then(|()| out.flush());
    }
}

/// The main function of a probing process.
pub(super) fn run(what: Live) -> ExitCode {
    // The kernel ends this process with its parent.
    let _ = rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL));
    let reporter = Reporter::to(std::io::stdout());
    match what {
        Live::Cuda => cuda::probe(&reporter),
        Live::Mapping => devices::probe_mapping(&reporter),
        Live::Verbs => devices::probe_verbs(&reporter),
        Live::Fabric => devices::probe_fabric(&reporter),
        Live::Choice => devices::probe_choice(&reporter),
    }
    // Without giving anything back, which may wait for a GPU that hangs: the kernel does it better.
    // SAFETY: ends the process; nothing that it holds outlives it.
    unsafe { libc::_exit(0) }
}

/// The time limit of all probing processes: CUDA starts the GPUs one after the other.
pub(super) fn limit(gpus: usize) -> Duration {
    Duration::from_secs(4 + gpus.saturating_sub(1) as u64)
}

/// How long the kernel may take to end a process that was killed; longer where it hangs in a driver.
const ENDING: Duration = Duration::from_millis(100);

/// The answer of a probing process.
#[derive(Clone, Debug, Default)]
pub(super) struct Answer<T> {
    /// Its last report.
    pub(super) facts: T,
    /// Why it did not finish.
    pub(super) trouble: Option<String>,
}

/// A process that was asked.
#[derive(Debug)]
pub(super) struct ProbeProcess {
    child: Child,
    lines: Receiver<String>,
    deadline: Instant,
    limit: Duration,
}

impl ProbeProcess {
    /// Starts this program again, to find out one thing.
    pub(super) fn this_program(what: Live, limit: Duration) -> std::io::Result<Self> {
        let mut command = Command::new(std::env::current_exe()?);
        let name = what.to_possible_value().expect("none is hidden");
        command.args(["doctor", "--live", name.get_name()]);
        Self::start(command, limit)
    }

    /// Starts a program that writes such lines.
    pub(super) fn start(mut command: Command, limit: Duration) -> std::io::Result<Self> {
        let deadline = Instant::now() + limit;
        // Libraries write what they like to standard error.
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut child = command.spawn()?;
        let out = child.stdout.take();
        let (send, lines) = channel();
        // Not joined: a process that survives its end keeps the pipe.
        thread::spawn(move || {
            let lines = out.into_iter().flat_map(|out| BufReader::new(out).lines());
            for line in lines.map_while(Result::ok) {
                if send.send(line).is_err() {
                    break;
                }
            }
        });
        Ok(Self { child, lines, deadline, limit })
    }

    /// Its answer, once it has ended or its time is up.
    pub(super) fn answer<T: DeserializeOwned + Default>(mut self) -> Answer<T> {
        let (mut facts, mut step) = (T::default(), None);
        loop {
            match self.lines.recv_timeout(self.deadline.saturating_duration_since(Instant::now())) {
                Ok(line) => match serde_json::from_str(&line) {
                    Ok(Line::Facts(known)) => facts = known,
                    Ok(Line::Step(next)) => step = Some(next),
                    // A library said something.
                    Err(_) => {}
                },
                Err(RecvTimeoutError::Disconnected) => break,
                Err(RecvTimeoutError::Timeout) => {
                    let _ = self.child.kill();
                    self.end(Instant::now() + ENDING);
                    let trouble = format!("no answer within {:?}", self.limit);
                    return Answer { facts, trouble: Some(trouble + &during(step)) };
                }
            }
        }
        let trouble = match self.end(self.deadline).map(|status| (status.success(), status.signal(), status))
        {
            Some((true, ..)) => return Answer { facts, trouble: None },
            Some((_, Some(signal), _)) => format!("the probe was killed by signal {signal}"),
            Some((.., status)) => format!("the probe ended with {status}"),
            None => "the probe does not end".to_owned(),
        };
        Answer { facts, trouble: Some(trouble + &during(step)) }
    }

    /// Its status, as soon as it has one.
    fn end(&mut self, deadline: Instant) -> Option<ExitStatus> {
        loop {
            if let Ok(Some(status)) = self.child.try_wait() {
                return Some(status);
            }
            if Instant::now() >= deadline {
                return None;
            }
            thread::sleep(Duration::from_millis(1));
        }
    }
}

fn during(step: Option<String>) -> String {
    step.map(|step| format!(", in {step}")).unwrap_or_default()
}

const PAUSE: Duration = Duration::from_millis(5);
/// How long a GPU may take to be free when the process that used it has ended.
const RELEASE: Duration = Duration::from_millis(500);

/// Waits until GPU 0 is free, for a process that is going to use it by other means.
fn await_first_gpu() {
    let Ok(api) = Api::load() else { return };
    let mut device = 0;
    // SAFETY: no flags are defined.
    let started = unsafe { api.init(0) };
    // SAFETY: a place for the answer.
    if started.is_ok() && unsafe { api.device_get(&mut device, 0) }.is_ok() {
        // Later calls in this process get the same context, or the same error.
        let _ = retain(&api, device);
    }
}

/// The primary context of a device, also where the process before this one is still ending.
fn retain(api: &Api, device: i32) -> gdrcopy::Result<Handle> {
    let deadline = Instant::now() + RELEASE;
    loop {
        let mut context = 0;
        // SAFETY: a place for the answer and a device of this driver. The process ends with it.
        match unsafe { api.primary_ctx_retain(&mut context, device) } {
            Err(error) if is_taken(&error) && Instant::now() < deadline => sleep(PAUSE),
            told => return told.map(|()| context),
        }
    }
}

/// Whether the compute mode of the GPU keeps this process out.
fn is_taken(error: &Error) -> bool {
    matches!(error, Error::Cuda { status: CudaStatus::DEVICE_UNAVAILABLE, .. })
}
