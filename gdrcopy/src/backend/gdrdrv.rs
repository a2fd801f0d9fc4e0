//! The kernel module `gdrdrv`, NVIDIA's or one with its interface.

pub(crate) mod abi;
mod explain;

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;

use self::abi::{
    GPU_PAGE, GetAttr, GetCallbackFlag, GetInfo, GetInfoV2, GetVersion, PinBuffer, PinBufferV2, PinDmaBuf,
    ReqMappingType, Request, UnpinBuffer,
};
use self::explain::RefusedPin;
use super::locate::{Part, host_pages, locate};
use super::{Allocation, Backend, CudaAllocation, Pinned};
use crate::cpu_range::CpuRange;
use crate::cuda::{AllocKind, Cuda};
use crate::error::{Error, Result, check_bounds};
use crate::fork::Owner;
use crate::system::{Kernel, System};
use crate::types::{Attribute, BackendKind, ENOTSUPP, MappingType, PinFlags, host_page};

/// The backend: the module is loaded and of a version that this crate speaks.
///
/// Other abilities are found by trying, since a distribution may have back-ported or removed them.
#[derive(Debug)]
pub(crate) struct Gdrdrv {
    node: Arc<Node>,
    system: System,
    version: (u16, u16),
    persistent: bool,
    force_pcie: bool,
    /// The module is ours and can pin dma-bufs here.
    dma_bufs: bool,
}

impl Gdrdrv {
    /// Opens the device file. Refuses a module that takes mappings away when their memory is freed, so that an access raises
    /// `SIGBUS`, unless that is allowed.
    pub(crate) fn open(system: &System, allow_volatile: bool) -> Result<Self> {
        let node = Node::open(&system.kernel)?;
        let version = node.handshake()?;
        // Modules before 2.5 do not report it, and most of them are not persistent.
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

    /// Pins by the newer request, or by the older one if the module lacks the newer and no flag needs it.
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
        // The module rounds too, but maps only pins that were requested at the start of a page.
        let start = addr & !(GPU_PAGE - 1);
        let end = addr.checked_add(len as u64).and_then(|end| end.checked_next_multiple_of(GPU_PAGE));
        let (Some(end), 1..) = (end, len) else {
            return Err(Error::invalid("length", len, "at least 1, and within the address space"));
        };
        // Without CUDA the module alone checks the range.
        let located = match self.system.cuda() {
            Ok(cuda) => Some((&**cuda, locate(&**cuda, addr, len, flags)?)),
            Err(_) => None,
        };
        // The module always pins whole pages.
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
            (Err(error), Some((_, part))) if self.dma_bufs && needs_dma_buf(&error) => {
                self.pin_dma_buf(&request, part, error)?
            }
            (Err(error), _) => return Err(request.explain(error)),
        };
        if let Some((cuda, part)) = located {
            // The module keeps the memory from here on. Check that it is still the same.
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

/// Whether the GPU driver cannot pin any address for the module: it serves no modules, or not on this GPU (MIG, vGPU).
fn needs_dma_buf(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENODEV | libc::EOPNOTSUPP | ENOTSUPP))
}

impl Gdrdrv {
    /// Pins the host pages of a range through a dma-buf of CUDA. `refused` is the error of the pin by address.
    fn pin_dma_buf(&self, request: &RefusedPin<'_>, part: &Part, refused: io::Error) -> Result<Pin> {
        let RefusedPin { addr, len, flags, .. } = *request;
        let (va, span) = host_pages(addr, len)?;
        let cuda = self.system.cuda()?;
        let fd =
            cuda.dma_buf(part.start(), va, span, flags.contains(PinFlags::FORCE_PCIE)).map_err(|error| {
                tracing::debug!(%error, "no dma-buf of GPU memory either");
                request.explain(refused)
            })?;
        let mut pin = PinDmaBuf { fd: fd.as_raw_fd(), size: span as u64, ..Default::default() };
        self.node.call(&mut pin).map_err(explain::dma_buf)?;
        let mut pinned = Pin::new(&self.node, pin.handle, va, span);
        pinned.proof = Some(cuda.clone());
        Ok(pinned)
    }
}

/// The open `/dev/gdrdrv`. The module serves only the process that opened it.
#[derive(Debug)]
struct Node {
    kernel: Arc<dyn Kernel>,
    fd: OwnedFd,
    owner: Owner,
}

impl Node {
    fn open(kernel: &Arc<dyn Kernel>) -> Result<Self> {
        let fd = kernel.open(abi::PATH).map_err(|error| explain::open(&**kernel, error))?;
        Ok(Self { kernel: kernel.clone(), fd, owner: Owner::this_process() })
    }

    fn call<R: Request>(&self, request: &mut R) -> io::Result<()> {
        // SAFETY: `Request` guarantees that the structure is that of the number.
        unsafe { self.kernel.ioctl(self.fd.as_fd(), R::CODE, std::ptr::from_mut(request).cast()) }
    }

    /// Maps the first `len` bytes of a pin.
    fn map(&self, handle: u64, len: usize) -> io::Result<NonNull<u8>> {
        // A handle is a number of host pages, so each pin has its own offsets.
        let offset = handle
            .checked_mul(host_page() as u64)
            .ok_or_else(|| io::Error::from_raw_os_error(libc::EOVERFLOW))?;
        // SAFETY: no address is given.
        unsafe { self.kernel.mmap(self.fd.as_fd(), len, offset, None) }
    }

    /// Checks the interface version and returns the module's version.
    fn handshake(&self) -> Result<(u16, u16)> {
        let mut answer = GetVersion::default();
        self.call(&mut answer).map_err(explain::version)?;
        let GetVersion { driver, minimum_library } = answer;
        if driver < abi::MINIMUM_DRIVER {
            return Err(explain::too_old());
        }
        if minimum_library > abi::LIBRARY {
            return Err(Error::Unsupported {
                what: format!("the interface of GDRCopy {}", text(abi::LIBRARY)),
                by: "the loaded gdrdrv module",
                fix: "it asks for a newer library: update this crate, or load gdrdrv 2.6",
            });
        }
        Ok(split(driver))
    }

    /// A property of the module; `None` if the module does not know it.
    fn attribute(&self, attr: u32) -> Result<Option<u32>> {
        let mut request = GetAttr { attr, val: 0 };
        match self.call(&mut request) {
            Ok(()) => Ok(Some(request.val)),
            Err(error) if is_unknown(&error) => Ok(None),
            Err(error) => Err(explain::call(GetAttr::NAME, error)),
        }
    }
}

/// Whether the module may not know the request. `EINVAL` can also mean something else.
fn is_unknown(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EINVAL | libc::ENOTTY | libc::EOPNOTSUPP))
}

fn split(version: u32) -> (u16, u16) {
    let [a, b, c, d] = version.to_be_bytes();
    (u16::from_be_bytes([a, b]), u16::from_be_bytes([c, d]))
}

fn text(version: u32) -> String {
    let (major, minor) = split(version);
    format!("{major}.{minor}")
}

#[derive(Debug)]
struct Pin {
    node: Arc<Node>,
    handle: u64,
    va: u64,
    len: usize,
    page_size: u32,
    /// CUDA, to compare mappings of a dma-buf with: the module assumes where its pages are.
    proof: Option<Arc<dyn Cuda>>,
    /// The allocation that CUDA showed before and after the pin.
    located: Option<Part>,
    released: bool,
}

#[derive(Clone, Copy, Debug)]
struct Info {
    va: u64,
    len: u64,
    page_size: u32,
    /// `None` while not mapped.
    mapping_type: Option<u32>,
}

impl Pin {
    fn new(node: &Arc<Node>, handle: u64, va: u64, len: usize) -> Self {
        let page_size = u32::try_from(host_page()).expect("pages are small");
        Self { node: node.clone(), handle, va, len, page_size, proof: None, located: None, released: false }
    }

    /// Takes ownership of a handle and checks that it covers the `len` bytes at `addr`.
    fn adopt(node: &Arc<Node>, handle: u64, addr: u64, len: usize) -> Result<Self> {
        let mut pin = Self::new(node, handle, addr, len);
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

    /// Compares both ends of a mapping with the GPU memory.
    fn prove(&self, range: &CpuRange) -> Result<()> {
        let (Some(cuda), Some(part)) = (&self.proof, &self.located) else { return Ok(()) };
        part.compare(&**cuda, self.va, range)
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

    /// Requests the type of the next mapping. `None` is sent too: it cancels an earlier request.
    fn request(&self, wanted: Option<MappingType>) -> Result<()> {
        let mapping_type = wanted.map_or(abi::TYPE_NONE, |wanted| wanted as u32);
        let mut request = ReqMappingType { handle: self.handle, mapping_type, pad: 0 };
        match self.node.call(&mut request).map_err(|error| (error.raw_os_error(), error)) {
            // Older modules have one type; `map` compares it with the requested one.
            Ok(()) | Err((Some(libc::EINVAL | libc::ENOTTY), _)) => Ok(()),
            Err((Some(libc::EBUSY), _)) => Err(Error::AlreadyMapped),
            Err((Some(libc::EOPNOTSUPP), error)) => {
                Err(wanted.map_or_else(|| explain::call(ReqMappingType::NAME, error), explain::mapping_type))
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
        check_bounds(0, len, self.len)?;
        let len = len.max(1).next_multiple_of(host_page());
        self.request(request)?;
        let ptr = self.node.map(self.handle, len).map_err(|error| self.explain_map(len, error))?;
        let info = self.info();
        let kind = info.as_ref().ok().and_then(|info| kind(info.mapping_type?));
        // SAFETY: this call made the mapping, and nothing else knows it. The range owns it, so later errors unmap it.
        let range = unsafe { CpuRange::adopt(ptr, len, kind.unwrap_or(MappingType::WriteCombining), None) }?;
        let info = info.map_err(|error| explain::call(GetInfo::NAME, error))?;
        match (kind, request) {
            (Some(kind), Some(wanted)) if kind != wanted => Err(explain::mapping_type(wanted)),
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
        // In a forked child the pin is the parent's.
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
