//! Steps that kernels of the application run: `gdsync.cuh` is the other side.
//!
//! A launch is one submission of its stream, of two calls: the application's kernel, and one behind it that runs what the
//! first has left and writes the mark.

use std::sync::Arc;

use super::completed::CompletedSubmissions;
use super::graph::within_another;
use super::instance::Pool;
use super::plan::{self};
use super::shared::{Shared, SubmitGuard};
use crate::stream::op::{Op, Ops};
use gdsync_device::cuda::Gpu;
use gdsync_device::cuda::kernel_exec::Program;
use gdsync_device::error::{Error, Result};

/// Steps that can be launched.
#[derive(Debug)]
pub(super) struct StepPool {
    gpu: Gpu,
    /// Operations of each step.
    sizes: Vec<usize>,
    pool: Arc<Pool>,
}

/// For a stream that cannot run them.
pub(super) fn elsewhere() -> Error {
    Error::Unsupported {
        what: "steps of a kernel on a stream of another GPU, or one that does not run operations by a kernel",
        by: "kernels, which keep the deadlines of their waits by the means of `Via::Kernel`",
        fix: "record and launch them on streams of the same GPU with `Via::Kernel`",
    }
}

impl Shared {
    /// How many operations a batch has as a step.
    pub(super) fn size_of_step(&self, ops: &[Op]) -> Result<usize> {
        if !self.by_kernel() {
            return Err(elsewhere());
        }
        plan::program(&self.gpu, ops).map(|program| program.len())
    }

    /// Makes room for steps of so many operations each.
    pub(super) fn make_steps(&self, sizes: Vec<usize>) -> Result<Arc<StepPool>> {
        let pool = Arc::new(Pool::of_steps(&self.gpu, &sizes)?);
        Ok(Arc::new(StepPool { gpu: self.gpu.clone(), sizes, pool }))
    }

    /// Arms the steps that end at `ends`, and has `kernel` launch what runs them; what it says is passed on.
    pub(super) fn launch_steps(
        &self,
        turn: &mut SubmitGuard,
        step_pool: &StepPool,
        ops: &mut Ops,
        ends: &[usize],
        kernel: &mut dyn FnMut(u64) -> bool,
    ) -> Result<u64> {
        if self.gpu.raw_context() != step_pool.gpu.raw_context() || !self.by_kernel() {
            return Err(elsewhere());
        }
        self.mark_before_registering(turn, ops);
        let steps = step_pool.plan(ops, ends)?;
        self.accept(turn, |turn, done| {
            self.launch_steps_in_turn((turn, done), step_pool, ops, &steps, kernel)
        })
    }

    fn launch_steps_in_turn<'s>(
        &'s self,
        (turn, done): (&mut SubmitGuard, &mut CompletedSubmissions<'s>),
        step_pool: &StepPool,
        ops: &mut Ops,
        steps: &[Program],
        kernel: &mut dyn FnMut(u64) -> bool,
    ) -> Result<u64> {
        const CALLS: usize = 2;
        if self.is_captured_by_others(turn) {
            return Err(within_another());
        }
        let Some(kernel_exec) = &self.kernel_exec else { return Err(elsewhere()) };
        let launching = step_pool.pool.lock();
        let instance = self.instance(turn, &step_pool.pool)?;
        let seq = self.submitted() + 1;
        let addr = instance.arm_steps(self.head(seq), steps, self.mark_of(seq))?;
        self.enqueue_launch(turn, done, ops, CALLS, &instance)?;
        drop(launching);
        // Who waits for submissions that are over does not wait for the application.
        *done = CompletedSubmissions::nothing();
        if !kernel(addr) {
            // Nothing runs: the submission is over as soon as the stream gets there.
            self.take_back(seq, ops);
            self.mark_in_turn(turn);
            return Err(Error::StreamAborted { stream: self.config.name.clone() });
        }
        let answer = kernel_exec.finish(self.gpu.api(), self.stream, addr);
        if answer.is_ok() {
            (turn.marked, turn.unmarked) = (seq, 0);
        }
        Ok(self.issued(seq, answer))
    }

    /// Gives the operations of the last submission back.
    fn take_back(&self, seq: u64, ops: &mut Ops) {
        let mut state = self.lock();
        if let Some(submission) = state.queue.back_mut().filter(|last| last.seq == seq) {
            std::mem::swap(&mut submission.ops, ops);
        }
    }
}

impl StepPool {
    /// What the steps of a launch do whose batches end at `ends`: not more than there is room for.
    fn plan(&self, ops: &[Op], ends: &[usize]) -> Result<Vec<Program>> {
        let starts = std::iter::once(0).chain(ends.iter().copied());
        let steps = starts.zip(ends).map(|(start, &end)| plan::program(&self.gpu, &ops[start..end]));
        let steps: Vec<_> = steps.collect::<Result<_>>()?;
        let fits = steps.len() == self.sizes.len()
            && steps.iter().zip(&self.sizes).all(|(step, &size)| step.len() <= size);
        fits.then_some(steps).ok_or(Error::Unsupported {
            what: "a launch with more operations than were recorded",
            by: "the steps of a kernel",
            fix: "record the steps again",
        })
    }
}
