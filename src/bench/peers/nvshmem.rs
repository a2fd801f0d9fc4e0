//! NVSHMEM: put with signal and wait, on streams.

use std::ffi::{c_int, c_uint, c_void};
use std::ptr::null_mut;

use gdasync::declare;
use gdasync::library::{checked, load};
use gdasync::results::Result;

use super::{Rig, Way};

/// `nvshmemx_uniqueid_t`.
#[repr(C)]
struct UniqueId {
    version: c_int,
    internal: [u8; 124],
}

/// `nvshmemx_init_attr_t`.
#[repr(C)]
struct InitAttr {
    version: c_int,
    mpi: *mut c_void,
    args: InitArgs,
}

/// `nvshmemx_init_args_t`.
#[repr(C)]
struct InitArgs {
    version: c_int,
    id: UniqueIdArgs,
    content: [u8; 96],
}

/// `nvshmemx_uniqueid_args_t`.
#[repr(C)]
struct UniqueIdArgs {
    version: c_int,
    id: *mut UniqueId,
    rank: c_int,
    size: c_int,
}

const _: () = {
    assert!(size_of::<UniqueId>() == 128);
    assert!(size_of::<UniqueIdArgs>() == 24);
    assert!(size_of::<InitArgs>() == 128);
    assert!(size_of::<InitAttr>() == 144);
};

/// The first version of a structure of this size.
const fn version(size: c_int) -> c_int {
    (1 << 16) + size
}

/// `NVSHMEMX_INIT_WITH_UNIQUEID`.
const WITH_UNIQUE_ID: c_uint = 1 << 3;
/// `NVSHMEM_SIGNAL_SET`.
const SET: c_int = 9;
/// `NVSHMEM_CMP_EQ`.
const EQUAL: c_int = 0;

declare! {
    /// The host's interface.
    struct Functions {
        version: "nvshmemx_vendor_get_version_info" (major: *mut c_int, minor: *mut c_int, patch: *mut c_int) -> ();
        unique_id: "nvshmemx_get_uniqueid" (id: *mut UniqueId) -> c_int;
        set_args: "nvshmemx_set_attr_uniqueid_args"
            (rank: c_int, size: c_int, id: *const UniqueId, attr: *mut InitAttr) -> c_int;
        init: "nvshmemx_hostlib_init_attr" (flags: c_uint, attr: *mut InitAttr) -> c_int;
        finalize: "nvshmemx_hostlib_finalize" () -> ();
        malloc: "nvshmem_malloc" (bytes: usize) -> *mut c_void;
        calloc: "nvshmem_calloc" (count: usize, bytes: usize) -> *mut c_void;
        put_signal: "nvshmemx_putmem_signal_on_stream"
            (to: *mut c_void, from: *const c_void, bytes: usize, word: *mut u64, value: u64, how: c_int, peer: c_int,
             stream: *mut c_void) -> ();
        wait_signal: "nvshmemx_signal_wait_until_on_stream"
            (word: *mut u64, cond: c_int, value: u64, stream: *mut c_void) -> ();
    }
}

struct Nvshmem<'a> {
    functions: Functions,
    rig: Rig<'a>,
    buffer: *mut c_void,
    /// It has the number of the last message.
    word: *mut u64,
    peer: c_int,
}

/// Opens the library at both ranks: its version, and what it can do.
pub(super) fn open<'a>(name: &str, rig: Rig<'a>) -> Result<(String, Vec<Box<dyn Way + 'a>>)> {
    let library = load(name)?;
    // SAFETY: the types are those of nvshmemx.h.
    let functions = unsafe { Functions::find(library) }?;
    let mut id = UniqueId { version: version(128), internal: [0; 124] };
    if rig.comm.rank() == 0 {
        // SAFETY: a place for the answer.
        checked("nvshmemx_get_uniqueid", unsafe { (functions.unique_id)(&mut id) })?;
    }
    id.internal = rig.of_first(id.internal)?;
    let args = UniqueIdArgs { version: version(24), id: null_mut(), rank: -1, size: -1 };
    let args = InitArgs { version: version(128), id: args, content: [0; 96] };
    let mut attr = InitAttr { version: version(144), mpi: null_mut(), args };
    let rank = c_int::try_from(rig.comm.rank())?;
    // SAFETY: an id that stays until the initialisation, and attributes.
    let told = unsafe { (functions.set_args)(rank, 2, &id, &mut attr) };
    checked("nvshmemx_set_attr_uniqueid_args", told)?;
    // SAFETY: attributes that were set; both ranks call it.
    checked("nvshmemx_hostlib_init_attr", unsafe { (functions.init)(WITH_UNIQUE_ID, &mut attr) })?;
    let (mut major, mut minor, mut patch) = (0, 0, 0);
    // SAFETY: places for the answer.
    unsafe { (functions.version)(&mut major, &mut minor, &mut patch) };
    // SAFETY: both ranks call it with the same length.
    let buffer = unsafe { (functions.malloc)(2 * rig.room) };
    // SAFETY: both ranks call it with the same length.
    let word = unsafe { (functions.calloc)(1, 8) }.cast::<u64>();
    if buffer.is_null() || word.is_null() {
        return Err("nvshmem_malloc: no memory; NVSHMEM_SYMMETRIC_SIZE allows more".into());
    }
    let nvshmem = Nvshmem { functions, rig, buffer, word, peer: 1 - rank };
    Ok((format!("NVSHMEM {major}.{minor}.{patch}"), vec![Box::new(nvshmem)]))
}

impl Way for Nvshmem<'_> {
    fn name(&self) -> String {
        "NVSHMEM put and signal".into()
    }

    fn buffer(&self) -> u64 {
        self.buffer.addr() as u64
    }

    fn received(&self) -> u64 {
        self.buffer() + self.rig.room as u64
    }

    fn send(&self, bytes: usize, n: u64) -> Result<()> {
        let to = self.buffer.wrapping_byte_add(self.rig.room);
        // SAFETY: both parts of the symmetric buffer, a symmetric word, and a stream that lives.
        unsafe {
            (self.functions.put_signal)(
                to,
                self.buffer,
                bytes,
                self.word,
                n,
                SET,
                self.peer,
                self.rig.stream(),
            );
        }
        Ok(())
    }

    fn receive(&self, _bytes: usize, n: u64) -> Result<()> {
        // SAFETY: a symmetric word, and a stream that lives.
        unsafe { (self.functions.wait_signal)(self.word, EQUAL, n, self.rig.stream()) };
        Ok(())
    }

    fn close(&self) -> Result<()> {
        // SAFETY: nothing is under way; both ranks call it.
        unsafe { (self.functions.finalize)() };
        Ok(())
    }
}
