//! A table of entry points that keeps books, to see what the driver is asked for and what is left over. Its
//! state belongs to the thread, so each test has its own.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{c_char, c_void};
use std::os::fd::IntoRawFd;

use crate::cuda::CudaStatus;
use crate::cuda::raw::Api;
use crate::cuda::raw::layout::{AccessDesc, AllocationProp, Handle, pointer_attribute as attribute};

/// The context of the application.
pub(super) const APPLICATION: Handle = 0xa000;
/// The primary context of GPU 0; the others follow.
pub(super) const PRIMARY: Handle = 0x1000;
const GPUS: i32 = 2;

#[derive(Debug, Default)]
pub(super) struct Books {
    /// The thread's stack of contexts.
    pub(super) contexts: Vec<Handle>,
    /// References to primary contexts, by device.
    pub(super) retained: BTreeMap<i32, i32>,
    /// Entry points called, in order.
    pub(super) calls: Vec<&'static str>,
    /// Entry points that fail, with their status.
    pub(super) failing: BTreeMap<&'static str, u32>,
    /// What is allocated, reserved, mapped, created, by address or number, with its length.
    pub(super) memory: BTreeMap<u64, usize>,
    pub(super) reserved: BTreeMap<u64, usize>,
    pub(super) mapped: BTreeMap<u64, usize>,
    pub(super) created: BTreeSet<u64>,
    pub(super) streams: BTreeSet<Handle>,
    /// Pinned host memory by address.
    pub(super) pinned: BTreeMap<usize, Vec<u8>>,
    /// Contexts that were flushed.
    pub(super) flushes: Vec<Handle>,
    /// Copies: context, stream, GPU address, bytes.
    pub(super) copies: Vec<(Handle, Handle, u64, usize)>,
    /// Attributes by address; every attribute that is not here is 0.
    pub(super) attributes: BTreeMap<u64, BTreeMap<u32, u64>>,
    /// Attributes from here on are newer than the driver.
    pub(super) attributes_end: Option<u32>,
    /// Attributes of devices, by device and number; every one that is not here is 1.
    pub(super) device_attributes: BTreeMap<(i32, u32), i32>,
    pub(super) last_prop: Option<AllocationProp>,
    /// The application captures a stream.
    pub(super) capturing: bool,
    /// This thread's mode towards that.
    pub(super) capture_mode: u32,
    next: u64,
}

thread_local! {
    static BOOKS: RefCell<Books> = RefCell::default();
}

/// Looks into the books of this thread, or changes them.
pub(super) fn books<T>(look: impl FnOnce(&mut Books) -> T) -> T {
    BOOKS.with(|books| look(&mut books.borrow_mut()))
}

/// One call: noted, failing where told to, else what `act` says.
fn call(name: &'static str, act: impl FnOnce(&mut Books) -> CudaStatus) -> u32 {
    books(|books| {
        books.calls.push(name);
        books.failing.get(name).copied().unwrap_or_else(|| act(books).0)
    })
}

/// As [`call`], for those that need a current context. Those are also what a capture cannot take, as far as known.
fn in_context(name: &'static str, act: impl FnOnce(&mut Books, Handle) -> CudaStatus) -> u32 {
    call(name, |books| match books.contexts.last().copied() {
        Some(_) if books.capturing && books.capture_mode != 2 => CudaStatus(900),
        Some(context) => act(books, context),
        None => CudaStatus::INVALID_CONTEXT,
    })
}

fn put<T>(place: *mut T, value: T) -> CudaStatus {
    // SAFETY: the caller passes a place for the answer.
    unsafe { place.write(value) };
    CudaStatus::SUCCESS
}

fn removed<T>(what: Option<T>) -> CudaStatus {
    what.map_or(CudaStatus::INVALID_VALUE, |_| CudaStatus::SUCCESS)
}

impl Books {
    fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    fn address(&mut self, len: usize) -> u64 {
        let at = 0x7f00_0000_0000 + (self.next << 30);
        self.next += 1 + (len as u64 >> 30);
        at
    }
}

fn attribute_of(books: &Books, asked: u32, addr: u64) -> Option<u64> {
    books.attributes.get(&addr)?.get(&asked).copied()
}

/// Writes an answer in the width that the driver uses.
fn answer(place: *mut c_void, asked: u32, value: u64) -> CudaStatus {
    match asked {
        attribute::MEMORY_TYPE | attribute::IS_MANAGED | attribute::DEVICE_ORDINAL => {
            put(place.cast::<u32>(), u32::try_from(value).unwrap())
        }
        _ => put(place.cast::<u64>(), value),
    }
}

fn write_text(place: *mut c_char, len: i32, text: &std::ffi::CStr) -> CudaStatus {
    let bytes = text.to_bytes_with_nul();
    assert!(bytes.len() <= usize::try_from(len).unwrap());
    // SAFETY: the caller passes a place of `len` bytes.
    unsafe { place.copy_from_nonoverlapping(bytes.as_ptr().cast(), bytes.len()) };
    CudaStatus::SUCCESS
}

fn descriptor(place: *mut c_void) -> CudaStatus {
    // Like the driver's, this one is not closed on exec.
    let fd = std::fs::File::open("/dev/null").unwrap().into_raw_fd();
    // SAFETY: an open descriptor and a plain number.
    assert_eq!(unsafe { libc::fcntl(fd, libc::F_SETFD, 0) }, 0);
    put(place.cast::<i32>(), fd)
}

/// What GPU memory holds.
pub(super) const CONTENT: u8 = 0xa5;

fn copied(books: &mut Books, copy: (Handle, Handle, u64, usize)) -> CudaStatus {
    books.copies.push(copy);
    if books.streams.contains(&copy.1) { CudaStatus::SUCCESS } else { CudaStatus::INVALID_HANDLE }
}

/// Makes an entry point of each line and the table of them: the name, the arguments, and what it does, in a context where
/// two parameters are named.
macro_rules! table {
    ($($field:ident = $name:literal ($($arg:ident: $ty:ty),*) |$books:pat_param $(, $context:pat_param)?| $body:expr;)*) => {
        /// The table, with all entry points; the books of this thread are new.
        pub(super) fn api() -> Api {
            books(|books| *books = Books { contexts: vec![APPLICATION], ..Books::default() });
            Api {
                $($field: {
                    extern "C" fn entry($($arg: $ty),*) -> u32 {
                        table!(@call $name, |$books $(, $context)?| $body)
                    }
                    Some(entry)
                },)*
                ..Api::default()
            }
        }
    };
    (@call $name:literal, |$books:pat_param| $body:expr) => { call($name, |$books| $body) };
    (@call $name:literal, |$books:pat_param, $context:pat_param| $body:expr) => {
        in_context($name, |$books, $context| $body)
    };
}

/// Removes what was made and must be of this length.
fn remove_whole(map: &mut BTreeMap<u64, usize>, addr: u64, len: usize) -> CudaStatus {
    removed(map.remove(&addr).filter(|&made| made == len))
}

/// Adds a number to the set of these and gives it.
fn numbered(books: &mut Books, set: fn(&mut Books) -> &mut BTreeSet<u64>, place: *mut u64) -> CudaStatus {
    let number = books.number();
    set(books).insert(number);
    put(place, number)
}

table! {
    init = "cuInit" (flags: u32) |_| removed((flags == 0).then_some(()));
    driver_get_version = "cuDriverGetVersion" (version: *mut i32) |_| put(version, 13000);
    device_get_count = "cuDeviceGetCount" (count: *mut i32) |_| put(count, GPUS);
    device_get = "cuDeviceGet" (device: *mut i32, ordinal: i32) |_| put(device, ordinal);
    device_get_name = "cuDeviceGetName" (text: *mut c_char, len: i32, _device: i32)
        |_| write_text(text, len, c"Fake GPU");
    device_get_pci_bus_id = "cuDeviceGetPCIBusId" (text: *mut c_char, len: i32, _device: i32)
        |_| write_text(text, len, c"0000:0F:00.0");
    device_get_attribute = "cuDeviceGetAttribute" (value: *mut i32, attribute: u32, device: i32)
        |books| put(value, books.device_attributes.get(&(device, attribute)).copied().unwrap_or(1));
    primary_ctx_retain = "cuDevicePrimaryCtxRetain" (context: *mut Handle, device: i32) |books| {
        *books.retained.entry(device).or_default() += 1;
        put(context, PRIMARY + usize::try_from(device).unwrap())
    };
    primary_ctx_release = "cuDevicePrimaryCtxRelease" (device: i32) |books| {
        *books.retained.entry(device).or_default() -= 1;
        CudaStatus::SUCCESS
    };
    primary_ctx_get_state = "cuDevicePrimaryCtxGetState" (device: i32, _flags: *mut u32, active: *mut i32)
        |books| put(active, i32::from(books.retained.get(&device).is_some_and(|&count| count > 0)));
    ctx_push_current = "cuCtxPushCurrent" (context: Handle) |books| {
        books.contexts.push(context);
        CudaStatus::SUCCESS
    };
    ctx_pop_current = "cuCtxPopCurrent" (context: *mut Handle) |books| match books.contexts.pop() {
        Some(popped) => put(context, popped),
        None => CudaStatus::INVALID_CONTEXT,
    };
    ctx_get_stream_priority_range = "cuCtxGetStreamPriorityRange" (least: *mut i32, greatest: *mut i32) |_, _| {
        put(least, 0);
        put(greatest, -5)
    };
    thread_exchange_stream_capture_mode = "cuThreadExchangeStreamCaptureMode" (mode: *mut u32) |books| {
        // SAFETY: the caller passes a mode.
        let former = std::mem::replace(&mut books.capture_mode, unsafe { mode.read() });
        put(mode, former)
    };
    pointer_get_attribute = "cuPointerGetAttribute" (place: *mut c_void, asked: u32, addr: u64)
        |books| match attribute_of(books, asked, addr) {
            Some(value) if books.attributes_end.is_none_or(|end| asked < end) => answer(place, asked, value),
            _ => CudaStatus::INVALID_VALUE,
        };
    pointer_get_attributes = "cuPointerGetAttributes"
        (count: u32, asked: *const u32, places: *const *mut c_void, addr: u64) |books| {
            let count = usize::try_from(count).unwrap();
            // SAFETY: the caller passes `count` of each.
            let asked = unsafe { std::slice::from_raw_parts(asked, count) };
            // SAFETY: the caller passes `count` of each.
            let places = unsafe { std::slice::from_raw_parts(places, count) };
            if asked.iter().any(|&asked| books.attributes_end.is_some_and(|end| asked >= end)) {
                return CudaStatus::INVALID_VALUE;
            }
            for (&asked, &place) in asked.iter().zip(places) {
                answer(place, asked, attribute_of(books, asked, addr).unwrap_or(0));
            }
            CudaStatus::SUCCESS
        };
    pointer_set_attribute = "cuPointerSetAttribute" (value: *const c_void, asked: u32, addr: u64) |books| {
        // SAFETY: the caller passes a 32-bit number.
        assert_eq!((asked, unsafe { value.cast::<u32>().read() }), (attribute::SYNC_MEMOPS, 1));
        removed(books.memory.get(&addr).or(books.mapped.get(&addr)))
    };
    ipc_get_mem_handle = "cuIpcGetMemHandle" (handle: *mut [u8; 64], _addr: u64) |_, _| put(handle, [7; 64]);
    mem_alloc = "cuMemAlloc" (addr: *mut u64, len: usize) |books, _| {
        let at = books.address(len) + 0x200;
        books.memory.insert(at, len);
        put(addr, at)
    };
    mem_free = "cuMemFree" (addr: u64) |books, _| removed(books.memory.remove(&addr));
    mem_host_alloc = "cuMemHostAlloc" (addr: *mut *mut c_void, len: usize, flags: u32) |books, _| {
        assert_eq!(flags, 1);
        let mut memory = vec![0_u8; len];
        let at = memory.as_mut_ptr();
        books.pinned.insert(at.expose_provenance(), memory);
        put(addr, at.cast())
    };
    mem_free_host = "cuMemFreeHost" (addr: *mut c_void) |books, _| removed(books.pinned.remove(&addr.addr()));
    stream_create = "cuStreamCreateWithPriority" (stream: *mut Handle, flags: u32, priority: i32) |books, _| {
        assert_eq!((flags, priority), (1, -5));
        let number = Handle::try_from(books.number()).unwrap();
        books.streams.insert(number);
        put(stream, number)
    };
    stream_query = "cuStreamQuery" (_stream: Handle) |_| CudaStatus::SUCCESS;
    stream_synchronize = "cuStreamSynchronize" (_stream: Handle) |_| CudaStatus::SUCCESS;
    stream_destroy = "cuStreamDestroy" (stream: Handle) |books| removed(books.streams.take(&stream));
    memcpy_to_device_async = "cuMemcpyHtoDAsync" (dst: u64, _src: *const c_void, len: usize, stream: Handle)
        |books, context| copied(books, (context, stream, dst, len));
    memcpy_to_host_async = "cuMemcpyDtoHAsync" (dst: *mut c_void, src: u64, len: usize, stream: Handle)
        |books, context| {
            // SAFETY: the caller passes a place for so many bytes.
            unsafe { dst.cast::<u8>().write_bytes(CONTENT, len) };
            copied(books, (context, stream, src, len))
        };
    mem_get_allocation_granularity = "cuMemGetAllocationGranularity"
        (granularity: *mut usize, _prop: *const AllocationProp, option: u32) |_| {
            assert_eq!(option, 0);
            put(granularity, 2 << 20)
        };
    mem_create = "cuMemCreate" (memory: *mut u64, _len: usize, prop: *const AllocationProp, _flags: u64) |books| {
        // SAFETY: the caller passes properties.
        books.last_prop = Some(unsafe { prop.read() });
        numbered(books, |books| &mut books.created, memory)
    };
    mem_release = "cuMemRelease" (memory: u64) |books| removed(books.created.take(&memory));
    mem_address_reserve = "cuMemAddressReserve"
        (addr: *mut u64, len: usize, _align: usize, _hint: u64, _flags: u64) |books| {
            let at = books.address(len);
            books.reserved.insert(at, len);
            put(addr, at)
        };
    // Freeing with something still mapped, or another length, is refused as the driver does.
    mem_address_free = "cuMemAddressFree" (addr: u64, len: usize) |books| match books.mapped.get(&addr) {
        Some(_) => CudaStatus::INVALID_VALUE,
        None => remove_whole(&mut books.reserved, addr, len),
    };
    mem_map = "cuMemMap" (addr: u64, len: usize, _offset: usize, memory: u64, _flags: u64) |books| {
        if books.reserved.get(&addr) != Some(&len) || !books.created.contains(&memory) {
            return CudaStatus::INVALID_VALUE;
        }
        books.mapped.insert(addr, len);
        CudaStatus::SUCCESS
    };
    mem_unmap = "cuMemUnmap" (addr: u64, len: usize) |books| remove_whole(&mut books.mapped, addr, len);
    mem_set_access = "cuMemSetAccess" (addr: u64, len: usize, access: *const AccessDesc, count: usize) |books| {
        // SAFETY: the caller passes a description.
        let access = unsafe { access.read() };
        assert_eq!((count, access.flags, access.location.kind), (1, 3, 1));
        removed(books.mapped.get(&addr).filter(|&&mapped| mapped == len))
    };
    mem_retain_allocation_handle = "cuMemRetainAllocationHandle" (memory: *mut u64, _addr: *mut c_void)
        |books| numbered(books, |books| &mut books.created, memory);
    mem_export_to_shareable_handle = "cuMemExportToShareableHandle"
        (place: *mut c_void, _memory: u64, kind: u32, _flags: u64) |_| {
            assert_eq!(kind, 1);
            descriptor(place)
        };
    mem_get_handle_for_address_range = "cuMemGetHandleForAddressRange"
        (place: *mut c_void, _addr: u64, _len: usize, kind: u32, flags: u64) |_, _| {
            assert_eq!((kind, flags), (1, 1));
            descriptor(place)
        };
    flush_gpu_direct_rdma_writes = "cuFlushGPUDirectRDMAWrites" (target: u32, scope: u32) |books, context| {
        books.flushes.push(context);
        removed(((target, scope) == (0, 100)).then_some(()))
    };
}
