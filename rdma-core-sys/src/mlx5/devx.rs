//! DevX: commands to the firmware, and memory and registers for objects made so.

use std::ffi::{c_int, c_void};

use libc::off_t;

use crate::abi::{enumerations, flag_sets, records};
use crate::verbs::ibv_access_flags;

/// `struct mlx5dv_devx_obj`: an object that [`Mlx5::mlx5dv_devx_obj_create`](super::Mlx5::mlx5dv_devx_obj_create) made.
#[repr(C)]
#[derive(Debug)]
pub struct mlx5dv_devx_obj {
    opaque: [u8; 0],
}

enumerations! {
    ENUMERATIONS;

    /// The kind of a doorbell page, `enum mlx5_ib_uapi_uar_alloc_type`.
    enum mlx5dv_uar_alloc_type: u32 {
        MLX5DV_UAR_ALLOC_TYPE_BF = 0,
        MLX5DV_UAR_ALLOC_TYPE_NC = 1,
        MLX5DV_UAR_ALLOC_TYPE_NC_DEDICATED = 1 << 31,
    }

    /// `enum mlx5dv_devx_create_event_channel_flags`
    enum mlx5dv_devx_create_event_channel_flags: u32 {
        MLX5DV_DEVX_CREATE_EVENT_CHANNEL_FLAGS_OMIT_EV_DATA = 1,
    }
}

flag_sets! {
    FLAGS;

    /// `enum mlx5dv_devx_umem_in_mask`
    flags mlx5dv_devx_umem_in_mask: u64 {
        MLX5DV_UMEM_MASK_DMABUF = 1 << 0,
    }

    /// Access of [`Mlx5::mlx5dv_reg_dmabuf_mr`](super::Mlx5::mlx5dv_reg_dmabuf_mr),
    /// `enum mlx5_ib_uapi_reg_dmabuf_flags`.
    flags mlx5dv_reg_dmabuf_access: u32 {
        MLX5DV_REG_DMABUF_ACCESS_DATA_DIRECT = 1 << 0,
    }
}

records! {
    RECORDS;

    /// `struct mlx5dv_devx_umem`: memory that the device may name.
    struct mlx5dv_devx_umem grows {
        umem_id: u32,
    }

    /// `struct mlx5dv_devx_umem_in`
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

    /// `struct mlx5dv_devx_uar`: a page of doorbells.
    struct mlx5dv_devx_uar grows {
        /// The register.
        reg_addr: *mut c_void,
        /// The page.
        base_addr: *mut c_void,
        page_id: u32,
        mmap_off: off_t,
        comp_mask: u64,
    }

    /// `struct mlx5dv_devx_event_channel`
    struct mlx5dv_devx_event_channel grows {
        fd: c_int,
    }

    /// `struct mlx5dv_devx_async_event_hdr`: the event's bytes follow.
    struct mlx5dv_devx_async_event_hdr {
        cookie: u64,
    }
}
