//! The types of `mp.h`.

#![allow(non_camel_case_types, reason = "the names of the header")]

use std::ffi::{c_int, c_void};

/// `MP_FAILURE`
pub const FAILURE: c_int = 1;
/// Version of the interface: `major << 16 | minor`.
pub const VERSION: c_int = 2 << 16;

/// `mp_reg_t`, `mp_request_t`, `mp_window_t` and `mp_desc_queue_t`. Pointers for C, to nothing.
pub use gdsync_capi_support::handles::Handle;

/// The kinds of handles.
pub(crate) const KINDS: [&str; 5] = ["", "request", "registration", "window", "mp_desc_queue_t"];

pub(crate) const PUT_INLINE: c_int = 1;
pub(crate) const PUT_NOWAIT: c_int = 2;

/// `struct mp_exchange`
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct mp_exchange {
    /// Bytes of this structure.
    pub struct_size: u32,
    /// This rank.
    pub rank: c_int,
    /// The number of ranks.
    pub size: c_int,
    /// An argument of the functions.
    pub own: *mut c_void,
    /// Gives all ranks the bytes of all.
    pub allgather: Option<unsafe extern "C" fn(*mut c_void, *const c_void, usize, *mut c_void) -> c_int>,
    /// Returns when all ranks have called it.
    pub barrier: Option<unsafe extern "C" fn(*mut c_void) -> c_int>,
    /// Called at the end.
    pub release: Option<unsafe extern "C" fn(*mut c_void)>,
}

/// `struct mp_word_words`
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct mp_word_words {
    /// The word on the GPU.
    pub ptr: u64,
    /// The operand.
    pub value: u32,
}

/// `struct mp_send_words`
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct mp_send_words {
    /// The doorbell record on the GPU.
    pub dbrec_ptr: u64,
    /// The doorbell on the GPU.
    pub db_ptr: u64,
    /// What to write to the doorbell, after the record.
    pub db_value: u64,
    /// What to write to the record.
    pub dbrec_value: u32,
}

/// `struct mp_wait_words`
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct mp_wait_words {
    /// The word on the GPU.
    pub sema_ptr: u64,
    /// What to write to afterwards, on the GPU.
    pub flag_ptr: u64,
    /// The operand of the condition.
    pub sema_value: u32,
    /// The value to write.
    pub flag_value: u32,
    /// The condition.
    pub cond: c_int,
}
