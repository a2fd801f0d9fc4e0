//! Forked children for tests of crashes and forks, and tests that need a process of their own.

use std::process::Command;

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
