//! The kernel module `gdrdrv`, NVIDIA's or one with its interface.

pub(crate) mod abi;
mod dma_buf;
mod explain;
mod node;
mod pin;

use std::io;
use std::sync::Arc;

use super::{Allocation, Attribute, Backend, BackendKind, CudaAllocation, PinFlags, Pinned, locate};
use crate::cuda::AllocKind;
use crate::error::{Error, Result};
use crate::system::System;
use abi::{GPU_PAGE, PinBuffer, PinBufferV2};
use dma_buf::is_the_other_way;
use explain::RefusedPin;
use node::{Node, is_unknown};
use pin::Pin;

/// The module, found to be loaded and of a version that this crate speaks.
///
/// What else it can do is asked by trying: a distribution may have back-ported or left out what a version has.
#[derive(Debug)]
pub(crate) struct Gdrdrv {
    node: Arc<Node>,
    system: System,
    version: (u16, u16),
    persistent: bool,
    force_pcie: bool,
    /// The module is ours and can pin dma-bufs on this machine.
    dma_bufs: bool,
}

impl Gdrdrv {
    /// Opens the device file. A module that takes mappings away when their memory is freed, so that an
    /// access raises `SIGBUS`, is refused unless that is allowed.
    pub(crate) fn open(system: &System, allow_volatile: bool) -> Result<Self> {
        let node = Node::open(&system.kernel)?;
        let version = node.handshake()?;
        // Drivers before 2.5 do not tell, and most of them are not persistent.
        let told = node.attribute(abi::ATTR_PERSISTENT)?;
        let persistent = told.is_some_and(|value| value != 0);
        if !persistent {
            if !allow_volatile {
                return Err(explain::volatile(told.is_some()));
            }
            tracing::warn!(
                "gdrdrv takes mappings away when their memory is freed: an access then raises SIGBUS"
            );
        }
        let force_pcie = node.attribute(abi::ATTR_FORCE_PCIE)?.is_some_and(|value| value != 0);
        let dma_bufs =
            node.attribute(abi::ATTR_EXTENSIONS)?.is_some_and(|bits| bits & abi::EXTENSION_DMABUF != 0);
        Ok(Self { node: Arc::new(node), system: system.clone(), version, persistent, force_pcie, dma_bufs })
    }

    /// The newer request first; the older one where there is no newer and no flag needs it.
    fn handle(&self, addr: u64, size: u64, flags: PinFlags) -> io::Result<u64> {
        let mut new = PinBufferV2 { addr, size, flags: flags.bits(), ..Default::default() };
        match self.node.call(&mut new) {
            Ok(()) => return Ok(new.handle),
            Err(error) if flags.is_empty() && is_unknown(&error) => {}
            Err(error) => return Err(error),
        }
        let mut old = PinBuffer { addr, size, ..Default::default() };
        self.node.call(&mut old).map(|()| old.handle)
    }
}

impl Backend for Gdrdrv {
    fn kind(&self) -> BackendKind {
        BackendKind::Gdrdrv
    }

    fn driver_version(&self) -> Option<(u16, u16)> {
        Some(self.version)
    }

    fn attribute(&self, attribute: Attribute) -> Result<u32> {
        Ok(match attribute {
            Attribute::UsePersistentMapping => self.persistent.into(),
            Attribute::SupportPinFlagForcePcie => self.force_pcie.into(),
            Attribute::UsingDmaBufMmap => 0,
        })
    }

    fn pin(&self, addr: u64, len: usize, flags: PinFlags) -> Result<Box<dyn Pinned>> {
        self.node.owner.check()?;
        // The driver rounds too, but then maps only pins that were asked for at a page's start.
        let start = addr & !(GPU_PAGE - 1);
        let end = addr.checked_add(len as u64).and_then(|end| end.checked_next_multiple_of(GPU_PAGE));
        let (Some(end), 1..) = (end, len) else {
            return Err(Error::invalid("length", len, "at least 1, and within the address space"));
        };
        // Without CUDA the driver alone judges.
        let located = match self.system.cuda() {
            Ok(cuda) => Some((&**cuda, locate(&**cuda, addr, len, flags)?)),
            Err(_) => None,
        };
        // It always pins whole pages.
        let flags = flags - PinFlags::WHOLE_PAGES;
        let request = RefusedPin {
            addr,
            len,
            flags,
            force_pcie: self.force_pcie,
            cuda: located.as_ref().map(|(cuda, part)| (*cuda, part.memory)),
        };
        let mut pin = match (self.handle(start, end - start, flags), &located) {
            (Ok(handle), _) => Pin::adopt(&self.node, handle, addr, len)?,
            (Err(error), Some((_, part))) if self.dma_bufs && is_the_other_way(&error) => {
                self.pin_dma_buf(&request, part, error)?
            }
            (Err(error), _) => return Err(request.explain(error)),
        };
        if let Some((cuda, part)) = located {
            // The driver holds the memory from here on; was it still the same?
            if !part.is_live(cuda)? {
                return Err(Error::Invalidated);
            }
            pin.located = Some(part);
        }
        Ok(Box::new(pin))
    }

    fn allocate_as(&self, device: i32, len: usize, kind: AllocKind) -> Result<Box<dyn Allocation>> {
        self.node.owner.check()?;
        Ok(Box::new(CudaAllocation::of_kind(self.system.cuda()?, device, len, kind)?))
    }
}
