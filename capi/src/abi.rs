//! The structures and numbers of `gdasync.h`.

use std::ffi::{c_char, c_int, c_void};

/// A handle of the header: a number in place of a pointer, 0 for NULL.
pub type Raw = usize;

/// The types of the header that are handles, by kind.
pub(crate) const KINDS: [&str; 11] = [
    "",
    "gda_ctx_t",
    "gda_comm_t",
    "gda_listen_t",
    "gda_mem_t",
    "gda_req_t",
    "gda_stream_t",
    "gda_graph_t",
    "gda_win_t",
    "gda_chan_t",
    "gda_peer_mem_t",
];

/// `GDA_VERSION`
pub const VERSION: u32 = 1;

/// `GDA_IN_PROGRESS`
pub const IN_PROGRESS: c_int = 1;

/// A structure that begins with its size.
///
/// # Safety
/// The first field is the size, a `u32`, and all bit patterns are values.
pub unsafe trait Sized32: Copy {}

/// `struct gda_config`
#[derive(Clone, Copy, Debug)]
#[repr(C)]
#[expect(missing_docs, reason = "see the header")]
pub struct gda_config {
    pub struct_size: u32,
    pub gpu: i32,
    pub device: *const c_char,
    pub depth: u32,
    pub max_pieces: u32,
}

/// `struct gda_info`
#[derive(Clone, Copy, Debug)]
#[repr(C)]
#[expect(missing_docs, reason = "see the header")]
pub struct gda_info_t {
    pub struct_size: u32,
    pub is_software: u32,
    pub is_direct: u32,
    pub max_inline: u32,
    pub device: [c_char; 128],
}

/// `struct gda_exchange`
#[derive(Clone, Copy, Debug)]
#[repr(C)]
#[expect(missing_docs, reason = "see the header")]
pub struct gda_exchange {
    pub struct_size: u32,
    pub rank: i32,
    pub size: i32,
    pub reserved: i32,
    pub this: *mut c_void,
    pub allgather: Option<unsafe extern "C" fn(*mut c_void, *const c_void, usize, *mut c_void, i64) -> c_int>,
    pub release: Option<unsafe extern "C" fn(*mut c_void)>,
}

/// `struct gda_buf`
#[derive(Clone, Copy, Debug)]
#[repr(C)]
#[expect(missing_docs, reason = "see the header")]
pub struct gda_buf {
    pub mem: Raw,
    pub offset: u64,
    pub len: u64,
}

/// `struct gda_status`
#[derive(Clone, Copy, Debug)]
#[repr(C)]
#[expect(missing_docs, reason = "see the header")]
pub struct gda_status {
    pub struct_size: u32,
    pub rank: i32,
    pub len: u64,
    pub tag: u64,
}

/// `struct gda_signal`
#[derive(Clone, Copy, Debug)]
#[repr(C)]
#[expect(missing_docs, reason = "see the header")]
pub struct gda_signal {
    pub offset: u64,
    pub value: u64,
    pub add: i32,
    pub reserved: i32,
}

// SAFETY: the size comes first; the rest are numbers and pointers.
unsafe impl Sized32 for gda_config {}
// SAFETY: the size comes first; the rest are numbers.
unsafe impl Sized32 for gda_info_t {}
// SAFETY: the size comes first; the rest are numbers, and pointers that may be null.
unsafe impl Sized32 for gda_exchange {}
// SAFETY: the size comes first; the rest are numbers.
unsafe impl Sized32 for gda_status {}
