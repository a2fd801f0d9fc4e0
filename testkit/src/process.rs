//! Forked children for tests of crashes and forks, and tests that need a process of their own.

use std::net::{Ipv4Addr, TcpListener};
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// How a child ended.
#[derive(Debug, PartialEq, Eq)]
pub enum End {
    /// It returned this answer.
    Said(bool),
    /// A signal killed it.
    Killed(i32),
}

/// Runs `act` in a forked child, for at most 20 s. It must not print or panic: another thread of the parent may have held the
/// lock of the output.
///
/// # Panics
/// If the system has no process left.
pub fn in_child(act: impl FnOnce() -> bool) -> End {
    // SAFETY: the child only runs `act` and leaves without the parent's exit handlers.
    let child = unsafe { libc::fork() };
    assert!(child >= 0, "fork: {}", std::io::Error::last_os_error());
    if child == 0 {
        let no_core = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
        // SAFETY: a valid structure.
        unsafe { libc::setrlimit(libc::RLIMIT_CORE, &raw const no_core) };
        // SAFETY: a number.
        unsafe { libc::alarm(20) };
        let said = act();
        // SAFETY: ends this process, which has nothing to clean up.
        unsafe { libc::_exit((!said).into()) };
    }
    let mut status = 0;
    // SAFETY: a place for the status of the child above.
    let ended = unsafe { libc::waitpid(child, &raw mut status, 0) };
    assert_eq!(ended, child);
    if libc::WIFSIGNALED(status) {
        End::Killed(libc::WTERMSIG(status))
    } else {
        End::Said(libc::WEXITSTATUS(status) == 0)
    }
}

/// Sends a signal to a child process.
///
/// # Panics
/// If the child was waited for.
pub fn signal(pid: u32, signal: i32) {
    let pid = i32::try_from(pid).expect("the system's numbers are small");
    // SAFETY: the caller's child was not waited for, so that no other process has its number.
    assert_eq!(unsafe { libc::kill(pid, signal) }, 0, "{}", std::io::Error::last_os_error());
}

/// Stops a child process, and returns when all its threads have stopped.
///
/// # Panics
/// As [`signal`]; if the child has ended.
pub fn stop(pid: u32) {
    signal(pid, libc::SIGSTOP);
    let (pid, mut status) = (i32::try_from(pid).expect("checked above"), 0);
    // SAFETY: the pointer is valid for one integer.
    assert_eq!(unsafe { libc::waitpid(pid, &raw mut status, libc::WUNTRACED) }, pid);
    assert!(libc::WIFSTOPPED(status), "it has ended: {status}");
}

/// A port that nobody listens at. It is below those that the system gives to connections: none takes it before it is used.
pub fn free_port() -> u16 {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    loop {
        let n = std::process::id() * 64 + NEXT.fetch_add(1, Ordering::Relaxed);
        let port = u16::try_from(10_000 + n % 20_000).expect("below 30,000");
        if TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)).is_ok() {
            return port;
        }
    }
}

/// Whether the calling test has the process for itself. Where it has not, this runs the test of this name once more in a new
/// process, and the caller returns.
///
/// # Panics
/// If the test fails there.
pub fn is_alone(test: &str) -> bool {
    const ALONE: &str = "TESTKIT_ALONE";
    if std::env::var_os(ALONE).is_some_and(|name| name == test) {
        return true;
    }
    let program = std::env::current_exe().expect("the test program has a path");
    let run = Command::new(program).args([test, "--exact", "--nocapture"]).env(ALONE, test).output();
    let run = run.expect("the test program runs again");
    let text = String::from_utf8_lossy(&run.stdout);
    assert!(run.status.success(), "{text}{}", String::from_utf8_lossy(&run.stderr));
    assert!(text.contains("1 passed"), "no test is named {test}");
    false
}

/// Runs a command without input to its end, and returns what it printed.
///
/// # Panics
/// If it does not start, or runs longer than `limit`; it is killed then.
pub fn run_within(command: &mut Command, limit: Duration) -> Output {
    let piped = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let child = piped.spawn().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let pid = i32::try_from(child.id()).expect("a process id");
    let output = std::thread::spawn(move || child.wait_with_output());
    let start = Instant::now();
    while !output.is_finished() {
        if start.elapsed() > limit {
            // SAFETY: the child is not waited for yet, so the number is still its own.
            unsafe { libc::kill(pid, libc::SIGKILL) };
            panic!("{command:?} did not end");
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    output.join().expect("waiting does not panic").expect("the output can be read")
}

/// What a program printed, on both streams.
pub fn printed(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

/// A library that cargo has built with this test: beside it, or above.
///
/// # Panics
/// If it is not there: the package of the test needs that of the library among its development dependencies.
pub fn built(library: &str) -> PathBuf {
    let test = std::env::current_exe().expect("a test has a path");
    let found = test.ancestors().map(|dir| dir.join(library)).find(|library| library.exists());
    found.unwrap_or_else(|| panic!("cargo builds {library} with the tests of packages that depend on it"))
}
