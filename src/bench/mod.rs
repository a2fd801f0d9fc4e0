//! `gdasync bench`: measurements that stay in the project, each with its baseline in the same run.

mod bandwidth;
mod bare;
mod copy;
mod cpu;
mod fleet;
mod floor;
mod hca;
mod link;
mod mp;
mod overlap;
mod pingpong;
mod proxy;
mod rate;
mod recorder;
mod register;
mod rows;
mod scale;
mod sheet;
mod slots;
mod stream;
mod trigger;

use std::time::Duration;

use clap::Subcommand;
use gdasync::mp::{Communicator, CommunicatorBuilder};

/// What a benchmark may fail with.
pub(crate) type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

/// This process and another one.
fn two_ranks(timeout: Duration) -> Result<Communicator> {
    pair(Communicator::builder(), timeout)
}

/// The same with queues where `builder` has them.
fn pair(builder: CommunicatorBuilder, timeout: Duration) -> Result<Communicator> {
    let comm = builder.spawn(2).timeout(timeout).init()?;
    if comm.size() != 2 {
        return Err(format!("this benchmark has 2 ranks, this job has {}", comm.size()).into());
    }
    Ok(comm)
}

/// The benchmarks.
#[derive(Subcommand)]
pub(crate) enum Bench {
    /// Bytes per second between hosts and GPUs, with copies and directly, as ratios to memcpy.
    Bandwidth(bandwidth::Options),
    /// Latency and rate of the software HCA, as ratios to two threads or processes that bounce a cache line.
    Hca(hca::Options),
    /// CPU mappings of GPU memory against CUDA's copies: every way, routine and number of threads at every size.
    Copy(copy::Options),
    /// CPU time of a message: of the application's thread, of the service thread, of all, when streams or the CPU drive it.
    Cpu(cpu::Options),
    /// Messages between two processes: ping-pong by the CPU and by streams, rates, and what a call adds to gdsync's.
    Mp(mp::Options),
    /// How much of an exchange of messages hides behind work on the stream.
    Overlap(overlap::Options),
    /// Latency over sizes, driven by streams and by the CPU, as ratios to a cache line that two processes bounce.
    Pingpong(pingpong::Options),
    /// What the CPU proxy costs on top of libibverbs, on an RDMA device; with --staged, what it costs to stage GPU memory.
    Proxy(proxy::Options),
    /// Messages per second, by what is outstanding, by queue pairs and by size, against a ring in shared memory.
    Rate(rate::Options),
    /// What a stamp of the flight recorder costs, and what the recorder costs a message.
    Recorder(recorder::Options),
    /// The registration cache against registering and deregistering memory each time.
    Register(register::Options),
    /// Latency and rate of many queue pairs and of many ranks on this host, as ratios to one queue pair and two ranks.
    Scale(scale::Options),
    /// What the library costs the CPU for each send and wait on a stream, on top of the driver's call.
    Stream(stream::Options),
    /// What it costs to have a stream trigger something and wait for something: every way, on an idle and a busy GPU.
    Trigger(trigger::Options),
}

impl Bench {
    pub(crate) fn run(self) -> Result<()> {
        match self {
            Bench::Bandwidth(options) => options.run(),
            Bench::Hca(options) => options.run(),
            Bench::Copy(options) => options.run(),
            Bench::Cpu(options) => options.run(),
            Bench::Mp(options) => options.run(),
            Bench::Overlap(options) => options.run(),
            Bench::Pingpong(options) => options.run(),
            Bench::Proxy(options) => options.run(),
            Bench::Rate(options) => options.run(),
            Bench::Recorder(options) => options.run(),
            Bench::Register(options) => options.run(),
            Bench::Scale(options) => options.run(),
            Bench::Stream(options) => options.run(),
            Bench::Trigger(options) => options.run(),
        }
    }
}
