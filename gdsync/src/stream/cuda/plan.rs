//! What a submission becomes on a GPU: calls into the driver.
//!
//! Consumer indices tell the CPU what a stream has passed, and nobody waits for them: they are put off behind the
//! doorbells that follow a wait, until the next wait or the end of the submission.

use std::ops::Range;

use gdrcopy::cuda::raw::layout::MemOp;
use smallvec::SmallVec;

use super::lane::{self, LaneOp};
use crate::cuda::{Flush, Gpu};
use crate::error::{Error, Result};
use crate::memory::{Memory, Word64};
use crate::stream::{Cond, Op};

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
}

/// A call into the driver.
#[derive(Debug)]
pub(super) enum Call {
    /// `cuStreamBatchMemOp`.
    MemOps(SmallVec<[MemOp; 8]>),
    /// A kernel that runs these.
    Kernel(SmallVec<[LaneOp; lane::SMALL]>),
    /// `cuLaunchHostFunc` of the host function at this place of the submission.
    HostFn(usize),
}

pub(super) type Calls = SmallVec<[Call; 1]>;

/// Makes the words of operations known to the GPU, and refuses waits that could never be released. Not under a lock: to
/// register memory, CUDA may take as long as streams wait, and the watchdog must release them.
pub(super) fn check(gpu: &Gpu, ops: &[Op]) -> Result<()> {
    ops.iter().try_for_each(|op| {
        if op.is_endless() {
            return Err(Error::invalid("wait", format!("{op:?}"), "a condition that some word satisfies"));
        }
        op.memory().map_or(Ok(()), |memory| memory.gpu_addr(gpu).map(drop))
    })
}

/// Adds what operations become to `calls`. `mark` is written at the end.
pub(super) fn plan(
    calls: &mut Calls,
    gpu: &Gpu,
    ops: &[Op],
    mark: Option<(&Word64, u64)>,
    by_kernel: bool,
) -> Result<()> {
    let mut steps: SmallVec<[Step; 12]> = SmallVec::new();
    let mut indices: SmallVec<[Step; 2]> = SmallVec::new();
    let mut after_cqe_wait = false;
    for (place, op) in ops.iter().enumerate() {
        let was_cqe_wait = std::mem::take(&mut after_cqe_wait);
        match op {
            Op::Write32 { at, value } => {
                let addr = at.memory().gpu_addr(gpu)?;
                if was_cqe_wait {
                    // Of several for the same queue the last one says it all.
                    indices
                        .retain(|known| !matches!(known, Step::Index { addr: other, .. } if *other == addr));
                    indices.push(Step::Index { addr, value: *value });
                } else if let [Op::Barrier, Op::Write64 { .. }, Op::Signal(_), ..] = ops[place + 1..] {
                    // The record of a send queue: only the doorbell behind it is ordered, by the barrier.
                    steps.push(Step::Index { addr, value: *value });
                } else {
                    steps.push(Step::Write { bits: 32, addr, value: (*value).into() });
                }
            }
            Op::Write64 { at, value } => {
                steps.push(Step::Write { bits: 64, addr: at.memory().gpu_addr(gpu)?, value: *value });
            }
            Op::Wait32 { at, value, cond, source } => {
                steps.append(&mut indices);
                let (addr, is_cqe, near) =
                    (at.memory().gpu_addr(gpu)?, source.is_some(), is_near(at.memory(), gpu));
                steps.push(Step::Wait { bits: 32, addr, value: (*value).into(), cond: *cond, is_cqe, near });
                if is_cqe && gpu.capabilities().flush == Flush::OnStream {
                    steps.push(Step::Flush);
                }
                after_cqe_wait = is_cqe;
            }
            Op::Wait64 { at, value, cond, .. } => {
                steps.append(&mut indices);
                let addr = at.memory().gpu_addr(gpu)?;
                steps.push(Step::Wait {
                    bits: 64,
                    addr,
                    value: *value,
                    cond: *cond,
                    is_cqe: false,
                    near: is_near(at.memory(), gpu),
                });
            }
            Op::Barrier => steps.push(Step::Barrier),
            Op::Flush => steps.push(match gpu.capabilities().flush {
                Flush::NotNeeded => Step::Barrier,
                Flush::OnStream => Step::Flush,
                Flush::OnCpu | Flush::Impossible => return Err(no_flush()),
            }),
            Op::Signal(_) => {}
            Op::HostFn(_) => {
                steps.append(&mut indices);
                close(calls, &steps, by_kernel);
                steps.clear();
                calls.push(Call::HostFn(place));
            }
        }
    }
    steps.append(&mut indices);
    if let Some((word, value)) = mark {
        steps.push(Step::Mark { addr: word.memory().gpu_addr(gpu)?, value });
    }
    close(calls, &steps, by_kernel);
    Ok(())
}

fn is_near(memory: &Memory, gpu: &Gpu) -> bool {
    memory.gpu().is_some_and(|home| home.ordinal() == gpu.ordinal())
}

fn no_flush() -> Error {
    Error::Unsupported {
        what: "a flush of inbound writes on a stream",
        by: "this GPU or driver",
        fix: "let the CPU see the completion, then call Memory::flush",
    }
}

/// Turns steps into calls, as few as the limits allow.
fn close(calls: &mut Calls, steps: &[Step], by_kernel: bool) {
    let mut rest = 0..steps.len();
    while !rest.is_empty() {
        let part = part_of(steps, rest.clone(), if by_kernel { lane::LARGE } else { MAX_MEMOPS });
        rest.start = part.end;
        let part = &steps[part];
        // Every write of the front end, and of the lane, has a fence before it (cuda.h, CU_STREAM_WRITE_VALUE_DEFAULT), and
        // a barrier of its own takes 0.6 us on an H200.
        let is_extra = |at: usize| {
            part[at] == Step::Barrier
                && matches!(part.get(at + 1), Some(Step::Write { .. } | Step::Mark { .. }))
        };
        let part = (0..part.len()).filter(|&at| !is_extra(at)).map(|at| part[at]);
        // A kernel cannot do what only the front end can.
        let flushes = part.clone().any(|step| step == Step::Flush);
        // Filled where they are: calls are large.
        calls.push(match by_kernel && !flushes {
            true => Call::Kernel(SmallVec::new()),
            false => Call::MemOps(SmallVec::new()),
        });
        match calls.last_mut() {
            Some(Call::Kernel(program)) => program.extend(part.map(|step| LaneOp::from(&step))),
            Some(Call::MemOps(memops)) => memops.extend(part.map(|step| memop(&step))),
            _ => {}
        }
    }
}

/// As many steps from the start of `rest` on as fit in a call, without tearing record, barrier and doorbell apart.
fn part_of(steps: &[Step], rest: Range<usize>, most: usize) -> Range<usize> {
    if rest.len() <= most {
        return rest;
    }
    let tears = |at: usize| steps[at] == Step::Barrier || steps[at - 1] == Step::Barrier;
    let longest = rest.start + most;
    let end = (rest.start + 1..=longest).rev().find(|&at| !tears(at)).unwrap_or(longest);
    rest.start..end
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
        Step::Barrier => MemOp::barrier(),
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
        plan(&mut calls, &gpu, &ops, None, true).unwrap();
        let [Call::Kernel(program)] = &calls[..] else { panic!("{calls:?}") };
        assert_eq!(program.iter().map(|op| op.kind).collect::<Vec<_>>(), [0, 0, 1]);
    }
}
