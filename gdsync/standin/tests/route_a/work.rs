//! Work requests through the library: `ibv_post_send`, `ibv_post_recv`, `ibv_poll_cq`, and events of completions.

use std::ffi::{c_int, c_void};
use std::ptr;
use std::time::Instant;

use rdma_core_sys::verbs::*;

use crate::client::{Bed, Buffer, PATIENCE, errno};
use crate::steps::{to, to_init, to_rtr, to_rts};

/// A queue pair whose rings are the library's.
struct Plain {
    qp: *mut ibv_qp,
    cq: *mut ibv_cq,
    channel: *mut ibv_comp_channel,
}

impl Plain {
    fn new(bed: &Bed) -> Self {
        let verbs = &bed.lib.verbs;
        // SAFETY: the context is open.
        let channel = unsafe { verbs.ibv_create_comp_channel(bed.context) };
        assert!(!channel.is_null());
        // SAFETY: as above, and the channel lives.
        let cq = unsafe { verbs.ibv_create_cq(bed.context, 31, ptr::null_mut(), channel, 0) };
        assert!(!cq.is_null());
        let mut attr = ibv_qp_init_attr {
            send_cq: cq,
            recv_cq: cq,
            cap: ibv_qp_cap {
                max_send_wr: 4,
                max_recv_wr: 4,
                max_send_sge: 1,
                max_recv_sge: 1,
                max_inline_data: 16,
            },
            qp_type: ibv_qp_type::IBV_QPT_RC,
            ..ibv_qp_init_attr::zeroed()
        };
        // SAFETY: the attributes name live objects.
        let qp = unsafe { verbs.ibv_create_qp(bed.pd, &raw mut attr) };
        assert!(!qp.is_null());
        Self { qp, cq, channel }
    }

    fn step(&self, bed: &Bed, (mut attr, mask): crate::steps::Step) {
        // SAFETY: the queue pair lives.
        assert_eq!(unsafe { bed.lib.verbs.ibv_modify_qp(self.qp, &raw mut attr, mask) }, 0);
    }

    /// Connects it to itself.
    fn connect(&self, bed: &Bed) {
        // SAFETY: the queue pair lives.
        let qpn = unsafe { (*self.qp).qp_num };
        self.step(bed, to_init());
        self.step(bed, to_rtr(bed.gid(1).gid, qpn));
        self.step(bed, to_rts());
    }

    fn send(&self, sge: &mut ibv_sge, wr_id: u64, flags: ibv_send_flags) -> c_int {
        let mut wr = ibv_send_wr {
            wr_id,
            sg_list: sge,
            num_sge: 1,
            opcode: ibv_wr_opcode::IBV_WR_SEND_WITH_IMM,
            imm_data: 77u32.to_be(),
            send_flags: flags,
            ..ibv_send_wr::zeroed()
        };
        let mut bad = ptr::null_mut();
        // SAFETY: the request is complete.
        let errno = unsafe { ibv_post_send(self.qp, &raw mut wr, &raw mut bad) };
        assert_eq!(errno != 0, ptr::eq(bad, &raw const wr), "the request that was refused is told");
        errno
    }

    fn receive(&self, sge: &mut ibv_sge, wr_id: u64) -> c_int {
        let mut wr = ibv_recv_wr { wr_id, next: ptr::null_mut(), sg_list: sge, num_sge: 1 };
        let mut bad = ptr::null_mut();
        // SAFETY: the request is complete.
        unsafe { ibv_post_recv(self.qp, &raw mut wr, &raw mut bad) }
    }

    fn poll(&self) -> Option<ibv_wc> {
        let mut wc = ibv_wc::zeroed();
        // SAFETY: there is room for one.
        let count = unsafe { ibv_poll_cq(self.cq, 1, &raw mut wc) };
        assert!((0..=1).contains(&count), "{count}");
        (count == 1).then_some(wc)
    }

    fn wait(&self) -> ibv_wc {
        let end = Instant::now() + PATIENCE;
        loop {
            if let Some(wc) = self.poll() {
                return wc;
            }
            assert!(Instant::now() < end, "no completion came");
            std::thread::yield_now();
        }
    }

    fn destroy(self, bed: &Bed) {
        let verbs = &bed.lib.verbs;
        // SAFETY: it has a queue, and so it stays.
        assert_eq!(unsafe { verbs.ibv_destroy_comp_channel(self.channel) }, libc::EBUSY);
        // SAFETY: nothing uses them any more.
        assert_eq!(unsafe { verbs.ibv_destroy_qp(self.qp) }, 0);
        // SAFETY: as above.
        assert_eq!(unsafe { verbs.ibv_destroy_cq(self.cq) }, 0);
        // SAFETY: as above.
        assert_eq!(unsafe { verbs.ibv_destroy_comp_channel(self.channel) }, 0);
    }
}

fn sge(buffer: &Buffer, offset: u64, length: u32) -> ibv_sge {
    ibv_sge { addr: buffer.memory.addr() + offset, length, lkey: buffer.key }
}

#[test]
fn messages_complete_as_requests_ask() {
    let bed = Bed::new();
    let plain = Plain::new(&bed);
    let buffer = Buffer::new(&bed, 4096);
    plain.connect(&bed);
    let signaled = ibv_send_flags::IBV_SEND_SIGNALED;
    for round in 0..100u64 {
        buffer.memory.word64(0).unwrap().store(round);
        assert_eq!(plain.receive(&mut sge(&buffer, 64, 64), 1000 + round), 0);
        // Every other send says nothing of itself.
        let flags = if round % 2 == 0 { signaled } else { ibv_send_flags::empty() };
        let inline = if round % 3 == 0 { ibv_send_flags::IBV_SEND_INLINE } else { ibv_send_flags::empty() };
        assert_eq!(plain.send(&mut sge(&buffer, 0, 8), round, flags | inline), 0);
        let mut expected = vec![1000 + round];
        expected.extend((round % 2 == 0).then_some(round));
        while !expected.is_empty() {
            let wc = plain.wait();
            assert_eq!(wc.status, ibv_wc_status::IBV_WC_SUCCESS);
            expected.retain(|&wr_id| wr_id != wc.wr_id);
            if wc.opcode == ibv_wc_opcode::IBV_WC_RECV {
                assert_eq!((wc.byte_len, u32::from_be(wc.imm_data)), (8, 77));
                assert_eq!(wc.wc_flags, ibv_wc_flags::IBV_WC_WITH_IMM);
            }
        }
        assert_eq!(buffer.memory.word64(64).unwrap().load(), round);
    }
    assert!(plain.poll().is_none());
    plain.destroy(&bed);
    bed.deregister(buffer.mr);
    bed.close();
}

#[test]
fn full_queues_and_wrong_states_are_refused() {
    let bed = Bed::new();
    let plain = Plain::new(&bed);
    let buffer = Buffer::new(&bed, 4096);
    let signaled = ibv_send_flags::IBV_SEND_SIGNALED;
    assert_eq!(plain.receive(&mut sge(&buffer, 0, 8), 1), libc::EINVAL, "RESET");
    assert_eq!(plain.send(&mut sge(&buffer, 0, 8), 1, signaled), libc::EINVAL, "RESET");
    plain.connect(&bed);
    let inline = ibv_send_flags::IBV_SEND_INLINE;
    assert_eq!(plain.send(&mut sge(&buffer, 0, 300), 1, inline), libc::ENOMEM, "too long for the WQE");
    // Nothing receives: sends stay outstanding.
    for wr_id in 0..4 {
        assert_eq!(plain.send(&mut sge(&buffer, 0, 8), wr_id, signaled), 0);
    }
    assert_eq!(plain.send(&mut sge(&buffer, 0, 8), 4, signaled), libc::ENOMEM, "full");
    // A reset takes away what was posted, and what has not been polled.
    plain.step(&bed, to(ibv_qp_state::IBV_QPS_ERR));
    plain.step(&bed, to(ibv_qp_state::IBV_QPS_RESET));
    assert!(plain.poll().is_none());
    plain.connect(&bed);
    assert_eq!(plain.receive(&mut sge(&buffer, 64, 8), 11), 0);
    assert_eq!(plain.send(&mut sge(&buffer, 0, 8), 12, signaled), 0);
    let mut seen = [plain.wait().wr_id, plain.wait().wr_id];
    seen.sort_unstable();
    assert_eq!(seen, [11, 12]);
    plain.destroy(&bed);
    bed.deregister(buffer.mr);
    bed.close();
}

#[test]
fn an_armed_queue_tells_of_its_next_completion_once() {
    let bed = Bed::new();
    let plain = Plain::new(&bed);
    let buffer = Buffer::new(&bed, 4096);
    plain.connect(&bed);
    // SAFETY: the channel lives.
    let fd = unsafe { (*plain.channel).fd };
    // SAFETY: it is an open descriptor.
    assert_eq!(unsafe { libc::fcntl(fd, libc::F_SETFL, libc::O_NONBLOCK) }, 0);
    let verbs = &bed.lib.verbs;
    let told = || {
        let (mut cq, mut context): (*mut ibv_cq, *mut c_void) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: the channel lives, and the places are local variables.
        let failed = unsafe { verbs.ibv_get_cq_event(plain.channel, &raw mut cq, &raw mut context) };
        if failed != 0 {
            assert_eq!(errno(), libc::EAGAIN);
            return false;
        }
        assert_eq!(cq, plain.cq);
        // SAFETY: it is the event just got.
        unsafe { verbs.ibv_ack_cq_events(cq, 1) };
        true
    };
    let exchange = || {
        assert_eq!(plain.receive(&mut sge(&buffer, 64, 8), 1), 0);
        assert_eq!(plain.send(&mut sge(&buffer, 0, 8), 2, ibv_send_flags::IBV_SEND_SIGNALED), 0);
        plain.wait();
        plain.wait();
    };
    exchange();
    assert!(!told(), "nobody asked");
    // SAFETY: the queue lives.
    assert_eq!(unsafe { ibv_req_notify_cq(plain.cq, 0) }, 0);
    assert!(!told());
    exchange();
    // The event follows its completion.
    let end = Instant::now() + PATIENCE;
    while !told() {
        assert!(Instant::now() < end, "no event came");
    }
    exchange();
    assert!(!told(), "once");
    // What came before the question counts.
    assert_eq!(plain.receive(&mut sge(&buffer, 64, 8), 1), 0);
    assert_eq!(plain.send(&mut sge(&buffer, 0, 8), 2, ibv_send_flags::IBV_SEND_SIGNALED), 0);
    plain.wait();
    let end = Instant::now() + PATIENCE;
    loop {
        // SAFETY: the queue lives.
        assert_eq!(unsafe { ibv_req_notify_cq(plain.cq, 0) }, 0);
        if told() {
            break;
        }
        assert!(Instant::now() < end, "no event came");
    }
    plain.wait();
    plain.destroy(&bed);
    bed.deregister(buffer.mr);
    bed.close();
}
