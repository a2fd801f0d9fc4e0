//! The plan of a submission: the driver calls that run its operations.
//!
//! Consumer indices show the CPU how far a stream is. No thread waits for them, so they are deferred past the doorbells
//! that follow a wait, until the next wait or the end of the submission.

use std::mem::{self, MaybeUninit};

use gdrcopy::cuda::raw::layout::MemOp;
use smallvec::SmallVec;

use crate::stream::place::is_long;
use crate::stream::{Arrival, Cond, DoorbellValue, Op, SendDoorbell, Source};
use gdsync_device::cuda::kernel_exec::{self, Grid, KernelOp, Program};
use gdsync_device::cuda::{Flush, Gpu};
use gdsync_device::error::{Error, Result};
use gdsync_device::memory::{Memory, Place};

/// Maximum operations of one call. `cuStreamBatchMemOp` takes 255. A hardware channel takes some 92,000 before the
/// driver blocks the caller: the pending calls, with this maximum, stay below.
const MAX_MEMOPS: usize = 128;

/// A driver call.
#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "host functions are rare")]
pub(super) enum Call {
    /// A kernel or a `cuStreamBatchMemOp` with these operations.
    Ops(Program),
    /// `cuLaunchHostFunc` of the host function at this index of the submission.
    HostFn(usize),
    /// `cuMemcpyAsync`, to or from memory of a peer.
    Copy(EngineCopy),
}

/// A copy by the copy engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct EngineCopy {
    pub(super) to: u64,
    pub(super) from: u64,
    pub(super) len: usize,
}

/// What kernels do for a stream; memory operations and the copy engine do the rest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ByKernel {
    /// Operations but copies to peers.
    pub(super) ops: bool,
    /// Copies to and from peers.
    pub(super) copies: bool,
}

impl ByKernel {
    /// Kernels do all, as those of applications do in steps.
    pub(super) const ALL: Self = Self { ops: true, copies: true };
}

/// The calls of a list of operations, as few as the limits allow. The last call, mostly the only one, is built in
/// place, because calls are large.
pub(super) struct Calls {
    /// Maximum operations of a call.
    max: usize,
    before: Vec<Call>,
    last: Program,
    kinds: Kinds,
    /// A deferred barrier, dropped if the next operation is fenced.
    barrier: bool,
    by_kernel: ByKernel,
    /// Whether the last call is a kernel of a stream whose other calls are memory operations.
    is_last_by_kernel: bool,
    host_fns: usize,
    /// Operations of the calls before the last one.
    ended: usize,
    slots: Slots,
}

/// Where the steps go in which launches differ, in order.
#[derive(Debug, Default)]
pub(super) struct Slots {
    /// Those that launches make anew: see [`steps`].
    pub(super) own: Vec<Slot>,
    pub(super) of_messages: Vec<Slot>,
}

/// A plan for launches.
#[derive(Debug, Default)]
pub(super) struct Plan {
    pub(super) calls: Vec<Call>,
    /// The number of operations of all calls.
    ops: usize,
    pub(super) slots: Slots,
}

impl Plan {
    /// Adds another one behind it, without its calls, which it returns.
    pub(super) fn join(&mut self, next: Self) -> Vec<Call> {
        let behind = |slot| match slot {
            Slot::At(at) => Slot::At(self.ops + at),
            other => other,
        };
        self.slots.own.extend(next.slots.own.into_iter().map(behind));
        self.slots.of_messages.extend(next.slots.of_messages.into_iter().map(behind));
        self.ops += next.ops;
        next.calls
    }
}

/// The place of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Slot {
    /// The index among the operations of all calls.
    At(usize),
    /// A copy by the copy engine: the same in each launch.
    Same(KernelOp),
    /// Nowhere: a later consumer index supersedes it.
    Superseded,
}

/// Maximum operations of a call.
fn max_ops(by_kernel: bool) -> usize {
    if by_kernel { kernel_exec::LARGE } else { MAX_MEMOPS }
}

/// Upper bound for the calls of any submission of `ops` operations and `host_fns` host functions, including the mark.
pub(super) fn max_calls(ops: usize, host_fns: usize, by_kernel: bool) -> usize {
    // Per operation: barrier, wait, flush, index; the word of a wait for either is an operation. Operations that must share a call may leave a call up to three short.
    const STEPS: usize = 4;
    // A host function is a call of its own and ends the previous one. Copies to peers may, too, but are not counted here: a batch
    // of many may find less room than was waited for.
    (ops * STEPS + 1).div_ceil(max_ops(by_kernel) - 3) + 2 * host_fns
}

/// Operations that a kernel has left over for what one batch adds to another.
const SLACK: usize = 8;

/// Whether a kernel may run both programs, one after the other, by the rules for a batch.
pub(super) fn may_join(ops: &Program, next: &Program) -> bool {
    ops.len() + next.len() + SLACK <= kernel_exec::LARGE
        && Kinds::of(ops).may_precede(Kinds::of(next), ops.is_empty())
        && runs_by_kernel(next, true)
}

/// What a program has: bits.
#[derive(Clone, Copy, Debug, Default)]
struct Kinds(u8);

impl Kinds {
    const FLUSH: u8 = 1;
    const COPY: u8 = 2;
    const WAIT: u8 = 4;
    const MESSAGE: u8 = 8;
    /// What the kernels for messages do not do.
    const FOREIGN: u8 = 16;
    /// A copy or message by several blocks.
    const WIDE: u8 = 32;
    /// A copy by too many blocks to wait.
    const WIDEST: u8 = 64;

    fn of(ops: &[KernelOp]) -> Self {
        let grid = Grid::of(ops);
        let wide = bit(grid.blocks > 1, Self::WIDE) | bit(!grid.may_wait(), Self::WIDEST);
        ops.iter().fold(Self(wide), |kinds, op| kinds.and(Self::of_one(op)))
    }

    /// Of an operation, without the blocks that it needs.
    #[inline]
    fn of_one(op: &KernelOp) -> Self {
        Self(
            bit(op.is_flush(), Self::FLUSH)
                | bit(op.is_move(), Self::COPY)
                | bit(op.is_wait(), Self::WAIT)
                | bit(op.is_message(), Self::MESSAGE)
                | bit(!op.goes_with_messages(), Self::FOREIGN),
        )
    }

    #[inline]
    fn and(self, next: Self) -> Self {
        Self(self.0 | next.0)
    }

    #[inline]
    fn has(self, kind: u8) -> bool {
        self.0 & kind != 0
    }

    /// Whether the same kernel may run `next` behind it. A message by several blocks is the only one, and the first.
    #[inline]
    fn may_precede(self, next: Self, is_empty: bool) -> bool {
        let both = self.and(next);
        let are_apart = both.has(Self::FOREIGN)
            || self.has(Self::WIDE) && next.has(Self::MESSAGE)
            || next.has(Self::WIDE) && !is_empty;
        !(self.has(Self::FLUSH)
            || next.has(Self::WIDE) && self.has(Self::COPY)
            || next.has(Self::WIDEST) && self.has(Self::WAIT)
            || both.has(Self::MESSAGE) && are_apart)
    }
}

#[inline]
fn bit(is_set: bool, kind: u8) -> u8 {
    if is_set { kind } else { 0 }
}

/// Deferred consumer indices, and their slots if they have any.
type Indices = SmallVec<[(KernelOp, Option<usize>); 2]>;

impl Calls {
    /// An empty plan.
    #[inline]
    pub(super) fn new(by_kernel: ByKernel) -> Self {
        Self {
            max: max_ops(by_kernel.ops),
            before: Vec::new(),
            last: Program::new(),
            kinds: Kinds::default(),
            barrier: false,
            by_kernel,
            is_last_by_kernel: false,
            host_fns: 0,
            ended: 0,
            slots: Slots::default(),
        }
    }

    /// Adds operations that must share a call.
    #[inline]
    fn put(&mut self, steps: &[KernelOp]) {
        if self.last.len() + steps.len() + usize::from(self.barrier) > self.max || self.is_last_by_kernel {
            self.end();
        }
        for &step in steps {
            // Every write of the front end and of the kernels has a fence before it (cuda.h,
            // CU_STREAM_WRITE_VALUE_DEFAULT). An explicit barrier takes 0.6 us on an H200.
            self.barrier &= !step.is_fenced();
            self.flush_barrier();
            if self.kinds.has(Kinds::MESSAGE) && !step.goes_with_messages() && !self.is_step() {
                self.end();
            }
            self.kinds = self.kinds.and(Kinds::of_one(&step));
            self.last.push(step);
        }
    }

    /// Adds a copy, a signal, or both, or a message. Memory operations end before and after it. Only the first copy of a call is by
    /// several blocks, and many do not wait for what is before it, as they hold multiprocessors meanwhile.
    fn put_copy(&mut self, steps: &[KernelOp]) {
        self.flush_barrier();
        let kinds = Kinds::of(steps);
        let may_follow = match self.by_kernel.ops {
            true => self.is_step() || self.kinds.may_precede(kinds, self.last.is_empty()),
            false => self.last.is_empty(),
        };
        if !may_follow || self.last.len() + steps.len() + 1 > self.max {
            self.end();
        }
        self.kinds = self.kinds.and(kinds);
        self.last.extend_from_slice(steps);
        self.is_last_by_kernel = !self.by_kernel.ops;
    }

    /// Adds a copy by the copy engine, and a signal behind it.
    fn put_engine_copy(&mut self, steps: &[KernelOp]) {
        let signal = match KernelOp::as_copy(steps) {
            Some((to, from, len)) => {
                self.end();
                self.before.push(Call::Copy(EngineCopy { to, from, len }));
                &steps[2..]
            }
            None => steps,
        };
        match (signal, self.by_kernel.ops) {
            ([], _) => {}
            (_, true) => self.put_copy(signal),
            (_, false) => self.put(signal),
        }
    }

    /// Whether it is the program of a kernel step, which one block runs.
    fn is_step(&self) -> bool {
        self.max == usize::MAX
    }

    /// Adds a flush, which no kernel does.
    fn put_flush(&mut self) {
        if !self.is_step() && self.last.iter().any(KernelOp::needs_kernel) {
            self.end();
        }
        self.put(&[KernelOp::FLUSH]);
    }

    /// Defers a barrier, for which the call keeps room.
    fn put_barrier(&mut self) {
        if self.last.len() == self.max || self.is_last_by_kernel {
            self.end();
        }
        self.barrier = true;
    }

    /// Writes the deferred barrier.
    #[inline]
    fn flush_barrier(&mut self) {
        if self.barrier {
            self.barrier = false;
            self.last.push(KernelOp::BARRIER);
        }
    }

    /// Ends the last call.
    #[cold]
    fn end(&mut self) {
        self.flush_barrier();
        (self.is_last_by_kernel, self.kinds) = (false, Kinds::default());
        if !self.last.is_empty() {
            self.ended += self.last.len();
            self.before.push(Call::Ops(mem::take(&mut self.last)));
        }
    }

    #[cold]
    fn put_host_fn(&mut self, place: usize) {
        self.end();
        self.before.push(Call::HostFn(place));
        self.host_fns += 1;
    }

    /// Adds operations, of which launches make those anew that `anew` says. Refuses waits that could never be released. Locks: see
    /// [`add_steps`].
    #[inline]
    pub(super) fn add(&mut self, gpu: &Gpu, ops: &[Op], anew: &[bool]) -> Result<()> {
        let (mut indices, mut steps) = (Indices::new(), Program::new());
        // By the last copy.
        let mut is_placed = false;
        for (place, op) in ops.iter().enumerate() {
            steps.clear();
            add_steps(gpu, op, self.by_kernel, &mut steps)?;
            let is_anew = anew.get(place) == Some(&true);
            if matches!(op, Op::Place(_) | Op::Peer(_) | Op::Message(_)) {
                is_placed = matches!(op, Op::Place(_)) && !steps.is_empty();
            }
            match op {
                Op::Trigger(..) | Op::Peer(_) | Op::Place(_) | Op::Tell { .. } if steps.is_empty() => {}
                // With the wait before it.
                Op::OrArrival { .. } | Op::UnlessPlaced => continue,
                Op::Await(source, n) => {
                    self.pass(&mut indices);
                    let [wait, mut index] = [steps[0], steps[1]];
                    let flushes = gpu.capabilities().flush == Flush::OnStream;
                    let may_end_early = |op: &&Op| {
                        let is_asked = matches!(op, Op::OrArrival { .. } | Op::UnlessPlaced);
                        is_asked && self.by_kernel.ops && !flushes && source.is_next(*n)
                    };
                    match ops.get(place + 1).filter(may_end_early) {
                        Some(Op::OrArrival { at, number }) if at.memory().is_on(gpu) => {
                            let value = u64::from(*number) << 32;
                            let other = KernelOp::wait64(at.memory().place(gpu)?, value, Cond::Eq);
                            self.put(&wait.or(other));
                        }
                        Some(Op::UnlessPlaced) if is_placed && self.kinds.has(Kinds::COPY) => {
                            self.put(&[wait.unless_copied()]);
                            // Behind the doorbell, which the completion would have been behind.
                            index = index.fenced();
                        }
                        _ => self.put(&[wait]),
                    }
                    let slot = is_anew.then(|| {
                        self.slots.own.extend([self.slot_of_last(), Slot::Superseded]);
                        self.slots.own.len() - 1
                    });
                    if flushes {
                        self.put_flush();
                    }
                    // The last index of a queue supersedes earlier ones.
                    indices.retain(|(other, _)| other.addr != index.addr);
                    indices.push((index, slot));
                    continue;
                }
                Op::Wait32 { .. } | Op::Wait64 { .. } => {
                    self.pass(&mut indices);
                    self.put(&steps);
                }
                Op::Trigger(..) | Op::Write32 { .. } | Op::PostRecv { .. } | Op::Write64 { .. } => {
                    self.put(&steps)
                }
                Op::Message(message) => {
                    if message.wait().is_some() {
                        self.pass(&mut indices);
                    }
                    if steps[0].is_wait() && !steps[0].needs_kernel() {
                        self.put(&[steps.remove(0)]);
                        let slot = is_anew.then(|| self.slot_of_last());
                        self.slots.of_messages.extend(slot);
                    }
                    match self.by_kernel.copies {
                        _ if steps.is_empty() => {}
                        true => self.put_copy(&steps),
                        false => self.put_engine_copy(&steps),
                    }
                }
                Op::Peer(_) if !self.by_kernel.copies => self.put_engine_copy(&steps),
                Op::Peer(_) | Op::Place(_) | Op::Tell { .. } => self.put_copy(&steps),
                Op::Barrier => self.put_barrier(),
                Op::Flush => match gpu.capabilities().flush {
                    Flush::NotNeeded => self.put_barrier(),
                    Flush::OnStream => self.put_flush(),
                    Flush::OnCpu | Flush::Impossible => return Err(no_flush()),
                },
                Op::HostFn(_) => {
                    self.pass(&mut indices);
                    self.put_host_fn(place);
                }
            }
            if is_anew {
                let of_engine = KernelOp::as_copy(&steps).filter(|_| !self.by_kernel.copies).map_or(0, |_| 2);
                let (same, put) = steps.split_at(of_engine);
                let is_message = matches!(op, Op::Message(_));
                let slots = if is_message { &mut self.slots.of_messages } else { &mut self.slots.own };
                slots.extend(same.iter().copied().map(Slot::Same));
                let end = self.ended + self.last.len();
                slots.extend((end - put.len()..end).map(Slot::At));
            }
        }
        self.pass(&mut indices);
        Ok(())
    }

    /// The place of the last step.
    fn slot_of_last(&self) -> Slot {
        Slot::At(self.ended + self.last.len() - 1)
    }

    /// Writes the deferred consumer indices.
    #[inline]
    fn pass(&mut self, indices: &mut Indices) {
        for &(index, slot) in indices.iter() {
            self.put(&[index]);
            if let Some(slot) = slot {
                self.slots.own[slot] = self.slot_of_last();
            }
        }
        indices.clear();
    }
}

/// Adds what kernels or memory operations do for an operation, without barriers and flushes; for a copy by the copy engine as for one
/// by a kernel. Maps its words for the GPU. The caller must not hold a lock that the watchdog takes, or that another stream's launch
/// takes: registering memory with CUDA may block as long as streams wait, and the watchdog must release them.
#[inline]
pub(super) fn add_steps(gpu: &Gpu, op: &Op, by_kernel: ByKernel, steps: &mut Program) -> Result<()> {
    match *op {
        Op::Trigger(ref source, value) => {
            if let Some(send_doorbell) = source.send_doorbell() {
                steps.extend_from_slice(&doorbell_ops(gpu, send_doorbell, value)?);
            }
        }
        Op::Await(ref source, n) => steps.extend_from_slice(&awaited(gpu, &**source, &source.arrival(n))?),
        Op::Write32 { ref at, value } | Op::PostRecv { record: ref at, value, .. } => {
            steps.push(KernelOp::write32(at.memory().gpu_addr(gpu)?, value));
        }
        Op::Write64 { ref at, value } => steps.push(KernelOp::write64(at.memory().gpu_addr(gpu)?, value)),
        // Only credits name a queue pair.
        Op::Wait32 { ref at, value, of: Some(_), .. } => {
            steps.push(KernelOp::wait_credit(word(gpu, op, at.memory())?, value));
        }
        Op::Wait32 { ref at, value, cond, .. } => {
            steps.push(KernelOp::wait32(word(gpu, op, at.memory())?, value, cond));
        }
        Op::Wait64 { ref at, value, cond } => {
            steps.push(KernelOp::wait64(word(gpu, op, at.memory())?, value, cond));
        }
        Op::Peer(ref copy) => copy.add_steps(gpu, by_kernel.ops || by_kernel.copies, steps)?,
        Op::Message(ref message) => {
            let by_kernel = (by_kernel.ops, by_kernel.copies);
            message.add_steps(message.number, gpu, by_kernel, |more| steps.extend_from_slice(more))?;
        }
        Op::Tell { ref line, told } if by_kernel.ops || by_kernel.copies && is_long(told) => {
            steps.push(KernelOp::signal64(line.memory().gpu_addr(gpu)?, told, false));
        }
        Op::Place(ref placing) if by_kernel.copies => placing.add_steps(gpu, by_kernel.ops, steps)?,
        Op::OrArrival { .. }
        | Op::UnlessPlaced
        | Op::Tell { .. }
        | Op::Place(_)
        | Op::Barrier
        | Op::Flush
        | Op::HostFn(_) => {}
    }
    Ok(())
}

/// The steps that a launch makes anew, of these operations. Locks: see [`add_steps`].
pub(super) fn steps(gpu: &Gpu, ops: &[Op], by_kernel: ByKernel) -> Result<Program> {
    // Some have several.
    let mut steps = Program::with_capacity(2 * ops.len());
    ops.iter().try_for_each(|op| add_steps(gpu, op, by_kernel, &mut steps))?;
    Ok(steps)
}

impl Calls {
    /// Appends the mark.
    pub(super) fn mark(&mut self, mark: KernelOp) {
        self.put(&[mark]);
    }

    /// The number of calls, and of host functions among them.
    pub(super) fn count(&self) -> (usize, usize) {
        (self.before.len() + usize::from(!self.last.is_empty() || self.barrier), self.host_fns)
    }

    /// Whether there are others than kernels and memory operations, which need a current context.
    pub(super) fn need_context(&self) -> bool {
        self.before.iter().any(|call| !matches!(call, Call::Ops(_)))
    }

    /// Makes the calls with `ops`, `host_fn` and `copy`, until one fails.
    pub(super) fn make(
        &mut self,
        ops: impl Fn(&[KernelOp]) -> gdrcopy::Result<()>,
        host_fn: impl Fn(usize) -> gdrcopy::Result<()>,
        copy: impl Fn(EngineCopy) -> gdrcopy::Result<()>,
    ) -> gdrcopy::Result<()> {
        self.flush_barrier();
        for call in &self.before {
            match call {
                Call::Ops(part) => ops(part),
                Call::HostFn(place) => host_fn(*place),
                Call::Copy(part) => copy(*part),
            }?;
        }
        if self.last.is_empty() { Ok(()) } else { ops(&self.last) }
    }
}

/// The record, then the doorbell, which has a fence before it. Reversed where the record may lag.
#[inline]
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

/// The wait, and the consumer index after it.
#[inline]
pub(super) fn awaited(gpu: &Gpu, source: &dyn Source, arrival: &Arrival<'_>) -> Result<[KernelOp; 2]> {
    source.check_visible(gpu)?;
    let (word, index) = (arrival.word_on(gpu)?, arrival.index_on(gpu)?);
    Ok([KernelOp::wait_cqe(word, arrival.value, arrival.cond), KernelOp::index(index, arrival.passed)])
}

/// Whether a kernel runs these operations, of a stream of kernels or of memory operations. A flush needs the front end, a copy a
/// kernel.
#[inline]
pub(super) fn runs_by_kernel(ops: &[KernelOp], by_kernel: bool) -> bool {
    if by_kernel { !ops.iter().any(KernelOp::is_flush) } else { ops.iter().any(KernelOp::needs_kernel) }
}

/// Calls `call` with the number of operations of one call, and with them as memory operations, each written in place.
#[inline]
pub(super) fn with_memops<T>(ops: &[KernelOp], call: impl FnOnce(u32, *mut MemOp) -> T) -> T {
    let count = u32::try_from(ops.len()).expect("fewer than 256");
    let mut memops = [const { MaybeUninit::uninit() }; kernel_exec::LARGE];
    for (to, op) in memops[..ops.len()].iter_mut().zip(ops) {
        to.write(op.memop());
    }
    call(count, memops.as_mut_ptr().cast())
}

/// The GPU address of the word of an application wait.
fn word(gpu: &Gpu, op: &Op, word: &Memory) -> Result<Place> {
    op.check()?;
    word.place(gpu)
}

/// The plan of a batch for a graph, of whose operations launches make those anew that `anew` says. Locks: see [`add_steps`].
pub(super) fn of_batch(gpu: &Gpu, ops: &[Op], anew: &[bool], by_kernel: ByKernel) -> Result<Plan> {
    let mut calls = Calls::new(by_kernel);
    calls.add(gpu, ops, anew)?;
    calls.end();
    Ok(Plan { calls: calls.before, ops: calls.ended, slots: calls.slots })
}

/// The plan of a kernel step, of one call. Locks: see [`add_steps`].
pub(super) fn of_step(gpu: &Gpu, ops: &[Op], anew: &[bool]) -> Result<Plan> {
    let mut calls = Calls { max: usize::MAX, ..Calls::new(ByKernel::ALL) };
    calls.add(gpu, ops, anew)?;
    calls.barrier |= calls.last.last().is_some_and(KernelOp::is_move);
    calls.flush_barrier();
    if calls.host_fns > 0 || !runs_by_kernel(&calls.last, true) {
        return Err(Error::Unsupported {
            what: "a host function, or a flush that only the front end of this GPU can do, in a step of a kernel",
            by: "kernels, which can do neither",
            fix: "submit it to the stream before or after the kernel",
        });
    }
    Ok(Plan { ops: calls.last.len(), calls: vec![Call::Ops(calls.last)], slots: calls.slots })
}

fn no_flush() -> Error {
    Error::Unsupported {
        what: "a flush of inbound writes on a stream",
        by: "this GPU or driver",
        fix: "wait for the completion on the CPU, then call Memory::flush",
    }
}

#[cfg(test)]
mod tests {
    use gdsync_soft::SoftHcaConfig;
    use gdsync_testkit::driver;
    use parking_lot::Mutex;

    use super::*;
    use crate::stream::{Batch, FreePlaces, Inbox, Ops, PeerInbox};
    use crate::verbs::Context;
    use gdsync_device::memory::PeerMemory;

    const KERNELS: ByKernel = ByKernel::ALL;
    const COPIES: ByKernel = ByKernel { ops: false, copies: true };

    /// The calls of a batch, all of them operations.
    fn programs_of(gpu: &Gpu, by_kernel: ByKernel, add: &dyn Fn(&mut Batch)) -> Vec<Program> {
        let mut batch = Batch::new();
        add(&mut batch);
        batch.expect_numbers();
        let calls = of_batch(gpu, &batch.ops, &[], by_kernel).unwrap().calls;
        let program = |call| match call {
            Call::Ops(ops) => ops,
            Call::HostFn(_) | Call::Copy(_) => panic!("{call:?}"),
        };
        calls.into_iter().map(program).collect()
    }

    /// Of each call the number of operations, the blocks, and whether a kernel does it.
    fn calls_of(gpu: &Gpu, by_kernel: ByKernel, add: &dyn Fn(&mut Batch)) -> Vec<(usize, u32, bool)> {
        let of = |ops: &Program| (ops.len(), Grid::of(ops).blocks, runs_by_kernel(ops, by_kernel.ops));
        programs_of(gpu, by_kernel, add).iter().map(of).collect()
    }

    /// `INDEX` of `kernel_exec.cu` has no fence before it, unlike `WRITE_32`.
    #[test]
    fn application_writes_before_a_barrier_are_ordered() {
        let _control = driver::Control::take();
        let gpu = Gpu::open_with(driver::api(), 0, None).unwrap();
        let words = Memory::alloc(64).unwrap();
        let (narrow, wide) = (words.word32(0).unwrap(), words.word64(8).unwrap());
        let write = || Op::Write32 { at: narrow.clone(), value: 1 };
        let ops = [write(), write(), Op::Barrier, Op::Write64 { at: wide, value: 2 }];
        let calls = of_batch(&gpu, &ops, &[], KERNELS).unwrap().calls;
        let [Call::Ops(program)] = &calls[..] else { panic!("{calls:?}") };
        assert_eq!(program.iter().map(|op| op.kind).collect::<Vec<_>>(), [0, 0, 1]);
    }

    /// A copy by many blocks has no waits before it in its kernel, one by several blocks no other copy.
    #[test]
    fn copies_share_a_kernel_with_what_is_around_them() {
        let _control = driver::Control::take();
        gdsync_testkit::kernels::register();
        let gpu = Gpu::open_with(driver::api(), 0, driver::gdr().ok()).unwrap();
        let memory = gpu.alloc(8 << 20).unwrap();
        let peer = PeerMemory::open(&gpu, &memory.export().unwrap()).unwrap();
        let word = memory.word64(0).unwrap();
        let calls = |by_kernel, add: &dyn Fn(&mut Batch)| calls_of(&gpu, by_kernel, add);
        let wait = |batch: &mut Batch, cond| batch.wait_value64(&word, 1, cond);
        let put = |batch: &mut Batch, len| batch.put_peer(&memory, 0..len, &peer, 0, None).unwrap();
        let one = |ops, blocks| vec![(ops, blocks, true)];
        let all = |len, cond| {
            let (wait, put, word) = (&wait, &put, &word);
            move |batch: &mut Batch| {
                wait(batch, cond);
                put(batch, len);
                batch.write_value64(word, 2);
                put(batch, 100);
                wait(batch, Cond::Eq);
            }
        };
        assert_eq!(calls(KERNELS, &all(8, Cond::Eq)), one(7, 1));
        assert_eq!(calls(KERNELS, &all(100_000, Cond::Geq)), one(7, 16));
        assert_eq!(calls(KERNELS, &all(100_000, Cond::Eq)), one(7, 16), "only one block looks");
        let behind_a_wait = vec![(1, 1, true), (6, 64, true)];
        assert_eq!(calls(KERNELS, &all(5 << 20, Cond::Geq)), behind_a_wait, "too many blocks to wait");
        let two = |batch: &mut Batch| (0..2).for_each(|_| put(batch, 100_000));
        assert_eq!(calls(KERNELS, &two), vec![(2, 16, true); 2]);
        let barrier = |batch: &mut Batch| {
            batch.barrier();
            put(batch, 100_000);
        };
        assert_eq!(calls(KERNELS, &barrier), one(3, 16));
        let by_memops = calls(COPIES, &all(100_000, Cond::Geq));
        let expected = [(1, 1, false), (2, 16, true), (1, 1, false), (2, 1, true), (1, 1, false)];
        assert_eq!(by_memops, expected, "kernels for copies only");
    }

    /// Kernels for messages do nothing else that waits, and only one message if it is long.
    #[test]
    fn messages_share_a_kernel_with_short_messages_and_writes() {
        let _control = driver::Control::take();
        gdsync_testkit::kernels::register();
        let gpu = Gpu::open_with(driver::api(), 0, driver::gdr().ok()).unwrap();
        let memory = gpu.alloc(1 << 20).unwrap();
        let peer = PeerMemory::open(&gpu, &memory.export().unwrap()).unwrap();
        let word = memory.word64(0).unwrap();
        let qp = Context::soft(&SoftHcaConfig::default()).unwrap().alloc_pd().unwrap().build_qp().build();
        let qp = qp.unwrap();
        qp.connect(qp.address()).unwrap();
        let inbox = |len| {
            let slots = gpu.alloc(Inbox::bytes([len])).unwrap();
            Inbox::new(&qp, &slots, &[(memory.clone(), 64..64 + len)]).unwrap()
        };
        let [short_inbox, long_inbox] = [100, 100_000].map(inbox);
        let open = |memory: &Memory| PeerMemory::open(&gpu, &memory.export().unwrap()).unwrap();
        let lens = [100_000, 100];
        let slots = open(&gpu.alloc(Inbox::bytes(lens)).unwrap());
        let places = lens.map(|len| open(&memory.slice(64, len).unwrap())).to_vec();
        let to = PeerInbox::new(&qp, slots, 0, places, word.clone()).unwrap();
        let calls = |by_kernel, add: &dyn Fn(&mut Batch)| calls_of(&gpu, by_kernel, add);
        let send = |batch: &mut Batch, len| _ = batch.send_to_inbox(&to, &memory, 0..len).unwrap();
        let places = FreePlaces::new(&qp, &short_inbox, peer.clone(), 0).unwrap();
        let free = |batch: &mut Batch| _ = batch.free_in_inbox(&places);
        let take = |batch: &mut Batch, inbox| _ = batch.take_from_inbox(inbox);
        let short = |batch: &mut Batch| {
            send(batch, 100);
            free(batch);
            take(batch, &short_inbox);
            batch.write_value64(&word, 1);
        };
        let long = |batch: &mut Batch| {
            take(batch, &long_inbox);
            free(batch);
            send(batch, 100_000);
            free(batch);
            send(batch, 100);
        };
        let others = |batch: &mut Batch| {
            send(batch, 100);
            batch.wait_value64(&word, 1, Cond::Geq);
            send(batch, 100);
            batch.put_peer(&memory, 0..8, &peer, 0, None).unwrap();
            take(batch, &short_inbox);
        };
        assert_eq!(calls(KERNELS, &short), [(9, 1, true)]);
        let program = |add: &dyn Fn(&mut Batch)| programs_of(&gpu, KERNELS, add).swap_remove(0);
        let [one, two] = [100, 100_000].map(|len| program(&|batch| send(batch, len)));
        let waits = program(&|batch| batch.wait_value64(&word, 1, Cond::Geq));
        assert!(may_join(&one, &one) && !may_join(&one, &two) && !may_join(&two, &one));
        assert!(!may_join(&waits, &one) && !may_join(&one, &waits));
        assert_eq!(calls(KERNELS, &long), [(4, 16, true), (5, 16, true), (4, 1, true)]);
        assert_eq!(
            calls(KERNELS, &others),
            [(4, 1, true), (1, 1, true), (4, 1, true), (2, 1, true), (3, 1, true)]
        );
        // The wait by a memory operation, a copy and a signal.
        assert_eq!(calls(COPIES, &|batch| send(batch, 100)), [(1, 1, false), (3, 1, true)]);
    }

    /// A wait that ends by a word before its completion is for kernels: not where a flush of the front end is behind it.
    #[test]
    fn waits_for_either_are_for_kernels() {
        for (flushes, by_kernel, ops) in [(0, KERNELS, 3), (0, COPIES, 2), (1, KERNELS, 3)] {
            let control = driver::Control::take();
            // Inbound writes: flush on streams, flush options, ordering.
            for (number, value) in [(98, flushes), (117, 1 - flushes), (118, 0)] {
                control.attribute(0, number, value);
            }
            let gpu = Gpu::open_with(driver::api(), 0, driver::gdr().ok()).unwrap();
            assert_eq!(gpu.capabilities().flush == Flush::OnStream, flushes == 1);
            let pd = Context::soft(&SoftHcaConfig::default()).unwrap().alloc_pd().unwrap();
            let qp = pd.build_qp().build().unwrap();
            qp.connect(qp.address()).unwrap();
            let received = qp.post_recv(&[crate::verbs::RecvWr::new(&[])]).unwrap();
            let word = gpu.alloc(8).unwrap().word64(0).unwrap();
            let wait = |batch: &mut Batch| batch.wait_or_arrival(&received, &word, 1).unwrap();
            // The wait, the word or the flush, and the consumer index.
            assert_eq!(calls_of(&gpu, by_kernel, &wait), [(ops, 1, by_kernel.ops && flushes == 0)]);
        }
    }

    #[test]
    fn programs_are_joined_as_one_batch_would_be() {
        let ops = |count| Program::from_elem(KernelOp::BARRIER, count);
        let copy = |len| KernelOp::copy(0, 0, len).into_iter().collect();
        let wait = KernelOp::wait64(Place { addr: 0, is_near: true }, 1, Cond::Geq);
        let all = kernel_exec::LARGE - SLACK;
        for (first, next, joined) in [
            (ops(all - 3), ops(3), true),
            (ops(all - 3), ops(4), false),
            (copy(8), copy(8), true),
            (copy(8), copy(1 << 20), false),
            (copy(1 << 20), copy(8), true),
            (Program::from_elem(wait, 1), copy(1 << 20), true),
            (Program::from_elem(wait, 1), copy(5 << 20), false),
            (copy(5 << 20), ops(1), true),
            (ops(1), Program::from_elem(KernelOp::FLUSH, 1), false),
        ] {
            assert_eq!(may_join(&first, &next), joined, "{first:?} {next:?}");
        }
    }

    #[test]
    fn max_calls_bounds_every_plan() {
        let _control = driver::Control::take();
        let gpu = Gpu::open_with(driver::api(), 0, None).unwrap();
        let word = Memory::alloc(64).unwrap().word32(0).unwrap();
        for by_kernel in [false, true] {
            for (len, every) in [(0, 1), (1, 1), (4, 2), (127, 200), (128, 200), (500, 200), (500, 100)] {
                let mut ops = Ops::new();
                for n in 1..=len {
                    ops.push(match n % every {
                        0 => Op::HostFn(Mutex::new(Box::new(|| ()))),
                        n if n % 2 == 0 => Op::Barrier,
                        _ => Op::Wait32 { at: word.clone(), value: 1, cond: Cond::Eq, of: None },
                    });
                }
                let mut calls = Calls::new(ByKernel { ops: by_kernel, copies: true });
                calls.add(&gpu, &ops, &[]).unwrap();
                calls.mark(KernelOp::mark(0, 1));
                let (count, host_fns) = calls.count();
                let max = max_calls(len, host_fns, by_kernel);
                assert_eq!(host_fns, len / every);
                assert!((count..=5 * count).contains(&max), "{len}, {every}: {count}, not {max}");
            }
        }
    }
}
