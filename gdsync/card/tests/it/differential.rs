//! The same request through libmlx5's `ibv_post_send` and through our encoder: the same bytes in the ring, the same
//! doorbell record and the same doorbell.
//!
//! The queue pair is in the error state, where the card completes each request without looking at it. So any address
//! and key will do, and the rings go round.
//!
//! What a card does not read is not compared: the rest of a request's last block, the padding of inline data and the
//! second operand of a fetch-and-add (ours are zero, libmlx5 leaves what was there), and what is behind the terminator
//! of a receive. libmlx5 posts no NOP, and takes a read without a buffer, which our encoder refuses.

use std::cell::{Cell, RefCell};
use std::ffi::c_int;
use std::ops::Range;
use std::ptr;
use std::time::{Duration, Instant};

use mlx5_ring::*;
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use rdma_core_sys::mlx5::*;
use rdma_core_sys::verbs::*;

use crate::again_under_the_card;

#[path = "../../../mlx5-ring/src/strategies.rs"]
mod strategies;
use strategies::{Plain, legal, sges};

/// Takes a queue pair through its states to the error state. libmlx5 takes no sends before RTS, which needs a peer:
/// itself.
///
/// # Safety
/// The queue pair must be alive, and of this open device.
#[expect(clippy::multiple_unsafe_ops_per_block, reason = "one argument holds for all")]
unsafe fn to_error(verbs: &Verbs, context: *mut ibv_context, qp: *mut ibv_qp) {
    let mut attr = ibv_qp_attr::zeroed();
    (attr.port_num, attr.path_mtu, attr.min_rnr_timer) = (1, ibv_mtu::IBV_MTU_1024, 12);
    (attr.timeout, attr.retry_cnt, attr.rnr_retry) = (14, 7, 7);
    (attr.ah_attr.port_num, attr.ah_attr.is_global) = (1, 1);
    (attr.ah_attr.grh.sgid_index, attr.ah_attr.grh.hop_limit) = (1, 1);
    // SAFETY: the caller's condition; the attributes match the masks.
    unsafe {
        attr.dest_qp_num = (*qp).qp_num;
        assert_eq!(verbs.ibv_query_gid(context, 1, 1, &raw mut attr.ah_attr.grh.dgid), 0, "ibv_query_gid");
        type Mask = ibv_qp_attr_mask;
        let init = Mask::IBV_QP_PKEY_INDEX | Mask::IBV_QP_PORT | Mask::IBV_QP_ACCESS_FLAGS;
        let rtr = Mask::IBV_QP_AV
            | Mask::IBV_QP_PATH_MTU
            | Mask::IBV_QP_DEST_QPN
            | Mask::IBV_QP_RQ_PSN
            | Mask::IBV_QP_MAX_DEST_RD_ATOMIC
            | Mask::IBV_QP_MIN_RNR_TIMER;
        let rts = Mask::IBV_QP_TIMEOUT
            | Mask::IBV_QP_RETRY_CNT
            | Mask::IBV_QP_RNR_RETRY
            | Mask::IBV_QP_SQ_PSN
            | Mask::IBV_QP_MAX_QP_RD_ATOMIC;
        for (state, mask) in [
            (ibv_qp_state::IBV_QPS_INIT, init),
            (ibv_qp_state::IBV_QPS_RTR, rtr),
            (ibv_qp_state::IBV_QPS_RTS, rts),
            (ibv_qp_state::IBV_QPS_ERR, Mask::empty()),
        ] {
            attr.qp_state = state;
            let errno = verbs.ibv_modify_qp(qp, &raw mut attr, mask | Mask::IBV_QP_STATE);
            assert_eq!(errno, 0, "to {:?}", state.name());
        }
    }
}

/// A send with its flags: fence, solicited.
type Send = (Plain, [bool; 2]);

/// A queue pair of libmlx5 in the error state.
struct Rings {
    cq: *mut ibv_cq,
    qp: *mut ibv_qp,
    qpn: u32,
    cap: ibv_qp_cap,
    dv: mlx5dv_qp,
    /// The index of the next block of the send queue, and of the next receive.
    next: Cell<[u64; 2]>,
    /// Sends whose bytes cross the end of the ring.
    split: Cell<u32>,
}

/// What a failed test says of a null pointer.
fn made<T>(what: &str, object: *mut T) -> *mut T {
    assert!(!object.is_null(), "{what}: {}", std::io::Error::last_os_error());
    object
}

impl Rings {
    #[expect(clippy::multiple_unsafe_ops_per_block, reason = "one argument holds for all")]
    fn new() -> Option<Self> {
        let (verbs, mlx5) = match (Verbs::load(), rdma_core_sys::Mlx5::load()) {
            (Ok(verbs), Ok(mlx5)) => (verbs, mlx5),
            (Err(error), _) | (_, Err(error)) => {
                eprintln!("skipped: {error}");
                return None;
            }
        };
        // SAFETY: objects are alive: nothing destroys them, and the process ends with this test. Attributes match the calls.
        unsafe {
            let list = made("ibv_get_device_list", verbs.ibv_get_device_list(ptr::null_mut()));
            let context = made("ibv_open_device", verbs.ibv_open_device(made("a device", *list)));
            let pd = made("ibv_alloc_pd", verbs.ibv_alloc_pd(context));
            let cq = verbs.ibv_create_cq(context, 1024, ptr::null_mut(), ptr::null_mut(), 0);
            let cq = made("ibv_create_cq", cq);
            let mut attr = ibv_qp_init_attr::zeroed();
            (attr.send_cq, attr.recv_cq, attr.qp_type) = (cq, cq, ibv_qp_type::IBV_QPT_RC);
            attr.cap = ibv_qp_cap {
                max_send_wr: 8,
                max_recv_wr: 16,
                max_send_sge: 16,
                max_recv_sge: 16,
                max_inline_data: 300,
            };
            let qp = made("ibv_create_qp", verbs.ibv_create_qp(pd, &raw mut attr));
            to_error(verbs, context, qp);
            let (mut dv, mut object) = (mlx5dv_qp::zeroed(), mlx5dv_obj::zeroed());
            object.qp = mlx5dv_obj_qp { r#in: qp, out: &raw mut dv };
            assert_eq!(mlx5.mlx5dv_init_obj(&raw mut object, mlx5dv_obj_type::MLX5DV_OBJ_QP), 0);
            let (next, split) = (Cell::default(), Cell::default());
            Some(Self { cq, qp, qpn: (*qp).qp_num, cap: attr.cap, dv, next, split })
        }
    }

    /// `len` bytes of a ring from byte `at` on, and whether they cross its end.
    fn read(&self, ring: &mlx5dv_qp_ring, at: u64, len: usize) -> (Vec<u8>, bool) {
        let size = usize::try_from(ring.wqe_cnt * ring.stride).unwrap();
        let at = usize::try_from(at).unwrap() % size;
        let byte = |i| ring.buf.cast::<u8>().wrapping_add((at + i) % size);
        // SAFETY: inside of the ring, which lives as long as the queue pair.
        ((0..len).map(|i| unsafe { byte(i).read_volatile() }).collect(), at + len > size)
    }

    /// The word at this byte of the doorbell record.
    fn record(&self, at: usize) -> u32 {
        // SAFETY: the record has two words and lives as long as the queue pair.
        unsafe { self.dv.dbrec.wrapping_byte_add(at).read_volatile() }
    }

    /// The two places of the doorbell, which libmlx5 writes in turn where they are two.
    fn doorbells(&self) -> [*mut u64; 2] {
        let size = usize::try_from(self.dv.bf.size).unwrap();
        [0, size].map(|at| self.dv.bf.reg.cast::<u8>().wrapping_add(at).cast())
    }

    /// Takes the completions of so many requests. All are flushed.
    fn flushed(&self, mut count: usize) {
        let end = Instant::now() + Duration::from_secs(20);
        let mut wc = ibv_wc::zeroed();
        while count > 0 {
            assert!(Instant::now() < end, "{count} requests are not flushed");
            // SAFETY: the queue is alive, and there is room for one.
            match unsafe { ibv_poll_cq(self.cq, 1, &raw mut wc) } {
                0 => std::thread::yield_now(),
                1 => {
                    assert_eq!(wc.status, ibv_wc_status::IBV_WC_WR_FLUSH_ERR);
                    count -= 1;
                }
                error => panic!("ibv_poll_cq: {error}"),
            }
        }
    }

    /// Posts sends by libmlx5, with one call and so one doorbell.
    fn send(&self, sends: &[Send]) {
        let mut lists: Vec<_> = sends.iter().map(|(plain, _)| gathered(plain)).collect();
        let requests =
            sends.iter().zip(&mut lists).map(|((plain, flags), list)| request(plain, *flags, list));
        let mut requests: Vec<_> = requests.collect();
        for i in 1..requests.len() {
            requests[i - 1].next = &raw mut requests[i];
        }
        for at in self.doorbells() {
            // SAFETY: the register's page, which this process alone writes.
            unsafe { at.write_volatile(0) };
        }
        let mut bad = ptr::null_mut();
        // SAFETY: lists and inline data live until the call returns.
        let errno = unsafe { ibv_post_send(self.qp, requests.as_mut_ptr(), &raw mut bad) };
        assert_eq!(errno, 0, "ibv_post_send");
    }

    fn compare_sends(&self, sends: &[Send]) -> Result<(), TestCaseError> {
        self.send(sends);
        let [mut block, receives] = self.next.get();
        let mut last = [0; 8];
        for (plain, [fence, solicited]) in sends {
            let flags = WqeFlags { fence: *fence, solicited: *solicited };
            let ours = encode(&plain.op(), self.qpn, low16(block), flags).unwrap();
            let len = ours.as_bytes().len();
            let (mut theirs, is_split) = self.read(&self.dv.sq, block * BB as u64, len);
            theirs[unread(plain, len)].fill(0);
            prop_assert_eq!(&theirs[..], ours.as_bytes(), "at block {} of {:?}", block, plain);
            self.split.set(self.split.get() + u32::from(is_split));
            (block, last) = (block + u64::from(ours.blocks()), ours.first8());
        }
        self.next.set([block, receives]);
        prop_assert_eq!(self.record(QP_DBREC_SEND), send_record(block));
        // SAFETY: as in `send`.
        let rung = self.doorbells().map(|at| unsafe { at.read_volatile() });
        prop_assert!(rung.contains(&doorbell_word(last)), "{:x?}, not {:x}", rung, doorbell_word(last));
        self.flushed(sends.len());
        Ok(())
    }

    fn compare_receives(&self, receives: &[Vec<DataSeg>]) -> Result<(), TestCaseError> {
        let mut lists: Vec<Vec<_>> = receives.iter().map(|sges| sges.iter().map(sge).collect()).collect();
        let mut requests: Vec<_> = lists
            .iter_mut()
            .map(|list| {
                let mut wr = ibv_recv_wr::zeroed();
                (wr.sg_list, wr.num_sge) = (list.as_mut_ptr(), c_int::try_from(list.len()).unwrap());
                wr
            })
            .collect();
        for i in 1..requests.len() {
            requests[i - 1].next = &raw mut requests[i];
        }
        let mut bad = ptr::null_mut();
        // SAFETY: lists live until the call returns.
        let errno = unsafe { ibv_post_recv(self.qp, requests.as_mut_ptr(), &raw mut bad) };
        prop_assert_eq!(errno, 0, "ibv_post_recv");
        let stride = usize::try_from(self.dv.rq.stride).unwrap();
        prop_assert_eq!(stride, recv_stride(self.cap.max_recv_sge));
        let [block, mut next] = self.next.get();
        for sges in receives {
            let mut ours = vec![0; stride];
            encode_recv(sges, stride, &mut ours).unwrap();
            let used = sges.iter().filter(|sge| sge.len > 0).count();
            let len = usize::min((used + 1) * SEGMENT, stride);
            let (theirs, _) = self.read(&self.dv.rq, next * stride as u64, len);
            prop_assert_eq!(&theirs[..], &ours[..len], "at {} of {:?}", next, sges);
            next += 1;
        }
        self.next.set([block, next]);
        prop_assert_eq!(self.record(QP_DBREC_RECV), recv_record(next));
        self.flushed(receives.len());
        Ok(())
    }
}

fn sge(seg: &DataSeg) -> ibv_sge {
    ibv_sge { addr: seg.addr, length: seg.len, lkey: seg.lkey }
}

/// What a card does not read of a request of this length.
fn unread(plain: &Plain, len: usize) -> Range<usize> {
    match plain.opcode {
        Opcode::ATOMIC_FA => len - SEGMENT - 8..len - SEGMENT,
        _ if !plain.inline.is_empty() => {
            let used = 4 + plain.inline.len();
            len - (used.next_multiple_of(SEGMENT) - used)..len
        }
        _ => len..len,
    }
}

/// The list of a request. Inline data is in two parts.
fn gathered(plain: &Plain) -> Vec<ibv_sge> {
    let parts = plain.inline.split_at(plain.inline.len() / 3);
    let inline = [parts.0, parts.1].map(|part| ibv_sge {
        addr: part.as_ptr().addr() as u64,
        length: u32::try_from(part.len()).unwrap(),
        lkey: 0,
    });
    if plain.inline.is_empty() { plain.sges.iter().map(sge).collect() } else { inline.to_vec() }
}

fn request(plain: &Plain, [fence, solicited]: [bool; 2], list: &mut [ibv_sge]) -> ibv_send_wr {
    let mut wr = ibv_send_wr::zeroed();
    (wr.sg_list, wr.num_sge) = (list.as_mut_ptr(), c_int::try_from(list.len()).unwrap());
    wr.send_flags = ibv_send_flags::IBV_SEND_SIGNALED;
    wr.send_flags.set(ibv_send_flags::IBV_SEND_FENCE, fence);
    wr.send_flags.set(ibv_send_flags::IBV_SEND_SOLICITED, solicited);
    wr.send_flags.set(ibv_send_flags::IBV_SEND_INLINE, !plain.inline.is_empty());
    wr.imm_data = plain.imm.unwrap_or(0).to_be();
    let (RemoteAddr { addr, rkey }, [first, compare]) = (plain.remote, plain.operands);
    wr.wr.rdma = ibv_send_wr_rdma { remote_addr: addr, rkey };
    let atomic = |compare_add, swap| ibv_send_wr_atomic { remote_addr: addr, compare_add, swap, rkey };
    wr.opcode = match plain.opcode {
        Opcode::SEND => ibv_wr_opcode::IBV_WR_SEND,
        Opcode::SEND_IMM => ibv_wr_opcode::IBV_WR_SEND_WITH_IMM,
        Opcode::RDMA_WRITE => ibv_wr_opcode::IBV_WR_RDMA_WRITE,
        Opcode::RDMA_WRITE_IMM => ibv_wr_opcode::IBV_WR_RDMA_WRITE_WITH_IMM,
        Opcode::RDMA_READ => ibv_wr_opcode::IBV_WR_RDMA_READ,
        Opcode::ATOMIC_CS => {
            wr.wr.atomic = atomic(compare, first);
            ibv_wr_opcode::IBV_WR_ATOMIC_CMP_AND_SWP
        }
        Opcode::ATOMIC_FA => {
            wr.wr.atomic = atomic(first, 0);
            ibv_wr_opcode::IBV_WR_ATOMIC_FETCH_AND_ADD
        }
        other => panic!("libmlx5 posts no {other:?}"),
    };
    wr
}

#[test]
fn libmlx5_writes_the_same_rings() {
    if !again_under_the_card("differential::libmlx5_writes_the_same_rings") {
        return;
    }
    let Some(rings) = Rings::new() else { return };
    let (max_sge, max_inline) = (rings.cap.max_send_sge, rings.cap.max_inline_data);
    let [max_sge, max_inline] = [max_sge, max_inline].map(|max| usize::try_from(max).unwrap());
    let fits = move |mut plain: Plain| {
        plain.sges.truncate(max_sge);
        plain.inline.truncate(max_inline);
        if let (Opcode::RDMA_READ, Some(sge)) = (plain.opcode, plain.sges.first_mut()) {
            sge.len = sge.len.max(1);
        }
        plain
    };
    let known = legal().prop_filter("libmlx5 posts no NOP", |plain| plain.opcode != Opcode::NOP);
    let sends = vec((known.prop_map(fits), any::<[bool; 2]>()), 1..=8);
    let receives = vec(sges(0..=usize::try_from(rings.cap.max_recv_sge).unwrap()), 1..=8);
    let seen = RefCell::new(std::collections::BTreeSet::new());
    // Not shrunk: the rings go on.
    let config = Config { failure_persistence: None, max_shrink_iters: 0, ..Config::with_cases(1500) };
    let mut runner = TestRunner::new(config);
    let done = runner.run(&(sends, receives), |(sends, receives)| {
        seen.borrow_mut().extend(sends.iter().map(|(plain, _)| (plain.opcode.0, plain.inline.is_empty())));
        rings.compare_sends(&sends)?;
        rings.compare_receives(&receives)
    });
    done.unwrap_or_else(|error| panic!("{error}"));
    // Five of them with buffers, four also inline, and both atomics.
    assert_eq!(seen.borrow().len(), 11);
    assert!(rings.split.get() > 100, "{} requests cross the end of the ring", rings.split.get());
}
