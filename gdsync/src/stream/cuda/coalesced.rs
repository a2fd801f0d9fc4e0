//! Submission of single sends, single waits, and send-wait pairs, and of coalesced runs of them: sends on one queue
//! mixed with waits for consecutive completions of one queue.
//!
//! The first submission of a run is in the queue and stands for the whole run, as the GPU is not seen to complete any
//! part before the next mark. Later ones take no lock until the next mark, or any other submission, ends the run. A
//! failure finds their sources: that of the waits in the first submission, that of the sends there or in an earlier
//! unmarked one. The watchdog keeps deadlines of waits, so their count is published in `Shared::behind`, written under
//! the submit lock, before the driver gets them.

use std::collections::VecDeque;
use std::mem;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use smallvec::smallvec;

use super::graph;
use super::plan::{self, InlineOps};
use super::shared::{Entry, MARK_EVERY, Shared, State, Submission, SubmitGuard, not_joined};
use crate::stream::op::{Arrival, DoorbellValue, Op, SendDoorbell, Source};
use gdsync_device::cuda::kernel_exec::KernelOp;
use gdsync_device::cuda::{Flush, gate};
use gdsync_device::error::Result;

/// A coalesced run, guarded by the submit lock.
#[derive(Debug, Default)]
pub(super) struct CoalescedRun {
    /// The address of the sends' source, which a submission since the last mark names; 0 without one.
    triggered: usize,
    /// The address of the waits' source, and the number of the next completion; 0 if the run does not begin with a
    /// wait.
    awaited: usize,
    next: u64,
    /// Calls after the first one, and waits among them.
    uncounted: usize,
    waits: u64,
    /// Maximum number of calls, by the stream's depth.
    room: usize,
}

impl CoalescedRun {
    /// An empty run with room for `room` calls.
    pub(super) fn of(room: usize) -> Self {
        Self { room, ..Self::default() }
    }
}

/// The identity of a source.
#[inline]
fn address_of(source: &Arc<dyn Source>) -> usize {
    Arc::as_ptr(source).addr()
}

impl Shared {
    /// Submits one trigger. Consecutive triggers of one queue share one submission until the next mark.
    pub(super) fn trigger(
        &self,
        guard: &mut SubmitGuard,
        source: &Arc<dyn Source>,
        send_doorbell: &SendDoorbell,
        value: DoorbellValue,
    ) -> Result<u64> {
        if !send_doorbell.is_found() {
            self.mark_locked(guard);
        }
        let ops = plan::doorbell_ops(&self.gpu, send_doorbell, value)?;
        if guard.coalesced.triggered == address_of(source) && self.continues_run(guard) {
            return self.submit_coalesced(guard, 0, ops);
        }
        self.trigger_alone(guard, source, (value, InlineOps::of(ops)))
    }

    #[inline(never)]
    fn trigger_alone(
        &self,
        guard: &mut SubmitGuard,
        source: &Arc<dyn Source>,
        (value, mut inline): (DoorbellValue, InlineOps),
    ) -> Result<u64> {
        let is_marked = guard.unmarked == 0;
        let put = |queue: &mut VecDeque<Submission>, entry: Entry| match queue.back_mut() {
            Some(last) if !is_marked && last.triggers_only(source) => {
                last.seq = entry.seq;
                last.calls += entry.calls;
            }
            _ => queue.push_back(Submission::new(entry, smallvec![Op::Trigger(source.clone(), value)], None)),
        };
        let seq = self.accept(guard, |guard, done| self.submit_locked((guard, done), &mut inline, put))?;
        if guard.unmarked > 0 {
            guard.coalesced.triggered = address_of(source);
        }
        Ok(seq)
    }

    /// Submits one wait. Waits for consecutive completions share one submission until the next mark.
    pub(super) fn wait(
        &self,
        guard: &mut SubmitGuard,
        source: &Arc<dyn Source>,
        arrival: &Arrival<'_>,
        n: u64,
    ) -> Result<u64> {
        if !arrival.is_found() {
            self.mark_locked(guard);
        }
        let [wait, index] = plan::awaited(&self.gpu, &**source, arrival)?;
        let flushes = self.gpu.capabilities().flush == Flush::OnStream;
        if guard.coalesced.awaited == address_of(source)
            && guard.coalesced.next == n
            && self.continues_run(guard)
        {
            return match flushes {
                false => self.submit_coalesced(guard, 1, [wait, index]),
                true => self.submit_coalesced(guard, 1, [wait, KernelOp::FLUSH, index]),
            };
        }
        let inline = if flushes {
            InlineOps::of([wait, KernelOp::FLUSH, index])
        } else {
            InlineOps::of([wait, index])
        };
        self.wait_alone(guard, source, (n, inline))
    }

    #[inline(never)]
    fn wait_alone(
        &self,
        guard: &mut SubmitGuard,
        source: &Arc<dyn Source>,
        (n, mut inline): (u64, InlineOps),
    ) -> Result<u64> {
        let put = |queue: &mut VecDeque<Submission>, entry: Entry| {
            queue.push_back(Submission::new(entry, smallvec![Op::Await(source.clone(), n)], None));
        };
        let triggered = guard.coalesced.triggered;
        let seq = self.accept(guard, |guard, done| self.submit_locked((guard, done), &mut inline, put))?;
        if guard.unmarked > 0 {
            (guard.coalesced.triggered, guard.coalesced.awaited, guard.coalesced.next) =
                (triggered, address_of(source), n + 1);
        }
        Ok(seq)
    }

    /// Submits a trigger and a wait by one call. It continues a run that has both, or begins one.
    pub(super) fn trigger_and_wait(
        &self,
        guard: &mut SubmitGuard,
        (source, send_doorbell, value): (&Arc<dyn Source>, &SendDoorbell, DoorbellValue),
        (end, arrival, n): (&Arc<dyn Source>, &Arrival<'_>, u64),
    ) -> Result<u64> {
        if !(send_doorbell.is_found() && arrival.is_found()) {
            self.mark_locked(guard);
        }
        let [record, doorbell] = plan::doorbell_ops(&self.gpu, send_doorbell, value)?;
        let [wait, index] = plan::awaited(&self.gpu, &**end, arrival)?;
        let flushes = self.gpu.capabilities().flush == Flush::OnStream;
        let coalesced = &guard.coalesced;
        let is_next = coalesced.awaited == address_of(end) && coalesced.next == n;
        if is_next && coalesced.triggered == address_of(source) && self.continues_run(guard) {
            return match flushes {
                false => self.submit_coalesced(guard, 1, [record, doorbell, wait, index]),
                true => self.submit_coalesced(guard, 1, [record, doorbell, wait, KernelOp::FLUSH, index]),
            };
        }
        let inline = match flushes {
            false => InlineOps::of([record, doorbell, wait, index]),
            true => InlineOps::of([record, doorbell, wait, KernelOp::FLUSH, index]),
        };
        self.send_wait_alone(guard, (source, value), (end, n), inline)
    }

    #[inline(never)]
    fn send_wait_alone(
        &self,
        guard: &mut SubmitGuard,
        (source, value): (&Arc<dyn Source>, DoorbellValue),
        (end, n): (&Arc<dyn Source>, u64),
        mut inline: InlineOps,
    ) -> Result<u64> {
        let put = |queue: &mut VecDeque<Submission>, entry: Entry| {
            let ops = smallvec![Op::Trigger(source.clone(), value), Op::Await(end.clone(), n)];
            queue.push_back(Submission::new(entry, ops, None));
        };
        let seq = self.accept(guard, |guard, done| self.submit_locked((guard, done), &mut inline, put))?;
        if guard.unmarked > 0 {
            (guard.coalesced.triggered, guard.coalesced.awaited, guard.coalesced.next) =
                (address_of(source), address_of(end), n + 1);
        }
        Ok(seq)
    }

    /// Whether one more call continues the run without a mark. Never while the gate is closed.
    #[inline]
    fn continues_run(&self, guard: &SubmitGuard) -> bool {
        let continues_run = guard.coalesced.uncounted < guard.coalesced.room
            && guard.unmarked + 1 < MARK_EVERY
            && !gate::is_closed();
        // Reading the gate without its lock is safe only while a submission is pending, which keeps the reaper from
        // running.
        debug_assert!(
            !continues_run || self.failed() || self.completed() < self.submitted(),
            "an open run without a pending submission"
        );
        continues_run
    }

    /// Submits one more call of the run, with `waits` waits.
    #[inline(always)]
    fn submit_coalesced<const N: usize>(
        &self,
        guard: &mut SubmitGuard,
        waits: u64,
        ops: [KernelOp; N],
    ) -> Result<u64> {
        if self.failed() {
            return Err(self.why_failed());
        }
        let _joined = if self.needs_context { Some(self.gpu.join().map_err(not_joined)?) } else { None };
        if self.is_captured_by_others(guard) {
            return Err(graph::within_another());
        }
        let seq = self.submitted() + 1;
        self.submitted.store(seq, Ordering::Release);
        guard.coalesced.uncounted += 1;
        guard.unmarked += 1;
        if waits > 0 {
            guard.coalesced.next += waits;
            guard.coalesced.waits += waits;
            self.behind.store(guard.coalesced.waits, Ordering::Release);
        }
        Ok(self.issued(seq, self.run_inline(seq, ops)))
    }

    /// Like [`Shared::run`], for a number of operations known at compile time.
    #[inline]
    fn run_inline<const N: usize>(&self, seq: u64, ops: [KernelOp; N]) -> gdrcopy::Result<()> {
        let api = self.gpu.api();
        if let Some(kernel_exec) = self.kernel_exec.as_ref().filter(|_| plan::fits_kernel(&ops)) {
            return kernel_exec.launch_few(api, self.stream, self.head(seq), ops);
        }
        // Not `map`, which is not inlined.
        let mut memops = [const { KernelOp::BARRIER.memop() }; N];
        for (to, op) in memops.iter_mut().zip(&ops) {
            *to = op.memop();
        }
        #[expect(clippy::cast_possible_truncation, reason = "at most six")]
        let count = const { N as u32 };
        // SAFETY: `memops` has `count` operations. Their words are mapped for the GPU, and the submission keeps them
        // alive.
        unsafe { api.stream_batch_mem_op(self.stream, count, memops.as_mut_ptr(), 0) }
    }

    /// Ends the run: adds its calls to the queue.
    pub(super) fn end_run(&self, guard: &mut SubmitGuard, state: &mut State) {
        let CoalescedRun { uncounted, waits, .. } = mem::take(&mut guard.coalesced);
        if uncounted == 0 {
            return;
        }
        self.behind.store(0, Ordering::Relaxed);
        if let Some(first) = state.queue.back_mut() {
            first.seq += uncounted as u64;
            first.calls += uncounted;
            first.more = waits;
            state.calls += uncounted;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use gdsync_testkit::driver;

    use super::super::{CudaEngine, CudaStreamConfig, Via};
    use crate::stream::SubmitLock;
    use crate::stream::engine::Engine;
    use crate::stream::{Batch, Stream};
    use crate::verbs::{Context, RecvWr, SendWr};
    use gdsync_device::cuda::Gpu;
    use gdsync_device::error::Error;
    use gdsync_soft::SoftHcaConfig;

    const LIMIT: Duration = Duration::from_millis(100);
    const PATIENCE: Duration = Duration::from_secs(60);

    /// The submitter keeps the lock, as if blocked in the driver: no mark ends the run, and only the run's own count is
    /// visible.
    #[test]
    fn the_deadline_of_a_later_wait_of_an_open_run_is_kept() {
        let gpu = Gpu::open_with(driver::api(), 0, driver::gdr().ok()).unwrap();
        let pd = Context::soft(&SoftHcaConfig::default()).unwrap().alloc_pd().unwrap();
        let (a, b) = (pd.build_qp().build().unwrap(), pd.build_qp().build().unwrap());
        a.connect(b.address()).unwrap();
        b.connect(a.address()).unwrap();
        a.post_recv(&[RecvWr { wr_id: 0, sges: &[] }; 4]).unwrap();
        b.post_send(&[SendWr::send(&[]), SendWr::send(&[])]).unwrap();
        b.wait_all_sends(PATIENCE).unwrap();
        let submit_lock = std::sync::Arc::<SubmitLock>::default();
        let config = CudaStreamConfig { wait_limit: LIMIT, via: Via::MemOp, ..CudaStreamConfig::default() };
        let engine = CudaEngine::start(&gpu, config, submit_lock.clone()).unwrap();
        let mut held = submit_lock.lock();
        let end = &a.recv.end;
        let start = Instant::now();
        for n in 0..4 {
            engine.wait(&mut held.guard, end.source(), &end.cq.arrival(n), n).unwrap();
        }
        let error = loop {
            match engine.error() {
                Some(error) => break error,
                None => assert!(start.elapsed() < PATIENCE, "the deadline of the third wait is not kept"),
            }
            std::thread::yield_now();
        };
        assert!(start.elapsed() >= LIMIT);
        let (name, qp) = (end.source().describe(), format!("QP {:#x}", a.qpn()));
        assert!(matches!(&error, Error::StreamWait { what, after: LIMIT, .. } if *what == name), "{error}");
        assert!(name.contains("receive completion") && name.contains(&qp), "{name}");
        // The waits are released too: the third and the next.
        submit_lock.unlock(held, |state| engine.mark(&mut state.guard));
        assert!(engine.wait_completed(4, Instant::now() + PATIENCE));
    }

    #[test]
    fn the_device_does_not_attend_to_a_refused_wait() {
        let gpu = Gpu::open_with(driver::api(), 0, driver::gdr().ok()).unwrap();
        let pd = Context::soft(&SoftHcaConfig::default()).unwrap().alloc_pd().unwrap();
        let (a, b) = (pd.build_qp().build().unwrap(), pd.build_qp().build().unwrap());
        a.connect(b.address()).unwrap();
        b.connect(a.address()).unwrap();
        let stream = Stream::cuda(&gpu, CudaStreamConfig::default()).unwrap();
        let may_unwatch = || a.send.end.cq.parts().event.may_unwatch(0);
        let mut batch = Batch::new();
        batch.send(&a, &SendWr::nop()).unwrap();
        batch.wait_send(&a).unwrap();
        batch.mark(7, true).unwrap();
        assert!(!may_unwatch(), "a submitted wait is below the watch limit");
        batch.unmark();
        stream.abort();
        assert!(matches!(stream.submit(&mut batch), Err(Error::StreamAborted { .. })));
        assert!(may_unwatch());
    }
}
