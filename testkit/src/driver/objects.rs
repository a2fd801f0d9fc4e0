//! Events, modules, kernels (Rust functions under names) and graphs, and their entry points.

use std::collections::BTreeMap;
use std::ffi::{CStr, c_char, c_void};
use std::mem::MaybeUninit;
use std::sync::Arc;

use gdrcopy::cuda::CudaStatus;
use gdrcopy::cuda::raw::layout::{EdgeData, Handle, KernelNodeParams, LaunchConfig, MemOpNodeParams};
use parking_lot::Mutex;

use super::context::{CONTEXTS, Table, current};
use super::queue::{Command, Ticket};
use super::status::INVALID_IMAGE;
use super::stream::{GRAPHS, Graph, Node, enqueue, enqueue_anywhere, resolve, unsafe_call};
use super::{Outcome, get, get_all, memop, put, queue, require};

/// `CU_EVENT_BLOCKING_SYNC`, `CU_EVENT_DISABLE_TIMING`, `CU_EVENT_INTERPROCESS`.
const EVENT_FLAGS: u32 = 1 | NO_TIMING | INTERPROCESS;
const NO_TIMING: u32 = 2;
const INTERPROCESS: u32 = 4;

pub(super) static EVENTS: Table<Arc<Event>> = Table::new();

pub(super) struct Event {
    pub(super) context: Handle,
    /// The recorded work; none before the first record.
    recorded: Mutex<Option<Ticket>>,
}

pub(super) fn event_create(event: *mut Handle, flags: u32) -> Outcome {
    let context = current()?.handle;
    let between = flags & INTERPROCESS == 0 || flags & NO_TIMING != 0;
    require(!event.is_null() && flags & !EVENT_FLAGS == 0 && between, CudaStatus::INVALID_VALUE)?;
    put(event, EVENTS.insert(|_| Arc::new(Event { context, recorded: Mutex::default() })))
}

pub(super) fn event_record(event: Handle, stream: Handle) -> Outcome {
    let event = EVENTS.get(event)?;
    require(resolve(stream)?.context.handle == event.context, CudaStatus::INVALID_HANDLE)?;
    let ticket = enqueue(stream, |_| Ok(Command::Mark))?;
    *event.recorded.lock() = ticket;
    Ok(())
}

fn recorded(event: Handle) -> Outcome<Option<Ticket>> {
    Ok(EVENTS.get(event)?.recorded.lock().clone())
}

pub(super) fn event_query(event: Handle) -> Outcome {
    let ticket = recorded(event)?;
    unsafe_call()?;
    match ticket {
        Some(ticket) if !ticket.is_done() => Err(CudaStatus::NOT_READY),
        Some(ticket) => ticket.synchronize(),
        None => Ok(()),
    }
}

pub(super) fn event_destroy(event: Handle) -> Outcome {
    EVENTS.remove(event).map(drop)
}

/// What a kernel is.
#[derive(Clone, Copy)]
struct Kernel {
    /// Bytes of each parameter.
    params: &'static [usize],
    run: fn(&[*mut c_void]),
}

/// A kernel of a loaded module.
#[derive(Clone, Copy)]
struct Function {
    module: Handle,
    context: Handle,
    kernel: Kernel,
}

static KERNELS: Mutex<BTreeMap<&'static str, Kernel>> = Mutex::new(BTreeMap::new());
/// Loaded modules, each with its context.
pub(super) static MODULES: Table<Handle> = Table::new();
static FUNCTIONS: Table<Function> = Table::new();

/// Makes a function the kernel of this name in all modules; a later one of the same name replaces it.
///
/// It runs once for a launch, whatever the grid, on the stream's thread, and gets the addresses of its parameters: copies,
/// as long as `params` says, aligned to 16 bytes. It may wait. It fails its context with 719 by a panic.
pub fn kernel(name: &'static str, params: &'static [usize], run: fn(&[*mut c_void])) {
    KERNELS.lock().insert(name, Kernel { params, run });
}

/// A kernel with its parameters.
#[derive(Clone)]
pub(super) struct Launch {
    kernel: Kernel,
    /// In units that are aligned as any parameter may need. Not all bytes of a structure need be written.
    params: Vec<Vec<MaybeUninit<u128>>>,
}

/// Blocks and threads.
pub(super) struct Shape {
    pub(super) grid: [u32; 3],
    pub(super) block: [u32; 3],
}

impl Launch {
    /// Copies the parameters of a launch in a context.
    pub(super) fn new(
        context: Handle,
        function: Handle,
        shape: &Shape,
        params: *mut *mut c_void,
        extra: *mut *mut c_void,
    ) -> Outcome<Self> {
        let Function { context: own, kernel, .. } = FUNCTIONS.get(function)?;
        require(own == context, CudaStatus::INVALID_HANDLE)?;
        let some = shape.grid.iter().chain(&shape.block).all(|&size| size > 0);
        let threads: u64 = shape.block.iter().map(|&size| u64::from(size)).product();
        require(some && threads <= 1024 && extra.is_null(), CudaStatus::INVALID_VALUE)?;
        let count = u32::try_from(kernel.params.len()).map_err(|_| CudaStatus::INVALID_VALUE)?;
        let places = if count == 0 { Vec::new() } else { get_all(params, count)? };
        let copied = places.iter().zip(kernel.params).map(|(&place, &size)| copy(place, size));
        Ok(Self { kernel, params: copied.collect::<Outcome<_>>()? })
    }

    pub(super) fn run(&self) {
        let mut params = self.params.clone();
        let places: Vec<*mut c_void> = params.iter_mut().map(|param| param.as_mut_ptr().cast()).collect();
        (self.kernel.run)(&places);
    }
}

fn copy(place: *const c_void, size: usize) -> Outcome<Vec<MaybeUninit<u128>>> {
    require(!place.is_null(), CudaStatus::INVALID_VALUE)?;
    let mut bytes = vec![MaybeUninit::zeroed(); size.div_ceil(size_of::<u128>())];
    let to = bytes.as_mut_ptr().cast::<MaybeUninit<u8>>();
    // SAFETY: the caller of the entry point passes so many bytes; there are as many in the copy.
    unsafe { to.copy_from_nonoverlapping(place.cast(), size) };
    Ok(bytes)
}

/// A context is gone, and its modules with it.
pub(super) fn forget_modules(context: Handle) {
    MODULES.forget(|own| *own == context);
    FUNCTIONS.forget(|function| function.context == context);
}

pub(super) fn load_module(module: *mut Handle, image: *const c_void) -> Outcome {
    let context = current()?;
    unsafe_call()?;
    require(!module.is_null(), CudaStatus::INVALID_VALUE)?;
    require(!image.is_null(), INVALID_IMAGE)?;
    queue::wait_for_idle(Some(context.device))?;
    put(module, MODULES.insert(|_| context.handle))
}

pub(super) fn unload_module(module: Handle) -> Outcome {
    let context = current()?;
    unsafe_call()?;
    MODULES.get(module)?;
    queue::wait_for_idle(Some(context.device))?;
    MODULES.remove(module)?;
    FUNCTIONS.forget(|function| function.module == module);
    Ok(())
}

pub(super) fn get_function(function: *mut Handle, module: Handle, name: *const c_char) -> Outcome {
    require(!function.is_null() && !name.is_null(), CudaStatus::INVALID_VALUE)?;
    current()?;
    let context = MODULES.get(module)?;
    // SAFETY: the caller of the entry point passes a terminated string.
    let name = unsafe { CStr::from_ptr(name) }.to_str().map_err(|_| CudaStatus::NOT_FOUND)?;
    let kernel = KERNELS.lock().get(name).copied().ok_or(CudaStatus::NOT_FOUND)?;
    put(function, FUNCTIONS.insert(|_| Function { module, context, kernel }))
}

/// Kernels here are loaded with their module.
pub(super) fn load_function(function: Handle) -> Outcome {
    current()?;
    FUNCTIONS.get(function).map(drop)
}

pub(super) fn launch_kernel(
    function: Handle,
    shape: &Shape,
    stream: Handle,
    params: *mut *mut c_void,
    extra: *mut *mut c_void,
) -> Outcome {
    enqueue_anywhere(stream, |context| {
        Launch::new(context.handle, function, shape, params, extra).map(Command::Kernel)
    })
    .map(drop)
}

/// Kernels start in order here, whatever the attributes allow.
pub(super) fn launch_kernel_ex(
    config: *const LaunchConfig,
    function: Handle,
    params: *mut *mut c_void,
    extra: *mut *mut c_void,
) -> Outcome {
    require(!config.is_null(), CudaStatus::INVALID_VALUE)?;
    // SAFETY: the caller of the entry point passes a configuration.
    let config = unsafe { &*config };
    let shape = Shape { grid: config.grid, block: config.block };
    launch_kernel(function, &shape, config.stream, params, extra)
}

/// `CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH`, `_USE_NODE_PRIORITY`: without effect here.
const GRAPH_FLAGS: u64 = 1 | 8;

pub(super) static EXECS: Table<Arc<Exec>> = Table::new();

/// A graph that can be launched.
pub(super) struct Exec {
    pub(super) context: Handle,
    /// The graph that it was instantiated from.
    graph: Handle,
    nodes: Mutex<Vec<Node>>,
    last: Mutex<Option<Ticket>>,
}

impl Exec {
    /// Changes a node for later launches.
    fn change(&self, node: Handle, change: impl FnOnce(&mut Command) -> Outcome) -> Outcome {
        // A node's handle lives as long as its graph.
        GRAPHS.get(self.graph).map_err(|_| CudaStatus::INVALID_VALUE)?;
        let mut nodes = self.nodes.lock();
        let found = nodes.iter_mut().find(|own| own.handle == node).ok_or(CudaStatus::INVALID_VALUE)?;
        change(&mut found.command)
    }
}

pub(super) fn instantiate(exec: *mut Handle, graph: Handle, flags: u64) -> Outcome {
    let context = current()?.handle;
    require(!exec.is_null() && flags & !GRAPH_FLAGS == 0, CudaStatus::INVALID_VALUE)?;
    let nodes = Mutex::new(GRAPHS.get(graph)?.0.lock().clone());
    put(exec, EXECS.insert(|_| Arc::new(Exec { context, graph, nodes, last: Mutex::default() })))
}

pub(super) fn launch_graph(exec: Handle, stream: Handle) -> Outcome {
    let exec = EXECS.get(exec)?;
    let mut last = exec.last.lock();
    let ticket = enqueue(stream, |_| {
        let nodes = exec.nodes.lock();
        let before = last.clone().map(Command::After);
        Ok(Command::Graph(before.into_iter().chain(nodes.iter().map(|node| node.command.clone())).collect()))
    })?;
    *last = ticket;
    Ok(())
}

pub(super) fn destroy_graph(graph: Handle) -> Outcome {
    GRAPHS.remove(graph).map(drop)
}

/// The graph of a node.
fn graph_of(node: Handle) -> Outcome<Arc<Graph>> {
    GRAPHS.find(|graph| graph.place_of(node).is_some()).ok_or(CudaStatus::INVALID_VALUE)
}

/// The node behind this one, or ahead of it: a graph is a list here.
pub(super) fn neighbour(
    node: Handle,
    behind: bool,
    nodes: *mut Handle,
    edges: *mut EdgeData,
    count: *mut usize,
) -> Outcome {
    let room = get(count)?;
    let graph = graph_of(node)?;
    let list = graph.0.lock();
    let at = list.iter().position(|own| own.handle == node).ok_or(CudaStatus::INVALID_VALUE)?;
    let found = if behind { list.get(at + 1) } else { at.checked_sub(1).and_then(|at| list.get(at)) };
    if let Some(found) = found.filter(|_| !nodes.is_null()) {
        require(room > 0 && !edges.is_null(), CudaStatus::INVALID_VALUE)?;
        put(nodes, found.handle)?;
        put(edges, EdgeData::default())?;
    }
    put(count, usize::from(found.is_some()))
}

/// A list has the order that these ask for, or they would make a cycle.
pub(super) fn add_dependencies(
    graph: Handle,
    from: *const Handle,
    to: *const Handle,
    count: usize,
) -> Outcome {
    let graph = GRAPHS.get(graph)?;
    let count = u32::try_from(count).map_err(|_| CudaStatus::INVALID_VALUE)?;
    for (from, to) in get_all(from, count)?.into_iter().zip(get_all(to, count)?) {
        let places = graph.place_of(from).zip(graph.place_of(to));
        require(places.is_some_and(|(from, to)| from < to), CudaStatus::INVALID_VALUE)?;
    }
    Ok(())
}

pub(super) fn destroy_node(node: Handle) -> Outcome {
    graph_of(node)?.0.lock().retain(|own| own.handle != node);
    Ok(())
}

pub(super) fn destroy_exec(exec: Handle) -> Outcome {
    EXECS.remove(exec).map(drop)
}

pub(super) fn set_mem_ops(exec: Handle, node: Handle, params: *const MemOpNodeParams) -> Outcome {
    let exec = EXECS.get(exec)?;
    let context = CONTEXTS.get(exec.context)?;
    let new = memop::node_batch(&context, params)?;
    exec.change(node, |command| match command {
        Command::MemOps(old) if memop::may_replace(old, &new) => {
            *old = new;
            Ok(())
        }
        _ => Err(CudaStatus::INVALID_VALUE),
    })
}

pub(super) fn set_kernel(exec: Handle, node: Handle, params: *const KernelNodeParams) -> Outcome {
    let exec = EXECS.get(exec)?;
    let params = get(params)?;
    let usual = params.kernel == 0 && [0, exec.context].contains(&params.context);
    require(usual, CudaStatus::INVALID_VALUE)?;
    let shape = Shape { grid: params.grid, block: params.block };
    let new = Launch::new(exec.context, params.function, &shape, params.params, params.extra)?;
    exec.change(node, |command| match command {
        Command::Kernel(old) => {
            *old = new;
            Ok(())
        }
        _ => Err(CudaStatus::INVALID_VALUE),
    })
}
