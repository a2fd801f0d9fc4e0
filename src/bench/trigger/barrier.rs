//! What the GPU needs for a barrier between two writes, as before a doorbell.

use std::time::{Duration, Instant};

use super::gpu::{Batch, Op};
use super::lab::Lab;
use super::report::Figure;
use super::scene::until;
use super::watch::Watch;
use super::words::Word;
use crate::bench::Result;

/// Repetitions of a sample: so many batches of so many.
const BATCHES: usize = 20;
const IN_BATCH: usize = 10;
/// Repetitions, by whose number times are to be divided.
pub(super) const PARTS: u32 = 200;
const _: () = assert!(BATCHES * IN_BATCH == PARTS as usize);

/// Times each sequence so many times. The samples are of [`PARTS`] repetitions.
pub(super) fn measure(lab: &Lab, rounds: u64, watch: &Watch) -> Result<Vec<Figure>> {
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
                figure.samples.add(time(lab, gate, marks, &mut batch, watch)?);
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
fn time(lab: &Lab, gate: Word, marks: [Word; 2], batch: &mut Batch, watch: &Watch) -> Result<Duration> {
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
