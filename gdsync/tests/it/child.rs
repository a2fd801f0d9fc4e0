//! Processes that run one test of this program: tests that need a process of their own, and the peers of other tests.
#![allow(unreachable_pub, reason = "modules of a test program")]

use std::cell::Cell;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::{env, thread};

use gdsync::Error;
use gdsync::stream::{Batch, Stream};
use gdsync::verbs::{QpAddress, RecvWr, RemoteAddr, SendWr};
use gdsync_testkit::process;

use crate::common::Side;

/// Set in a process that runs a test alone.
const ALONE: &str = "GDSYNC_TEST_ALONE";

/// This program, to run one test in another process.
pub fn rerun(test: &str) -> Command {
    let mut command = Command::new(env::current_exe().unwrap());
    command.args(["--exact", test, "--include-ignored", "--nocapture", "--test-threads=1"]);
    command
}

/// This program, to run the tests whose names contain one of these in another process.
pub fn rerun_all(tests: &[&str]) -> Command {
    let mut command = Command::new(env::current_exe().unwrap());
    // One after the other, beside the tests of this process. Copies between GPUs use no device.
    command.args(tests).args(["tcp::", "fabric::", "peer_copies::"].iter().flat_map(|test| ["--skip", test]));
    command.arg("--test-threads=2");
    command
}

/// Whether this process runs no other test. If it may, the calling test runs in a process of its own, and passes there before this
/// returns false.
///
/// For tests that look at the whole process (threads, files, CPU time), fork, or change what other tests use: the environment,
/// limits, the simulated CUDA driver.
pub fn is_own_process() -> bool {
    is_own_process_with(None)
}

/// As [`is_own_process`], with this variable in its environment.
pub fn is_own_process_with(variable: Option<(&str, &str)>) -> bool {
    thread_local! {
        static PASSED: Cell<bool> = const { Cell::new(false) };
    }
    // The main thread runs tests only with `--test-threads=1`.
    let thread = thread::current();
    let Some(test) = thread.name().filter(|name| *name != "main" && env::var_os(ALONE).is_none()) else {
        let is_set = |(name, value)| env::var(name).is_ok_and(|set| set == value);
        assert!(variable.is_none_or(is_set), "{variable:?} is not set, and there is only one test thread");
        return true;
    };
    if !PASSED.get() {
        let output = rerun(test).env(ALONE, "1").envs(variable).output().unwrap();
        let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert!(output.status.success() && out.contains("1 passed"), "{}\n{out}\n{err}", output.status);
        println!("{out}");
        PASSED.set(true);
    }
    false
}

/// Returns from a test unless [`is_own_process`].
macro_rules! own_process {
    () => {
        if !$crate::child::is_own_process() {
            return;
        }
    };
    ($variable:literal = $value:literal) => {
        if !$crate::child::is_own_process_with(Some(($variable, $value))) {
            return;
        }
    };
}
pub(crate) use own_process;

/// Set in the peer of a test: what it does.
const ROLE: &str = "GDSYNC_TEST_ROLE";

/// What this process is to do, if it is a child.
pub fn role() -> Option<String> {
    env::var(ROLE).ok()
}

/// The answer of a round: what came.
pub fn pong(stream: &Stream, side: &Side, round: u64) -> Result<(), Error> {
    let arrived = [side.mr.sge(8, 8)?];
    side.qp.post_recv(&[RecvWr::new(&arrived).id(round)])?;
    let mut batch = Batch::new();
    batch.wait_recv(&side.qp)?;
    batch.send(&side.qp, &SendWr::send(&arrived).id(round))?;
    batch.wait_send(&side.qp)?;
    stream.submit(&mut batch)
}

/// The question of a round; a right answer is counted, in stream order.
pub fn ping(stream: &Stream, side: &Side, round: u64, right: &Arc<AtomicU64>) -> Result<(), Error> {
    side.qp.post_recv(&[RecvWr::new(&[side.mr.sge(8, 8)?]).id(round)])?;
    let mut batch = Batch::new();
    batch.write_value64(&side.memory().word64(0)?, 3 * round + 1);
    batch.send(&side.qp, &SendWr::send(&[side.mr.sge(0, 8)?]).id(round))?;
    batch.wait_send(&side.qp)?;
    batch.wait_recv(&side.qp)?;
    let (answer, right) = (side.memory().word64(8)?, right.clone());
    batch.host_fn(move || {
        right.fetch_add((answer.load() == 3 * round + 1).into(), Ordering::Relaxed);
    });
    stream.submit(&mut batch)
}

/// What one side tells the other.
fn introduction(side: &Side) -> String {
    let RemoteAddr { addr, rkey } = side.mr.remote(0).unwrap();
    format!("peer {} {addr} {rkey}", side.qp.address())
}

fn read_introduction(line: &str) -> (QpAddress, RemoteAddr) {
    let mut words = line.trim().split(' ').skip(1);
    let mut next = || words.next().unwrap();
    let address = next().parse().unwrap();
    (address, RemoteAddr { addr: next().parse().unwrap(), rkey: next().parse().unwrap() })
}

/// In the child: connects to the parent. Returns where the parent's region begins.
pub fn meet_parent(side: &Side) -> RemoteAddr {
    println!("{}", introduction(side));
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).unwrap();
    let (address, remote) = read_introduction(&line);
    side.qp.connect(address).unwrap();
    remote
}

/// The child of a test, in a process of its own, and what it said of itself.
pub struct Peer {
    child: Child,
    stdin: ChildStdin,
    lines: BufReader<ChildStdout>,
}

impl Drop for Peer {
    fn drop(&mut self) {
        // Gone already, where the test killed it.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Peer {
    /// Starts the test of this name, with its modules, as a child with a role.
    pub fn spawn(test: &str, role: &str) -> Self {
        let mut command = rerun(test);
        let mut child = command.env(ROLE, role).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let (stdin, lines) = (child.stdin.take().unwrap(), BufReader::new(child.stdout.take().unwrap()));
        Self { child, stdin, lines }
    }

    /// As [`spawn`](Self::spawn), and connects to it.
    pub fn start(test: &str, role: &str, side: &Side) -> (Self, RemoteAddr) {
        let mut peer = Self::spawn(test, role);
        let (address, remote) = read_introduction(&peer.hear("peer "));
        side.qp.connect(address).unwrap();
        peer.tell(&introduction(side));
        peer.hear("ready");
        (peer, remote)
    }

    pub fn tell(&mut self, line: &str) {
        writeln!(self.stdin, "{line}").unwrap();
    }

    /// The next line that begins so, past what the test harness prints.
    pub fn hear(&mut self, begin: &str) -> String {
        loop {
            let mut line = String::new();
            assert_ne!(
                self.lines.read_line(&mut line).unwrap(),
                0,
                "the child ended before it said '{begin}'"
            );
            if let Some(at) = line.find(begin) {
                return line[at..].to_owned();
            }
        }
    }

    /// Kills it, and returns when it is gone.
    pub fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Stops all its threads, and returns when they have stopped.
    pub fn stop(&self) {
        process::stop(self.child.id());
    }

    pub fn resume(&self) {
        process::signal(self.child.id(), libc::SIGCONT);
    }
}
