//! Launches of graphs: what the library takes for each hop, what the driver takes to give nodes other operations, and what it
//! takes to launch.

use gdasync::out;
use std::io;
use std::time::Instant;

use comfy_table::{CellAlignment, Table, presets};
use gdasync::gdsync::stream::{Batch, CudaStreamConfig, Graph, Stream, Via};
use gdasync::gdsync::verbs::OnGpu;
use gdasync::measure::{Machine, Micros, Samples};
use serde::Serialize;

use super::cases::Sides;
use super::driver::{self, Spent};
use super::{Machinery, Options};
use crate::bench::Result;

/// Launches that warm up.
const WARM_UP: u64 = 10;

/// All figures of a run.
#[derive(Serialize)]
pub(super) struct Report {
    machine: Machine,
    gpu: String,
    graphs: Vec<Row>,
}

/// Launches of one kind of stream.
#[derive(Serialize)]
struct Row {
    /// What runs the operations: "memop" or "kernel".
    via: String,
    /// Where queues and records are.
    queues: &'static str,
    /// Batches of a launch: each is a send and a wait for it, and a node of its own.
    hops: u32,
    /// A launch.
    launch_us: Micros,
    /// Its parts: `cuGraphLaunch`, the calls that give nodes other operations, and the library.
    driver_launch_us: Micros,
    driver_nodes_us: Micros,
    library_us: Micros,
    /// Of the means, for each hop.
    hop_us: f64,
    hop_library_us: f64,
}

impl Row {
    fn measure(
        options: &Options,
        machinery: &Machinery,
        hops: u32,
        via: Via,
        (queues, on_gpu): (&'static str, OnGpu),
    ) -> Result<Self> {
        let gpu = &machinery.watched;
        let _current = gpu.enter()?;
        let stream = Stream::cuda(gpu, CudaStreamConfig { via, ..CudaStreamConfig::default() })?;
        let sides = Sides::new(gpu, on_gpu)?;
        let graph: Graph = stream.capture(|stream| {
            (0..hops).try_for_each(|_| {
                let mut batch = Batch::new();
                sides.hop(&mut batch)?;
                stream.submit(&mut batch)
            })
        })?;
        let mut samples: [Samples; 4] = std::array::from_fn(|_| Samples::default());
        for n in 0..WARM_UP + options.calls.div_ceil(hops.into()) {
            let before = driver::spent();
            let start = Instant::now();
            graph.launch(&stream)?;
            let all = start.elapsed();
            let Spent { launches, nodes } = driver::spent().since(before);
            stream.synchronize(options.timeout())?;
            if n >= WARM_UP {
                let library = all.saturating_sub(launches + nodes);
                let parts = [all, launches, nodes, library];
                samples.iter_mut().zip(parts).for_each(|(samples, time)| samples.add(time));
            }
        }
        let [launch_us, driver_launch_us, driver_nodes_us, library_us] =
            std::array::from_fn(|part| samples[part].micros(1));
        let hop = |part: usize| samples[part].mean() / f64::from(hops);
        let (hop_us, hop_library_us) = (hop(0), hop(3));
        let via = via.to_string();
        Ok(Self {
            via,
            queues,
            hops,
            launch_us,
            driver_launch_us,
            driver_nodes_us,
            library_us,
            hop_us,
            hop_library_us,
        })
    }
}

impl Report {
    pub(super) fn measure(options: &Options, machinery: Machinery, hops: u32) -> Result<Self> {
        let mut graphs = Vec::new();
        for via in [Via::MemOp, Via::Kernel] {
            for place in [("host", OnGpu::empty()), ("GPU", OnGpu::all())] {
                graphs.push(Row::measure(options, &machinery, hops, via, place)?);
            }
        }
        Ok(Self { machine: Machine::here(), gpu: machinery.name, graphs })
    }

    pub(super) fn print(&self) -> io::Result<()> {
        out!("{} on {} x {}", self.gpu, self.machine.cpus, self.machine.cpu)?;
        out!(
            "a launch of a graph, p50 in us, and its parts; what a hop of it takes, a send and a wait, by the means"
        )?;
        let mut table = Table::new();
        table.load_style(presets::NOTHING);
        let header = [
            "",
            "queues",
            "hops",
            "launch",
            "p99",
            "cuGraphLaunch",
            "nodes",
            "library",
            "hop us",
            "its library us",
        ];
        table.set_header(header);
        for row in &self.graphs {
            let us = [
                row.launch_us.p50,
                row.launch_us.p99,
                row.driver_launch_us.p50,
                row.driver_nodes_us.p50,
                row.library_us.p50,
            ];
            let hop = [row.hop_us, row.hop_library_us];
            let words = [row.via.clone(), row.queues.into(), row.hops.to_string()];
            let figures = us.map(|us| format!("{us:.2}")).into_iter().chain(hop.map(|us| format!("{us:.3}")));
            table.add_row(words.into_iter().chain(figures));
        }
        table.column_iter_mut().skip(2).for_each(|column| column.set_cell_alignment(CellAlignment::Right));
        out!("{table}")
    }
}
