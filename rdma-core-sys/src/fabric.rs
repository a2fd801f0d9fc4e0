//! libfabric: the functions and structs for messages over reliable datagram endpoints, of `rdma/fabric.h` and the headers beside
//! it, as of 1.17.
//!
//! The library exports a few functions; all others are in the tables of its objects, which are looked up here. `fi_info` and its parts
//! are allocated by the library only ([`Fabric::fi_dupinfo`] of nothing), which extends them at their ends.

use std::ffi::{c_char, c_int, c_void};

use crate::abi::{Constant, Layout, Unused, plain_constants, records};
use crate::load::{Installed, entry_points};

pub(crate) const LAYOUTS: &[&[Layout]] = &[RECORDS];
pub(crate) const CONSTANT_LISTS: &[&[Constant]] = &[CONSTANTS];

const LIBFABRIC: Installed = Installed {
    name: "libfabric.so.1",
    variable: "GDSYNC_LIBFABRIC",
    packages: "libfabric1 (Debian, Ubuntu), libfabric (Fedora, RHEL), or that of EFA (/opt/amazon/efa) or Slingshot (/opt/cray)",
    project: "libfabric",
};

/// The release whose functions are taken for granted.
const OLDEST: &str = "1.14";

/// The version of the interface that is used here, 1.14: major number, minor number.
pub const VERSION: u32 = 1 << 16 | 14;

/// Address of a peer in an address vector.
pub type fi_addr_t = u64;

plain_constants! {
    CONSTANTS;

    /// Messages.
    FI_MSG: u64 = 1 << 1;
    FI_RECV: u64 = 1 << 10;
    FI_SEND: u64 = 1 << 11;
    FI_TRANSMIT: u64 = FI_SEND;
    /// The node of `fi_getinfo` is the own one.
    FI_SOURCE: u64 = 1 << 57;
    FI_CONTEXT: u64 = 1 << 59;
    FI_CONTEXT2: u64 = 1 << 52;
    /// Messages arrive in the order in which they are sent.
    FI_ORDER_SAS: u64 = 1 << 8;
    FI_EP_RDM: c_int = 3;
    FI_THREAD_DOMAIN: c_int = 3;
    FI_PROGRESS_MANUAL: c_int = 2;
    FI_AV_TABLE: c_int = 2;
    FI_MR_BASIC: c_int = 1 << 0;
    FI_MR_SCALABLE: c_int = 1 << 1;
    FI_MR_LOCAL: c_int = 1 << 2;
    FI_MR_VIRT_ADDR: c_int = 1 << 4;
    FI_MR_ALLOCATED: c_int = 1 << 5;
    FI_MR_PROV_KEY: c_int = 1 << 6;
    FI_MR_ENDPOINT: c_int = 1 << 9;
    FI_MR_HMEM: c_int = 1 << 10;
    FI_WAIT_NONE: c_int = 0;
    FI_WAIT_FD: c_int = 3;
    FI_CQ_FORMAT_MSG: c_int = 2;
    FI_GETWAIT: c_int = 5;
    FI_ENABLE: c_int = 6;
    FI_ADDR_STR: u32 = 9;
    FI_ADDR_UNSPEC: u64 = u64::MAX;
    FI_EAGAIN: isize = libc::EAGAIN as isize;
    FI_ENODATA: c_int = libc::ENODATA;
    /// An error waits in the queue.
    FI_EAVAIL: isize = 259;
    /// A message is longer than the buffer of its receive.
    FI_ETRUNC: c_int = 265;
}

records! {
    RECORDS;

    struct fi_context2 {
        internal: [*mut c_void; 8],
    }

    struct fi_tx_attr grows {
        caps: u64,
        mode: u64,
        op_flags: u64,
        msg_order: u64,
        comp_order: u64,
        inject_size: usize,
        size: usize,
    }

    struct fi_rx_attr grows {
        caps: u64,
        mode: u64,
        op_flags: u64,
        msg_order: u64,
        comp_order: u64,
        total_buffered_recv: usize,
        size: usize,
    }

    struct fi_ep_attr grows {
        type_("type"): c_int,
        protocol: u32,
        protocol_version: u32,
        max_msg_size: usize,
    }

    struct fi_domain_attr grows {
        domain: *mut fid_domain,
        name: *mut c_char,
        threading: c_int,
        control_progress: c_int,
        data_progress: c_int,
        resource_mgmt: c_int,
        av_type: c_int,
        mr_mode: c_int,
    }

    struct fi_fabric_attr grows {
        fabric: *mut fid_fabric,
        name: *mut c_char,
        prov_name: *mut c_char,
        prov_version: u32,
        api_version: u32,
    }

    struct fi_info grows {
        next: *mut fi_info,
        caps: u64,
        mode: u64,
        addr_format: u32,
        src_addrlen: usize,
        dest_addrlen: usize,
        src_addr: *mut c_void,
        dest_addr: *mut c_void,
        handle: *mut fid,
        tx_attr: *mut fi_tx_attr,
        rx_attr: *mut fi_rx_attr,
        ep_attr: *mut fi_ep_attr,
        domain_attr: *mut fi_domain_attr,
        fabric_attr: *mut fi_fabric_attr,
    }

    struct fid {
        fclass: usize,
        context: *mut c_void,
        ops: *mut fi_ops,
    }

    struct fi_ops grows {
        size: usize,
        close: Option<unsafe extern "C" fn(*mut fid) -> c_int>,
        bind: Option<unsafe extern "C" fn(*mut fid, *mut fid, u64) -> c_int>,
        control: Option<unsafe extern "C" fn(*mut fid, c_int, *mut c_void) -> c_int>,
    }

    struct fid_fabric grows {
        fid: fid,
        ops: *mut fi_ops_fabric,
    }

    struct fi_ops_fabric grows {
        size: usize,
        domain: Option<unsafe extern "C" fn(*mut fid_fabric, *mut fi_info, *mut *mut fid_domain, *mut c_void) -> c_int>,
        passive_ep: Unused,
        eq_open: Option<unsafe extern "C" fn(*mut fid_fabric, *mut fi_eq_attr, *mut *mut fid_eq, *mut c_void) -> c_int>,
        wait_open: Unused,
        trywait: Option<unsafe extern "C" fn(*mut fid_fabric, *mut *mut fid, c_int) -> c_int>,
    }

    struct fid_domain grows {
        fid: fid,
        ops: *mut fi_ops_domain,
        mr: *mut fi_ops_mr,
    }

    struct fi_ops_domain grows {
        size: usize,
        av_open: Option<unsafe extern "C" fn(*mut fid_domain, *mut fi_av_attr, *mut *mut fid_av, *mut c_void) -> c_int>,
        cq_open: Option<unsafe extern "C" fn(*mut fid_domain, *mut fi_cq_attr, *mut *mut fid_cq, *mut c_void) -> c_int>,
        endpoint: Option<unsafe extern "C" fn(*mut fid_domain, *mut fi_info, *mut *mut fid_ep, *mut c_void) -> c_int>,
    }

    struct fi_ops_mr grows {
        size: usize,
        reg: Option<unsafe extern "C" fn(*mut fid, *const c_void, usize, u64, u64, u64, u64, *mut *mut fid_mr, *mut c_void) -> c_int>,
    }

    struct fid_mr grows {
        fid: fid,
        mem_desc: *mut c_void,
        key: u64,
    }

    struct fi_av_attr {
        type_("type"): c_int,
        rx_ctx_bits: c_int,
        count: usize,
        ep_per_node: usize,
        name: *const c_char,
        map_addr: *mut c_void,
        flags: u64,
    }

    struct fid_av grows {
        fid: fid,
        ops: *mut fi_ops_av,
    }

    struct fi_ops_av grows {
        size: usize,
        insert: Option<unsafe extern "C" fn(*mut fid_av, *const c_void, usize, *mut fi_addr_t, u64, *mut c_void) -> c_int>,
        insertsvc: Unused,
        insertsym: Unused,
        remove: Option<unsafe extern "C" fn(*mut fid_av, *mut fi_addr_t, usize, u64) -> c_int>,
    }

    /// Newer libraries read one pointer more: pass zeroed memory behind it.
    struct fi_cq_attr grows {
        size: usize,
        flags: u64,
        format: c_int,
        wait_obj: c_int,
        signaling_vector: c_int,
        wait_cond: c_int,
        wait_set: *mut c_void,
    }

    struct fid_cq grows {
        fid: fid,
        ops: *mut fi_ops_cq,
    }

    struct fi_ops_cq grows {
        size: usize,
        read: Option<unsafe extern "C" fn(*mut fid_cq, *mut c_void, usize) -> isize>,
        readfrom: Unused,
        readerr: Option<unsafe extern "C" fn(*mut fid_cq, *mut fi_cq_err_entry, u64) -> isize>,
        sread: Option<unsafe extern "C" fn(*mut fid_cq, *mut c_void, usize, *const c_void, c_int) -> isize>,
    }

    struct fi_cq_msg_entry {
        op_context: *mut c_void,
        flags: u64,
        len: usize,
    }

    /// Newer libraries write one address more.
    struct fi_cq_err_entry grows {
        op_context: *mut c_void,
        flags: u64,
        len: usize,
        buf: *mut c_void,
        data: u64,
        tag: u64,
        olen: usize,
        err: c_int,
        prov_errno: c_int,
        err_data: *mut c_void,
        err_data_size: usize,
    }

    struct fi_eq_attr {
        size: usize,
        flags: u64,
        wait_obj: c_int,
        signaling_vector: c_int,
        wait_set: *mut c_void,
    }

    struct fi_eq_err_entry grows {
        fid: *mut fid,
        context: *mut c_void,
        data: u64,
        err: c_int,
        prov_errno: c_int,
        err_data: *mut c_void,
        err_data_size: usize,
    }

    struct fid_eq grows {
        fid: fid,
        ops: *mut fi_ops_eq,
    }

    struct fi_ops_eq grows {
        size: usize,
        read: Option<unsafe extern "C" fn(*mut fid_eq, *mut u32, *mut c_void, usize, u64) -> isize>,
        readerr: Option<unsafe extern "C" fn(*mut fid_eq, *mut fi_eq_err_entry, u64) -> isize>,
    }

    struct fid_ep grows {
        fid: fid,
        ops: *mut c_void,
        cm: *mut fi_ops_cm,
        msg: *mut fi_ops_msg,
    }

    struct fi_ops_cm grows {
        size: usize,
        setname: Unused,
        getname: Option<unsafe extern "C" fn(*mut fid, *mut c_void, *mut usize) -> c_int>,
    }

    struct fi_ops_msg grows {
        size: usize,
        recv: Option<unsafe extern "C" fn(*mut fid_ep, *mut c_void, usize, *mut c_void, fi_addr_t, *mut c_void) -> isize>,
        recvv: Unused,
        recvmsg: Unused,
        send: Option<unsafe extern "C" fn(*mut fid_ep, *const c_void, usize, *mut c_void, fi_addr_t, *mut c_void) -> isize>,
        sendv: Unused,
        sendmsg: Unused,
        inject: Option<unsafe extern "C" fn(*mut fid_ep, *const c_void, usize, fi_addr_t) -> isize>,
    }
}

entry_points! {
    /// The functions that libfabric exports. `GDSYNC_LIBFABRIC` in the environment names another library than the installed one.
    Fabric from LIBFABRIC;

    always {
        fi_version() -> u32;
        fi_getinfo(version: u32, node: *const c_char, service: *const c_char, flags: u64, hints: *const fi_info,
            info: *mut *mut fi_info) -> c_int;
        fi_freeinfo(info: *mut fi_info);
        fi_dupinfo(info: *const fi_info) -> *mut fi_info;
        fi_fabric(attr: *mut fi_fabric_attr, fabric: *mut *mut fid_fabric, context: *mut c_void) -> c_int;
        fi_strerror(errnum: c_int) -> *const c_char;
    }

    since {}
}

/// Declares the `static inline` functions of the headers, which call a function of an object's table. Where the provider has none, they
/// return `-ENOSYS`.
macro_rules! inline {
    ($($(#[$meta:meta])* $name:ident($object:ident: $of:ty $(, $arg:ident: $ty:ty)*) -> $ret:ty = $table:ident.$function:ident($($pass:expr),*);)*) => {$(
        $(#[$meta])*
        ///
        /// # Safety
        /// As its manual page asks.
        #[allow(clippy::too_many_arguments, reason = "those of libfabric")]
        pub unsafe fn $name($object: $of $(, $arg: $ty)*) -> $ret {
            // SAFETY: the caller guarantees that the object is open.
            let table = unsafe { (*$object).$table };
            // SAFETY: the table of an open object is the library's, which stays loaded.
            let function = unsafe { (*table).$function };
            match function {
                // SAFETY: the caller guarantees the arguments.
                Some(function) => unsafe { function($($pass),*) },
                None => -(libc::ENOSYS as $ret),
            }
        }
    )*};
}

inline! {
    /// `fi_close`
    fi_close(object: *mut fid) -> c_int = ops.close(object);
    /// `fi_ep_bind`, `fi_mr_bind`
    fi_bind(object: *mut fid, to: *mut fid, flags: u64) -> c_int = ops.bind(object, to, flags);
    /// `fi_control`
    fi_control(object: *mut fid, command: c_int, arg: *mut c_void) -> c_int = ops.control(object, command, arg);
    /// `fi_domain`
    fi_domain(fabric: *mut fid_fabric, info: *mut fi_info, domain: *mut *mut fid_domain, context: *mut c_void) -> c_int
        = ops.domain(fabric, info, domain, context);
    /// `fi_eq_open`
    fi_eq_open(fabric: *mut fid_fabric, attr: *mut fi_eq_attr, eq: *mut *mut fid_eq, context: *mut c_void) -> c_int
        = ops.eq_open(fabric, attr, eq, context);
    /// `fi_trywait`: whether a thread may sleep on the descriptors of these objects.
    fi_trywait(fabric: *mut fid_fabric, objects: *mut *mut fid, count: c_int) -> c_int = ops.trywait(fabric, objects, count);
    /// `fi_av_open`
    fi_av_open(domain: *mut fid_domain, attr: *mut fi_av_attr, av: *mut *mut fid_av, context: *mut c_void) -> c_int
        = ops.av_open(domain, attr, av, context);
    /// `fi_cq_open`
    fi_cq_open(domain: *mut fid_domain, attr: *mut fi_cq_attr, cq: *mut *mut fid_cq, context: *mut c_void) -> c_int
        = ops.cq_open(domain, attr, cq, context);
    /// `fi_endpoint`
    fi_endpoint(domain: *mut fid_domain, info: *mut fi_info, ep: *mut *mut fid_ep, context: *mut c_void) -> c_int
        = ops.endpoint(domain, info, ep, context);
    /// `fi_mr_reg`
    fi_mr_reg(domain: *mut fid_domain, buf: *const c_void, len: usize, access: u64, offset: u64, key: u64, flags: u64,
        mr: *mut *mut fid_mr, context: *mut c_void) -> c_int
        = mr.reg(domain.cast(), buf, len, access, offset, key, flags, mr, context);
    /// `fi_av_insert`
    fi_av_insert(av: *mut fid_av, addr: *const c_void, count: usize, fi_addr: *mut fi_addr_t, flags: u64, context: *mut c_void) -> c_int
        = ops.insert(av, addr, count, fi_addr, flags, context);
    /// `fi_av_remove`
    fi_av_remove(av: *mut fid_av, fi_addr: *mut fi_addr_t, count: usize, flags: u64) -> c_int = ops.remove(av, fi_addr, count, flags);
    /// `fi_cq_read`
    fi_cq_read(cq: *mut fid_cq, buf: *mut c_void, count: usize) -> isize = ops.read(cq, buf, count);
    /// `fi_cq_sread`; waits for `timeout` milliseconds.
    fi_cq_sread(cq: *mut fid_cq, buf: *mut c_void, count: usize, cond: *const c_void, timeout: c_int) -> isize
        = ops.sread(cq, buf, count, cond, timeout);
    /// `fi_cq_readerr`
    fi_cq_readerr(cq: *mut fid_cq, buf: *mut fi_cq_err_entry, flags: u64) -> isize = ops.readerr(cq, buf, flags);
    /// `fi_eq_read`
    fi_eq_read(eq: *mut fid_eq, event: *mut u32, buf: *mut c_void, len: usize, flags: u64) -> isize
        = ops.read(eq, event, buf, len, flags);
    /// `fi_eq_readerr`
    fi_eq_readerr(eq: *mut fid_eq, buf: *mut fi_eq_err_entry, flags: u64) -> isize = ops.readerr(eq, buf, flags);
    /// `fi_getname`
    fi_getname(ep: *mut fid_ep, addr: *mut c_void, len: *mut usize) -> c_int = cm.getname(ep.cast(), addr, len);
    /// `fi_recv`
    fi_recv(ep: *mut fid_ep, buf: *mut c_void, len: usize, desc: *mut c_void, from: fi_addr_t, context: *mut c_void) -> isize
        = msg.recv(ep, buf, len, desc, from, context);
    /// `fi_send`
    fi_send(ep: *mut fid_ep, buf: *const c_void, len: usize, desc: *mut c_void, to: fi_addr_t, context: *mut c_void) -> isize
        = msg.send(ep, buf, len, desc, to, context);
    /// `fi_inject`
    fi_inject(ep: *mut fid_ep, buf: *const c_void, len: usize, to: fi_addr_t) -> isize = msg.inject(ep, buf, len, to);
}
