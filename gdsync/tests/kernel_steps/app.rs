//! The kernel of `kernel.cu`, and where it runs.

use std::ffi::c_void;
use std::sync::OnceLock;

use gdsync::memory::Memory;
use gdsync::stream::{Stream, Via};
use gdsync::verbs::QpBuilder;
use gdsync_testkit::driver;

use super::common::{Side, connect, hca};
use super::place::{Place, is_real, places};
use super::simulated::{FAILED, Steps};

const PTX: &str = concat!(include_str!("kernel.ptx"), "\0");
const THREADS: u32 = 64;

/// The places that run operations by kernels. The test kernel is loaded before any stream waits.
pub(crate) fn kernel_places() -> impl Iterator<Item = Place> {
    let by_kernel = || places().filter(|place| place.via == Via::Kernel);
    for place in by_kernel().take(1) {
        function(&place);
    }
    by_kernel()
}

impl Place {
    /// Two connected sides, whose memory the GPU knows.
    pub(crate) fn pair(&self, bytes: usize, build: impl Fn(QpBuilder) -> QpBuilder) -> (Side, Side) {
        let (a, b) = connect(self.side_with(&hca(), bytes, &build), self.side_with(&hca(), bytes, &build));
        for side in [&a, &b] {
            side.memory().gpu_addr(&self.gpu).unwrap();
        }
        (a, b)
    }
}

fn function(place: &Place) -> usize {
    static FUNCTION: OnceLock<usize> = OnceLock::new();
    *FUNCTION.get_or_init(|| {
        if !is_real() {
            driver::kernel("app", &[size_of::<Call>()], simulated);
        }
        let _current = place.gpu.enter().unwrap();
        let (mut module, mut function) = (0, 0);
        // SAFETY: a place for the answer, and a text that ends in a zero.
        unsafe { place.gpu.api().module_load_data(&mut module, PTX.as_ptr().cast()) }.unwrap();
        // SAFETY: a place for the answer, a loaded module, a name.
        unsafe { place.gpu.api().module_get_function(&mut function, module, c"app".as_ptr()) }.unwrap();
        // At once: CUDA would wait for streams that wait. Drivers before CUDA 12.4 cannot be told, and need not be.
        // SAFETY: a function of a module that stays loaded.
        let _ = unsafe { place.gpu.api().func_load(function) };
        function
    })
}

/// `Call` of `kernel.cu`.
#[derive(Clone, Copy)]
#[repr(C)]
struct Call {
    program: u64,
    order: u64,
    count: u64,
    sent: u64,
    first: u64,
    received: u64,
    log: u64,
}

/// A kernel that runs steps in some order, made before a stream waits. It must live until the kernel has ended.
pub(crate) struct App {
    order: Memory,
    log: Memory,
    count: usize,
}

impl App {
    pub(crate) fn new(place: &Place, order: &[u32]) -> Self {
        let app = Self {
            order: Memory::alloc(4 * order.len().max(1)).unwrap(),
            log: Memory::alloc(16 * order.len().max(1)).unwrap(),
            count: order.len(),
        };
        for (at, step) in order.iter().enumerate() {
            app.order.word32(4 * at).unwrap().store(*step);
        }
        app.forget();
        // Known to the GPU before a stream waits: CUDA could not take it then.
        for memory in [&app.order, &app.log] {
            memory.gpu_addr(&place.gpu).unwrap();
        }
        app
    }

    /// Forgets what it has logged.
    pub(crate) fn forget(&self) {
        self.log.fill(0, self.log.len(), 0xff).unwrap();
    }

    /// Launches it: it sends `first` and what follows from the first 8 bytes of `memory`, and looks at those at 64.
    pub(crate) fn launch(&self, place: &Place, stream: &Stream, program: u64, memory: &Memory, first: u64) {
        let at = |memory: &Memory| memory.gpu_addr(&place.gpu).unwrap();
        let (order, log, data) = (at(&self.order), at(&self.log), at(memory));
        let count = self.count as u64;
        let mut call = Call { program, order, count, sent: data, first, received: data + 64, log };
        let mut params = [(&raw mut call).cast::<c_void>()];
        let (function, raw) = (function(place), stream.raw().unwrap());
        let (api, none) = (place.gpu.api(), std::ptr::null_mut());
        // SAFETY: the parameter is a `Call` of memory that lives until the stream is done.
        unsafe { api.launch_kernel(function, 1, 1, 1, THREADS, 1, 1, 0, raw, params.as_mut_ptr(), none) }
            .unwrap();
    }

    /// What each step returned, and what was received then.
    pub(crate) fn log(&self) -> Vec<(u64, u64)> {
        let word = |at| self.log.word64(at).unwrap().load();
        (0..self.count).map(|at| (word(16 * at), word(16 * at + 8))).collect()
    }

    pub(crate) fn results(&self) -> Vec<u64> {
        self.log().into_iter().map(|(result, _)| result).collect()
    }
}

/// The same in Rust.
fn simulated(params: &[*mut c_void]) {
    // SAFETY: the parameter is a call.
    let call = unsafe { params[0].cast::<Call>().read() };
    let mut steps = Steps::new(call.program);
    let at = |addr: u64| std::ptr::with_exposed_provenance_mut::<u64>(usize::try_from(addr).unwrap());
    for i in 0..call.count {
        // SAFETY: memory of the test.
        unsafe { at(call.sent).write_volatile(call.first + i) };
        // SAFETY: as above.
        let step = unsafe { at(call.order + 4 * i).cast::<u32>().read() };
        let result = steps.run(step);
        // SAFETY: as above.
        unsafe { at(call.log + 16 * i).write_volatile(result) };
        // SAFETY: as above.
        let received = unsafe { at(call.received).read_volatile() };
        // SAFETY: as above.
        unsafe { at(call.log + 16 * i + 8).write_volatile(received) };
        if result == FAILED {
            return;
        }
    }
}
