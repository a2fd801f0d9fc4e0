//! Starts the other ranks of a job as child processes on this host, without a launcher.

use std::env;
use std::io;
use std::net::{Ipv4Addr, TcpListener};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus};
use std::sync::Once;
use std::thread::sleep;
use std::time::Duration;

use gdsync::error::rounded;
use gdsync_device::fork_guard::ForkGuard;
use rustix::thread::{CpuSet, sched_setaffinity};

use super::binding;
use super::environment::{Launch, Launcher, Root};
use crate::error::{Error, Result};
use crate::exchange::{ChildProcesses, LAST_MOMENTS, say};
use crate::wait::Deadline;

/// Set in the ranks that a process has spawned.
pub(super) const SPAWNED: &str = "MP_SPAWNED";

/// How often a wait checks the children.
const TICK: Duration = Duration::from_millis(5);

/// The child processes of rank 0: ranks 1 and up. Dropping it kills and reaps those that still run.
#[derive(Debug)]
pub struct Children {
    started: Vec<(usize, Child)>,
    /// After a fork they belong to the parent.
    fork_guard: ForkGuard,
}

/// Makes this process rank 0 of `size`, and starts its own program with its own arguments for the
/// other ranks. Pass the result to [`Bootstrap::root`](crate::launch::Bootstrap::root).
///
/// The program must ask [`Launch::detect`] first, and call this only when no launcher is found.
/// Linux kills the children with the calling *thread*: call it from one that stays, best the main thread.
///
/// # Errors
/// [`Error::Launch`] for a bad size or when this process belongs to a job of several ranks already (each child would start
/// children), [`Error::Spawn`] when the system refuses.
pub fn spawn_self(size: usize) -> Result<(Launch, TcpListener, Children)> {
    spawn_bound(size, &[])
}

/// As [`spawn_self`]; each rank from 1 is bound to the CPUs of its share, if there are shares.
pub(super) fn spawn_bound(size: usize, shares: &[CpuSet]) -> Result<(Launch, TcpListener, Children)> {
    if let Some(launch) = Launch::detect()?.filter(|launch| launch.size > 1) {
        return Err(Error::launch(
            format!("this process is rank {} of {} already", launch.rank, launch.size),
            "call Launch::detect first, and start processes only when it finds no launcher",
        ));
    }
    let program = env::current_exe().map_err(|error| {
        Error::spawn("find the path of this program", error, "mount /proc, or use spawn_command")
    })?;
    let mut arguments = env::args_os();
    // Under its own name, by which programs such as Python find what belongs to them.
    let name = arguments.next();
    let arguments: Vec<_> = arguments.collect();
    spawn_command(size, |rank| {
        let mut command = Command::new(&program);
        command.arg0(name.as_deref().unwrap_or(program.as_os_str())).args(&arguments);
        if let Some(share) = shares.get(rank).copied() {
            // SAFETY: between fork and exec the closure only makes a system call and allocates nothing.
            unsafe { command.pre_exec(move || Ok(sched_setaffinity(None, &share)?)) };
        }
        command
    })
}

/// As [`spawn_self`], with the command that `command` gives for each rank from 1. The variables of
/// [`launch`](crate::launch) are added to it; standard output and error are inherited unless it says
/// otherwise.
///
/// # Errors
/// [`Error::Launch`] for a size that is 0 or above 65536, [`Error::Spawn`] when the system refuses.
pub fn spawn_command(
    size: usize,
    command: impl Fn(usize) -> Command,
) -> Result<(Launch, TcpListener, Children)> {
    let fix = "check that loopback networking works here";
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))
        .map_err(|e| Error::spawn("listen at 127.0.0.1", e, fix))?;
    let address = listener.local_addr().map_err(|e| Error::spawn("ask for the port", e, fix))?;
    let launch = Launch {
        rank: 0,
        size,
        local_rank: 0,
        local_size: Some(size),
        root: Root::At(address.to_string()),
        token: gdsync::hca::job_secret()?,
        launcher: Launcher::Env,
    };
    launch.check("rank", "size")?;
    let parent = std::process::id();
    let mut children = Children { started: Vec::new(), fork_guard: ForkGuard::default() };
    for rank in 1..size {
        let mut command = command(rank);
        for (name, value) in
            [("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", size), ("LOCAL_WORLD_SIZE", size)]
        {
            command.env(name, value.to_string());
        }
        command.env("MASTER_ADDR", address.ip().to_string());
        command.env("MASTER_PORT", address.port().to_string());
        command.env("GDSYNC_JOB_TOKEN", launch.token.to_string());
        command.env(SPAWNED, "1");
        // A torchrun around us keeps another port than this one.
        command.env_remove("TORCHELASTIC_USE_AGENT_STORE");
        // SAFETY: between fork and exec the closure only makes two system calls and allocates nothing.
        unsafe { command.pre_exec(move || die_with(parent)) };
        let child = command.spawn().map_err(|error| {
            let program = command.get_program().display();
            Error::spawn(
                format!("start rank {rank} ({program})"),
                error,
                "check the program and the process limit (ulimit -u)",
            )
        })?;
        children.started.push((rank, child));
    }
    Ok((launch, listener, children))
}

/// In the child: asks to be killed when the parent ends, and fails if it already has.
fn die_with(parent: u32) -> io::Result<()> {
    // SAFETY: PR_SET_PDEATHSIG takes a signal number and touches no memory.
    if unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: getppid has no arguments and cannot fail.
    if unsafe { libc::getppid() }.cast_unsigned() != parent {
        return Err(io::Error::from_raw_os_error(libc::ESRCH));
    }
    Ok(())
}

impl Children {
    /// The process id of a rank, also after it ended; `None` for a rank that is no child.
    pub fn pid(&self, rank: usize) -> Option<u32> {
        self.started.iter().find(|(other, _)| *other == rank).map(|(_, child)| child.id())
    }

    /// Kills a rank (SIGKILL); one that has ended already is left alone.
    ///
    /// # Errors
    /// [`Error::Spawn`] for a rank that is no child, or when the system refuses.
    pub fn kill(&mut self, rank: usize) -> Result<()> {
        let names: Vec<_> = self.started.iter().map(|(rank, _)| rank.to_string()).collect();
        let what = || format!("kill rank {rank}; the children are ranks {}", names.join(", "));
        let fix = "pass the rank of a child";
        let child = self.started.iter_mut().find(|(other, _)| *other == rank);
        let (_, child) = child.ok_or_else(|| Error::Spawn { what: what(), cause: None, fix })?;
        child.kill().map_err(|error| Error::spawn(what(), error, fix))
    }

    /// Checks, without waiting, whether a child has failed: [`Error::Child`] with its rank and status.
    pub fn failed(&mut self) -> Option<Error> {
        self.running().err()
    }

    /// Waits until all children have ended well. If one has not, the others have two seconds to end; then, or after `timeout`, those
    /// that still run are killed, and named on standard error.
    ///
    /// # Errors
    /// [`Error::Child`] for the first that ended with another code than 0 or by a signal,
    /// [`Error::Deadline`] names those that still ran.
    pub fn wait(mut self, timeout: Duration) -> Result<()> {
        let deadline = Deadline::after(timeout);
        let failed = loop {
            match self.running() {
                Ok(running) if running.is_empty() => return Ok(()),
                Ok(running) if deadline.is_over() => {
                    let what = format!("end of the children: waiting for {}", running.join(", "));
                    break deadline.error(what, "see what keeps the rank that is named from its end");
                }
                Ok(_) => sleep(TICK.min(deadline.remaining())),
                Err(failed) => break failed,
            }
        };
        self.end(LAST_MOMENTS.min(deadline.remaining()));
        Err(failed)
    }

    /// Waits until all have ended; after `limit`, kills the others and says so on standard error. Returns those.
    fn end(&mut self, limit: Duration) -> Vec<usize> {
        let deadline = Deadline::after(limit);
        let mut ranks = ChildProcesses::running(self);
        while !ranks.is_empty() && !deadline.is_over() {
            sleep(TICK.min(deadline.remaining()));
            ranks = ChildProcesses::running(self);
        }
        for (rank, child) in self.started.iter_mut().filter(|(rank, _)| ranks.contains(rank)) {
            let after = if limit.is_zero() { String::new() } else { format!(" after {}", rounded(limit)) };
            say(&format!("rank {rank} (process {}) still runs{after}: killed", child.id()));
            // It has ended by itself meanwhile, or nothing can be done.
            let _ = child.kill();
            let _ = child.wait();
        }
        ranks
    }

    /// Refuses children that have ended, also those that have ended well.
    pub(super) fn check_all_run(&mut self) -> Result<()> {
        self.statuses()?
            .into_iter()
            .find_map(|(rank, _, status)| Some(Error::Child { rank, status: status? }))
            .map_or(Ok(()), Err)
    }

    /// The failure of a child in place of what this process has seen of it.
    pub(super) fn explain_by_child(&mut self, error: Error) -> Error {
        let deadline = Deadline::after(LAST_MOMENTS);
        while matches!(error, Error::Bootstrap { .. } | Error::Message { .. }) && !deadline.is_over() {
            if let Some(failed) = self.failed() {
                return failed;
            }
            sleep(TICK);
        }
        error
    }

    /// The ranks that still run, or the error of one that ended badly.
    fn running(&mut self) -> Result<Vec<String>> {
        let mut running = Vec::new();
        for (rank, pid, status) in self.statuses()? {
            match status {
                None => running.push(format!("rank {rank} (pid {pid})")),
                Some(status) if status.success() => {}
                Some(status) => return Err(Error::Child { rank, status }),
            }
        }
        Ok(running)
    }

    /// The rank and process id of each, and its exit status, if it has ended.
    fn statuses(&mut self) -> Result<Vec<(usize, u32, Option<ExitStatus>)>> {
        let status = |(rank, child): &mut (usize, Child)| {
            let status = child.try_wait().map_err(|error| {
                let fix = "let nothing else reap children of this process";
                Error::spawn(format!("wait for rank {rank}"), error, fix)
            })?;
            Ok((*rank, child.id(), status))
        };
        self.started.iter_mut().map(status).collect()
    }
}

impl ChildProcesses for Children {
    fn pid(&self, rank: usize) -> Option<u32> {
        self.pid(rank)
    }

    fn explain(&mut self, error: Error) -> Error {
        self.explain_by_child(error)
    }

    fn keep(mut self: Box<Self>, former: &[usize]) -> Box<dyn ChildProcesses> {
        let rank = |child: &(usize, Child)| former.binary_search(&child.0).ok();
        let all = std::mem::take(&mut self.started).into_iter();
        let (kept, gone): (Vec<_>, _) = all.partition(|child| rank(child).is_some());
        let started = kept.into_iter().filter_map(|child| Some((rank(&child)?, child.1))).collect();
        // Those that are left out are killed and reaped.
        self.started = gone;
        Box::new(Self { started, fork_guard: self.fork_guard })
    }

    fn wait(self: Box<Self>, timeout: Duration) -> Result<()> {
        let ended = Children::wait(*self, timeout);
        binding::unbind();
        ended
    }

    fn running(&mut self) -> Vec<usize> {
        if !self.fork_guard.is_here() {
            return Vec::new();
        }
        let statuses = self.statuses().unwrap_or_default().into_iter();
        statuses.filter(|(_, _, status)| status.is_none()).map(|(rank, ..)| rank).collect()
    }

    fn leave(mut self: Box<Self>, limit: Duration, is_silent: bool) {
        if !self.fork_guard.is_here() {
            return;
        }
        let running: Vec<_> = ChildProcesses::running(&mut *self).iter().map(usize::to_string).collect();
        if !is_silent && !running.is_empty() {
            say(&format!(
                "rank 0 leaves without Communicator::finalize while others work (rank {}): they have {} to end; its own error, if any, \
                 is printed after that",
                running.join(", "),
                rounded(limit)
            ));
        }
        let killed = self.end(limit);
        binding::unbind();
        if is_silent {
            return;
        }
        let statuses = self.statuses().unwrap_or_default().into_iter();
        let failed: Vec<_> = statuses
            .filter(|(rank, ..)| !killed.contains(rank))
            .filter_map(|(rank, _, status)| Some(Error::Child { rank, status: status? }))
            .filter(|error| !matches!(error, Error::Child { status, .. } if status.success()))
            .collect();
        failed.iter().for_each(|error| say(&error.to_string()));
        if !failed.is_empty() || !killed.is_empty() {
            exit_with_failure();
        }
    }
}

/// Makes this process exit with 1 when it ends by itself: no caller gets the error.
fn exit_with_failure() {
    extern "C" fn fail() {
        // SAFETY: writes out what C has buffered, and ends the process; both may be called from a handler of exit.
        unsafe {
            libc::fflush(std::ptr::null_mut());
        }
        // SAFETY: ends the process; allowed in a handler of exit.
        unsafe { libc::_exit(1) }
    }
    static ONCE: Once = Once::new();
    // SAFETY: the handler is a function of this program, which is not unloaded before it ends. If there is no room for it, the exit
    // code stays what it is.
    ONCE.call_once(|| _ = unsafe { libc::atexit(fail) });
}

impl Drop for Children {
    fn drop(&mut self) {
        if !self.fork_guard.is_here() {
            return;
        }
        // All are killed before the first is waited for. A child that has ended already is no error, and other errors
        // cannot be handled here.
        for (_, child) in &mut self.started {
            let _ = child.kill();
        }
        for (_, child) in &mut self.started {
            let _ = child.wait();
        }
    }
}
