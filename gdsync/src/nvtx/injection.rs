//! The program's side of NVTX 3: loads a profiler's library, and lets it put its functions into tables.
//!
//! NVTX has no library of its own: its headers do what is done here. Numbers, tables and structures are those of `nvToolsExt.h`,
//! `nvtxTypes.h` and `nvtxInit.h` of NVTX 3 (<https://github.com/NVIDIA/NVTX>).

use std::ffi::{CStr, CString, c_char, c_void};
use std::mem::transmute;
use std::os::unix::ffi::OsStringExt;
use std::ptr::null_mut;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicPtr, Ordering};

const NVTX_VERSION: u16 = 3;
const NVTX_MESSAGE_TYPE_ASCII: i32 = 1;
/// `NVTX_ETID_*`
const CALLBACKS: u32 = 1;
const VERSION_INFO: u32 = 3;
/// `NVTX_CB_MODULE_CORE2`: what has domains.
const CORE2: usize = 5;
/// The slots of each module, the first of which is not used: `NVTX_CBID_*_SIZE`.
const SIZES: [u8; 7] = [0, 16, 9, 15, 7, 16, 7];
/// `NVTX_CBID_CORE2_*`
const DOMAIN_RANGE_PUSH_EX: usize = 4;
const DOMAIN_RANGE_POP: usize = 5;
const DOMAIN_CREATE_A: usize = 12;

const MODULES: usize = SIZES.len();
const SLOTS: usize = 16;

/// A function of the profiler, or null.
type Slot = AtomicPtr<c_void>;
/// Places of slots, and a null behind the last.
type Table = [AtomicPtr<Slot>; SLOTS + 1];

static FUNCTIONS: [[Slot; SLOTS]; MODULES] =
    [const { [const { AtomicPtr::new(null_mut()) }; SLOTS] }; MODULES];
static TABLES: [Table; MODULES] = [const { [const { AtomicPtr::new(null_mut()) }; SLOTS + 1] }; MODULES];

/// `NvtxExportTableCallbacks`
#[repr(C)]
struct Callbacks {
    size: usize,
    get_module_function_table: extern "C" fn(u32, *mut *const Table, *mut u32) -> i32,
}

/// `NvtxExportTableVersionInfo`
#[repr(C)]
struct VersionInfo {
    size: usize,
    version: u32,
    reserved: u32,
    set_injection_nvtx_version: extern "C" fn(u32),
}

/// `nvtxEventAttributes_t`
#[repr(C)]
struct EventAttributes {
    version: u16,
    size: u16,
    category: u32,
    color_type: i32,
    color: u32,
    payload_type: i32,
    reserved: i32,
    payload: u64,
    message_type: i32,
    message: *const c_char,
}

/// Of [`EventAttributes`].
const SIZE: u16 = 48;
const _: () = assert!(size_of::<EventAttributes>() == SIZE as usize && size_of::<VersionInfo>() == 24);

type Handle = *mut c_void;
type Initialize = unsafe extern "C" fn(extern "C" fn(u32) -> *const c_void) -> i32;
type Create = unsafe extern "C" fn(*const c_char) -> Handle;
type Push = unsafe extern "C" fn(Handle, *const EventAttributes) -> i32;
type Pop = unsafe extern "C" fn(Handle) -> i32;

extern "C" fn get_module_function_table(module: u32, table: *mut *const Table, size: *mut u32) -> i32 {
    let Some(module) = usize::try_from(module).ok().filter(|module| (1..MODULES).contains(module)) else {
        return 0;
    };
    if !table.is_null() {
        // SAFETY: the profiler passes a place for the answer, or null.
        unsafe { table.write(&raw const TABLES[module]) };
    }
    if !size.is_null() {
        // SAFETY: the profiler passes a place for the answer, or null.
        unsafe { size.write(SIZES[module].into()) };
    }
    1
}

/// What version the profiler is of means nothing, as in NVTX itself.
extern "C" fn set_injection_nvtx_version(_version: u32) {}

extern "C" fn export_table(id: u32) -> *const c_void {
    static OF_CALLBACKS: Callbacks = Callbacks { size: size_of::<Callbacks>(), get_module_function_table };
    static OF_VERSION: VersionInfo = VersionInfo {
        size: size_of::<VersionInfo>(),
        version: NVTX_VERSION as u32,
        reserved: 0,
        set_injection_nvtx_version,
    };
    match id {
        CALLBACKS => (&raw const OF_CALLBACKS).cast(),
        VERSION_INFO => (&raw const OF_VERSION).cast(),
        _ => null_mut(),
    }
}

/// The functions that a profiler took over.
#[derive(Clone, Copy, Debug)]
struct Profiler {
    create: Create,
    push: Push,
    pop: Pop,
}

impl Profiler {
    /// That of this process, if there is one.
    fn get() -> Option<Self> {
        static PROFILER: OnceLock<Option<Profiler>> = OnceLock::new();
        *PROFILER.get_or_init(Self::load)
    }

    /// Loads the library that the environment names, and never lets it go.
    fn load() -> Option<Self> {
        let name =
            if cfg!(target_pointer_width = "64") { "NVTX_INJECTION64_PATH" } else { "NVTX_INJECTION32_PATH" };
        let path = CString::new(std::env::var_os(name).filter(|path| !path.is_empty())?.into_vec()).ok()?;
        for ((table, functions), size) in TABLES.iter().zip(&FUNCTIONS).zip(SIZES) {
            let used = table.iter().zip(functions).take(size.into()).skip(1);
            used.for_each(|(place, slot)| place.store((&raw const *slot).cast_mut(), Ordering::Relaxed));
        }
        // SAFETY: a terminated path; whoever sets the variable wants the library's initialisers to run.
        let library = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_LAZY) };
        if library.is_null() {
            tracing::warn!(?path, "{name} names a library that cannot be loaded: no ranges");
            return None;
        }
        // SAFETY: a loaded library and a terminated name.
        let initialize = unsafe { libc::dlsym(library, c"InitializeInjectionNvtx2".as_ptr()) };
        if initialize.is_null() {
            tracing::warn!(?path, "{name} names a library that is none of a profiler: no ranges");
            return None;
        }
        // SAFETY: the type that nvtxTypes.h gives it, `NvtxInitializeInjectionNvtxFunc_t`.
        let initialize = unsafe { transmute::<*mut c_void, Initialize>(initialize) };
        // SAFETY: called once, as NVTX does; what it stores in the tables stays valid, for the library stays.
        if unsafe { initialize(export_table) } == 0 {
            return None;
        }
        let function = |id: usize| {
            let function = FUNCTIONS[CORE2][id].load(Ordering::Acquire);
            (!function.is_null()).then_some(function)
        };
        // SAFETY: the type of the function of this slot in nvtxTypes.h.
        let create = unsafe { transmute::<*mut c_void, Create>(function(DOMAIN_CREATE_A)?) };
        // SAFETY: as above.
        let push = unsafe { transmute::<*mut c_void, Push>(function(DOMAIN_RANGE_PUSH_EX)?) };
        // SAFETY: as above.
        let pop = unsafe { transmute::<*mut c_void, Pop>(function(DOMAIN_RANGE_POP)?) };
        Some(Self { create, push, pop })
    }
}

/// A domain that a profiler knows.
#[derive(Clone, Copy, Debug)]
pub(super) struct Domain {
    profiler: Profiler,
    handle: Handle,
}

// SAFETY: the handle is a name; NVTX allows any thread to use it.
unsafe impl Send for Domain {}
// SAFETY: as above.
unsafe impl Sync for Domain {}

impl Domain {
    /// `None` without a profiler.
    pub(super) fn new(name: &'static CStr) -> Option<Self> {
        let profiler = Profiler::get()?;
        // SAFETY: a terminated name, which stays.
        let handle = unsafe { (profiler.create)(name.as_ptr()) };
        Some(Self { profiler, handle })
    }

    pub(super) fn push(&self, name: &'static CStr) {
        let event = EventAttributes {
            version: NVTX_VERSION,
            size: SIZE,
            category: 0,
            color_type: 0,
            color: 0,
            payload_type: 0,
            reserved: 0,
            payload: 0,
            message_type: NVTX_MESSAGE_TYPE_ASCII,
            message: name.as_ptr(),
        };
        // SAFETY: the profiler's handle, and attributes that it reads before it returns.
        unsafe { (self.profiler.push)(self.handle, &event) };
    }

    /// Ends the range that this thread began last.
    pub(super) fn pop(&self) {
        // SAFETY: the profiler's handle.
        unsafe { (self.profiler.pop)(self.handle) };
    }
}
