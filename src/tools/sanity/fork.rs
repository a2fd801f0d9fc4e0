//! A second process within a case.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::panic::{AssertUnwindSafe, catch_unwind};

use super::case::{Outcome, Stop, fail};
use super::runner;

/// A forked process that plays its part of the case.
#[derive(Debug)]
pub(super) struct Forked {
    pid: libc::pid_t,
    /// The way to it.
    pub(super) stream: UnixStream,
    /// Its reason, if it does not pass.
    reason: UnixStream,
}

/// Forks. The child plays with the other end of the stream and ends; nothing of the parent's is dropped in it.
pub(super) fn fork(play: impl FnOnce(UnixStream) -> Outcome) -> Outcome<Forked> {
    let (stream, theirs) = UnixStream::pair()?;
    let (reason, told) = UnixStream::pair()?;
    // SAFETY: the child uses what the C library keeps in order over a fork, and leaves by `_exit`.
    match unsafe { libc::fork() } {
        -1 => Err(std::io::Error::last_os_error().into()),
        0 => {
            runner::die_with_parent();
            let (code, text) = match catch_unwind(AssertUnwindSafe(|| play(theirs))) {
                Ok(Ok(())) => (0, String::new()),
                Ok(Err(Stop::Waived(text))) => (2, text),
                Ok(Err(Stop::Failed(text))) => (1, text),
                Err(_) => (1, "panicked".into()),
            };
            // A parent that is gone does not want to know.
            let _ = (&told).write_all(text.as_bytes());
            // SAFETY: ends this process at once.
            unsafe { libc::_exit(code) }
        }
        pid => Ok(Forked { pid, stream, reason }),
    }
}

impl Forked {
    /// Waits for its end. The runner's deadline is the limit.
    pub(super) fn join(mut self) -> Outcome {
        drop(self.stream);
        let mut status = 0;
        // SAFETY: `status` is valid for writing.
        if unsafe { libc::waitpid(self.pid, &raw mut status, 0) } != self.pid {
            return Err(std::io::Error::last_os_error().into());
        }
        let mut text = String::new();
        self.reason.read_to_string(&mut text)?;
        match (libc::WIFEXITED(status), libc::WEXITSTATUS(status)) {
            (true, 0) => Ok(()),
            (true, 2) => Err(Stop::Waived(text)),
            (true, _) => fail(format_args!("the forked process: {text}")),
            _ => fail(format_args!("the forked process was killed by signal {}", libc::WTERMSIG(status))),
        }
    }
}

/// Sends a number.
pub(super) fn send(mut stream: &UnixStream, number: u64) -> Outcome {
    Ok(stream.write_all(&number.to_ne_bytes())?)
}

/// Receives a number.
pub(super) fn receive(mut stream: &UnixStream) -> Outcome<u64> {
    let mut bytes = [0; 8];
    stream.read_exact(&mut bytes)?;
    Ok(u64::from_ne_bytes(bytes))
}
