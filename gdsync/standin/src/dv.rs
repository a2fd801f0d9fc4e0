//! Direct verbs.

use std::ffi::{c_int, c_void};

use rdma_core_sys::mlx5::{
    mlx5dv_ah, mlx5dv_context, mlx5dv_context_attr, mlx5dv_context_attr_flags,
    mlx5dv_context_comp_mask as mask, mlx5dv_context_flags, mlx5dv_cq_init_attr, mlx5dv_obj,
    mlx5dv_obj_type as kind, mlx5dv_pd, mlx5dv_qp_init_attr, mlx5dv_set_ctx_attr_type,
};
use rdma_core_sys::verbs::{
    ibv_context, ibv_cq_ex, ibv_cq_init_attr_ex, ibv_device, ibv_qp, ibv_qp_init_attr_ex,
};

use crate::context::Context;
use crate::cq::Cq;
use crate::domain::Domain;
use crate::errno::complain;
use crate::qp::Qp;
use crate::{cq, devx, domain, errno, hca, qp};

#[unsafe(no_mangle)]
pub(crate) extern "C" fn mlx5dv_is_supported(device: *mut ibv_device) -> bool {
    hca::is_ours(device)
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn mlx5dv_open_device(
    device: *mut ibv_device,
    attr: *mut mlx5dv_context_attr,
) -> *mut ibv_context {
    // SAFETY: the caller vouches for the attributes.
    let wants_devx = !attr.is_null() && unsafe { (*attr).flags } != mlx5dv_context_attr_flags::empty();
    if wants_devx && !devx::is_there() || !hca::is_ours(device) {
        return errno::null(libc::EOPNOTSUPP);
    }
    Context::open(device).unwrap_or_else(errno::null)
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn mlx5dv_query_device(_context: *mut ibv_context, out: &mut mlx5dv_context) -> c_int {
    let known = out.comp_mask.intersection(mask::MLX5DV_CONTEXT_MASK_DYN_BFREGS);
    *out = mlx5dv_context {
        flags: mlx5dv_context_flags::MLX5DV_CONTEXT_FLAGS_CQE_V1,
        comp_mask: known,
        max_dynamic_bfregs: if known.is_empty() { 0 } else { 1024 },
        ..mlx5dv_context::zeroed()
    };
    0
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn mlx5dv_set_context_attr(
    _context: *mut ibv_context,
    _kind: mlx5dv_set_ctx_attr_type,
    _attr: *mut c_void,
) -> c_int {
    complain("mlx5dv_set_context_attr is not part of the stand-in: give a parent domain the allocator");
    libc::EOPNOTSUPP
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn mlx5dv_create_cq(
    context: *mut ibv_context,
    attr: &ibv_cq_init_attr_ex,
    mlx5: Option<&mlx5dv_cq_init_attr>,
) -> *mut ibv_cq_ex {
    // SAFETY: the caller vouches for the arguments.
    errno::hand_out(unsafe { cq::create(context, attr, mlx5) })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn mlx5dv_create_qp(
    context: *mut ibv_context,
    attr: &mut ibv_qp_init_attr_ex,
    mlx5: Option<&mlx5dv_qp_init_attr>,
) -> *mut ibv_qp {
    // SAFETY: the caller vouches for the arguments.
    errno::hand_out(unsafe { qp::create(context, attr, mlx5) })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn mlx5dv_init_obj(obj: &mlx5dv_obj, asked: kind) -> c_int {
    let known = kind::MLX5DV_OBJ_QP | kind::MLX5DV_OBJ_CQ | kind::MLX5DV_OBJ_PD | kind::MLX5DV_OBJ_AH;
    if asked.is_empty() || !known.contains(asked) {
        return libc::EOPNOTSUPP;
    }
    if asked.contains(kind::MLX5DV_OBJ_QP) {
        // SAFETY: the caller vouches for the queue pair.
        let qp = unsafe { Qp::of(obj.qp.r#in) };
        if qp.scatters() {
            complain("the rings of a queue pair that may scatter payload to CQEs are asked for");
            return libc::EINVAL;
        }
        // SAFETY: the caller vouches for the place, whose mask says what is asked for.
        let besides = unsafe { (*obj.qp.out).comp_mask };
        // SAFETY: as above.
        unsafe { obj.qp.out.write(qp.describe(besides)) };
    }
    if asked.contains(kind::MLX5DV_OBJ_CQ) {
        // SAFETY: the caller vouches for the queue.
        let cq = unsafe { Cq::of(obj.cq.r#in) };
        // SAFETY: the caller vouches for the place.
        unsafe { obj.cq.out.write(cq.describe()) };
    }
    if asked.contains(kind::MLX5DV_OBJ_PD) {
        // SAFETY: the caller vouches for the domain.
        let pdn = unsafe { Domain::of(obj.pd.r#in) }.pdn();
        // SAFETY: the caller vouches for the place.
        unsafe { obj.pd.out.write(mlx5dv_pd { pdn, comp_mask: 0 }) };
    }
    if asked.contains(kind::MLX5DV_OBJ_AH) {
        // SAFETY: the caller vouches for the handle.
        let av = unsafe { domain::vector(obj.ah.r#in) };
        // SAFETY: the caller vouches for the place.
        unsafe { obj.ah.out.write(mlx5dv_ah { av, comp_mask: 0 }) };
    }
    0
}
