//! What a submission becomes on a GPU: calls into the driver.
//!
//! Consumer indices tell the CPU what a stream has passed, and nobody waits for them: they are put off behind the
//! doorbells that follow a wait, until the next wait or the end of the submission.

use std::mem;

use gdrcopy::cuda::raw::layout::MemOp;
use smallvec::SmallVec;

use super::lane::{self, LaneOp};
use crate::cuda::{Flush, Gpu};
use crate::error::{Error, Result};
use crate::memory::{Memory, Place};
use crate::stream::{Bell, Op, Ring};

/// The most operations of one call (`cuStreamBatchMemOp`: fewer than 256).
const MAX_MEMOPS: usize = 255;

/// A call into the driver.
#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "host functions are rare")]
pub(super) enum Call {
    /// A kernel or `cuStreamBatchMemOp` that runs these.
    Ops(Program),
    /// `cuLaunchHostFunc` of the host function at this place of the submission.
    HostFn(usize),
}

/// What one call runs.
pub(super) type Program = SmallVec<[LaneOp; lane::SMALL]>;
/// What `cuStreamBatchMemOp` runs.
pub(super) type MemOps = SmallVec<[MemOp; 8]>;

/// The calls that operations become, as few as the limits allow. The last one, mostly the only one, grows where it is issued from:
/// calls are large.
pub(super) struct Calls {
    /// The most operations of a call.
    most: usize,
    before: Vec<Call>,
    last: Program,
    /// A barrier comes next, unless what follows has one.
    barrier: bool,
    host_fns: usize,
}

/// Consumer indices that are put off: where, and what.
type Indices = SmallVec<[(u64, u32); 2]>;

impl Calls {
    /// None so far.
    #[inline(always)]
    pub(super) fn new(by_kernel: bool) -> Self {
        let most = if by_kernel { lane::LARGE } else { MAX_MEMOPS };
        Self { most, before: Vec::new(), last: Program::new(), barrier: false, host_fns: 0 }
    }

    /// How many there are, and how many of them are for host functions.
    #[inline]
    pub(super) fn count(&self) -> (usize, usize) {
        (self.before.len() + usize::from(!self.last.is_empty() || self.barrier), self.host_fns)
    }

    /// Makes the calls, by one function or the other, until one fails.
    #[inline(always)]
    pub(super) fn make(
        &mut self,
        ops: impl Fn(&[LaneOp]) -> gdrcopy::Result<()>,
        host_fn: impl Fn(usize) -> gdrcopy::Result<()>,
    ) -> gdrcopy::Result<()> {
        self.settle();
        for call in &self.before {
            match call {
                Call::Ops(part) => ops(part),
                Call::HostFn(place) => host_fn(*place),
            }?;
        }
        if self.last.is_empty() { Ok(()) } else { ops(&self.last) }
    }

    /// Adds steps that belong into one call.
    #[inline(always)]
    pub(super) fn put<const N: usize>(&mut self, steps: [LaneOp; N]) {
        if self.last.len() + N + usize::from(self.barrier) > self.most {
            self.end();
        }
        for step in steps {
            // A barrier is too much where every write of the front end, and of the lane, has a fence before it (cuda.h,
            // CU_STREAM_WRITE_VALUE_DEFAULT): one of its own takes 0.6 us on an H200.
            if step.is_fenced() {
                self.barrier = false;
            } else {
                self.settle();
            }
            if step == LaneOp::BARRIER {
                self.barrier = true;
            } else {
                self.last.push(step);
            }
        }
    }

    /// Writes the barrier that was put off.
    #[inline(always)]
    fn settle(&mut self) {
        if self.barrier {
            self.barrier = false;
            self.last.push(LaneOp::BARRIER);
        }
    }

    /// Ends the last call: what comes next is in another one.
    #[cold]
    fn end(&mut self) {
        self.settle();
        if !self.last.is_empty() {
            self.before.push(Call::Ops(mem::take(&mut self.last)));
        }
    }

    #[cold]
    fn put_host_fn(&mut self, place: usize) {
        self.end();
        self.before.push(Call::HostFn(place));
        self.host_fns += 1;
    }

    /// Adds what operations become: makes their words known to the GPU, and refuses waits that could never be released. Not under
    /// a lock that the watchdog takes: to register memory, CUDA may take as long as streams wait, and the watchdog must release
    /// them.
    #[inline(always)]
    pub(super) fn add(&mut self, gpu: &Gpu, ops: &[Op]) -> Result<()> {
        let mut indices = Indices::new();
        for (place, op) in ops.iter().enumerate() {
            match *op {
                Op::Trigger(ref source, ring) => {
                    source.bell().map_or(Ok(()), |bell| self.trigger(gpu, bell, ring))?;
                }
                Op::Await(ref source, n) => {
                    self.pass(&mut indices);
                    let arrival = source.arrival(n);
                    let (word, index) = (arrival.word_on(gpu)?, arrival.index_on(gpu)?);
                    self.put([LaneOp::wait_cqe(word, arrival.value, arrival.cond)]);
                    if gpu.capabilities().flush == Flush::OnStream {
                        self.put([LaneOp::FLUSH]);
                    }
                    // Of several for the same queue the last one says it all.
                    indices.retain(|(other, _)| *other != index);
                    indices.push((index, arrival.passed));
                }
                Op::Write32 { ref at, value } => {
                    self.put([LaneOp::write32(at.memory().gpu_addr(gpu)?, value)]);
                }
                Op::Write64 { ref at, value } => {
                    self.put([LaneOp::write64(at.memory().gpu_addr(gpu)?, value)]);
                }
                Op::Wait32 { ref at, value, cond } => {
                    self.pass(&mut indices);
                    self.put([LaneOp::wait32(word(gpu, op, at.memory())?, value, cond)]);
                }
                Op::Wait64 { ref at, value, cond } => {
                    self.pass(&mut indices);
                    self.put([LaneOp::wait64(word(gpu, op, at.memory())?, value, cond)]);
                }
                Op::Barrier => self.put([LaneOp::BARRIER]),
                Op::Flush => self.put([match gpu.capabilities().flush {
                    Flush::NotNeeded => LaneOp::BARRIER,
                    Flush::OnStream => LaneOp::FLUSH,
                    Flush::OnCpu | Flush::Impossible => return Err(no_flush()),
                }]),
                Op::HostFn(_) => {
                    self.pass(&mut indices);
                    self.put_host_fn(place);
                }
            }
        }
        self.pass(&mut indices);
        Ok(())
    }

    /// Writes the consumer indices that were put off.
    #[inline(always)]
    fn pass(&mut self, indices: &mut Indices) {
        for &(addr, value) in indices.iter() {
            self.put([LaneOp::index(addr, value)]);
        }
        indices.clear();
    }

    /// Record, barrier, doorbell; where the record may lag, the doorbell comes first.
    #[inline(always)]
    pub(super) fn trigger(&mut self, gpu: &Gpu, bell: &Bell, ring: Ring) -> Result<()> {
        let [record, doorbell] = &bell.found;
        let record = record.place(bell.record.memory(), gpu)?.addr;
        let doorbell = doorbell.place(bell.doorbell.memory(), gpu)?.addr;
        let doorbell = LaneOp::write64(doorbell, ring.doorbell);
        if bell.record_may_lag {
            self.put([doorbell, LaneOp::write32(record, ring.record)]);
        } else {
            // Only the doorbell is ordered, by the barrier.
            self.put([LaneOp::index(record, ring.record), LaneOp::BARRIER, doorbell]);
        }
        Ok(())
    }
}

/// Whether a kernel can run these, or only the front end.
#[inline]
pub(super) fn fits_kernel(ops: &[LaneOp]) -> bool {
    !ops.iter().any(LaneOp::is_flush)
}

/// The same for the front end.
#[inline(always)]
pub(super) fn memops(ops: &[LaneOp]) -> MemOps {
    let mut memops = MemOps::new();
    for op in ops {
        memops.push(op.memop());
    }
    memops
}

/// Where the GPU finds the word of a wait of the application.
fn word(gpu: &Gpu, op: &Op, word: &Memory) -> Result<Place> {
    match op.is_endless() {
        true => Err(Error::invalid("wait", format!("{op:?}"), "a condition that some word satisfies")),
        false => word.place(gpu),
    }
}

/// The calls of a batch, to be kept; not under a lock, as [`Calls::add`].
pub(super) fn list(gpu: &Gpu, ops: &[Op], by_kernel: bool) -> Result<Vec<Call>> {
    let mut calls = Calls::new(by_kernel);
    calls.add(gpu, ops)?;
    calls.end();
    Ok(calls.before)
}

/// What operations become as a step of a kernel of the application; not under a lock, as [`Calls::add`].
pub(super) fn program(gpu: &Gpu, ops: &[Op]) -> Result<Program> {
    let mut calls = Calls { most: usize::MAX, ..Calls::new(true) };
    calls.add(gpu, ops)?;
    calls.settle();
    if calls.host_fns > 0 || !fits_kernel(&calls.last) {
        return Err(Error::Unsupported {
            what: "a host function, or a flush that this GPU leaves to its front end, in a step of a kernel",
            by: "kernels, which cannot do either",
            fix: "submit it to the stream before or after the kernel",
        });
    }
    Ok(calls.last)
}

fn no_flush() -> Error {
    Error::Unsupported {
        what: "a flush of inbound writes on a stream",
        by: "this GPU or driver",
        fix: "let the CPU see the completion, then call Memory::flush",
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
        let calls = list(&gpu, &ops, true).unwrap();
        let [Call::Ops(program)] = &calls[..] else { panic!("{calls:?}") };
        assert_eq!(program.iter().map(|op| op.kind).collect::<Vec<_>>(), [0, 0, 1]);
    }
}
