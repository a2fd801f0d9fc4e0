//! The ways to trigger and to wait on a stream.

use std::time::{Duration, Instant};

use gdasync::results::Result;

use super::Figure;
use super::gpu::{Batch, Graph, HostFunction, HostWait, Kernel, Op, Stream};
use super::rig::{BusyWork, Lab, Scene, See, Step, Variant, Watch, Word, until};

/// All ways.
pub(super) fn triggers(lab: &Lab) -> Vec<Variant> {
    vec![
        Variant::new(
            "baseline: the kernel itself stores, gate in GPU memory",
            kernel_stores(lab, lab.arena.gpu()),
        ),
        Variant::new(
            "baseline: the kernel itself stores, gate in host memory",
            kernel_stores(lab, lab.arena.host()),
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
        Variant::new("kernel of one thread", trigger_by_kernel(lab)),
        Variant::new("host function", trigger_by_host_function(lab)),
        Variant::new("event, polled by cuEventQuery", trigger_by_event(lab)),
        Variant::new("cuStreamSynchronize", synchronize(lab)),
        Variant::new("graph: gate kernel, write MemOp", trigger_graph(lab, true)),
        Variant::new("graph: gate kernel, kernel of one thread", trigger_graph(lab, false)),
    ]
}

/// A kernel that waits for its gate, in GPU memory, then what triggers.
pub(super) fn after_gate(lab: &Lab, see: See, mut trigger: Step) -> Result<Scene> {
    let (gpu, stream, ready, gate) = (lab.gpu, lab.work, lab.arena.host()?, lab.arena.gpu()?);
    let kernel = lab.await_gate(Some(ready), gate, None);
    let enqueue = Box::new(move || {
        gpu.launch(stream, kernel)?;
        trigger()
    });
    Ok(lab.scene(stream, Some(ready), gate, see, enqueue))
}

pub(super) fn kernel_stores(lab: &Lab, gate: Result<Word>) -> Result<Scene> {
    let (gpu, stream, ready, gate, over) = (lab.gpu, lab.work, lab.arena.host()?, gate?, lab.arena.host()?);
    let kernel = lab.await_gate(Some(ready), gate, Some(over));
    let enqueue = Box::new(move || gpu.launch(stream, kernel));
    Ok(lab.scene(stream, Some(ready), gate, See::Word(over), enqueue))
}

/// Write MemOps, the last of which triggers; the others are made by `op`.
pub(super) fn writes(lab: &Lab, over: Result<Word>, count: usize, op: fn(Word, u32) -> Op) -> Result<Scene> {
    let (gpu, stream, over) = (lab.gpu, lab.work, over?);
    let others = std::iter::repeat_n(op(lab.scratch, 1), count - 1);
    let mut batch = Batch::new(others.chain([Op::Write(over, 1)]));
    after_gate(lab, See::Word(over), Box::new(move || gpu.batch(stream, &mut batch)))
}

pub(super) fn trigger_by_kernel(lab: &Lab) -> Result<Scene> {
    let (gpu, stream, over) = (lab.gpu, lab.work, lab.arena.host()?);
    let trigger = Box::new(move || gpu.launch(stream, Kernel::Store(over)));
    after_gate(lab, See::Word(over), trigger)
}

pub(super) fn trigger_by_host_function(lab: &Lab) -> Result<Scene> {
    let (gpu, stream, over) = (lab.gpu, lab.work, lab.arena.cell()?);
    let trigger = Box::new(move || gpu.host_function(stream, HostFunction::Store(over)));
    after_gate(lab, See::Word(Word::Host(over)), trigger)
}

/// The CPU polls an event; then it stores the word that stands for a doorbell.
pub(super) fn trigger_by_event(lab: &Lab) -> Result<Scene> {
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
pub(super) fn synchronize(lab: &Lab) -> Result<Scene> {
    let (gpu, stream, doorbell) = (lab.gpu, lab.work, lab.arena.host()?);
    let act = move || {
        gpu.synchronize(stream)?;
        doorbell.store(1);
        Ok(())
    };
    after_gate(lab, See::Call(Box::new(act)), Box::new(|| Ok(())))
}

pub(super) fn trigger_graph(lab: &Lab, by_mem_op: bool) -> Result<Scene> {
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

/// All ways.
pub(super) fn wakes(lab: &Lab) -> Vec<Variant> {
    let mut all = vec![
        Variant::new("baseline: the CPU sees it and launches the kernel", cpu_launches(lab)),
        Variant::new("MemOp wait, host word", mem_op(lab, lab.work, lab.arena.host(), 1)),
        Variant::new("MemOp wait, GPU word", mem_op(lab, lab.work, lab.arena.gpu(), 1)),
        Variant::new("MemOp wait twice in a batch, host word", mem_op(lab, lab.work, lab.arena.host(), 2)),
        Variant::new("MemOp wait 8 times in a batch, host word", mem_op(lab, lab.work, lab.arena.host(), 8)),
        Variant::new("MemOp wait, stream of highest priority", mem_op(lab, lab.high, lab.arena.host(), 1)),
        Variant::new("MemOp wait, stream of lowest priority", mem_op(lab, lab.low, lab.arena.host(), 1)),
        Variant::new("MemOp wait in a graph, host word", wake_graph(lab)),
        Variant::new("MemOp wait beside a stream full of write MemOps", beside(lab, BusyWork::Writes)),
        Variant::new("MemOp wait beside a stream full of short kernels", beside(lab, BusyWork::Kernel)),
        Variant::new("kernel that polls a host word, then the kernel", polls(lab, lab.arena.host(), false)),
        Variant::new("kernel that polls a GPU word, then the kernel", polls(lab, lab.arena.gpu(), false)),
        Variant::new("the kernel itself polls a host word", polls(lab, lab.arena.host(), true)),
        Variant::new("the kernel itself polls a GPU word", polls(lab, lab.arena.gpu(), true)),
        Variant::new("host function that polls", host_function_polls(lab)),
    ];
    for (name, on_gpu, nudge) in [
        ("MemOp wait, host word, nudge: write MemOp", false, Nudge::Write(lab.nudge, 1)),
        ("MemOp wait, GPU word, nudge: write MemOp", true, Nudge::Write(lab.nudge, 1)),
        ("MemOp wait, host word, two nudges: write MemOps", false, Nudge::Write(lab.nudge, 2)),
        ("MemOp wait, GPU word, two nudges: write MemOps", true, Nudge::Write(lab.nudge, 2)),
        (
            "MemOp wait, host word, nudge: write MemOp on a stream of highest priority",
            false,
            Nudge::Write(lab.nudge_high, 1),
        ),
        ("MemOp wait, host word, nudge: kernel", false, Nudge::Kernel),
        ("MemOp wait, host word, nudge: cuEventRecord", false, Nudge::Event),
        ("MemOp wait, host word, nudge: cuMemcpyAsync of 4 bytes", false, Nudge::Copy),
        ("MemOp wait, host word, nudge: cuStreamQuery of the blocked stream", false, Nudge::Query),
    ] {
        let gate = if on_gpu { lab.arena.gpu() } else { lab.arena.host() };
        all.push(Variant::new(name, nudged(lab, gate, nudge)));
    }
    all
}

/// What the CPU does after its store to attract the GPU's attention, on a stream that has nothing to do otherwise.
pub(super) enum Nudge {
    /// So many batches of one write.
    Write(Stream, u32),
    Kernel,
    Event,
    Copy,
    Query,
}

/// A wait, then the kernel that says that it runs.
pub(super) fn then_kernel(
    lab: &Lab,
    stream: Stream,
    ready: Word,
    gate: Word,
    mut wait: Step,
) -> Result<Scene> {
    let (gpu, over) = (lab.gpu, lab.arena.host()?);
    let enqueue = Box::new(move || {
        wait()?;
        gpu.launch(stream, Kernel::Store(over))
    });
    Ok(lab.scene(stream, Some(ready), gate, See::Word(over), enqueue))
}

/// A MemOp wait so many times.
pub(super) fn mem_op(lab: &Lab, stream: Stream, gate: Result<Word>, times: usize) -> Result<Scene> {
    let (gpu, ready, gate) = (lab.gpu, lab.arena.host()?, gate?);
    let waits = std::iter::repeat_n(Op::Wait(gate), times);
    let mut batch = Batch::new([Op::Write(ready, 1)].into_iter().chain(waits));
    then_kernel(lab, stream, ready, gate, Box::new(move || gpu.batch(stream, &mut batch)))
}

pub(super) fn nudged(lab: &Lab, gate: Result<Word>, nudge: Nudge) -> Result<Scene> {
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

pub(super) fn beside(lab: &Lab, work: BusyWork) -> Result<Scene> {
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

pub(super) fn wake_graph(lab: &Lab) -> Result<Scene> {
    let (gpu, stream) = (lab.gpu, lab.work);
    let (ready, gate, over) = (lab.arena.host()?, lab.arena.host()?, lab.arena.host()?);
    let graph = waiting_graph(lab, ready, gate, over)?;
    let enqueue = Box::new(move || gpu.launch_graph(stream, graph));
    Ok(lab.scene(stream, Some(ready), gate, See::Word(over), enqueue))
}

/// A kernel that polls the word, and either goes on itself or is followed by one that does.
pub(super) fn polls(lab: &Lab, gate: Result<Word>, itself: bool) -> Result<Scene> {
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

pub(super) fn host_function_polls(lab: &Lab) -> Result<Scene> {
    let (gpu, stream, ready, gate) = (lab.gpu, lab.work, lab.arena.cell()?, lab.arena.cell()?);
    let wait: &'static HostWait = Box::leak(Box::new(HostWait { ready, gate, limit: lab.give_up }));
    let enqueue = Box::new(move || gpu.host_function(stream, HostFunction::Await(wait)));
    then_kernel(lab, stream, Word::Host(ready), Word::Host(gate), enqueue)
}

/// As MPI programs do it: nothing waits in the stream, the CPU launches the kernel when it has seen the completion.
pub(super) fn cpu_launches(lab: &Lab) -> Result<Scene> {
    let (gpu, stream, gate, over) = (lab.gpu, lab.work, lab.arena.host()?, lab.arena.host()?);
    let act: Step = Box::new(move || gpu.launch(stream, Kernel::Store(over)));
    let scene = lab.scene(stream, None, gate, See::Word(over), Box::new(|| Ok(())));
    Ok(Scene { act: Some(act), ..scene })
}

/// The stream is left to run dry after so many calls.
pub(super) const PENDING: u64 = 50;
/// Calls that do not count.
pub(super) const WARM_UP: u64 = 10;

/// Times so many calls of each.
pub(super) fn calls(lab: &Lab, calls: u64, watch: &Watch) -> Result<Vec<Figure>> {
    let measure_one = |(name, call): (&'static str, Result<Step>)| {
        watch.begin(name, &[]);
        let mut figure = Figure::new(name);
        let timed = call.and_then(|mut call| time_calls(lab, &mut call, calls, watch, &mut figure));
        figure.end(timed);
        // Nothing is blocked here; a stream that does not end now never will.
        until(watch.limit(), "the stream did not end", || lab.gpu.idle(lab.work))?;
        Ok(figure)
    };
    all_calls(lab)?.into_iter().map(measure_one).collect()
}

pub(super) fn time_calls(
    lab: &Lab,
    call: &mut Step,
    calls: u64,
    watch: &Watch,
    figure: &mut Figure,
) -> Result<()> {
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
pub(super) fn all_calls(lab: &Lab) -> Result<Vec<(&'static str, Result<Step>)>> {
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
        ("wait: graph of a MemOp wait and a kernel", graph(waiting_graph(lab, scratch, gate, scratch))),
        ("nudge: cuMemcpyAsync of 4 bytes", Ok(Box::new(move || gpu.copy(stream, copied, scratch)))),
        ("CPU: cuStreamQuery", Ok(Box::new(move || gpu.idle(stream).map(drop)))),
        ("CPU: cuEventQuery", Ok(Box::new(move || gpu.happened(event).map(drop)))),
        ("CPU: cuStreamSynchronize, nothing to wait for", Ok(Box::new(move || gpu.synchronize(stream)))),
    ])
}

/// Bytes of the small registration.
pub(super) const SMALL: usize = 4096;

/// A stream that a wait blocks, or not.
pub(super) struct Blocker<'a> {
    pub(super) lab: &'a Lab,
    pub(super) watch: &'a Watch,
    pub(super) words: [Word; 2],
    pub(super) blocks: bool,
}

/// Times so many calls of each kind, first with no stream blocked.
pub(super) fn registrations(lab: &Lab, calls: u64, watch: &Watch) -> Result<Vec<Figure>> {
    let words = [lab.arena.host()?, lab.arena.host()?];
    let mut figures = Vec::new();
    for (blocks, names) in [
        (
            false,
            [
                ["cuMemHostRegister, 4 KiB, idle", "cuMemHostUnregister, 4 KiB, idle"],
                ["cuMemHostRegister, 1 MiB, idle", "cuMemHostUnregister, 1 MiB, idle"],
            ],
        ),
        (
            true,
            [
                [
                    "cuMemHostRegister, 4 KiB, a stream blocked",
                    "cuMemHostUnregister, 4 KiB, a stream blocked",
                ],
                [
                    "cuMemHostRegister, 1 MiB, a stream blocked",
                    "cuMemHostUnregister, 1 MiB, a stream blocked",
                ],
            ],
        ),
    ] {
        let blocker = Blocker { lab, watch, words, blocks };
        for (names, len) in names.into_iter().zip([SMALL, 1 << 20]) {
            figures.extend(blocker.pair(names, len, calls)?);
        }
    }
    Ok(figures)
}

impl Blocker<'_> {
    /// Registers and unregisters memory of so many bytes. A call that waited for the stream is not made again.
    pub(super) fn pair(&self, names: [&'static str; 2], len: usize, calls: u64) -> Result<[Figure; 2]> {
        // Memory with its pages in place.
        let page = gdrcopy::host_page();
        let mut room = vec![1_u8; len + page];
        let skip = room.as_ptr().align_offset(page);
        let memory = &mut room[skip..skip + len];
        let mut figures = names.map(Figure::new);
        for _ in 0..calls {
            let registered = self.time(names[0], || self.lab.gpu.register(memory))?;
            let unregistered = self.time(names[1], || self.lab.gpu.unregister(memory))?;
            let mut good = true;
            for (figure, time) in figures.iter_mut().zip([registered, unregistered]) {
                match time {
                    Ok(time) => figure.samples.add(time),
                    Err(error) => {
                        good = false;
                        figure.end(Err(error));
                    }
                }
            }
            if !good {
                break;
            }
        }
        Ok(figures)
    }

    /// The time of the call, or why there is none. The outer error is that of a stream which stays blocked.
    pub(super) fn time(&self, name: &str, call: impl FnOnce() -> Result<()>) -> Result<Result<Duration>> {
        let (gpu, stream, limit) = (self.lab.gpu, self.lab.work, self.watch.limit());
        let [ready, gate] = self.words;
        self.watch.begin(name, &[gate]);
        if self.blocks {
            ready.clear()?;
            gate.clear()?;
            gpu.batch(stream, &mut Batch::new([Op::Write(ready, 1), Op::Wait(gate)]))?;
            until(limit, "the stream did not come to its wait", || Ok(ready.load() != 0))?;
            self.watch.moved();
        }
        let start = Instant::now();
        let called = call();
        let time = start.elapsed();
        let waited = self.watch.released();
        gate.store(1);
        self.watch.moved();
        until(limit, "the stream did not end", || gpu.idle(stream))?;
        Ok(match called {
            Ok(()) if waited => {
                let why = if self.blocks { ", when the blocked stream had been released" } else { "" };
                Err(format!("returned only {time:.1?} after the call{why}").into())
            }
            Ok(()) => Ok(time),
            Err(error) => Err(error),
        })
    }
}

/// Repetitions of a sample: so many batches of so many.
pub(super) const BATCHES: usize = 20;
pub(super) const IN_BATCH: usize = 10;
/// Repetitions, by whose number times are to be divided.
pub(super) const BARRIER_PARTS: u32 = 200;
const _: () = assert!(BATCHES * IN_BATCH == BARRIER_PARTS as usize);

/// Times each sequence so many times. The samples are of [`BARRIER_PARTS`] repetitions.
pub(super) fn barriers(lab: &Lab, rounds: u64, watch: &Watch) -> Result<Vec<Figure>> {
    let (first, second) = (lab.arena.host()?, lab.arena.host()?);
    let sequences = [
        ("write 32, write 64", vec![Op::Write(first, 1), Op::Write64(second, 1)]),
        ("write 32, barrier, write 64", vec![Op::Write(first, 1), Op::Barrier, Op::Write64(second, 1)]),
        ("unordered write 32, write 64", vec![Op::WriteUnordered(first, 1), Op::Write64(second, 1)]),
        (
            "unordered write 32, barrier, write 64",
            vec![Op::WriteUnordered(first, 1), Op::Barrier, Op::Write64(second, 1)],
        ),
    ];
    let (gate, marks) = (lab.arena.gpu()?, [lab.arena.host()?, lab.arena.host()?]);
    let measure_one = |(name, ops): (&'static str, Vec<Op>)| {
        watch.begin(name, &[gate]);
        let mut figure = Figure::new(name);
        let mut batch = Batch::new(ops.iter().copied().cycle().take(ops.len() * IN_BATCH));
        let mut time_all = || {
            for _ in 0..rounds {
                figure.samples.add(time_barriers(lab, gate, marks, &mut batch, watch)?);
            }
            Ok(())
        };
        let timed = time_all();
        gate.store(1);
        figure.end(timed);
        watch.moved();
        until(watch.limit() * 5, "the stream did not end", || lab.gpu.idle(lab.work))?;
        Ok(figure)
    };
    sequences.into_iter().map(measure_one).collect()
}

/// The time between the first and the last mark, as the CPU sees them. All is enqueued before it begins.
pub(super) fn time_barriers(
    lab: &Lab,
    gate: Word,
    marks: [Word; 2],
    batch: &mut Batch,
    watch: &Watch,
) -> Result<Duration> {
    let (gpu, stream, limit) = (lab.gpu, lab.work, watch.limit());
    for word in [gate, marks[0], marks[1]] {
        word.clear()?;
    }
    let mut mark = marks.map(|word| Batch::new([Op::Write(word, 1)]));
    gpu.launch(stream, lab.await_gate(None, gate, None))?;
    gpu.batch(stream, &mut mark[0])?;
    (0..BATCHES).try_for_each(|_| gpu.batch(stream, batch))?;
    gpu.batch(stream, &mut mark[1])?;
    gate.store(1);
    until(limit, "the writes did not begin", || Ok(marks[0].load() != 0))?;
    let start = Instant::now();
    until(limit, "the writes did not end", || Ok(marks[1].load() != 0))?;
    let time = start.elapsed();
    until(limit, "the stream did not end", || gpu.idle(stream))?;
    watch.moved();
    Ok(time)
}
