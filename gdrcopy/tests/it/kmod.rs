//! The module of `kmod/` in a real kernel, on the emulated GPU of its tests (`tests/vm/run kmod`). Skipped if they are not loaded.
//! Run one test at a time (`--test-threads=1`): faults and counters are the machine's.

mod dmabuf;
mod maps;
mod pins;
mod stress;

use std::ffi::c_void;
use std::fs::{self, File};
use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

use gdsync_testkit::kmod::{self, Backing, CHUNK, Fault, Object, State, counter};

use crate::gdrdrv_abi::{GetAttr, GetCallbackFlag, GetInfoV2, PinBuffer, PinBufferV2, Request, UnpinBuffer};

/// Turns the result of a call that returns -1 and sets `errno` into a `Result` with that number.
fn check(result: i32) -> Result<i32, i32> {
    if result == -1 { Err(errno(&io::Error::last_os_error())) } else { Ok(result) }
}

/// `errno` of a failure.
fn errno(error: &io::Error) -> i32 {
    error.raw_os_error().expect("a system call failed")
}

/// The module's device, opened by this process.
#[derive(Debug)]
struct Raw(OwnedFd);

impl Raw {
    fn open() -> Self {
        let file = File::options().read(true).write(true).open("/dev/gdrdrv").expect("the module's device");
        Self(file.into())
    }

    /// Any request with any argument.
    fn ioctl(&self, code: u32, arg: *mut c_void) -> Result<(), i32> {
        // SAFETY: the driver checks the address, and each test passes memory for the answer or none at all.
        check(unsafe { libc::ioctl(self.0.as_raw_fd(), code.into(), arg) }).map(drop)
    }

    fn call<R: Request>(&self, request: &mut R) -> Result<(), i32> {
        self.ioctl(R::CODE, std::ptr::from_mut(request).cast())
    }

    fn pin(&self, addr: u64, size: u64) -> Result<u64, i32> {
        let mut request = PinBufferV2 { addr, size, ..Default::default() };
        self.call(&mut request).map(|()| request.handle)
    }

    fn pin_v1(&self, addr: u64, size: u64) -> Result<u64, i32> {
        let mut request = PinBuffer { addr, size, ..Default::default() };
        self.call(&mut request).map(|()| request.handle)
    }

    fn unpin(&self, handle: u64) -> Result<(), i32> {
        self.call(&mut UnpinBuffer { handle })
    }

    fn info(&self, handle: u64) -> Result<GetInfoV2, i32> {
        let mut request = GetInfoV2 { handle, ..Default::default() };
        self.call(&mut request).map(|()| request)
    }

    fn flag(&self, handle: u64) -> Result<u32, i32> {
        let mut request = GetCallbackFlag { handle, ..Default::default() };
        self.call(&mut request).map(|()| request.flag)
    }

    fn attribute(&self, attr: u32) -> Result<u32, i32> {
        let mut request = GetAttr { attr, val: 0 };
        self.call(&mut request).map(|()| request.val)
    }

    /// Maps at a page offset.
    fn map_as(&self, page: u64, len: u64, prot: i32, flags: i32) -> Result<Map, i32> {
        let offset = i64::try_from(page << 12).expect("an offset");
        let len = usize::try_from(len).expect("a length");
        // SAFETY: a new place is chosen by the kernel.
        let raw = unsafe { libc::mmap(std::ptr::null_mut(), len, prot, flags, self.0.as_raw_fd(), offset) };
        if raw == libc::MAP_FAILED {
            return Err(errno(&io::Error::last_os_error()));
        }
        Ok(Map { ptr: NonNull::new(raw.cast()).expect("not null"), len })
    }

    fn map(&self, handle: u64, len: u64) -> Result<Map, i32> {
        self.map_as(handle, len, libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED)
    }
}

/// A mapping, unmapped when dropped.
#[derive(Debug)]
struct Map {
    ptr: NonNull<u8>,
    len: usize,
}

// SAFETY: memory of a device, reached by volatile accesses alone.
unsafe impl Send for Map {}

impl Map {
    fn at(&self, offset: usize) -> *mut u8 {
        assert!(offset < self.len);
        self.ptr.as_ptr().wrapping_add(offset)
    }

    fn load(&self, offset: usize) -> u8 {
        // SAFETY: inside the mapping; where the driver took the page, the signal is what the test is about.
        unsafe { self.at(offset).read_volatile() }
    }

    fn store(&self, offset: usize, value: u8) {
        // SAFETY: inside the mapping; where the driver took the page, the signal is what the test is about.
        unsafe { self.at(offset).write_volatile(value) };
    }

    fn bytes(&self, range: Range<usize>) -> Vec<u8> {
        range.map(|offset| self.load(offset)).collect()
    }

    fn unmap(self) -> Result<(), i32> {
        let result = self.unmap_part(0, self.len);
        std::mem::forget(self);
        result
    }

    fn unmap_part(&self, offset: usize, len: usize) -> Result<(), i32> {
        // SAFETY: a part of this mapping, to which there are no references.
        check(unsafe { libc::munmap(self.ptr.as_ptr().wrapping_add(offset).cast(), len) }).map(drop)
    }

    fn protect(&self, offset: usize, len: usize, prot: i32) -> Result<(), i32> {
        // SAFETY: a part of this mapping, to which there are no references.
        check(unsafe { libc::mprotect(self.ptr.as_ptr().wrapping_add(offset).cast(), len, prot) }).map(drop)
    }
}

impl Drop for Map {
    fn drop(&mut self) {
        self.unmap_part(0, self.len).expect("munmap");
    }
}

/// Addresses are never given twice, as by CUDA in a short while.
static NEXT: AtomicU64 = AtomicU64::new(0x7f40_0000_0000);

fn addresses(len: u64) -> u64 {
    NEXT.fetch_add(len.next_multiple_of(2 << 20) + (2 << 20), Ordering::Relaxed)
}

/// Memory under an address; freed when dropped.
#[derive(Debug)]
struct Memory {
    va: u64,
    len: u64,
    object: Object,
}

impl Memory {
    fn new(len: u64) -> Self {
        Self::on(Backing::Ram, len).expect("memory")
    }

    fn on(backing: Backing, len: u64) -> io::Result<Self> {
        let object = Object::new(len, backing)?;
        let va = addresses(len);
        object.show(va, 0, len)?;
        Ok(Self { va, len, object })
    }

    /// As by the GPU.
    fn write(&self, offset: u64, bytes: &[u8]) {
        self.object.file().write_all_at(bytes, offset).expect("memory of the GPU");
    }

    fn read(&self, offset: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.object.file().read_exact_at(&mut bytes, offset).expect("memory of the GPU");
        bytes
    }

    fn free(&self) {
        self.object.hide(self.va).expect("shown");
    }
}

/// Memory that is pinned and mapped.
#[derive(Debug)]
struct Mapped {
    map: Map,
    handle: u64,
    memory: Memory,
    raw: Raw,
}

impl Mapped {
    /// None where a step fails: a forked child must not panic.
    fn new(backing: Backing, len: u64) -> Option<Self> {
        let (raw, memory) = (Raw::open(), Memory::on(backing, len).ok()?);
        let handle = raw.pin(memory.va, len).ok()?;
        let map = raw.map(handle, len).ok()?;
        Some(Self { map, handle, memory, raw })
    }
}

/// Whether the machine has a BAR to put memory into.
fn backings() -> Vec<Backing> {
    [Backing::Ram, Backing::Bar]
        .into_iter()
        .filter(|backing| match Object::new(CHUNK, *backing) {
            Ok(_) => true,
            Err(error) => {
                assert_eq!(errno(&error), libc::ENODEV, "{backing:?}");
                println!("skipped: no memory of kind {backing:?}");
                false
            }
        })
        .collect()
}

/// A fault, for as long as this lives.
#[derive(Debug)]
struct Failing(Fault);

impl Failing {
    fn new(fault: Fault, value: i32) -> Self {
        kmod::set_fault(fault, value).expect("the driver's device");
        Self(fault)
    }
}

impl Drop for Failing {
    fn drop(&mut self) {
        kmod::set_fault(self.0, 0).expect("the driver's device");
    }
}

/// Whether pins survive a free here.
fn is_persistent() -> bool {
    Raw::open().attribute(1) == Ok(1)
}

/// Makes sure that a test leaves nothing behind, be it in the module or in the driver under it.
#[derive(Debug)]
struct Machine(State);

impl Machine {
    /// None, with the reason printed, where the module is not ours or not there. `GDRCOPY_TEST_KMOD` says that it must be.
    fn new() -> Option<Self> {
        let stats = fs::read_to_string("/proc/driver/gdrdrv/stats");
        if kmod::is_there() && stats.is_ok() {
            let state = kmod::state().expect("the driver's state");
            return Some(Self(state));
        }
        assert!(std::env::var_os("GDRCOPY_TEST_KMOD").is_none(), "the modules are not loaded");
        println!("skipped: our gdrdrv and gdr_provider are not loaded (tests/vm/run kmod)");
        None
    }

    /// The same, with an open device and memory.
    fn with_memory(len: u64) -> Option<(Self, Raw, Memory)> {
        Self::new().map(|machine| (machine, Raw::open(), Memory::new(len)))
    }

    /// A machine on which pins survive a free, or do not.
    fn with_persistence(persistent: bool) -> Option<Self> {
        let machine = Self::new()?;
        if is_persistent() == persistent {
            return Some(machine);
        }
        println!("skipped: use_persistent_mapping is {}", u32::from(!persistent));
        None
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        if std::thread::panicking() {
            return;
        }
        let (before, after) = (self.0, kmod::state().expect("the driver's state"));
        assert_eq!(after, State { callbacks: after.callbacks, ..before }, "left behind");
        assert_eq!(after.misuse, 0);
        for name in
            ["open_files", "pins", "pinned_bytes", "driver_page_tables", "dmabuf_attachments", "mappings"]
        {
            assert_eq!(counter(name), 0, "{name}");
        }
    }
}
