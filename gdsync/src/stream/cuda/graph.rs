//! CUDA graphs and kernel steps. A captured batch becomes graph nodes; each launch first writes into them what it has made anew.
//! Kernel steps are run by application kernels with `gdsync.cuh`.
//!
//! A launch is one submission of its stream. A launch of steps has two calls: the application's kernel, and one after
//! it that runs the steps it has skipped and writes the mark.

use std::ptr;
use std::sync::Arc;

use gdrcopy::cuda::CudaStatus;
use gdrcopy::cuda::raw::Api;
use gdrcopy::cuda::raw::layout::{CAPTURE_RELAXED, EdgeData, Handle};

use super::instance::{Launching, Made, Pool};
use super::plan::{self, ByKernel, Call, Plan};
use super::shared::{CompletedSubmissions, MARK_EVERY, Shared, SubmitGuard};
use crate::stream::graph::EngineGraph;
use crate::stream::op::{Kept, Op, Ops};
use gdsync_device::cuda::Gpu;
use gdsync_device::cuda::kernel_exec::Grid;
use gdsync_device::error::{Error, Result};

/// `CU_STREAM_CAPTURE_STATUS_NONE`.
const NO_CAPTURE: u32 = 0;

/// A capture in progress.
#[derive(Debug, Default)]
pub(super) struct Captured {
    /// The nodes of each batch.
    batches: Vec<Vec<(Handle, Call)>>,
    /// Of all batches.
    plan: Plan,
    /// Set after a partially captured batch: the capture is unusable.
    spoiled: Option<Error>,
}

/// A graph that can be launched.
#[derive(Debug)]
pub(super) struct Exec {
    gpu: Gpu,
    by_kernel: ByKernel,
    /// The graph that owns the nodes.
    _graph: OwnedGraph,
    pool: Arc<Pool>,
}

/// A graph, destroyed on drop.
#[derive(Debug)]
struct OwnedGraph {
    gpu: Gpu,
    graph: Handle,
}

/// The error for a graph that the stream cannot launch.
pub(super) fn other_gpu() -> Error {
    Error::Unsupported {
        what: "launching a graph on a stream of another GPU or another `Via`",
        by: "CUDA graphs",
        fix: "capture it on a stream of the same GPU and the same `Via`",
    }
}

/// The error for a stream that the application is capturing.
#[cold]
pub(super) fn within_another() -> Error {
    Error::Unsupported {
        what: "a submission to a stream that the application captures",
        by: "CUDA graphs, whose launches repeat the same operations",
        fix: "capture with Stream::capture instead, and launch the application's work on Stream::raw in it",
    }
}

impl Shared {
    /// Whether the stream is being captured. The context must be current, if the driver requires it.
    pub(super) fn is_captured(&self) -> gdrcopy::Result<bool> {
        capture_of(self.gpu.api(), self.stream).map(|(status, _)| status != NO_CAPTURE)
    }

    pub(super) fn begin_capture(&self, guard: &mut SubmitGuard) -> Result<()> {
        if self.gpu.within(|_| self.is_captured()).map_err(Error::cuda("asking for a capture"))? {
            return Err(within_another());
        }
        // Marks queued during a capture would be captured: mark now, so that none is needed until its end.
        self.mark_locked(guard);
        self.error().or(self.lock().refused.clone()).map_or(Ok(()), Err)?;
        // SAFETY: the stream is of this context and outlives this value.
        let begun = self.gpu.within(|api| unsafe { api.stream_begin_capture(self.stream, CAPTURE_RELAXED) });
        begun.map_err(Error::cuda("beginning a capture"))?;
        guard.capture = Some(Captured::default());
        Ok(())
    }

    /// Captures a batch.
    pub(super) fn record(&self, guard: &mut SubmitGuard, ops: &[Op], anew: &[bool]) -> Result<()> {
        if ops.iter().any(|op| matches!(op, Op::HostFn(_))) {
            return Err(Error::Unsupported {
                what: "a host function in a graph of CUDA",
                by: "this library, whose launches update the operations of nodes, but not functions",
                fix: "launch a kernel in its place, or submit the function before or after each launch",
            });
        }
        let plan = plan::of_batch(&self.gpu, ops, anew, self.by_kernel)?;
        if let Some(error) = self.error() {
            return Err(error);
        }
        let captured = guard.capture.get_or_insert_default();
        if let Some(error) = &captured.spoiled {
            return Err(error.clone());
        }
        let calls = captured.plan.join(plan);
        let mut last = captured.batches.iter().flatten().next_back().map_or(0, |(handle, _)| *handle);
        let mut node = |api: &Api, call| self.node(api, call, last).inspect(|(handle, _)| last = *handle);
        let nodes = self.gpu.within(|api| calls.into_iter().map(|call| node(api, call)).collect());
        match nodes {
            Ok(nodes) => captured.batches.push(nodes),
            Err(error) => {
                let error = Error::cuda("capturing a batch")(error);
                captured.spoiled = Some(error.clone());
                return Err(error);
            }
        }
        Ok(())
    }

    /// Whether the next node would depend on this one only.
    fn ends_with(&self, api: &Api, node: Handle) -> bool {
        node != 0 && capture_of(api, self.stream).is_ok_and(|(_, last)| last == node)
    }

    /// Captures a call behind the node of this library that was captured last, and returns its node.
    fn node(&self, api: &Api, call: Call, last: Handle) -> gdrcopy::Result<(Handle, Call)> {
        match &call {
            // Two H200s: behind a kernel of the application 0.5 us slower if it started before.
            Call::Ops(ops) => self.run(0, ops, self.ends_with(api, last))?,
            Call::Copy(copy) => self.copy(*copy)?,
            Call::HostFn(_) => {}
        }
        let (_, handle) = capture_of(api, self.stream)?;
        Ok((handle, call))
    }

    pub(super) fn end_capture(&self, guard: &mut SubmitGuard) -> Result<Arc<Exec>> {
        let captured = guard.capture.take().unwrap_or_default();
        let mut graph = 0;
        // SAFETY: the stream is being captured; `graph` is a place for the answer.
        let ended = self.gpu.within(|api| unsafe { api.stream_end_capture(self.stream, &mut graph) });
        // Destroyed on all paths.
        let owned = OwnedGraph { gpu: self.gpu.clone(), graph };
        captured.spoiled.map_or(Ok(()), Err)?;
        ended.map_err(Error::cuda("ending a capture"))?;
        let (gpu, by_kernel) = (self.gpu.clone(), self.by_kernel);
        let nodes = gpu
            .within(|api| fuse(api, graph, captured.batches, by_kernel.ops))
            .map_err(Error::cuda("joining the kernels of a graph"))?;
        let launching = Launching::new(nodes, by_kernel.ops);
        let pool = Pool::of_graph(&gpu, self.kernel_exec.as_ref(), graph, (launching, captured.plan.slots))?;
        let pool = Arc::new(pool);
        Ok(Arc::new(Exec { gpu, by_kernel, _graph: owned, pool }))
    }

    pub(super) fn launch(
        &self,
        guard: &mut SubmitGuard,
        exec: &Exec,
        kept: Kept,
        ops: &mut Ops,
    ) -> Result<u64> {
        if self.gpu.raw_context() != exec.gpu.raw_context() || self.by_kernel.ops != exec.by_kernel.ops {
            return Err(other_gpu());
        }
        self.mark_before_registering(guard, ops);
        let steps = plan::steps(&self.gpu, ops, exec.by_kernel)?;
        let mut done = CompletedSubmissions::nothing();
        let _joined = self.begin(guard, true)?;
        let mut launching = exec.pool.lock();
        let count = 1 + launching.nodes();
        let seq = self.submitted() + 1;
        let head = self.head(seq);
        let instance = self.instance(guard, &exec.pool, (&head, &kept.numbers))?;
        let made = Made { gpu: &self.gpu, by_kernel: exec.by_kernel, steps: &steps, kept: &kept };
        exec.pool.arm(&instance, &mut launching, head, &made)?;
        self.enqueue(guard, &mut done, (count, 0), (ops, Some((instance.clone(), kept))))?;
        // SAFETY: the queued submission keeps the instance, and all memory that its nodes access, alive.
        let answer = self.gpu.within(|api| unsafe { api.graph_launch(instance.handle(), self.stream) });
        drop(launching);
        guard.unmarked += count;
        // A caller that waits for a free instance must not wait for later launches.
        if answer.is_ok() && (guard.unmarked >= MARK_EVERY || instance.is_in_memory()) {
            self.mark_locked(guard);
        }
        Ok(self.issued(seq, answer))
    }
}

impl Drop for OwnedGraph {
    fn drop(&mut self) {
        if self.graph == 0 || !self.gpu.is_here() {
            return;
        }
        // SAFETY: created for this value and destroyed once. Instances do not need it.
        let done = self.gpu.within(|api| unsafe { api.graph_destroy(self.graph) });
        if let Err(error) = done {
            tracing::debug!(%error, "a graph was not destroyed");
        }
    }
}

/// The capture status of a stream, and the node that the next one would depend on; 0 for none or several.
fn capture_of(api: &Api, stream: Handle) -> gdrcopy::Result<(u32, Handle)> {
    let (mut status, mut id, mut graph, mut nodes, mut count) = (NO_CAPTURE, 0, 0, ptr::null(), 0);
    // SAFETY: all pointers are to local places for the answers.
    unsafe { api.stream_get_capture_info(stream, &mut status, &mut id, &mut graph, &mut nodes, &mut count) }?;
    let node = match count {
        // SAFETY: `nodes` has `count` entries, valid until the next call for this stream.
        1 => unsafe { *nodes },
        _ => 0,
    };
    Ok((status, node))
}

/// Has one kernel do what several in a row were captured for, where the graph has nothing between them: from one kernel to the next
/// takes 1 us. Returns the nodes, which have the same operations in the same order.
fn fuse(
    api: &Api,
    graph: Handle,
    batches: Vec<Vec<(Handle, Call)>>,
    mut may_join: bool,
) -> gdrcopy::Result<Vec<(Handle, Call)>> {
    let mut nodes: Vec<(Handle, Call)> = Vec::new();
    for mut batch in batches {
        if let (Some((before, Call::Ops(ops))), Some((node, Call::Ops(next)))) =
            (nodes.last_mut(), batch.first())
            && may_join
            && plan::may_join(ops, next)
            && follows_alone(api, *before, *node)?
            && (Grid::of(next).may_wait() || !starts_ahead(api, *before)?)
        {
            may_join = replace(api, graph, *node, *before)?;
            if may_join {
                ops.extend_from_slice(next);
                batch.remove(0);
            }
        }
        nodes.append(&mut batch);
    }
    Ok(nodes)
}

/// Whether it starts before a kernel ahead of it has ended.
fn starts_ahead(api: &Api, node: Handle) -> gdrcopy::Result<bool> {
    Ok(dependencies(api, node)?.iter().any(|(_, edge)| *edge != EdgeData::default()))
}

/// Whether `next` depends on `node` only, and nothing else does: false where the driver is too old to tell.
fn follows_alone(api: &Api, node: Handle, next: Handle) -> gdrcopy::Result<bool> {
    let is_only = |nodes: Vec<(Handle, EdgeData)>, node| matches!(nodes[..], [(other, _)] if other == node);
    if api.graph_node_get_dependent_nodes.is_none() || node == 0 || next == 0 {
        return Ok(false);
    }
    Ok(is_only(dependents(api, node)?, next) && is_only(dependencies(api, next)?, node))
}

/// Destroys a node and has what depends on it depend on another one. False, and nothing is changed, in a graph that allocates memory.
fn replace(api: &Api, graph: Handle, node: Handle, by: Handle) -> gdrcopy::Result<bool> {
    let (to, edges): (Vec<_>, Vec<_>) = dependents(api, node)?.into_iter().unzip();
    // SAFETY: a node of a graph that is not instantiated yet.
    match unsafe { api.graph_destroy_node(node) } {
        Err(gdrcopy::Error::Cuda { status: CudaStatus::NOT_SUPPORTED, .. }) => return Ok(false),
        destroyed => destroyed?,
    }
    if !to.is_empty() {
        let from = vec![by; to.len()];
        // SAFETY: nodes of the graph; three arrays of this length.
        unsafe { api.graph_add_dependencies(graph, from.as_ptr(), to.as_ptr(), edges.as_ptr(), to.len()) }?;
    }
    Ok(true)
}

fn dependencies(api: &Api, node: Handle) -> gdrcopy::Result<Vec<(Handle, EdgeData)>> {
    // SAFETY: a node; `neighbours` gives places for the answers.
    neighbours(|nodes, edges, count| unsafe { api.graph_node_get_dependencies(node, nodes, edges, count) })
}

fn dependents(api: &Api, node: Handle) -> gdrcopy::Result<Vec<(Handle, EdgeData)>> {
    // SAFETY: a node; `neighbours` gives places for the answers.
    neighbours(|nodes, edges, count| unsafe { api.graph_node_get_dependent_nodes(node, nodes, edges, count) })
}

/// The nodes that `get` tells of, which is asked for their number first.
fn neighbours(
    get: impl Fn(*mut Handle, *mut EdgeData, *mut usize) -> gdrcopy::Result<()>,
) -> gdrcopy::Result<Vec<(Handle, EdgeData)>> {
    let mut count = 0;
    get(ptr::null_mut(), ptr::null_mut(), &mut count)?;
    let (mut nodes, mut edges) = (vec![0; count], vec![EdgeData::default(); count]);
    if count > 0 {
        get(nodes.as_mut_ptr(), edges.as_mut_ptr(), &mut count)?;
    }
    Ok(nodes.into_iter().zip(edges).take(count).collect())
}

/// Recorded steps and their memory.
#[derive(Debug)]
pub(super) struct StepPool {
    gpu: Gpu,
    pool: Arc<Pool>,
}

/// The error for a stream that cannot run the steps.
pub(super) fn other_executor() -> Error {
    Error::Unsupported {
        what: "steps of a kernel on a stream of another GPU, or without `Via::Kernel`",
        by: "kernel steps, which need `Via::Kernel` to keep the deadlines of their waits",
        fix: "record and launch them on streams of the same GPU with `Via::Kernel`",
    }
}

impl Shared {
    /// Plans a batch as a step.
    pub(super) fn record_step(&self, ops: &[Op], anew: &[bool]) -> Result<Plan> {
        if !self.by_kernel() {
            return Err(other_executor());
        }
        plan::of_step(&self.gpu, ops, anew)
    }

    /// Makes steps of what [`Shared::record_step`] has planned.
    pub(super) fn make_steps(&self, steps: Vec<EngineGraph>) -> Result<Arc<StepPool>> {
        let mut plan = Plan::default();
        let steps = steps.into_iter().filter_map(|step| Arc::into_inner(step.downcast().ok()?));
        let calls: Vec<_> = steps.flat_map(|step| plan.join(step)).map(|call| (0, call)).collect();
        let pool = Arc::new(Pool::of_steps(&self.gpu, (Launching::new(calls, true), plan.slots))?);
        Ok(Arc::new(StepPool { gpu: self.gpu.clone(), pool }))
    }

    /// Queues steps. `kernel` launches the kernel that runs them and returns whether it did.
    pub(super) fn launch_steps(
        &self,
        guard: &mut SubmitGuard,
        step_pool: &StepPool,
        kept: Kept,
        ops: &mut Ops,
        kernel: &mut dyn FnMut(u64) -> bool,
    ) -> Result<u64> {
        const CALLS: usize = 2;
        if self.gpu.raw_context() != step_pool.gpu.raw_context() || !self.by_kernel() {
            return Err(other_executor());
        }
        self.mark_before_registering(guard, ops);
        let steps = plan::steps(&self.gpu, ops, ByKernel::ALL)?;
        let mut done = CompletedSubmissions::nothing();
        let _joined = self.begin(guard, true)?;
        let Some(kernel_exec) = &self.kernel_exec else { return Err(other_executor()) };
        let mut launching = step_pool.pool.lock();
        let made = Made { gpu: &self.gpu, by_kernel: ByKernel::ALL, steps: &steps, kept: &kept };
        step_pool.pool.put(&mut launching, &made)?;
        let seq = self.submitted() + 1;
        let head = self.head(seq);
        let instance = self.instance(guard, &step_pool.pool, (&head, &[]))?;
        let addr = instance.arm_steps(head, &launching, self.mark_of(seq))?;
        self.enqueue(guard, &mut done, (CALLS, 0), (ops, Some((instance, kept))))?;
        drop(launching);
        // Dropped now: waiters for completed submissions must not wait for the application.
        drop(done);
        if !kernel(addr) {
            // Nothing was launched: the submission is over when the stream reaches the mark.
            self.take_back(seq, ops);
            self.mark_locked(guard);
            return Err(Error::StreamAborted { stream: self.config.name.clone() });
        }
        let answer = kernel_exec.finish(self.gpu.api(), self.stream, addr);
        if answer.is_ok() {
            (guard.marked, guard.unmarked) = (seq, 0);
        }
        Ok(self.issued(seq, answer))
    }

    /// Returns the operations of the last submission.
    fn take_back(&self, seq: u64, ops: &mut Ops) {
        let mut state = self.lock();
        if let Some(submission) = state.queue.back_mut().filter(|last| last.seq == seq) {
            std::mem::swap(&mut submission.ops, ops);
            submission.launched = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use gdsync_device::memory::Memory;
    use gdsync_testkit::{driver, kernels};

    use super::*;
    use crate::stream::{CudaStreamConfig, Stream, Via};

    /// Batches in a row are one kernel, and what the application captures between them stays between them.
    #[test]
    fn kernels_in_a_row_are_one() {
        let control = driver::Control::take();
        kernels::register();
        let gpu = Gpu::open_with(driver::api(), 0, driver::gdr().ok()).unwrap();
        let (memory, words) = (gpu.alloc(4096).unwrap(), Memory::alloc(64).unwrap());
        let stream = Stream::cuda(&gpu, CudaStreamConfig { via: Via::Kernel, ..Default::default() }).unwrap();
        let at = |i: usize| (memory.word64(8 * i).unwrap(), words.word64(8 * i).unwrap());
        let fill = |value| {
            let (addr, raw) = (memory.gpu_addr(&gpu).unwrap(), stream.raw().unwrap());
            // SAFETY: a word of the memory, which outlives the graph.
            gpu.within(|api| unsafe { api.memset_d32_async(addr, value, 1, raw) })
        };
        let record = || {
            stream.capture(|stream| {
                stream.write_value64(&at(0).0, 5)?;
                stream.write_value64(&at(0).1, 1)?;
                stream.wait_value64(&at(0).1, 1, crate::stream::Cond::Eq)?;
                fill(7).map_err(Error::cuda("filling"))?;
                stream.write_value64(&at(1).1, 2)?;
                stream.write_value64(&at(2).1, 3)
            })
        };
        let graph = record();
        assert_eq!(control.calls("cuGraphDestroyNode"), 3);
        // As in a graph that allocates memory.
        control.fail("cuGraphDestroyNode", 801);
        let apart = record();
        for graph in [&graph, &apart].repeat(3) {
            words.write(0, &[0; 64]).unwrap();
            graph.as_ref().unwrap().launch(&stream).unwrap();
            stream.synchronize(Duration::from_secs(10)).unwrap();
            assert_eq!([0, 1, 2].map(|i| at(i).1.load()), [1, 2, 3]);
            assert_eq!(at(0).0.load(), 7, "the fill comes behind the first write");
        }
    }
}
