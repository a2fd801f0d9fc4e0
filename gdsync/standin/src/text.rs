//! Names of values, and functions that this library has only because every libibverbs has them.

use std::ffi::{CStr, c_char, c_int};

use rdma_core_sys::verbs::{
    ibv_ah, ibv_ah_attr, ibv_event_type, ibv_node_type, ibv_pd, ibv_port_state, ibv_wc_status,
};

use crate::errno;

/// A function that names the values of an enumeration.
macro_rules! names {
    ($($function:ident($type:ident) { $($value:ident = $text:literal,)* })*) => {$(
        /// # Safety
        /// There is nothing to mind.
        #[unsafe(no_mangle)]
        pub(crate) unsafe extern "C" fn $function(value: $type) -> *const c_char {
            let text: &'static CStr = match value {
                $($type::$value => $text,)*
                _ => c"unknown",
            };
            text.as_ptr()
        }
    )*};
}

names! {
    ibv_event_type_str(ibv_event_type) {
        IBV_EVENT_CQ_ERR = c"CQ error",
        IBV_EVENT_QP_FATAL = c"local work queue catastrophic error",
        IBV_EVENT_QP_REQ_ERR = c"invalid request local work queue error",
        IBV_EVENT_QP_ACCESS_ERR = c"local access violation work queue error",
    }
    ibv_wc_status_str(ibv_wc_status) {
        IBV_WC_SUCCESS = c"success",
        IBV_WC_LOC_LEN_ERR = c"local length error",
        IBV_WC_LOC_QP_OP_ERR = c"local QP operation error",
        IBV_WC_LOC_PROT_ERR = c"local protection error",
        IBV_WC_WR_FLUSH_ERR = c"Work Request Flushed Error",
        IBV_WC_REM_INV_REQ_ERR = c"remote invalid request error",
        IBV_WC_REM_ACCESS_ERR = c"remote access error",
        IBV_WC_REM_OP_ERR = c"remote operation error",
        IBV_WC_RETRY_EXC_ERR = c"transport retry counter exceeded",
        IBV_WC_RNR_RETRY_EXC_ERR = c"RNR retry counter exceeded",
    }
    ibv_node_type_str(ibv_node_type) {
        IBV_NODE_CA = c"InfiniBand channel adapter",
    }
    ibv_port_state_str(ibv_port_state) {
        IBV_PORT_ACTIVE = c"active",
    }
}

/// Functions that do nothing here.
macro_rules! idle {
    ($($name:ident($($type:ty),*) $(-> $returns:ty)? = $value:expr;)*) => {$(
        /// # Safety
        /// As its manual page asks.
        #[unsafe(no_mangle)]
        pub(crate) unsafe extern "C" fn $name($(_: $type),*) $(-> $returns)? {
            $value
        }
    )*};
}

idle! {
    ibv_fork_init() -> c_int = 0;
    ibv_create_ah(*mut ibv_pd, *mut ibv_ah_attr) -> *mut ibv_ah = errno::null(libc::EOPNOTSUPP);
    ibv_destroy_ah(*mut ibv_ah) -> c_int = libc::EOPNOTSUPP;
}
