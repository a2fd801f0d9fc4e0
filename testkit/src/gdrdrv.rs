//! A simulated `/dev/gdrdrv`, after `gdrdrv.c` of NVIDIA/gdrcopy 2.6.

use std::collections::{BTreeMap, HashMap};
use std::ffi::{CStr, c_void};
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use gdrcopy::system::{Kernel, Linux};
use gdrcopy::{MappingType, host_page};
use parking_lot::{Mutex, MutexGuard};

use self::abi::{
    GPU_PAGE, GetAttr, GetCallbackFlag, GetInfo, GetInfoV2, GetVersion, PinBuffer, PinBufferV2,
    ReqMappingType, Request, UnpinBuffer,
};
use crate::kernel::{DeviceEnd, FileId};
use crate::kmod;
use crate::machine::{FreeWatcher, Machine, Object, Vma};

// The library keeps its description of the interface private; the simulated module speaks the same one.
#[allow(dead_code, unreachable_pub, reason = "what the library needs of it")]
#[path = "../../gdrcopy/src/backend/gdrdrv/abi.rs"]
mod abi;

/// How the module was built and loaded, and on what.
#[derive(Clone, Copy, Debug)]
pub struct Module {
    /// Its version; decides which requests it knows.
    pub version: (u16, u16),
    /// The oldest library it accepts.
    pub minimum_library: (u16, u16),
    /// `use_persistent_mapping`.
    pub persistent: bool,
    /// Built against a GPU driver with `NVIDIA_P2P_FLAGS_FORCE_BAR1_MAPPING`.
    pub force_pcie: bool,
    /// BAR1 of all GPUs together, bytes.
    pub bar1: u64,
    /// The type of mapping that the platform gives unasked. [`MappingType::Cached`] platforms give
    /// [`MappingType::WriteCombining`] too; others have the one type.
    pub mapping_type: MappingType,
}

impl Default for Module {
    /// Version 2.6 as distributed, on a PCIe GPU.
    fn default() -> Self {
        Self {
            version: (2, 6),
            minimum_library: (2, 0),
            persistent: true,
            force_pcie: true,
            bar1: 1 << 30,
            mapping_type: MappingType::WriteCombining,
        }
    }
}

/// The device file. The machine's faults `gdrdrv pin`, `gdrdrv unpin` and so on, with `flag`, `info`, `attr`,
/// `type`, `version` and `mmap`, are `errno` values; `pin v2` and `info v2` hit the newer request alone.
/// `gdrdrv wrong page` is by how many GPU pages pins are told to be displaced.
#[derive(Debug)]
pub struct Gdrdrv {
    machine: Arc<Machine>,
    module: Module,
    files: Mutex<HashMap<FileId, OpenFile>>,
    requests: AtomicU64,
}

#[derive(Debug)]
struct OpenFile {
    end: DeviceEnd,
    opener: u32,
    next_handle: u64,
    pins: BTreeMap<u64, Pin>,
}

#[derive(Debug)]
struct Pin {
    va: u64,
    len: u64,
    /// The address asked for begins a GPU page.
    aligned: bool,
    /// Physical memory in the order of addresses: object, first byte, bytes.
    pieces: Vec<(Arc<Object>, usize, usize)>,
    freed: bool,
    wish: u32,
    mapping: Option<(Vma, MappingType)>,
}

impl Pin {
    fn mapped(&self) -> Option<MappingType> {
        let (vma, kind) = self.mapping.as_ref()?;
        vma.is_there().then_some(*kind)
    }

    /// Takes the pages out of a mapping; the next access raises `SIGBUS`.
    fn zap(&mut self) {
        if let Some((vma, _)) = self.mapping.take() {
            vma.zap();
        }
    }
}

fn errno(code: i32) -> io::Error {
    io::Error::from_raw_os_error(code)
}

impl Gdrdrv {
    /// The device of a module.
    pub fn new(machine: &Arc<Machine>, module: Module) -> Arc<Self> {
        let device = Arc::new(Self {
            machine: machine.clone(),
            module,
            files: Mutex::default(),
            requests: AtomicU64::new(0),
        });
        let watcher: Weak<dyn FreeWatcher> = Arc::<Self>::downgrade(&device);
        machine.memory.lock().watch(watcher);
        device
    }

    /// The pins of all open files.
    pub fn live_pins(&self) -> u64 {
        if kmod::is_wanted() {
            return kmod::counter("pins");
        }
        self.files().values().map(|file| file.pins.len() as u64).sum()
    }

    /// The files that are open.
    pub fn open_files(&self) -> u64 {
        if kmod::is_wanted() {
            return kmod::counter("open_files");
        }
        self.files().len() as u64
    }

    /// How often this process has called `ioctl`.
    pub fn requests(&self) -> u64 {
        self.requests.load(Ordering::Relaxed)
    }

    /// The state, less the files that were closed: closing unpins everything.
    fn files(&self) -> MutexGuard<'_, HashMap<FileId, OpenFile>> {
        let mut files = self.files.lock();
        files.retain(|_, file| {
            let closed = file.end.is_closed();
            if closed {
                file.pins.values_mut().for_each(Pin::zap);
            }
            !closed
        });
        files
    }

    fn fault(&self, operation: &str) -> io::Result<()> {
        self.machine.fault(&format!("gdrdrv {operation}")).map_or(Ok(()), |code| Err(errno(code)))
    }

    /// Does something with the file of a descriptor, for the process that opened it.
    fn file<T>(&self, fd: BorrowedFd<'_>, act: impl FnOnce(&mut OpenFile) -> io::Result<T>) -> io::Result<T> {
        let id = FileId::of(fd)?;
        let mut files = self.files();
        let file = files.get_mut(&id).ok_or_else(|| errno(libc::EIO))?;
        if file.opener != std::process::id() {
            return Err(errno(libc::EACCES));
        }
        act(file)
    }

    fn with_pin<T>(
        &self,
        fd: BorrowedFd<'_>,
        handle: u64,
        act: impl FnOnce(&mut Pin) -> io::Result<T>,
    ) -> io::Result<T> {
        self.file(fd, |file| act(file.pins.get_mut(&handle).ok_or_else(|| errno(libc::EINVAL))?))
    }

    fn pin(&self, fd: BorrowedFd<'_>, addr: u64, size: u64, flags: u32) -> io::Result<u64> {
        let force_pcie = self.module.persistent && self.module.force_pcie;
        if addr == 0 || size == 0 || flags & !1 != 0 || flags & 1 != 0 && !force_pcie {
            return Err(errno(libc::EINVAL));
        }
        let va = addr & !(GPU_PAGE - 1);
        let end = addr.checked_add(size).and_then(|end| end.checked_next_multiple_of(GPU_PAGE));
        let len = end.ok_or_else(|| errno(libc::EINVAL))? - va;

        // The order of locks is that of a free: memory first.
        let memory = self.machine.memory.lock();
        let mut pieces = Vec::new();
        let mut at = 0;
        while at < len {
            let (range, offset) = memory.backing(va + at).ok_or_else(|| errno(libc::EINVAL))?;
            let object = range.object.clone();
            let rest = usize::try_from(len - at).map_err(|_| errno(libc::ENOMEM))?;
            let piece = rest.min(object.size - offset);
            pieces.push((object, offset, piece));
            at += piece as u64;
        }
        let pinned: u64 = self.files().values().flat_map(|file| file.pins.values()).map(|pin| pin.len).sum();
        if pinned + len > self.module.bar1 {
            return Err(errno(libc::ENOMEM));
        }
        self.file(fd, |file| {
            let handle = file.next_handle;
            file.next_handle += (len / host_page() as u64).max(1);
            let aligned = addr == va;
            let pin = Pin { va, len, aligned, pieces, freed: false, wish: abi::TYPE_NONE, mapping: None };
            file.pins.insert(handle, pin);
            Ok(handle)
        })
    }

    fn unpin(&self, fd: BorrowedFd<'_>, handle: u64) -> io::Result<()> {
        self.with_pin(fd, handle, |pin| {
            pin.zap();
            Ok(())
        })?;
        self.file(fd, |file| {
            file.pins.remove(&handle);
            Ok(())
        })
    }

    fn info(&self, fd: BorrowedFd<'_>, handle: u64) -> io::Result<(u64, u64, Option<MappingType>)> {
        let wrong =
            self.machine.fault("gdrdrv wrong page").map_or(0, |pages| u64::from(pages.unsigned_abs()));
        self.with_pin(fd, handle, |pin| Ok((pin.va + wrong * GPU_PAGE, pin.len, pin.mapped())))
    }

    fn attribute(&self, attr: u32) -> io::Result<u32> {
        let Module { persistent, force_pcie, .. } = self.module;
        match attr {
            abi::ATTR_PERSISTENT => Ok(persistent.into()),
            abi::ATTR_FORCE_PCIE => Ok((persistent && force_pcie).into()),
            _ => Err(errno(libc::EINVAL)),
        }
    }

    fn wish(&self, fd: BorrowedFd<'_>, handle: u64, wish: u32) -> io::Result<()> {
        self.with_pin(fd, handle, |pin| {
            if wish > MappingType::Device as u32 {
                return Err(errno(libc::EINVAL));
            }
            if pin.mapped().is_some() {
                return Err(errno(libc::EBUSY));
            }
            self.choose(wish)?;
            pin.wish = wish;
            Ok(())
        })
    }

    /// The mapping type for a requested one.
    fn choose(&self, wish: u32) -> io::Result<MappingType> {
        let native = self.module.mapping_type;
        let write_combining = MappingType::WriteCombining;
        match wish {
            abi::TYPE_NONE => Ok(native),
            wish if wish == native as u32 => Ok(native),
            wish if wish == write_combining as u32 && native == MappingType::Cached => Ok(write_combining),
            _ => Err(errno(libc::EOPNOTSUPP)),
        }
    }

    /// Whether this version has a request.
    fn knows(&self, code: u32) -> bool {
        let since = match code {
            GetInfoV2::CODE => (2, 4),
            GetAttr::CODE | PinBufferV2::CODE | ReqMappingType::CODE => (2, 5),
            _ => (2, 0),
        };
        self.module.version >= since
    }

    /// Serves one request.
    ///
    /// # Safety
    /// `arg` must point to the structure of `code`.
    unsafe fn serve(&self, fd: BorrowedFd<'_>, code: u32, arg: *mut c_void) -> io::Result<()> {
        macro_rules! request {
            ($structure:ty) => {
                // SAFETY: the structure of the code; nothing else uses it during the call.
                unsafe { &mut *arg.cast::<$structure>() }
            };
        }
        match code {
            PinBuffer::CODE => {
                let p = request!(PinBuffer);
                if self.module.persistent && (p.p2p_token != 0 || p.va_space != 0) {
                    return Err(errno(libc::EINVAL));
                }
                p.handle = self.pin(fd, p.addr, p.size, 0)?;
            }
            PinBufferV2::CODE => {
                let p = request!(PinBufferV2);
                p.handle = self.pin(fd, p.addr, p.size, p.flags)?;
            }
            UnpinBuffer::CODE => {
                let p = request!(UnpinBuffer);
                self.unpin(fd, p.handle)?;
            }
            GetCallbackFlag::CODE => {
                let p = request!(GetCallbackFlag);
                p.flag = self.with_pin(fd, p.handle, |pin| Ok(pin.freed.into()))?;
            }
            GetInfo::CODE => {
                let p = request!(GetInfo);
                let (va, len, mapped) = self.info(fd, p.handle)?;
                (p.va, p.mapped_size, p.page_size) = (va, len, 1 << 16);
                p.mapped = mapped.is_some().into();
                p.wc_mapping = (mapped == Some(MappingType::WriteCombining)).into();
            }
            GetInfoV2::CODE => {
                let p = request!(GetInfoV2);
                let (va, len, mapped) = self.info(fd, p.handle)?;
                (p.va, p.mapped_size, p.page_size) = (va, len, 1 << 16);
                p.mapping_type = mapped.map_or(abi::TYPE_NONE, |kind| kind as u32);
            }
            GetAttr::CODE => {
                let p = request!(GetAttr);
                p.val = self.attribute(p.attr)?;
            }
            ReqMappingType::CODE => {
                let p = request!(ReqMappingType);
                self.wish(fd, p.handle, p.mapping_type)?;
            }
            GetVersion::CODE => {
                let p = request!(GetVersion);
                let Module { version: v, minimum_library: m, .. } = self.module;
                (p.driver, p.minimum_library) = (abi::version(v.0, v.1), abi::version(m.0, m.1));
            }
            _ => return Err(errno(libc::ENOTTY)),
        }
        Ok(())
    }
}

// SAFETY: it maps into a place that the kernel chose or that the caller reserved; what it takes away it replaces.
unsafe impl Kernel for Gdrdrv {
    fn open(&self, _path: &CStr) -> io::Result<OwnedFd> {
        if kmod::is_wanted() {
            return Linux.open(abi::PATH);
        }
        let (fd, end) = DeviceEnd::open()?;
        let file = OpenFile { end, opener: std::process::id(), next_handle: 0, pins: BTreeMap::new() };
        self.files().insert(file.end.id(), file);
        Ok(fd)
    }

    unsafe fn ioctl(&self, fd: BorrowedFd<'_>, request: u32, arg: *mut c_void) -> io::Result<()> {
        self.requests.fetch_add(1, Ordering::Relaxed);
        if !kmod::is_wanted() {
            if request >> 8 & 0xff != 0xDA {
                return Err(errno(libc::EINVAL));
            }
            self.file(fd, |_| Ok(()))?;
        }
        if !self.knows(request) {
            return Err(errno(libc::ENOTTY));
        }
        faults_of(request).iter().try_for_each(|operation| self.fault(operation))?;
        if !kmod::is_wanted() {
            // SAFETY: the caller guarantees `arg`.
            return unsafe { self.serve(fd, request, arg) };
        }
        // SAFETY: the caller guarantees `arg`.
        unsafe { Linux.ioctl(fd, request, arg) }?;
        // SAFETY: the caller guarantees that `arg` points to the structure of `request`.
        unsafe { disguise(&self.module, request, arg) };
        Ok(())
    }

    unsafe fn mmap(
        &self,
        fd: BorrowedFd<'_>,
        len: usize,
        offset: u64,
        at: Option<NonNull<u8>>,
    ) -> io::Result<NonNull<u8>> {
        self.fault("mmap")?;
        if kmod::is_wanted() {
            // SAFETY: the caller guarantees `at`.
            return unsafe { Linux.mmap(fd, len, offset, at) };
        }
        let (id, handle) = (FileId::of(fd)?, offset / host_page() as u64);
        self.file(fd, |_| Ok(()))?;
        let mut files = self.files();
        let pin =
            files.get(&id).and_then(|file| file.pins.get(&handle)).ok_or_else(|| errno(libc::EINVAL))?;
        if pin.mapped().is_some() || pin.freed || !pin.aligned || len as u64 > pin.len {
            return Err(errno(libc::EINVAL));
        }
        let kind = self.choose(pin.wish)?;
        // SAFETY: the caller guarantees `at`.
        let vma = unsafe { Vma::new(&pin.pieces, len, at) }?;
        let ptr = vma.ptr();
        // Where a new mapping lies, older ones were unmapped.
        for pin in files.values_mut().flat_map(|file| file.pins.values_mut()) {
            pin.mapping.take_if(|(older, _)| older.overlaps(&vma));
        }
        if let Some(pin) = files.get_mut(&id).and_then(|file| file.pins.get_mut(&handle)) {
            pin.mapping = Some((vma, kind));
        }
        Ok(ptr)
    }
}

impl FreeWatcher for Gdrdrv {
    fn freed(&self, object: &Arc<Object>) {
        if self.module.persistent {
            return;
        }
        let mut files = self.files();
        for pin in files.values_mut().flat_map(|file| file.pins.values_mut()) {
            if pin.pieces.iter().any(|(piece, ..)| Arc::ptr_eq(piece, object)) {
                pin.zap();
                pin.freed = true;
                pin.pieces.clear();
            }
        }
    }
}

/// Says of the module what the test wants to be said: a version, and whether it knows `FORCE_PCIE`.
///
/// # Safety
/// `arg` must point to the structure of `request`, answered.
unsafe fn disguise(module: &Module, request: u32, arg: *mut c_void) {
    match request {
        GetVersion::CODE => {
            // SAFETY: the structure of the number.
            let answer = unsafe { &mut *arg.cast::<GetVersion>() };
            let Module { version: v, minimum_library: m, .. } = *module;
            (answer.driver, answer.minimum_library) = (abi::version(v.0, v.1), abi::version(m.0, m.1));
        }
        GetAttr::CODE => {
            // SAFETY: the structure of the number.
            let answer = unsafe { &mut *arg.cast::<GetAttr>() };
            if answer.attr == abi::ATTR_FORCE_PCIE {
                answer.val &= u32::from(module.force_pcie);
            }
        }
        _ => {}
    }
}

/// What the faults of a request are called.
fn faults_of(code: u32) -> &'static [&'static str] {
    match code {
        PinBuffer::CODE => &["pin"],
        PinBufferV2::CODE => &["pin v2", "pin"],
        UnpinBuffer::CODE => &["unpin"],
        GetCallbackFlag::CODE => &["flag"],
        GetInfo::CODE => &["info"],
        GetInfoV2::CODE => &["info v2", "info"],
        GetAttr::CODE => &["attr"],
        ReqMappingType::CODE => &["type"],
        GetVersion::CODE => &["version"],
        _ => &[],
    }
}
