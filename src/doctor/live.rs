//! What only trying can tell, found out by processes of their own: one that blocks, or is killed by a driver, takes nothing
//! along.
//!
//! Such a process is this program with a hidden option. It writes a line before each step and all it knows after it, so that
//! whatever becomes of it, its parent knows how far it came.

mod ask;
mod choice;
mod cuda;
mod mapping;
mod memops;
mod turn;
mod verbs;

use std::cell::RefCell;
use std::io::Write;
use std::process::ExitCode;

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

pub(super) use crate::nvml::Bar1;
pub(super) use ask::{Answer, Asked, limit};
pub(super) use choice::{ChoiceFacts, Route};
#[cfg(test)]
pub(super) use cuda::explore;
pub(super) use cuda::{CudaFacts, GpuFacts, attribute};
pub(super) use mapping::{Backend, MappingFacts};
#[cfg(test)]
pub(super) use turn::take as take_turn;
pub(super) use verbs::{DeviceFacts, VerbsFacts};

/// What can be asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub(super) enum Live {
    /// GPUs, through CUDA.
    Cuda,
    /// The ways to map GPU memory.
    Mapping,
    /// RDMA devices, through libibverbs.
    Verbs,
    /// What this library opens when nobody says what.
    Choice,
}

/// A line of a process that finds out.
#[derive(Debug, Deserialize, Serialize)]
enum Line<T> {
    /// What is tried next.
    Step(String),
    /// All that is known.
    Facts(T),
}

/// Where a process that finds out tells.
pub(super) struct Teller(RefCell<Box<dyn Write>>);

impl Teller {
    pub(super) fn to(out: impl Write + 'static) -> Self {
        Self(RefCell::new(Box::new(out)))
    }

    /// Says what is tried next.
    fn step(&self, what: impl Into<String>) {
        self.line(&Line::<()>::Step(what.into()));
    }

    /// Says what is known now.
    fn facts<T: Serialize>(&self, facts: &T) {
        self.line(&Line::Facts(facts));
    }

    fn line(&self, line: &impl Serialize) {
        let mut out = self.0.borrow_mut();
        let text = serde_json::to_string(line).unwrap_or_default();
        // A parent that is gone does not want to know.
        let _ = writeln!(out, "{text}").and_then(|()| out.flush());
    }
}

/// The process that finds out.
pub(super) fn run(what: Live) -> ExitCode {
    // The kernel ends this process with its parent.
    let _ = rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL));
    let teller = Teller::to(std::io::stdout());
    match what {
        Live::Cuda => cuda::tell(&teller),
        Live::Mapping => mapping::tell(&teller),
        Live::Verbs => verbs::tell(&teller),
        Live::Choice => choice::tell(&teller),
    }
    // Without giving anything back, which may wait for a GPU that hangs: the kernel does it better.
    // SAFETY: ends the process; nothing that it holds outlives it.
    unsafe { libc::_exit(0) }
}
