//! The copies: no lock, no system call, and no message unless the copy is refused.

use std::ffi::{c_int, c_void};

use gdrcopy::MappingType;
use gdrcopy::copy::{self, Copier};

use crate::abi::gdr_mh_t;
use crate::guard::{self, Error, Result, invalid};
use crate::slot::{Handle, not_mapped};
use crate::table::{Table, no_pin};

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
    copy("gdr_copy_to_mapping", handle, device, host, size, |kind| {
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
    copy("gdr_copy_from_mapping", handle, device, host, size, |kind| {
        // SAFETY: inside the mapping; the caller guarantees the rest.
        unsafe { Copier::best().from_device(kind, h_ptr.cast(), map_d_ptr.cast(), size) };
        copy::load_fence
    })
}

/// Copies by `act`, which says which fence must follow.
#[inline]
fn copy(
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
