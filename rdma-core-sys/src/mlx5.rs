//! libmlx5: direct verbs and DevX, `infiniband/mlx5dv.h`.

pub mod ifc;

use std::ffi::{c_int, c_void};

use libc::off_t;

use crate::abi::{Constant, Layout, enumerations, flag_sets, plain_constants, records};
use crate::load::{Installed, entry_points};
use crate::verbs::{
    ibv_access_flags, ibv_ah, ibv_context, ibv_cq, ibv_cq_ex, ibv_cq_init_attr_ex, ibv_device, ibv_pd,
    ibv_qp, ibv_qp_init_attr_ex,
};

pub(crate) const LAYOUTS: &[&[Layout]] = &[RECORDS];

pub(crate) const CONSTANT_LISTS: &[&[Constant]] = &[ENUMERATIONS, FLAGS, CONSTANTS];

const LIBMLX5: Installed = Installed {
    name: "libmlx5.so.1",
    variable: "GDSYNC_LIBMLX5",
    packages: "ibverbs-providers (Debian, Ubuntu) or libibverbs (Fedora, RHEL)",
    project: "rdma-core",
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
        "25" mlx5dv_devx_create_event_channel(context: *mut ibv_context,
            flags: mlx5dv_devx_create_event_channel_flags) -> *mut mlx5dv_devx_event_channel;
        "25" mlx5dv_devx_destroy_event_channel(channel: *mut mlx5dv_devx_event_channel);
        "25" mlx5dv_devx_subscribe_devx_event(channel: *mut mlx5dv_devx_event_channel, obj: *mut mlx5dv_devx_obj,
            events_size: u16, events: *mut u16, cookie: u64) -> c_int;
        "25" mlx5dv_devx_get_event(channel: *mut mlx5dv_devx_event_channel, data: *mut mlx5dv_devx_async_event_hdr,
            data_len: usize) -> isize;
        "35" mlx5dv_devx_umem_reg_ex(context: *mut ibv_context, attr: *mut mlx5dv_devx_umem_in)
            -> *mut mlx5dv_devx_umem;
    }
}

/// `struct mlx5dv_devx_obj`: an object that [`Mlx5::mlx5dv_devx_obj_create`](super::Mlx5::mlx5dv_devx_obj_create) made.
#[repr(C)]
#[derive(Debug)]
pub struct mlx5dv_devx_obj {
    opaque: [u8; 0],
}

plain_constants! {
    CONSTANTS;

    /// `MLX5DV_RES_TYPE_QP`: the buffer of a queue pair is asked for; first the receive queue, then the send queue.
    MLX5DV_RES_TYPE_QP: u64 = 1 << 32 | 1;
    /// `MLX5DV_RES_TYPE_DBR`: a doorbell record.
    MLX5DV_RES_TYPE_DBR: u64 = 1 << 32 | 3;
    /// `MLX5DV_RES_TYPE_CQ`: that of a completion queue.
    MLX5DV_RES_TYPE_CQ: u64 = 1 << 32 | 5;

    /// `MLX5_RCV_DBR`: the receive queue's word of a doorbell record.
    MLX5_RCV_DBR: usize = 0;
    /// `MLX5_SND_DBR`: the send queue's.
    MLX5_SND_DBR: usize = 1;
}

enumerations! {
    ENUMERATIONS;

    enum mlx5dv_set_ctx_attr_type: u32 {
    }

    /// The kind of a doorbell page, `enum mlx5_ib_uapi_uar_alloc_type`.
    enum mlx5dv_uar_alloc_type: u32 {
        MLX5DV_UAR_ALLOC_TYPE_BF = 0,
        MLX5DV_UAR_ALLOC_TYPE_NC = 1,
        MLX5DV_UAR_ALLOC_TYPE_NC_DEDICATED = 1 << 31,
    }

    enum mlx5dv_devx_create_event_channel_flags: u32 {
        MLX5DV_DEVX_CREATE_EVENT_CHANNEL_FLAGS_OMIT_EV_DATA = 1,
    }
}

flag_sets! {
    FLAGS;

    /// What [`Mlx5::mlx5dv_query_device`](super::Mlx5::mlx5dv_query_device) is asked
    /// for, and what it wrote. Bits without a name here must stay 0: the structure ends before their fields.
    flags mlx5dv_context_comp_mask: u64 {
        MLX5DV_CONTEXT_MASK_DYN_BFREGS = 1 << 4,
    }

    /// `enum mlx5dv_context_flags` of [`mlx5dv_context`]
    flags mlx5dv_context_flags: u64 {
        MLX5DV_CONTEXT_FLAGS_CQE_V1 = 1 << 0,
    }

    flags mlx5dv_context_attr_flags: u32 {
        MLX5DV_CONTEXT_FLAGS_DEVX = 1 << 0,
    }

    flags mlx5dv_cq_init_attr_mask: u64 {
        MLX5DV_CQ_INIT_ATTR_MASK_CQE_SIZE = 1 << 2,
    }

    flags mlx5dv_qp_init_attr_mask: u64 {
        MLX5DV_QP_INIT_ATTR_MASK_QP_CREATE_FLAGS = 1 << 0,
    }

    flags mlx5dv_qp_create_flags: u32 {
        MLX5DV_QP_CREATE_DISABLE_SCATTER_TO_CQE = 1 << 3,
        MLX5DV_QP_CREATE_ALLOW_SCATTER_TO_CQE = 1 << 4,
    }

    flags mlx5dv_devx_umem_in_mask: u64 {
        MLX5DV_UMEM_MASK_DMABUF = 1 << 0,
    }

    flags mlx5dv_obj_type: u64 {
        MLX5DV_OBJ_QP = 1 << 0,
        MLX5DV_OBJ_CQ = 1 << 1,
        MLX5DV_OBJ_AH = 1 << 5,
        MLX5DV_OBJ_PD = 1 << 6,
    }

    /// What is asked for and what was written.
    flags mlx5dv_qp_comp_mask: u64 {
        MLX5DV_QP_MASK_UAR_MMAP_OFFSET = 1 << 0,
    }
}

records! {
    RECORDS;

    /// What a device says of itself.
    struct mlx5dv_context grows {
        version: u8,
        flags: mlx5dv_context_flags,
        comp_mask: mlx5dv_context_comp_mask,
        _offload_caps("cqe_comp_caps"): [u32; 10],
        /// Doorbell registers that thread domains may have.
        max_dynamic_bfregs: u32,
        max_clock_info_update_nsec: u64,
        flow_action_flags: u32,
        dc_odp_caps: u32,
        hca_core_clock: *mut c_void,
    }

    /// How a device is opened.
    struct mlx5dv_context_attr grows {
        flags: mlx5dv_context_attr_flags,
        comp_mask: u64,
    }

    struct mlx5dv_cq_init_attr {
        comp_mask: mlx5dv_cq_init_attr_mask,
        cqe_comp_res_format: u8,
        flags: u32,
        /// Bytes.
        cqe_size: u16,
    }

    struct mlx5dv_qp_init_attr {
        comp_mask: mlx5dv_qp_init_attr_mask,
        create_flags: mlx5dv_qp_create_flags,
        _dc_init_attr("dc_init_attr"): [u64; 2],
        send_ops_flags: u64,
    }

    /// Memory that the device may name.
    struct mlx5dv_devx_umem grows {
        umem_id: u32,
    }

    struct mlx5dv_devx_umem_in grows {
        /// Where it begins, in the DMA-BUF if there is one.
        addr: *mut c_void,
        /// Bytes.
        size: usize,
        access: ibv_access_flags,
        /// Page sizes that may be used.
        pgsz_bitmap: u64,
        comp_mask: mlx5dv_devx_umem_in_mask,
        dmabuf_fd: c_int,
    }

    /// A page of doorbells.
    struct mlx5dv_devx_uar grows {
        /// The register.
        reg_addr: *mut c_void,
        /// The page.
        base_addr: *mut c_void,
        page_id: u32,
        mmap_off: off_t,
        comp_mask: u64,
    }

    struct mlx5dv_devx_event_channel grows {
        fd: c_int,
    }

    /// The event's bytes follow.
    struct mlx5dv_devx_async_event_hdr {
        cookie: u64,
    }

    /// A ring of [`mlx5dv_qp`].
    struct mlx5dv_qp_ring("typeof(((struct mlx5dv_qp *)0)->sq)") {
        buf: *mut c_void,
        /// A power of two.
        wqe_cnt: u32,
        /// Bytes from entry to entry.
        stride: u32,
    }

    /// The doorbell of [`mlx5dv_qp`].
    struct mlx5dv_qp_bf("typeof(((struct mlx5dv_qp *)0)->bf)") {
        reg: *mut c_void,
        /// Bytes of each half of the register, 0 where it takes no more than a doorbell.
        size: u32,
    }

    /// A queue pair in memory.
    struct mlx5dv_qp grows {
        /// Two big-endian words, [`MLX5_RCV_DBR`] and [`MLX5_SND_DBR`].
        dbrec: *mut u32,
        sq: mlx5dv_qp_ring,
        rq: mlx5dv_qp_ring,
        bf: mlx5dv_qp_bf,
        comp_mask: mlx5dv_qp_comp_mask,
        uar_mmap_offset: off_t,
        tirn: u32,
        tisn: u32,
        rqn: u32,
        sqn: u32,
        tir_icm_addr: u64,
    }

    /// A completion queue in memory. It now is the caller's to poll.
    struct mlx5dv_cq grows {
        buf: *mut c_void,
        /// Two big-endian words: consumer index and arm.
        dbrec: *mut u32,
        /// A power of two.
        cqe_cnt: u32,
        /// Bytes.
        cqe_size: u32,
        cq_uar: *mut c_void,
        cqn: u32,
        comp_mask: u64,
    }

    /// An address in memory.
    struct mlx5dv_ah grows {
        av: *mut mlx5_wqe_av,
        comp_mask: u64,
    }

    /// The number of a protection domain.
    struct mlx5dv_pd grows {
        pdn: u32,
        comp_mask: u64,
    }

    /// The address of a peer, in network byte order.
    struct mlx5_wqe_av {
        /// A Q_Key in its first half, or the key of a DC target.
        key: u64,
        dqp_dct: u32,
        stat_rate_sl: u8,
        fl_mlid: u8,
        rlid: u16,
        reserved0: [u8; 4],
        rmac: [u8; 6],
        tclass: u8,
        hop_limit: u8,
        grh_gid_fl: u32,
        rgid: [u8; 16],
    }

    /// The queue pair of [`mlx5dv_obj`].
    struct mlx5dv_obj_qp("typeof(((struct mlx5dv_obj *)0)->qp)") {
        r#in: *mut ibv_qp,
        out: *mut mlx5dv_qp,
    }

    /// The completion queue of [`mlx5dv_obj`].
    struct mlx5dv_obj_cq("typeof(((struct mlx5dv_obj *)0)->cq)") {
        r#in: *mut ibv_cq,
        out: *mut mlx5dv_cq,
    }

    /// An object of [`mlx5dv_obj`] that is not declared here.
    struct mlx5dv_obj_other("typeof(((struct mlx5dv_obj *)0)->rwq)") {
        r#in: *mut c_void,
        out: *mut c_void,
    }

    /// The address of [`mlx5dv_obj`].
    struct mlx5dv_obj_ah("typeof(((struct mlx5dv_obj *)0)->ah)") {
        r#in: *mut ibv_ah,
        out: *mut mlx5dv_ah,
    }

    /// The protection domain of [`mlx5dv_obj`].
    struct mlx5dv_obj_pd("typeof(((struct mlx5dv_obj *)0)->pd)") {
        r#in: *mut ibv_pd,
        out: *mut mlx5dv_pd,
    }

    /// Objects of verbs, and where to write what they are in memory.
    struct mlx5dv_obj grows {
        qp: mlx5dv_obj_qp,
        cq: mlx5dv_obj_cq,
        srq: mlx5dv_obj_other,
        rwq: mlx5dv_obj_other,
        dm: mlx5dv_obj_other,
        ah: mlx5dv_obj_ah,
        pd: mlx5dv_obj_pd,
    }
}

// Fields of the firmware's commands: `DEVX_SET` and `DEVX_GET`, by offset instead of name. Offsets count bits from the most
// significant bit of the first big-endian word, as the manual does.

/// Writes the low `width` bits of `value` at bit `offset`.
///
/// # Panics
/// If the field leaves its word of 32 bits, or the command.
pub fn devx_set(command: &mut [u8], offset: usize, width: u32, value: u32) {
    let (word, shift, mask) = field(offset, width);
    let bytes: &mut [u8; 4] = command[word..].first_chunk_mut().expect("a field inside the command");
    let others = u32::from_be_bytes(*bytes) & !(mask << shift);
    *bytes = (others | (value & mask) << shift).to_be_bytes();
}

/// Reads `width` bits at bit `offset`.
///
/// # Panics
/// If the field leaves its word of 32 bits, or the command.
#[must_use]
pub fn devx_get(command: &[u8], offset: usize, width: u32) -> u32 {
    let (word, shift, mask) = field(offset, width);
    let bytes: &[u8; 4] = command[word..].first_chunk().expect("a field inside the command");
    u32::from_be_bytes(*bytes) >> shift & mask
}

/// Writes the 64 bits at bit `offset`.
///
/// # Panics
/// If the field is not aligned, or leaves the command.
pub fn devx_set64(command: &mut [u8], offset: usize, value: u64) {
    assert!(offset.is_multiple_of(64), "a field of 64 bits at bit {offset}");
    let bytes = command[offset / 8..].first_chunk_mut().expect("a field inside the command");
    *bytes = value.to_be_bytes();
}

/// The byte of the field's word, how far it is from the right, and its mask there.
fn field(offset: usize, width: u32) -> (usize, u32, u32) {
    let begin = u32::try_from(offset % 32).unwrap_or_default();
    assert!((1..=32 - begin).contains(&width), "a field of {width} bits at bit {offset}");
    (offset / 32 * 4, 32 - begin - width, u32::MAX >> (32 - width))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_lie_where_the_manual_says() {
        let mut command = [0u8; 16];
        devx_set(&mut command, 0x00, 16, 0x400);
        devx_set(&mut command, 0x2e, 1, 1);
        devx_set(&mut command, 0x28, 6, 0xff);
        devx_set64(&mut command, 0x40, 0x0102_0304_0506_0708);
        assert_eq!(command, [4, 0, 0, 0, 0, 0xfe, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8]);
        assert_eq!(devx_get(&command, 0, 16), 0x400);
        assert_eq!(devx_get(&command, 0x28, 8), 0xfe);
        assert_eq!(devx_get(&command, 0x60, 32), 0x0506_0708);
        // What lies beside a field stays.
        devx_set(&mut command, 0x2c, 2, 0);
        assert_eq!(devx_get(&command, 0x20, 32), 0x00f2_0000);
    }
}
