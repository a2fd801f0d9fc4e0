//! The kernel lane: operations as a program that one thread of a kernel runs. `lane.cu` is the other side.

use std::ffi::{CStr, c_void};
use std::mem::MaybeUninit;

use gdrcopy::cuda::raw::Api;
use gdrcopy::cuda::raw::layout::{Handle, KernelNodeParams};

use super::plan::Step;
use crate::cuda::{Gpu, RawStream};
use crate::error::{Error, Result};
use crate::memory::Memory;
use crate::stream::Cond;

/// Operations that fit in the small program, which is quicker to launch.
pub(super) const SMALL: usize = 12;
/// Operations that fit in the large one: kernel parameters have 4 KiB.
pub(super) const LARGE: usize = 160;

/// Threads of the kernel that finds its program in memory, and what they take at once, whether it is in use or not.
const FETCHERS: u32 = 32;
const FETCHED: usize = 32 * 16;

/// Bytes of a program of so many operations in memory.
pub(super) fn room(ops: usize) -> usize {
    (size_of::<Head>() + ops * size_of::<LaneOp>()).next_multiple_of(16).max(FETCHED)
}

/// Puts a program into memory, or rather into an image of it, at the start of `to`.
pub(super) fn put(to: &mut [u8], head: Head, ops: &[LaneOp]) {
    let head = [head.status, head.limit_ns, head.submission, ops.len() as u64];
    let op = |op: &LaneOp| {
        let what = u64::from(op.kind) | u64::from(op.cond) << 32 | u64::from(op.near) << 48;
        [what, op.addr, op.value]
    };
    let words = head.into_iter().chain(ops.iter().flat_map(op));
    for (to, word) in to.as_chunks_mut::<8>().0.iter_mut().zip(words) {
        *to = word.to_ne_bytes();
    }
}

/// `Op` of `lane.cu`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct LaneOp {
    /// What to do: see `From<&Step>`.
    pub(super) kind: u32,
    /// Of a wait: its condition.
    pub(super) cond: u16,
    /// Of a wait: whether the word is in memory of this GPU.
    pub(super) near: u16,
    /// The word.
    pub(super) addr: u64,
    /// What is written or compared.
    pub(super) value: u64,
}

/// `Head` of `lane.cu`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct Head {
    /// The GPU's address of the stream's [`StatusBlock`].
    pub(super) status: u64,
    /// How long a wait may take.
    pub(super) limit_ns: u64,
    /// The number of the submission.
    pub(super) submission: u64,
    /// Operations that follow.
    pub(super) count: u64,
}

/// `Program` of `lane.cu`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct Program<const N: usize> {
    head: Head,
    ops: [MaybeUninit<LaneOp>; N],
}

impl From<&Step> for LaneOp {
    fn from(step: &Step) -> Self {
        let wait = |kind, cond: Cond, near: bool, addr, value| (kind, cond.code(), near.into(), addr, value);
        let (kind, cond, near, addr, value) = match *step {
            Step::Write { bits: 32, addr, value } => (0, 0, 0, addr, value),
            Step::Write { addr, value, .. } => (1, 0, 0, addr, value),
            Step::Wait { bits: 32, addr, value, cond, is_cqe: false, near } => {
                wait(2, cond, near, addr, value)
            }
            Step::Wait { bits: 64, addr, value, cond, near, .. } => wait(3, cond, near, addr, value),
            Step::Wait { addr, value, cond, near, .. } => wait(4, cond, near, addr, value),
            // A flush is a matter of the front end; the planner gives it memory operations. A host function is a call of its own.
            Step::Barrier | Step::Flush | Step::HostFn(_) => (5, 0, 0, 0, 0),
            Step::Index { addr, value } => (6, 0, 0, addr, value.into()),
            Step::Mark { addr, value } => (7, 0, 0, addr, value),
        };
        Self { kind, cond, near, addr, value }
    }
}

/// `Status` of `lane.cu`: what the kernels of a stream leave for each other and for the CPU. Also stamped by the CPU when a
/// stream without kernels fails.
#[derive(Debug)]
pub(super) struct StatusBlock {
    memory: Memory,
    addr: u64,
}

/// A wait that a kernel gave up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct GivenUp {
    pub(super) submission: u64,
    /// The GPU's address of the word.
    pub(super) word: u64,
}

const STATUS_BYTES: usize = 24;

impl StatusBlock {
    /// On the GPU, where kernels read it quickly; in host memory where GPU memory cannot be mapped.
    pub(super) fn new(gpu: &Gpu) -> Result<Self> {
        let memory = gpu.piece(STATUS_BYTES).or_else(|error| {
            tracing::info!(%error, "the status of a stream is in host memory");
            Memory::alloc(STATUS_BYTES)
        })?;
        let addr = memory.gpu_addr(gpu)?;
        Ok(Self { memory, addr })
    }

    pub(super) fn addr(&self) -> u64 {
        self.addr
    }

    /// The wait that a kernel gave up, if one did.
    pub(super) fn given_up(&self) -> Option<GivenUp> {
        let failed = self.memory.word32(0).expect("the first word of the status block").load();
        // Copied out: loads from a mapping are not ordered by themselves.
        let word = |offset| {
            let mut bytes = [0; 8];
            self.memory.read(offset, &mut bytes).expect("words of the status block");
            u64::from_ne_bytes(bytes)
        };
        (failed != 0).then(|| GivenUp { submission: word(8), word: word(16) })
    }

    /// Tells kernels that the stream has failed.
    pub(super) fn fail(&self) {
        self.memory.word32(0).expect("the first word of the status block").store(1);
    }
}

/// The kernels, loaded in a context.
#[derive(Debug)]
pub(crate) struct Lane {
    module: Handle,
    small: Handle,
    large: Handle,
    /// Finds its program in memory.
    at: Handle,
}

impl Lane {
    /// Loads the kernels into the current context, at once: to load one later, CUDA would wait for streams that wait.
    pub(crate) fn load(api: &Api) -> Result<Self> {
        const PTX: &str = concat!(include_str!("lane.ptx"), "\0");
        let mut module = 0;
        // SAFETY: a place for the answer and a text that ends in a zero.
        unsafe { api.module_load_data(&mut module, PTX.as_ptr().cast()) }
            .map_err(Error::cuda("loading the kernel lane"))?;
        let function = |name| function(api, module, name);
        let (small, large) = (function(c"gds_run_12")?, function(c"gds_run_160")?);
        Ok(Self { module, small, large, at: function(c"gds_run_at")? })
    }

    /// Unloads them. Their context must be current, and about to go.
    pub(crate) fn unload(&self, api: &Api) {
        // SAFETY: loaded here; the streams that used it are over.
        if let Err(error) = unsafe { api.module_unload(self.module) } {
            tracing::debug!(%error, "the kernel lane stays loaded");
        }
    }

    /// Launches the kernel that runs `ops`. The context must be current.
    pub(super) fn launch(
        &self,
        api: &Api,
        stream: RawStream,
        head: Head,
        ops: &[LaneOp],
    ) -> gdrcopy::Result<()> {
        self.with_program(head, ops, |function, params| {
            let none = std::ptr::null_mut();
            // SAFETY: the function takes this one parameter, which the driver copies; what lies behind `count` is not
            // used.
            unsafe { api.launch_kernel(function, 1, 1, 1, 1, 1, 1, 0, stream, params, none) }
        })
    }

    /// Has a kernel node of a graph run `ops` from the next launch on. The context must be current.
    pub(super) fn arm(
        &self,
        api: &Api,
        (graph, node): (Handle, Handle),
        head: Head,
        ops: &[LaneOp],
    ) -> gdrcopy::Result<()> {
        self.with_program(head, ops, |function, params| {
            // SAFETY: a graph and a node of it, as the caller says, and the one parameter of the function, which the
            // driver copies.
            unsafe { api.graph_exec_kernel_node_set_params(graph, node, &node_params(function, 1, params)) }
        })
    }

    /// Has a kernel node of a graph run the program that is at this address of the GPU when it begins. The context must be
    /// current.
    pub(super) fn point(
        &self,
        api: &Api,
        (graph, node): (Handle, Handle),
        mut address: u64,
    ) -> gdrcopy::Result<()> {
        let mut params = [(&raw mut address).cast::<c_void>()];
        let node_params = node_params(self.at, FETCHERS, params.as_mut_ptr());
        // SAFETY: as above.
        unsafe { api.graph_exec_kernel_node_set_params(graph, node, &node_params) }
    }

    /// Calls `call` with the kernel for so many operations, and with its parameters.
    fn with_program<T>(
        &self,
        head: Head,
        ops: &[LaneOp],
        call: impl FnOnce(Handle, *mut *mut c_void) -> T,
    ) -> T {
        fn sized<const N: usize, T>(
            head: Head,
            ops: &[LaneOp],
            call: impl FnOnce(*mut *mut c_void) -> T,
        ) -> T {
            let head = Head { count: ops.len() as u64, ..head };
            let mut program = Program { head, ops: [const { MaybeUninit::uninit() }; N] };
            for (slot, op) in program.ops.iter_mut().zip(ops) {
                slot.write(*op);
            }
            let mut params = [std::ptr::from_mut(&mut program).cast::<c_void>()];
            call(params.as_mut_ptr())
        }
        if ops.len() <= SMALL {
            sized::<SMALL, T>(head, ops, |params| call(self.small, params))
        } else {
            sized::<LARGE, T>(head, ops, |params| call(self.large, params))
        }
    }
}

/// A node of one block.
fn node_params(function: Handle, threads: u32, params: *mut *mut c_void) -> KernelNodeParams {
    let (grid, block) = ([1; 3], [threads, 1, 1]);
    let extra = std::ptr::null_mut();
    KernelNodeParams { function, grid, block, shared: 0, params, extra, kernel: 0, context: 0 }
}

fn function(api: &Api, module: Handle, name: &CStr) -> Result<Handle> {
    let mut function = 0;
    // SAFETY: a place for the answer, a module of this context, a name.
    unsafe { api.module_get_function(&mut function, module, name.as_ptr()) }
        .map_err(Error::cuda("finding a kernel of the lane"))?;
    // SAFETY: a function of a module that stays loaded.
    match unsafe { api.func_load(function) } {
        // Drivers before CUDA 12.4 load all of a module at once unless told otherwise.
        Ok(()) | Err(gdrcopy::Error::Unsupported { .. }) => Ok(function),
        Err(error) => Err(Error::cuda("loading a kernel of the lane")(error)),
    }
}
