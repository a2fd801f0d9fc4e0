//! From the end of a kernel to the CPU's seeing the trigger.

use super::gpu::{Batch, HostFunction, Kernel, Op};
use super::lab::Lab;
use super::scene::{Scene, See, Step, Variant};
use super::words::Word;
use crate::bench::Result;

/// All ways.
pub(super) fn variants(lab: &Lab) -> Vec<Variant> {
    vec![
        Variant::new("baseline: the kernel itself stores, gate in GPU memory", itself(lab, lab.arena.gpu())),
        Variant::new(
            "baseline: the kernel itself stores, gate in host memory",
            itself(lab, lab.arena.host()),
        ),
        Variant::new("write MemOp, host word", writes(lab, lab.arena.host(), 1, Op::Write)),
        Variant::new(
            "write MemOp, GPU word read through the mapping",
            writes(lab, lab.arena.gpu(), 1, Op::Write),
        ),
        Variant::new("batch of 2 write MemOps", writes(lab, lab.arena.host(), 2, Op::Write)),
        Variant::new("batch of 8 write MemOps", writes(lab, lab.arena.host(), 8, Op::Write)),
        Variant::new("batch of 64 write MemOps", writes(lab, lab.arena.host(), 64, Op::Write)),
        Variant::new(
            "batch of 64 write MemOps, only the last with a barrier",
            writes(lab, lab.arena.host(), 64, Op::WriteUnordered),
        ),
        Variant::new("kernel of one thread", kernel(lab)),
        Variant::new("host function", host_function(lab)),
        Variant::new("event, polled by cuEventQuery", event(lab)),
        Variant::new("cuStreamSynchronize", synchronize(lab)),
        Variant::new("graph: gate kernel, write MemOp", graph(lab, true)),
        Variant::new("graph: gate kernel, kernel of one thread", graph(lab, false)),
    ]
}

/// A kernel that waits for its gate, in GPU memory, then what triggers.
fn after_gate(lab: &Lab, see: See, mut trigger: Step) -> Result<Scene> {
    let (gpu, stream, ready, gate) = (lab.gpu, lab.work, lab.arena.host()?, lab.arena.gpu()?);
    let kernel = lab.await_gate(Some(ready), gate, None);
    let enqueue = Box::new(move || {
        gpu.launch(stream, kernel)?;
        trigger()
    });
    Ok(lab.scene(stream, Some(ready), gate, see, enqueue))
}

fn itself(lab: &Lab, gate: Result<Word>) -> Result<Scene> {
    let (gpu, stream, ready, gate, over) = (lab.gpu, lab.work, lab.arena.host()?, gate?, lab.arena.host()?);
    let kernel = lab.await_gate(Some(ready), gate, Some(over));
    let enqueue = Box::new(move || gpu.launch(stream, kernel));
    Ok(lab.scene(stream, Some(ready), gate, See::Word(over), enqueue))
}

/// Write MemOps, the last of which triggers; the others are made by `op`.
fn writes(lab: &Lab, over: Result<Word>, count: usize, op: fn(Word, u32) -> Op) -> Result<Scene> {
    let (gpu, stream, over) = (lab.gpu, lab.work, over?);
    let others = std::iter::repeat_n(op(lab.scratch, 1), count - 1);
    let mut batch = Batch::new(others.chain([Op::Write(over, 1)]));
    after_gate(lab, See::Word(over), Box::new(move || gpu.batch(stream, &mut batch)))
}

fn kernel(lab: &Lab) -> Result<Scene> {
    let (gpu, stream, over) = (lab.gpu, lab.work, lab.arena.host()?);
    let trigger = Box::new(move || gpu.launch(stream, Kernel::Store(over)));
    after_gate(lab, See::Word(over), trigger)
}

fn host_function(lab: &Lab) -> Result<Scene> {
    let (gpu, stream, over) = (lab.gpu, lab.work, lab.arena.cell()?);
    let trigger = Box::new(move || gpu.host_function(stream, HostFunction::Store(over)));
    after_gate(lab, See::Word(Word::Host(over)), trigger)
}

/// The CPU polls an event; then it stores the word that stands for a doorbell.
fn event(lab: &Lab) -> Result<Scene> {
    let (gpu, stream, doorbell, event) = (lab.gpu, lab.work, lab.arena.host()?, lab.gpu.event()?);
    let happened = move || {
        let happened = gpu.happened(event)?;
        if happened {
            doorbell.store(1);
        }
        Ok(happened)
    };
    after_gate(lab, See::Ask(Box::new(happened)), Box::new(move || gpu.record(event, stream)))
}

/// As MPI programs do it: the CPU waits for the stream, then acts.
fn synchronize(lab: &Lab) -> Result<Scene> {
    let (gpu, stream, doorbell) = (lab.gpu, lab.work, lab.arena.host()?);
    let act = move || {
        gpu.synchronize(stream)?;
        doorbell.store(1);
        Ok(())
    };
    after_gate(lab, See::Call(Box::new(act)), Box::new(|| Ok(())))
}

fn graph(lab: &Lab, by_mem_op: bool) -> Result<Scene> {
    let (gpu, stream, ready, gate) = (lab.gpu, lab.work, lab.arena.host()?, lab.arena.gpu()?);
    let over = lab.arena.host()?;
    let graph = gpu.graph(stream, || {
        gpu.launch(stream, lab.await_gate(Some(ready), gate, None))?;
        if by_mem_op {
            gpu.batch(stream, &mut Batch::new([Op::Write(over, 1)]))
        } else {
            gpu.launch(stream, Kernel::Store(over))
        }
    })?;
    let enqueue = Box::new(move || gpu.launch_graph(stream, graph));
    Ok(lab.scene(stream, Some(ready), gate, See::Word(over), enqueue))
}
