//! What a call costs the CPU, for every way to trigger and to wait.

use std::time::Instant;

use super::gpu::{Batch, HostFunction, HostWait, Kernel, Op};
use super::lab::Lab;
use super::report::Figure;
use super::scene::{Step, until};
use super::wake;
use super::watch::Watch;
use super::words::Word;
use crate::bench::Result;

/// The stream is left to run dry after so many calls.
const PENDING: u64 = 50;
/// Calls that do not count.
const WARM_UP: u64 = 10;

/// Times so many calls of each.
pub(super) fn measure(lab: &Lab, calls: u64, watch: &Watch) -> Result<Vec<Figure>> {
    let measure_one = |(name, call): (&'static str, Result<Step>)| {
        watch.begin(name, &[]);
        let mut figure = Figure::new(name);
        let timed = call.and_then(|mut call| time(lab, &mut call, calls, watch, &mut figure));
        figure.end(timed);
        // Nothing is blocked here; a stream that does not end now never will.
        until(watch.limit(), "the stream did not end", || lab.gpu.idle(lab.work))?;
        Ok(figure)
    };
    all(lab)?.into_iter().map(measure_one).collect()
}

fn time(lab: &Lab, call: &mut Step, calls: u64, watch: &Watch, figure: &mut Figure) -> Result<()> {
    for i in 0..WARM_UP + calls {
        if i % PENDING == 0 {
            until(watch.limit(), "the stream did not end", || lab.gpu.idle(lab.work))?;
        }
        let start = Instant::now();
        call()?;
        let time = start.elapsed();
        if i >= WARM_UP {
            figure.samples.add(time);
        }
        watch.moved();
    }
    Ok(())
}

/// Every call. What waits finds its gate open.
fn all(lab: &Lab) -> Result<Vec<(&'static str, Result<Step>)>> {
    let (gpu, stream, scratch) = (lab.gpu, lab.work, lab.scratch);
    let (open, ready, copied) = (lab.arena.cell()?, lab.arena.cell()?, lab.arena.gpu()?);
    let gate = Word::Host(open);
    gate.store(1);
    let event = gpu.event()?;
    gpu.record(event, stream)?;
    let wait: &'static HostWait = Box::leak(Box::new(HostWait { ready, gate: open, limit: lab.give_up }));
    let polls = lab.await_gate(None, gate, None);
    let batch = |ops: Vec<Op>| -> Step {
        let mut batch = Batch::new(ops);
        Box::new(move || gpu.batch(stream, &mut batch))
    };
    let writes = |count| batch(vec![Op::Write(scratch, 1); count]);
    let graph =
        |graph: Result<_>| graph.map(|graph| -> Step { Box::new(move || gpu.launch_graph(stream, graph)) });
    let write_graph = gpu.graph(stream, || gpu.batch(stream, &mut Batch::new([Op::Write(scratch, 1)])));
    Ok(vec![
        ("trigger: write MemOp", Ok(writes(1))),
        ("trigger: batch of 2 write MemOps", Ok(writes(2))),
        ("trigger: batch of 8 write MemOps", Ok(writes(8))),
        ("trigger: batch of 64 write MemOps", Ok(writes(64))),
        ("trigger: kernel of one thread", Ok(Box::new(move || gpu.launch(stream, Kernel::Store(scratch))))),
        (
            "trigger: host function",
            Ok(Box::new(move || gpu.host_function(stream, HostFunction::Store(ready)))),
        ),
        ("trigger: cuEventRecord", Ok(Box::new(move || gpu.record(event, stream)))),
        ("trigger: graph of a write MemOp", graph(write_graph)),
        ("wait: MemOp", Ok(batch(vec![Op::Wait(gate)]))),
        ("wait: batch of write and wait MemOp", Ok(batch(vec![Op::Write(scratch, 1), Op::Wait(gate)]))),
        ("wait: kernel that polls", Ok(Box::new(move || gpu.launch(stream, polls)))),
        (
            "wait: host function that polls",
            Ok(Box::new(move || gpu.host_function(stream, HostFunction::Await(wait)))),
        ),
        ("wait: cuStreamWaitEvent", Ok(Box::new(move || gpu.wait_event(stream, event)))),
        ("wait: graph of a MemOp wait and a kernel", graph(wake::waiting_graph(lab, scratch, gate, scratch))),
        ("nudge: cuMemcpyAsync of 4 bytes", Ok(Box::new(move || gpu.copy(stream, copied, scratch)))),
        ("CPU: cuStreamQuery", Ok(Box::new(move || gpu.idle(stream).map(drop)))),
        ("CPU: cuEventQuery", Ok(Box::new(move || gpu.happened(event).map(drop)))),
        ("CPU: cuStreamSynchronize, nothing to wait for", Ok(Box::new(move || gpu.synchronize(stream)))),
    ])
}
