//! The `static inline` functions of `infiniband/verbs.h`, which no library exports.
//!
//! Those that need the library itself are methods of [`Verbs`]. As there, a null pointer or −1 comes with `errno`, and
//! other integers are 0 or an `errno`.

use std::ffi::c_int;
use std::mem::offset_of;
use std::ptr;

use super::*;

/// `verbs_get_ctx_op`: the function at `offset` of the extended context, if the library knows it and the driver has it.
///
/// # Safety
/// `context` must be open, and `T` the type of the field at `offset`.
unsafe fn operation<T: Copy>(context: *mut ibv_context, offset: usize) -> Option<T> {
    // SAFETY: the caller guarantees the context.
    let marker = unsafe { &raw const (*context).abi_compat };
    // SAFETY: a field of the context.
    if unsafe { *marker }.addr() != usize::MAX {
        // The library is older than the extended context.
        return None;
    }
    let extended: *mut verbs_context = context.wrapping_byte_sub(offset_of!(verbs_context, context)).cast();
    // SAFETY: the size lies directly before the context, in every version.
    let size = unsafe { (*extended).sz };
    if size < size_of::<verbs_context>() - offset {
        return None;
    }
    let field = extended.cast_const().wrapping_byte_add(offset).cast::<Option<T>>();
    // SAFETY: the library's structure reaches so far to the front, as it says, and the caller guarantees the type.
    unsafe { *field }
}

/// Fetches a function of the extended context.
macro_rules! operation {
    ($context:expr, $name:ident: fn($($arg:ty),*) -> $ret:ty) => {{
        const {
            // The offset is that of a field of this type.
            const fn same(_: fn(verbs_context) -> Option<unsafe extern "C" fn($($arg),*) -> $ret>) {}
            same(|context| context.$name);
        }
        // SAFETY: the caller guarantees the context, and the type was just compared.
        unsafe { operation::<unsafe extern "C" fn($($arg),*) -> $ret>($context, offset_of!(verbs_context, $name)) }
    }};
}

fn fail<T>(errno: c_int) -> *mut T {
    // SAFETY: it is the address of this thread's variable.
    let location = unsafe { libc::__errno_location() };
    // SAFETY: it may be written at any time.
    unsafe { *location = errno };
    ptr::null_mut()
}

/// Declares functions that call an operation of the context in their first argument, or fail with an `errno`.
macro_rules! forwarded {
    ($($(#[$meta:meta])* $name:ident($of:ident: $ty:ty, $($arg:ident: $aty:ty),*) = $op:ident or $errno:expr;)*) => {$(
        $(#[$meta])*
        ///
        /// # Safety
        /// As its manual page asks.
        pub unsafe fn $name($of: $ty, $($arg: $aty),*) -> c_int {
            // SAFETY: the caller guarantees that the queue is alive.
            let context = unsafe { (*$of).context };
            // SAFETY: the context of a live queue is open.
            let call = unsafe { (*context).ops.$op };
            match call {
                // SAFETY: the caller guarantees the arguments.
                Some(call) => unsafe { call($of, $($arg),*) },
                None => $errno,
            }
        }
    )*};
}

forwarded! {
    /// `ibv_post_send`: hands a list of requests to the send queue.
    ibv_post_send(qp: *mut ibv_qp, wr: *mut ibv_send_wr, bad_wr: *mut *mut ibv_send_wr)
        = post_send or libc::EOPNOTSUPP;
    /// `ibv_post_recv`: hands a list of requests to the receive queue.
    ibv_post_recv(qp: *mut ibv_qp, wr: *mut ibv_recv_wr, bad_wr: *mut *mut ibv_recv_wr)
        = post_recv or libc::EOPNOTSUPP;
    /// `ibv_poll_cq`: takes up to `num_entries` completions; the number of them, or less than 0.
    ibv_poll_cq(cq: *mut ibv_cq, num_entries: c_int, wc: *mut ibv_wc) = poll_cq or -libc::EOPNOTSUPP;
    /// `ibv_req_notify_cq`: asks for an event at the next completion.
    ibv_req_notify_cq(cq: *mut ibv_cq, solicited_only: c_int) = req_notify_cq or libc::EOPNOTSUPP;
}

/// Declares functions that create an object by an operation of the extended context.
macro_rules! created {
    ($($(#[$meta:meta])* $name:ident = $op:ident($attr:ty) -> $ret:ty;)*) => {$(
        $(#[$meta])*
        ///
        /// # Safety
        /// As its manual page asks.
        pub unsafe fn $name(context: *mut ibv_context, attr: *mut $attr) -> *mut $ret {
            match operation!(context, $op: fn(*mut ibv_context, *mut $attr) -> *mut $ret) {
                // SAFETY: the caller guarantees the arguments.
                Some(create) => unsafe { create(context, attr) },
                None => fail(libc::EOPNOTSUPP),
            }
        }
    )*};
}

created! {
    /// `ibv_create_cq_ex`: a completion queue, with a parent domain and flags.
    ibv_create_cq_ex = create_cq_ex(ibv_cq_init_attr_ex) -> ibv_cq_ex;
    /// `ibv_alloc_td`: a thread domain.
    ibv_alloc_td = alloc_td(ibv_td_init_attr) -> ibv_td;
    /// `ibv_alloc_parent_domain`: a protection domain with a thread domain and an allocator; freed by
    /// [`Verbs::ibv_dealloc_pd`].
    ibv_alloc_parent_domain = alloc_parent_domain(ibv_parent_domain_init_attr) -> ibv_pd;
}

/// `ibv_cq_ex_to_cq`: the same queue.
#[must_use]
pub fn ibv_cq_ex_to_cq(cq: *mut ibv_cq_ex) -> *mut ibv_cq {
    cq.cast()
}

/// `ibv_dealloc_td`
///
/// # Safety
/// As its manual page asks.
pub unsafe fn ibv_dealloc_td(td: *mut ibv_td) -> c_int {
    // SAFETY: the caller guarantees the domain.
    let context = unsafe { (*td).context };
    match operation!(context, dealloc_td: fn(*mut ibv_td) -> c_int) {
        // SAFETY: the caller guarantees the domain.
        Some(dealloc) => unsafe { dealloc(td) },
        None => libc::EOPNOTSUPP,
    }
}

impl Verbs {
    /// `ibv_query_port`: what a port says of itself, 0 or an `errno`.
    ///
    /// The exported function of this name writes an older, shorter structure; a newer library has the whole one behind
    /// the context.
    ///
    /// # Safety
    /// `context` must be open.
    pub unsafe fn query_port(&self, context: *mut ibv_context, port: u8, attr: &mut ibv_port_attr) -> c_int {
        *attr = ibv_port_attr::zeroed();
        match operation!(context, query_port: fn(*mut ibv_context, u8, *mut ibv_port_attr, usize) -> c_int) {
            // SAFETY: the caller guarantees the context, and the size is that of the structure.
            Some(query) => unsafe { query(context, port, attr, size_of::<ibv_port_attr>()) },
            // SAFETY: the older structure is the beginning of this one.
            None => unsafe { self.ibv_query_port(context, port, ptr::from_mut(attr).cast()) },
        }
    }

    /// `ibv_query_device_ex`: what the device says of itself, 0 or an `errno`. A driver without it fills the
    /// first field alone.
    ///
    /// # Safety
    /// `context` must be open.
    pub unsafe fn query_device_ex(&self, context: *mut ibv_context, attr: &mut ibv_device_attr_ex) -> c_int {
        *attr = ibv_device_attr_ex::zeroed();
        if let Some(query) = operation!(
            context,
            query_device_ex: fn(
                *mut ibv_context,
                *const ibv_query_device_ex_input,
                *mut ibv_device_attr_ex,
                usize
            ) -> c_int
        ) {
            // SAFETY: the caller guarantees the context, and the size is that of the structure.
            let failed = unsafe { query(context, ptr::null(), attr, size_of::<ibv_device_attr_ex>()) };
            if failed != libc::EOPNOTSUPP && failed != libc::ENOSYS {
                return failed;
            }
            *attr = ibv_device_attr_ex::zeroed();
        }
        // SAFETY: the caller guarantees the context.
        unsafe { self.ibv_query_device(context, &raw mut attr.orig_attr) }
    }

    /// `ibv_create_qp_ex`: a queue pair.
    ///
    /// # Safety
    /// As its manual page asks.
    pub unsafe fn create_qp_ex(
        &self,
        context: *mut ibv_context,
        attr: *mut ibv_qp_init_attr_ex,
    ) -> *mut ibv_qp {
        // SAFETY: the caller guarantees the attributes.
        let mask = unsafe { (*attr).comp_mask };
        if mask == ibv_qp_init_attr_mask::IBV_QP_INIT_ATTR_PD {
            // SAFETY: the caller guarantees the attributes.
            let pd = unsafe { (*attr).pd };
            // SAFETY: the attributes begin with the shorter ones.
            return unsafe { self.ibv_create_qp(pd, attr.cast()) };
        }
        match operation!(context, create_qp_ex: fn(*mut ibv_context, *mut ibv_qp_init_attr_ex) -> *mut ibv_qp)
        {
            // SAFETY: the caller guarantees the arguments.
            Some(create) => unsafe { create(context, attr) },
            None => fail(libc::EOPNOTSUPP),
        }
    }

    /// `ibv_reg_mr`: registers memory of this process. Where the library does not know optional access flags, they are
    /// left out, as kernels do.
    ///
    /// # Safety
    /// The memory must be this caller's until [`Verbs::ibv_dereg_mr`].
    pub unsafe fn reg_mr(
        &self,
        pd: *mut ibv_pd,
        addr: *mut std::ffi::c_void,
        length: usize,
        access: ibv_access_flags,
    ) -> *mut ibv_mr {
        if let Some(register) = self.ibv_reg_mr_iova2 {
            // SAFETY: the caller guarantees the arguments.
            return unsafe { register(pd, addr, length, addr as u64, access) };
        }
        let access = access.difference(ibv_access_flags::IBV_ACCESS_OPTIONAL_RANGE);
        // SAFETY: the caller guarantees the arguments.
        unsafe { self.ibv_reg_mr(pd, addr, length, access) }
    }

    /// `ibv_query_gid_table`: the entries of all GID tables of the device that are in use. How many were written,
    /// or less than 0: an `errno`, negative. `None` before rdma-core 32.
    ///
    /// # Safety
    /// `context` must be open.
    pub unsafe fn query_gid_table(
        &self,
        context: *mut ibv_context,
        entries: &mut [ibv_gid_entry],
    ) -> Option<isize> {
        let (query, size) = (self._ibv_query_gid_table?, size_of::<ibv_gid_entry>());
        // SAFETY: the caller guarantees the context, and the entries are a slice.
        Some(unsafe { query(context, entries.as_mut_ptr(), entries.len(), 0, size) })
    }
}
