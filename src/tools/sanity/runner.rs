//! Runs cases in processes of their own.

use std::ffi::OsString;
use std::io::{Read, Write};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use serde::Serialize;

use super::case::{Outcome, Stop};
use super::super::tools_shared::Result;

/// Exit status of a waived case, as in GDRCopy's tests.
const WAIVED: i32 = 2;

/// How a case ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Status {
    Passed,
    Failed,
    Waived,
}

impl Status {
    pub(super) fn word(self) -> &'static str {
        match self {
            Self::Passed => "PASSED",
            Self::Failed => "FAILED",
            Self::Waived => "WAIVED",
        }
    }
}

/// How a case ended, and why.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Verdict {
    pub(super) name: &'static str,
    pub(super) status: Status,
    /// Why it did not pass.
    pub(super) reason: String,
    pub(super) seconds: f64,
}

/// Starts this program again, for one case each.
#[derive(Debug)]
pub(super) struct Runner {
    program: PathBuf,
    arguments: Vec<OsString>,
    verbose: bool,
}

impl Runner {
    pub(super) fn new(verbose: bool) -> Result<Self> {
        let arguments = std::env::args_os().skip(1).collect();
        Ok(Self { program: std::env::current_exe()?, arguments, verbose })
    }

    /// Runs a case.
    pub(super) fn run(&self, name: &'static str, limit: Duration) -> Result<Verdict> {
        let start = Instant::now();
        let (status, reason) = self.say(name, limit)?;
        Ok(Verdict { name, status, reason, seconds: start.elapsed().as_secs_f64() })
    }

    /// Runs a child: how it ended and what it said on standard output, or else why it failed.
    pub(super) fn say(&self, name: &str, limit: Duration) -> Result<(Status, String)> {
        let errors = if self.verbose { Stdio::inherit() } else { Stdio::piped() };
        let mut child = Command::new(&self.program)
            .args(&self.arguments)
            .args(["--child", name])
            .process_group(0)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(errors)
            .spawn()?;
        let said = child.stdout.take().map(collect);
        let complained = child.stderr.take().map(collect);
        let status = end(&mut child, limit)?;
        // All processes of the group are gone, so both have reached their end.
        let [said, complained] =
            [said, complained].map(|thread| thread.and_then(|thread| thread.join().ok()).unwrap_or_default());
        Ok(judge(status, limit, said, &complained))
    }
}

fn collect(mut from: impl Read + Send + 'static) -> JoinHandle<String> {
    thread::spawn(move || {
        let mut bytes = Vec::new();
        // What came before an error is kept.
        let _ = from.read_to_end(&mut bytes);
        String::from_utf8_lossy(&bytes).trim().to_owned()
    })
}

/// Waits until the child ends or its time is over, and ends all that it started. None: its time was over.
fn end(child: &mut Child, limit: Duration) -> Result<Option<ExitStatus>> {
    let start = Instant::now();
    let mut pause = Duration::from_millis(1);
    let in_time = loop {
        if ended(child)? {
            break true;
        }
        if start.elapsed() > limit {
            break false;
        }
        thread::sleep(pause);
        pause = (pause * 2).min(Duration::from_millis(20));
    };
    let group = i32::try_from(child.id())?;
    // SAFETY: a plain call. The child has not been waited for, so its number, and that of its group, is its own.
    unsafe { libc::killpg(group, libc::SIGKILL) };
    let status = child.wait()?;
    Ok(in_time.then_some(status))
}

/// Whether the child has ended, without waiting for it: that would give its number free.
fn ended(child: &Child) -> Result<bool> {
    // SAFETY: the structure is plain old data, for which zero bytes are valid.
    let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
    let how = libc::WEXITED | libc::WNOWAIT | libc::WNOHANG;
    // SAFETY: `info` is valid for writing.
    let rc = unsafe { libc::waitid(libc::P_PID, child.id(), &raw mut info, how) };
    if rc != 0 {
        return Err(std::io::Error::last_os_error().into());
    }
    // SAFETY: the call has filled in the fields of a child's end, or left zeros.
    Ok(unsafe { info.si_pid() } != 0)
}

fn judge(status: Option<ExitStatus>, limit: Duration, said: String, complained: &str) -> (Status, String) {
    let because = |why: String| {
        let more: Vec<_> =
            [why.as_str(), &said, complained].into_iter().filter(|part| !part.is_empty()).collect();
        (Status::Failed, more.join(": "))
    };
    let Some(status) = status else { return because(format!("did not end within {limit:?}")) };
    match (status.code(), status.signal()) {
        (Some(0), _) => (Status::Passed, said),
        (Some(WAIVED), _) if !said.is_empty() => (Status::Waived, said),
        (Some(1), _) => because(String::new()),
        (Some(code), _) => because(format!("exit status {code}")),
        (None, Some(libc::SIGSEGV)) => because("killed by SIGSEGV".into()),
        (None, Some(libc::SIGBUS)) => because("killed by SIGBUS".into()),
        (None, signal) => because(format!("killed by signal {}", signal.unwrap_or_default())),
    }
}

/// Makes the kernel end this process when the tool itself is killed.
pub(super) fn die_with_parent() {
    // SAFETY: a plain call.
    unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
}

/// Ends this process the way [`Runner`] understands.
pub(super) fn exit_with(outcome: Outcome) -> ! {
    let (code, reason) = match outcome {
        Ok(()) => (0, String::new()),
        Err(Stop::Waived(reason)) => (WAIVED, reason),
        Err(Stop::Failed(reason)) => (1, reason),
    };
    // Read by the tool; without it nobody asks.
    let _ = std::io::stdout().write_all(reason.as_bytes());
    std::process::exit(code)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn judged(raw: i32, said: &str) -> (Status, String) {
        judge(Some(ExitStatus::from_raw(raw)), Duration::ZERO, said.into(), "log")
    }

    #[test]
    fn only_a_reason_waives() {
        assert_eq!(judged(0, ""), (Status::Passed, String::new()));
        assert_eq!(judged(WAIVED << 8, "no GPU"), (Status::Waived, "no GPU".into()));
        assert_eq!(judged(WAIVED << 8, ""), (Status::Failed, "exit status 2: log".into()));
        assert_eq!(judged(1 << 8, "wrong"), (Status::Failed, "wrong: log".into()));
        assert_eq!(judged(101 << 8, ""), (Status::Failed, "exit status 101: log".into()));
        assert_eq!(judged(libc::SIGBUS, ""), (Status::Failed, "killed by SIGBUS: log".into()));
        assert_eq!(judge(None, Duration::from_secs(1), String::new(), "").1, "did not end within 1s");
    }
}
