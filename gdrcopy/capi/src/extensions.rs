//! Functions of our own: memory made for mapping, so that a C program can do without CUDA's headers, and what the
//! library runs on.

use std::ffi::{c_char, c_int, c_ulong, c_void};
use std::ptr::NonNull;

use crate::abi::gdr_t;
use crate::calls::id;
use crate::error::{Error, Result, non_null};
use crate::guard;
use crate::table::Table;

/// Allocates GPU memory on a CUDA device (or plain memory on the host backend) that can be pinned and mapped. Freed by [`gdrx_free`] or [`gdr_close`](crate::gdr_close).
///
/// # Safety
/// `d_addr` must be null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gdrx_alloc(g: gdr_t, device: c_int, size: usize, d_addr: *mut c_ulong) -> c_int {
    guard::status("gdrx_alloc", || {
        let out = non_null("address", d_addr)?;
        let addr = Table::library(id(g))?.allocate(device, size)?;
        // SAFETY: not null, so writable.
        unsafe { out.write(addr) };
        Ok(())
    })
}

/// Frees memory of [`gdrx_alloc`]. Pins and mappings of it stay and show the old bytes.
#[unsafe(no_mangle)]
pub extern "C" fn gdrx_free(g: gdr_t, d_addr: c_ulong) -> c_int {
    guard::status("gdrx_free", || Table::library(id(g))?.free(d_addr))
}

/// Writes into memory of [`gdrx_alloc`] by CUDA's copy engine, not through a mapping; in place on return.
///
/// # Safety
/// `src` must be null or readable for `size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gdrx_copy_in(g: gdr_t, d_addr: c_ulong, src: *const c_void, size: usize) -> c_int {
    guard::status("gdrx_copy_in", || {
        let src = non_null("source", src.cast_mut())?.cast::<u8>();
        let (buffer, offset) = Table::library(id(g))?.buffer(d_addr)?;
        check(size, buffer.len(), offset)?;
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
        check(size, buffer.len(), offset)?;
        // SAFETY: memory that is writable may be set to zeros.
        unsafe { dst.write_bytes(0, size) };
        // SAFETY: writable, as the caller promised, initialised, and less than the size of an allocation.
        let bytes = unsafe { NonNull::slice_from_raw_parts(dst, size).as_mut() };
        buffer.copy_out(offset, bytes)
    })
}

/// Refuses what leaves the buffer, before a slice is made of it.
fn check(len: usize, size: usize, offset: usize) -> Result<()> {
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
        // SAFETY: as above.
        unsafe { end.write(0) };
        Ok(kept < line.len())
    });
    match cut {
        Ok(false) => 0,
        Ok(true) => libc::ERANGE,
        Err(errno) => errno,
    }
}
