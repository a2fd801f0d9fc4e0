//! What is asked for on the command line.

use std::time::Duration;

use clap::{Args, ValueEnum};
use serde::Serialize;

use crate::lane::{Placement, Result};

/// Iterations in a launch of modes graph and initiate, where nothing is asked for.
const LAUNCH: u32 = 50;

/// Options of a ping-pong.
#[derive(Args, Clone, Debug)]
#[group(skip)]
pub struct Options {
    /// How messages are driven.
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = [Mode::Stream, Mode::Sync, Mode::Cpu])]
    modes: Vec<Mode>,
    /// Also mode graph, with so many iterations in a launch, 1 to 200 [default in mode graph: 50].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=200))]
    graph: Option<u32>,
    /// Also mode initiate, with so many iterations in a launch, 1 to 200 [default in mode initiate: 50].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=200))]
    initiate: Option<u32>,
    /// Message sizes in bytes, 1 to 1073741824 each.
    #[arg(long, value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..=1 << 30),
          default_values_t = [1, 8, 64, 512, 4096, 32768, 262_144, 1 << 20, 4 << 20])]
    pub sizes: Vec<u32>,
    /// Iterations of each size [default: 2000, fewer for large messages].
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    iters: Option<u32>,
    /// Iterations posted ahead in mode stream.
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=200))]
    pub ahead: u32,
    /// Streams and memory.
    #[command(flatten)]
    pub placement: Placement,
    /// Microseconds of work on the stream before each send.
    #[arg(long, value_name = "US", default_value_t = 0, value_parser = clap::value_parser!(u32).range(..=1_000_000))]
    kernel_us: u32,
    /// Only sends and waits on the stream: the CPU checks the last message of each window of mode stream, and every one of
    /// the other modes.
    #[arg(long)]
    pub no_kernels: bool,
    /// Rank 1 sends what nobody expects: for tests of the check.
    #[arg(long, hide = true)]
    pub(super) wrong_bytes: bool,
    /// Seconds after which a wait is given up, 1 to 86400.
    #[arg(long, default_value_t = 30, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    timeout: u64,
}

/// How messages are driven.
#[derive(Clone, Copy, ValueEnum, Serialize, PartialEq, Debug)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// Everything posted ahead on a stream, the CPU asleep.
    Stream,
    /// As graphs: iterations captured once and launched again and again, by connections of their own.
    Graph,
    /// By a kernel that waits and sends by itself, for --stream cuda --via kernel.
    Initiate,
    /// The CPU waits for the stream and then posts.
    Sync,
    /// No stream.
    Cpu,
    /// No message: a flag that two streams bounce.
    #[value(skip)]
    Floor,
}

impl Options {
    /// Refuses what does not go together.
    ///
    /// # Errors
    /// Names the two options.
    pub fn check(&self) -> Result<()> {
        if self.no_kernels && self.kernel_us > 0 {
            return Err("--kernel-us puts work on the stream, which --no-kernels forbids".into());
        }
        let modes = self.modes();
        if self.no_kernels && modes.contains(&Mode::Graph) {
            return Err(
                "mode graph (--graph) checks every message on the stream, which --no-kernels forbids".into(),
            );
        }
        if self.no_kernels && modes.contains(&Mode::Initiate) {
            return Err("mode initiate (--initiate) is a kernel, which --no-kernels forbids".into());
        }
        if modes.contains(&Mode::Initiate) && !self.placement.is_by_kernel() {
            return Err("mode initiate (--initiate) is for --stream cuda --via kernel".into());
        }
        Ok(())
    }

    /// How messages are driven.
    pub fn modes(&self) -> Vec<Mode> {
        let mut modes = self.modes.clone();
        let mut add = |mode, behind| {
            if !modes.contains(&mode) {
                let at = modes.iter().position(|known| *known == behind).map_or(0, |at| at + 1);
                modes.insert(at, mode);
            }
        };
        if self.graph.is_some() {
            add(Mode::Graph, Mode::Stream);
        }
        if self.initiate.is_some() {
            let behind = if self.graph.is_some() { Mode::Graph } else { Mode::Stream };
            add(Mode::Initiate, behind);
        }
        modes
    }

    /// Iterations in a launch of mode graph.
    pub fn graph(&self) -> u64 {
        self.graph.unwrap_or(LAUNCH).into()
    }

    /// Iterations in a launch of mode initiate.
    pub fn initiate(&self) -> u64 {
        self.initiate.unwrap_or(LAUNCH).into()
    }

    /// After how long a wait is given up.
    pub fn timeout(&self) -> Duration {
        Duration::from_secs(self.timeout)
    }

    /// Work on the stream before each send.
    pub fn work(&self) -> Duration {
        Duration::from_micros(self.kernel_us.into())
    }

    /// Iterations of a size, those included that warm up.
    pub fn all_iterations(&self, bytes: usize) -> u64 {
        let iterations = self.iterations(bytes);
        warm_up(iterations) + iterations
    }

    /// Iterations of a size that are measured.
    pub fn iterations(&self, bytes: usize) -> u64 {
        self.iters.map_or(((64 << 20) / bytes as u64).clamp(10, 2000), u64::from)
    }
}

/// Iterations before those that are measured.
pub(super) fn warm_up(iterations: u64) -> u64 {
    (iterations / 10).max(2)
}
