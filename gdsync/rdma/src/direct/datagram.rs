//! Addresses for datagrams.

use std::ptr::NonNull;
use std::sync::Arc;

use mlx5_ring::AddressVector;
use rdma_core_sys::Mlx5;
use rdma_core_sys::mlx5::{mlx5_wqe_av, mlx5dv_ah, mlx5dv_obj, mlx5dv_obj_type};
use rdma_core_sys::verbs::ibv_ah;

use crate::Domain;
use crate::explain::{Call, failed, failed_last};
use gdsync_device::QpAddress;
use gdsync_device::error::Result;

/// The address of queue pair `qpn`, which has this Q_Key, behind an address handle.
///
/// # Errors
/// [`Error::Library`](gdsync_device::Error::Library) without libmlx5; [`Error::Verbs`](gdsync_device::Error::Verbs) if it does not
/// know the handle.
///
/// # Safety
/// The handle must be one of a device of libmlx5, and stay during the call.
pub unsafe fn address_vector(ah: NonNull<ibv_ah>, qpn: u32, qkey: u32) -> Result<AddressVector> {
    let mut out = mlx5dv_ah::zeroed();
    let mut object = mlx5dv_obj::zeroed();
    object.ah.r#in = ah.as_ptr();
    object.ah.out = &raw mut out;
    // SAFETY: the object and the output match the object type.
    let errno = unsafe { Mlx5::load()?.mlx5dv_init_obj(&mut object, mlx5dv_obj_type::MLX5DV_OBJ_AH) };
    if errno != 0 {
        return Err(failed("mlx5dv_init_obj", "an address handle", &Call::Other, errno));
    }
    // SAFETY: part of the handle.
    let mlx5_wqe_av { stat_rate_sl, fl_mlid, rlid, rmac, tclass, hop_limit, grh_gid_fl, rgid, .. } =
        unsafe { *out.av };
    let grh = u32::from_be(grh_gid_fl);
    let [sgid_index, ..] = (grh << 4).to_be_bytes();
    Ok(AddressVector {
        qkey,
        qpn,
        sl: stat_rate_sl & 0xf,
        static_rate: stat_rate_sl >> 4,
        src_path_bits: fl_mlid & 0x7f,
        rlid: u16::from_be(rlid),
        rmac,
        tclass,
        hop_limit,
        has_grh: grh >> 30 & 1 == 1,
        sgid_index,
        flow_label: grh & 0xf_ffff,
        rgid,
    })
}

/// The address of a peer, for datagrams of this domain.
pub(super) fn address(domain: &Arc<Domain>, to: &QpAddress, qkey: u32) -> Result<AddressVector> {
    let open = domain.open();
    let mut route = open.route(to)?;
    // SAFETY: the domain is allocated and the attributes are initialized.
    let ah = unsafe { open.verbs().ibv_create_ah(domain.raw().as_ptr(), &raw mut route) };
    let ah = NonNull::new(ah).ok_or_else(|| failed_last("ibv_create_ah", open.name(), &Call::Other))?;
    // SAFETY: just created.
    let vector = unsafe { address_vector(ah, to.qpn, qkey) };
    // SAFETY: created here, destroyed only here: requests hold the whole address.
    let errno = unsafe { open.verbs().ibv_destroy_ah(ah.as_ptr()) };
    if errno != 0 {
        tracing::error!(device = open.name(), errno, "an address handle was not destroyed");
    }
    vector
}
