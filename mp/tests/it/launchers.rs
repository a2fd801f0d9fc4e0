//! Ranks that real launchers start, where they are installed: `mpirun` of Open MPI, MPICH and Intel MPI, `srun` under a Slurm of
//! the test, `torchrun`; and two shells.

mod mpirun;
mod slurm;
mod torchrun;

use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::sleep;
use std::time::{Duration, Instant};

use crate::common::{LONG, buffer, bytes, is_part_of, message, myself};
use mp::Communicator;
use mp::collective::Collectives;
use mp::launch::{Launch, Root};

/// What each rank does: two communicators, one after the other, and a third beside it.
fn rank(kind: impl Fn(&Root) -> bool) {
    let launch = Launch::detect().unwrap().expect("started by a launcher");
    assert!(kind(&launch.root), "{launch:?}");
    for _ in 0..2 {
        let comm = Communicator::builder().timeout(LONG).init().unwrap();
        assert_eq!((comm.rank(), comm.size()), (launch.rank, launch.size));
        let beside = Communicator::builder().timeout(LONG).init().unwrap();
        for comm in [&comm, &beside] {
            let (me, size) = (comm.rank(), comm.size());
            let buffer = buffer(comm, size * 100);
            buffer.memory().write(me * 100, &message(me, 0, 1, 100)).unwrap();
            Collectives::new(comm).unwrap().allgather(&buffer, 0..size * 100, LONG).unwrap();
            let expected: Vec<_> = (0..size).flat_map(|rank| message(rank, 0, 1, 100)).collect();
            assert!(bytes(&buffer, 0..size * 100) == expected);
        }
        beside.finalize(LONG).unwrap();
        comm.finalize(LONG).unwrap();
    }
    println!("rank {} of {} is done", launch.rank, launch.size);
}

/// Each rank of a job of this size has printed once that it is done.
#[track_caller]
fn all_are_done(ranks: usize, text: &str) {
    for rank in 0..ranks {
        let line = format!("rank {rank} of {ranks} is done");
        assert_eq!(text.matches(&line).count(), 1, "{line}\n{text}");
    }
}

/// A process that ends with the test.
struct Job(Child);

impl Drop for Job {
    fn drop(&mut self) {
        if let Ok(None) = self.0.try_wait() {
            // SIGTERM first, so that it can end its children.
            let pid = i32::try_from(self.0.id()).expect("a process");
            // SAFETY: it is a child that was not waited for, so the number is its own.
            unsafe { libc::kill(pid, libc::SIGTERM) };
            let start = Instant::now();
            while matches!(self.0.try_wait(), Ok(None)) && start.elapsed() < Duration::from_secs(20) {
                sleep(Duration::from_millis(20));
            }
        }
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The exit status and the output of a job, which must end in time.
fn outcome(mut command: Command) -> (ExitStatus, String) {
    static COUNT: AtomicUsize = AtomicUsize::new(0);
    let name = format!("gdsync-launch-{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
    let path = std::env::temp_dir().join(name);
    let file = std::fs::File::create(&path).unwrap();
    command.stdin(Stdio::null()).stdout(file.try_clone().unwrap()).stderr(file);
    let mut job = Job(command.spawn().unwrap());
    let start = Instant::now();
    let status = loop {
        if let Some(status) = job.0.try_wait().unwrap() {
            break Some(status);
        }
        if start.elapsed() > 3 * LONG {
            break None;
        }
        sleep(Duration::from_millis(20));
    };
    let text = std::fs::read_to_string(&path).unwrap();
    std::fs::remove_file(&path).unwrap();
    (status.unwrap_or_else(|| panic!("{command:?} does not end\n{text}")), text)
}

/// The output of a job, which must succeed in time.
fn output(command: Command) -> String {
    let (status, text) = outcome(command);
    assert!(status.success(), "{status}\n{text}");
    text
}

/// The programs of these names in `PATH`, each once.
fn programs(names: &[&str]) -> Vec<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let files =
        std::env::split_paths(&path).flat_map(|folder| names.iter().map(move |name| folder.join(name)));
    let mut found: Vec<(PathBuf, PathBuf)> = Vec::new();
    for file in files.filter(|file| file.is_file()) {
        let real = file.canonicalize().unwrap_or_else(|_| file.clone());
        if found.iter().all(|(_, other)| *other != real) {
            found.push((file, real));
        }
    }
    found.into_iter().map(|(file, _)| file).collect()
}

/// A command started by a launcher.
fn under(launcher: &Path, arguments: &[&str], what: &Command) -> Command {
    let mut command = Command::new(launcher);
    command.args(arguments).arg(what.get_program()).args(what.get_args());
    for (name, value) in what.get_envs() {
        match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        };
    }
    // Left by a batch system around the tests, or meant for another test.
    command.env_remove("MASTER_ADDR").env_remove("MASTER_PORT");
    command
}

/// One of four ports of this process, below the ephemeral ports.
fn port(which: u32) -> String {
    (10_000 + std::process::id() % 2_500 * 4 + which).to_string()
}

/// Two ranks without a launcher.
#[test]
fn two_shells() {
    const NAME: &str = "two_shells";
    if is_part_of(NAME) {
        return rank(|root| matches!(root, Root::At(_)));
    }
    let port = port(1);
    let shell = |rank: &str| {
        let mut command = myself(NAME);
        command.envs([
            ("RANK", rank),
            ("WORLD_SIZE", "2"),
            ("MASTER_ADDR", "127.0.0.1"),
            ("MASTER_PORT", &port),
        ]);
        command
    };
    let mut other = Job(shell("1").stdout(Stdio::null()).spawn().unwrap());
    assert!(output(shell("0")).contains("rank 0 of 2 is done"));
    assert!(other.0.wait().unwrap().success());
}
