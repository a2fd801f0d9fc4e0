//! Whether a route works on a GPU: found out once, with memory of our own.

use std::sync::Arc;

use parking_lot::Mutex;

use super::pin::RmPin;
use super::status::NvStatus;
use super::{Gpu, Route};
use crate::backend::{Allocation, CudaAllocation, PinFlags, Pinned, locate, proof};
use crate::cuda::{AllocKind, Cuda};
use crate::error::{Error, Result};

/// Bytes of scratch memory: more than a GPU page, and small enough to share a block with others.
const SCRATCH: usize = 192 << 10;
/// How many allocations are made to get one that does not begin its block.
const TRIES: usize = 4;

/// What is known of a route.
#[derive(Debug, Default)]
pub(crate) struct Proof(Mutex<Tried>);

#[derive(Debug, Default)]
struct Tried {
    verdict: Verdict,
    /// Kept until the backend closes: to free it, CUDA would wait for all work of the GPU, be it for a stream that waits
    /// for the thread that pins here for the first time.
    scratch: Vec<CudaAllocation>,
}

#[derive(Debug, Default)]
enum Verdict {
    #[default]
    Unknown,
    Works,
    Fails(String),
}

impl Proof {
    /// Proves the route at its first use. A driver that maps wrongly is not asked again.
    pub(crate) fn require(&self, gpu: &Arc<Gpu>, cuda: &Arc<dyn Cuda>, route: Route) -> Result<()> {
        let mut tried = self.0.lock();
        let Tried { verdict, scratch } = &mut *tried;
        match verdict {
            Verdict::Works => return Ok(()),
            Verdict::Fails(why) => {
                return Err(Error::Unsupported {
                    what: format!("mapping {route} memory of GPU {} ({why})", gpu.ordinal),
                    by: "the rm backend on this driver",
                    fix: "use another backend (GDRCOPY_BACKEND)",
                });
            }
            Verdict::Unknown => {}
        }
        match prove(gpu, cuda, route, scratch) {
            Ok(()) => {
                tracing::debug!(gpu = gpu.ordinal, %route, "resource-manager mappings proved");
                *verdict = Verdict::Works;
                Ok(())
            }
            Err(error) => {
                let error = explain(gpu, error);
                // What is used up or interrupted may work the next time.
                if is_final(&error) {
                    tracing::warn!(gpu = gpu.ordinal, %route, %error, "resource-manager mappings do not work");
                    *verdict = Verdict::Fails(error.to_string());
                }
                Err(error)
            }
        }
    }
}

/// Whether asking again would change nothing.
fn is_final(error: &Error) -> bool {
    match error {
        Error::Rm { status, .. } => !NvStatus(*status).is_transient(),
        Error::ProofFailed { .. } | Error::Unsupported { .. } => true,
        _ => false,
    }
}

/// Names the cause that the driver does not name.
fn explain(gpu: &Gpu, error: Error) -> Error {
    if matches!(error, Error::Rm { .. }) && gpu.is_confidential() {
        return Error::Unsupported {
            what: "mapping memory under confidential computing".into(),
            by: "the GPU, which hides it from the CPU",
            fix: "turn confidential computing off, or copy with CUDA",
        };
    }
    error
}

fn prove(
    gpu: &Arc<Gpu>,
    cuda: &Arc<dyn Cuda>,
    route: Route,
    scratch: &mut Vec<CudaAllocation>,
) -> Result<()> {
    let kind = match route {
        Route::Malloc => AllocKind::Malloc,
        Route::Vmm => AllocKind::Vmm,
    };
    for index in 0..TRIES {
        // An earlier attempt may have left some.
        if index == scratch.len() {
            scratch.push(CudaAllocation::of_kind(cuda, gpu.ordinal, SCRATCH, kind)?);
        }
        let scratch = &scratch[index];
        let part = locate(&**cuda, scratch.addr(), SCRATCH, PinFlags::empty())?;
        let pin = RmPin::new(gpu, cuda, part, scratch.addr(), SCRATCH)?;
        let inner = pin.begins_inside_object();
        let mut range = pin.map(pin.pinned_len(), None)?;
        let first = usize::try_from(scratch.addr() - pin.va()).expect("pinned memory fits the address space");
        let offsets = [first, first + SCRATCH / 2 - 32, first + SCRATCH - 64];
        proof::nonce(&**cuda, gpu.ordinal, pin.va(), &range, &offsets)?;
        range.release()?;
        Box::new(pin).unpin()?;
        // CUDA gives every VMM allocation an object of its own.
        if inner || route == Route::Vmm {
            break;
        }
    }
    Ok(())
}
