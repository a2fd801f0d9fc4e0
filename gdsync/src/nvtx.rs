//! Ranges for NVIDIA's profilers (Nsight Systems, CUPTI), with the cargo feature `nvtx`; no-ops otherwise.
//!
//! Calls that submit, post, launch and wait are ranges of their thread in the domain `gdsync`; calls of `mp` have their
//! own domain. NVTX 3 has no library, only headers, which this module reimplements: the first range loads the library
//! named by `NVTX_INJECTION64_PATH`, which writes its functions into tables. (cudarc's `nvtx` needs libnvToolsExt,
//! which CUDA 13 lacks, and panics without it.)

use std::ffi::{CStr, CString, c_char, c_void};
use std::mem::transmute;
use std::os::unix::ffi::OsStringExt;
use std::ptr::null_mut;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicPtr, Ordering};

/// The domain of this crate.
pub(crate) static DOMAIN: Domain = Domain::new(c"gdsync");

/// Slots of each module (`NVTX_CBID_*_SIZE`). The first is unused; the entry after the last is null.
const SIZES: [u8; 7] = [0, 16, 9, 15, 7, 16, 7];
type Slot = AtomicPtr<c_void>;
type Table = [Option<&'static Slot>; 17];
static FUNCTIONS: [[Slot; 16]; 7] = [const { [const { AtomicPtr::new(null_mut()) }; 16] }; 7];
static TABLES: [Table; 7] = {
    let (mut tables, mut at) = ([[None; 17]; 7], 0);
    while at < 7 * 16 {
        if at % 16 > 0 && at % 16 < SIZES[at / 16] as usize {
            tables[at / 16][at % 16] = Some(&FUNCTIONS[at / 16][at % 16]);
        }
        at += 1;
    }
    tables
};

/// `NvtxExportTableCallbacks`
#[repr(C)]
struct Callbacks(usize, extern "C" fn(u32, *mut *const Table, *mut u32) -> i32);
static CALLBACKS: Callbacks = Callbacks(size_of::<Callbacks>(), module_table);
/// `NvtxExportTableVersionInfo`
#[repr(C)]
struct VersionInfo(usize, u32, u32, extern "C" fn(u32));
static VERSION_INFO: VersionInfo = VersionInfo(size_of::<VersionInfo>(), 3, 0, ignore_version);
/// `nvtxEventAttributes_t`: version, size, colour and payload, type of the message, message.
#[repr(C)]
struct Event(u16, u16, [u32; 7], i32, *const c_char);

type Initialize = unsafe extern "C" fn(extern "C" fn(u32) -> *const c_void) -> i32;
type Push = unsafe extern "C" fn(*mut c_void, *const Event) -> i32;
type Pop = unsafe extern "C" fn(*mut c_void) -> i32;

extern "C" fn ignore_version(_version: u32) {}

extern "C" fn module_table(module: u32, table: *mut *const Table, size: *mut u32) -> i32 {
    let Some(module @ 1..7) = usize::try_from(module).ok() else { return 0 };
    // SAFETY: the profiler passes null or a valid place for the answer.
    unsafe { table.as_mut() }.into_iter().for_each(|table| *table = &raw const TABLES[module]);
    // SAFETY: the profiler passes null or a valid place for the answer.
    unsafe { size.as_mut() }.into_iter().for_each(|size| *size = SIZES[module].into());
    1
}

extern "C" fn export_table(id: u32) -> *const c_void {
    match id {
        1 => (&raw const CALLBACKS).cast(),
        3 => (&raw const VERSION_INFO).cast(),
        _ => null_mut(),
    }
}

/// Loads the library that the environment names, and never unloads it. Returns whether it accepts ranges.
fn load() -> bool {
    let path = std::env::var_os("NVTX_INJECTION64_PATH").filter(|path| !path.is_empty());
    let Some(path) = path.and_then(|path| CString::new(path.into_vec()).ok()) else { return false };
    // SAFETY: the path is NUL-terminated. Setting the variable asks for the library's initialisers to run.
    let library = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_LAZY) };
    // SAFETY: the name is NUL-terminated. A null library makes the result unused.
    let initialize = unsafe { libc::dlsym(library, c"InitializeInjectionNvtx2".as_ptr()) };
    if library.is_null() || initialize.is_null() {
        tracing::warn!(?path, "NVTX_INJECTION64_PATH does not name a profiler's library: no ranges");
        return false;
    }
    // SAFETY: the type `NvtxInitializeInjectionNvtxFunc_t` of nvtxTypes.h.
    let initialize = unsafe { transmute::<*mut c_void, Initialize>(initialize) };
    // SAFETY: called once. The functions that it stores in the tables stay valid, because the library is never
    // unloaded.
    unsafe { initialize(export_table) != 0 }
}

/// A registered domain: its handle, and the functions that begin and end a range.
#[derive(Clone, Copy, Debug)]
struct Registered(*mut c_void, Push, Pop);

/// A group of ranges in a profiler.
#[derive(Debug)]
pub struct Domain {
    name: &'static CStr,
    registered: OnceLock<Option<Registered>>,
}

// SAFETY: NVTX allows any thread to use the handle of a domain.
unsafe impl Sync for Domain {}

/// A range of this thread, ended on drop.
#[derive(Debug)]
#[must_use]
pub struct Range(Option<Registered>);

impl Domain {
    /// Creates a domain. It is registered with the profiler at its first range.
    pub const fn new(name: &'static CStr) -> Self {
        Self { name, registered: OnceLock::new() }
    }

    /// Begins a range, nested in the open ranges of the thread.
    #[inline]
    pub fn range(&self, message: &'static CStr) -> Range {
        let registered =
            if cfg!(feature = "nvtx") { *self.registered.get_or_init(|| self.register()) } else { None };
        if let Some(Registered(handle, push, _)) = registered {
            let event = Event(3, 48, [0; 7], 1, message.as_ptr());
            // SAFETY: the handle is the profiler's. It reads the attributes before it returns.
            unsafe { push(handle, &event) };
        }
        Range(registered)
    }

    fn register(&self) -> Option<Registered> {
        static IS_LOADED: OnceLock<bool> = OnceLock::new();
        // Of `NVTX_CB_MODULE_CORE2`: DomainCreateA, DomainRangePushEx, DomainRangePop.
        let functions = || [12, 4, 5].map(|id| FUNCTIONS[5][id].load(Ordering::Acquire));
        let functions = IS_LOADED.get_or_init(load).then(functions);
        let [create, push, pop] = functions.filter(|all| all.iter().all(|one| !one.is_null()))?;
        // SAFETY: the profiler has stored a function of this type, given in nvtxTypes.h, in this slot.
        let create: unsafe extern "C" fn(*const c_char) -> *mut c_void = unsafe { transmute(create) };
        // SAFETY: the profiler has stored a function of this type, given in nvtxTypes.h, in this slot.
        let push = unsafe { transmute::<*mut c_void, Push>(push) };
        // SAFETY: the profiler has stored a function of this type, given in nvtxTypes.h, in this slot.
        let pop = unsafe { transmute::<*mut c_void, Pop>(pop) };
        // SAFETY: the name is NUL-terminated and static.
        Some(Registered(unsafe { create(self.name.as_ptr()) }, push, pop))
    }
}

impl Drop for Range {
    #[inline]
    fn drop(&mut self) {
        if let Some(Registered(handle, _, pop)) = self.0 {
            // SAFETY: the handle is the profiler's, and this is the innermost open range of the thread.
            unsafe { pop(handle) };
        }
    }
}
