//! Simulated `/dev/nvidiactl` and `/dev/nvidiaN`: the resource manager of the NVIDIA driver, after `escape.c`,
//! `osapi.c` and `nv-mmap.c` of the open kernel modules 580.142, as far as mappings need it.
//!
//! No number of a GPU equals that of another layer: minor numbers count down, device instances begin at 3.

use std::collections::{BTreeMap, HashMap};
use std::ffi::{CStr, c_void};
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;

use gdrcopy::system::Kernel;
use parking_lot::Mutex;

use self::abi::{Class, Control, Escape, NvStatus};
use crate::kernel::{DeviceEnd, FileId, SimulatedKernel};
use crate::machine::{CLIENT, Machine, Object, Vma, pci};

// The library keeps its description of the interface private; the simulated driver speaks the same one.
#[allow(dead_code, unreachable_pub, reason = "what the library needs of it")]
#[path = "../../gdrcopy/src/backend/rm/abi.rs"]
mod abi;

/// How the driver and its GPUs are.
#[derive(Clone, Copy, Debug)]
pub struct RmSettings {
    /// BAR1 of each GPU, bytes.
    pub bar1: u64,
    /// The GPUs are in multi-instance mode.
    pub partitioned: bool,
    /// Whether the driver has the query that tells so.
    pub knows_partitioned: bool,
    /// Confidential computing is on.
    pub confidential: bool,
}

impl Default for RmSettings {
    fn default() -> Self {
        Self { bar1: 1 << 30, partitioned: false, knows_partitioned: true, confidential: false }
    }
}

/// What clients hold.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Live {
    /// Open device files.
    pub files: usize,
    /// Root clients.
    pub clients: usize,
    /// Objects of clients.
    pub objects: usize,
    /// Mappings in BAR1.
    pub mappings: usize,
}

/// The resource manager. The machine's faults with the names of the calls in `backend::rm::abi` are `NV_STATUS` values,
/// or `errno` values for calls without status; with `ioctl ` before the name they are always `errno` values.
/// `rm mmap` is an `errno` value. `rm shift` maps that many pages behind the right place, `rm at start` the
/// object's beginning, `rm swap` other memory.
#[derive(Debug)]
pub struct SimulatedRm {
    machine: Arc<Machine>,
    settings: RmSettings,
    tables: Mutex<Tables>,
}

/// A device node.
#[derive(Debug)]
struct Node {
    rm: Arc<SimulatedRm>,
    /// The GPU; none for the control device.
    gpu: Option<i32>,
}

impl SimulatedRm {
    /// The resource manager of a machine.
    pub fn new(machine: &Arc<Machine>, settings: RmSettings) -> Arc<Self> {
        Arc::new(Self { machine: machine.clone(), settings, tables: Mutex::default() })
    }

    /// Adds the device nodes to a kernel.
    #[must_use]
    pub fn install(self: &Arc<Self>, mut kernel: SimulatedKernel) -> SimulatedKernel {
        let node = |gpu| Arc::new(Node { rm: self.clone(), gpu });
        for gpu in 0..self.gpus() {
            kernel = kernel.with_device(&format!("/dev/nvidia{}", self.minor(gpu)), node(Some(gpu)));
        }
        kernel.with_device("/dev/nvidiactl", node(None))
    }

    /// What is open, allocated and mapped now.
    pub fn live(&self) -> Live {
        self.tables.lock().live()
    }

    /// Operations in a wrong order, and objects that the client did not free before it closed the file.
    pub fn violations(&self) -> Vec<String> {
        let mut tables = self.tables.lock();
        tables.live();
        tables.violations.clone()
    }

    fn gpus(&self) -> i32 {
        self.machine.memory.lock().gpus()
    }

    fn minor(&self, gpu: i32) -> u32 {
        (self.gpus() - 1 - gpu).cast_unsigned()
    }

    fn fault(&self, name: &str) -> Outcome {
        self.machine.fault(name).map_or(Ok(()), |code| Err(NvStatus(code.cast_unsigned())))
    }

    fn fault_errno(&self, name: &str) -> io::Result<()> {
        self.machine.fault(name).map_or(Ok(()), |code| Err(io::Error::from_raw_os_error(code)))
    }

    fn alloc(&self, file: FileId, call: &mut abi::Alloc) -> Outcome {
        if call.class == abi::ROOT_CLIENT {
            self.fault(abi::Alloc::NAME)?;
            call.object = self.tables.lock().add_client(file);
            return Ok(());
        }
        let mut tables = self.tables.lock();
        let client = tables.client(file, call.root)?;
        let kind = match call.class {
            abi::Device::CLASS => {
                self.fault(abi::Device::NAME)?;
                let params: abi::Device = parameters(call.params, call.params_size)?;
                let gpu = params.instance.cast_signed() - FIRST_INSTANCE;
                if call.parent != call.root || !(0..self.gpus()).contains(&gpu) {
                    return Err(NvStatus::INVALID_ARGUMENT);
                }
                if !tables.is_registered(file, gpu) {
                    return Err(NvStatus::INSUFFICIENT_PERMISSIONS);
                }
                Kind::Device { gpu }
            }
            abi::Subdevice::CLASS => {
                self.fault(abi::Subdevice::NAME)?;
                let params: abi::Subdevice = parameters(call.params, call.params_size)?;
                match client.objects.get(&call.parent).map(|parent| &parent.kind) {
                    Some(Kind::Device { .. }) if params.instance == 0 => Kind::Subdevice,
                    _ => return Err(NvStatus::INVALID_OBJECT_PARENT),
                }
            }
            abi::ConfidentialCompute::CLASS => {
                self.fault(abi::ConfidentialCompute::NAME)?;
                parameters::<abi::ConfidentialCompute>(call.params, call.params_size)?;
                Kind::ConfidentialCompute
            }
            _ => return Err(NvStatus::INVALID_CLASS),
        };
        call.object = tables.client(file, call.root)?.add(call.parent, call.object, kind)?;
        Ok(())
    }

    fn control(&self, file: FileId, call: &abi::ControlCall) -> Outcome {
        let mut tables = self.tables.lock();
        let client = tables.client(file, call.client)?;
        let object = client.objects.get(&call.object).map(|object| &object.kind);
        if object.is_none() && call.object != call.client {
            return Err(NvStatus::INVALID_OBJECT_HANDLE);
        }
        match (call.command, object) {
            (abi::IdInfo::COMMAND, None) => {
                self.fault(abi::IdInfo::NAME)?;
                let mut info: abi::IdInfo = parameters(call.params, call.params_size)?;
                let gpu = info.gpu_id.cast_signed() - FIRST_GPU_ID;
                if !(0..self.gpus()).contains(&gpu) {
                    return Err(NvStatus::INVALID_ARGUMENT);
                }
                info.device = (gpu + FIRST_INSTANCE).cast_unsigned();
                answer(call.params, info);
            }
            (abi::GpuInfoQuery::COMMAND, Some(Kind::Subdevice)) => {
                self.fault(abi::GpuInfoQuery::NAME)?;
                if !self.settings.knows_partitioned {
                    return Err(NvStatus::NOT_SUPPORTED);
                }
                let query: abi::GpuInfoQuery = parameters(call.params, call.params_size)?;
                let size = u32::try_from(size_of::<abi::GpuInfoEntry>()).expect("a few bytes");
                let mut entry: abi::GpuInfoEntry = parameters(query.list, size)?;
                if (query.entries, entry.index) != (1, abi::GpuInfoEntry::SMC_MODE) {
                    return Err(NvStatus::INVALID_ARGUMENT);
                }
                // 2: supported and off.
                entry.data = if self.settings.partitioned { abi::GpuInfoEntry::SMC_ENABLED } else { 2 };
                answer(query.list, entry);
            }
            (abi::CcCapabilities::COMMAND, Some(Kind::ConfidentialCompute)) => {
                self.fault(abi::CcCapabilities::NAME)?;
                let mut capabilities: abi::CcCapabilities = parameters(call.params, call.params_size)?;
                capabilities.feature = if self.settings.confidential { 2 } else { 0 };
                answer(call.params, capabilities);
            }
            _ => return Err(NvStatus::INVALID_COMMAND),
        }
        Ok(())
    }

    fn dup(&self, file: FileId, call: &mut abi::Dup) -> Outcome {
        self.fault(abi::Dup::NAME)?;
        if call.source_client != CLIENT {
            return Err(NvStatus::INVALID_CLIENT);
        }
        let found = self.machine.memory.lock().object_by_handle(call.source_object);
        let memory = found.ok_or(NvStatus::INVALID_OBJECT_HANDLE)?;
        let mut tables = self.tables.lock();
        call.object = tables.client(file, call.client)?.add_memory(call.parent, call.object, memory)?;
        Ok(())
    }

    fn map(&self, file: FileId, call: &mut abi::Map) -> Outcome {
        self.fault(abi::Map::NAME)?;
        if self.settings.confidential {
            return Err(NvStatus::NOT_SUPPORTED);
        }
        // SAFETY: the caller of the call keeps it open.
        let target = (call.fd >= 0).then(|| unsafe { BorrowedFd::borrow_raw(call.fd) });
        let target = target.and_then(|fd| FileId::of(fd).ok()).ok_or(NvStatus::INVALID_ARGUMENT)?;
        if call.flags != abi::Map::FLAGS {
            return Err(NvStatus::INVALID_FLAGS);
        }
        self.tables.lock().map(file, target, call, self.settings.bar1)
    }

    fn card_info(&self) -> abi::Cards {
        let mut cards = abi::Cards::default();
        for (gpu, card) in (0..self.gpus()).zip(&mut cards.0) {
            // The driver's own order, from the highest bus down.
            let gpu = self.gpus() - 1 - gpu;
            let bus = u8::from_str_radix(&pci(gpu)[5..7], 16).expect("a PCI address");
            let gpu_id = (gpu + FIRST_GPU_ID).cast_unsigned();
            *card = abi::Card { valid: 1, bus, gpu_id, minor: self.minor(gpu), ..abi::Card::default() };
        }
        cards
    }

    fn mmap(&self, id: FileId, len: usize, offset: u64, at: Option<NonNull<u8>>) -> io::Result<NonNull<u8>> {
        self.fault_errno("rm mmap")?;
        let errno = |code| Err(io::Error::from_raw_os_error(code));
        let mut tables = self.tables.lock();
        let Some(mapping) = tables.prepared(id) else { return errno(libc::EINVAL) };
        if offset != 0 || mapping.vma.is_some() {
            return errno(libc::EINVAL);
        }
        if mapping.len != len {
            return errno(libc::ENXIO);
        }
        let mut object = mapping.object.clone();
        if self.machine.fault("rm swap").is_some() {
            object = Object::new(object.gpu, object.size)?;
        }
        let shift = usize::try_from(self.machine.fault("rm shift").unwrap_or(0)).expect("not negative") << 12;
        let offset = if self.machine.fault("rm at start").is_some() { 0 } else { mapping.offset + shift };
        // SAFETY: the caller guarantees `at`.
        let vma = unsafe { Vma::new(&[(object, offset, len)], len, at) }?;
        let ptr = vma.ptr();
        // Their user has unmapped them.
        tables.mappings.iter_mut().for_each(|older| _ = older.vma.take_if(|older| older.overlaps(&vma)));
        tables.prepared(id).expect("found above").vma = Some(vma);
        Ok(ptr)
    }

    /// Serves one call of the control device.
    ///
    /// # Safety
    /// `arg` must point to the structure of `request`.
    unsafe fn control_device(&self, file: FileId, request: u32, arg: *mut c_void) -> io::Result<()> {
        /// The structure of the request.
        macro_rules! call {
            ($structure:ty) => {{
                // SAFETY: the structure of the request.
                let call: &mut $structure = unsafe { self.enter(arg) }?;
                call
            }};
            ($structure:ty, |$call:ident| $act:expr) => {{
                let $call = call!($structure);
                $call.status = code($act);
            }};
        }
        match request {
            abi::Alloc::REQUEST => call!(abi::Alloc, |call| self.alloc(file, call)),
            abi::Free::REQUEST => call!(abi::Free, |call| self
                .fault(abi::Free::NAME)
                .and_then(|()| self.tables.lock().free(file, call))),
            abi::ControlCall::REQUEST => call!(abi::ControlCall, |call| self.control(file, call)),
            abi::Dup::REQUEST => call!(abi::Dup, |call| self.dup(file, call)),
            abi::Map::REQUEST => call!(abi::Map, |call| self.map(file, call)),
            abi::Unmap::REQUEST => call!(abi::Unmap, |call| self
                .fault(abi::Unmap::NAME)
                .and_then(|()| self.tables.lock().unmap(file, call))),
            abi::Cards::REQUEST => {
                let call = call!(abi::Cards);
                self.fault_errno(abi::Cards::NAME)?;
                *call = self.card_info();
            }
            _ => return Err(io::Error::from_raw_os_error(libc::EINVAL)),
        }
        Ok(())
    }

    /// The structure of a call, unless the machine's fault makes the `ioctl` fail.
    ///
    /// # Safety
    /// `arg` must point to an `E`, which nothing else uses during the call.
    unsafe fn enter<'a, E: Escape>(&self, arg: *mut c_void) -> io::Result<&'a mut E> {
        self.fault_errno(&format!("ioctl {}", E::NAME))?;
        // SAFETY: the caller guarantees it.
        Ok(unsafe { &mut *arg.cast() })
    }
}

/// Device instances count from here.
const FIRST_INSTANCE: i32 = 3;
/// GPU ids count from here.
const FIRST_GPU_ID: i32 = 0x2700;

fn code(outcome: Outcome) -> u32 {
    outcome.err().unwrap_or(NvStatus::OK).0
}

/// Reads parameters whose address stands in another structure, refusing a wrong size.
fn parameters<T: Copy>(address: u64, size: u32) -> Result<T, NvStatus> {
    if size as usize != size_of::<T>() {
        return Err(NvStatus::INVALID_PARAM_STRUCT);
    }
    let address = usize::try_from(address).map_err(|_| NvStatus::INVALID_ADDRESS)?;
    // SAFETY: the size is right, so this is the structure of the call; its sender keeps it alive.
    Ok(unsafe { std::ptr::with_exposed_provenance::<T>(address).read() })
}

/// Writes parameters back.
fn answer<T>(address: u64, value: T) {
    let address = usize::try_from(address).expect("read from there before");
    // SAFETY: read from there before, by the same call.
    unsafe { std::ptr::with_exposed_provenance_mut::<T>(address).write(value) };
}

// SAFETY: it maps into a place that the kernel chose or that the caller reserved, and unmaps nothing.
unsafe impl Kernel for Node {
    fn open(&self, _path: &CStr) -> io::Result<OwnedFd> {
        let (fd, end) = DeviceEnd::open()?;
        self.rm.tables.lock().add_file(end, self.gpu);
        Ok(fd)
    }

    unsafe fn ioctl(&self, fd: BorrowedFd<'_>, request: u32, arg: *mut c_void) -> io::Result<()> {
        let file = FileId::of(fd)?;
        if self.gpu.is_none() {
            // SAFETY: the caller guarantees `arg`.
            return unsafe { self.rm.control_device(file, request, arg) };
        }
        if request != abi::RegisterFd::REQUEST {
            return Err(io::Error::from_raw_os_error(libc::EINVAL));
        }
        // SAFETY: this is the structure of the request.
        let call: &mut abi::RegisterFd = unsafe { self.rm.enter(arg) }?;
        self.rm.fault_errno(abi::RegisterFd::NAME)?;
        // SAFETY: the caller of the call keeps it open.
        let control = unsafe { BorrowedFd::borrow_raw(call.control_fd) };
        self.rm.tables.lock().register(file, FileId::of(control)?)
    }

    unsafe fn mmap(
        &self,
        fd: BorrowedFd<'_>,
        len: usize,
        offset: u64,
        at: Option<NonNull<u8>>,
    ) -> io::Result<NonNull<u8>> {
        self.rm.mmap(FileId::of(fd)?, len, offset, at)
    }
}

type Outcome = Result<(), NvStatus>;

/// Everything that is open or allocated.
#[derive(Debug, Default)]
struct Tables {
    files: HashMap<FileId, OpenFile>,
    clients: BTreeMap<u32, Client>,
    mappings: Vec<Mapping>,
    made: u32,
    violations: Vec<String>,
}

#[derive(Debug)]
struct OpenFile {
    end: DeviceEnd,
    /// None for the control device.
    gpu: Option<i32>,
    /// The control file with which this file of a GPU is registered.
    control: Option<FileId>,
}

#[derive(Debug)]
struct Client {
    file: FileId,
    made: u32,
    objects: BTreeMap<u32, Entry>,
}

#[derive(Debug)]
struct Entry {
    parent: u32,
    kind: Kind,
}

#[derive(Debug)]
enum Kind {
    Device { gpu: i32 },
    Subdevice,
    ConfidentialCompute,
    Memory(Arc<Object>),
}

/// A mapping in BAR1, and the file whose `mmap` shows it.
#[derive(Debug)]
struct Mapping {
    client: u32,
    memory: u32,
    linear: u64,
    file: FileId,
    object: Arc<Object>,
    offset: usize,
    len: usize,
    vma: Option<Vma>,
}

/// Clients count from behind CUDA's.
const FIRST_CLIENT: u32 = CLIENT + 1;
/// `RS_UNIQUE_HANDLE_BASE` in `rs_client.h`.
const FIRST_HANDLE: u32 = 0xcaf0_0000;
/// Bus address of a BAR1.
const BAR1: u64 = 0x38_0000_0000;

impl Tables {
    /// Frees the objects of closed files, then counts.
    fn live(&mut self) -> Live {
        self.reap();
        Live {
            files: self.files.len(),
            clients: self.clients.len(),
            objects: self.clients.values().map(|client| client.objects.len()).sum(),
            mappings: self.mappings.len(),
        }
    }

    /// Frees the objects of closed files.
    fn reap(&mut self) {
        self.files.retain(|_, file| !file.end.is_closed());
        let (files, violations) = (&self.files, &mut self.violations);
        self.clients.retain(|handle, client| {
            let open = files.contains_key(&client.file);
            if !open {
                violations.push(format!("client {handle:#x} was left to the closing of its file"));
            }
            open
        });
        let clients = &self.clients;
        self.mappings.retain(|mapping| clients.contains_key(&mapping.client));
    }

    fn add_file(&mut self, end: DeviceEnd, gpu: Option<i32>) {
        self.reap();
        self.files.insert(end.id(), OpenFile { end, gpu, control: None });
    }

    fn register(&mut self, file: FileId, control: FileId) -> io::Result<()> {
        let is_control = self.files.get(&control).is_some_and(|file| file.gpu.is_none());
        match self.files.get_mut(&file) {
            Some(file) if is_control && file.control.is_none() => {
                file.control = Some(control);
                Ok(())
            }
            _ => Err(io::Error::from_raw_os_error(libc::EINVAL)),
        }
    }

    /// Whether a file of the GPU is registered with the control file.
    fn is_registered(&mut self, control: FileId, gpu: i32) -> bool {
        self.reap();
        self.files.values().any(|file| file.gpu == Some(gpu) && file.control == Some(control))
    }

    fn add_client(&mut self, file: FileId) -> u32 {
        let handle = FIRST_CLIENT + self.made;
        self.made += 1;
        self.clients.insert(handle, Client { file, made: 0, objects: BTreeMap::new() });
        handle
    }

    /// A client, for the file that made it.
    fn client(&mut self, file: FileId, handle: u32) -> Result<&mut Client, NvStatus> {
        self.clients.get_mut(&handle).filter(|client| client.file == file).ok_or(NvStatus::INVALID_CLIENT)
    }

    fn free(&mut self, file: FileId, call: &abi::Free) -> Outcome {
        let client = self.client(file, call.root)?;
        let violations = if call.object == call.root {
            let left = client.objects.len();
            self.clients.remove(&call.root);
            (left > 0).then(|| format!("client {:#x} freed with {left} objects", call.root))
        } else {
            let object = client.objects.get(&call.object).ok_or(NvStatus::INVALID_OBJECT_HANDLE)?;
            if object.parent != call.parent {
                return Err(NvStatus::INVALID_OBJECT_PARENT);
            }
            client.objects.remove(&call.object);
            let children = client.objects.values().filter(|child| child.parent == call.object).count();
            let mapped =
                self.mappings.iter().filter(|m| (m.client, m.memory) == (call.root, call.object)).count();
            (children + mapped > 0).then(|| {
                format!("object {:#x} freed with {children} children, {mapped} mappings", call.object)
            })
        };
        self.violations.extend(violations);
        Ok(())
    }

    fn map(&mut self, file: FileId, target: FileId, call: &mut abi::Map, bar1: u64) -> Outcome {
        self.reap();
        let client = self.client(file, call.client)?;
        let Some(&Entry { kind: Kind::Device { gpu }, .. }) = client.objects.get(&call.device) else {
            return Err(NvStatus::INVALID_OBJECT_PARENT);
        };
        let object = match client.objects.get(&call.memory) {
            Some(Entry { kind: Kind::Memory(object), .. }) => object.clone(),
            _ => return Err(NvStatus::INVALID_OBJECT_HANDLE),
        };
        let (offset, len) = (call.offset, call.length);
        if offset >= object.size as u64 {
            return Err(NvStatus::INVALID_BASE);
        }
        if len == 0 || len > object.size as u64 - offset {
            return Err(NvStatus::INVALID_LIMIT);
        }
        let used: usize = self.mappings.iter().filter(|m| m.object.gpu == gpu).map(|m| m.len).sum();
        if used as u64 + len > bar1 {
            return Err(NvStatus::INSUFFICIENT_RESOURCES);
        }
        if self.files.get(&target).is_none_or(|file| file.gpu != Some(gpu)) {
            return Err(NvStatus::INVALID_ARGUMENT);
        }
        // One mapping for each open file.
        if self.mappings.iter().any(|mapping| mapping.file == target) {
            return Err(NvStatus::INVALID_STATE);
        }
        self.made += 1;
        call.linear = BAR1 + (u64::from(self.made) << 32);
        let size = |value: u64| usize::try_from(value).map_err(|_| NvStatus::INVALID_LIMIT);
        self.mappings.push(Mapping {
            client: call.client,
            memory: call.memory,
            linear: call.linear,
            file: target,
            offset: size(offset)?,
            len: size(len)?,
            object,
            vma: None,
        });
        Ok(())
    }

    /// The mapping for which a file is prepared.
    fn prepared(&mut self, file: FileId) -> Option<&mut Mapping> {
        self.mappings.iter_mut().find(|mapping| mapping.file == file)
    }

    fn unmap(&mut self, file: FileId, call: &abi::Unmap) -> Outcome {
        self.client(file, call.client)?;
        let wanted = (call.client, call.memory, call.linear);
        let found = self.mappings.iter().position(|m| (m.client, m.memory, m.linear) == wanted);
        let mapping = self.mappings.swap_remove(found.ok_or(NvStatus::INVALID_ADDRESS)?);
        if mapping.vma.is_some_and(|vma| vma.is_there()) {
            self.violations.push(format!("BAR1 given back under the mapping of object {:#x}", call.memory));
        }
        Ok(())
    }
}

impl Client {
    /// Adds an object under a handle, or under one chosen here where that is 0.
    fn add(&mut self, parent: u32, handle: u32, kind: Kind) -> Result<u32, NvStatus> {
        let handle = if handle == 0 { FIRST_HANDLE + self.made } else { handle };
        if self.objects.contains_key(&handle) {
            return Err(NvStatus::INSERT_DUPLICATE_NAME);
        }
        self.made += 1;
        self.objects.insert(handle, Entry { parent, kind });
        Ok(handle)
    }

    /// Adds memory under a device of its GPU.
    fn add_memory(&mut self, parent: u32, handle: u32, memory: Arc<Object>) -> Result<u32, NvStatus> {
        match self.objects.get(&parent) {
            Some(Entry { kind: Kind::Device { gpu }, .. }) if *gpu == memory.gpu => {
                self.add(parent, handle, Kind::Memory(memory))
            }
            _ => Err(NvStatus::INVALID_OBJECT_PARENT),
        }
    }
}
