//! `gdasync bench`: measurements, each with its baseline in the same run.

mod bandwidth;
mod copy;
mod messages;
mod peers;
mod scale;
mod stream;
mod traffic;
mod trigger;

use std::time::Duration;

use clap::{Args, Subcommand};
use gdasync::mp::{Communicator, CommunicatorBuilder};
use gdasync::pingpong;
use gdasync::results::{Output, Result};

/// A communicator of two ranks; starts the other one if no launcher did.
fn two_ranks(builder: CommunicatorBuilder, timeout: Duration) -> Result<Communicator> {
    // Receives are posted far ahead into two slots: messages are counted, or answered before the slot is used again.
    let comm = builder.allow_overlap(true).spawn(2).timeout(timeout).init()?;
    match comm.size() {
        2 => Ok(comm),
        size => Err(format!("this benchmark has 2 ranks, this job has {size}").into()),
    }
}

#[derive(Subcommand)]
pub(crate) enum Bench {
    /// Latency and CPU time of messages by size, driven by streams, graphs, kernels and the CPU.
    Latency(Latency),
    /// Bytes per second between hosts and GPUs, and messages per second by size and depth.
    Bandwidth(bandwidth::Options),
    /// The messaging layer: ping-pong, tags, rates, and what calls add to gdsync's.
    Messages(messages::Options),
    /// Messages between two GPUs of this host, beside those of NCCL and NVSHMEM.
    Peers(peers::Options),
    /// CPU mappings of GPU memory against CUDA copies: by path and size.
    Copy(copy::Options),
    /// Triggers and waits on CUDA streams, in every way CUDA has, on an idle and a busy GPU.
    Trigger(trigger::Options),
    /// CPU time of a send or a wait on a CUDA stream, beyond the call of the driver.
    Stream(stream::Options),
    /// Latency and rate with many queue pairs and with many ranks on this host.
    Scale(scale::Options),
}

impl Bench {
    pub(crate) fn run(self) -> Result<()> {
        match self {
            Bench::Latency(Latency { pingpong, recorder, output }) => {
                pingpong::run(&pingpong, &output, true, recorder)
            }
            Bench::Bandwidth(options) => options.run(),
            Bench::Messages(options) => options.run(),
            Bench::Peers(options) => options.run(),
            Bench::Copy(options) => options.run(),
            Bench::Trigger(options) => options.run(),
            Bench::Stream(options) => options.run(),
            Bench::Scale(options) => options.run(),
        }
    }
}

#[derive(Args)]
struct OneGpu {
    /// CUDA device.
    #[arg(long, default_value_t = 0)]
    device: i32,
    /// Seconds after which a wait fails, 1 to 60.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u64).range(1..=60))]
    timeout: u64,
    #[command(flatten)]
    output: Output,
}

#[derive(Args)]
#[command(after_long_help = "\
What the numbers mean: the time from the start of a send to the end of the wait for the answer, halved; every message is \
checked. `cache line` is a line of shared memory that the CPUs of both processes store and load: no message can be faster, \
and the ratios are to its median, measured before each size. `stream flags` is a word that the streams of both ranks bounce: \
the floor of stream-triggered messages. CPU times are those of a process, divided by the messages that it sends.")]
pub(crate) struct Latency {
    #[command(flatten)]
    pingpong: pingpong::Options,
    /// Also measure each mode with the flight recorder paused.
    #[arg(long)]
    recorder: bool,
    #[command(flatten)]
    output: Output,
}
