//! The parent's side: starts the process, listens, and does not wait for ever.

use std::io::{BufRead, BufReader};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

use clap::ValueEnum;
use serde::de::DeserializeOwned;

use super::{Line, Live};

/// How long all of them together may take on a machine with so many GPUs, which CUDA starts one after the other.
pub(in crate::doctor) fn limit(gpus: usize) -> Duration {
    Duration::from_secs(4 + gpus.saturating_sub(1) as u64)
}

/// How long the kernel may take to end a process that was killed; longer where it hangs in a driver.
const ENDING: Duration = Duration::from_millis(100);

/// What a process has found out.
#[derive(Clone, Debug, Default)]
pub(in crate::doctor) struct Answer<T> {
    /// The last that it said.
    pub(in crate::doctor) facts: T,
    /// Why it said no more, if it was not done.
    pub(in crate::doctor) trouble: Option<String>,
}

/// A process that was asked.
#[derive(Debug)]
pub(in crate::doctor) struct Asked {
    child: Child,
    lines: Receiver<String>,
    deadline: Instant,
    limit: Duration,
}

impl Asked {
    /// Starts this program again, to find out one thing.
    pub(in crate::doctor) fn this_program(what: Live, limit: Duration) -> std::io::Result<Self> {
        let mut command = Command::new(std::env::current_exe()?);
        let name = what.to_possible_value().expect("none is hidden");
        command.args(["doctor", "--live", name.get_name()]);
        Self::start(command, limit)
    }

    /// Starts a program that writes such lines.
    pub(in crate::doctor) fn start(mut command: Command, limit: Duration) -> std::io::Result<Self> {
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

    /// What it has to say, until it ends or its time is up.
    pub(in crate::doctor) fn answer<T: DeserializeOwned + Default>(mut self) -> Answer<T> {
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
                    let trouble = format!("no answer within {:?}{}", self.limit, during(step.as_deref()));
                    return Answer { facts, trouble: Some(trouble) };
                }
            }
        }
        let trouble = match self.end(self.deadline) {
            Some(status) if status.success() => None,
            Some(status) => Some(match status.signal() {
                Some(signal) => format!("the probe was killed by signal {signal}{}", during(step.as_deref())),
                None => format!("the probe ended with {status}{}", during(step.as_deref())),
            }),
            None => Some(format!("the probe does not end{}", during(step.as_deref()))),
        };
        Answer { facts, trouble }
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

fn during(step: Option<&str>) -> String {
    step.map(|step| format!(", in {step}")).unwrap_or_default()
}
