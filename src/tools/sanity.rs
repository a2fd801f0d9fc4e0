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

use std::ffi::OsString;
use std::fmt::Display;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use clap::Args;
use cudarc::driver::CudaContext;
use gdrcopy::{Attribute, BackendKind, Gdr, GpuBuffer};
use rustix::process::{
    Pid, Signal, WaitId, WaitIdOptions, WaitOptions, kill_process_group, set_parent_process_death_signal,
    waitid, waitpid,
};
use serde::Serialize;

use super::{AllocFn, Common, Failure, Output, Program, Report, Result, Setup, cuda, usage};
use crate::measure::Machine;
use crate::{note, out};
use lifetime::{
    access_after_close, access_after_free, after_map, bar1, child_drops, child_maps_parents_pin,
    child_pins_parents_address, fork_access_after_free, fork_tokens, free_under_copy, leak_check,
    leak_over_fork, map_and_free, map_by_shared, partial_unmap, pin_by_shared, stress, two_mappings,
};
use mapping::{
    attributes, basic, beyond_allocation, child_thread, concurrent, force_pcie, freed_memory, host_pointer,
    managed_memory, mix_mappings, no_such_gpu, null, other_gpu, out_of_bounds, second_mapping, size_zero,
    small_buffers, tokens, two_buffers_one_page, unaligned_mapping, unaligned_pins, unpin_while_mapped,
    validation, validation_force_pcie, words,
};

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
    /// Runs the extended cases too.
    #[arg(short = 'e', long)]
    extended: bool,
    /// Repetitions in the cases that repeat, among them "stress".
    #[arg(long, value_name = "COUNT", default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..))]
    cycles: u32,
    /// Threads in the cases that have many.
    #[arg(long, value_name = "COUNT", default_value_t = 4, value_parser = clap::value_parser!(u16).range(1..=256))]
    threads: u16,
    /// Seconds after which a case is ended as failed; those that repeat get more.
    #[arg(long, value_name = "SECONDS", default_value_t = 60,
          value_parser = clap::value_parser!(u64).range(1..=86_400))]
    timeout: u64,
    /// Runs a case in this very process. The tool gives this option to the processes that it starts.
    #[arg(long, hide = true, value_name = "CASE")]
    #[serde(skip)]
    child: Option<String>,
}

/// In place of a case: the process reports backend, driver and GPU.
const DESCRIBE: &str = "describe";

impl Program for Sanity {
    const NAME: &'static str = "gdrcopy_sanity";

    fn run(&self) -> Result<()> {
        if let Some(name) = &self.child {
            return self.run_child(name);
        }
        let mut output = Output::open(self.common.json.as_deref())?;
        if self.list {
            return list(&output);
        }
        let cases = self.selected()?;
        let runner = Runner::new(self.verbose)?;
        let setup = self.describe(&runner)?;
        setup.tell(&output)?;
        output.steps(cases.len());
        let mut results = Vec::new();
        for case in cases {
            output.step(&case.name);
            if self.verbose {
                say!(output, "&&&& RUNNING {}", case.name)?;
            }
            let verdict = runner.run(&case.name, self.deadline(&case))?;
            if self.verbose {
                say!(output, "&&&& {} {}", verdict.status.word(), case.name)?;
            }
            results.push(verdict);
        }
        let count = |status| results.iter().filter(|verdict| verdict.status == status).count();
        let failed = count(Status::Failed);
        if !self.no_summary {
            let (total, passed, waived) = (results.len(), count(Status::Passed), count(Status::Waived));
            say!(output, "Total: {total}, Passed: {passed}, Failed: {failed}, Waived: {waived}")?;
            for status in [Status::Failed, Status::Waived] {
                summarize(&output, status, &results)?;
            }
        }
        let report =
            Report { tool: Self::NAME, machine: Machine::here(), setup: &setup, parameters: self, results };
        output.finish(&report)?;
        if failed > 0 { Err(Failure::failed(format_args!("{failed} cases failed"))) } else { Ok(()) }
    }
}

impl Sanity {
    fn selected(&self) -> Result<Vec<Case>> {
        let mut all = cases();
        if self.tests.is_empty() {
            let wanted =
                |case: &Case| case.group == Group::Standard || case.group == Group::Extended && self.extended;
            all.retain(wanted);
            return Ok(all);
        }
        let find = |name: &String| {
            let found = cases().into_iter().find(|case| case.name == *name);
            found.ok_or_else(|| Failure::Usage(format!("-t {name}: there is no such case; -l lists them")))
        };
        self.tests.iter().map(find).collect()
    }

    fn deadline(&self, case: &Case) -> Duration {
        let once = Duration::from_secs(self.timeout);
        // A cycle takes well below a millisecond, unless all threads wait for the driver.
        match REPEATING.iter().any(|name| case.name.starts_with(name)) {
            true => once + Duration::from_millis(5) * self.cycles * u32::from(self.threads),
            false => once,
        }
    }

    fn describe(&self, runner: &Runner) -> Result<Setup> {
        let (status, said) = runner.say(DESCRIBE, Duration::from_secs(self.timeout))?;
        if status != Status::Passed {
            return Err(Failure::Failed(said));
        }
        let setup: Setup = serde_json::from_str(&said)?;
        let gpu = self.common.gpu;
        usage(setup.gpu.is_some() || setup.is_plain() && gpu == 0, || format!("there is no GPU {gpu}"))?;
        Ok(setup)
    }

    fn run_child(&self, name: &str) -> Result<()> {
        set_parent_process_death_signal(Some(Signal::KILL))?;
        if name == DESCRIBE {
            let gdr = open(&self.common)?;
            let setup = Setup::of(&gdr, &gdr.gpus()?, self.common.gpu);
            out!("{}", serde_json::to_string(&setup)?)?;
            return Ok(());
        }
        let case = cases().into_iter().find(|case| case.name == name);
        let case = case.ok_or_else(|| Failure::Usage(format!("--child {name}: there is no such case")))?;
        let Self { common, cycles, threads, verbose, .. } = self.clone();
        let env = Env { common, alloc: case.alloc, cycles, threads, verbose };
        exit_with((case.run)(&env))
    }
}

fn list(output: &Output) -> Result<()> {
    let groups = [
        (Group::Standard, "List of all available tests:"),
        (Group::Extended, "List of all available extended tests (-e):"),
        (Group::Tool, "List of all tests of this tool itself (only by -t):"),
    ];
    for (group, title) in groups {
        say!(output, "{title}")?;
        for case in cases().iter().filter(|case| case.group == group) {
            say!(output, "    {:<58} {}", case.name, case.what)?;
        }
        say!(output, "")?;
    }
    Ok(())
}

fn summarize(output: &Output, status: Status, results: &[Verdict]) -> Result<()> {
    let mut chosen = results.iter().filter(|verdict| verdict.status == status).peekable();
    if chosen.peek().is_some() {
        say!(output, "")?;
        say!(output, "List of {} tests:", status.word().to_lowercase())?;
    }
    chosen.try_for_each(|verdict| say!(output, "    {}: {}", verdict.name, verdict.reason.trim_end()))
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
type Outcome<T = ()> = Result<T, Stop>;

fn waive<T>(reason: impl Display) -> Outcome<T> {
    Err(Stop::Waived(reason.to_string()))
}

/// Something is wrong.
fn fail<T>(reason: impl Display) -> Outcome<T> {
    Err(Stop::Failed(reason.to_string()))
}

impl<E: std::error::Error> From<E> for Stop {
    fn from(error: E) -> Self {
        Self::Failed(error.to_string())
    }
}

type Run = fn(&Env) -> Outcome;

/// When a case runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Group {
    /// By default.
    Standard,
    /// With `-e`.
    Extended,
    /// When named: they test the tool, not the machine.
    Tool,
}

#[derive(Debug)]
struct Case {
    name: String,
    /// What it checks, in a line.
    what: &'static str,
    group: Group,
    /// Which memory it gets from [`Env::alloc`].
    alloc: AllocFn,
    run: Run,
}

#[derive(Debug)]
struct Env {
    common: Common,
    alloc: AllocFn,
    cycles: u32,
    threads: u16,
    verbose: bool,
}

fn open(common: &Common) -> gdrcopy::Result<Gdr> {
    common.backend.into_iter().fold(Gdr::builder(), |builder, kind| builder.backend(kind)).open()
}

impl Env {
    /// Says what is being done, if that is wanted.
    fn note(&self, what: impl Display) {
        if self.verbose {
            note!("  {what}");
        }
    }

    fn open(&self) -> Outcome<Gdr> {
        Ok(open(&self.common)?)
    }

    /// Opens the library and makes memory; freed only when the value is dropped.
    fn open_with(&self, len: usize) -> Outcome<(Gdr, GpuBuffer)> {
        let gdr = self.open()?;
        let buffer = self.alloc(&gdr, len)?;
        Ok((gdr, buffer))
    }

    /// Memory of the kind that the case is about.
    fn alloc(&self, gdr: &Gdr, len: usize) -> Outcome<GpuBuffer> {
        if self.alloc == AllocFn::CuMemCreate && gdr.backend() == BackendKind::Host {
            return waive("the host backend has one kind of memory, which other cases test");
        }
        match gdr.alloc_with(self.common.gpu, len, self.alloc.kind()) {
            Err(error @ gdrcopy::Error::Unsupported { .. }) => waive(error),
            result => Ok(result?),
        }
    }

    /// The CUDA context of the GPU; waives the case where there is no GPU.
    fn cuda(&self, gdr: &Gdr) -> Outcome<Arc<CudaContext>> {
        if gdr.backend() == BackendKind::Host {
            return waive("needs a GPU");
        }
        match cuda::context(self.common.gpu) {
            Ok(context) => Ok(context),
            Err(Failure::Usage(message) | Failure::Failed(message)) => fail(message),
        }
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

/// Exit status of a waived case, as in GDRCopy's tests.
const WAIVED: i32 = 2;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Status {
    Passed,
    Failed,
    Waived,
}

impl Status {
    fn word(self) -> &'static str {
        match self {
            Self::Passed => "PASSED",
            Self::Failed => "FAILED",
            Self::Waived => "WAIVED",
        }
    }
}

#[derive(Clone, Debug, Serialize)]
struct Verdict {
    name: String,
    status: Status,
    /// Why it did not pass.
    reason: String,
    seconds: f64,
}

/// Starts this program again, for one case each.
#[derive(Debug)]
struct Runner {
    program: PathBuf,
    arguments: Vec<OsString>,
    verbose: bool,
}

impl Runner {
    fn new(verbose: bool) -> Result<Self> {
        let arguments = std::env::args_os().skip(1).collect();
        Ok(Self { program: std::env::current_exe()?, arguments, verbose })
    }

    fn run(&self, name: &str, limit: Duration) -> Result<Verdict> {
        let start = Instant::now();
        let (status, reason) = self.say(name, limit)?;
        Ok(Verdict { name: name.to_owned(), status, reason, seconds: start.elapsed().as_secs_f64() })
    }

    /// Runs a child: how it ended and what it said on standard output, or else why it failed.
    fn say(&self, name: &str, limit: Duration) -> Result<(Status, String)> {
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
        // Output before an error is kept.
        let _ = from.read_to_end(&mut bytes);
        String::from_utf8_lossy(&bytes).trim().to_owned()
    })
}

/// Waits until the child ends or its time is over, and ends all that it started. None: its time was over.
fn end(child: &mut Child, limit: Duration) -> Result<Option<ExitStatus>> {
    let (start, mut pause) = (Instant::now(), Duration::from_millis(1));
    let pid = Pid::from_child(child);
    // Leaves the status: taking it would give the number of the child, and of its group, to others.
    let options = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT | WaitIdOptions::NOHANG;
    let in_time = loop {
        if waitid(WaitId::Pid(pid), options)?.is_some() {
            break true;
        }
        if start.elapsed() > limit {
            break false;
        }
        thread::sleep(pause);
        pause = (pause * 2).min(Duration::from_millis(20));
    };
    let _ = kill_process_group(pid, Signal::KILL);
    let status = child.wait()?;
    Ok(in_time.then_some(status))
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

/// Ends this process the way [`Runner`] understands.
fn exit_with(outcome: Outcome) -> ! {
    let (code, reason) = match outcome {
        Ok(()) => (0, String::new()),
        Err(Stop::Waived(reason)) => (WAIVED, reason),
        Err(Stop::Failed(reason)) => (1, reason),
    };
    // The tool may be gone.
    let _ = std::io::stdout().write_all(reason.as_bytes());
    std::process::exit(code)
}

/// A forked process that plays its part of the case.
#[derive(Debug)]
struct Forked {
    pid: libc::pid_t,
    /// The way to it.
    stream: UnixStream,
    /// Its reason, if it does not pass.
    reason: UnixStream,
}

/// Forks. The child plays with the other end of the stream and ends; nothing of the parent's is dropped in it.
fn fork(play: impl FnOnce(UnixStream) -> Outcome) -> Outcome<Forked> {
    let (stream, theirs) = UnixStream::pair()?;
    let (reason, told) = UnixStream::pair()?;
    // SAFETY: the child uses what the C library keeps in order over a fork, and leaves by `_exit`.
    match unsafe { libc::fork() } {
        -1 => Err(std::io::Error::last_os_error().into()),
        0 => {
            let _ = set_parent_process_death_signal(Some(Signal::KILL));
            let (code, text) = match catch_unwind(AssertUnwindSafe(|| play(theirs))) {
                Ok(Ok(())) => (0, String::new()),
                Ok(Err(Stop::Waived(text))) => (2, text),
                Ok(Err(Stop::Failed(text))) => (1, text),
                Err(_) => (1, "panicked".into()),
            };
            // The parent may be gone.
            let _ = (&told).write_all(text.as_bytes());
            // SAFETY: ends this process at once.
            unsafe { libc::_exit(code) }
        }
        pid => Ok(Forked { pid, stream, reason }),
    }
}

impl Forked {
    /// Waits for its end. The runner's deadline is the limit.
    fn join(mut self) -> Outcome {
        drop(self.stream);
        let pid = Pid::from_raw(self.pid);
        let (_, status) = waitpid(pid, WaitOptions::empty())?.ok_or(rustix::io::Errno::CHILD)?;
        let mut text = String::new();
        self.reason.read_to_string(&mut text)?;
        match (status.exit_status(), status.terminating_signal()) {
            (Some(0), _) => Ok(()),
            (Some(2), _) => Err(Stop::Waived(text)),
            (_, Some(signal)) => fail(format_args!("the forked process was killed by signal {signal}")),
            _ => fail(format_args!("the forked process: {text}")),
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

/// A row of [`CASES`]: name, function, what it looks at. `{alloc}` in a name stands for two cases, of either kind of memory.
type Row = (&'static str, Run, &'static str);

/// Every case, in the order in which they run.
fn cases() -> Vec<Case> {
    let mut all = Vec::new();
    for (group, rows) in [(Group::Standard, CASES), (Group::Extended, EXTENDED), (Group::Tool, TOOL)] {
        for &(name, run, what) in rows {
            for (alloc, short) in [(AllocFn::CuMemAlloc, "cumemalloc"), (AllocFn::CuMemCreate, "vmmalloc")] {
                if alloc == AllocFn::CuMemAlloc || name.contains("{alloc}") {
                    let what = if alloc == AllocFn::CuMemAlloc { what } else { "the same with cuMemCreate" };
                    all.push(Case { name: name.replace("{alloc}", short), what, group, alloc, run });
                }
            }
        }
    }
    all
}

/// What the names of cases begin with whose time grows with the cycles that the options ask for.
const REPEATING: [&str; 5] =
    ["basic_concurrent", "data_validation_cu", "data_validation_v", "leak_check", "stress"];

const CASES: &[Row] = &[
    ("basic_{alloc}", basic, "pin and unpin"),
    ("basic_v2_{alloc}", basic, "pin and unpin with flags, none of them set"),
    ("basic_v2_forcepci_{alloc}", force_pcie, "pin through PCIe"),
    ("basic_with_tokens", tokens, "pin with P2P tokens"),
    (
        "basic_unaligned_mapping",
        unaligned_mapping,
        "unaligned addresses work; a freed neighbour does no harm",
    ),
    ("basic_small_buffers_mapping", small_buffers, "two pins of 8 bytes in one page"),
    ("basic_two_buffers_one_page", two_buffers_one_page, "two allocations in one page, one freed"),
    ("basic_child_thread_pins_buffer_{alloc}", child_thread, "pin, unpin, close in several threads"),
    ("basic_second_mapping", second_mapping, "one mapping of a pin, several pins of a buffer"),
    ("basic_unpin_while_mapped", unpin_while_mapped, "a mapping keeps its pin"),
    ("basic_concurrent_mappings", concurrent, "threads map own and shared buffers"),
    ("attributes_sanity", attributes, "the properties of the backend"),
    ("arguments_null", null, "address 0 is refused"),
    ("arguments_size_zero", size_zero, "0 bytes are refused"),
    ("arguments_beyond_allocation", beyond_allocation, "more than was allocated is refused"),
    ("arguments_host_pointer", host_pointer, "host memory is refused"),
    ("arguments_managed_memory", managed_memory, "managed memory is refused"),
    ("arguments_freed_memory", freed_memory, "freed memory is refused"),
    ("arguments_no_such_gpu", no_such_gpu, "GPUs that do not exist are refused"),
    ("arguments_other_gpu", other_gpu, "memory of another GPU than the current one"),
    ("arguments_out_of_bounds", out_of_bounds, "accesses outside a mapping are refused"),
    ("data_validation_{alloc}", validation, "all bytes, both ways, many offsets"),
    ("data_validation_v2_cumemalloc", validation, "the same, pinned with flags, none of them set"),
    ("data_validation_v2_forcepci_cumemalloc", validation_force_pcie, "the same through PCIe"),
    ("data_validation_mix_mappings_cumemalloc", mix_mappings, "write-combining beside cached"),
    ("data_unaligned_pins", unaligned_pins, "pins of any start and length, exact to the byte"),
    ("data_words", words, "words of 1 to 8 bytes arrive whole"),
    ("invalidation_access_after_gdr_close_{alloc}", access_after_close, "unmapped is unmapped"),
    ("invalidation_access_after_free_{alloc}", access_after_free, "freed memory stays while mapped"),
    ("invalidation_two_mappings_{alloc}", two_mappings, "freeing one buffer spares another"),
    ("invalidation_partial_unmap", partial_unmap, "a part is unmapped from outside"),
    ("invalidation_free_under_copy", free_under_copy, "freed while another thread copies"),
    (
        "invalidation_fork_access_after_free_{alloc}",
        fork_access_after_free,
        "a stale mapping shows nothing new",
    ),
    ("invalidation_fork_after_gdr_map_{alloc}", after_map, "a forked child has a hole"),
    (
        "invalidation_fork_child_gdr_map_parent_{alloc}",
        child_maps_parents_pin,
        "a child uses nothing of its parent",
    ),
    ("invalidation_fork_map_and_free_{alloc}", map_and_free, "a child's freeing spares its parent"),
    ("invalidation_fork_child_gdr_pin_parent_with_tokens", fork_tokens, "a parent's P2P tokens"),
    (
        "fork_child_pins_parents_address",
        child_pins_parents_address,
        "an address of another process is refused",
    ),
    ("fork_child_drops", child_drops, "a child's drops spare its parent"),
    (
        "invalidation_unix_sock_shared_fd_gdr_pin_buffer_{alloc}",
        pin_by_shared,
        "a passed descriptor cannot pin",
    ),
    ("invalidation_unix_sock_shared_fd_gdr_map_{alloc}", map_by_shared, "a passed descriptor cannot map"),
    ("bar1_exhaustion", bar1, "BAR1 full: a typed error, and room again afterwards"),
    ("leak_check", leak_check, "cycles of all calls leave nothing behind"),
    ("stress", stress, "the same in many threads at a time"),
];

const EXTENDED: &[Row] =
    &[("leakage_pin_pages_fork_cumemalloc", leak_over_fork, "an old module leaks or panics here")];

const TOOL: &[Row] = &[
    ("tool_passes", |_| Ok(()), "passes"),
    ("tool_fails", |_| fail("as it shall"), "fails"),
    ("tool_waives", |_| waive("as it shall"), "is waived"),
    ("tool_crashes", |_| std::process::abort(), "is killed by a signal"),
    ("tool_hangs", |_| fork(|_| hang()).and_then(|_| hang()), "does not end, and neither does its child"),
];

fn hang() -> Outcome {
    loop {
        std::thread::park();
    }
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
