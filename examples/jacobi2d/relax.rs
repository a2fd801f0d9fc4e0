//! Rows computed on the stream: by a host function, or by the kernel of `kernels/jacobi2d.cu`.

use std::ffi::CStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use gdsync::stream::Batch;

use crate::grid::Block;
use gdasync::lane::{Kernel, Kernels, Lane, Result};

/// The compiled kernel.
pub(crate) const PTX: &CStr =
    match CStr::from_bytes_with_nul(concat!(include_str!("../kernels/jacobi2d.ptx"), "\0").as_bytes()) {
        Ok(text) => text,
        Err(_) => panic!("a text without NUL, and one at its end"),
    };

/// The argument of the kernel, as in the source.
#[derive(Clone, Copy)]
#[repr(C)]
struct Rows {
    current: u64,
    next: u64,
    width: u64,
    first: u64,
    step: u64,
    count: u64,
}

const _: () = assert!(size_of::<Rows>() == 48, "as in the source");

/// Threads of a block of the kernel, the numbers that one computes at a time, and the most blocks: enough to fill a GPU.
const THREADS: u32 = 256;
const TILE: usize = 4 * THREADS as usize;
const MOST_BLOCKS: usize = 2048;

/// Computes rows on the stream.
pub(crate) struct Relaxer<'a> {
    lane: &'a Lane,
    block: Block,
    width: usize,
    /// The kernel, and the address of the block on its GPU.
    kernel: Option<(&'a Kernels, Kernel<Rows>, u64)>,
    /// A host function could not reach the block.
    failed: Arc<AtomicBool>,
}

impl<'a> Relaxer<'a> {
    pub(crate) fn new(lane: &'a Lane, block: &Block, width: usize) -> Result<Self> {
        let kernel = match &lane.kernels {
            Some(kernels) => {
                // SAFETY: the parameter has the layout of `Rows`.
                let kernel = unsafe { kernels.find(c"relax") }?;
                Some((kernels, kernel, block.memory().gpu_addr(lane.gpu()?)?))
            }
            None => None,
        };
        Ok(Self { lane, block: block.clone(), width, kernel, failed: Arc::default() })
    }

    /// The rows that neighbours need, from `state` into the other one.
    pub(crate) fn edges(&self, state: usize) -> Result<()> {
        match self.block.rows {
            1 => self.rows(state, 1, 1, 1),
            rows => self.rows(state, 1, rows - 1, 2),
        }
    }

    /// All other rows.
    pub(crate) fn inside(&self, state: usize) -> Result<()> {
        match self.block.rows.saturating_sub(2) {
            0 => Ok(()),
            rows => self.rows(state, 2, 1, rows),
        }
    }

    fn rows(&self, state: usize, first: usize, step: usize, count: usize) -> Result<()> {
        let Some((kernels, kernel, addr)) = &self.kernel else {
            let (block, failed) = (self.block.clone(), self.failed.clone());
            let mut batch = Batch::new();
            batch.repeatable_host_fn(move || {
                if block.relax(state, (0..count).map(|row| first + row * step)).is_err() {
                    failed.store(true, Ordering::Relaxed);
                }
            });
            return Ok(self.lane.stream.submit(&mut batch)?);
        };
        let rows = Rows {
            current: addr + self.block.state_at(state) as u64,
            next: addr + self.block.state_at(1 - state) as u64,
            width: self.width as u64,
            first: first as u64,
            step: step as u64,
            count: count as u64,
        };
        let tiles = count * (self.width - 2).div_ceil(TILE);
        // SAFETY: both states have these rows and those next to them, and the relaxer keeps them until the stream is idle.
        unsafe { kernels.launch(kernel, u32::try_from(tiles.min(MOST_BLOCKS))?, THREADS, rows) }
    }

    /// What went wrong on the stream, once it is idle.
    pub(crate) fn check(&self) -> Result<()> {
        match self.failed.load(Ordering::Relaxed) {
            true => Err("a host function could not reach its rows".into()),
            false => Ok(()),
        }
    }
}

impl Drop for Relaxer<'_> {
    fn drop(&mut self) {
        self.lane.settle();
    }
}
