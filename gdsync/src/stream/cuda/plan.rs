//! What a submission becomes on a GPU: calls into the driver.
//!
//! Consumer indices tell the CPU what a stream has passed, and nobody waits for them: they are put off behind the
//! doorbells that follow a wait, until the next wait or the end of the submission.

use std::mem::{self, MaybeUninit};

use gdrcopy::cuda::raw::layout::MemOp;
use smallvec::SmallVec;

use crate::stream::{Arrival, DoorbellValue, Op, SendDoorbell, Source};
use gdsync_device::cuda::kernel_exec::{self, KernelOp, Program};
use gdsync_device::cuda::{Flush, Gpu};
use gdsync_device::error::{Error, Result};
use gdsync_device::memory::{Memory, Place};

/// The most operations of one call. `cuStreamBatchMemOp` takes 255, and a channel of the GPU some 92,000 before the driver blocks the
/// caller: with these, as many calls as may be pending are fewer.
const MAX_MEMOPS: usize = 128;

/// A call into the driver.
#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "host functions are rare")]
pub(super) enum Call {
    /// A kernel or `cuStreamBatchMemOp` that runs these.
    Ops(Program),
    /// `cuLaunchHostFunc` of the host function at this place of the submission.
    HostFn(usize),
}

/// What a submission becomes, and the mark behind it.
pub(super) trait Runs {
    /// Adds the mark.
    fn mark(&mut self, mark: KernelOp);

    /// How many calls there are, and how many of them are for host functions.
    fn count(&self) -> (usize, usize);

    /// Makes the calls, by one function or the other, until one fails.
    fn make(
        &mut self,
        ops: impl Fn(&[KernelOp]) -> gdrcopy::Result<()>,
        host_fn: impl Fn(usize) -> gdrcopy::Result<()>,
    ) -> gdrcopy::Result<()>;
}

/// The most of a few: a send, a wait, and the mark.
const FEW: usize = 6;

/// One call of a few operations that are known beforehand: nothing is put off, and it never has to grow.
pub(super) struct InlineOps {
    ops: [KernelOp; FEW],
    len: usize,
}

impl InlineOps {
    /// Of these, which leave room for the mark.
    #[inline(always)]
    pub(super) fn of<const N: usize>(ops: [KernelOp; N]) -> Self {
        const { assert!(N < FEW) };
        let mut inline = Self { ops: [KernelOp::BARRIER; FEW], len: N };
        inline.ops[..N].copy_from_slice(&ops);
        inline
    }
}

impl Runs for InlineOps {
    #[inline(always)]
    fn mark(&mut self, mark: KernelOp) {
        self.ops[self.len] = mark;
        self.len += 1;
    }

    #[inline(always)]
    fn count(&self) -> (usize, usize) {
        (1, 0)
    }

    #[inline(always)]
    fn make(
        &mut self,
        ops: impl Fn(&[KernelOp]) -> gdrcopy::Result<()>,
        _host_fn: impl Fn(usize) -> gdrcopy::Result<()>,
    ) -> gdrcopy::Result<()> {
        ops(&self.ops[..self.len])
    }
}

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

/// The most operations of a call.
fn most_ops(by_kernel: bool) -> usize {
    if by_kernel { kernel_exec::LARGE } else { MAX_MEMOPS }
}

/// At most so many calls become of so many operations and host functions, with the mark behind them, whatever they are.
pub(super) fn most_calls(ops: usize, host_fns: usize, by_kernel: bool) -> usize {
    // A barrier, a wait, a flush and an index. Two that belong together may leave a call one or two short.
    const STEPS: usize = 4;
    // A host function is a call, and ends the one before it.
    (ops * STEPS + 1).div_ceil(most_ops(by_kernel) - 2) + 2 * host_fns
}

/// Consumer indices that are put off.
type Indices = SmallVec<[KernelOp; 2]>;

impl Calls {
    /// None so far.
    #[inline(always)]
    pub(super) fn new(by_kernel: bool) -> Self {
        Self {
            most: most_ops(by_kernel),
            before: Vec::new(),
            last: Program::new(),
            barrier: false,
            host_fns: 0,
        }
    }

    /// Adds steps that belong into one call.
    #[inline(always)]
    fn put<const N: usize>(&mut self, steps: [KernelOp; N]) {
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
            if step == KernelOp::BARRIER {
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
            self.last.push(KernelOp::BARRIER);
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
                Op::Trigger(ref source, value) => {
                    source.send_doorbell().map_or(Ok(()), |send_doorbell| {
                        doorbell_ops(gpu, send_doorbell, value).map(|steps| self.put(steps))
                    })?;
                }
                Op::Await(ref source, n) => {
                    self.pass(&mut indices);
                    let [wait, index] = awaited(gpu, &**source, &source.arrival(n))?;
                    self.put([wait]);
                    if gpu.capabilities().flush == Flush::OnStream {
                        self.put([KernelOp::FLUSH]);
                    }
                    // Of several for the same queue the last one says it all.
                    indices.retain(|other| other.addr != index.addr);
                    indices.push(index);
                }
                Op::Write32 { ref at, value } => {
                    self.put([KernelOp::write32(at.memory().gpu_addr(gpu)?, value)]);
                }
                Op::Write64 { ref at, value } => {
                    self.put([KernelOp::write64(at.memory().gpu_addr(gpu)?, value)]);
                }
                Op::Wait32 { ref at, value, cond } => {
                    self.pass(&mut indices);
                    self.put([KernelOp::wait32(word(gpu, op, at.memory())?, value, cond)]);
                }
                Op::Wait64 { ref at, value, cond } => {
                    self.pass(&mut indices);
                    self.put([KernelOp::wait64(word(gpu, op, at.memory())?, value, cond)]);
                }
                Op::Barrier => self.put([KernelOp::BARRIER]),
                Op::Flush => self.put([match gpu.capabilities().flush {
                    Flush::NotNeeded => KernelOp::BARRIER,
                    Flush::OnStream => KernelOp::FLUSH,
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
        for &index in indices.iter() {
            self.put([index]);
        }
        indices.clear();
    }
}

impl Runs for Calls {
    fn mark(&mut self, mark: KernelOp) {
        self.put([mark]);
    }

    #[inline]
    fn count(&self) -> (usize, usize) {
        (self.before.len() + usize::from(!self.last.is_empty() || self.barrier), self.host_fns)
    }

    #[inline(always)]
    fn make(
        &mut self,
        ops: impl Fn(&[KernelOp]) -> gdrcopy::Result<()>,
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
}

/// The record and then the doorbell, which has a fence before it; where the record may lag, the doorbell comes first.
#[inline(always)]
pub(super) fn doorbell_ops(
    gpu: &Gpu,
    send_doorbell: &SendDoorbell,
    value: DoorbellValue,
) -> Result<[KernelOp; 2]> {
    let [record, doorbell] = &send_doorbell.found;
    let record = record.place(send_doorbell.record.memory(), gpu)?.addr;
    let doorbell = doorbell.place(send_doorbell.doorbell.memory(), gpu)?.addr;
    let doorbell = KernelOp::write64(doorbell, value.doorbell);
    Ok(match send_doorbell.record_may_lag {
        true => [doorbell, KernelOp::write32(record, value.record)],
        false => [KernelOp::index(record, value.record), doorbell],
    })
}

/// The wait, and the consumer index behind it.
#[inline(always)]
pub(super) fn awaited(gpu: &Gpu, source: &dyn Source, arrival: &Arrival<'_>) -> Result<[KernelOp; 2]> {
    source.check_visible(gpu)?;
    let (word, index) = (arrival.word_on(gpu)?, arrival.index_on(gpu)?);
    Ok([KernelOp::wait_cqe(word, arrival.value, arrival.cond), KernelOp::index(index, arrival.passed)])
}

/// Whether a kernel can run these, or only the front end.
#[inline]
pub(super) fn fits_kernel(ops: &[KernelOp]) -> bool {
    !ops.iter().any(KernelOp::is_flush)
}

/// Calls `call` with the same for the front end: how many, and where.
#[inline(always)]
pub(super) fn with_memops<T>(ops: &[KernelOp], call: impl FnOnce(u32, *mut MemOp) -> T) -> T {
    let count = u32::try_from(ops.len()).expect("fewer than 256");
    if ops.len() > FEW {
        let mut memops: Vec<_> = ops.iter().map(KernelOp::memop).collect();
        return call(count, memops.as_mut_ptr());
    }
    let mut memops = [const { MaybeUninit::uninit() }; FEW];
    for (to, op) in memops.iter_mut().zip(ops) {
        to.write(op.memop());
    }
    call(count, memops.as_mut_ptr().cast())
}

/// Where the GPU finds the word of a wait of the application.
fn word(gpu: &Gpu, op: &Op, word: &Memory) -> Result<Place> {
    op.check()?;
    word.place(gpu)
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
    use gdsync_testkit::driver;

    use super::*;
    use crate::stream::{Cond, Ops};

    /// `INDEX` of `kernel_exec.cu` has no fence before it, unlike `WRITE_32`.
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

    #[test]
    fn no_batch_becomes_more_calls_than_are_asked_for() {
        let _control = driver::Control::take();
        let gpu = Gpu::open_with(driver::api(), 0, None).unwrap();
        let word = Memory::alloc(64).unwrap().word32(0).unwrap();
        for by_kernel in [false, true] {
            for (len, every) in [(0, 1), (1, 1), (4, 2), (127, 200), (128, 200), (500, 200), (500, 100)] {
                let mut ops = Ops::new();
                for n in 1..=len {
                    ops.push(match n % every {
                        0 => Op::HostFn(Box::new(|| ())),
                        n if n % 2 == 0 => Op::Barrier,
                        _ => Op::Wait32 { at: word.clone(), value: 1, cond: Cond::Eq },
                    });
                }
                let mut calls = Calls::new(by_kernel);
                calls.add(&gpu, &ops).unwrap();
                calls.mark(KernelOp::mark(0, 1));
                let (count, host_fns) = calls.count();
                let most = most_calls(len, host_fns, by_kernel);
                assert_eq!(host_fns, len / every);
                assert!((count..=5 * count).contains(&most), "{len}, {every}: {count}, not {most}");
            }
        }
    }
}
