//! Pins of dma-bufs: what our module can do where the GPU driver does not let it pin addresses.

use std::io;
use std::os::fd::AsRawFd;

use super::Gdrdrv;
use super::abi::PinDmaBuf;
use super::explain::RefusedPin;
use super::pin::Pin;
use crate::backend::{ENOTSUPP, Part, PinFlags, host_page};
use crate::error::{Error, Result};

/// Whether the driver's way of pinning does not exist here, be the address what it may: no driver that serves modules, or
/// one that does not on this GPU (MIG, vGPU).
pub(super) fn is_the_other_way(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENODEV | libc::EOPNOTSUPP | ENOTSUPP))
}

impl Gdrdrv {
    /// Pins the host pages of a range by way of a dma-buf from CUDA. `refused` is what the driver's way gave.
    pub(super) fn pin_dma_buf(
        &self,
        request: &RefusedPin<'_>,
        part: &Part,
        refused: io::Error,
    ) -> Result<Pin> {
        let RefusedPin { addr, len, flags, .. } = *request;
        let page = host_page() as u64;
        let va = addr & !(page - 1);
        let end = addr.checked_add(len as u64).and_then(|end| end.checked_next_multiple_of(page));
        let span = end.and_then(|end| usize::try_from(end - va).ok());
        let span = span.ok_or_else(|| Error::invalid("length", len, "within the address space"))?;
        let cuda = self.system.cuda()?;
        let fd =
            cuda.dma_buf(part.start(), va, span, flags.contains(PinFlags::FORCE_PCIE)).map_err(|error| {
                tracing::debug!(%error, "no dma-buf of GPU memory either");
                request.explain(refused)
            })?;
        let mut pin = PinDmaBuf { fd: fd.as_raw_fd(), size: span as u64, ..Default::default() };
        self.node.call(&mut pin).map_err(explain)?;
        Ok(Pin::of_dma_buf(&self.node, pin.handle, va, span, cuda.clone()))
    }
}

fn explain(error: io::Error) -> Error {
    let fix = match error.raw_os_error() {
        Some(ENOTSUPP | libc::EOPNOTSUPP) => {
            "the GPU driver lets no other device at this memory; load the module with dmabuf=0 or use another backend"
        }
        Some(libc::ENOMEM) => {
            "unpin memory (`nvidia-smi -q -d MEMORY` shows BAR1 use), or enable Resizable BAR in the BIOS"
        }
        _ => "see the kernel log",
    };
    Error::sys("gdrdrv: PIN_DMABUF", error, fix)
}
