//! What the tests of communicators share: jobs of real processes, and messages that prove themselves.
#![allow(dead_code, unreachable_pub, reason = "every test binary uses its own part")]

use std::env;
use std::net::TcpListener;
use std::ops::Range;
use std::process::{Command, Output, Stdio, exit};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread::yield_now;
use std::time::{Duration, Instant};

use gdsync::cuda::Gpu;
use gdsync::memory::Memory;
use gdsync::mlx5::Syndrome;
use gdsync::stream::{CudaStreamConfig, HostStreamConfig, Stream, Via};
use gdsync_testkit::driver;
use mp::{Communicator, Error, Registration};

/// Generous: reached only by a test that fails, even where an emulated machine is busy with other work.
pub const LONG: Duration = Duration::from_secs(120);

/// Tells a process of this binary which job it belongs to.
const JOB: &str = "GDSYNC_TEST_JOB";

/// How rank 0 leaves after its part: a filter that matches no test would leave with 0.
pub const DONE: i32 = 40;

/// A command that runs only the test `name` of this binary, without what any launcher around the tests has set.
pub fn myself(name: &str) -> Command {
    let mut command = Command::new(env::current_exe().unwrap());
    let thread = std::thread::current();
    // In a binary of several files the name begins with the file's.
    let test = thread.name().filter(|test| test.ends_with(&format!("::{name}"))).unwrap_or(name);
    command.args(["--exact", test, "--nocapture", "--test-threads=1"]).env(JOB, name);
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

/// The GPU of this rank, if `GDSYNC_TEST_GPU` says so (`memop` or `kernel`: what its streams are driven by): then streams are
/// on it, and buffers in its memory. Ranks take the GPUs by turns; where there is none, each has a simulated one.
pub fn gpu() -> Option<&'static (Gpu, Via)> {
    static GPU: OnceLock<Option<(Gpu, Via)>> = OnceLock::new();
    GPU.get_or_init(|| {
        let via = env::var("GDSYNC_TEST_GPU").ok()?.parse().expect("memop or kernel");
        let rank: i32 = env::var("RANK").map_or(0, |rank| rank.parse().unwrap());
        let gpu = match Gpu::count() {
            Ok(count) if count > 0 => Gpu::open(rank % count),
            _ => Gpu::open_with(driver::api(), 0, driver::gdr().ok()),
        };
        Some((gpu.unwrap(), via))
    })
    .as_ref()
}

/// Runs `body` in `size` processes, each with its communicator: call it from the test called `name`.
#[track_caller]
pub fn job(name: &str, size: usize, body: impl FnOnce(&Communicator)) {
    job_with(name, size, Communicator::builder(), body);
}

/// As [`job`], with what the builder says.
#[track_caller]
pub fn job_with(name: &str, size: usize, builder: mp::Builder, body: impl FnOnce(&Communicator)) {
    if !is_part_of(name) {
        let output = myself(name).output().unwrap();
        let text = [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
        assert_eq!(output.status.code(), Some(DONE), "{}\n{}", text[0], text[1]);
        return;
    }
    let builder = gpu().into_iter().fold(builder, |builder, (gpu, _)| builder.gpu(gpu));
    let comm = builder.spawn(size).timeout(LONG).init().unwrap();
    assert_eq!(comm.size(), size);
    body(&comm);
    let first = comm.rank() == 0;
    comm.finalize(LONG).unwrap();
    if first {
        exit(DONE);
    }
}

/// Runs the test called `name` in `size` processes, which join by themselves, each in the place of a rank: none is the parent of
/// another. Returns when all have ended.
pub fn ranks(name: &str, size: usize) -> Vec<Output> {
    let port = free_port();
    let start = |rank: usize| {
        let mut command = myself(name);
        command.env("RANK", rank.to_string()).env("WORLD_SIZE", size.to_string());
        command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", port.to_string());
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    let children: Vec<_> = (0..size).map(start).collect();
    children.into_iter().map(|child| child.wait_with_output().unwrap()).collect()
}

/// A port nobody listens at, and which the system gives to nobody who does not ask for it by number.
pub fn free_port() -> u16 {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    loop {
        let n = std::process::id() * 16 + NEXT.fetch_add(1, Ordering::Relaxed);
        let port = u16::try_from(10_000 + n % 20_000).unwrap();
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
}

/// What a failed message says of the other rank and the cause, which is one of these.
#[track_caller]
pub fn failed(error: &Error, with: usize, syndromes: &[Syndrome]) {
    match error {
        Error::Message { rank, source, .. } => {
            assert_eq!(*rank, with, "{error}");
            assert!(cause(source).is_some_and(|cause| syndromes.contains(&cause)), "{error}");
            assert!(error.to_string().contains(&format!("rank {with}")), "{error}");
        }
        other => panic!("{other}"),
    }
}

/// What a queue pair failed for, or the one beside it for whose sake it was stopped.
pub fn cause(error: &gdsync::Error) -> Option<Syndrome> {
    match error {
        gdsync::Error::Completion(error) => Some(error.syndrome),
        gdsync::Error::QpStopped { reason, .. } => cause(reason),
        // What the software HCA says where nothing was under way; others find out by a send of their own.
        gdsync::Error::PeerGone { .. } => Some(Syndrome::RETRY_EXC_ERR),
        _ => None,
    }
}

/// The bytes of message `n` from one rank to another.
pub fn message(from: usize, to: usize, n: usize, len: usize) -> Vec<u8> {
    let mut word = ((from << 48 | to << 40 | n) as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let words = std::iter::repeat_with(|| {
        word = word.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
        (word >> 32).to_le_bytes()
    });
    words.flatten().take(len).collect()
}

/// Memory that the CPU can use also where [`gpu`] is asked for.
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

pub fn stream(name: &str) -> Stream {
    let (name, wait_limit) = (name.into(), LONG);
    match gpu() {
        None => Stream::host(HostStreamConfig { name, wait_limit, ..HostStreamConfig::default() }),
        Some((gpu, via)) => {
            let default = CudaStreamConfig::default();
            Stream::cuda(gpu, CudaStreamConfig { name, wait_limit, via: *via, depth: 512, ..default })
        }
    }
    .unwrap()
}

/// Waits until `done`.
#[track_caller]
pub fn until(what: &str, mut done: impl FnMut() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < LONG, "{what}");
        yield_now();
    }
}
