//! The card under the installed rdma-core. Programs that are not installed are skipped, and the test says so.

mod differential;
mod programs;
mod robustness;

use std::io::Read as _;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use gdsync_testkit::card::library;

/// Whether tests run with the counts of the tier `long`.
fn is_long() -> bool {
    std::env::var_os("GDSYNC_TEST_TIER").is_some_and(|tier| tier == "long")
}

/// A program that takes longer than this hangs.
fn patience() -> Duration {
    Duration::from_secs(if is_long() { 1200 } else { 120 })
}

/// Whether a program is installed. Says so if it is not.
fn has(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let found = std::env::split_paths(&path).any(|dir| Path::new(&dir).join(program).exists());
    if !found {
        eprintln!("skipped: {program} is not installed");
    }
    found
}

/// A program under the card.
fn card(program: &str, link: &str) -> Command {
    let mut command = Command::new(program);
    command.env("LD_PRELOAD", library()).env("GDASYNC_CARD_LINK", link).stdin(Stdio::null());
    command
}

fn start(command: &mut Command) -> Child {
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the program is installed")
}

/// Waits for the end of a program, whose output is short. One that hangs is killed, and fails.
fn finish(mut child: Child) -> Output {
    let end = Instant::now() + patience();
    let status = loop {
        match child.try_wait().expect("it is a child of this process") {
            Some(status) => break status,
            None if Instant::now() > end => {
                child.kill().expect("it is a child of this process");
                break child.wait().expect("it was killed");
            }
            None => std::thread::sleep(Duration::from_millis(10)),
        }
    };
    let mut output = Output { status, stdout: Vec::new(), stderr: Vec::new() };
    child.stdout.take().map(|mut out| out.read_to_end(&mut output.stdout));
    child.stderr.take().map(|mut err| err.read_to_end(&mut output.stderr));
    output
}

/// What a program printed. It must have succeeded.
fn succeeded(name: &str, output: &Output) -> String {
    let [stdout, stderr] = [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text));
    assert!(output.status.success(), "{name}: {}\n{stdout}\n{stderr}", output.status);
    stdout.into_owned()
}

fn run(program: &str, link: &str, arguments: &[&str]) -> String {
    let output = finish(start(card(program, link).args(arguments)));
    succeeded(program, &output)
}

/// Whether this process runs under the card. If not, runs this test again under it, which must succeed.
fn again_under_the_card(test: &str) -> bool {
    const MARK: &str = "GDASYNC_TEST_UNDER_CARD";
    if std::env::var_os(MARK).is_some() {
        return true;
    }
    let program = std::env::current_exe().expect("this test has a path");
    let mut again = card(program.to_str().expect("cargo's paths are plain"), "eth");
    let output = finish(start(again.env(MARK, "1").args([test, "--exact", "--nocapture"])));
    let text = succeeded(test, &output);
    assert!(text.contains("1 passed"), "{text}");
    eprint!("{}", String::from_utf8_lossy(&output.stderr));
    false
}
