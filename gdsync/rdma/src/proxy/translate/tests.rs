//! Encoded WQEs and the resulting device requests agree.

use proptest::prelude::*;

use self::strategies::{Plain, legal};
use super::*;
use gdsync_device::engine::Rings;
use gdsync_device::memory::Memory;
use gdsync_device::{HcaStats, Places, QpRequest};
use mlx5_ring::*;

#[path = "../../../../mlx5-ring/src/strategies.rs"]
mod strategies;

const QPN: u32 = 0x1234;
/// Log of the ring's blocks; the longest WQE has 16.
const LOG: u32 = 5;

fn rings() -> Rings {
    let request = QpRequest {
        pdn: 1,
        send_cqn: 1,
        recv_cqn: 2,
        log_sq: LOG,
        log_rq: 2,
        rq_stride: 64,
        max_send_sge: 1,
        max_inline: 64,
        qkey: None,
    };
    Rings::alloc(QPN, &request, &Places::default()).unwrap().0
}

/// Writes an operation's WQE to the ring at block `at` and fetches it as the proxy does.
fn through_the_ring(rings: &Rings, plain: &Plain, at: u64, flags: WqeFlags) -> (Wqe, DecodedOp) {
    let index = mlx5_ring::low16(at);
    let wqe = encode(&plain.op(), QPN, index, flags).unwrap();
    for (block, bytes) in (at..).zip(wqe.as_bytes().chunks(BB)) {
        rings.sq.write(rings.offset(block), bytes).unwrap();
    }
    let wqe = rings.fetch(at);
    let op = rings.inspect(&wqe, at, true, &mut HcaStats::default()).unwrap();
    (wqe, op)
}

fn bytes_at(addr: u64, len: u32) -> Vec<u8> {
    // SAFETY: inline buffers lie in a WQE or ring that outlives this call.
    let memory = unsafe { Memory::from_raw(addr as *mut u8, len as usize) };
    memory.unwrap().to_vec()
}

/// The operation of a request.
fn plain_of(wr: &ibv_send_wr) -> Plain {
    let list: Vec<ibv_sge> = (0..usize::try_from(wr.num_sge).unwrap())
        .map(|i| {
            let at = wr.sg_list.wrapping_add(i);
            // SAFETY: the list has `num_sge` entries.
            unsafe { *at }
        })
        .collect();
    let is_inline = wr.send_flags.contains(ibv_send_flags::IBV_SEND_INLINE);
    let inline: Vec<u8> =
        list.iter().filter(|_| is_inline).flat_map(|sge| bytes_at(sge.addr, sge.length)).collect();
    let seg = |sge: &ibv_sge| DataSeg { addr: sge.addr, len: sge.length, lkey: sge.lkey };
    let sges: Vec<_> = list.iter().filter(|_| !is_inline).map(seg).collect();
    let number = u32::from_be(wr.imm_data);
    let (opcode, imm, words) = match wr.opcode {
        ibv_wr_opcode::IBV_WR_SEND => (Opcode::SEND, None, 0),
        ibv_wr_opcode::IBV_WR_SEND_WITH_IMM => (Opcode::SEND_IMM, Some(number), 0),
        ibv_wr_opcode::IBV_WR_RDMA_WRITE => (Opcode::RDMA_WRITE, None, 1),
        ibv_wr_opcode::IBV_WR_RDMA_WRITE_WITH_IMM => (Opcode::RDMA_WRITE_IMM, Some(number), 1),
        ibv_wr_opcode::IBV_WR_RDMA_READ => (Opcode::RDMA_READ, None, 1),
        ibv_wr_opcode::IBV_WR_ATOMIC_CMP_AND_SWP => (Opcode::ATOMIC_CS, None, 2),
        ibv_wr_opcode::IBV_WR_ATOMIC_FETCH_AND_ADD => (Opcode::ATOMIC_FA, None, 2),
        other => panic!("{other:?}"),
    };
    let (mut remote, mut operands) = (RemoteAddr::default(), [0; 2]);
    if words == 1 {
        // SAFETY: writes and reads use this union member.
        let rdma = unsafe { wr.wr.rdma };
        remote = RemoteAddr { addr: rdma.remote_addr, rkey: rdma.rkey };
    } else if words == 2 {
        // SAFETY: atomics use this union member.
        let atomic = unsafe { wr.wr.atomic };
        remote = RemoteAddr { addr: atomic.remote_addr, rkey: atomic.rkey };
        operands = match opcode {
            Opcode::ATOMIC_CS => [atomic.swap, atomic.compare_add],
            _ => [atomic.compare_add, atomic.swap],
        };
    }
    Plain { opcode, remote, sges, inline, imm, operands }
}

proptest! {
    #[test]
    fn translated_wqe_is_the_same_operation(
        plain in legal(),
        at in 0u64..1 << 17,
        (fence, solicited) in any::<(bool, bool)>(),
    ) {
        let rings = rings();
        let (wqe, op) = through_the_ring(&rings, &plain, at, WqeFlags { fence, solicited });
        let request = Request::of(&op, &wqe, Inline::Now);
        prop_assert_eq!(request.is_none(), plain.opcode == Opcode::NOP);
        let Some(mut request) = request else { return Ok(()) };
        let wr = request.as_send_wr(77);
        let mut expected = plain;
        expected.sges.retain(|sge| sge.len > 0);
        prop_assert_eq!(plain_of(&wr), expected);
        let flag = |flag| wr.send_flags.contains(flag);
        prop_assert_eq!(wr.wr_id, 77);
        prop_assert!(flag(ibv_send_flags::IBV_SEND_SIGNALED) && wr.next.is_null());
        prop_assert_eq!(flag(ibv_send_flags::IBV_SEND_FENCE), fence);
        prop_assert_eq!(flag(ibv_send_flags::IBV_SEND_SOLICITED), solicited);
    }

    #[test]
    fn inline_bytes_can_be_read_from_the_ring(bytes in prop::collection::vec(any::<u8>(), 1..900), at in 0u64..64) {
        let rings = rings();
        let plain = Plain { opcode: Opcode::SEND, inline: bytes.clone(), ..Plain::default() };
        let (wqe, op) = through_the_ring(&rings, &plain, at, WqeFlags::default());
        let buffers = in_ring(&rings, at, inline_bytes(&op).unwrap(), 5);
        prop_assert!(buffers.iter().all(|sge| sge.lkey == 5) && buffers.len() <= 2);
        let there: Vec<u8> = buffers.iter().flat_map(|sge| bytes_at(sge.addr, sge.length)).collect();
        prop_assert_eq!(there, bytes);
        let mut request = Request::of(&op, &wqe, Inline::Later(buffers.clone())).unwrap();
        let wr = request.as_send_wr(0);
        prop_assert!(!wr.send_flags.contains(ibv_send_flags::IBV_SEND_INLINE));
        prop_assert_eq!(usize::try_from(wr.num_sge).unwrap(), buffers.len());
    }
}

proptest! {
    #[test]
    fn tag_round_trip(
        index in 0usize..1 << 14, generation: u16, is_receive: bool, number: u32,
    ) {
        let tag = Tag { index, generation, is_receive, number };
        prop_assert_eq!(Tag::from_wr_id(tag.to_wr_id()), tag);
    }
}

fn wc(status: ibv_wc_status) -> ibv_wc {
    ibv_wc { status, ..ibv_wc::zeroed() }
}

#[test]
fn statuses_map_to_syndromes_by_name() {
    let mut named = 0;
    for value in 1..=23 {
        let status = ibv_wc_status(value);
        let Err(Failure { syndrome, .. }) = outcome(&wc(status)) else { panic!("{status:?} is an error") };
        let name = status.name().unwrap().strip_prefix("IBV_WC_").unwrap();
        if syndrome.name() == Some(name) {
            named += 1;
            assert!(!is_unnamed(&wc(status)));
        } else {
            let known = matches!(name, "REM_INV_RD_REQ_ERR" | "RESP_TIMEOUT_ERR");
            assert_eq!(known, !is_unnamed(&wc(status)), "{name}");
            assert!(known || syndrome == Syndrome::LOC_QP_OP_ERR, "{name}: {syndrome}");
        }
    }
    assert_eq!(named, 13, "cards have 13 syndromes");
    assert_eq!(outcome(&wc(ibv_wc_status::IBV_WC_SUCCESS)), Ok(()));
    assert!(outcome(&wc(ibv_wc_status(99))).is_err());
}

#[test]
fn vendor_codes_are_truncated() {
    let vendor = |vendor_err| {
        let wc = ibv_wc { vendor_err, ..wc(ibv_wc_status::IBV_WC_REM_ACCESS_ERR) };
        outcome(&wc).unwrap_err().vendor
    };
    assert_eq!([0, 0x88, 0x1234].map(vendor), [0, 0x88, 0xff]);
}

#[test]
fn receive_cqes_match_the_send() {
    let imm = 0x0102_0304_u32;
    let with = |opcode, wc_flags| ibv_wc {
        opcode,
        wc_flags,
        byte_len: 7,
        imm_data: imm.to_be(),
        ..wc(ibv_wc_status::IBV_WC_SUCCESS)
    };
    let (none, imm_flag) = (ibv_wc_flags::empty(), ibv_wc_flags::IBV_WC_WITH_IMM);
    for (wc, opcode, expected) in [
        (with(ibv_wc_opcode::IBV_WC_RECV, none), CqeOpcode::RESP_SEND, 0),
        (with(ibv_wc_opcode::IBV_WC_RECV, imm_flag), CqeOpcode::RESP_SEND_IMM, imm),
        (with(ibv_wc_opcode::IBV_WC_RECV_RDMA_WITH_IMM, imm_flag), CqeOpcode::RESP_WR_IMM, imm),
    ] {
        let cqe = Cqe::decode(&received(&wc).encode());
        assert_eq!((cqe.opcode, cqe.byte_cnt, cqe.imm), (opcode, 7, expected));
    }
    let failed = Cqe::decode(&received(&wc(ibv_wc_status::IBV_WC_LOC_LEN_ERR)).encode());
    assert_eq!((failed.opcode, failed.syndrome), (CqeOpcode::RESP_ERR, Syndrome::LOC_LEN_ERR));
}
