//! Graphs, and what can be launched of them.

use std::sync::Arc;

use parking_lot::Mutex;

use super::command::Command;
use super::context::{CONTEXTS, current};
use super::handles::{Table, number};
use super::kernel::{Launch, Shape};
use super::queue::Ticket;
use super::stream::enqueue;
use super::{Outcome, get, memop, put, require};
use gdrcopy::cuda::CudaStatus;
use gdrcopy::cuda::raw::layout::{Handle, KernelNodeParams, MemOpNodeParams};

/// `CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH`, `_USE_NODE_PRIORITY`: without effect here.
const FLAGS: u64 = 1 | 8;

pub(super) static GRAPHS: Table<Arc<Graph>> = Table::new();
pub(super) static EXECS: Table<Arc<Exec>> = Table::new();

/// Nodes in their order.
#[derive(Default)]
pub(super) struct Graph(Mutex<Vec<Node>>);

#[derive(Clone)]
struct Node {
    handle: Handle,
    command: Command,
}

impl Graph {
    /// Adds a node after the others.
    pub(super) fn add(&self, command: Command) -> Handle {
        let handle = number();
        self.0.lock().push(Node { handle, command });
        handle
    }
}

/// A graph that can be launched.
pub(super) struct Exec {
    pub(super) context: Handle,
    /// Where the nodes come from.
    graph: Handle,
    nodes: Mutex<Vec<Node>>,
    last: Mutex<Option<Ticket>>,
}

impl Exec {
    /// Changes the work of a node, for launches to come.
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
    require(!exec.is_null() && flags & !FLAGS == 0, CudaStatus::INVALID_VALUE)?;
    let nodes = Mutex::new(GRAPHS.get(graph)?.0.lock().clone());
    put(exec, EXECS.insert(|_| Arc::new(Exec { context, graph, nodes, last: Mutex::default() })))
}

pub(super) fn launch(exec: Handle, stream: Handle) -> Outcome {
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

pub(super) fn destroy(graph: Handle) -> Outcome {
    GRAPHS.remove(graph).map(drop)
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
