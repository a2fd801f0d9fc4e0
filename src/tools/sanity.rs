//! `sanity`: tests of CPU mappings of GPU memory. Each case runs in its own process.

/// `ensure!(condition, "what is wrong {}", value)` fails the case unless the condition holds.
macro_rules! ensure {
    ($condition:expr, $($format:tt)*) => {
        if !$condition {
            return $crate::tools::sanity::fail(format_args!($($format)*));
        }
    };
}

mod lifetime;
mod mapping;

use std::fmt::Display;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::thread;
use std::time::{Duration, Instant};

use clap::Args;
use gdrcopy::cuda::AllocKind;
use gdrcopy::{Attribute, BackendKind, Gdr, GpuBuffer};
use gdsync::cuda::Gpu;
use indicatif::ProgressBar;
use rustix::process::{
    Pid, Signal, WaitId, WaitIdOptions, WaitOptions, kill_process_group, set_parent_process_death_signal,
    setpgid, waitid, waitpid,
};
use serde::Serialize;
use serde_json::json;

use super::{Common, Program, Usage, versions};
use crate::measure::Machine;
use crate::results::{JsonFile, Result};
use crate::{note, out};

/// Tests CPU mappings of GPU memory on this machine. Each case runs in a process of its own.
#[derive(Args, Clone, Debug, Serialize)]
#[command(args_override_self = true)]
pub struct Sanity {
    #[command(flatten)]
    #[serde(skip)]
    common: Common,
    /// Says what each case does.
    #[arg(short = 'v', long)]
    #[serde(skip)]
    verbose: bool,
    /// Prints no summary.
    #[arg(short = 's', long)]
    #[serde(skip)]
    no_summary: bool,
    /// Lists the cases.
    #[arg(short = 'l', long)]
    #[serde(skip)]
    list: bool,
    /// Runs this case only; may be repeated.
    #[arg(short = 't', long = "test", value_name = "CASE")]
    tests: Vec<String>,
    /// Repetitions in the cases that repeat, among them "stress".
    #[arg(long, value_name = "COUNT", default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..))]
    cycles: u32,
    /// Threads in the cases that have many.
    #[arg(long, value_name = "COUNT", default_value_t = 4, value_parser = clap::value_parser!(u16).range(1..=256))]
    threads: u16,
    /// Seconds after which a case is ended as failed; cycles and threads add to it.
    #[arg(long, value_name = "SECONDS", default_value_t = 60,
          value_parser = clap::value_parser!(u64).range(1..=86_400))]
    timeout: u64,
}

#[derive(Clone, Debug, Serialize)]
struct Verdict {
    name: String,
    status: &'static str,
    /// Why it did not pass.
    reason: String,
    seconds: f64,
}

impl Program for Sanity {
    const NAME: &'static str = "gdrcopy_sanity";

    fn run(&self) -> Result<()> {
        if self.list {
            for case in cases() {
                out!("{:<58} {}", case.name, case.what)?;
            }
            return Ok(());
        }
        let file = JsonFile::create(self.common.json.as_deref())?;
        let cases = self.selected()?;
        let (device, versions) = self.describe()?;
        out!("{device}")?;
        let bar = ProgressBar::new(cases.len() as u64);
        let mut results = Vec::new();
        for case in cases {
            bar.set_message(case.name.clone());
            if self.verbose {
                out!("&&&& RUNNING {}", case.name)?;
            }
            let verdict = self.verdict(case)?;
            if self.verbose {
                out!("&&&& {} {}", verdict.status.to_uppercase(), verdict.name)?;
            }
            results.push(verdict);
            bar.inc(1);
        }
        bar.finish_and_clear();
        let of = |status: &'static str| results.iter().filter(move |verdict| verdict.status == status);
        let (passed, failed, waived) = (of(PASSED).count(), of(FAILED).count(), of(WAIVED).count());
        if !self.no_summary {
            out!("Total: {}, Passed: {passed}, Failed: {failed}, Waived: {waived}", results.len())?;
            for verdict in of(FAILED).chain(of(WAIVED)) {
                out!("{} {}: {}", verdict.status, verdict.name, verdict.reason)?;
            }
        }
        let report = json!({
            "benchmark": Self::NAME, "device": device, "machine": Machine::here(),
            "options": { "parameters": self, "versions": versions }, "results": results,
        });
        file.write(&report)?;
        if failed > 0 { Err(format!("{failed} cases failed").into()) } else { Ok(()) }
    }
}

const PASSED: &str = "passed";
const FAILED: &str = "failed";
const WAIVED: &str = "waived";

impl Sanity {
    fn selected(&self) -> Result<Vec<Case>> {
        let find = |name: &String| {
            let found = cases().into_iter().chain(own_cases()).find(|case| case.name == *name);
            found.ok_or_else(|| Usage(format!("-t {name}: there is no such case; -l lists them")).into())
        };
        if self.tests.is_empty() { Ok(cases()) } else { self.tests.iter().map(find).collect() }
    }

    /// Runs a case in a process of its own.
    fn verdict(&self, case: Case) -> Result<Verdict> {
        let start = Instant::now();
        // A cycle takes well below a millisecond, unless all threads wait for the driver.
        let repeats = Duration::from_millis(5) * self.cycles * u32::from(self.threads);
        let (alloc, common) = (case.alloc, self.common.clone());
        let env = Env { common, alloc, cycles: self.cycles, threads: self.threads, verbose: self.verbose };
        let outcome = isolated(Duration::from_secs(self.timeout) + repeats, || {
            (case.run)(&env).map(|()| String::new())
        });
        let (status, reason) = match outcome {
            Ok(_) => (PASSED, String::new()),
            Err(Stop::Waived(reason)) => (WAIVED, reason),
            Err(Stop::Failed(reason)) => (FAILED, reason),
        };
        Ok(Verdict { name: case.name, status, reason, seconds: start.elapsed().as_secs_f64() })
    }

    /// The device and versions, by a process of its own: CUDA is of no use to children of a process that has started it.
    fn describe(&self) -> Result<(String, serde_json::Value)> {
        let said = isolated(Duration::from_secs(self.timeout), || {
            let gdr = self.common.open()?;
            match self.common.device(&gdr) {
                Ok(device) => Ok(serde_json::to_string(&(device, versions(&gdr)))?),
                Err(error) if error.is::<Usage>() => waive(error),
                Err(error) => fail(error),
            }
        });
        match said {
            Ok(said) => Ok(serde_json::from_str(&said)?),
            Err(Stop::Waived(reason)) => Err(Usage(reason).into()),
            Err(Stop::Failed(reason)) => Err(reason.into()),
        }
    }
}

/// Why a case did not pass.
#[derive(Debug)]
enum Stop {
    /// It makes no sense here.
    Waived(String),
    /// Something is wrong.
    Failed(String),
}

/// How a case, or a part of it, ends.
type Outcome<T = ()> = std::result::Result<T, Stop>;

fn waive<T>(reason: impl Display) -> Outcome<T> {
    Err(Stop::Waived(reason.to_string()))
}

fn fail<T>(reason: impl Display) -> Outcome<T> {
    Err(Stop::Failed(reason.to_string()))
}

impl<E: std::error::Error> From<E> for Stop {
    fn from(error: E) -> Self {
        Self::Failed(error.to_string())
    }
}

type Run = fn(&Env) -> Outcome;

#[derive(Debug)]
struct Case {
    name: String,
    /// What it checks, in a line.
    what: &'static str,
    /// Which memory it gets from [`Env::alloc`].
    alloc: AllocKind,
    run: Run,
}

#[derive(Debug)]
struct Env {
    common: Common,
    alloc: AllocKind,
    cycles: u32,
    threads: u16,
    verbose: bool,
}

impl Env {
    /// Prints progress with `-v`.
    fn note(&self, what: impl Display) {
        if self.verbose {
            note!("  {what}");
        }
    }

    fn open(&self) -> Outcome<Gdr> {
        Ok(self.common.open()?)
    }

    /// Opens the library and makes memory; freed only when the value is dropped.
    fn open_with(&self, len: usize) -> Outcome<(Gdr, GpuBuffer)> {
        let gdr = self.open()?;
        let buffer = self.alloc(&gdr, len)?;
        Ok((gdr, buffer))
    }

    /// Memory of the kind that the case is about.
    fn alloc(&self, gdr: &Gdr, len: usize) -> Outcome<GpuBuffer> {
        if self.alloc == AllocKind::Vmm && gdr.backend() == BackendKind::Host {
            return waive("the host backend has one kind of memory, which other cases test");
        }
        match gdr.alloc_with(self.common.gpu, len, self.alloc) {
            Err(error @ gdrcopy::Error::Unsupported { .. }) => waive(error),
            result => Ok(result?),
        }
    }

    /// The GPU; waives the case where there is none.
    fn cuda(&self, gdr: &Gdr) -> Outcome<Gpu> {
        if gdr.backend() == BackendKind::Host {
            return waive("needs a GPU");
        }
        Ok(Gpu::open(self.common.gpu)?)
    }
}

/// Whether mappings survive the freeing of their memory.
fn persistent(gdr: &Gdr) -> Outcome<bool> {
    Ok(gdr.attribute(Attribute::UsePersistentMapping)? == 1)
}

/// A call that must fail, with this `errno`.
fn refused<T: std::fmt::Debug>(env: &Env, what: &str, errno: i32, result: gdrcopy::Result<T>) -> Outcome {
    match result {
        Ok(value) => fail(format_args!("{what} was accepted: {value:?}")),
        Err(error) if error.errno() == errno => {
            env.note(format_args!("{what}: refused as it must be: {error}"));
            Ok(())
        }
        Err(error) => {
            let expected = std::io::Error::from_raw_os_error(errno);
            fail(format_args!("{what}: refused with errno {}, expected {expected}: {error}", error.errno()))
        }
    }
}

/// Exit status of a process whose case is waived.
const WAIVES: i32 = 2;

/// A forked process that plays its part of a case, or a whole case.
#[derive(Debug)]
struct Forked {
    pid: Pid,
    /// The way to it.
    stream: UnixStream,
    /// What it ends with.
    told: UnixStream,
}

/// Forks. The child plays with the other end of the stream and ends; nothing of the parent's is dropped in it.
fn fork(play: impl FnOnce(UnixStream) -> Outcome<String>) -> Outcome<Forked> {
    let (stream, theirs) = UnixStream::pair()?;
    let (told, tell) = UnixStream::pair()?;
    // SAFETY: the child uses what the C library keeps in order over a fork, and leaves by `_exit`.
    let pid = unsafe { libc::fork() };
    if pid != 0 {
        let failed = std::io::Error::last_os_error();
        return Pid::from_raw(pid.max(0)).map(|pid| Forked { pid, stream, told }).ok_or(failed.into());
    }
    let _ = set_parent_process_death_signal(Some(Signal::KILL));
    let (code, text) = match catch_unwind(AssertUnwindSafe(|| play(theirs))) {
        Ok(Ok(text)) => (0, text),
        Ok(Err(Stop::Waived(text))) => (WAIVES, text),
        Ok(Err(Stop::Failed(text))) => (1, text),
        Err(_) => (1, "panicked".into()),
    };
    // The parent may be gone.
    let _ = (&tell).write_all(text.as_bytes());
    // SAFETY: ends this process at once.
    unsafe { libc::_exit(code) }
}

/// Forks a process that has a part of a case, and ends when the case does.
fn partner(play: impl FnOnce(UnixStream) -> Outcome) -> Outcome<Forked> {
    fork(|stream| play(stream).map(|()| String::new()))
}

/// Runs a case, and ends all processes that it started.
fn isolated(limit: Duration, play: impl FnOnce() -> Outcome<String>) -> Outcome<String> {
    let child = fork(|_| {
        setpgid(None, None)?;
        play()
    })?;
    // The child does the same; the first one wins.
    let _ = setpgid(Some(child.pid), Some(child.pid));
    let (start, mut pause) = (Instant::now(), Duration::from_millis(1));
    // Leaves the status: taking it would give the number of the child, and of its group, to others.
    let options = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT | WaitIdOptions::NOHANG;
    let mut in_time = true;
    while in_time && waitid(WaitId::Pid(child.pid), options)?.is_none() {
        in_time = start.elapsed() <= limit;
        thread::sleep(pause);
        pause = (pause * 2).min(Duration::from_millis(20));
    }
    let _ = kill_process_group(child.pid, Signal::KILL);
    let ended = child.end();
    if in_time { ended } else { fail(format_args!("did not end within {limit:?}")) }
}

impl Forked {
    /// Waits for its end. The deadline of the case is the limit.
    fn join(self) -> Outcome {
        match self.end() {
            Err(Stop::Failed(text)) => fail(format_args!("the forked process: {text}")),
            ended => ended.map(drop),
        }
    }

    fn end(self) -> Outcome<String> {
        let Self { pid, stream, mut told } = self;
        drop(stream);
        let (_, status) = waitpid(Some(pid), WaitOptions::empty())?.ok_or(rustix::io::Errno::CHILD)?;
        let mut text = String::new();
        told.read_to_string(&mut text)?;
        match (status.exit_status(), status.terminating_signal()) {
            (Some(0), _) => Ok(text),
            (Some(WAIVES), _) => waive(text),
            (_, Some(signal)) => fail(format_args!("killed by signal {signal}")),
            _ => fail(text),
        }
    }
}

fn send(mut stream: &UnixStream, number: u64) -> Outcome {
    Ok(stream.write_all(&number.to_ne_bytes())?)
}

fn receive(mut stream: &UnixStream) -> Outcome<u64> {
    let mut bytes = [0; 8];
    stream.read_exact(&mut bytes)?;
    Ok(u64::from_ne_bytes(bytes))
}

/// A case: name, function, description. `{alloc}` in a name stands for two cases, of either kind of memory.
type Row = (&'static str, Run, &'static str);

/// Every case, in the order in which they run.
fn cases() -> Vec<Case> {
    let mut all = Vec::new();
    for &(name, run, what) in mapping::CASES.iter().chain(lifetime::CASES) {
        for (alloc, short) in [(AllocKind::Malloc, "cumemalloc"), (AllocKind::Vmm, "vmmalloc")] {
            if alloc == AllocKind::Malloc || name.contains("{alloc}") {
                let what = if alloc == AllocKind::Malloc { what } else { "the same with cuMemCreate" };
                all.push(Case { name: name.replace("{alloc}", short), what, alloc, run });
            }
        }
    }
    all
}

/// Cases that test this tool, not the machine; they run only when named.
fn own_cases() -> impl Iterator<Item = Case> {
    OWN.iter().map(|&(name, run, what)| Case { name: name.into(), what, alloc: AllocKind::Malloc, run })
}

const OWN: &[Row] = &[
    ("tool_passes", |_| Ok(()), "passes"),
    ("tool_fails", |_| fail("as it shall"), "fails"),
    ("tool_waives", |_| waive("as it shall"), "is waived"),
    ("tool_crashes", |_| std::process::abort(), "is killed by a signal"),
    ("tool_hangs", |_| partner(|_| hang()).and_then(|_| hang()), "does not end, and neither does its child"),
];

fn hang() -> Outcome {
    loop {
        std::thread::park();
    }
}
