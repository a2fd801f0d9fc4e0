//! Requests that are no requests, and arguments that are no memory.

use std::ptr;

use super::rig::{Machine, Memory, Raw};
use crate::gdrdrv_abi::{
    self as abi, GetAttr, GetCallbackFlag, GetInfo, GetInfoV2, GetVersion, PinBuffer, PinBufferV2, PinDmaBuf,
    ReqMappingType, Request, UnpinBuffer,
};

const REQUESTS: [u32; 10] = [
    PinBuffer::CODE,
    UnpinBuffer::CODE,
    GetCallbackFlag::CODE,
    GetInfo::CODE,
    GetInfoV2::CODE,
    GetAttr::CODE,
    PinBufferV2::CODE,
    ReqMappingType::CODE,
    PinDmaBuf::CODE,
    GetVersion::CODE,
];

#[test]
fn version_and_attributes_are_those_of_gdrcopy_2_6() {
    let Some(_machine) = Machine::new() else { return };
    let raw = Raw::open();
    let mut version = GetVersion::default();
    raw.call(&mut version).unwrap();
    assert_eq!((version.driver, version.minimum_library), (0x0002_0006, 0x0002_0000));
    for attribute in [abi::ATTR_PERSISTENT, abi::ATTR_FORCE_PCIE] {
        assert!(raw.attribute(attribute).unwrap() <= 1);
    }
    for unknown in [0, 3, 4, 0xfff, u32::MAX] {
        assert_eq!(raw.attribute(unknown), Err(libc::EINVAL), "{unknown}");
    }
    assert!(raw.attribute(abi::ATTR_EXTENSIONS).unwrap() <= 1);
}

#[test]
fn what_old_scripts_look_for_is_there() {
    let Some(_machine) = Machine::new() else { return };
    let devices = std::fs::read_to_string("/proc/devices").unwrap();
    assert!(devices.lines().any(|line| line.trim().ends_with(" gdrdrv")), "{devices}");
    let params = std::fs::read_to_string("/proc/driver/gdrdrv/params").unwrap();
    for line in ["Version: 2.6", "Use persistent mapping: ", "dbg_enabled: 0", "info_enabled: 0"] {
        assert!(params.lines().any(|found| found.starts_with(line)), "{line}: {params}");
    }
    assert_eq!(std::fs::read_to_string("/proc/driver/gdrdrv/nv_get_pages_refcount").unwrap(), "0\n");
}

#[test]
fn unknown_numbers_are_enotty_and_other_types_einval() {
    let Some(_machine) = Machine::new() else { return };
    let raw = Raw::open();
    let mut room = [0_u64; 64];
    for (magic, expected) in
        [(0xDA, libc::ENOTTY), (0xD9, libc::EINVAL), (0xDB, libc::EINVAL), (0x47, libc::EINVAL)]
    {
        for nr in 0..=0xff {
            for high in [0xC008_0000, 0, 0xC001_0000, 0x8028_0000, 0xFFFF_0000_u32] {
                let code = high | magic << 8 | nr;
                if !REQUESTS.contains(&code) {
                    assert_eq!(raw.ioctl(code, room.as_mut_ptr().cast()), Err(expected), "{code:#x}");
                }
            }
        }
    }
}

#[test]
fn addresses_that_are_no_memory_are_efault() {
    let Some(_machine) = Machine::new() else { return };
    let raw = Raw::open();
    for code in REQUESTS {
        for bad in [
            ptr::null_mut(),
            ptr::without_provenance_mut(0xFFFF_8000_0000_0000),
            ptr::without_provenance_mut(8),
        ] {
            assert_eq!(raw.ioctl(code, bad), Err(libc::EFAULT), "{code:#x}");
        }
    }
}

/// A page that can be read only, with a request in it.
fn read_only<R: Request>(request: R) -> *mut R {
    let len = 4096;
    let (prot, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    // SAFETY: a new mapping; it stays until the process ends.
    let page = unsafe { libc::mmap(ptr::null_mut(), len, prot, flags, -1, 0) };
    assert_ne!(page, libc::MAP_FAILED);
    // SAFETY: room for it, aligned.
    unsafe { page.cast::<R>().write(request) };
    // SAFETY: this test's own page.
    assert_eq!(unsafe { libc::mprotect(page, len, libc::PROT_READ) }, 0);
    page.cast()
}

#[test]
fn an_answer_that_cannot_be_delivered_undoes_the_pin() {
    let Some(_machine) = Machine::new() else { return };
    let raw = Raw::open();
    let memory = Memory::new(1 << 20);
    let (addr, size) = (memory.va, memory.len);
    let old = read_only(PinBuffer { addr, size, ..Default::default() });
    assert_eq!(raw.ioctl(PinBuffer::CODE, old.cast()), Err(libc::EFAULT));
    let new = read_only(PinBufferV2 { addr, size, ..Default::default() });
    assert_eq!(raw.ioctl(PinBufferV2::CODE, new.cast()), Err(libc::EFAULT));
    assert_eq!(super::rig::counter("pins"), 0);
    // What needs no answer works from there.
    let handle = raw.pin(addr, size).unwrap();
    raw.ioctl(UnpinBuffer::CODE, read_only(UnpinBuffer { handle }).cast()).unwrap();
}
