//! What programs ask of CUDA for a card: to register its doorbell pages as registers, which ordinary memory is refused as, and
//! dma-bufs.
//!
//! `libcuda` is loaded by name, and its functions are found by `dlsym`, or by its `cuGetProcAddress`. So `dlsym` stands here; for all
//! but these names it jumps to that of the C library, which sees the program as its caller.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::atomic::{AtomicPtr, Ordering};

use super::inside;
use crate::context::exported;
use crate::user::mappings;

/// `CU_MEMHOSTREGISTER_IOMEMORY`
const IO_MEMORY: c_uint = 4;
/// `CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD`
const DMA_BUF: c_uint = 1;

/// `dlsym` of the C library.
static DLSYM: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());
static REGISTER: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());
static EXPORT: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());
static GET_PROC_ADDRESS: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());
static GET_PROC_ADDRESS_V2: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());

type Dlsym = unsafe extern "C" fn(*mut c_void, *const c_char) -> *mut c_void;
type Register = unsafe extern "C" fn(*mut c_void, usize, c_uint) -> c_uint;
type Export = unsafe extern "C" fn(*mut c_void, u64, usize, c_uint, u64) -> c_uint;
type GetProcAddress = unsafe extern "C" fn(*const c_char, *mut *mut c_void, c_int, u64) -> c_uint;
type GetProcAddressV2 =
    unsafe extern "C" fn(*const c_char, *mut *mut c_void, c_int, u64, *mut c_uint) -> c_uint;

/// The function that stands for one of `libcuda`, and where the address of that one is kept.
fn stand_in(name: &CStr) -> Option<(*mut c_void, &'static AtomicPtr<c_void>)> {
    match name.to_bytes() {
        // Both forms take the same arguments.
        b"cuMemHostRegister" | b"cuMemHostRegister_v2" => {
            Some((register as Register as *mut c_void, &REGISTER))
        }
        b"cuMemGetHandleForAddressRange" => Some((export as Export as *mut c_void, &EXPORT)),
        b"cuGetProcAddress" => Some((get_proc_address as GetProcAddress as *mut c_void, &GET_PROC_ADDRESS)),
        b"cuGetProcAddress_v2" => {
            Some((get_proc_address_v2 as GetProcAddressV2 as *mut c_void, &GET_PROC_ADDRESS_V2))
        }
        _ => None,
    }
}

/// Calls the function at an address that was found before its stand-in was given out.
macro_rules! found {
    ($place:ident as $type:ty, ($($argument:expr),*)) => {{
        // SAFETY: `libcuda`'s function of this type, stored by `choose` or `replace` before the program could call this one.
        let function: $type = unsafe { std::mem::transmute($place.load(Ordering::Acquire)) };
        // SAFETY: the program's arguments.
        unsafe { function($($argument),*) }
    }};
}

/// What `dlsym` returns for a name of the above that leads into `libcuda`. Null for others.
unsafe extern "C" fn choose(handle: *mut c_void, name: *const c_char) -> *mut c_void {
    let mut next = DLSYM.load(Ordering::Acquire);
    if next.is_null() {
        // SAFETY: both are strings. It is the oldest version of x86-64, which all have.
        next = unsafe { libc::dlvsym(libc::RTLD_NEXT, c"dlsym".as_ptr(), c"GLIBC_2.2.5".as_ptr()) };
        DLSYM.store(next, Ordering::Release);
    }
    if name.is_null() {
        return std::ptr::null_mut();
    }
    // SAFETY: the program asks for a name.
    let Some((ours, place)) = stand_in(unsafe { CStr::from_ptr(name) }) else { return std::ptr::null_mut() };
    // SAFETY: that is its type.
    let next: Dlsym = unsafe { std::mem::transmute(next) };
    // SAFETY: the program's arguments.
    let found = unsafe { next(handle, name) };
    // Another library that stands before the driver gets to it by a call of its own: through us, it would come back.
    if !is_of_driver(found) {
        return std::ptr::null_mut();
    }
    place.store(found, Ordering::Release);
    ours
}

/// Whether a function is in `libcuda`.
fn is_of_driver(function: *const c_void) -> bool {
    // SAFETY: any bytes are a value of this structure.
    let mut info: libc::Dl_info = unsafe { std::mem::zeroed() };
    // SAFETY: the address is only compared, and the place is valid.
    if unsafe { libc::dladdr(function, &raw mut info) } == 0 || info.dli_fname.is_null() {
        return false;
    }
    // SAFETY: the loader's string, of a library that is there.
    let path = unsafe { CStr::from_ptr(info.dli_fname) }.to_bytes();
    path.rsplit(|&byte| byte == b'/').next().is_some_and(|name| name.starts_with(b"libcuda.so"))
}

/// Jumps on with the program's registers and stack, unless `choose` has an answer.
#[cfg_attr(not(test), unsafe(no_mangle))]
#[unsafe(naked)]
pub(crate) unsafe extern "C" fn dlsym(handle: *mut c_void, name: *const c_char) -> *mut c_void {
    std::arch::naked_asm!(
        "push rdi",
        "push rsi",
        "sub rsp, 8",
        "call {choose}",
        "add rsp, 8",
        "pop rsi",
        "pop rdi",
        "test rax, rax",
        "jnz 2f",
        "mov rax, qword ptr [rip + {next}]",
        "jmp rax",
        "2:",
        "ret",
        choose = sym choose,
        next = sym DLSYM,
    )
}

/// Puts our function in the place of one that the program got by name for this version of CUDA.
fn replace(name: *const c_char, place: *mut *mut c_void, version: c_int, status: c_uint) -> c_uint {
    if status == 0 && !name.is_null() && !place.is_null() {
        // SAFETY: the program gave a name, for which the driver has answered.
        let mut name = unsafe { CStr::from_ptr(name) };
        if name == c"cuGetProcAddress" && version >= 12_000 {
            name = c"cuGetProcAddress_v2";
        }
        if let Some((ours, known)) = stand_in(name) {
            // SAFETY: the driver has just written there.
            let found = unsafe { place.read() };
            if is_of_driver(found) {
                known.store(found, Ordering::Release);
                // SAFETY: the driver has just written there.
                unsafe { place.write(ours) };
            }
        }
    }
    status
}

unsafe extern "C" fn get_proc_address(
    name: *const c_char,
    place: *mut *mut c_void,
    version: c_int,
    flags: u64,
) -> c_uint {
    let status = found!(GET_PROC_ADDRESS as GetProcAddress, (name, place, version, flags));
    replace(name, place, version, status)
}

unsafe extern "C" fn get_proc_address_v2(
    name: *const c_char,
    place: *mut *mut c_void,
    version: c_int,
    flags: u64,
    symbol: *mut c_uint,
) -> c_uint {
    let status = found!(GET_PROC_ADDRESS_V2 as GetProcAddressV2, (name, place, version, flags, symbol));
    replace(name, place, version, status)
}

/// `cuMemHostRegister`: doorbell pages of the card are registered as the memory that they are.
unsafe extern "C" fn register(addr: *mut c_void, len: usize, flags: c_uint) -> c_uint {
    let is_doorbell = flags & IO_MEMORY != 0 && inside(|| is_doorbell(addr as u64)) == Some(true);
    let flags = if is_doorbell { flags & !IO_MEMORY } else { flags };
    found!(REGISTER as Register, (addr, len, flags))
}

/// `cuMemGetHandleForAddressRange`: a dma-buf does not tell what memory it is of.
unsafe extern "C" fn export(handle: *mut c_void, addr: u64, len: usize, kind: c_uint, flags: u64) -> c_uint {
    let status = found!(EXPORT as Export, (handle, addr, len, kind, flags));
    if status == 0 && kind == DMA_BUF && !handle.is_null() {
        // SAFETY: the driver has just written a descriptor there.
        let fd = unsafe { handle.cast::<c_int>().read() };
        inside(|| exported(fd, addr));
    }
    status
}

/// Whether a doorbell page of a device is mapped here.
fn is_doorbell(addr: u64) -> bool {
    mappings(addr..addr.saturating_add(1)).iter().any(|mapping| mapping.name.starts_with("/memfd:uverbs"))
}
