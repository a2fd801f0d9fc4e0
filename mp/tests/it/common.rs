//! Fixtures of the tests: jobs of real processes, and messages with checkable contents.
#![allow(unreachable_pub, reason = "a module of a test program")]

use std::env;
use std::fmt::Display;
use std::ops::Range;
use std::process::{Command, Output, Stdio, exit};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use gdsync::cuda::Gpu;
use gdsync::memory::Memory;
use gdsync::mlx5::Syndrome;
use gdsync::shm::back_off;
use gdsync::stream::{CudaStreamConfig, HostStreamConfig, Stream, Via};
use gdsync_testkit::process::signal;
pub use gdsync_testkit::process::{free_port, stop};
use gdsync_testkit::{driver, kernels};
use mp::{Communicator, Error, Registration, Request};

/// Generous: reached only by a test that fails, even where an emulated machine is busy with other work.
pub const LONG: Duration = Duration::from_secs(120);

/// Tells a process of this program the test whose job it belongs to.
const JOB: &str = "GDSYNC_TEST_JOB";

/// The exit code of rank 0: a filter that matches no test exits with 0.
pub const DONE: i32 = 40;

/// A command that runs only the test `name` of this program, without the variables of any launcher of the tests.
pub fn myself(name: &str) -> Command {
    let mut command = Command::new(env::current_exe().unwrap());
    let thread = std::thread::current();
    // The name starts with the module.
    let test = thread.name().filter(|test| test.ends_with(&format!("::{name}"))).unwrap_or(name);
    command.args(["--exact", test, "--include-ignored", "--nocapture", "--test-threads=1"]).env(JOB, name);
    for launcher in ["RANK", "WORLD_SIZE", "OMPI_COMM_WORLD_", "PMI_", "PMIX_", "SLURM_", "GDSYNC_JOB_TOKEN"]
    {
        let vars = env::vars_os().map(|(name, _)| name.to_string_lossy().into_owned());
        vars.filter(|name| name.starts_with(launcher)).for_each(|name| {
            command.env_remove(name);
        });
    }
    command
}

/// Whether this process was started by [`myself`] for the test `name`.
pub fn is_part_of(name: &str) -> bool {
    env::var(JOB).is_ok_and(|job| job == name)
}

/// If set, there are no dma-bufs of simulated GPUs.
pub const GPU_WITHOUT_DMA_BUF: &str = "GDSYNC_TEST_NO_DMA_BUF";
/// `CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED`
const DMA_BUF_SUPPORTED: u32 = 124;

/// The GPU of this rank, if `GDSYNC_TEST_GPU` is set (`memop` or `kernel`, which drive its streams): then streams are on it, and
/// buffers in its memory. Ranks use the GPUs in turn; without a GPU each has a simulated one.
pub fn gpu() -> Option<&'static (Gpu, Via)> {
    static GPU: OnceLock<Option<(Gpu, Via)>> = OnceLock::new();
    GPU.get_or_init(|| {
        let via = env::var("GDSYNC_TEST_GPU").ok()?.parse().expect("memop or kernel");
        let gpu = real_gpu().unwrap_or_else(|| {
            if env::var_os(GPU_WITHOUT_DMA_BUF).is_some() {
                let control = driver::Control::take();
                control.attribute(0, DMA_BUF_SUPPORTED, 0);
                // As long as the process is there.
                std::mem::forget(control);
            }
            simulated_gpu(0).unwrap()
        });
        Some((gpu, via))
    })
    .as_ref()
}

fn real_gpu() -> Option<Gpu> {
    let rank: i32 = env::var("RANK").map_or(0, |rank| rank.parse().unwrap());
    let count = Gpu::count().ok().filter(|count| *count > 0)?;
    Some(Gpu::open(rank % count).unwrap())
}

/// The GPU of this rank, or a simulated one.
pub fn own_gpu() -> Gpu {
    real_gpu().unwrap_or_else(|| simulated_gpu(0).unwrap())
}

/// A stream of a GPU that waits by `via`, and copies between GPUs by `copies`.
pub fn copying(gpu: &Gpu, via: Via, copies: Via) -> Stream {
    let config = CudaStreamConfig { via, copies, wait_limit: LONG, ..CudaStreamConfig::default() };
    Stream::cuda(gpu, config).unwrap()
}

/// Registered memory of a GPU, all 0.
pub fn of_gpu(comm: &Communicator, gpu: &Gpu, len: usize) -> Registration {
    let memory = gpu.alloc(len).unwrap();
    memory.fill(0, len, 0).unwrap();
    memory.flush().unwrap();
    comm.register(&memory).unwrap()
}

/// A simulated GPU, whose kernels are there.
pub fn simulated_gpu(ordinal: i32) -> gdsync::Result<Gpu> {
    kernels::register();
    Gpu::open_with(driver::api(), ordinal, driver::gdr().ok())
}

/// A builder with the [`gpu`] of this rank.
pub fn with_gpu(builder: mp::CommunicatorBuilder) -> mp::CommunicatorBuilder {
    gpu().into_iter().fold(builder, |builder, (gpu, _)| builder.gpu(gpu))
}

/// Runs `body` in `size` processes, each with its communicator: call it from the test called `name`.
#[track_caller]
pub fn job(name: &str, size: usize, body: impl FnOnce(&Communicator)) {
    job_with(name, size, Communicator::builder(), body);
}

/// A test of this name, whose body runs in so many processes, each with its communicator: as [`job`], [`job_with`] or [`jobs`].
macro_rules! job_test {
    ($name:ident, [$($size:expr),+], $body:expr) => {
        #[test]
        fn $name() {
            $crate::common::jobs(stringify!($name), &[$($size),+], $body);
        }
    };
    ($name:ident, $size:expr, $body:expr) => {
        $crate::common::job_test!($name, $size, mp::Communicator::builder(), $body);
    };
    ($name:ident, $size:expr, $builder:expr, $body:expr) => {
        #[test]
        fn $name() {
            $crate::common::job_from(stringify!($name), $size, || $builder, $body);
        }
    };
}
pub(crate) use job_test;

/// As [`job`], for each of several sizes up to `GDSYNC_TEST_MAX_RANKS`.
#[track_caller]
pub fn jobs(name: &str, sizes: &[usize], body: impl FnOnce(&Communicator)) {
    const SIZE: &str = "GDSYNC_TEST_SIZE";
    if let Ok(size) = env::var(SIZE) {
        return job(name, size.parse().unwrap(), body);
    }
    let most = env::var("GDSYNC_TEST_MAX_RANKS").map_or(usize::MAX, |most| most.parse().unwrap());
    for size in sizes.iter().filter(|size| **size <= most) {
        let mut command = myself(name);
        succeeds(command.env(SIZE, size.to_string()));
    }
}

/// Checks that rank 0 has completed its part.
#[track_caller]
pub fn succeeds(command: &mut Command) {
    let output = command.output().unwrap();
    let text = [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
    assert_eq!(output.status.code(), Some(DONE), "{}\n{}", text[0], text[1]);
}

/// Checks that a process succeeds, and prints these words.
#[track_caller]
pub fn prints(command: &mut Command, words: &str) {
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && text.contains(words), "{words}: {text}");
}

/// As [`job`], with a builder.
#[track_caller]
pub fn job_with(name: &str, size: usize, builder: mp::CommunicatorBuilder, body: impl FnOnce(&Communicator)) {
    job_from(name, size, || builder, body);
}

/// As [`job_with`]; only the ranks make the builder.
#[track_caller]
pub fn job_from(
    name: &str,
    size: usize,
    builder: impl FnOnce() -> mp::CommunicatorBuilder,
    body: impl FnOnce(&Communicator),
) {
    if !is_part_of(name) {
        return succeeds(&mut myself(name));
    }
    let comm = with_gpu(builder()).spawn(size).timeout(LONG).init().unwrap();
    assert_eq!(comm.size(), size);
    body(&comm);
    let first = comm.rank() == 0;
    comm.finalize(LONG).unwrap();
    if first {
        exit(DONE);
    }
}

/// A command that runs the test `name` as a rank of so many, which join by the variables of a launcher.
pub fn rank_command(name: &str, rank: usize, size: usize, port: &str) -> Command {
    let mut command = myself(name);
    command.env("RANK", rank.to_string()).env("WORLD_SIZE", size.to_string());
    command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", port);
    command
}

/// Runs the test `name` in `size` such processes: none is the parent of another. Returns when all have ended.
pub fn ranks(name: &str, size: usize) -> Vec<Output> {
    let port = free_port().to_string();
    let start = |rank| {
        let mut command = rank_command(name, rank, size, &port);
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    let children: Vec<_> = (0..size).map(start).collect();
    children.into_iter().map(|child| child.wait_with_output().unwrap()).collect()
}

/// Kills a child process, which was not waited for.
pub fn kill(pid: u32) {
    signal(pid, libc::SIGKILL);
}

/// Bytes of address space this process has mapped.
pub fn mapped() -> usize {
    let pages = std::fs::read_to_string("/proc/self/statm").unwrap();
    4096 * pages.split(' ').next().unwrap().parse::<usize>().unwrap()
}

/// Whether a process runs, and is no zombie.
pub fn runs(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // The state follows the name in parentheses.
    stat.rsplit_once(") ").is_some_and(|(_, rest)| !rest.starts_with(['Z', 'X']))
}

/// Waits until a child process ends, and checks that it exits with 0. It is not reaped: its owner does that.
#[track_caller]
pub fn ends_well(pid: u32) {
    // SAFETY: zeros are valid for all fields.
    let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
    until("the child still runs", || {
        let options = libc::WEXITED | libc::WNOHANG | libc::WNOWAIT;
        // SAFETY: the information is written to a local that outlives the call.
        assert_eq!(unsafe { libc::waitid(libc::P_PID, pid, &raw mut info, options) }, 0);
        // SAFETY: the call has set the field, or left it 0 where the child still runs.
        unsafe { info.si_pid() != 0 }
    });
    // SAFETY: the call has set the field: the child has ended.
    let status = unsafe { info.si_status() };
    assert_eq!((info.si_code, status), (libc::CLD_EXITED, 0), "how the child has ended");
}

/// Checks that a text or an error says all of these.
#[track_caller]
pub fn says(text: &dyn Display, words: &[&str]) {
    let text = text.to_string();
    assert!(words.iter().all(|word| text.contains(word)), "{text}");
}

/// Checks the rank of a failed message, and its cause, which is one of these.
#[track_caller]
pub fn failed(error: &Error, with: usize, syndromes: &[Syndrome]) {
    match error {
        Error::Message { rank, cause, .. } => {
            assert_eq!(*rank, with, "{error}");
            assert!(syndrome(cause).is_some_and(|syndrome| syndromes.contains(&syndrome)), "{error}");
            assert!(error.to_string().contains(&format!("rank {with}")), "{error}");
        }
        other => panic!("{other}"),
    }
}

/// Checks the rank of a failed operation.
#[track_caller]
pub fn failed_rank(error: &Error, with: usize) {
    assert!(matches!(error, Error::Message { rank, .. } if *rank == with), "{error}");
}

/// The syndrome of a failed queue pair, or of the one that stopped it.
pub fn syndrome(error: &gdsync::Error) -> Option<Syndrome> {
    match error {
        gdsync::Error::Completion(error) => Some(error.syndrome),
        gdsync::Error::QpStopped { reason, .. } | gdsync::Error::Rank { reason, .. } => syndrome(reason),
        // The software HCA returns it where nothing was under way; other devices find out by a send.
        gdsync::Error::PeerGone { .. } => Some(Syndrome::RETRY_EXC_ERR),
        _ => None,
    }
}

/// The bytes of message `n` from one rank to another.
pub fn message(from: usize, to: usize, n: usize, len: usize) -> Vec<u8> {
    let mut word = ((from << 48 | to << 40 | n) as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let mut bytes = vec![0; len];
    for chunk in bytes.chunks_mut(4) {
        word = word.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
        chunk.copy_from_slice(&(word >> 32).to_le_bytes()[..chunk.len()]);
    }
    bytes
}

/// Host memory, also with [`gpu`].
pub fn host_buffer(comm: &Communicator, len: usize) -> Registration {
    comm.register(&Memory::alloc(len).unwrap()).unwrap()
}

pub fn buffer(comm: &Communicator, len: usize) -> Registration {
    let memory = gpu().map_or_else(|| Memory::alloc(len), |(gpu, _)| gpu.alloc(len));
    comm.register(&memory.unwrap()).unwrap()
}

pub fn bytes(buffer: &Registration, range: Range<usize>) -> Vec<u8> {
    let mut bytes = vec![0; range.len()];
    buffer.memory().read(range.start, &mut bytes).unwrap();
    bytes
}

/// A send of a stream that waits for it; with the request, which [`Communicator::send_on_stream`] does not return.
pub fn send_and_wait(
    comm: &Communicator,
    s: &Stream,
    from: &Registration,
    range: Range<usize>,
    to: usize,
) -> Request {
    let sent = comm.isend_on_stream(s, from, range, to).unwrap();
    comm.wait_on_stream(s, &sent).unwrap();
    sent
}

/// The same of a receive.
pub fn recv_and_wait(
    comm: &Communicator,
    s: &Stream,
    into: &Registration,
    range: Range<usize>,
    from: usize,
) -> Request {
    let received = comm.irecv_on_stream(s, into, range, from).unwrap();
    comm.wait_on_stream(s, &received).unwrap();
    received
}

pub fn stream(name: &str) -> Stream {
    let Some((gpu, via)) = gpu() else { return host_stream(name) };
    let (name, wait_limit, via) = (name.into(), LONG, *via);
    let config = CudaStreamConfig { name, wait_limit, via, copies: via, depth: 512, ..Default::default() };
    Stream::cuda(gpu, config).unwrap()
}

/// A host stream, also where others are on a GPU.
pub fn host_stream(name: &str) -> Stream {
    let default = HostStreamConfig::default();
    Stream::host(HostStreamConfig { name: name.into(), wait_limit: LONG, ..default }).unwrap()
}

/// Waits until `done`.
#[track_caller]
pub fn until(what: &str, mut done: impl FnMut() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < LONG, "{what}");
        back_off(start.elapsed(), LONG);
    }
}
