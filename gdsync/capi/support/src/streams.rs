//! The streams of the program: a [`Stream`] for each `CUstream` that it has used, and the GPUs of their contexts.

use std::collections::HashMap;
use std::sync::{Arc, OnceLock};

use gdrcopy::cuda::raw::Api;
use gdsync::cuda::{Gpu, RawStream};
use gdsync::stream::{CudaStreamConfig, Stream};
use gdsync::verbs::Qp;
use gdsync::{Error, Result};
use parking_lot::Mutex;

use crate::guard::wait_limit;
use crate::process;

/// Streams that are kept. Each has a thread; one more ends the one that was used longest ago.
const KEPT: usize = 256;

/// A stream of the program, and its GPU.
#[derive(Debug)]
pub struct Lent {
    /// The stream.
    pub stream: Stream,
    /// Its GPU.
    pub gpu: Gpu,
}

#[derive(Default)]
struct Kept {
    /// By the driver's number of the stream, which is never reused, and with the time of the last use.
    streams: HashMap<u64, (Arc<Lent>, u64)>,
    uses: u64,
}

fn kept() -> &'static Mutex<Kept> {
    static KEPT: OnceLock<Mutex<Kept>> = OnceLock::new();
    KEPT.get_or_init(Mutex::default)
}

fn api() -> Result<&'static Api> {
    static API: OnceLock<Api> = OnceLock::new();
    if let Some(api) = API.get() {
        return Ok(api);
    }
    process::claim();
    let api = Api::load().map_err(Error::cuda("loading CUDA"))?;
    Ok(API.get_or_init(|| api))
}

/// The stream behind a handle of the program.
///
/// # Errors
/// [`Error::Cuda`], and those of [`Stream::cuda_from_raw`].
pub fn lent(raw: RawStream) -> Result<Arc<Lent>> {
    let mut id = 0;
    // SAFETY: a place for the answer; the program vouches for its stream.
    unsafe { api()?.stream_get_id(raw, &mut id) }.map_err(Error::cuda("identifying the stream"))?;
    {
        let mut kept = kept().lock();
        kept.uses += 1;
        let now = kept.uses;
        if let Some((lent, used)) = kept.streams.get_mut(&id) {
            *used = now;
            return Ok(lent.clone());
        }
    }
    let gpu = gpu_of(raw)?;
    let config = CudaStreamConfig {
        depth: 512,
        wait_limit: wait_limit(),
        may_be_destroyed: true,
        ..CudaStreamConfig::default()
    };
    // SAFETY: a stream of this context; that it is destroyed is allowed by the configuration.
    let stream = unsafe { Stream::cuda_from_raw(&gpu, raw, config) }?;
    let own = Arc::new(Lent { stream, gpu });
    let mut kept = kept().lock();
    let now = kept.uses;
    // Another thread may have been faster.
    let lent = kept.streams.entry(id).or_insert_with(|| (own.clone(), now)).0.clone();
    let oldest = kept.streams.iter().min_by_key(|(_, (_, used))| *used).map(|(id, _)| *id);
    let ended = oldest.filter(|_| kept.streams.len() > KEPT).and_then(|id| kept.streams.remove(&id));
    drop(kept);
    // The end of a stream may take a while.
    drop((ended, own));
    Ok(lent)
}

/// Has no stream keep this queue pair but by work that it still has.
pub fn forget(qp: &Qp) {
    let all: Vec<_> = kept().lock().streams.values().map(|(lent, _)| lent.clone()).collect();
    all.iter().for_each(|lent| lent.stream.forget(qp));
}

/// The GPU of the calling thread's context.
///
/// # Errors
/// [`Error::InvalidArgument`] without a context; [`Error::Cuda`].
pub fn current_gpu() -> Result<Gpu> {
    gpu_of(0)
}

/// The GPU and context of a stream; of 0, those that are current.
fn gpu_of(raw: RawStream) -> Result<Gpu> {
    /// By the driver's number of the context: its address may be that of another one after its end.
    static OTHERS: Mutex<Vec<(u64, Gpu)>> = Mutex::new(Vec::new());
    let api = api()?;
    let (mut context, mut current, mut device, mut id) = (0, 0, 0, 0);
    // SAFETY: a place for the answer.
    unsafe { api.ctx_get_current(&mut current) }.map_err(Error::cuda("finding the context"))?;
    if raw == 0 {
        context = current;
    } else {
        // SAFETY: a place for the answer; the program vouches for its stream.
        unsafe { api.stream_get_ctx(raw, &mut context) }
            .map_err(Error::cuda("finding the stream's context"))?;
    }
    if context == 0 {
        return Err(Error::invalid("CUDA context", "none", "one that is current on the calling thread"));
    }
    let is_it = |gpu: &Gpu| gpu.raw_context() == context;
    // Those keep their contexts.
    if let Some(gpu) = Gpu::opened().into_iter().find(is_it) {
        return Ok(gpu);
    }
    // SAFETY: a place for the answer; the context is current, or that of a live stream.
    unsafe { api.ctx_get_id(context, &mut id) }.map_err(Error::cuda("identifying the context"))?;
    let mut others = OTHERS.lock();
    if let Some((_, gpu)) = others.iter().find(|(known, _)| *known == id) {
        return Ok(gpu.clone());
    }
    if context == current {
        // SAFETY: a place for the answer; a context is current.
        unsafe { api.ctx_get_device(&mut device) }.map_err(Error::cuda("finding the GPU"))?;
        let (mut flags, mut is_active) = (0, 0);
        // SAFETY: places for the answers.
        let state = unsafe { api.primary_ctx_get_state(device, &mut flags, &mut is_active) };
        state.map_err(Error::cuda("finding the context"))?;
        if is_active != 0 {
            // `CUdevice` and ordinal are the same number.
            let gpu = Gpu::open(device)?;
            if is_it(&gpu) {
                return Ok(gpu);
            }
        }
    }
    // SAFETY: the program vouches for its stream, and keeps its contexts.
    let gpu = unsafe { Gpu::of_stream(raw) }?;
    others.push((id, gpu.clone()));
    Ok(gpu)
}
