//! Copies as every CUDA program makes them, between addresses.

use std::time::{Duration, Instant};

use cudarc::driver::sys;
use gdasync::gdsync::cuda::Gpu;
use gdasync::gdsync::memory::Memory;
use gdasync::measure::Samples;

use super::Result;
use crate::bench::sheet::expected;

/// A part of a memory.
#[derive(Clone, Copy)]
pub(super) struct Part<'a>(pub(super) &'a Memory, pub(super) usize);

impl Part<'_> {
    /// Its address, if so many bytes lie inside.
    fn addr(self, len: usize) -> Result<u64> {
        Ok(self.0.slice(self.1, len)?.addr())
    }
}

/// Copies from the GPU to the host.
pub(super) fn to_host(gpu: &Gpu, to: Part<'_>, from: Part<'_>, len: usize) -> Result<()> {
    let (to, from) =
        (std::ptr::with_exposed_provenance_mut(usize::try_from(to.addr(len)?)?), from.addr(len)?);
    let _current = gpu.enter()?;
    // SAFETY: both parts are in bounds and live for the call.
    Ok(unsafe { sys::cuMemcpyDtoH_v2(to, from, len) }.result()?)
}

/// Copies from the host to the GPU.
pub(super) fn to_gpu(gpu: &Gpu, to: Part<'_>, from: Part<'_>, len: usize) -> Result<()> {
    let (to, from) = (to.addr(len)?, std::ptr::with_exposed_provenance(usize::try_from(from.addr(len)?)?));
    let _current = gpu.enter()?;
    // SAFETY: both parts are in bounds and live for the call.
    unsafe { sys::cuMemcpyHtoD_v2(to, from, len) }.result()?;
    // The call may return before the last byte is on the GPU, when the bytes are pinned or few.
    // SAFETY: the context is current.
    Ok(unsafe { sys::cuCtxSynchronize() }.result()?)
}

/// Buffers on two GPUs of one process, that CUDA copies between.
pub(super) struct Peers {
    gpus: [Gpu; 2],
    memory: [Memory; 2],
}

impl Peers {
    pub(super) fn new(max: usize) -> Result<Self> {
        match Gpu::count()? {
            0 => return Err("CUDA shows no GPU to this process".into()),
            1 => return Err("it needs two GPUs, and CUDA shows one".into()),
            _ => {}
        }
        let gpus = [Gpu::open(0)?, Gpu::open(1)?];
        for (own, other) in [(&gpus[0], &gpus[1]), (&gpus[1], &gpus[0])] {
            let mut can = 0;
            // SAFETY: a place for the answer.
            unsafe { sys::cuDeviceCanAccessPeer(&raw mut can, own.ordinal(), other.ordinal()) }.result()?;
            if can == 0 {
                return Err(format!(
                    "GPU {} cannot reach the memory of GPU {}: see nvidia-smi topo -p2p r",
                    own.ordinal(),
                    other.ordinal()
                )
                .into());
            }
            let _current = own.enter()?;
            let context = std::ptr::with_exposed_provenance_mut(other.raw_context());
            // SAFETY: the context of an open GPU.
            match unsafe { sys::cuCtxEnablePeerAccess(context, 0) } {
                sys::CUresult::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED => {}
                other => other.result()?,
            }
        }
        let memory = [gpus[0].alloc(2 * max)?, gpus[1].alloc(max)?];
        Ok(Self { gpus, memory })
    }

    /// Copies to the other GPU and back so often. The times, and whether what came back was wrong.
    pub(super) fn play(&self, bytes: usize, count: u64, game: u64) -> Result<(Samples, u64)> {
        let pattern = expected(0, game);
        pattern.fill(&self.memory[0], 0, bytes)?;
        pattern.spoil(&self.memory[0], bytes, bytes)?;
        pattern.spoil(&self.memory[1], 0, bytes)?;
        self.memory.iter().try_for_each(Memory::flush)?;
        let mut samples = Samples::default();
        for _ in 0..count {
            samples.add(self.there_and_back(bytes)?);
        }
        let right = pattern.check(&self.memory[0], bytes, bytes)?;
        Ok((samples, u64::from(!right)))
    }

    fn there_and_back(&self, bytes: usize) -> Result<Duration> {
        let [near, far] = &self.memory;
        let contexts =
            self.gpus.each_ref().map(|gpu| std::ptr::with_exposed_provenance_mut(gpu.raw_context()));
        let (sent, back, there) =
            (Part(near, 0).addr(bytes)?, Part(near, bytes).addr(bytes)?, Part(far, 0).addr(bytes)?);
        let _current = self.gpus[0].enter()?;
        let start = Instant::now();
        for (to, to_context, from, from_context) in
            [(there, contexts[1], sent, contexts[0]), (back, contexts[0], there, contexts[1])]
        {
            // SAFETY: both are in bounds and live for the call.
            unsafe { sys::cuMemcpyPeer(to, to_context, from, from_context, bytes) }.result()?;
            // SAFETY: the context is current.
            unsafe { sys::cuCtxSynchronize() }.result()?;
        }
        Ok(start.elapsed())
    }
}
