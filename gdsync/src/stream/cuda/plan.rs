//! What a submission becomes on a GPU: calls into the driver.
//!
//! Consumer indices tell the CPU what a stream has passed, and nobody waits for them: they are put off behind the
//! doorbells that follow a wait, until the next wait or the end of the submission.

use gdrcopy::cuda::raw::layout::MemOp;
use smallvec::SmallVec;

use super::lane::{self, LaneOp};
use crate::cuda::{Flush, Gpu};
use crate::error::{Error, Result};
use crate::memory::{Memory, Place};
use crate::stream::{Bell, Cond, Op, Ring};

/// The most operations of one call (`cuStreamBatchMemOp`: fewer than 256).
const MAX_MEMOPS: usize = 255;

/// A step on the GPU, before it is known what runs it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    Write {
        bits: u8,
        addr: u64,
        value: u64,
    },
    /// A consumer index, or the record of a send queue: a 32-bit write that nothing has to be ordered before.
    Index {
        addr: u64,
        value: u32,
    },
    Wait {
        bits: u8,
        addr: u64,
        value: u64,
        cond: Cond,
        is_cqe: bool,
        /// The word is in memory of this GPU.
        near: bool,
    },
    Barrier,
    Flush,
    /// The number of the submission; a kernel of a stream that has failed writes it to the next word.
    Mark {
        addr: u64,
        value: u64,
    },
    /// The host function at this place of the submission.
    HostFn(usize),
}

/// A call into the driver.
#[derive(Debug)]
pub(super) enum Call {
    /// `cuStreamBatchMemOp`.
    MemOps(SmallVec<[MemOp; 8]>),
    /// A kernel that runs these.
    Kernel(Program),
    /// `cuLaunchHostFunc` of the host function at this place of the submission.
    HostFn(usize),
}

pub(super) type Calls = SmallVec<[Call; 1]>;

/// What a kernel runs.
pub(super) type Program = SmallVec<[LaneOp; lane::SMALL]>;

/// The steps of a submission.
pub(super) type Steps = SmallVec<[Step; 6]>;

/// Consumer indices that are put off: where, and what.
type Indices = SmallVec<[(u64, u32); 2]>;

/// Adds what operations become, in steps: makes their words known to the GPU, and refuses waits that could never be released. Not
/// under a lock: to register memory, CUDA may take as long as streams wait, and the watchdog must release them.
pub(super) fn add_steps(steps: &mut Steps, gpu: &Gpu, ops: &[Op]) -> Result<()> {
    let mut indices = Indices::new();
    for (place, op) in ops.iter().enumerate() {
        match *op {
            Op::Trigger(ref source, ring) => {
                source.bell().map_or(Ok(()), |bell| trigger(steps, gpu, bell, ring))?;
            }
            Op::Await(ref source, n) => {
                settle(steps, &mut indices);
                let arrival = source.arrival(n);
                let (Place { addr, is_near }, index) = (arrival.word_on(gpu)?, arrival.index_on(gpu)?);
                let (cond, value) = (arrival.cond, arrival.value.into());
                steps.push(Step::Wait { bits: 32, addr, value, cond, is_cqe: true, near: is_near });
                if gpu.capabilities().flush == Flush::OnStream {
                    steps.push(Step::Flush);
                }
                // Of several for the same queue the last one says it all.
                indices.retain(|(other, _)| *other != index);
                indices.push((index, arrival.passed));
            }
            Op::Write32 { ref at, value } => {
                let addr = at.memory().gpu_addr(gpu)?;
                steps.push(Step::Write { bits: 32, addr, value: value.into() });
            }
            Op::Write64 { ref at, value } => {
                steps.push(Step::Write { bits: 64, addr: at.memory().gpu_addr(gpu)?, value });
            }
            Op::Wait32 { ref at, value, cond } => {
                settle(steps, &mut indices);
                steps.push(wait(gpu, op, at.memory(), (32, value.into(), cond))?);
            }
            Op::Wait64 { ref at, value, cond } => {
                settle(steps, &mut indices);
                steps.push(wait(gpu, op, at.memory(), (64, value, cond))?);
            }
            Op::Barrier => steps.push(Step::Barrier),
            Op::Flush => steps.push(match gpu.capabilities().flush {
                Flush::NotNeeded => Step::Barrier,
                Flush::OnStream => Step::Flush,
                Flush::OnCpu | Flush::Impossible => return Err(no_flush()),
            }),
            Op::HostFn(_) => {
                settle(steps, &mut indices);
                steps.push(Step::HostFn(place));
            }
        }
    }
    settle(steps, &mut indices);
    Ok(())
}

/// Writes the consumer indices that were put off.
#[inline(always)]
fn settle(steps: &mut Steps, indices: &mut Indices) {
    for (addr, value) in indices.drain(..) {
        steps.push(Step::Index { addr, value });
    }
}

/// A wait for a word of the application.
fn wait(gpu: &Gpu, op: &Op, word: &Memory, (bits, value, cond): (u8, u64, Cond)) -> Result<Step> {
    if op.is_endless() {
        return Err(Error::invalid("wait", format!("{op:?}"), "a condition that some word satisfies"));
    }
    let Place { addr, is_near } = word.place(gpu)?;
    Ok(Step::Wait { bits, addr, value, cond, is_cqe: false, near: is_near })
}

/// Record, barrier, doorbell; where the record may lag, the doorbell comes first.
fn trigger(steps: &mut Steps, gpu: &Gpu, bell: &Bell, ring: Ring) -> Result<()> {
    let [record, doorbell] = &bell.found;
    let record = record.place(bell.record.memory(), gpu)?.addr;
    let doorbell = doorbell.place(bell.doorbell.memory(), gpu)?.addr;
    let doorbell = Step::Write { bits: 64, addr: doorbell, value: ring.doorbell };
    if bell.record_may_lag {
        steps.push(doorbell);
        steps.push(Step::Write { bits: 32, addr: record, value: ring.record.into() });
    } else {
        // Only the doorbell is ordered, by the barrier.
        steps.push(Step::Index { addr: record, value: ring.record });
        steps.push(Step::Barrier);
        steps.push(doorbell);
    }
    Ok(())
}

/// Adds what operations become to `calls`; not under a lock, as [`add_steps`].
pub(super) fn plan(calls: &mut Calls, gpu: &Gpu, ops: &[Op], by_kernel: bool) -> Result<()> {
    let mut steps = Steps::new();
    add_steps(&mut steps, gpu, ops)?;
    add_calls(calls, &steps, by_kernel);
    Ok(())
}

/// Adds what steps become to `calls`.
pub(super) fn add_calls(calls: &mut Calls, steps: &[Step], by_kernel: bool) {
    for part in parts(steps, by_kernel) {
        calls.push(part.kind(by_kernel));
        calls.last_mut().into_iter().for_each(|call| part.fill(call));
    }
}

/// What operations become as a step of a kernel of the application; not under a lock, as [`add_steps`].
pub(super) fn program(gpu: &Gpu, ops: &[Op]) -> Result<Program> {
    let mut steps = Steps::new();
    add_steps(&mut steps, gpu, ops)?;
    let alone = |step: &Step| matches!(step, Step::Flush | Step::HostFn(_));
    if steps.iter().any(alone) {
        return Err(Error::Unsupported {
            what: "a host function, or a flush that this GPU leaves to its front end, in a step of a kernel",
            by: "kernels, which cannot do either",
            fix: "submit it to the stream before or after the kernel",
        });
    }
    Ok(lane_ops(&steps).collect())
}

fn no_flush() -> Error {
    Error::Unsupported {
        what: "a flush of inbound writes on a stream",
        by: "this GPU or driver",
        fix: "let the CPU see the completion, then call Memory::flush",
    }
}

/// What becomes one call.
#[derive(Clone, Copy)]
pub(super) enum Part<'a> {
    Steps(&'a [Step]),
    HostFn(usize),
}

/// Splits steps into calls, as few as the limits allow.
#[inline(always)]
pub(super) fn parts(steps: &[Step], by_kernel: bool) -> SmallVec<[Part<'_>; 2]> {
    let most = if by_kernel { lane::LARGE } else { MAX_MEMOPS };
    let mut parts = SmallVec::new();
    let mut rest = steps;
    while let Some(first) = rest.first() {
        if let Step::HostFn(place) = *first {
            parts.push(Part::HostFn(place));
            rest = &rest[1..];
            continue;
        }
        let end = rest.iter().position(|step| matches!(step, Step::HostFn(_))).unwrap_or(rest.len());
        let (part, behind) = rest.split_at(end_of(&rest[..end], most));
        parts.push(Part::Steps(part));
        rest = behind;
    }
    parts
}

impl Part<'_> {
    /// The call that it becomes, empty: to be filled where it is, as calls are large.
    #[inline(always)]
    pub(super) fn kind(&self, by_kernel: bool) -> Call {
        match *self {
            Part::HostFn(place) => Call::HostFn(place),
            // A kernel cannot do what only the front end can.
            Part::Steps(steps) if by_kernel && !steps.iter().any(|step| matches!(step, Step::Flush)) => {
                Call::Kernel(SmallVec::new())
            }
            Part::Steps(_) => Call::MemOps(SmallVec::new()),
        }
    }

    #[inline(always)]
    pub(super) fn fill(&self, call: &mut Call) {
        let Part::Steps(steps) = *self else { return };
        match call {
            Call::Kernel(program) => {
                program.reserve(steps.len());
                lane_ops(steps).for_each(|op| program.push(op));
            }
            Call::MemOps(memops) => {
                memops.reserve(steps.len());
                needed(steps).for_each(|step| memops.push(memop(step)));
            }
            Call::HostFn(_) => {}
        }
    }
}

/// What a kernel does for steps.
fn lane_ops(steps: &[Step]) -> impl Iterator<Item = LaneOp> {
    needed(steps).map(LaneOp::from)
}

/// The steps but for barriers that are too much.
fn needed(steps: &[Step]) -> impl Iterator<Item = &Step> {
    steps.iter().enumerate().filter(|&(at, _)| !is_extra(steps, at)).map(|(_, step)| step)
}

/// Whether a barrier is too much: every write of the front end, and of the lane, has a fence before it (cuda.h,
/// CU_STREAM_WRITE_VALUE_DEFAULT), and a barrier of its own takes 0.6 us on an H200.
fn is_extra(steps: &[Step], at: usize) -> bool {
    matches!(steps[at], Step::Barrier)
        && matches!(steps.get(at + 1), Some(Step::Write { .. } | Step::Mark { .. }))
}

/// How many of the first steps fit in a call, without tearing record, barrier and doorbell apart.
fn end_of(steps: &[Step], most: usize) -> usize {
    if steps.len() <= most {
        return steps.len();
    }
    let tears = |at: usize| steps[at] == Step::Barrier || steps[at - 1] == Step::Barrier;
    (1..=most).rev().find(|&at| !tears(at)).unwrap_or(most)
}

pub(super) fn memop(step: &Step) -> MemOp {
    match *step {
        Step::Write { bits, addr, value } => {
            MemOp::word(if bits == 32 { MemOp::WRITE_32 } else { MemOp::WRITE_64 }, addr, value, 0)
        }
        Step::Index { addr, value } => MemOp::word(MemOp::WRITE_32, addr, value.into(), 0),
        Step::Mark { addr, value } => MemOp::word(MemOp::WRITE_64, addr, value, 0),
        Step::Wait { bits, addr, value, cond, .. } => MemOp::word(
            if bits == 32 { MemOp::WAIT_32 } else { MemOp::WAIT_64 },
            addr,
            value,
            cond.code().into(),
        ),
        // A host function is a call of its own.
        Step::Barrier | Step::HostFn(_) => MemOp::barrier(),
        Step::Flush => MemOp { operation: MemOp::FLUSH, ..MemOp::default() },
    }
}

#[cfg(test)]
mod tests {
    use gdrcopy::standin::driver;

    use super::*;

    /// `INDEX` of `lane.cu` has no fence before it, unlike `WRITE_32`.
    #[test]
    fn writes_of_the_application_are_ordered_also_before_a_barrier() {
        let _control = driver::Control::take();
        let gpu = Gpu::open_with(driver::api(), 0, None).unwrap();
        let words = Memory::alloc(64).unwrap();
        let (narrow, wide) = (words.word32(0).unwrap(), words.word64(8).unwrap());
        let write = || Op::Write32 { at: narrow.clone(), value: 1 };
        let ops = [write(), write(), Op::Barrier, Op::Write64 { at: wide, value: 2 }];
        let mut calls = Calls::new();
        plan(&mut calls, &gpu, &ops, true).unwrap();
        let [Call::Kernel(program)] = &calls[..] else { panic!("{calls:?}") };
        assert_eq!(program.iter().map(|op| op.kind).collect::<Vec<_>>(), [0, 0, 1]);
    }
}
