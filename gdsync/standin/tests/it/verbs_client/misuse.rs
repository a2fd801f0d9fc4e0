//! What kernel, provider or card would punish is refused.

use std::ffi::c_void;
use std::time::Instant;

use gdsync::memory::Memory;
use gdsync::mlx5::{CqeOpcode, Payload, SendOp, Syndrome};
use rdma_core_sys::mlx5::*;
use rdma_core_sys::verbs::*;

use super::client::{
    Bed, Buffer, Conduct, PATIENCE, Queue, Step, all_access, errno, pair, to, to_init, to_rtr, to_rts,
};
use crate::child::is_own_process;
use crate::setup::complaints;

#[test]
fn allocator_that_fails_or_cheats_is_found_out() {
    if !is_own_process() {
        return;
    }
    let bed = Bed::new();
    let (cq, record) = (bed.create_cq(7).unwrap(), libc::EINVAL);
    for (conduct, expected) in [
        (Conduct::Empty, libc::ENOMEM),
        (Conduct::Askew, record),
        (Conduct::Nowhere, libc::EFAULT),
        (Conduct::ReadOnly, libc::EFAULT),
        (Conduct::Dirty, libc::EINVAL),
    ] {
        *bed.arena.conduct.lock() = conduct;
        assert_eq!(bed.create_qp(&mut bed.qp_attr(cq, cq)).err(), Some(expected), "{conduct:?}");
        // The provider writes all of a completion queue that counts.
        let expected = (conduct != Conduct::Dirty).then_some(expected);
        let made = bed.create_cq(7);
        assert_eq!(made.err(), expected, "{conduct:?}");
        if let Ok(cq) = made {
            // SAFETY: nothing uses it.
            assert_eq!(unsafe { bed.lib.verbs.ibv_destroy_cq(cq) }, 0);
        }
    }
    let told = complaints();
    assert!(
        told.contains("is not aligned to") && told.contains("is not zero: rdma-core does not clear it"),
        "{told}"
    );
    // SAFETY: nothing uses it.
    assert_eq!(unsafe { bed.lib.verbs.ibv_destroy_cq(cq) }, 0);
    bed.close();
}

#[test]
fn queues_are_only_made_as_they_can_be() {
    if !is_own_process() {
        return;
    }
    let bed = Bed::new();
    for cqe in [0, 1 << 22, u32::MAX] {
        assert_eq!(bed.create_cq(cqe).err(), Some(libc::EINVAL), "{cqe}");
    }
    let mut attr = ibv_cq_init_attr_ex {
        cqe: 7,
        comp_mask: ibv_cq_init_attr_mask::IBV_CQ_INIT_ATTR_MASK_PD,
        parent_domain: bed.pd,
        ..ibv_cq_init_attr_ex::zeroed()
    };
    // SAFETY: the attributes name live objects.
    assert!(unsafe { ibv_create_cq_ex(bed.context, &raw mut attr) }.is_null());
    assert_eq!(errno(), libc::EINVAL, "a plain domain is no parent domain");

    let cq = bed.create_cq(7).unwrap();
    type Change = fn(&mut ibv_qp_init_attr_ex);
    let changes: [(Change, i32); 5] = [
        (|attr| attr.cap.max_send_wr = 1 << 20, libc::EINVAL),
        (|attr| attr.cap.max_send_sge = 100, libc::EINVAL),
        (|attr| attr.cap.max_recv_wr = 40_000, libc::EINVAL),
        (|attr| attr.send_cq = std::ptr::null_mut(), libc::EINVAL),
        (|attr| attr.qp_type = ibv_qp_type::IBV_QPT_UD, libc::EOPNOTSUPP),
    ];
    for (n, (change, expected)) in changes.into_iter().enumerate() {
        let mut attr = bed.qp_attr(cq, cq);
        change(&mut attr);
        assert_eq!(bed.create_qp(&mut attr).err(), Some(expected), "change {n}");
    }
    // SAFETY: nothing uses it.
    assert_eq!(unsafe { bed.lib.verbs.ibv_destroy_cq(cq) }, 0);
    bed.close();
}

#[test]
fn scatter_to_cqe_must_be_off() {
    if !is_own_process() {
        return;
    }
    let bed = Bed::new();
    let cq = bed.create_cq(7).unwrap();
    let mut attr = bed.qp_attr(cq, cq);
    let mut mlx5 = mlx5dv_qp_init_attr::zeroed();
    // SAFETY: the attributes name live objects.
    let qp = unsafe { bed.lib.mlx5.mlx5dv_create_qp(bed.context, &raw mut attr, &raw mut mlx5) };
    assert!(qp.is_null());
    assert_eq!(errno(), libc::ENOTSUP);
    assert!(complaints().contains("MLX5DV_QP_CREATE_DISABLE_SCATTER_TO_CQE"));
    // SAFETY: nothing uses it.
    assert_eq!(unsafe { bed.lib.verbs.ibv_destroy_cq(cq) }, 0);
    bed.close();
}

#[test]
fn steps_need_their_attributes_in_their_ranges() {
    if !is_own_process() {
        return;
    }
    let bed = Bed::new();
    let queue = Queue::new(&bed);
    let gid = bed.gid(1).gid;
    let refused = |(mut attr, mask): Step, what: &str| {
        assert_eq!(queue.modify(&bed, &mut attr, mask), libc::EINVAL, "{what}");
    };
    let with = |(mut attr, mask): Step, change: fn(&mut ibv_qp_attr)| {
        change(&mut attr);
        (attr, mask)
    };
    let without = |(attr, mask): Step, bit: ibv_qp_attr_mask| (attr, mask - bit);

    refused(to_rtr(gid, 1), "RTR from RESET");
    refused(to_rts(), "RTS from RESET");
    refused(without(to_init(), ibv_qp_attr_mask::IBV_QP_PORT), "no port");
    refused(with(to_init(), |attr| attr.port_num = 2), "port 2");
    refused(with(to_init(), |attr| attr.pkey_index = 1), "P_Key 1");
    queue.step(&bed, to_init());

    refused(to_rts(), "RTS from INIT");
    for bit in to_rtr(gid, 1).1 - ibv_qp_attr_mask::IBV_QP_STATE {
        refused(without(to_rtr(gid, 1), bit), "an attribute of RTR is missing");
    }
    refused(with(to_rtr(gid, 1), |attr| attr.ah_attr.is_global = 0), "no global address");
    refused(with(to_rtr(gid, 1), |attr| attr.ah_attr.port_num = 0), "no port in the address");
    refused(with(to_rtr(gid, 1), |attr| attr.ah_attr.grh.sgid_index = 0), "the GID of RoCE v1");
    refused(with(to_rtr(gid, 1), |attr| attr.ah_attr.grh.sgid_index = 7), "an unused GID");
    refused(with(to_rtr(gid, 1), |attr| attr.path_mtu = ibv_mtu::IBV_MTU_4096), "an MTU beyond the port's");
    refused(with(to_rtr(gid, 1), |attr| attr.path_mtu = ibv_mtu(0)), "no MTU");
    refused(with(to_rtr(gid, 1), |attr| attr.max_dest_rd_atomic = 17), "17 READs");
    queue.step(&bed, to_rtr(gid, 1));

    for bit in to_rts().1 - ibv_qp_attr_mask::IBV_QP_STATE {
        refused(without(to_rts(), bit), "an attribute of RTS is missing");
    }
    refused(with(to_rts(), |attr| attr.retry_cnt = 8), "8 retries");
    refused(with(to_rts(), |attr| attr.timeout = 32), "timeout 32");
    queue.step(&bed, to_rts());
    refused(to_init(), "INIT from RTS");

    queue.step(&bed, to(ibv_qp_state::IBV_QPS_ERR));
    refused(to_rts(), "RTS from ERR");
    queue.step(&bed, to(ibv_qp_state::IBV_QPS_RESET));
    queue.destroy(&bed);
    bed.close();
}

#[test]
fn cqes_as_rdma_core_leaves_them_would_release_a_stream_at_once() {
    if !is_own_process() {
        return;
    }
    let bed = Bed::new();
    let queue = Queue::new(&bed);
    queue.send_cq.ring.write(63, &[0xf0]).unwrap();
    let (mut attr, mask) = to_init();
    assert_eq!(queue.modify(&bed, &mut attr, mask), libc::EINVAL);
    assert!(complaints().contains("0xf0 in slot 0"));
    queue.destroy(&bed);
    bed.close();
}

#[test]
fn memory_must_be_there_and_rights_make_sense() {
    if !is_own_process() {
        return;
    }
    let bed = Bed::new();
    let memory = Memory::alloc(4096).unwrap();
    let write = ibv_access_flags::IBV_ACCESS_REMOTE_WRITE;
    assert_eq!(bed.register(&memory, write).err(), Some(libc::EINVAL), "peers write where this side may not");
    // SAFETY: nothing is there, and so it is refused.
    let mr = unsafe { bed.lib.verbs.reg_mr(bed.pd, 4096 as *mut c_void, 4096, all_access()) };
    assert!(mr.is_null());
    assert_eq!(errno(), libc::EFAULT);
    // SAFETY: as above.
    let mr = unsafe { bed.lib.verbs.reg_mr(bed.pd, memory.addr() as *mut c_void, 0, all_access()) };
    assert!(mr.is_null());
    assert_eq!(errno(), libc::EINVAL);
    // Optional rights may be ignored.
    let relaxed = all_access() | ibv_access_flags::IBV_ACCESS_RELAXED_ORDERING;
    bed.deregister(bed.register(&memory, relaxed).unwrap());
    bed.close();
}

#[test]
fn what_is_in_use_stays() {
    if !is_own_process() {
        return;
    }
    let bed = Bed::new();
    let queue = Queue::new(&bed);
    let buffer = Buffer::new(&bed, 4096);
    let verbs = &bed.lib.verbs;
    // SAFETY: they are in use, and so they stay.
    assert_eq!(unsafe { verbs.ibv_destroy_cq(queue.send_cq.raw) }, libc::EBUSY);
    // SAFETY: as above.
    assert_eq!(unsafe { verbs.ibv_dealloc_pd(bed.domain) }, libc::EBUSY);
    // SAFETY: as above.
    assert_eq!(unsafe { verbs.ibv_dealloc_pd(bed.pd) }, libc::EBUSY);
    // SAFETY: as above.
    assert_eq!(unsafe { ibv_dealloc_td(bed.td) }, libc::EBUSY);
    queue.destroy(&bed);
    bed.deregister(buffer.mr);
    bed.close();
}

#[test]
fn memory_that_is_not_registered_is_not_touched() {
    if !is_own_process() {
        return;
    }
    let bed = Bed::new();
    let (mut a, mut b) = pair(&bed);
    let buffer = Buffer::new(&bed, 64);
    let outside = buffer.sge(60, 8);
    b.post_recv(&[buffer.sge(0, 8)]);
    a.post(&SendOp::Send { payload: Payload::Sges(&[outside]), imm: None });
    let failed = a.send_cq.wait();
    assert_eq!((failed.opcode, failed.syndrome), (CqeOpcode::REQ_ERR, Syndrome::LOC_PROT_ERR));
    let mut attr = ibv_qp_attr::zeroed();
    let mut init = ibv_qp_init_attr::zeroed();
    // SAFETY: the queue pair lives.
    let result = unsafe {
        bed.lib.verbs.ibv_query_qp(a.raw, &raw mut attr, ibv_qp_attr_mask::IBV_QP_STATE, &raw mut init)
    };
    assert_eq!((result, attr.qp_state), (0, ibv_qp_state::IBV_QPS_ERR));
    assert_eq!(init.cap.max_send_wr, 16);
    bed.deregister(buffer.mr);
    a.destroy(&bed);
    b.destroy(&bed);
    bed.close();
}

#[test]
fn doorbell_before_its_record_is_an_error() {
    if !is_own_process() {
        return;
    }
    let bed = Bed::new();
    let (mut a, b) = pair(&bed);
    let doorbell = a.write(&SendOp::Nop);
    a.ring(doorbell);
    let end = Instant::now() + PATIENCE;
    while !complaints().contains("before its doorbell record") {
        assert!(Instant::now() < end, "nobody complained");
        std::thread::yield_now();
    }
    assert_eq!(a.send_cq.poll(), None);
    a.destroy(&bed);
    b.destroy(&bed);
    bed.close();
}

#[test]
fn key_is_dead_after_its_region() {
    if !is_own_process() {
        return;
    }
    let bed = Bed::new();
    let (mut a, b) = pair(&bed);
    let (buffer, gone) = (Buffer::new(&bed, 64), Buffer::new(&bed, 64));
    let remote = gone.remote(0);
    bed.deregister(gone.mr);
    a.post(&SendOp::Write { remote, payload: Payload::Sges(&[buffer.sge(0, 8)]), imm: None });
    assert_eq!(a.send_cq.wait().syndrome, Syndrome::REM_ACCESS_ERR);
    a.destroy(&bed);
    b.destroy(&bed);
    bed.deregister(buffer.mr);
    bed.close();
}
