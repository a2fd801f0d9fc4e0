//! Records the driver calls of a stream, and makes them again without the library.

use std::cell::{Cell, RefCell};
use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use gdasync::gdrcopy::cuda::CudaStatus;
use gdasync::gdrcopy::cuda::raw::Api;
use gdasync::gdrcopy::cuda::raw::layout::{
    Handle, KernelNodeParams, MEMORY_TYPE_DEVICE, MemOp, MemOpNodeParams, STREAM_NON_BLOCKING,
    pointer_attribute,
};
use gdasync::gdsync::cuda::Gpu;
use gdasync::gdsync::memory::Memory;

use gdasync::results::Result;

static DRIVER: OnceLock<Api> = OnceLock::new();

thread_local! {
    /// The stream whose calls of this thread are recorded, and those recorded.
    static RECORDED: RefCell<Option<(Handle, Vec<Call>)>> = const { RefCell::new(None) };
    static SPENT: Cell<Spent> = const { Cell::new(Spent { launches: Duration::ZERO, nodes: Duration::ZERO }) };
}

/// A call that a stream's operations became.
#[derive(Clone, Debug)]
pub(super) enum Call {
    /// `cuStreamBatchMemOp`.
    MemOps(Vec<MemOp>),
    /// `cuLaunchKernel`, with its parameter in words.
    Kernel(Handle, Vec<u64>),
}

/// Words of `Head` and of an operation in gdsync's `lane.cu`, where the head has the status and the number of operations, and
/// how many fit into the parameters of its kernels.
const HEAD: usize = 4;
const STATUS: usize = 0;
const COUNT: usize = 3;
const OP: usize = 3;
const PROGRAMS: [usize; 2] = [12, 160];

/// Conditions of waits, as memory operations and kernels have them.
const AND: u32 = 2;
const NOR: u32 = 3;

impl Call {
    pub(super) fn len(&self) -> u64 {
        match self {
            Call::MemOps(ops) => ops.len() as u64,
            Call::Kernel(_, param) => param[COUNT],
        }
    }
}

/// Time that the calls of this thread for graphs have taken.
#[derive(Clone, Copy, Default)]
pub(super) struct Spent {
    /// `cuGraphLaunch`.
    pub(super) launches: Duration,
    /// `cuGraphExecBatchMemOpNodeSetParams` and `cuGraphExecKernelNodeSetParams`.
    pub(super) nodes: Duration,
}

impl Spent {
    pub(super) fn since(self, before: Self) -> Self {
        Self { launches: self.launches - before.launches, nodes: self.nodes - before.nodes }
    }
}

/// What this thread has spent so far.
pub(super) fn spent() -> Spent {
    SPENT.get()
}

/// Makes a call, and adds its time where `place` says.
fn timed<P>(
    entry: Option<P>,
    place: impl FnOnce(&mut Spent) -> &mut Duration,
    call: impl FnOnce(P) -> u32,
) -> u32 {
    let Some(entry) = entry else { return CudaStatus::NOT_SUPPORTED.0 };
    let start = Instant::now();
    let status = call(entry);
    let mut spent = SPENT.get();
    *place(&mut spent) += start.elapsed();
    SPENT.set(spent);
    status
}

unsafe extern "C" fn graph_launch(exec: Handle, stream: Handle) -> u32 {
    // SAFETY: the caller's arguments.
    timed(driver().graph_launch, |spent| &mut spent.launches, |entry| unsafe { entry(exec, stream) })
}

unsafe extern "C" fn mem_op_node(exec: Handle, node: Handle, params: *const MemOpNodeParams) -> u32 {
    let entry = driver().graph_exec_mem_op_node_set_params;
    // SAFETY: the caller's arguments.
    timed(entry, |spent| &mut spent.nodes, |entry| unsafe { entry(exec, node, params) })
}

unsafe extern "C" fn kernel_node(exec: Handle, node: Handle, params: *const KernelNodeParams) -> u32 {
    let entry = driver().graph_exec_kernel_node_set_params;
    // SAFETY: the caller's arguments.
    timed(entry, |spent| &mut spent.nodes, |entry| unsafe { entry(exec, node, params) })
}

/// The entry points of `driver`, recording the calls that trigger and wait while [`recording`] wants them; those for
/// graphs are timed.
pub(super) fn watched(driver: Api) -> Api {
    let driver = DRIVER.get_or_init(|| driver);
    Api {
        stream_batch_mem_op: Some(batch_mem_op),
        launch_kernel: Some(launch_kernel),
        graph_launch: Some(graph_launch),
        graph_exec_mem_op_node_set_params: Some(mem_op_node),
        graph_exec_kernel_node_set_params: Some(kernel_node),
        ..*driver
    }
}

/// Runs `run`, and returns the calls that this thread made for `stream`.
pub(super) fn recording(stream: Handle, run: impl FnOnce() -> Result<()>) -> Result<Vec<Call>> {
    RECORDED.set(Some((stream, Vec::new())));
    let ran = run();
    let recorded = RECORDED.take().map(|(_, calls)| calls).unwrap_or_default();
    ran.map(|()| recorded)
}

fn record(stream: Handle, call: impl FnOnce() -> Call) {
    RECORDED.with_borrow_mut(|recorded| {
        if let Some((_, calls)) = recorded.as_mut().filter(|(of, _)| *of == stream) {
            calls.push(call());
        }
    });
}

fn driver() -> &'static Api {
    DRIVER.get().expect("these entry points are only in a table of `watched`")
}

unsafe extern "C" fn batch_mem_op(stream: Handle, count: u32, ops: *mut MemOp, flags: u32) -> u32 {
    record(stream, || {
        // SAFETY: the caller passes so many operations.
        let ops = unsafe { std::slice::from_raw_parts(ops, count as usize) };
        Call::MemOps(ops.to_vec())
    });
    let Some(entry) = driver().stream_batch_mem_op else { return CudaStatus::NOT_SUPPORTED.0 };
    // SAFETY: the caller's arguments.
    unsafe { entry(stream, count, ops, flags) }
}

unsafe extern "C" fn launch_kernel(
    function: Handle,
    grid_x: u32,
    grid_y: u32,
    grid_z: u32,
    block_x: u32,
    block_y: u32,
    block_z: u32,
    shared: u32,
    stream: Handle,
    params: *mut *mut c_void,
    extra: *mut *mut c_void,
) -> u32 {
    record(stream, || {
        // SAFETY: kernels of streams have one parameter, which begins with its head.
        let param = unsafe { *params }.cast::<u64>();
        // SAFETY: the head of the parameter.
        let head = unsafe { param.cast::<[u64; HEAD]>().read() };
        let count = head[COUNT];
        let fits = |most: &usize| u64::try_from(*most).is_ok_and(|most| count <= most);
        let most = PROGRAMS.into_iter().find(fits).unwrap_or_default();
        let mut words = vec![0; HEAD + OP * most];
        let used = HEAD + OP * usize::try_from(count).unwrap_or_default();
        // SAFETY: so much of the parameter is written.
        words[..used].copy_from_slice(unsafe { std::slice::from_raw_parts(param, used) });
        Call::Kernel(function, words)
    });
    let Some(entry) = driver().launch_kernel else { return CudaStatus::NOT_SUPPORTED.0 };
    // SAFETY: the caller's arguments.
    unsafe {
        entry(function, grid_x, grid_y, grid_z, block_x, block_y, block_z, shared, stream, params, extra)
    }
}

/// A stream without the library, and words that its operations may use.
pub(super) struct Raw<'a> {
    gpu: &'a Gpu,
    stream: Handle,
    host: Memory,
    device: Option<Memory>,
    /// Words in use.
    words: Cell<usize>,
}

/// Bytes of the words in each kind of memory.
const WORDS: usize = 4096;

impl<'a> Raw<'a> {
    /// The context must be current.
    pub(super) fn new(gpu: &'a Gpu) -> Result<Self> {
        let mut stream = 0;
        // SAFETY: a place for the answer. The stream lives as long as the process.
        unsafe { driver().stream_create(&raw mut stream, STREAM_NON_BLOCKING, 0) }?;
        Ok(Self {
            gpu,
            stream,
            host: Memory::alloc(WORDS)?,
            device: gpu.alloc(WORDS).ok(),
            words: Cell::new(0),
        })
    }

    /// What one of `times` calls of the library became, one that has no mark in it, made to touch nothing of the library.
    pub(super) fn calls(&self, recorded: &[Call], times: u64) -> Result<Vec<Call>> {
        let each = recorded.len() / usize::try_from(times)?;
        if each == 0 {
            return Err("the library made no call".into());
        }
        let chosen = recorded.chunks_exact(each).min_by_key(|calls| calls.iter().map(Call::len).sum::<u64>());
        chosen.into_iter().flatten().map(|call| self.diverted(call)).collect()
    }

    fn diverted(&self, call: &Call) -> Result<Call> {
        let mut call = call.clone();
        match &mut call {
            Call::MemOps(ops) => {
                for op in ops {
                    op.address = self.diverted_word(op.address, op.value, op.flags)?;
                }
            }
            Call::Kernel(_, param) => {
                let used = OP * usize::try_from(param[COUNT])?;
                let (head, ops) = param.split_at_mut(HEAD);
                head[STATUS] = self.diverted_word(head[STATUS], 0, 0)?;
                for [what, address, value] in ops[..used].as_chunks_mut::<OP>().0 {
                    *address = self.diverted_word(*address, *value, u32::try_from(*what >> 32 & 0xffff)?)?;
                }
            }
        }
        Ok(call)
    }

    /// A word in memory of the same kind, for one operation alone, which satisfies it if it is a wait. Operations without one have none.
    fn diverted_word(&self, address: u64, value: u64, cond: u32) -> Result<u64> {
        if address == 0 {
            return Ok(0);
        }
        let mut kind = 0_u32;
        let kind_of = pointer_attribute::MEMORY_TYPE;
        // SAFETY: a place for the answer, which has 4 bytes.
        unsafe { driver().pointer_get_attribute((&raw mut kind).cast(), kind_of, address) }?;
        let on_gpu = kind == MEMORY_TYPE_DEVICE;
        let memory = self.device.as_ref().filter(|_| on_gpu).unwrap_or(&self.host);
        let word = memory.word64(8 * self.words.replace(self.words.get() + 1))?;
        word.store(match cond {
            NOR => 0,
            AND if value == 0 => return Err("a wait that nothing satisfies".into()),
            _ => value,
        });
        memory.flush()?;
        Ok(word.memory().gpu_addr(self.gpu)?)
    }

    pub(super) fn make(&self, call: &mut Call) -> Result<()> {
        match call {
            Call::MemOps(ops) => {
                let count = u32::try_from(ops.len())?;
                // SAFETY: so many operations on words that live as long as this value.
                unsafe { driver().stream_batch_mem_op(self.stream, count, ops.as_mut_ptr(), 0) }?;
            }
            Call::Kernel(function, param) => {
                let mut params = [param.as_mut_ptr().cast::<c_void>()];
                let (params, extra) = (params.as_mut_ptr(), null_mut());
                // SAFETY: the kernel's one parameter, of its size; its words live as long as this value.
                unsafe {
                    driver().launch_kernel(*function, 1, 1, 1, 1, 1, 1, 0, self.stream, params, extra)
                }?;
            }
        }
        Ok(())
    }

    pub(super) fn is_idle(&self) -> Result<bool> {
        use gdasync::gdrcopy::Error;
        // SAFETY: never destroyed.
        match unsafe { driver().stream_query(self.stream) } {
            Ok(()) => Ok(true),
            Err(Error::Cuda { status: CudaStatus::NOT_READY, .. }) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }
}
