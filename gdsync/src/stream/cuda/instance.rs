//! Instances of graphs, and how their nodes get their operations.
//!
//! The driver lets an instantiated graph change what differs between launches: words, values and conditions of memory
//! operations, and kernel parameters. That is one call per node, plus more driver work at launch. So a graph with
//! several kernels reads their operations from memory, which each launch writes at once. Such a graph has several
//! instances, because pending launches still read theirs.

use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use parking_lot::{Mutex, MutexGuard};

use gdrcopy::cuda::raw::Api;
use gdrcopy::cuda::raw::layout::{Handle, MemOpNodeParams};

use super::graph::Node;
use super::plan::{self, Call};
use gdsync_device::cuda::Gpu;
use gdsync_device::cuda::kernel_exec::{self, Head, KernelExecutor, KernelOp, Program};
use gdsync_device::error::{Error, Result};
use gdsync_device::memory::Memory;

/// From this many kernels on, a graph keeps operations in memory, and has `INSTANCES` instances.
const IN_MEMORY: usize = 4;
const INSTANCES: usize = 3;

/// The instances of a graph, used in rotation.
#[derive(Debug)]
pub(super) struct Pool {
    instances: Vec<Arc<Instance>>,
    /// Locked while a launch takes an instance and writes its operations, until it is queued.
    launching: Mutex<()>,
}

/// An instantiated graph; or the programs of steps, without a graph.
#[derive(Debug)]
pub(super) struct Instance {
    gpu: Gpu,
    /// The executor of its kernels.
    kernel_exec: Option<Arc<KernelExecutor>>,
    /// 0 without a graph.
    exec: Handle,
    programs: Option<Programs>,
}

/// The operations of all kernels of an instance, in memory that the GPU reads.
#[derive(Debug)]
struct Programs {
    memory: Memory,
    /// Their GPU address.
    addr: u64,
    /// The offset of each node's program.
    places: Vec<usize>,
}

impl Pool {
    fn new(instances: Vec<Instance>) -> Self {
        Self { instances: instances.into_iter().map(Arc::new).collect(), launching: Mutex::default() }
    }

    /// Creates the instances of a graph with these nodes.
    pub(super) fn of_graph(
        gpu: &Gpu,
        kernel_exec: Option<&Arc<KernelExecutor>>,
        graph: Handle,
        nodes: &[Node],
    ) -> Result<Self> {
        let in_memory = kernel_exec.is_some()
            && nodes.len() >= IN_MEMORY
            && nodes.iter().all(|node| node.kernel().is_some());
        let one = || {
            let mut instance =
                Instance { gpu: gpu.clone(), kernel_exec: kernel_exec.cloned(), exec: 0, programs: None };
            // SAFETY: `exec` is a place for the answer; `graph` is valid; no flags.
            gpu.within(|api| unsafe { api.graph_instantiate(&mut instance.exec, graph, 0) })
                .map_err(Error::cuda("instantiating a graph"))?;
            if in_memory {
                instance.programs = Some(Programs::of_nodes(gpu, nodes)?);
                instance.point(nodes)?;
            }
            Ok::<_, Error>(instance)
        };
        let mut instances = vec![one()?];
        while in_memory && instances.len() < INSTANCES {
            match one() {
                Ok(instance) => instances.push(instance),
                Err(error) => {
                    tracing::debug!(%error, "fewer instances of a graph: CUDA allows one if it allocates memory");
                    break;
                }
            }
        }
        Ok(Self::new(instances))
    }

    /// Allocates programs for steps of the given sizes.
    pub(super) fn of_steps(gpu: &Gpu, steps: &[usize]) -> Result<Self> {
        let one = |_| {
            let programs = Programs::new(gpu, kernel_exec::room_of_steps(steps), Vec::new())?;
            Ok(Instance { gpu: gpu.clone(), kernel_exec: None, exec: 0, programs: Some(programs) })
        };
        Ok(Self::new((0..INSTANCES).map(one).collect::<Result<_>>()?))
    }

    /// Locks the pool. Hold the lock from [`Pool::free`] until the launch is queued.
    pub(super) fn lock(&self) -> MutexGuard<'_, ()> {
        self.launching.lock()
    }

    /// A free instance. The caller holds the pool's lock.
    pub(super) fn free(&self) -> Option<Arc<Instance>> {
        self.instances.iter().find(|instance| instance.is_free()).cloned()
    }

    /// Whether there is a free instance.
    pub(super) fn is_free(&self) -> bool {
        self.instances.iter().any(|instance| instance.is_free())
    }
}

impl Instance {
    pub(super) fn handle(&self) -> Handle {
        self.exec
    }

    /// Whether no pending launch reads its operations. Each clone of the `Arc` counts as a launch, so this makes none:
    /// the watchdog asks while others launch.
    pub(super) fn is_free(self: &Arc<Self>) -> bool {
        if self.programs.is_some() && Arc::strong_count(self) > 1 {
            return false;
        }
        // Later writes to its programs must follow all accesses of its last holder.
        fence(Ordering::Acquire);
        true
    }

    /// Whether its operations are in memory. Then it has at most one pending launch.
    pub(super) fn is_in_memory(&self) -> bool {
        self.programs.is_some()
    }

    /// Sets the program addresses of its kernels.
    fn point(&self, nodes: &[Node]) -> Result<()> {
        let (Some(kernel_exec), Some(programs)) = (&self.kernel_exec, &self.programs) else { return Ok(()) };
        let each = || nodes.iter().zip(&programs.places);
        let point = |api: &Api, (node, place): (&Node, &usize)| {
            let Some((_, grid)) = node.kernel() else { return Ok(()) };
            kernel_exec.point(api, (self.exec, node.handle), grid, programs.addr + *place as u64)
        };
        let pointed = self.gpu.within(|api| each().try_for_each(|each| point(api, each)));
        pointed.map_err(Error::cuda("preparing a graph"))
    }

    /// Writes the operations of a launch.
    pub(super) fn arm(&self, head: Head, nodes: &[Node], calls: &[Call]) -> Result<()> {
        if let Some(programs) = &self.programs {
            return programs.put(head, calls);
        }
        self.gpu
            .within(|api| self.arm_each(api, head, nodes, calls))
            .map_err(Error::cuda("preparing a graph"))
    }

    /// Writes the steps of a launch into its memory. Returns their GPU address.
    pub(super) fn arm_steps(&self, head: Head, steps: &[Program], mark: KernelOp) -> Result<u64> {
        let Some(programs) = &self.programs else { return Ok(0) };
        let mut image = vec![0; programs.memory.len()];
        kernel_exec::put_steps(&mut image, head, steps, mark);
        programs.write(&image).map(|()| programs.addr)
    }

    fn arm_each(&self, api: &Api, head: Head, nodes: &[Node], calls: &[Call]) -> gdrcopy::Result<()> {
        for (node, call) in nodes.iter().zip(calls) {
            match (call, &self.kernel_exec) {
                (Call::Ops(ops), Some(kernel_exec)) if node.kernel().is_some() => {
                    kernel_exec.arm(api, (self.exec, node.handle), head, ops)?;
                }
                (Call::Ops(ops), _) => self.arm_memops(api, node.handle, ops)?,
                // The same in each launch; graphs have no host functions.
                (Call::Copy(_) | Call::HostFn(_), _) => {}
            }
        }
        Ok(())
    }

    fn arm_memops(&self, api: &Api, node: Handle, ops: &[KernelOp]) -> gdrcopy::Result<()> {
        plan::with_memops(ops, |count, ops| {
            let params = MemOpNodeParams { context: self.gpu.raw_context(), count, ops, flags: 0 };
            // SAFETY: the node is of this instance and has `count` operations of these kinds. The submission keeps
            // their words alive.
            unsafe { api.graph_exec_mem_op_node_set_params(self.exec, node, &params) }
        })
    }
}

impl Drop for Instance {
    fn drop(&mut self) {
        if self.exec == 0 || !self.gpu.is_here() {
            return;
        }
        // SAFETY: created for this value and destroyed once. A pending launch would keep this value alive.
        let done = self.gpu.within(|api| unsafe { api.graph_exec_destroy(self.exec) });
        if let Err(error) = done {
            tracing::debug!(%error, "an instantiated graph was not destroyed");
        }
    }
}

impl Programs {
    /// In GPU memory, which kernels read fastest; in host memory if GPU memory cannot be mapped, or needs a flush.
    fn new(gpu: &Gpu, len: usize, places: Vec<usize>) -> Result<Self> {
        let memory = match gpu.alloc_piece(len) {
            Ok(memory) if !memory.needs_flush() => memory,
            _ => gpu.alloc_host_piece(len)?,
        };
        let addr = memory.gpu_addr(gpu)?;
        Ok(Self { memory, addr, places })
    }

    fn of_nodes(gpu: &Gpu, nodes: &[Node]) -> Result<Self> {
        let mut len = 0;
        let mut places = Vec::with_capacity(nodes.len());
        for node in nodes {
            places.push(len);
            len += kernel_exec::room(node.kernel().map_or(0, |(ops, _)| ops));
        }
        Self::new(gpu, len, places)
    }

    fn put(&self, head: Head, calls: &[Call]) -> Result<()> {
        let mut image = vec![0; self.memory.len()];
        for (place, call) in self.places.iter().zip(calls) {
            if let Call::Ops(program) = call {
                kernel_exec::put(&mut image[*place..], head, program);
            }
        }
        self.write(&image)
    }

    fn write(&self, image: &[u8]) -> Result<()> {
        self.memory.write(0, image)?;
        self.memory.fence();
        Ok(())
    }
}
