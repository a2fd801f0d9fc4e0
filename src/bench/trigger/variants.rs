//! The ways to trigger and to wait on a stream.

use std::time::{Duration, Instant};

use gdasync::results::Result;

use super::Figure;
use super::gpu::{Call, HostWait, Kernel, Stream, wait, write, write_64, write_unordered};
use super::rig::{BusyWork, End, Gated, Rig, Variant, Watchdog, Word, until};

/// All ways to trigger, behind a kernel that waits for its gate.
pub(super) fn triggers(rig: &Rig) -> Vec<Variant> {
    let writes = |others: usize, unordered: bool| {
        let other = if unordered { write_unordered } else { write };
        let ops = move |over| vec![other(rig.scratch, 1); others].into_iter().chain([write(over, 1)]);
        trigger(rig, rig.arena.host(), |over| vec![Call::MemOps(ops(over).collect())])
    };
    let kernel = |over| vec![Call::Kernel(Kernel::Store(over))];
    let write_one = |over| vec![Call::MemOps(vec![write(over, 1)])];
    vec![
        Variant::new(
            "baseline: the kernel itself stores, gate in GPU memory",
            one_kernel(rig, rig.arena.gpu()),
        ),
        Variant::new(
            "baseline: the kernel itself stores, gate in host memory",
            one_kernel(rig, rig.arena.host()),
        ),
        Variant::new("write MemOp, host word", writes(0, false)),
        Variant::new(
            "write MemOp, GPU word read through the mapping",
            trigger(rig, rig.arena.gpu(), write_one),
        ),
        Variant::new("batch of 2 write MemOps", writes(1, false)),
        Variant::new("batch of 8 write MemOps", writes(7, false)),
        Variant::new("batch of 64 write MemOps", writes(63, false)),
        Variant::new("batch of 64 write MemOps, only the last with a barrier", writes(63, true)),
        Variant::new("kernel of one thread", trigger(rig, rig.arena.host(), kernel)),
        Variant::new("host function", host_function_triggers(rig)),
        Variant::new("event, polled by cuEventQuery", event_triggers(rig)),
        Variant::new("cuStreamSynchronize", synchronize(rig)),
        Variant::new("graph: gate kernel, write MemOp", trigger_in_graph(rig, write_one)),
        Variant::new("graph: gate kernel, kernel of one thread", trigger_in_graph(rig, kernel)),
    ]
}

/// A kernel that waits for its gate, in GPU memory, then these calls.
fn after_gate(rig: &Rig, end: End, calls: Vec<Call>) -> Result<Gated> {
    let (ready, gate) = (rig.arena.host()?, rig.arena.gpu()?);
    let calls = [vec![rig.await_gate(Some(ready), gate, None)], calls].concat();
    Ok(rig.gated(rig.work, Some(ready), gate, end, calls))
}

fn trigger(rig: &Rig, over: Result<Word>, calls: impl FnOnce(Word) -> Vec<Call>) -> Result<Gated> {
    let over = over?;
    after_gate(rig, End::Word(over), calls(over))
}

fn trigger_in_graph(rig: &Rig, calls: impl FnOnce(Word) -> Vec<Call>) -> Result<Gated> {
    let (ready, gate, over) = (rig.arena.host()?, rig.arena.gpu()?, rig.arena.host()?);
    let mut calls = [vec![rig.await_gate(Some(ready), gate, None)], calls(over)].concat();
    let graph = Call::Graph(rig.gpu.graph(rig.work, &mut calls)?);
    Ok(rig.gated(rig.work, Some(ready), gate, End::Word(over), vec![graph]))
}

fn host_function_triggers(rig: &Rig) -> Result<Gated> {
    let over = rig.arena.cell()?;
    after_gate(rig, End::Word(Word::Host(over)), vec![Call::HostStore(over)])
}

/// The CPU polls an event; then it stores the word that stands for a doorbell.
fn event_triggers(rig: &Rig) -> Result<Gated> {
    let (gpu, stream, doorbell, event) = (rig.gpu, rig.work, rig.arena.host()?, rig.gpu.event()?);
    let happened = move || {
        let happened = gpu.call(stream, &mut Call::QueryEvent(event))?;
        if happened {
            doorbell.store(1);
        }
        Ok(happened)
    };
    after_gate(rig, End::Ask(Box::new(happened)), vec![Call::Record(event)])
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

/// A kernel that polls the gate and goes on itself.
fn one_kernel(rig: &Rig, gate: Result<Word>) -> Result<Gated> {
    let (ready, gate, over) = (rig.arena.host()?, gate?, rig.arena.host()?);
    let kernel = rig.await_gate(Some(ready), gate, Some(over));
    Ok(rig.gated(rig.work, Some(ready), gate, End::Word(over), vec![kernel]))
}

/// All ways to wait, each followed by a kernel.
pub(super) fn wakes(rig: &Rig) -> Vec<Variant> {
    let (host, gpu) = (|| rig.arena.host(), || rig.arena.gpu());
    let nudge_call = |stream, call: Call, gate| nudged(rig, gate, stream, vec![call]);
    let writes = |stream, count| (stream, vec![Call::MemOps(vec![write(rig.scratch, 1)]); count]);
    let nudge_write = |gate, (stream, calls)| nudged(rig, gate, stream, calls);
    let record =
        rig.gpu.event().and_then(|event| nudge_call(rig.nudge, Call::Record(event), rig.arena.host()));
    let copy = gpu().and_then(|to| nudge_call(rig.nudge, Call::Copy { to, from: rig.scratch }, host()));
    let store = Call::Kernel(Kernel::Store(rig.scratch));
    vec![
        Variant::new("baseline: the CPU sees it and launches the kernel", cpu_launches(rig)),
        Variant::new("MemOp wait, host word", mem_op(rig, rig.work, host(), 1)),
        Variant::new("MemOp wait, GPU word", mem_op(rig, rig.work, gpu(), 1)),
        Variant::new("MemOp wait twice in a batch, host word", mem_op(rig, rig.work, host(), 2)),
        Variant::new("MemOp wait 8 times in a batch, host word", mem_op(rig, rig.work, host(), 8)),
        Variant::new("MemOp wait, stream of highest priority", mem_op(rig, rig.high, host(), 1)),
        Variant::new("MemOp wait, stream of lowest priority", mem_op(rig, rig.low, host(), 1)),
        Variant::new("MemOp wait in a graph, host word", wake_graph(rig)),
        Variant::new("MemOp wait beside a stream full of write MemOps", beside(rig, BusyWork::Writes)),
        Variant::new("MemOp wait beside a stream full of short kernels", beside(rig, BusyWork::Kernel)),
        Variant::new("kernel that polls a host word, then the kernel", kernel_polls(rig, host())),
        Variant::new("kernel that polls a GPU word, then the kernel", kernel_polls(rig, gpu())),
        Variant::new("the kernel itself polls a host word", one_kernel(rig, host())),
        Variant::new("the kernel itself polls a GPU word", one_kernel(rig, gpu())),
        Variant::new("host function that polls", host_function_polls(rig)),
        Variant::new("MemOp wait, host word, nudge: write MemOp", nudge_write(host(), writes(rig.nudge, 1))),
        Variant::new("MemOp wait, GPU word, nudge: write MemOp", nudge_write(gpu(), writes(rig.nudge, 1))),
        Variant::new(
            "MemOp wait, host word, two nudges: write MemOps",
            nudge_write(host(), writes(rig.nudge, 2)),
        ),
        Variant::new(
            "MemOp wait, GPU word, two nudges: write MemOps",
            nudge_write(gpu(), writes(rig.nudge, 2)),
        ),
        Variant::new(
            "MemOp wait, host word, nudge: write MemOp on a stream of highest priority",
            nudge_write(host(), writes(rig.nudge_high, 1)),
        ),
        Variant::new("MemOp wait, host word, nudge: kernel", nudge_call(rig.nudge, store, host())),
        Variant::new("MemOp wait, host word, nudge: cuEventRecord", record),
        Variant::new("MemOp wait, host word, nudge: cuMemcpyAsync of 4 bytes", copy),
        Variant::new(
            "MemOp wait, host word, nudge: cuStreamQuery of the blocked stream",
            nudge_call(rig.work, Call::Query, host()),
        ),
    ]
}

/// Calls that wait, then the kernel that says that it runs.
fn then_kernel(rig: &Rig, stream: Stream, ready: Word, gate: Word, wait: Vec<Call>) -> Result<Gated> {
    let over = rig.arena.host()?;
    let calls = [wait, vec![Call::Kernel(Kernel::Store(over))]].concat();
    Ok(rig.gated(stream, Some(ready), gate, End::Word(over), calls))
}

fn mem_op(rig: &Rig, stream: Stream, gate: Result<Word>, times: usize) -> Result<Gated> {
    let (ready, gate) = (rig.arena.host()?, gate?);
    let ops = [vec![write(ready, 1)], vec![wait(gate); times]].concat();
    then_kernel(rig, stream, ready, gate, vec![Call::MemOps(ops)])
}

/// After its store the CPU makes calls that attract the GPU's attention, on a stream that has nothing else to do.
fn nudged(rig: &Rig, gate: Result<Word>, stream: Stream, mut calls: Vec<Call>) -> Result<Gated> {
    let gpu = rig.gpu;
    let act = Box::new(move || gpu.calls(stream, &mut calls));
    Ok(Gated { act: Some(act), ..mem_op(rig, rig.work, gate, 1)? })
}

fn beside(rig: &Rig, work: BusyWork) -> Result<Gated> {
    let load = Some((rig.gpu, rig.beside(work)?));
    Ok(Gated { load, ..mem_op(rig, rig.work, rig.arena.host(), 1)? })
}

/// A graph of a wait and the kernel.
fn waiting_graph(rig: &Rig, ready: Word, gate: Word, over: Word) -> Result<Call> {
    let ops = Call::MemOps(vec![write(ready, 1), wait(gate)]);
    Ok(Call::Graph(rig.gpu.graph(rig.work, &mut [ops, Call::Kernel(Kernel::Store(over))])?))
}

fn wake_graph(rig: &Rig) -> Result<Gated> {
    let (ready, gate, over) = (rig.arena.host()?, rig.arena.host()?, rig.arena.host()?);
    let graph = waiting_graph(rig, ready, gate, over)?;
    Ok(rig.gated(rig.work, Some(ready), gate, End::Word(over), vec![graph]))
}

/// A kernel that polls the word, and is followed by one that goes on.
fn kernel_polls(rig: &Rig, gate: Result<Word>) -> Result<Gated> {
    let (ready, gate) = (rig.arena.host()?, gate?);
    then_kernel(rig, rig.work, ready, gate, vec![rig.await_gate(Some(ready), gate, None)])
}

fn host_function_polls(rig: &Rig) -> Result<Gated> {
    let (ready, gate) = (rig.arena.cell()?, rig.arena.cell()?);
    let wait = Call::HostAwait(Box::leak(Box::new(HostWait { ready, gate, limit: rig.give_up })));
    then_kernel(rig, rig.work, Word::Host(ready), Word::Host(gate), vec![wait])
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

/// The CPU time of this many calls of each kind.
pub(super) fn calls(rig: &Rig, calls: u64, watchdog: &Watchdog) -> Result<Vec<Figure>> {
    let idle = || until(watchdog.limit, "the stream did not end", || rig.gpu.idle(rig.work));
    let measure = |(name, call): (&'static str, Result<Call>)| {
        watchdog.begin(name, &[]);
        let mut figure = Figure::new(name);
        let timed = call.and_then(|mut call| {
            for i in 0..WARM_UP + calls {
                if i % PENDING == 0 {
                    idle()?;
                }
                let start = Instant::now();
                rig.gpu.call(rig.work, &mut call)?;
                let time = start.elapsed();
                if i >= WARM_UP {
                    figure.samples.add(time);
                }
                watchdog.progress();
            }
            Ok(())
        });
        figure.end(timed);
        // Nothing is blocked here; a stream that does not end now never will.
        idle().map(|()| figure)
    };
    all_calls(rig)?.into_iter().map(measure).collect()
}

/// Every call. What waits finds its gate open.
fn all_calls(rig: &Rig) -> Result<Vec<(&'static str, Result<Call>)>> {
    let (gpu, stream, scratch) = (rig.gpu, rig.work, rig.scratch);
    let (open, ready, to) = (rig.arena.cell()?, rig.arena.cell()?, rig.arena.gpu()?);
    let gate = Word::Host(open);
    gate.store(1);
    let event = gpu.event()?;
    gpu.call(stream, &mut Call::Record(event))?;
    let host_wait = Box::leak(Box::new(HostWait { ready, gate: open, limit: rig.give_up }));
    let writes = |count| Call::MemOps(vec![write(scratch, 1); count]);
    let write_graph = gpu.graph(stream, &mut [writes(1)]).map(Call::Graph);
    Ok(vec![
        ("trigger: write MemOp", Ok(writes(1))),
        ("trigger: batch of 2 write MemOps", Ok(writes(2))),
        ("trigger: batch of 8 write MemOps", Ok(writes(8))),
        ("trigger: batch of 64 write MemOps", Ok(writes(64))),
        ("trigger: kernel of one thread", Ok(Call::Kernel(Kernel::Store(scratch)))),
        ("trigger: host function", Ok(Call::HostStore(ready))),
        ("trigger: cuEventRecord", Ok(Call::Record(event))),
        ("trigger: graph of a write MemOp", write_graph),
        ("wait: MemOp", Ok(Call::MemOps(vec![wait(gate)]))),
        ("wait: batch of write and wait MemOp", Ok(Call::MemOps(vec![write(scratch, 1), wait(gate)]))),
        ("wait: kernel that polls", Ok(rig.await_gate(None, gate, None))),
        ("wait: host function that polls", Ok(Call::HostAwait(host_wait))),
        ("wait: cuStreamWaitEvent", Ok(Call::WaitEvent(event))),
        ("wait: graph of a MemOp wait and a kernel", waiting_graph(rig, scratch, gate, scratch)),
        ("nudge: cuMemcpyAsync of 4 bytes", Ok(Call::Copy { to, from: scratch })),
        ("CPU: cuStreamQuery", Ok(Call::Query)),
        ("CPU: cuEventQuery", Ok(Call::QueryEvent(event))),
        ("CPU: cuStreamSynchronize, nothing to wait for", Ok(Call::Synchronize)),
    ])
}

/// Registrations of memory: names, bytes, and whether a stream is blocked meanwhile.
const REGISTRATIONS: [([&str; 2], usize, bool); 4] = [
    (["cuMemHostRegister, 4 KiB, idle", "cuMemHostUnregister, 4 KiB, idle"], 4096, false),
    (["cuMemHostRegister, 1 MiB, idle", "cuMemHostUnregister, 1 MiB, idle"], 1 << 20, false),
    (
        ["cuMemHostRegister, 4 KiB, a stream blocked", "cuMemHostUnregister, 4 KiB, a stream blocked"],
        4096,
        true,
    ),
    (
        ["cuMemHostRegister, 1 MiB, a stream blocked", "cuMemHostUnregister, 1 MiB, a stream blocked"],
        1 << 20,
        true,
    ),
];

/// Times this many calls of each kind. A call that waited for the stream is not made again.
pub(super) fn registrations(rig: &Rig, calls: u64, watchdog: &Watchdog) -> Result<Vec<Figure>> {
    let words = [rig.arena.host()?, rig.arena.host()?];
    let mut all = Vec::new();
    for (names, len, blocks) in REGISTRATIONS {
        // Memory with its pages in place.
        let page = gdrcopy::host_page();
        let mut room = vec![1_u8; len + page];
        let skip = room.as_ptr().align_offset(page);
        let memory = &mut room[skip..skip + len];
        let mut figures = names.map(Figure::new);
        let mut is_good = true;
        for _ in 0..calls {
            let blocked = blocks.then_some(words);
            let registered = time_beside(rig, names[0], blocked, watchdog, || rig.gpu.register(memory))?;
            let unregistered = time_beside(rig, names[1], blocked, watchdog, || rig.gpu.unregister(memory))?;
            for (figure, time) in figures.iter_mut().zip([registered, unregistered]) {
                match time {
                    Ok(time) => figure.samples.add(time),
                    Err(error) => {
                        is_good = false;
                        figure.end(Err(error));
                    }
                }
            }
            if !is_good {
                break;
            }
        }
        all.extend(figures);
    }
    Ok(all)
}

/// The time of the call while a stream waits at the second of the words, or why there is none. The outer error is that of a
/// stream that stays blocked.
fn time_beside(
    rig: &Rig,
    name: &str,
    blocked: Option<[Word; 2]>,
    watchdog: &Watchdog,
    call: impl FnOnce() -> Result<()>,
) -> Result<Result<Duration>> {
    let (gpu, stream, limit) = (rig.gpu, rig.work, watchdog.limit);
    let gate = blocked.map(|[_, gate]| gate);
    watchdog.begin(name, gate.as_slice());
    if let Some([ready, gate]) = blocked {
        ready.clear()?;
        gate.clear()?;
        gpu.call(stream, &mut Call::MemOps(vec![write(ready, 1), wait(gate)]))?;
        until(limit, "the stream did not come to its wait", || ready.is_set())?;
        watchdog.progress();
    }
    let start = Instant::now();
    let called = call();
    let time = start.elapsed();
    let has_waited = watchdog.has_released();
    gate.iter().for_each(|gate| gate.store(1));
    watchdog.progress();
    until(limit, "the stream did not end", || gpu.idle(stream))?;
    Ok(called.and_then(|()| match has_waited {
        true => {
            let why = if gate.is_some() { ", when the blocked stream had been released" } else { "" };
            Err(format!("returned only {time:.1?} after the call{why}").into())
        }
        false => Ok(time),
    }))
}

/// Repetitions of a sample: this many batches of this many.
const BATCHES: usize = 20;
const IN_BATCH: usize = 10;
/// Repetitions of a sample: times are divided by it.
pub(super) const BARRIER_PARTS: u32 = 200;
const _: () = assert!(BATCHES * IN_BATCH == BARRIER_PARTS as usize);

/// Times each sequence this many times. The samples are of [`BARRIER_PARTS`] repetitions.
pub(super) fn barriers(rig: &Rig, rounds: u64, watchdog: &Watchdog) -> Result<Vec<Figure>> {
    let (gpu, stream, limit) = (rig.gpu, rig.work, watchdog.limit);
    let (first, second) = (rig.arena.host()?, rig.arena.host()?);
    let barrier = gdasync::gdrcopy::cuda::raw::layout::MemOp::barrier();
    let sequences = [
        ("write 32, write 64", vec![write(first, 1), write_64(second, 1)]),
        ("write 32, barrier, write 64", vec![write(first, 1), barrier, write_64(second, 1)]),
        ("unordered write 32, write 64", vec![write_unordered(first, 1), write_64(second, 1)]),
        (
            "unordered write 32, barrier, write 64",
            vec![write_unordered(first, 1), barrier, write_64(second, 1)],
        ),
    ];
    let (gate, marks) = (rig.arena.gpu()?, [rig.arena.host()?, rig.arena.host()?]);
    let measure = |(name, ops): (&'static str, Vec<_>)| {
        watchdog.begin(name, &[gate]);
        let mut figure = Figure::new(name);
        let batch = Call::MemOps(ops.iter().copied().cycle().take(ops.len() * IN_BATCH).collect());
        let [begin, end] = marks.map(|mark| vec![Call::MemOps(vec![write(mark, 1)])]);
        let mut calls = [vec![rig.await_gate(None, gate, None)], begin, vec![batch; BATCHES], end].concat();
        // The time between the marks, as the CPU sees them. All is enqueued before it begins.
        let timed = (0..rounds).try_for_each(|_| {
            [gate, marks[0], marks[1]].into_iter().try_for_each(Word::clear)?;
            gpu.calls(stream, &mut calls)?;
            gate.store(1);
            until(limit, "the writes did not begin", || marks[0].is_set())?;
            let start = Instant::now();
            until(limit, "the writes did not end", || marks[1].is_set())?;
            figure.samples.add(start.elapsed());
            until(limit, "the stream did not end", || gpu.idle(stream))?;
            watchdog.progress();
            Ok(())
        });
        gate.store(1);
        figure.end(timed);
        watchdog.progress();
        until(limit * 5, "the stream did not end", || gpu.idle(stream))?;
        Ok(figure)
    };
    sequences.into_iter().map(measure).collect()
}
