//! The `ioctl` interface of `/dev/gdrdrv`: `src/gdrdrv/gdrdrv.h` of NVIDIA/gdrcopy 2.6 (MIT licence).

use std::ffi::CStr;

use rustix::ioctl::{Direction, opcode};

pub(crate) const PATH: &CStr = c"/dev/gdrdrv";

/// Unit in which the driver pins, bytes (`GPU_PAGE_SIZE`).
pub(crate) const GPU_PAGE: u64 = 64 << 10;

/// The oldest driver with this interface: 1.x had 32-bit handles under the same numbers.
pub(crate) const MINIMUM_DRIVER: u32 = version(2, 0);
/// The library version that this crate speaks for.
pub(crate) const LIBRARY: u32 = version(2, 6);

/// `GDRDRV_ATTR_USE_PERSISTENT_MAPPING`.
pub(crate) const ATTR_PERSISTENT: u32 = 1;
/// `GDRDRV_ATTR_SUPPORT_PIN_FLAG_FORCE_PCIE`.
pub(crate) const ATTR_FORCE_PCIE: u32 = 2;
/// Bits of what our module can do beyond NVIDIA's, which knows no such attribute.
pub(crate) const ATTR_EXTENSIONS: u32 = 0x1000;
/// [`PinDmaBuf`] works on this machine.
pub(crate) const EXTENSION_DMABUF: u32 = 1;
/// `GDR_MR_NONE`: not mapped, or no type asked for.
pub(crate) const TYPE_NONE: u32 = 0;

/// A version as it is sent.
pub(crate) const fn version(major: u16, minor: u16) -> u32 {
    (major as u32) << 16 | minor as u32
}

/// `_IOWR(0xDA, nr, size)`; the same value on x86-64, arm64 and ppc64le.
const fn code(nr: u8, size: usize) -> u32 {
    opcode::from_components(Direction::ReadWrite, 0xDA, nr, size) as u32
}

/// Most numbers carry the size of a pointer instead of that of the structure.
const POINTER: usize = size_of::<*const u8>();

/// A structure that the driver reads and writes.
///
/// # Safety
/// `CODE` must be the request of exactly this structure, which must be plain integers without padding.
pub(crate) unsafe trait Request: Copy {
    /// The `ioctl` number.
    const CODE: u32;
    /// For messages.
    const NAME: &'static str;
}

macro_rules! requests {
    ($($(#[$meta:meta])* $name:ident, $text:literal, $code:expr, { $($field:ident: $type:ty),* $(,)? })*) => {$(
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, Default)]
        #[repr(C)]
        pub(crate) struct $name { $(pub(crate) $field: $type,)* }

        // SAFETY: number and fields as in gdrdrv.h; see the tests.
        unsafe impl Request for $name {
            const CODE: u32 = $code;
            const NAME: &'static str = $text;
        }
    )*};
}

requests! {
    /// Pins; `handle` is the answer. Tokens must be 0 in persistent mode.
    PinBuffer, "PIN_BUFFER", code(1, size_of::<PinBuffer>()),
    { addr: u64, size: u64, p2p_token: u64, va_space: u32, pad: u32, handle: u64 }

    /// Unpins, and tears down a mapping that is left.
    UnpinBuffer, "UNPIN_BUFFER", code(2, POINTER), { handle: u64 }

    /// Whether the memory was freed under the pin; never in persistent mode.
    GetCallbackFlag, "GET_CB_FLAG", code(3, POINTER), { handle: u64, flag: u32, pad: u32 }

    /// What is pinned and how it is mapped.
    GetInfo, "GET_INFO", code(4, POINTER), {
        handle: u64, va: u64, mapped_size: u64, page_size: u32, tsc_khz: u32, tm_cycles: u64,
        mapped: u32, wc_mapping: u32,
    }

    /// The same with the mapping type. Driver 2.4.
    GetInfoV2, "GET_INFO_V2", code(5, POINTER), {
        handle: u64, va: u64, mapped_size: u64, page_size: u32, tsc_khz: u32, tm_cycles: u64,
        mapping_type: u32, pad: u32,
    }

    /// A property of the module. Driver 2.5.
    GetAttr, "GET_ATTR", code(6, POINTER), { attr: u32, val: u32 }

    /// Pins, with the flags of `gdr_pin_buffer_v2`. Driver 2.5.
    PinBufferV2, "PIN_BUFFER_V2", code(7, size_of::<PinBufferV2>()),
    { addr: u64, size: u64, flags: u32, pad: u32, handle: u64 }

    /// Chooses the type of the next mapping. Driver 2.5.
    ReqMappingType, "REQ_MAPPING_TYPE", code(8, POINTER), { handle: u64, mapping_type: u32, pad: u32 }

    /// Pins whole host pages of a dma-buf: our module alone, `kmod/src/gdrdrv_abi.h`.
    PinDmaBuf, "PIN_DMABUF", code(0xC0, size_of::<PinDmaBuf>()),
    { fd: i32, flags: u32, offset: u64, size: u64, handle: u64 }

    /// Version of the driver and of the oldest library that it accepts.
    GetVersion, "GET_VERSION", code(255, POINTER), { driver: u32, minimum_library: u32 }
}
