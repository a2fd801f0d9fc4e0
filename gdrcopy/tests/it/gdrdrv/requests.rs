//! The rules of the module's interface, which the simulated module keeps as the real one does, and its layouts.

use std::io;
use std::mem::offset_of;
use std::os::fd::{AsFd, OwnedFd};
use std::ptr::NonNull;

use gdrcopy::cuda::MemoryKind;
use gdrcopy::host_page;
use gdsync_testkit::Module;

use crate::gdrdrv_abi::{self as abi, *};
use crate::rig::{End, Rig, in_child};

/// The interface without the backend.
struct Raw {
    rig: Rig,
    fd: OwnedFd,
    addr: u64,
}

impl Raw {
    fn new(module: Module) -> Self {
        let rig = Rig::new(module);
        let fd = rig.system.kernel().open(abi::PATH).unwrap();
        let addr = rig.machine.memory.lock().alloc(0, 4 << 20, MemoryKind::Malloc).unwrap();
        Self { rig, fd, addr }
    }

    fn call<R: Request>(&self, request: R) -> Result<R, i32> {
        self.send(R::CODE, request)
    }

    fn send<R: Request>(&self, code: u32, mut request: R) -> Result<R, i32> {
        let arg = (&raw mut request).cast();
        // SAFETY: the structure of the code, or a code that no driver knows.
        let result = unsafe { self.rig.system.kernel().ioctl(self.fd.as_fd(), code, arg) };
        result.map(|()| request).map_err(errno)
    }

    fn pin(&self, offset: u64, size: u64) -> Result<u64, i32> {
        let addr = self.addr + offset;
        self.call(PinBufferV2 { addr, size, ..Default::default() }).map(|answer| answer.handle)
    }

    fn map(&self, offset: u64, len: usize) -> Result<NonNull<u8>, i32> {
        // SAFETY: no address is given.
        unsafe { self.rig.system.kernel().mmap(self.fd.as_fd(), len, offset, None) }.map_err(errno)
    }

    fn mapping_type(&self, handle: u64) -> u32 {
        self.call(GetInfoV2 { handle, ..Default::default() }).unwrap().mapping_type
    }
}

fn errno(error: io::Error) -> i32 {
    error.raw_os_error().unwrap()
}

fn unmap(ptr: NonNull<u8>, len: usize) {
    // SAFETY: mapped by the test, used by nothing else.
    assert_eq!(unsafe { libc::munmap(ptr.as_ptr().cast(), len) }, 0);
}

fn offset(handle: u64) -> u64 {
    handle * host_page() as u64
}

#[test]
fn handles_count_pages_and_are_never_used_again() {
    let raw = Raw::new(Module::default());
    let pages = |len: u64| len / host_page() as u64;
    assert_eq!(raw.pin(0, 1), Ok(0));
    assert_eq!(raw.pin(0, 65_537), Ok(pages(65_536)));
    raw.call(UnpinBuffer { handle: 0 }).unwrap();
    assert_eq!(raw.pin(0, 1), Ok(pages(3 * 65_536)));
}

#[test]
fn what_the_driver_does_not_know() {
    let raw = Raw::new(Module::default());
    let any = GetVersion::default();
    assert_eq!(raw.send(GetVersion::CODE ^ 0x100, any).unwrap_err(), libc::EINVAL);
    assert_eq!(raw.send(GetVersion::CODE - 1, any).unwrap_err(), libc::ENOTTY);
    assert_eq!(raw.call(GetAttr { attr: 3, val: 0 }).unwrap_err(), libc::EINVAL);
    let old = Raw::new(Module { version: (2, 3), ..Module::default() });
    assert_eq!(old.call(GetInfoV2::default()).unwrap_err(), libc::ENOTTY);
    assert_eq!(old.call(GetAttr::default()).unwrap_err(), libc::ENOTTY);
    assert_eq!(old.call(PinBufferV2::default()).unwrap_err(), libc::ENOTTY);
    assert_eq!(old.call(ReqMappingType::default()).unwrap_err(), libc::ENOTTY);
    let newer = Raw::new(Module { version: (2, 4), ..Module::default() });
    assert_eq!(newer.call(GetInfoV2::default()).unwrap_err(), libc::EINVAL);
    assert_eq!(newer.call(PinBufferV2::default()).unwrap_err(), libc::ENOTTY);
}

#[test]
fn pins_that_are_refused() {
    let raw = Raw::new(Module::default());
    let addr = raw.addr;
    let v2 = |addr, size, flags| raw.call(PinBufferV2 { addr, size, flags, ..Default::default() }).err();
    assert_eq!(v2(addr, 64, 0), None);
    assert_eq!(v2(addr, 64, 2), Some(libc::EINVAL));
    assert_eq!(v2(0, 64, 0), Some(libc::EINVAL));
    assert_eq!(v2(addr, u64::MAX, 0), Some(libc::EINVAL));
    assert_eq!(v2(addr + (64 << 20), 64, 0), Some(libc::EINVAL));
    let v1 = |p2p_token, va_space| {
        raw.call(PinBuffer { addr, size: 64, p2p_token, va_space, ..Default::default() }).err()
    };
    assert_eq!(v1(0, 0), None);
    assert_eq!(v1(1, 0), Some(libc::EINVAL));
    assert_eq!(v1(0, 1), Some(libc::EINVAL));
}

#[test]
fn a_stale_handle_reaches_nothing() {
    let raw = Raw::new(Module::default());
    let (handle, _other) = (raw.pin(0, 64).unwrap(), raw.pin(0, 64).unwrap());
    raw.call(UnpinBuffer { handle }).unwrap();
    assert_eq!(raw.call(UnpinBuffer { handle }).unwrap_err(), libc::EINVAL);
    assert_eq!(raw.call(GetInfo { handle, ..Default::default() }).unwrap_err(), libc::EINVAL);
    assert_eq!(raw.call(GetCallbackFlag { handle, ..Default::default() }).unwrap_err(), libc::EINVAL);
    assert_eq!(raw.map(offset(handle), 4096).unwrap_err(), libc::EINVAL);
    assert_eq!(raw.rig.device.live_pins(), 1);
}

#[test]
fn mappings_that_are_refused() {
    let raw = Raw::new(Module::default());
    let handle = raw.pin(65_536, 100_000).unwrap();
    assert_eq!(raw.map(offset(handle) + offset(1), 4096).unwrap_err(), libc::EINVAL);
    assert_eq!(raw.map(offset(handle), (128 << 10) + host_page()).unwrap_err(), libc::EINVAL);
    let unaligned = raw.pin(512, 64).unwrap();
    assert_eq!(raw.map(offset(unaligned), 4096).unwrap_err(), libc::EINVAL);

    let range = raw.map(offset(handle), 128 << 10).unwrap();
    assert_eq!(raw.mapping_type(handle), 1);
    assert_eq!(raw.map(offset(handle), 4096).unwrap_err(), libc::EINVAL);
    let wish = |mapping_type| ReqMappingType { handle, mapping_type, pad: 0 };
    assert_eq!(raw.call(wish(1)).unwrap_err(), libc::EBUSY);
    assert_eq!(raw.call(wish(4)).unwrap_err(), libc::EINVAL);
    unmap(range, 128 << 10);
    assert_eq!(raw.mapping_type(handle), TYPE_NONE);
    raw.call(wish(1)).unwrap();
}

#[test]
fn unpinning_takes_the_pages_out_of_a_mapping() {
    let raw = Raw::new(Module::default());
    let end = in_child(|| {
        let raw = Raw::new(Module::default());
        let Ok(handle) = raw.pin(0, 4096) else { return false };
        let Ok(range) = raw.map(offset(handle), 4096) else { return false };
        // SAFETY: mapped.
        let before = unsafe { range.as_ptr().read_volatile() };
        if before != 0 || raw.call(UnpinBuffer { handle }).is_err() {
            return false;
        }
        // SAFETY: the address is reserved; that this ends the child is what the test expects.
        unsafe { range.as_ptr().read_volatile() == 0 }
    });
    assert_eq!(end, End::Killed(libc::SIGBUS));
    // After munmap there is nothing to take out, and nothing else is hit.
    let handle = raw.pin(0, 4096).unwrap();
    let range = raw.map(offset(handle), 4096).unwrap();
    unmap(range, 4096);
    raw.call(UnpinBuffer { handle }).unwrap();
}

#[test]
fn a_file_serves_the_process_that_opened_it() {
    let raw = Raw::new(Module::default());
    let handle = raw.pin(0, 4096).unwrap();
    let end = in_child(|| {
        raw.pin(0, 4096) == Err(libc::EACCES)
            && raw.call(UnpinBuffer { handle }).err() == Some(libc::EACCES)
            && raw.call(GetVersion::default()).err() == Some(libc::EACCES)
            && raw.map(offset(handle), 4096).err() == Some(libc::EACCES)
    });
    assert_eq!(end, End::Said(true));
    assert_eq!(raw.rig.device.live_pins(), 1);
}

#[test]
fn one_pin_covers_several_pieces_of_memory() {
    let raw = Raw::new(Module::default());
    // Adjacent by the way addresses are given out.
    let memory = || raw.rig.machine.memory.lock().alloc(0, 2 << 20, MemoryKind::Vmm).unwrap();
    let (first, second) = (memory(), memory());
    assert_eq!(second, first + (2 << 20));
    let size = 1 << 20;
    let handle = raw.pin(second - size / 2 - raw.addr, size).unwrap();
    let range = raw.map(offset(handle), 1 << 20).unwrap();
    {
        let memory = raw.rig.machine.memory.lock();
        memory.find(first).unwrap().object.write((2 << 20) - 1, &[1]).unwrap();
        memory.find(second).unwrap().object.write(0, &[2]).unwrap();
    }
    let at = |offset: usize| {
        // SAFETY: inside the mapping.
        let ptr = unsafe { range.as_ptr().add(offset) };
        // SAFETY: mapped until the end of the test.
        unsafe { ptr.read_volatile() }
    };
    assert_eq!((at((1 << 19) - 1), at(1 << 19)), (1, 2));
    unmap(range, 1 << 20);
}

/// Compiled from gdrdrv.h 2.6 with a C compiler on x86-64.
#[test]
fn numbers_and_sizes_are_those_of_the_header() {
    let requests = [
        (PinBuffer::CODE, size_of::<PinBuffer>(), 0xC028_DA01, 40),
        (UnpinBuffer::CODE, size_of::<UnpinBuffer>(), 0xC008_DA02, 8),
        (GetCallbackFlag::CODE, size_of::<GetCallbackFlag>(), 0xC008_DA03, 16),
        (GetInfo::CODE, size_of::<GetInfo>(), 0xC008_DA04, 48),
        (GetInfoV2::CODE, size_of::<GetInfoV2>(), 0xC008_DA05, 48),
        (GetAttr::CODE, size_of::<GetAttr>(), 0xC008_DA06, 8),
        (PinBufferV2::CODE, size_of::<PinBufferV2>(), 0xC020_DA07, 32),
        (ReqMappingType::CODE, size_of::<ReqMappingType>(), 0xC008_DA08, 16),
        (PinDmaBuf::CODE, size_of::<PinDmaBuf>(), 0xC020_DAC0, 32),
        (GetVersion::CODE, size_of::<GetVersion>(), 0xC008_DAFF, 8),
    ];
    for (code, size, header_code, header_size) in requests {
        assert_eq!((code, size), (header_code, header_size), "{header_code:#x}");
    }
}

#[test]
fn fields_lie_where_the_header_puts_them() {
    assert_eq!(offset_of!(PinBuffer, size), 8);
    assert_eq!(offset_of!(PinBuffer, p2p_token), 16);
    assert_eq!(offset_of!(PinBuffer, va_space), 24);
    assert_eq!(offset_of!(PinBuffer, handle), 32);
    assert_eq!(offset_of!(GetCallbackFlag, flag), 8);
    assert_eq!(offset_of!(GetInfo, va), 8);
    assert_eq!(offset_of!(GetInfo, mapped_size), 16);
    assert_eq!(offset_of!(GetInfo, page_size), 24);
    assert_eq!(offset_of!(GetInfo, tsc_khz), 28);
    assert_eq!(offset_of!(GetInfo, tm_cycles), 32);
    assert_eq!(offset_of!(GetInfo, mapped), 40);
    assert_eq!(offset_of!(GetInfo, wc_mapping), 44);
    assert_eq!(offset_of!(GetInfoV2, page_size), 24);
    assert_eq!(offset_of!(GetInfoV2, mapping_type), 40);
    assert_eq!(offset_of!(GetAttr, val), 4);
    assert_eq!(offset_of!(PinBufferV2, flags), 16);
    assert_eq!(offset_of!(PinBufferV2, handle), 24);
    assert_eq!(offset_of!(ReqMappingType, mapping_type), 8);
    assert_eq!(offset_of!(GetVersion, minimum_library), 4);
}
