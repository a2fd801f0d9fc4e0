//! The entry points of libmlx5.

use std::ffi::{c_char, c_int, c_void};

use super::*;
use crate::library::Installed;
use crate::table::entry_points;
use crate::verbs::{
    ibv_access_flags, ibv_ah, ibv_context, ibv_cq_ex, ibv_cq_init_attr_ex, ibv_device, ibv_mr, ibv_pd,
    ibv_qp, ibv_qp_init_attr_ex,
};

const LIBMLX5: Installed = Installed {
    name: "libmlx5.so.1",
    variable: "GDSYNC_LIBMLX5",
    packages: "ibverbs-providers (Debian, Ubuntu) or libibverbs (Fedora, RHEL)",
};

/// The release whose functions are taken for granted, and whose behaviour: completion queues in memory of the application came with 29,
/// the alignment that queue pairs there need with 31, registers of virtual functions without BlueFlame with 33.
const OLDEST: &str = "31";

entry_points! {
    /// The functions of libmlx5. `GDSYNC_LIBMLX5` in the environment names another library than the installed one.
    ///
    /// It belongs to the libibverbs of the same installation; contexts of another one are foreign to it.
    Mlx5 from LIBMLX5;

    always {
        mlx5dv_is_supported(device: *mut ibv_device) -> bool;
        mlx5dv_open_device(device: *mut ibv_device, attr: *mut mlx5dv_context_attr) -> *mut ibv_context;
        mlx5dv_query_device(context: *mut ibv_context, attrs: *mut mlx5dv_context) -> c_int;
        mlx5dv_set_context_attr(context: *mut ibv_context, kind: mlx5dv_set_ctx_attr_type, attr: *mut c_void)
            -> c_int;
        mlx5dv_create_cq(context: *mut ibv_context, attr: *mut ibv_cq_init_attr_ex,
            mlx5_attr: *mut mlx5dv_cq_init_attr) -> *mut ibv_cq_ex;
        mlx5dv_create_qp(context: *mut ibv_context, attr: *mut ibv_qp_init_attr_ex,
            mlx5_attr: *mut mlx5dv_qp_init_attr) -> *mut ibv_qp;
        mlx5dv_init_obj(obj: *mut mlx5dv_obj, obj_type: mlx5dv_obj_type) -> c_int;
        mlx5dv_devx_obj_create(context: *mut ibv_context, input: *const c_void, input_len: usize,
            output: *mut c_void, output_len: usize) -> *mut mlx5dv_devx_obj;
        mlx5dv_devx_obj_query(obj: *mut mlx5dv_devx_obj, input: *const c_void, input_len: usize,
            output: *mut c_void, output_len: usize) -> c_int;
        mlx5dv_devx_obj_modify(obj: *mut mlx5dv_devx_obj, input: *const c_void, input_len: usize,
            output: *mut c_void, output_len: usize) -> c_int;
        mlx5dv_devx_obj_destroy(obj: *mut mlx5dv_devx_obj) -> c_int;
        mlx5dv_devx_general_cmd(context: *mut ibv_context, input: *const c_void, input_len: usize,
            output: *mut c_void, output_len: usize) -> c_int;
        mlx5dv_devx_qp_query(qp: *mut ibv_qp, input: *const c_void, input_len: usize,
            output: *mut c_void, output_len: usize) -> c_int;
        mlx5dv_devx_umem_reg(context: *mut ibv_context, addr: *mut c_void, size: usize, access: ibv_access_flags)
            -> *mut mlx5dv_devx_umem;
        mlx5dv_devx_umem_dereg(umem: *mut mlx5dv_devx_umem) -> c_int;
        mlx5dv_devx_alloc_uar(context: *mut ibv_context, kind: mlx5dv_uar_alloc_type) -> *mut mlx5dv_devx_uar;
        mlx5dv_devx_free_uar(uar: *mut mlx5dv_devx_uar);
        mlx5dv_devx_query_eqn(context: *mut ibv_context, vector: u32, eqn: *mut u32) -> c_int;
    }

    since {
        "24" mlx5dv_create_mkey(attr: *mut mlx5dv_mkey_init_attr) -> *mut mlx5dv_mkey;
        "24" mlx5dv_destroy_mkey(mkey: *mut mlx5dv_mkey) -> c_int;
        "25" mlx5dv_devx_create_event_channel(context: *mut ibv_context,
            flags: mlx5dv_devx_create_event_channel_flags) -> *mut mlx5dv_devx_event_channel;
        "25" mlx5dv_devx_destroy_event_channel(channel: *mut mlx5dv_devx_event_channel);
        "25" mlx5dv_devx_subscribe_devx_event(channel: *mut mlx5dv_devx_event_channel, obj: *mut mlx5dv_devx_obj,
            events_size: u16, events: *mut u16, cookie: u64) -> c_int;
        "25" mlx5dv_devx_get_event(channel: *mut mlx5dv_devx_event_channel, data: *mut mlx5dv_devx_async_event_hdr,
            data_len: usize) -> isize;
        "33" mlx5dv_modify_qp_udp_sport(qp: *mut ibv_qp, udp_sport: u16) -> c_int;
        "35" mlx5dv_devx_umem_reg_ex(context: *mut ibv_context, attr: *mut mlx5dv_devx_umem_in)
            -> *mut mlx5dv_devx_umem;
        "36" mlx5dv_map_ah_to_qp(ah: *mut ibv_ah, qp_num: u32) -> c_int;
        "54" mlx5dv_reg_dmabuf_mr(pd: *mut ibv_pd, offset: u64, length: usize, iova: u64, fd: c_int,
            access: ibv_access_flags, mlx5_access: mlx5dv_reg_dmabuf_access) -> *mut ibv_mr;
        "54" mlx5dv_get_data_direct_sysfs_path(context: *mut ibv_context, path: *mut c_char, path_len: usize)
            -> c_int;
    }
}
