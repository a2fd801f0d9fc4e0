//! The functions of GDRCopy's `gdrapi.h`, and additions in `gdrx_`. The copies take no lock, make no system call, and print no message unless
//! they are refused.

use std::ffi::{c_char, c_int, c_uint, c_ulong, c_void};
use std::ptr::{self, NonNull};

use gdrcopy::copy::{self, Copier};
use gdrcopy::{Attribute, Gdr, GdrBuilder, MappingType, PinFlags};

use crate::abi::{GDR_MAPPING_TYPE_NONE, VERSION, gdr_info_v1_t, gdr_info_v2_t, gdr_mh_t, gdr_t};
use crate::guard::{self, Error, Result, invalid, non_null};
use crate::slot::{Handle, not_mapped};
use crate::table::{Table, no_pin};

/// A number as `gdr_t`.
fn to_gdr(id: u64) -> gdr_t {
    // 64-bit platforms only, see `abi`.
    #[expect(clippy::cast_possible_truncation)]
    ptr::without_provenance_mut(id as usize)
}

/// The number in a `gdr_t`, which is never followed.
fn id(g: gdr_t) -> u64 {
    g.addr() as u64
}

/// Opens the library: on `gdrdrv`, on a dma-buf, or on the driver's resource manager, whichever works first, or on
/// the one that `GDRCOPY_BACKEND` names. Only by that name on plain host memory.
///
/// Initialises no CUDA and makes no context on a GPU. The first call that pins or allocates does that and proves that
/// mapping works, where there is no `gdrdrv`. If it fails, that call tells why, and the next one tries again.
///
/// Returns `NULL` if none can serve, with the reasons in the log and `errno` set.
#[unsafe(no_mangle)]
pub extern "C" fn gdr_open() -> gdr_t {
    open_with(Gdr::builder().allow_volatile().require_gpu())
}

/// Opens the library as [`gdr_open`] does, with the caller's choices: for Rust programs that link this crate. Not a symbol of
/// the shared library.
///
/// Returns `NULL` where `gdr_open` would.
pub fn open_with(builder: GdrBuilder) -> gdr_t {
    let opened = guard::run("gdr_open", || Table::or_new()?.add_library(builder.survey()?));
    opened.map(to_gdr).unwrap_or_else(|errno| {
        // SAFETY: no arguments; the result is this thread's own word.
        let place = unsafe { libc::__errno_location() };
        // SAFETY: the word of this thread, valid until it ends.
        unsafe { *place = errno };
        ptr::null_mut()
    })
}

/// Closes the library: unpins and frees all that is left, even if a part of it fails. A mapping that is left raises
/// `SIGBUS` from then on; its addresses stay taken.
///
/// Returns 0 or the first error: `EINVAL` if `g` is not open, `EACCES` if it is the parent process's.
#[unsafe(no_mangle)]
pub extern "C" fn gdr_close(g: gdr_t) -> c_int {
    guard::status("gdr_close", || Table::remove_library(id(g))?.close())
}

/// Pins with default flags. The tokens are ignored.
///
/// # Safety
/// `handle` must be null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gdr_pin_buffer(
    g: gdr_t,
    addr: c_ulong,
    size: usize,
    p2p_token: u64,
    va_space: u32,
    handle: *mut gdr_mh_t,
) -> c_int {
    let pinned = || {
        if p2p_token != 0 || va_space != 0 {
            tracing::info!("gdr_pin_buffer: P2P tokens {p2p_token:#x} and {va_space:#x} are not needed");
        }
        pin(g, addr, size, 0)
    };
    // SAFETY: the caller guarantees `handle`.
    unsafe { guard::answer("gdr_pin_buffer", "handle", handle, pinned) }
}

/// Pins with flags.
///
/// # Safety
/// As [`gdr_pin_buffer`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gdr_pin_buffer_v2(
    g: gdr_t,
    addr: c_ulong,
    size: usize,
    flags: u32,
    handle: *mut gdr_mh_t,
) -> c_int {
    // SAFETY: the caller guarantees `handle`.
    unsafe { guard::answer("gdr_pin_buffer_v2", "handle", handle, || pin(g, addr, size, flags)) }
}

fn pin(g: gdr_t, addr: c_ulong, size: usize, flags: u32) -> Result<gdr_mh_t> {
    let asked = PinFlags::from_bits_retain(flags);
    if !PinFlags::FORCE_PCIE.contains(asked) {
        return Err(invalid("pin flags", flags, "a combination of gdr_pin_flags_t"));
    }
    // Communication libraries round to GPU pages themselves, which may go beyond what CUDA allocated.
    let flags = asked | PinFlags::WHOLE_PAGES;
    let pinned = Table::library(id(g))?.pin(addr, size, flags).map_err(|error| match error {
        // The one error number that GDRCopy documents for it.
        Error::Unsupported { .. } if asked == PinFlags::FORCE_PCIE => {
            invalid("pin flag", format_args!("FORCE_PCIE ({error})"), "none here")
        }
        error => error,
    })?;
    Ok(gdr_mh_t { h: pinned.number() })
}

fn handle_of(handle: gdr_mh_t) -> Handle {
    Handle::from_number(handle.h)
}

/// Unpins. A mapping that is left raises `SIGBUS` from then on; its addresses stay taken. The handle is gone also if
/// that fails.
#[unsafe(no_mangle)]
pub extern "C" fn gdr_unpin_buffer(g: gdr_t, handle: gdr_mh_t) -> c_int {
    guard::status("gdr_unpin_buffer", || Table::library(id(g))?.unpin(handle_of(handle)))
}

/// Whether the driver took the memory away because it was freed: never on backends that hold it.
///
/// # Safety
/// `flag` must be null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gdr_get_callback_flag(g: gdr_t, handle: gdr_mh_t, flag: *mut c_int) -> c_int {
    let invalidated = || Ok(Table::library(id(g))?.held(handle_of(handle))?.pin.invalidated()?.into());
    // SAFETY: the caller guarantees `flag`.
    unsafe { guard::answer("gdr_get_callback_flag", "flag", flag, invalidated) }
}

fn info(g: gdr_t, handle: gdr_mh_t) -> Result<gdr_info_v2_t> {
    Ok(Table::library(id(g))?.held(handle_of(handle))?.info())
}

/// What is pinned, in the struct of GDRCopy before 2.4. The header calls [`gdr_get_info_v2`] by this name.
///
/// # Safety
/// `info` must be null or valid for a write of 40 bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gdr_get_info(g: gdr_t, handle: gdr_mh_t, info: *mut gdr_info_v1_t) -> c_int {
    // SAFETY: the caller guarantees `info`.
    unsafe { guard::answer("gdr_get_info", "info", info, || Ok(self::info(g, handle)?.v1)) }
}

/// What is pinned, and how it is mapped.
///
/// # Safety
/// `info` must be null or valid for a write of 48 bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gdr_get_info_v2(g: gdr_t, handle: gdr_mh_t, info: *mut gdr_info_v2_t) -> c_int {
    // SAFETY: the caller guarantees `info`.
    unsafe { guard::answer("gdr_get_info_v2", "info", info, || self::info(g, handle)) }
}

/// Maps with the platform's type.
///
/// # Safety
/// As [`gdr_map_v2`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gdr_map(g: gdr_t, handle: gdr_mh_t, va: *mut *mut c_void, size: usize) -> c_int {
    // SAFETY: the caller guarantees `va`.
    unsafe { guard::answer("gdr_map", "address of the mapping", va, || map(g, handle, size, 0)) }
}

/// Maps. `*va` becomes the address of `gdr_info_t::va`; `size` counts from the address that was pinned.
///
/// # Safety
/// `va` must be null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gdr_map_v2(
    g: gdr_t,
    handle: gdr_mh_t,
    va: *mut *mut c_void,
    size: usize,
    flags: c_int,
) -> c_int {
    // SAFETY: the caller guarantees `va`.
    unsafe { guard::answer("gdr_map_v2", "address of the mapping", va, || map(g, handle, size, flags)) }
}

fn map(g: gdr_t, handle: gdr_mh_t, size: usize, flags: c_int) -> Result<*mut c_void> {
    let request = || match flags {
        0 => Ok(None),
        1 => Ok(Some(MappingType::WriteCombining)),
        2 => Ok(Some(MappingType::Cached)),
        3 => Ok(Some(MappingType::Device)),
        _ => Err(invalid("map flag", flags, "one of gdr_map_flags_t")),
    };
    Table::library(id(g))?.map(handle_of(handle), size, request).map(|mapped| mapped.cast())
}

/// Unmaps. `va` and `size` must be those of [`gdr_map`], the size up to rounding to GPU pages.
#[unsafe(no_mangle)]
pub extern "C" fn gdr_unmap(g: gdr_t, handle: gdr_mh_t, va: *mut c_void, size: usize) -> c_int {
    guard::status("gdr_unmap", || Table::library(id(g))?.unmap(handle_of(handle), va.addr(), size))
}

/// Version of this library's interface.
///
/// # Safety
/// Both must be null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gdr_runtime_get_version(major: *mut c_int, minor: *mut c_int) {
    guard::status("gdr_runtime_get_version", || {
        // SAFETY: the caller guarantees it.
        unsafe { write_version(major, minor, VERSION) }
    });
}

/// Version of the kernel module; on backends without one, that of the interface this library stands for.
///
/// # Safety
/// As [`gdr_runtime_get_version`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gdr_driver_get_version(g: gdr_t, major: *mut c_int, minor: *mut c_int) -> c_int {
    guard::status("gdr_driver_get_version", || {
        let version = Table::library(id(g))?.survey.driver_version().unwrap_or(VERSION);
        // SAFETY: the caller guarantees it.
        unsafe { write_version(major, minor, version) }
    })
}

/// # Safety
/// As [`gdr_runtime_get_version`].
unsafe fn write_version(major: *mut c_int, minor: *mut c_int, version: (u16, u16)) -> Result<()> {
    let (major, minor) = (non_null("major", major)?, non_null("minor", minor)?);
    // SAFETY: not null, so writable.
    unsafe { major.write(version.0.into()) };
    // SAFETY: not null, so writable.
    unsafe { minor.write(version.1.into()) };
    Ok(())
}

/// A property of the backend, or before the first use, of the one that will most probably serve.
///
/// # Safety
/// `v` must be null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gdr_get_attribute(g: gdr_t, attr: c_uint, v: *mut c_int) -> c_int {
    let value = || {
        let library = Table::library(id(g))?;
        let attribute = match attr {
            1 => Attribute::UsePersistentMapping,
            2 => Attribute::SupportPinFlagForcePcie,
            3 => Attribute::UsingDmaBufMmap,
            _ => return Err(invalid("attribute", attr, "one of gdr_attr_t")),
        };
        Ok(library.survey.attribute(attribute)?.try_into().unwrap_or(c_int::MAX))
    };
    // SAFETY: the caller guarantees `v`.
    unsafe { guard::answer("gdr_get_attribute", "value", v, value) }
}

/// The name of a mapping type, for people.
///
/// # Safety
/// `pstr` must be null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gdr_get_mapping_type_string(
    mapping_type: c_uint,
    pstr: *mut *const c_char,
) -> c_int {
    let name = || match mapping_type {
        GDR_MAPPING_TYPE_NONE => Ok(c"None".as_ptr()),
        1 => Ok(c"Write Combining".as_ptr()),
        2 => Ok(c"Caching".as_ptr()),
        3 => Ok(c"Device".as_ptr()),
        _ => Err(invalid("mapping type", mapping_type, "one of gdr_mapping_type_t")),
    };
    // SAFETY: the caller guarantees `pstr`.
    unsafe { guard::answer("gdr_get_mapping_type_string", "string", pstr, name) }
}

/// How a copy is to be done.
struct Plan {
    kind: MappingType,
    /// Mappings of several types live in this process.
    mixed: bool,
}

/// Looks the mapping up; `None` if the copy must be refused, see [`reason`].
#[inline]
fn plan(handle: Handle, device: usize, host: usize, size: usize) -> Option<Plan> {
    let table = Table::current()?;
    let view = table.slot(handle.index())?.window.view(handle.number())?;
    let kind = match view.kind {
        1 => MappingType::WriteCombining,
        2 => MappingType::Cached,
        _ => MappingType::Device,
    };
    let fits = size == 0 || (view.holds(device, size) && host != 0);
    fits.then(|| Plan { kind, mixed: table.kinds.are_mixed() })
}

/// Copies host memory to the mapping; `size` 0 does nothing.
///
/// A store fence follows, so later stores of this thread stay behind; a full one while mappings of several types
/// live. Returns `EINVAL` if the handle is not mapped, the range leaves the mapping or `h_ptr` is null, `EACCES`
/// with the parent process's handle.
///
/// # Safety
/// `h_ptr` must be readable for `size` bytes. The mapping must not be unmapped meanwhile, nor `map_d_ptr` and `h_ptr`
/// overlap.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gdr_copy_to_mapping(
    handle: gdr_mh_t,
    map_d_ptr: *mut c_void,
    h_ptr: *const c_void,
    size: usize,
) -> c_int {
    let (device, host) = (map_d_ptr.addr(), h_ptr.addr());
    copy_by("gdr_copy_to_mapping", handle, device, host, size, |kind| {
        // SAFETY: inside the mapping; the caller guarantees the rest.
        unsafe { Copier::best().to_device(kind, map_d_ptr.cast(), h_ptr.cast(), size) };
        copy::store_fence
    })
}

/// Copies the mapping to host memory; `size` 0 does nothing.
///
/// A load fence follows; a full one while mappings of several types live. Errors as of [`gdr_copy_to_mapping`].
///
/// # Safety
/// `h_ptr` must be writable for `size` bytes. The mapping must not be unmapped meanwhile, nor `map_d_ptr` and `h_ptr`
/// overlap.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gdr_copy_from_mapping(
    handle: gdr_mh_t,
    h_ptr: *mut c_void,
    map_d_ptr: *const c_void,
    size: usize,
) -> c_int {
    let (device, host) = (map_d_ptr.addr(), h_ptr.addr());
    copy_by("gdr_copy_from_mapping", handle, device, host, size, |kind| {
        // SAFETY: inside the mapping; the caller guarantees the rest.
        unsafe { Copier::best().from_device(kind, h_ptr.cast(), map_d_ptr.cast(), size) };
        copy::load_fence
    })
}

/// Copies by `act`, which says which fence must follow.
#[inline]
fn copy_by(
    name: &'static str,
    handle: gdr_mh_t,
    device: usize,
    host: usize,
    size: usize,
    act: impl FnOnce(MappingType) -> fn(MappingType),
) -> c_int {
    let handle = Handle::from_number(handle.h);
    let done = guard::no_panic(|| {
        let Plan { kind, mixed } = plan(handle, device, host, size)?;
        if size != 0 {
            let fence = act(kind);
            if mixed { copy::full_fence() } else { fence(kind) }
        }
        Some(())
    });
    match done {
        Ok(Some(())) => 0,
        Ok(None) => refuse(name, handle, device, host, size),
        Err(()) => libc::EIO,
    }
}

/// Logs why a copy was not done.
#[cold]
fn refuse(name: &'static str, handle: Handle, device: usize, host: usize, size: usize) -> c_int {
    guard::status(name, || Err(reason(handle, device, host, size)?))
}

/// Why; `Err` if the handle itself is wrong.
fn reason(handle: Handle, device: usize, host: usize, size: usize) -> Result<Error> {
    let slot = Table::current().and_then(|table| table.slot(handle.index())).ok_or_else(|| no_pin(handle))?;
    if !slot.has(handle) {
        return Err(no_pin(handle));
    }
    let Some(view) = slot.window.view(handle.number()) else { return Ok(not_mapped()) };
    if host == 0 && size != 0 {
        return Ok(invalid("host address", "NULL", "a pointer"));
    }
    if device < view.base {
        let expected = "an address inside the mapping of this handle";
        return Ok(invalid("address", format_args!("{device:#x}"), expected));
    }
    Ok(Error::OutOfBounds { offset: device - view.base, len: size, size: view.len })
}

// Additions of this library: functions in `gdrx_`. A C program that uses them needs no CUDA headers.

/// Allocates GPU memory on a CUDA device (or plain memory on the host backend) that can be pinned and mapped. Freed by [`gdrx_free`] or [`gdr_close`](gdr_close).
///
/// # Safety
/// `d_addr` must be null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gdrx_alloc(g: gdr_t, device: c_int, size: usize, d_addr: *mut c_ulong) -> c_int {
    let allocate = || Table::library(id(g))?.allocate(device, size);
    // SAFETY: the caller guarantees `d_addr`.
    unsafe { guard::answer("gdrx_alloc", "address", d_addr, allocate) }
}

/// Frees memory of [`gdrx_alloc`]. Pins and mappings of it stay and show the old bytes.
#[unsafe(no_mangle)]
pub extern "C" fn gdrx_free(g: gdr_t, d_addr: c_ulong) -> c_int {
    guard::status("gdrx_free", || Table::library(id(g))?.free(d_addr))
}

/// Writes into memory of [`gdrx_alloc`] by CUDA's copy engine, not through a mapping, and returns when the bytes are in place.
///
/// # Safety
/// `src` must be null or readable for `size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gdrx_copy_in(g: gdr_t, d_addr: c_ulong, src: *const c_void, size: usize) -> c_int {
    guard::status("gdrx_copy_in", || {
        let src = non_null("source", src.cast_mut())?.cast::<u8>();
        let (buffer, offset) = Table::library(id(g))?.buffer(d_addr)?;
        check_bounds(size, buffer.len(), offset)?;
        // SAFETY: readable, as the caller promised, and less than the size of an allocation.
        let bytes = unsafe { NonNull::slice_from_raw_parts(src, size).as_ref() };
        buffer.copy_in(offset, bytes)
    })
}

/// Reads memory of [`gdrx_alloc`] by CUDA's copy engine.
///
/// # Safety
/// `dst` must be null or writable for `size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gdrx_copy_out(g: gdr_t, dst: *mut c_void, d_addr: c_ulong, size: usize) -> c_int {
    guard::status("gdrx_copy_out", || {
        let dst = non_null("destination", dst)?.cast::<u8>();
        let (buffer, offset) = Table::library(id(g))?.buffer(d_addr)?;
        check_bounds(size, buffer.len(), offset)?;
        // SAFETY: memory that is writable may be set to zeros.
        unsafe { dst.write_bytes(0, size) };
        // SAFETY: writable, as the caller promised, initialised, and less than the size of an allocation.
        let bytes = unsafe { NonNull::slice_from_raw_parts(dst, size).as_mut() };
        buffer.copy_out(offset, bytes)
    })
}

/// Refuses what leaves the buffer, before a slice is made of it.
fn check_bounds(len: usize, size: usize, offset: usize) -> Result<()> {
    if len <= size - offset { Ok(()) } else { Err(Error::OutOfBounds { offset, len, size }) }
}

/// The backend's name: "gdrdrv", "dmabuf", "rm" or "host"; a string that lives for ever, `NULL` if `g` is not open.
/// Before the first use it is that of the one that will most probably serve.
#[unsafe(no_mangle)]
pub extern "C" fn gdrx_backend(g: gdr_t) -> *const c_char {
    guard::run("gdrx_backend", || {
        Ok(match Table::library(id(g))?.survey.backend() {
            gdrcopy::BackendKind::Gdrdrv => c"gdrdrv",
            gdrcopy::BackendKind::DmaBuf => c"dmabuf",
            gdrcopy::BackendKind::Rm => c"rm",
            gdrcopy::BackendKind::Host => c"host",
            _ => c"unknown",
        })
    })
    .map_or(std::ptr::null(), std::ffi::CStr::as_ptr)
}

/// Writes one line: the backend, whether it is in use yet, and why the ones before it are not. Returns `ERANGE` if it was cut to fit.
///
/// # Safety
/// `buf` must be null or writable for `len` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gdrx_describe(g: gdr_t, buf: *mut c_char, len: usize) -> c_int {
    let cut = guard::run("gdrx_describe", || {
        let out = non_null("buffer", buf)?.cast::<u8>();
        if len == 0 {
            return Ok(true);
        }
        let line = Table::library(id(g))?.survey.to_string().replace('\n', " ");
        let kept = line.floor_char_boundary(len - 1);
        // SAFETY: `kept` is less than `len`, and the line is not the caller's.
        unsafe { out.copy_from_nonoverlapping(NonNull::from(line.as_bytes()).cast(), kept) };
        // SAFETY: `kept` is less than `len`.
        let end = unsafe { out.add(kept) };
        // SAFETY: `end` is inside the buffer: `kept` is less than `len`.
        unsafe { end.write(0) };
        Ok(kept < line.len())
    });
    match cut {
        Ok(false) => 0,
        Ok(true) => libc::ERANGE,
        Err(errno) => errno,
    }
}
