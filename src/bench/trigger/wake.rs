//! From a completion, a word that the CPU stores, to the start of the kernel that waits for it.

use super::feed::Work;
use super::gpu::{Batch, Graph, HostFunction, HostWait, Kernel, Op, Stream};
use super::lab::Lab;
use super::scene::{Scene, See, Step, Variant};
use super::words::Word;
use crate::bench::Result;

/// All ways.
pub(super) fn variants(lab: &Lab) -> Vec<Variant> {
    let mut all = vec![
        Variant::new("baseline: the CPU sees it and launches the kernel", launch(lab)),
        Variant::new("MemOp wait, host word", mem_op(lab, lab.work, lab.arena.host(), 1)),
        Variant::new("MemOp wait, GPU word", mem_op(lab, lab.work, lab.arena.gpu(), 1)),
        Variant::new("MemOp wait twice in a batch, host word", mem_op(lab, lab.work, lab.arena.host(), 2)),
        Variant::new("MemOp wait 8 times in a batch, host word", mem_op(lab, lab.work, lab.arena.host(), 8)),
        Variant::new("MemOp wait, stream of highest priority", mem_op(lab, lab.high, lab.arena.host(), 1)),
        Variant::new("MemOp wait, stream of lowest priority", mem_op(lab, lab.low, lab.arena.host(), 1)),
        Variant::new("MemOp wait in a graph, host word", graph(lab)),
        Variant::new("MemOp wait beside a stream full of write MemOps", beside(lab, Work::Writes)),
        Variant::new("MemOp wait beside a stream full of short kernels", beside(lab, Work::Kernel)),
        Variant::new("kernel that polls a host word, then the kernel", polls(lab, lab.arena.host(), false)),
        Variant::new("kernel that polls a GPU word, then the kernel", polls(lab, lab.arena.gpu(), false)),
        Variant::new("the kernel itself polls a host word", polls(lab, lab.arena.host(), true)),
        Variant::new("the kernel itself polls a GPU word", polls(lab, lab.arena.gpu(), true)),
        Variant::new("host function that polls", host_function(lab)),
    ];
    for (name, on_gpu, nudge) in [
        ("MemOp wait, host word, nudge: write MemOp", false, Nudge::Write(lab.nudge, 1)),
        ("MemOp wait, GPU word, nudge: write MemOp", true, Nudge::Write(lab.nudge, 1)),
        ("MemOp wait, host word, two kicks: write MemOps", false, Nudge::Write(lab.nudge, 2)),
        ("MemOp wait, GPU word, two kicks: write MemOps", true, Nudge::Write(lab.nudge, 2)),
        (
            "MemOp wait, host word, nudge: write MemOp on a stream of highest priority",
            false,
            Nudge::Write(lab.kick_high, 1),
        ),
        ("MemOp wait, host word, nudge: kernel", false, Nudge::Kernel),
        ("MemOp wait, host word, nudge: cuEventRecord", false, Nudge::Event),
        ("MemOp wait, host word, nudge: cuMemcpyAsync of 4 bytes", false, Nudge::Copy),
        ("MemOp wait, host word, nudge: cuStreamQuery of the blocked stream", false, Nudge::Query),
    ] {
        let gate = if on_gpu { lab.arena.gpu() } else { lab.arena.host() };
        all.push(Variant::new(name, kicked(lab, gate, nudge)));
    }
    all
}

/// What the CPU does after its store to attract the GPU's attention, on a stream that has nothing to do otherwise.
enum Nudge {
    /// So many batches of one write.
    Write(Stream, u32),
    Kernel,
    Event,
    Copy,
    Query,
}

/// A wait, then the kernel that says that it runs.
fn then_kernel(lab: &Lab, stream: Stream, ready: Word, gate: Word, mut wait: Step) -> Result<Scene> {
    let (gpu, over) = (lab.gpu, lab.arena.host()?);
    let enqueue = Box::new(move || {
        wait()?;
        gpu.launch(stream, Kernel::Store(over))
    });
    Ok(lab.scene(stream, Some(ready), gate, See::Word(over), enqueue))
}

/// A MemOp wait so many times.
fn mem_op(lab: &Lab, stream: Stream, gate: Result<Word>, times: usize) -> Result<Scene> {
    let (gpu, ready, gate) = (lab.gpu, lab.arena.host()?, gate?);
    let waits = std::iter::repeat_n(Op::Wait(gate), times);
    let mut batch = Batch::new([Op::Write(ready, 1)].into_iter().chain(waits));
    then_kernel(lab, stream, ready, gate, Box::new(move || gpu.batch(stream, &mut batch)))
}

fn kicked(lab: &Lab, gate: Result<Word>, nudge: Nudge) -> Result<Scene> {
    let (gpu, work, stream, scratch) = (lab.gpu, lab.work, lab.nudge, lab.scratch);
    let act: Step = match nudge {
        Nudge::Write(stream, times) => {
            let mut batch = Batch::new([Op::Write(scratch, 1)]);
            Box::new(move || (0..times).try_for_each(|_| gpu.batch(stream, &mut batch)))
        }
        Nudge::Kernel => Box::new(move || gpu.launch(stream, Kernel::Store(scratch))),
        Nudge::Event => {
            let event = gpu.event()?;
            Box::new(move || gpu.record(event, stream))
        }
        Nudge::Copy => {
            let to = lab.arena.gpu()?;
            Box::new(move || gpu.copy(stream, to, scratch))
        }
        Nudge::Query => Box::new(move || gpu.idle(work).map(drop)),
    };
    Ok(Scene { act: Some(act), ..mem_op(lab, work, gate, 1)? })
}

fn beside(lab: &Lab, work: Work) -> Result<Scene> {
    Ok(Scene { company: Some(lab.company(work)?), ..mem_op(lab, lab.work, lab.arena.host(), 1)? })
}

/// A graph of a wait and the kernel.
pub(super) fn waiting_graph(lab: &Lab, ready: Word, gate: Word, over: Word) -> Result<Graph> {
    let (gpu, stream) = (lab.gpu, lab.work);
    gpu.graph(stream, || {
        gpu.batch(stream, &mut Batch::new([Op::Write(ready, 1), Op::Wait(gate)]))?;
        gpu.launch(stream, Kernel::Store(over))
    })
}

fn graph(lab: &Lab) -> Result<Scene> {
    let (gpu, stream) = (lab.gpu, lab.work);
    let (ready, gate, over) = (lab.arena.host()?, lab.arena.host()?, lab.arena.host()?);
    let graph = waiting_graph(lab, ready, gate, over)?;
    let enqueue = Box::new(move || gpu.launch_graph(stream, graph));
    Ok(lab.scene(stream, Some(ready), gate, See::Word(over), enqueue))
}

/// A kernel that polls the word, and either goes on itself or is followed by one that does.
fn polls(lab: &Lab, gate: Result<Word>, itself: bool) -> Result<Scene> {
    let (gpu, stream, ready, gate) = (lab.gpu, lab.work, lab.arena.host()?, gate?);
    if !itself {
        let kernel = lab.await_gate(Some(ready), gate, None);
        return then_kernel(lab, stream, ready, gate, Box::new(move || gpu.launch(stream, kernel)));
    }
    let over = lab.arena.host()?;
    let kernel = lab.await_gate(Some(ready), gate, Some(over));
    let enqueue = Box::new(move || gpu.launch(stream, kernel));
    Ok(lab.scene(stream, Some(ready), gate, See::Word(over), enqueue))
}

fn host_function(lab: &Lab) -> Result<Scene> {
    let (gpu, stream, ready, gate) = (lab.gpu, lab.work, lab.arena.cell()?, lab.arena.cell()?);
    let wait: &'static HostWait = Box::leak(Box::new(HostWait { ready, gate, limit: lab.give_up }));
    let enqueue = Box::new(move || gpu.host_function(stream, HostFunction::Await(wait)));
    then_kernel(lab, stream, Word::Host(ready), Word::Host(gate), enqueue)
}

/// As MPI programs do it: nothing waits in the stream, the CPU launches the kernel when it has seen the completion.
fn launch(lab: &Lab) -> Result<Scene> {
    let (gpu, stream, gate, over) = (lab.gpu, lab.work, lab.arena.host()?, lab.arena.host()?);
    let act: Step = Box::new(move || gpu.launch(stream, Kernel::Store(over)));
    let scene = lab.scene(stream, None, gate, See::Word(over), Box::new(|| Ok(())));
    Ok(Scene { act: Some(act), ..scene })
}
