//! Memory pinned by the module.

use std::io;
use std::sync::Arc;

use super::abi::{self, GetCallbackFlag, GetInfo, GetInfoV2, ReqMappingType, Request, UnpinBuffer};
use super::explain;
use super::node::{Node, is_unknown};
use crate::backend::{MappingType, Part, Pinned, host_page, inside, proof};
use crate::cpu_range::CpuRange;
use crate::cuda::Cuda;
use crate::error::{Error, Result};

/// A pin of this process.
#[derive(Debug)]
pub(super) struct Pin {
    node: Arc<Node>,
    handle: u64,
    va: u64,
    len: usize,
    page_size: u32,
    /// With which mappings of a dma-buf are compared: that its pages are where the module takes them to be.
    proof: Option<Arc<dyn Cuda>>,
    /// What CUDA showed before and after the driver pinned.
    pub(super) located: Option<Part>,
    released: bool,
}

/// What the driver tells of a pin.
#[derive(Clone, Copy, Debug)]
struct Info {
    va: u64,
    len: u64,
    page_size: u32,
    /// `None` while not mapped.
    mapping_type: Option<u32>,
}

impl Pin {
    /// Takes over a handle and makes sure that it holds the `len` bytes at `addr`.
    pub(super) fn adopt(node: &Arc<Node>, handle: u64, addr: u64, len: usize) -> Result<Self> {
        let node = node.clone();
        let mut pin =
            Self { node, handle, va: addr, len, page_size: 0, proof: None, located: None, released: false };
        let info = pin.info().map_err(|e| explain::call(GetInfo::NAME, e))?;
        let end = addr.checked_sub(info.va).and_then(|offset| offset.checked_add(len as u64));
        if end.is_none_or(|end| end > info.len) {
            return Err(Error::ProofFailed {
                addr,
                found: format!("gdrdrv pinned {} bytes at {:#x} for {len} bytes", info.len, info.va),
                fix: "load another version of gdrdrv, or use another backend",
            });
        }
        pin.va = info.va;
        pin.len =
            usize::try_from(info.len).map_err(|_| Error::invalid("length", info.len, "an address range"))?;
        pin.page_size = info.page_size;
        Ok(pin)
    }

    /// Takes over the handle of a dma-buf that holds whole host pages from `va` on.
    pub(super) fn of_dma_buf(
        node: &Arc<Node>,
        handle: u64,
        va: u64,
        len: usize,
        cuda: Arc<dyn Cuda>,
    ) -> Self {
        let page_size = u32::try_from(host_page()).expect("pages are small");
        Self {
            node: node.clone(),
            handle,
            va,
            len,
            page_size,
            proof: Some(cuda),
            located: None,
            released: false,
        }
    }

    /// Looks at both ends of what a mapping shows of the GPU memory.
    fn prove(&self, range: &CpuRange) -> Result<()> {
        let (Some(cuda), Some(part)) = (&self.proof, &self.located) else { return Ok(()) };
        let shown = part.bytes()?;
        let (from, to) = (shown.start.max(self.va), shown.end.min(self.va + range.len() as u64));
        if from >= to {
            return Ok(());
        }
        // Freed memory has nothing to be compared with any more.
        if !part.is_live(&**cuda)? {
            return Err(Error::Invalidated);
        }
        let size = |bytes: u64| usize::try_from(bytes).map_err(|_| Error::invalid("length", bytes, "a size"));
        proof::compare(&**cuda, part.memory.device, self.va, range, size(from - self.va)?, size(to - from)?)
    }

    fn info(&self) -> io::Result<Info> {
        let mut new = GetInfoV2 { handle: self.handle, ..Default::default() };
        match self.node.call(&mut new) {
            Ok(()) => {
                let mapping_type = (new.mapping_type != abi::TYPE_NONE).then_some(new.mapping_type);
                let GetInfoV2 { va, mapped_size: len, page_size, .. } = new;
                return Ok(Info { va, len, page_size, mapping_type });
            }
            Err(error) if is_unknown(&error) => {}
            Err(error) => return Err(error),
        }
        let mut old = GetInfo { handle: self.handle, ..Default::default() };
        self.node.call(&mut old)?;
        let kind = if old.wc_mapping != 0 { MappingType::WriteCombining } else { MappingType::Cached } as u32;
        let mapping_type = (old.mapped != 0).then_some(kind);
        Ok(Info { va: old.va, len: old.mapped_size, page_size: old.page_size, mapping_type })
    }

    /// Chooses the type of the next mapping. No wish is told too: it takes an earlier one back.
    fn request(&self, wish: Option<MappingType>) -> Result<()> {
        let mapping_type = wish.map_or(abi::TYPE_NONE, |wish| wish as u32);
        let mut request = ReqMappingType { handle: self.handle, mapping_type, pad: 0 };
        match self.node.call(&mut request).map_err(|error| (error.raw_os_error(), error)) {
            // Older drivers have their one type; whether it is the one wished for shows after the mapping.
            Ok(()) | Err((Some(libc::EINVAL | libc::ENOTTY), _)) => Ok(()),
            Err((Some(libc::EBUSY), _)) => Err(Error::AlreadyMapped),
            Err((Some(libc::EOPNOTSUPP), error)) => {
                Err(wish.map_or_else(|| explain::call(ReqMappingType::NAME, error), explain::mapping_type))
            }
            Err((_, error)) => Err(explain::call(ReqMappingType::NAME, error)),
        }
    }

    fn explain_map(&self, len: usize, error: io::Error) -> Error {
        if error.raw_os_error() == Some(libc::EINVAL) {
            if self.callback_flag().unwrap_or(false) {
                return Error::Invalidated;
            }
            if self.info().is_ok_and(|info| info.mapping_type.is_some()) {
                return Error::AlreadyMapped;
            }
        }
        explain::map(len, error)
    }

    fn callback_flag(&self) -> io::Result<bool> {
        let mut request = GetCallbackFlag { handle: self.handle, ..Default::default() };
        self.node.call(&mut request).map(|()| request.flag != 0)
    }

    fn release(&mut self) -> io::Result<()> {
        if std::mem::replace(&mut self.released, true) {
            return Ok(());
        }
        self.node.call(&mut UnpinBuffer { handle: self.handle })
    }
}

impl Pinned for Pin {
    fn va(&self) -> u64 {
        self.va
    }

    fn pinned_len(&self) -> usize {
        self.len
    }

    fn located(&self) -> Option<&Part> {
        self.located.as_ref()
    }

    fn page_size(&self) -> u32 {
        self.page_size
    }

    fn map(&self, len: usize, request: Option<MappingType>) -> Result<CpuRange> {
        self.node.owner.check()?;
        inside(0, len, self.len)?;
        let len = len.max(1).next_multiple_of(host_page());
        self.request(request)?;
        let ptr = self.node.map(self.handle, len).map_err(|error| self.explain_map(len, error))?;
        let info = self.info();
        let kind = info.as_ref().ok().and_then(|info| kind(info.mapping_type?));
        // SAFETY: this call made the mapping, and nobody else knows of it. Whatever is wrong with its type,
        // it has an owner now that unmaps it.
        let range = unsafe { CpuRange::adopt(ptr, len, kind.unwrap_or(MappingType::WriteCombining), None) }?;
        let info = info.map_err(|error| explain::call(GetInfo::NAME, error))?;
        match (kind, request) {
            (Some(kind), Some(wish)) if kind != wish => Err(explain::mapping_type(wish)),
            (Some(_), _) => self.prove(&range).map(|()| range),
            (None, _) => Err(Error::ProofFailed {
                addr: self.va,
                found: match info.mapping_type {
                    None => "gdrdrv says that it is not mapped".into(),
                    Some(other) => format!("gdrdrv says that it has mapping type {other}"),
                },
                fix: "load gdrdrv 2.6, or use another backend",
            }),
        }
    }

    fn invalidated(&self) -> Result<bool> {
        self.node.owner.check()?;
        self.callback_flag().map_err(|error| explain::call(GetCallbackFlag::NAME, error))
    }

    fn unpin(mut self: Box<Self>) -> Result<()> {
        self.node.owner.check()?;
        self.release().map_err(|error| explain::call(UnpinBuffer::NAME, error))
    }
}

impl Drop for Pin {
    fn drop(&mut self) {
        // A forked child has nothing to give back: the pin is its parent's.
        if !self.node.owner.is_caller() {
            return;
        }
        if let Err(error) = self.release() {
            tracing::warn!(%error, "gdrdrv: pin at {:#x} not released", self.va);
        }
    }
}

fn kind(mapping_type: u32) -> Option<MappingType> {
    [MappingType::WriteCombining, MappingType::Cached, MappingType::Device]
        .into_iter()
        .find(|kind| *kind as u32 == mapping_type)
}
