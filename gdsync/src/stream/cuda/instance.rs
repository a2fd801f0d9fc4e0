//! Instances of graphs, and how their nodes get their operations.
//!
//! The driver lets an instantiated graph change what differs between launches: words, values and conditions of memory
//! operations, and kernel parameters. That is one call per node, plus more driver work at launch. So a graph with
//! several kernels reads their operations from memory, which each launch writes at once. Such a graph has several
//! instances, because pending launches still read theirs.
//!
//! Most graphs of channels and windows stay the same but for the numbers of messages, and each launch raises all of these by the same
//! amount. Such a launch writes by how much, and the kernels add it. A short program of such a graph is a parameter of its kernel, which
//! is quicker than memory.

use std::ops::Range;
use std::sync::atomic::{Ordering, fence};
use std::sync::{Arc, OnceLock};
use std::{mem, slice};

use parking_lot::{Mutex, MutexGuard};

use gdrcopy::cuda::raw::Api;
use gdrcopy::cuda::raw::layout::{Handle, MemOpNodeParams};

use super::plan::{self, ByKernel, Call, Slot, Slots};
use crate::stream::inbox::word;
use crate::stream::op::{Kept, Op};
use crate::stream::order::Numbers;
use gdsync_device::cuda::Gpu;
use gdsync_device::cuda::kernel_exec::{self, Grid, Head, KernelExecutor, KernelOp, SMALL};
use gdsync_device::error::{Error, Result};
use gdsync_device::memory::Memory;

/// From this many kernels on, a graph keeps operations in memory, and has `INSTANCES` instances.
const IN_MEMORY: usize = 4;
const INSTANCES: usize = 3;

/// The instances of a graph, used in rotation.
#[derive(Debug)]
pub(super) struct Pool {
    instances: Vec<Arc<Instance>>,
    slots: Slots,
    /// Places of each order of messages, 0 of one without, if numbers are all that differs between launches. Known from the first launch
    /// on.
    places: OnceLock<Option<Vec<u64>>>,
    /// Locked while a launch takes an instance and writes its operations, until it is queued.
    launching: Mutex<Launching>,
}

/// The operations of the launch that has the lock.
#[derive(Debug)]
pub(super) struct Launching {
    nodes: Vec<Node>,
    /// Of all nodes.
    ops: Vec<KernelOp>,
    /// As [`Programs`] have them.
    image: Vec<u8>,
}

/// What a launch has made anew, and what it has kept.
pub(super) struct Made<'a> {
    pub(super) gpu: &'a Gpu,
    pub(super) by_kernel: ByKernel,
    pub(super) steps: &'a [KernelOp],
    pub(super) kept: &'a Kept,
}

/// A graph node, or a step of a kernel: one call of a captured batch, or of several.
#[derive(Debug)]
struct Node {
    handle: Handle,
    /// None of a copy by the copy engine.
    ops: Range<usize>,
    /// Of a kernel.
    grid: Option<Grid>,
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
    /// What its operations were written for, if numbers are all that differs between launches.
    written: Mutex<Option<Written>>,
}

/// The head of a launch, which tells its stream, and the last number of each order before it.
#[derive(Debug)]
struct Written {
    head: Head,
    numbers: Numbers,
}

impl Written {
    /// By how much the numbers of a launch are ahead, if that is all that differs: the place that comes next is the same in each order.
    fn ahead(&self, head: &Head, numbers: &[u64], places: &[u64]) -> Option<u64> {
        let each = numbers.iter().zip(&self.numbers).zip(places).filter(|(_, places)| **places > 0);
        let mut each = each.map(|((number, written), places)| (number.wrapping_sub(*written), places));
        let ahead = each.clone().next().map_or(0, |(ahead, _)| ahead);
        let is_same = (self.head.status, self.head.limit_ns) == (head.status, head.limit_ns)
            && each.all(|(each, places)| each == ahead && each % places == 0);
        is_same.then_some(ahead)
    }
}

/// The operations of all kernels of an instance, in memory that the GPU reads; of a graph behind what a launch adds to numbers.
#[derive(Debug)]
struct Programs {
    memory: Memory,
    /// Its GPU address.
    addr: u64,
}

/// Bytes before the operations of a graph: a line of the cache.
const AHEAD: usize = 128;

impl Pool {
    fn new(instances: Vec<Instance>, (launching, slots): (Launching, Slots)) -> Self {
        let instances = instances.into_iter().map(Arc::new).collect();
        Self { instances, slots, places: OnceLock::new(), launching: Mutex::new(launching) }
    }

    /// Creates the instances of a graph with these nodes.
    pub(super) fn of_graph(
        gpu: &Gpu,
        kernel_exec: Option<&Arc<KernelExecutor>>,
        graph: Handle,
        (launching, slots): (Launching, Slots),
    ) -> Result<Self> {
        let nodes = &launching.nodes;
        let in_memory =
            kernel_exec.is_some() && nodes.len() >= IN_MEMORY && nodes.iter().all(|node| node.grid.is_some());
        let one = || {
            let mut instance = Instance::new(gpu, kernel_exec, None);
            // SAFETY: `exec` is a place for the answer; `graph` is valid; no flags.
            gpu.within(|api| unsafe { api.graph_instantiate(&mut instance.exec, graph, 0) })
                .map_err(Error::cuda("instantiating a graph"))?;
            if in_memory {
                let len = AHEAD + nodes.iter().map(room).sum::<usize>();
                instance.programs = Some(Programs::new(gpu, len)?);
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
        Ok(Self::new(instances, (launching, slots)))
    }

    /// Allocates programs for steps.
    pub(super) fn of_steps(gpu: &Gpu, (launching, slots): (Launching, Slots)) -> Result<Self> {
        let len = kernel_exec::room_of_steps(launching.nodes.iter().map(|node| node.ops.len()));
        let one = |_| Ok(Instance::new(gpu, None, Some(Programs::new(gpu, len)?)));
        Ok(Self::new((0..INSTANCES).map(one).collect::<Result<_>>()?, (launching, slots)))
    }

    /// Locks the pool. Hold the lock from [`Pool::free`] until the launch is queued.
    pub(super) fn lock(&self) -> MutexGuard<'_, Launching> {
        self.launching.lock()
    }

    /// Gives a free instance the operations of a launch.
    ///
    /// # Errors
    /// As [`Pool::put`].
    pub(super) fn arm(
        &self,
        instance: &Instance,
        launching: &mut Launching,
        head: Head,
        made: &Made<'_>,
    ) -> Result<()> {
        let places = instance.is_in_memory().then(|| self.places(launching, made.kept)).flatten();
        let Some(places) = places else {
            self.put(launching, made)?;
            return instance.arm(head, launching, false);
        };
        let numbers = &made.kept.numbers;
        let mut written = instance.written.lock();
        let ahead = match written.as_ref().and_then(|written| written.ahead(&head, numbers, places)) {
            Some(ahead) => ahead,
            None => {
                *written = None;
                self.put(launching, made)?;
                instance.arm(Head { submission: instance.tag(), ..head }, launching, true)?;
                *written = Some(Written { head, numbers: numbers.clone() });
                0
            }
        };
        // Without messages it stays 0.
        if places.iter().any(|places| *places > 0) { instance.set_ahead(ahead) } else { Ok(()) }
    }

    /// Puts the steps of a launch among the operations.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for other steps than were captured.
    pub(super) fn put(&self, launching: &mut Launching, made: &Made<'_>) -> Result<()> {
        let Made { gpu, by_kernel, steps, kept } = made;
        let ops = &mut launching.ops;
        let (mut own, mut of_messages) = (self.slots.own.iter(), self.slots.of_messages.iter());
        let mut refused = put(ops, steps, &mut own);
        let kept_ops = if of_messages.len() == 0 { &[][..] } else { &kept.ops };
        for op in kept_ops {
            let Some(Op::Message(message)) = op else { continue };
            let number = message.taken.behind(&kept.numbers);
            // All memory is mapped since the capture.
            message.add_steps(number, gpu, (by_kernel.ops, by_kernel.copies), |steps| {
                refused = refused.or(put(ops, steps, &mut of_messages));
            })?;
        }
        match refused {
            None if own.len() + of_messages.len() == 0 => Ok(()),
            refusal => Err(refusal.unwrap_or(other_operations)()),
        }
    }

    /// Places of each order of messages, if numbers are all that differs between launches: kernels for messages do all that depends on
    /// them, a launch has as many messages of one order as of another one, and as many for one place as for another one.
    fn places(&self, launching: &Launching, kept: &Kept) -> Option<&[u64]> {
        let find = || {
            let Slots { own, of_messages } = &self.slots;
            let adds = |op: &KernelOp| op.is_numbered() || !(op.is_wait() || op.is_fenced());
            let adds_all = |slot: &Slot| matches!(slot, Slot::At(at) if adds(&launching.ops[*at]));
            let is_added = |(node, ops): (&Node, &[KernelOp])| {
                node.grid.is_some_and(|grid| grid.messages) || !ops.iter().any(KernelOp::is_numbered)
            };
            let mut orders = vec![(0, 0); kept.numbers.len()];
            for op in kept.ops.iter().flatten() {
                if let Op::Message(message) = op {
                    orders[message.taken.order] = (message.taken.nth, message.places() as u64);
                }
            }
            let each = orders.iter().map(|(nth, _)| *nth).max();
            let takes_turns =
                |(nth, places): &(u64, u64)| *nth == 0 || Some(*nth) == each && nth % places == 0;
            let is_same = own.is_empty()
                && of_messages.iter().all(adds_all)
                && launching.programs().all(is_added)
                && orders.iter().all(takes_turns);
            is_same.then(|| orders.into_iter().map(|(_, places)| places).collect())
        };
        self.places.get_or_init(find).as_deref()
    }

    /// A free instance, rather one whose operations a launch with this head and these numbers can keep. The caller holds the pool's lock.
    pub(super) fn free(&self, head: &Head, numbers: &[u64]) -> Option<Arc<Instance>> {
        let places = self.places.get().and_then(Option::as_deref).unwrap_or(&[]);
        let work = |instance: &&Arc<Instance>| match &*instance.written.lock() {
            Some(written) if written.ahead(head, numbers, places).is_some() => 0,
            None => 1,
            Some(_) => 2,
        };
        self.instances.iter().filter(|instance| instance.is_free()).min_by_key(work).cloned()
    }

    /// Whether there is a free instance.
    pub(super) fn is_free(&self) -> bool {
        self.instances.iter().any(|instance| instance.is_free())
    }
}

impl Instance {
    fn new(gpu: &Gpu, kernel_exec: Option<&Arc<KernelExecutor>>, programs: Option<Programs>) -> Self {
        let kernel_exec = kernel_exec.cloned();
        Self { gpu: gpu.clone(), kernel_exec, exec: 0, programs, written: Mutex::default() }
    }

    pub(super) fn handle(&self) -> Handle {
        self.exec
    }

    /// Whether no pending launch reads its operations. Each clone of the `Arc` counts as a launch, so this makes none:
    /// the watchdog asks while others launch.
    pub(super) fn is_free(self: &Arc<Self>) -> bool {
        if self.is_in_memory() && Arc::strong_count(self) > 1 {
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
        let mut addr = programs.addr + AHEAD as u64;
        let mut point = |api: &Api, node: &Node| {
            let Some(grid) = node.grid else { return Ok(()) };
            kernel_exec.point(api, (self.exec, node.handle), grid, (addr, programs.addr))?;
            addr += room(node) as u64;
            Ok(())
        };
        self.within(|api| nodes.iter().try_for_each(|node| point(api, node)))
    }

    /// Writes the operations of a launch, or of all that differ in numbers only: short ones as parameters.
    fn arm(&self, head: Head, launching: &mut Launching, is_for_all: bool) -> Result<()> {
        let Some(programs) = &self.programs else {
            return self.within(|api| {
                launching.programs().try_for_each(|program| self.arm_node(api, (head, 0), program))
            });
        };
        let mut image = mem::take(&mut launching.image);
        image.resize(programs.memory.len() - AHEAD, 0);
        let mut rest = &mut image[..];
        for (node, ops) in launching.programs() {
            match is_for_all && ops.len() <= SMALL {
                true => self.within(|api| self.arm_node(api, (head, programs.addr), (node, ops)))?,
                false => kernel_exec::put(rest, head, ops),
            }
            rest = &mut rest[room(node)..];
        }
        programs.write(AHEAD, &image)?;
        launching.image = image;
        Ok(())
    }

    fn within(&self, call: impl FnOnce(&Api) -> gdrcopy::Result<()>) -> Result<()> {
        self.gpu.within(call).map_err(Error::cuda("preparing a graph"))
    }

    /// Writes what the next launch adds to the words that announce messages.
    fn set_ahead(&self, numbers: u64) -> Result<()> {
        let ahead = word(numbers, 0).to_ne_bytes();
        self.programs.as_ref().map_or(Ok(()), |programs| programs.write(0, &ahead))
    }

    /// What kernels tell in place of the number of their submission, where operations are for all launches. At most one is pending.
    pub(super) fn tag(&self) -> u64 {
        self.programs.as_ref().map_or(0, |programs| programs.addr | 1 << 63)
    }

    /// Writes the steps of a launch into its memory. Returns their GPU address.
    pub(super) fn arm_steps(&self, head: Head, launching: &Launching, mark: KernelOp) -> Result<u64> {
        let Some(programs) = &self.programs else { return Ok(0) };
        let mut image = vec![0; programs.memory.len()];
        kernel_exec::put_steps(&mut image, head, launching.programs().map(|(_, ops)| ops), mark);
        programs.write(0, &image).map(|()| programs.addr)
    }

    fn arm_node(
        &self,
        api: &Api,
        head: (Head, u64),
        (node, ops): (&Node, &[KernelOp]),
    ) -> gdrcopy::Result<()> {
        match (node.grid, &self.kernel_exec) {
            (Some(grid), Some(kernel_exec)) => {
                kernel_exec.arm(api, (self.exec, node.handle), grid, head, ops)
            }
            _ if ops.is_empty() => Ok(()),
            _ => self.arm_memops(api, node.handle, ops),
        }
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
    fn new(gpu: &Gpu, len: usize) -> Result<Self> {
        let memory = match gpu.alloc_piece(len) {
            Ok(memory) if !memory.needs_flush() => memory,
            _ => gpu.alloc_host_piece(len)?,
        };
        let addr = memory.gpu_addr(gpu)?;
        Ok(Self { memory, addr })
    }

    fn write(&self, at: usize, image: &[u8]) -> Result<()> {
        self.memory.write(at, image)?;
        self.memory.fence();
        Ok(())
    }
}

/// Bytes of a node's program.
fn room(node: &Node) -> usize {
    kernel_exec::room(node.ops.len())
}

impl Launching {
    /// The nodes with these calls, of a stream whose operations kernels run or not.
    pub(super) fn new(calls: Vec<(Handle, Call)>, by_kernel: bool) -> Self {
        let mut ops = Vec::new();
        let node = |(handle, call)| {
            let (start, mut grid) = (ops.len(), None);
            if let Call::Ops(program) = call {
                grid = plan::runs_by_kernel(&program, by_kernel).then(|| Grid::of(&program));
                ops.extend_from_slice(&program);
            }
            Node { handle, ops: start..ops.len(), grid }
        };
        let nodes = calls.into_iter().map(node).collect();
        Self { nodes, ops, image: Vec::new() }
    }

    /// The number of nodes.
    pub(super) fn nodes(&self) -> usize {
        self.nodes.len()
    }

    fn programs(&self) -> impl Iterator<Item = (&Node, &[KernelOp])> {
        self.nodes.iter().map(|node| (node, &self.ops[node.ops.clone()]))
    }
}

/// Writes steps to the next slots. Returns why it cannot.
#[inline]
fn put(ops: &mut [KernelOp], steps: &[KernelOp], slots: &mut slice::Iter<'_, Slot>) -> Option<fn() -> Error> {
    for step in steps {
        match slots.next() {
            Some(Slot::At(at)) if step.fits(&ops[*at]) => ops[*at] = *step,
            Some(Slot::Same(copy)) if copy != step => return Some(other_copy),
            Some(Slot::Same(_) | Slot::Superseded) => {}
            Some(Slot::At(_)) | None => return Some(other_operations),
        }
    }
    None
}

fn other_copy() -> Error {
    Error::Unsupported {
        what: "a launch whose copies by the copy engine are of other memory than was captured",
        by: "CUDA graphs, whose copies stay the same",
        fix: "launch it where its messages go to the places of the capture, give the channel one place, or let kernels copy",
    }
}

fn other_operations() -> Error {
    Error::Unsupported {
        what: "a launch with other operations than were captured",
        by: "graphs and steps of kernels",
        fix: "capture it again",
    }
}
