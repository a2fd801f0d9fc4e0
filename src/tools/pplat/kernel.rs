//! The kernel that plays the GPU's side.

use std::ffi::{CString, c_void};
use std::sync::Arc;
use std::thread::sleep;
use std::time::{Duration, Instant};

use cudarc::driver::sys::{CUdevice_attribute, CUfunction};
use cudarc::driver::{CudaEvent, CudaStream, result};
use gdrcopy::GpuBuffer;

use super::{Board, Game, Gpu, Mode, Verdict};
use crate::tools::cuda;
use super::super::tools_shared::{Failure, Result};
use super::super::tools_shared::usage;
use super::super::tools_shared::Target;

/// A launched kernel, with all that it uses.
pub(super) struct Kernel {
    game: Game,
    done: CudaEvent,
    verdict: GpuBuffer,
    times: Option<GpuBuffer>,
    _stream: Arc<CudaStream>,
    board: Arc<Board>,
}

/// Bytes of `struct Verdict` in `pplat.cu`.
const VERDICT: usize = 8;

/// The kernel's name.
pub(super) fn name(mode: Mode) -> &'static str {
    match mode {
        Mode::CpuProduces => "cpu_produces",
        Mode::GpuProduces => "gpu_produces",
    }
}

impl Kernel {
    /// Launches; the kernel says in the CPU's flags when it runs.
    pub(super) fn launch(game: Game, board: &Arc<Board>, target: &Target) -> Result<Self> {
        let context = cuda::context(target.gpu)?;
        let image = concat!(include_str!("../pplat.ptx"), "\0");
        // SAFETY: a terminated PTX text. The module stays loaded as long as the process lives.
        let module = unsafe { result::module::load_data(image.as_ptr().cast()) }
            .map_err(|e| Failure::failed(format_args!("the GPU driver cannot compile the kernels: {e}")))?;
        let name = CString::new(name(game.mode))?;
        // SAFETY: the module is loaded.
        let function = unsafe { result::module::get_function(module, name) }?;
        let sms = context.attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
        fits(function, sms, game)?;

        // All memory before the launch: CUDA may wait for kernels when it allocates.
        let verdict = target.gdr.alloc(target.gpu, VERDICT)?;
        let times = (game.mode == Mode::GpuProduces)
            .then(|| target.gdr.alloc(target.gpu, (game.rounds as usize + 1) * 8))
            .transpose()?;
        let stream = context.new_stream()?;
        let mut gpu_flag = board.gpu_flag.gpu_addr();
        let mut cpu_flags = board.cpu_flags.gpu_addr();
        let mut rounds = game.rounds;
        let mut data = board.data.as_ref().map_or(0, |data| data.gpu_addr());
        let mut words = game.words as u64;
        let mut limit_ns = u64::try_from(game.limit.as_nanos()).unwrap_or(u64::MAX);
        let mut verdict_addr = verdict.addr();
        let mut times_addr = times.as_ref().map_or(0, GpuBuffer::addr);
        // In the order of the kernels' parameters; `cpu_produces` has no times and does not look at the last.
        let mut arguments: [*mut c_void; 8] = [
            (&raw mut gpu_flag).cast(),
            (&raw mut cpu_flags).cast(),
            (&raw mut rounds).cast(),
            (&raw mut data).cast(),
            (&raw mut words).cast(),
            (&raw mut limit_ns).cast(),
            (&raw mut verdict_addr).cast(),
            (&raw mut times_addr).cast(),
        ];
        let (grid, block) = ((game.blocks, 1, 1), (game.threads, 1, 1));
        // SAFETY: the arguments are of the kernel's types and copied by the call; the memory they name is large
        // enough for the game and kept in the returned value until the kernel has ended.
        unsafe { result::launch_kernel(function, grid, block, 0, stream.cu_stream(), &mut arguments) }?;
        let done = stream.record_event(None)?;
        Ok(Self { game, done, verdict, times, _stream: stream, board: board.clone() })
    }
}

/// Blocks that wait for each other must run at the same time.
fn fits(function: CUfunction, sms: i32, game: Game) -> Result<()> {
    let threads = i32::try_from(game.threads).expect("1024 at most");
    // SAFETY: the function was found in a loaded module.
    let each = unsafe { result::occupancy::max_active_block_per_multiprocessor(function, threads, 0) }?;
    let most = u32::try_from(each * sms).unwrap_or(0);
    usage(game.blocks <= most, || {
        format!("-B {}: this GPU runs at most {most} blocks of {threads} threads at a time", game.blocks)
    })
}

impl Gpu for Kernel {
    fn end(self) -> Result<Verdict> {
        // A block that waits gives up by itself after the limit.
        let deadline = Instant::now() + self.game.limit * 2 + Duration::from_secs(10);
        while !self.done.try_is_complete()? {
            if Instant::now() > deadline {
                // Its memory must not be freed, and freeing would wait for ever.
                std::mem::forget(self.board.clone());
                std::mem::forget(self);
                return Err(Failure::failed(
                    "the kernel did not end; look for Xid messages in the kernel's log",
                ));
            }
            sleep(Duration::from_millis(1));
        }
        let mut counts = [0; VERDICT];
        self.verdict.copy_out(0, &mut counts)?;
        let [wrong_words, blocks_gave_up] =
            [0, 4].map(|at| u32::from_ne_bytes([counts[at], counts[at + 1], counts[at + 2], counts[at + 3]]));
        let mut bytes = vec![0; self.times.as_ref().map_or(0, GpuBuffer::len)];
        if let Some(times) = &self.times {
            times.copy_out(0, &mut bytes)?;
        }
        let times = bytes.as_chunks::<8>().0.iter().map(|time| u64::from_ne_bytes(*time)).collect();
        Ok(Verdict { wrong_words, blocks_gave_up, times })
    }
}
