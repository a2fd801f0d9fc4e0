//! A client of plain and direct verbs on the stand-in, with queues in its own memory: what it may ask a card for, it gets.

mod client;
mod misuse;

use std::ffi::{c_int, c_void};
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use gdsync::mlx5::{CqeOpcode, Opcode, Payload, RemoteAddr, SendOp, Syndrome};
use rdma_core_sys::mlx5::*;
use rdma_core_sys::verbs::*;

use crate::child::{Peer, role};

use client::{Bed, Buffer, Conduct, PATIENCE, Queue, Step, errno, pair, to, to_init, to_rtr, to_rts};

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
fn queue_pair_is_reset_and_used_again() {
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
fn library_allocates_where_the_client_declines() {
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
fn port_is_one_of_roce() {
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

    fn step(&self, bed: &Bed, (mut attr, mask): Step) {
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
fn armed_queue_tells_of_its_next_completion_once() {
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

/// Makes the descriptor of events non-blocking, as pollers do.
fn unblock(bed: &Bed) {
    // SAFETY: the context is open.
    let fd = unsafe { (*bed.context).async_fd };
    // SAFETY: it is an open descriptor.
    let flags = unsafe { libc::fcntl(fd, libc::F_GETFL) };
    // SAFETY: as above.
    assert_eq!(unsafe { libc::fcntl(fd, libc::F_SETFL, flags | libc::O_NONBLOCK) }, 0);
}

fn next(bed: &Bed) -> Option<ibv_async_event> {
    let mut event = ibv_async_event::zeroed();
    // SAFETY: the context is open.
    let result = unsafe { bed.lib.verbs.ibv_get_async_event(bed.context, &raw mut event) };
    if result != 0 {
        assert_eq!(errno(), libc::EAGAIN);
    }
    (result == 0).then_some(event)
}

fn wait(bed: &Bed) -> ibv_async_event {
    let end = Instant::now() + PATIENCE;
    loop {
        if let Some(event) = next(bed) {
            return event;
        }
        assert!(Instant::now() < end, "no event came");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Has a peer write where it may not.
fn offend(bed: &Bed) -> (Queue, Queue, Buffer) {
    let (mut a, b) = pair(bed);
    let buffer = Buffer::new(bed, 64);
    let remote = RemoteAddr { rkey: buffer.key ^ 1, ..buffer.remote(0) };
    a.post(&SendOp::Write { remote, payload: Payload::Sges(&[buffer.sge(0, 8)]), imm: None });
    assert_eq!(a.send_cq.wait().syndrome, Syndrome::REM_ACCESS_ERR);
    (a, b, buffer)
}

#[test]
fn forbidden_access_is_told_to_its_victim() {
    let bed = Bed::new();
    unblock(&bed);
    assert!(next(&bed).is_none());
    let (a, b, buffer) = offend(&bed);
    let mut event = wait(&bed);
    assert_eq!(event.event_type, ibv_event_type::IBV_EVENT_QP_ACCESS_ERR);
    // SAFETY: an event of this type names a queue pair.
    assert_eq!(unsafe { event.element.qp }, b.raw);
    assert!(next(&bed).is_none(), "the one who did it has a completion, no event");

    // A queue pair that goes waits for this.
    let done = AtomicBool::new(false);
    let address = event.element;
    std::thread::scope(|scope| {
        let done = &done;
        // SAFETY: as above.
        let victim = unsafe { address.qp }.addr();
        let verbs = &bed.lib.verbs;
        scope.spawn(move || {
            // SAFETY: nothing else uses it but its event.
            assert_eq!(unsafe { verbs.ibv_destroy_qp(victim as *mut ibv_qp) }, 0);
            done.store(true, Ordering::Release);
        });
        std::thread::sleep(Duration::from_millis(200));
        assert!(!done.load(Ordering::Acquire), "it waits for the acknowledgement");
        // SAFETY: it is the event just got.
        unsafe { verbs.ibv_ack_async_event(&raw mut event) };
    });
    assert!(done.load(Ordering::Acquire));
    for cq in [b.send_cq.raw, b.recv_cq.raw] {
        // SAFETY: nothing uses it any more.
        assert_eq!(unsafe { bed.lib.verbs.ibv_destroy_cq(cq) }, 0);
    }
    a.destroy(&bed);
    bed.deregister(buffer.mr);
    bed.close();
}

#[test]
fn events_of_what_is_gone_are_gone() {
    let bed = Bed::new();
    unblock(&bed);
    let (a, b, buffer) = offend(&bed);
    b.destroy(&bed);
    std::thread::sleep(Duration::from_millis(50));
    assert!(next(&bed).is_none());
    a.destroy(&bed);
    bed.deregister(buffer.mr);
    bed.close();
}

const ROUNDS: u64 = 200;

/// What a peer must know: GID, queue pair.
fn address(bed: &Bed, queue: &Queue) -> String {
    // SAFETY: all fields of the union are plain bytes.
    let gid = u128::from_be_bytes(unsafe { bed.gid(1).gid.raw });
    format!("{gid:x} {:x}", queue.qpn)
}

fn parse(line: &str) -> (ibv_gid, u32) {
    let (gid, qpn) = line.trim().split_once(' ').expect("two words");
    let raw = u128::from_str_radix(gid, 16).unwrap().to_be_bytes();
    (ibv_gid { raw }, u32::from_str_radix(qpn, 16).unwrap())
}

/// Not a test of its own: the other process.
#[test]
fn child() {
    if role().is_none() {
        return;
    }
    let bed = Bed::new();
    let mut queue = Queue::new(&bed);
    let buffer = Buffer::new(&bed, 64);
    println!("\naddress {}", address(&bed, &queue));
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).unwrap();
    let (gid, qpn) = parse(&line);
    queue.connect(&bed, gid, qpn);
    queue.post_recv(&[buffer.sge(0, 8)]);
    println!("ready");
    for _ in 0..ROUNDS {
        assert_eq!(queue.recv_cq.wait().opcode, CqeOpcode::RESP_SEND);
        queue.post_recv(&[buffer.sge(0, 8)]);
        let word = buffer.memory.word64(0).unwrap();
        buffer.memory.word64(8).unwrap().store(word.load() + 1);
        queue.post(&SendOp::Send { payload: Payload::Sges(&[buffer.sge(8, 8)]), imm: None });
        assert_eq!(queue.send_cq.wait().opcode, CqeOpcode::REQ);
    }
    println!("done");
}

#[test]
fn two_processes_play_ping_pong() {
    let bed = Bed::new();
    let mut queue = Queue::new(&bed);
    let buffer = Buffer::new(&bed, 64);
    let mut peer = Peer::spawn("verbs_client::child", "pong");
    let (gid, qpn) = parse(peer.hear("address ").trim_start_matches("address "));
    peer.tell(&address(&bed, &queue));
    queue.connect(&bed, gid, qpn);
    peer.hear("ready");
    let (word, answer) = (buffer.memory.word64(0).unwrap(), buffer.memory.word64(8).unwrap());
    for round in 0..ROUNDS {
        queue.post_recv(&[buffer.sge(8, 8)]);
        word.store(round * 10);
        queue.post(&SendOp::Send { payload: Payload::Sges(&[buffer.sge(0, 8)]), imm: None });
        assert_eq!(queue.recv_cq.wait().byte_cnt, 8);
        assert_eq!(answer.load(), round * 10 + 1);
        queue.send_cq.wait();
    }
    peer.hear("done");
    queue.destroy(&bed);
    bed.deregister(buffer.mr);
    bed.close();
}

#[test]
fn sends_to_a_peer_that_is_gone_end_with_a_retry_error() {
    let bed = Bed::new();
    let mut queue = Queue::new(&bed);
    let buffer = Buffer::new(&bed, 64);
    let mut peer = Peer::spawn("verbs_client::child", "pong");
    let (gid, qpn) = parse(peer.hear("address ").trim_start_matches("address "));
    peer.tell(&address(&bed, &queue));
    queue.connect(&bed, gid, qpn);
    peer.hear("ready");
    drop(peer);
    queue.post(&SendOp::Send { payload: Payload::Sges(&[buffer.sge(0, 8)]), imm: None });
    let failed = queue.send_cq.wait();
    assert_eq!((failed.opcode, failed.syndrome), (CqeOpcode::REQ_ERR, Syndrome::RETRY_EXC_ERR));
    queue.destroy(&bed);
    bed.deregister(buffer.mr);
    bed.close();
}
