//! What a client sends arrives.

use gdsync::mlx5::{CqeOpcode, Opcode, Payload, SendOp};
use rdma_core_sys::mlx5::*;
use rdma_core_sys::verbs::*;

use crate::arena::Conduct;
use crate::client::{Bed, Buffer, Queue, pair};
use crate::steps::to;

#[test]
fn every_operation_arrives() {
    let bed = Bed::new();
    let (mut a, mut b) = pair(&bed);
    let buffer = Buffer::new(&bed, 4096);
    let memory = &buffer.memory;

    memory.write(0, b"a send").unwrap();
    b.post_recv(&[buffer.sge(1024, 64)]);
    a.post(&SendOp::Send { payload: Payload::Sges(&[buffer.sge(0, 6)]), imm: Some(77) });
    let sent = a.send_cq.wait();
    assert_eq!(
        (sent.opcode, sent.qpn, sent.wqe_counter, sent.send_opcode),
        (CqeOpcode::REQ, a.qpn, 0, Opcode::SEND_IMM)
    );
    let received = b.recv_cq.wait();
    assert_eq!(
        (received.opcode, received.qpn, received.byte_cnt, received.imm),
        (CqeOpcode::RESP_SEND_IMM, b.qpn, 6, 77)
    );
    assert_eq!(&memory.to_vec()[1024..1030], b"a send");

    memory.write(0, b"a write").unwrap();
    a.post(&SendOp::Write {
        remote: buffer.remote(2048),
        payload: Payload::Sges(&[buffer.sge(0, 7)]),
        imm: None,
    });
    assert_eq!(a.send_cq.wait().send_opcode, Opcode::RDMA_WRITE);
    assert_eq!(&memory.to_vec()[2048..2055], b"a write");

    a.post(&SendOp::Read { remote: buffer.remote(2048), sges: &[buffer.sge(3000, 7)] });
    assert_eq!(a.send_cq.wait().byte_cnt, 7);
    assert_eq!(&memory.to_vec()[3000..3007], b"a write");

    memory.word64(512).unwrap().store(40);
    a.post(&SendOp::FetchAdd { remote: buffer.remote(512), add: 2, result: buffer.sge(520, 8) });
    a.send_cq.wait();
    assert_eq!((memory.word64(512).unwrap().load(), memory.word64(520).unwrap().load()), (42, 40));

    // Both directions.
    a.post_recv(&[buffer.sge(1024, 64)]);
    b.post(&SendOp::Send { payload: Payload::Inline(b"back"), imm: None });
    assert_eq!(a.recv_cq.wait().byte_cnt, 4);
    assert_eq!(b.send_cq.wait().opcode, CqeOpcode::REQ);

    a.destroy(&bed);
    b.destroy(&bed);
    bed.deregister(buffer.mr);
    bed.close();
}

#[test]
fn rings_go_round_many_times() {
    let bed = Bed::new();
    let (mut a, mut b) = pair(&bed);
    let buffer = Buffer::new(&bed, 4096);
    let (counter, copy) = (buffer.memory.word64(0).unwrap(), buffer.memory.word64(8).unwrap());
    for round in 0..2000u64 {
        counter.store(round);
        b.post_recv(&[buffer.sge(8, 8)]);
        a.post(&SendOp::Send { payload: Payload::Sges(&[buffer.sge(0, 8)]), imm: None });
        assert_eq!(b.recv_cq.wait().byte_cnt, 8);
        assert_eq!(copy.load(), round);
        assert_eq!(u64::from(a.send_cq.wait().wqe_counter), round);
    }
    a.destroy(&bed);
    b.destroy(&bed);
    bed.deregister(buffer.mr);
    bed.close();
}

#[test]
fn a_queue_pair_is_reset_and_used_again() {
    let bed = Bed::new();
    let (mut a, mut b) = pair(&bed);
    let buffer = Buffer::new(&bed, 4096);
    for _ in 0..3 {
        b.post_recv(&[buffer.sge(8, 8)]);
        a.post(&SendOp::Send { payload: Payload::Sges(&[buffer.sge(0, 8)]), imm: None });
        a.send_cq.wait();
        b.recv_cq.wait();
        for queue in [&mut a, &mut b] {
            queue.step(&bed, to(ibv_qp_state::IBV_QPS_ERR));
            queue.step(&bed, to(ibv_qp_state::IBV_QPS_RESET));
            (queue.head, queue.received) = (0, 0);
        }
        a.connect(&bed, bed.gid(1).gid, b.qpn);
        b.connect(&bed, bed.gid(1).gid, a.qpn);
    }
    a.destroy(&bed);
    b.destroy(&bed);
    bed.deregister(buffer.mr);
    bed.close();
}

#[test]
fn memory_is_asked_for_as_rdma_core_asks() {
    let bed = Bed::new();
    let queue = Queue::new(&bed);
    let cq = [(4096, 4096, MLX5DV_RES_TYPE_CQ), (8, 8, MLX5DV_RES_TYPE_DBR)];
    // 16 receives of 16 bytes, 16 sends of one block: 1280 bytes in one piece.
    let qp = [(1280, 64, MLX5DV_RES_TYPE_QP), (8, 8, MLX5DV_RES_TYPE_DBR)];
    assert_eq!(*bed.arena.requests.lock(), [cq, cq, qp].concat());
    let described = queue.described;
    assert_eq!((described.rq.wqe_cnt, described.rq.stride), (16, 16));
    assert_eq!((described.sq.wqe_cnt, described.sq.stride), (16, 64));
    assert_eq!(described.sq.buf.addr() - described.rq.buf.addr(), 256, "receives first");
    assert_eq!(described.bf.reg.addr() % 4096, 0x800);
    // SAFETY: the queue lives.
    assert_eq!(unsafe { (*queue.send_cq.raw).cqe }, 63);

    queue.destroy(&bed);
    let pair = [MLX5DV_RES_TYPE_DBR, MLX5DV_RES_TYPE_CQ];
    let expected = [[MLX5DV_RES_TYPE_DBR, MLX5DV_RES_TYPE_QP], pair, pair].concat();
    assert_eq!(*bed.arena.returned.lock(), expected, "records come back first");
    bed.close();
}

#[test]
fn the_library_allocates_where_the_client_declines() {
    let bed = Bed::new();
    *bed.arena.conduct.lock() = Conduct::Declines;
    let (mut a, mut b) = pair(&bed);
    let buffer = Buffer::new(&bed, 4096);
    b.post_recv(&[buffer.sge(8, 8)]);
    a.post(&SendOp::Send { payload: Payload::Sges(&[buffer.sge(0, 8)]), imm: None });
    assert_eq!(b.recv_cq.wait().byte_cnt, 8);
    a.destroy(&bed);
    b.destroy(&bed);
    assert!(bed.arena.returned.lock().is_empty(), "nothing was lent");
    bed.deregister(buffer.mr);
    bed.close();
}

#[test]
fn fresh_cqes_are_as_rdma_core_leaves_them() {
    let bed = Bed::new();
    let cq = bed.create_cq(100).unwrap();
    let described = bed.describe_cq(cq);
    assert_eq!(described.cqe_cnt, 128);
    for n in 0..128 {
        let last = described.buf.cast::<u8>().wrapping_add(n * 64 + 63);
        // SAFETY: the ring has 128 entries.
        assert_eq!(unsafe { last.read() }, 0xf0);
    }
    // SAFETY: nothing uses it.
    assert_eq!(unsafe { bed.lib.verbs.ibv_destroy_cq(cq) }, 0);
    bed.close();
}

#[test]
fn the_port_is_one_of_roce() {
    let bed = Bed::new();
    let mut port = ibv_port_attr::zeroed();
    // SAFETY: the context is open.
    assert_eq!(unsafe { bed.lib.verbs.query_port(bed.context, 1, &mut port) }, 0);
    assert_eq!(
        (port.state, port.link_layer),
        (ibv_port_state::IBV_PORT_ACTIVE, ibv_link_layer::IBV_LINK_LAYER_ETHERNET)
    );
    // SAFETY: as above.
    assert_eq!(unsafe { bed.lib.verbs.query_port(bed.context, 2, &mut port) }, libc::EINVAL);
    let mut table = [ibv_gid_entry::zeroed(); 8];
    // SAFETY: as above.
    assert_eq!(unsafe { bed.lib.verbs.query_gid_table(bed.context, &mut table) }.unwrap(), 2);
    assert_eq!(table[0].gid_type, ibv_gid_type::IBV_GID_TYPE_ROCE_V1);
    assert_eq!((table[1].gid_type, table[1].gid_index), (ibv_gid_type::IBV_GID_TYPE_ROCE_V2, 1));
    let mut device = ibv_device_attr_ex::zeroed();
    // SAFETY: as above.
    assert_eq!(unsafe { bed.lib.verbs.query_device_ex(bed.context, &mut device) }, 0);
    assert_eq!((device.orig_attr.phys_port_cnt, device.orig_attr.max_qp_rd_atom), (1, 16));
    bed.close();
}
