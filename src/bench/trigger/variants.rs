//! The ways to trigger and to wait on a stream.

use std::time::{Duration, Instant};

use gdasync::results::Result;

use super::Figure;
use super::gpu::{Call, Kernel, wait, write};
use super::rig::{End, Gated, Rig, Variant, Word, until};

/// All ways to trigger, behind a kernel that waits for its gate.
pub(super) fn triggers(rig: &Rig) -> Vec<Variant> {
    let writes = |count: usize| {
        let ops = move |over| vec![write(rig.scratch, 1); count - 1].into_iter().chain([write(over, 1)]);
        trigger(rig, |over| vec![Call::MemOps(ops(over).collect())])
    };
    vec![
        Variant::new("baseline: the kernel itself stores", one_kernel(rig)),
        Variant::new("write MemOp, host word", writes(1)),
        Variant::new("batch of 8 write MemOps", writes(8)),
        Variant::new("batch of 64 write MemOps", writes(64)),
        Variant::new("kernel of one thread", trigger(rig, |over| vec![Call::Kernel(Kernel::Store(over))])),
        Variant::new("host function", host_function_triggers(rig)),
        Variant::new("cuStreamSynchronize", synchronize(rig)),
        Variant::new("graph: gate kernel, write MemOp", trigger_in_graph(rig)),
    ]
}

/// A kernel that waits for its gate, in GPU memory, then these calls.
fn after_gate(rig: &Rig, end: End, calls: Vec<Call>) -> Result<Gated> {
    let (ready, gate) = (rig.arena.host()?, rig.arena.gpu()?);
    let calls = [vec![rig.await_gate(Some(ready), gate, None)], calls].concat();
    Ok(rig.gated(rig.work, Some(ready), gate, end, calls))
}

fn trigger(rig: &Rig, calls: impl FnOnce(Word) -> Vec<Call>) -> Result<Gated> {
    let over = rig.arena.host()?;
    after_gate(rig, End::Word(over), calls(over))
}

fn trigger_in_graph(rig: &Rig) -> Result<Gated> {
    let (ready, gate, over) = (rig.arena.host()?, rig.arena.gpu()?, rig.arena.host()?);
    let mut calls = [rig.await_gate(Some(ready), gate, None), Call::MemOps(vec![write(over, 1)])];
    let graph = Call::Graph(rig.gpu.graph(rig.work, &mut calls)?);
    Ok(rig.gated(rig.work, Some(ready), gate, End::Word(over), vec![graph]))
}

fn host_function_triggers(rig: &Rig) -> Result<Gated> {
    let over = rig.arena.cell()?;
    after_gate(rig, End::Word(Word::Host(over)), vec![Call::HostStore(over)])
}

/// As MPI programs do it: the CPU waits for the stream, then acts.
fn synchronize(rig: &Rig) -> Result<Gated> {
    let (gpu, stream, doorbell) = (rig.gpu, rig.work, rig.arena.host()?);
    let act = move || {
        gpu.call(stream, &mut Call::Synchronize)?;
        doorbell.store(1);
        Ok(())
    };
    after_gate(rig, End::Returns(Box::new(act)), Vec::new())
}

/// A kernel that polls the gate, in GPU memory, and goes on itself.
fn one_kernel(rig: &Rig) -> Result<Gated> {
    let (ready, gate, over) = (rig.arena.host()?, rig.arena.gpu()?, rig.arena.host()?);
    let kernel = rig.await_gate(Some(ready), gate, Some(over));
    Ok(rig.gated(rig.work, Some(ready), gate, End::Word(over), vec![kernel]))
}

/// All ways to wait, each followed by a kernel.
pub(super) fn wakes(rig: &Rig) -> Vec<Variant> {
    vec![
        Variant::new("baseline: the CPU sees it and launches the kernel", cpu_launches(rig)),
        Variant::new("MemOp wait, host word", mem_op(rig, rig.arena.host(), 1)),
        Variant::new("MemOp wait, GPU word", mem_op(rig, rig.arena.gpu(), 1)),
        Variant::new("MemOp wait 8 times in a batch, host word", mem_op(rig, rig.arena.host(), 8)),
        Variant::new("MemOp wait, host word, nudge: write MemOp", nudged(rig)),
        Variant::new("kernel that polls a host word, then the kernel", kernel_polls(rig)),
        Variant::new("the kernel itself polls a GPU word", one_kernel(rig)),
    ]
}

/// Calls that wait, then the kernel that says that it runs.
fn then_kernel(rig: &Rig, ready: Word, gate: Word, wait: Call) -> Result<Gated> {
    let over = rig.arena.host()?;
    let calls = vec![wait, Call::Kernel(Kernel::Store(over))];
    Ok(rig.gated(rig.work, Some(ready), gate, End::Word(over), calls))
}

fn mem_op(rig: &Rig, gate: Result<Word>, times: usize) -> Result<Gated> {
    let (ready, gate) = (rig.arena.host()?, gate?);
    then_kernel(rig, ready, gate, Call::MemOps([vec![write(ready, 1)], vec![wait(gate); times]].concat()))
}

/// After its store the CPU makes the front end poll, by a write on a stream that has nothing else to do.
fn nudged(rig: &Rig) -> Result<Gated> {
    let (gpu, nudge, scratch) = (rig.gpu, rig.nudge, rig.scratch);
    let act = Box::new(move || gpu.calls(nudge, &mut [Call::MemOps(vec![write(scratch, 1)])]));
    Ok(Gated { act: Some(act), ..mem_op(rig, rig.arena.host(), 1)? })
}

/// A kernel that polls the word, and is followed by one that goes on.
fn kernel_polls(rig: &Rig) -> Result<Gated> {
    let (ready, gate) = (rig.arena.host()?, rig.arena.host()?);
    then_kernel(rig, ready, gate, rig.await_gate(Some(ready), gate, None))
}

/// As MPI programs do it: nothing waits in the stream, the CPU launches the kernel when it has seen the completion.
fn cpu_launches(rig: &Rig) -> Result<Gated> {
    let (gpu, stream, gate, over) = (rig.gpu, rig.work, rig.arena.host()?, rig.arena.host()?);
    let act = move || gpu.calls(stream, &mut [Call::Kernel(Kernel::Store(over))]);
    let gated = rig.gated(stream, None, gate, End::Word(over), Vec::new());
    Ok(Gated { act: Some(Box::new(act)), ..gated })
}

/// The stream is left to run dry after this many calls.
const PENDING: u64 = 50;
const WARM_UP: u64 = 10;

/// The CPU time of this many calls of each kind. What waits finds its gate open.
pub(super) fn calls(rig: &Rig, calls: u64, limit: Duration) -> Result<Vec<Figure>> {
    let (open, ready, scratch) = (rig.arena.cell()?, rig.arena.cell()?, rig.scratch);
    let gate = Word::Host(open);
    gate.store(1);
    let writes = |count| Call::MemOps(vec![write(scratch, 1); count]);
    let all = [
        ("trigger: write MemOp", writes(1)),
        ("trigger: batch of 8 write MemOps", writes(8)),
        ("trigger: batch of 64 write MemOps", writes(64)),
        ("trigger: kernel of one thread", Call::Kernel(Kernel::Store(scratch))),
        ("trigger: host function", Call::HostStore(ready)),
        ("wait: MemOp", Call::MemOps(vec![wait(gate)])),
        ("wait: kernel that polls", rig.await_gate(None, gate, None)),
        ("CPU: cuStreamQuery", Call::Query),
        ("CPU: cuStreamSynchronize, nothing to wait for", Call::Synchronize),
    ];
    let idle = || until(limit, "the stream did not end", || rig.gpu.idle(rig.work));
    let measure = |(name, mut call)| {
        let mut figure = Figure::new(name);
        let timed = (0..WARM_UP + calls).try_for_each(|i| {
            if i % PENDING == 0 {
                idle()?;
            }
            let start = Instant::now();
            rig.gpu.call(rig.work, &mut call)?;
            let time = start.elapsed();
            if i >= WARM_UP {
                figure.samples.add(time);
            }
            Ok(())
        });
        figure.end(timed);
        // Nothing is blocked here; a stream that does not end now never will.
        idle().map(|()| figure)
    };
    all.into_iter().map(measure).collect()
}
