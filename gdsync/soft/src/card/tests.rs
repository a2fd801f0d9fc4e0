//! A card as the programs of other people use it: rings written by hand, and doorbell records only.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use super::*;
use gdsync_device::QpAddress;
use mlx5_ring::{
    self as mlx5, BB, CE_ALWAYS, CQE_OP_OWN_OFFSET, CQE_SIZE, Cqe, CqeOpcode, Ctrl, DataSeg, INLINE, Opcode,
    RemoteAddr, SEGMENT, Syndrome, low16,
};

const TIMEOUT: Duration = Duration::from_secs(20);
const PD: u32 = 1;
const UIDX: u32 = 0x51d;
/// Bytes of the registered region.
const REGION: usize = 1 << 20;

#[derive(Debug)]
struct NoEvents;

impl AsyncEvents for NoEvents {
    fn raise(&self, _: crate::AsyncEvent) {}
}

/// Counts completion events.
#[derive(Debug, Default)]
struct Events(AtomicUsize);

impl GpuNudge for Events {
    fn nudge(&self) {
        self.0.fetch_add(1, Ordering::AcqRel);
    }
}

impl Events {
    fn wait(&self, count: usize) {
        let start = Instant::now();
        while self.0.load(Ordering::Acquire) < count {
            assert!(start.elapsed() < TIMEOUT, "no event");
            std::thread::yield_now();
        }
        assert_eq!(self.0.load(Ordering::Acquire), count);
    }
}

struct Cq {
    cqn: u32,
    ring: Memory,
    record: Memory,
    entry: usize,
    ci: u64,
}

impl Cq {
    fn new(card: &Card, entry: usize, channel: Option<Arc<dyn GpuNudge>>) -> Self {
        let ring = Memory::alloc(entry << 4).unwrap();
        ring.fill(0, ring.len(), 0xf0).unwrap();
        let record = Memory::alloc(8).unwrap();
        let cq = CardCq {
            ring: ring.clone(),
            entry,
            record: record.clone(),
            ignore_overrun: true,
            nudges: None,
            channel,
        };
        Self { cqn: card.create_cq(cq).unwrap(), ring, record, entry, ci: 0 }
    }

    fn poll(&mut self) -> Option<Cqe> {
        let slot = usize::try_from(self.ci % 16).unwrap();
        let at = (slot + 1) * self.entry - CQE_SIZE;
        let word = self.ring.atomic32(at + CQE_OP_OWN_OFFSET).unwrap().load(Ordering::Acquire);
        if !mlx5::owned_by_software(word, self.ci, 4) {
            return None;
        }
        self.ci += 1;
        let mut bytes = [0; CQE_SIZE];
        self.ring.read(at, &mut bytes).unwrap();
        Some(Cqe::decode(&bytes))
    }

    fn wait(&mut self) -> Cqe {
        let start = Instant::now();
        loop {
            if let Some(cqe) = self.poll() {
                return cqe;
            }
            assert!(start.elapsed() < TIMEOUT, "no completion");
            std::thread::yield_now();
        }
    }
}

/// A program with one queue pair.
struct Program {
    card: Card,
    memory: Memory,
    key: u32,
    qpn: u32,
    sq: Memory,
    rq: Memory,
    record: Memory,
    /// Blocks of sends, and receives, posted.
    pi: u64,
    receives: u64,
    sends: Cq,
    recvs: Cq,
    /// Of the completion channel of `recvs`.
    events: Arc<Events>,
}

/// A segment of a WQE.
fn inline(bytes: &[u8]) -> Vec<u8> {
    let mut segment = (INLINE | u32::try_from(bytes.len()).unwrap()).to_be_bytes().to_vec();
    segment.extend_from_slice(bytes);
    segment.resize(segment.len().next_multiple_of(SEGMENT), 0xee);
    segment
}

impl Program {
    fn new(entry: usize) -> Self {
        let events = Arc::<Events>::default();
        let card = Card::start(&SoftHcaConfig::default(), Arc::new(NoEvents)).unwrap();
        let memory = Memory::alloc(REGION).unwrap();
        let key = card.register(PD, &memory, memory.addr(), Access::all()).unwrap();
        let (sends, recvs) = (Cq::new(&card, entry, None), Cq::new(&card, entry, Some(events.clone())));
        let [sq, rq, record] = [64 * BB, 16 * 64, 8].map(|len| Memory::alloc(len).unwrap());
        let qp = CardQp {
            pdn: PD,
            send_cqn: sends.cqn,
            recv_cqn: recvs.cqn,
            sq: sq.clone(),
            rq: rq.clone(),
            rq_stride: 64,
            record: record.clone(),
            doorbell: CardDoorbell::Record,
            uidx: UIDX,
            flushes_by_doorbell: false,
        };
        let qpn = card.create_qp(qp).unwrap();
        Self { card, memory, key, qpn, sq, rq, record, pi: 0, receives: 0, sends, recvs, events }
    }

    fn connect(&self, to: &Self) {
        let remote = QpAddress::new(to.card.gid(), to.qpn, 7);
        let init = QpAttr::to(QpState::INIT).access(Access::all());
        let rtr = QpAttr::to(QpState::RTR).remote(remote).path_mtu(1024).max_dest_rd_atomic(16);
        let rts = QpAttr::to(QpState::RTS).timeout(14).retry_cnt(7).rnr_retry(7).max_rd_atomic(16);
        for (attr, psn) in [(init, None), (rtr.min_rnr_timer(1), None), (rts, Some(7))] {
            self.card.modify_qp(self.qpn, &attr, psn, TIMEOUT).unwrap();
        }
    }

    fn pair(entry: usize) -> (Self, Self) {
        let (a, b) = (Self::new(entry), Self::new(entry));
        a.connect(&b);
        b.connect(&a);
        (a, b)
    }

    fn sge(&self, at: usize, len: usize) -> Vec<u8> {
        let (addr, len) = (self.memory.addr() + at as u64, u32::try_from(len).unwrap());
        let DataSeg { addr, len, lkey } = DataSeg { addr, len, lkey: self.key };
        [&len.to_be_bytes()[..], &lkey.to_be_bytes(), &addr.to_be_bytes()].concat()
    }

    fn remote(&self, at: usize) -> Vec<u8> {
        RemoteAddr { addr: self.memory.addr() + at as u64, rkey: self.key }.to_bytes().to_vec()
    }

    /// Posts a WQE and returns its index. The counter in the record is the only announcement.
    fn post(&mut self, opcode: Opcode, fm_ce_se: u8, body: &[Vec<u8>]) -> u16 {
        let body = body.concat();
        let (index, ds) = (low16(self.pi), u8::try_from(1 + body.len() / SEGMENT).unwrap());
        let ctrl = Ctrl { index, opcode, qpn: self.qpn, ds, fm_ce_se, ..Ctrl::default() };
        let wqe = [&ctrl.to_bytes(), &body[..]].concat();
        for block in wqe.chunks(BB) {
            let at = usize::try_from(self.pi % 64).unwrap() * BB;
            self.sq.write(at, block).unwrap();
            self.pi += 1;
        }
        self.announce(mlx5::QP_DBREC_SEND, self.pi);
        index
    }

    fn announce(&self, word: usize, counter: u64) {
        let record = self.record.atomic32(word).unwrap();
        record.store(mlx5::send_record(counter), Ordering::Release);
    }

    fn receive(&mut self, sges: &[Vec<u8>]) {
        let mut wqe = sges.concat();
        if wqe.len() < 64 {
            wqe.extend([0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
        }
        self.rq.write(usize::try_from(self.receives % 16).unwrap() * 64, &wqe).unwrap();
        self.receives += 1;
        self.announce(mlx5::QP_DBREC_RECV, self.receives);
    }

    fn bytes(&self, at: usize, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.memory.read(at, &mut bytes).unwrap();
        bytes
    }
}

/// Bytes that differ at each place.
fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|n| u8::try_from(n * 7 % 251).unwrap()).collect()
}

#[test]
fn a_signalled_send_retires_the_unsignalled_ones_before_it() {
    let (mut a, mut b) = Program::pair(64);
    for round in 0..40 {
        for n in 0..3 {
            b.receive(&[b.sge(0, 64)]);
            let flags = if n == 2 { CE_ALWAYS } else { 0 };
            let index = a.post(Opcode::SEND, flags, &[inline(&[round; 30])]);
            let cqe = b.recvs.wait();
            assert_eq!((cqe.opcode, cqe.byte_cnt, cqe.srqn_uidx), (CqeOpcode::RESP_SEND, 30, UIDX));
            assert_eq!(cqe.wqe_counter, low16(b.receives - 1));
            if n == 2 {
                let cqe = a.sends.wait();
                let expected = (CqeOpcode::REQ, index, a.qpn, Opcode::SEND, UIDX);
                assert_eq!((cqe.opcode, cqe.wqe_counter, cqe.qpn, cqe.send_opcode, cqe.srqn_uidx), expected);
            }
        }
    }
    assert_eq!(a.sends.poll(), None, "an unsignalled send has completed");
}

#[test]
fn a_failed_send_completes_without_a_signal_and_so_do_those_behind_it() {
    let (mut a, mut b) = Program::pair(64);
    b.receive(&[b.sge(0, 8)]);
    let good = a.post(Opcode::SEND, 0, &[inline(&[1; 8])]);
    b.recvs.wait();
    let long = a.post(Opcode::SEND, 0, &[a.sge(0, 9)]);
    b.receive(&[b.sge(0, 8)]);
    let behind = a.post(Opcode::SEND, 0, &[]);
    let errors: Vec<_> = (0..2).map(|_| a.sends.wait()).map(|c| (c.wqe_counter, c.syndrome)).collect();
    assert_eq!(errors, [(long, Syndrome::REM_INV_REQ_ERR), (behind, Syndrome::WR_FLUSH_ERR)]);
    assert_ne!(good, long);
    assert_eq!(b.recvs.wait().syndrome, Syndrome::LOC_LEN_ERR);
    // What is posted in ERR is flushed, with no other announcement.
    let late = a.post(Opcode::SEND, 0, &[]);
    assert_eq!((a.sends.wait().wqe_counter, a.card.state(a.qpn).unwrap()), (late, QpState::ERR));
    b.receive(&[b.sge(0, 8)]);
    assert_eq!(b.recvs.wait().syndrome, Syndrome::WR_FLUSH_ERR);
}

#[test]
fn inline_and_pointer_segments_arrive_in_order() {
    let (mut a, mut b) = Program::pair(64);
    let payload = pattern(50_000);
    a.memory.write(0, &payload).unwrap();
    // Three packets; an inline part lies in the first and another in the last.
    let body = [inline(&[1; 10]), a.sge(0, 40_000), inline(&[2; 30]), a.sge(40_000, 100), a.sge(40_100, 3)];
    let sent = [&[1; 10], &payload[..40_000], &[2; 30], &payload[40_000..40_103]].concat();
    b.receive(&[b.sge(64, 100), b.sge(256, 60_000)]);
    a.post(Opcode::SEND, CE_ALWAYS, &body);
    let cqe = b.recvs.wait();
    assert_eq!((cqe.opcode, cqe.byte_cnt as usize), (CqeOpcode::RESP_SEND, sent.len()));
    assert_eq!([b.bytes(64, 100), b.bytes(256, sent.len() - 100)].concat(), sent);
    a.post(Opcode::RDMA_WRITE, CE_ALWAYS, &[&[b.remote(100_000)], &body[..]].concat());
    assert_eq!([a.sends.wait().opcode, a.sends.wait().opcode], [CqeOpcode::REQ; 2]);
    assert_eq!(b.bytes(100_000, sent.len()), sent);
}

/// As UCX's flushes: a NOP, and an empty WRITE to address 0 with key 0.
#[test]
fn flushes_complete_after_what_is_before_them() {
    let (mut a, b) = Program::pair(128);
    let bytes = pattern(300_000);
    b.memory.write(0, &bytes).unwrap();
    for flush in [Opcode::NOP, Opcode::RDMA_WRITE] {
        a.memory.fill(0, bytes.len(), 0).unwrap();
        a.post(Opcode::RDMA_READ, 0, &[b.remote(0), a.sge(0, bytes.len())]);
        let remote = RemoteAddr::default().to_bytes().to_vec();
        let body = if flush == Opcode::NOP { vec![] } else { vec![remote] };
        let index = a.post(flush, CE_ALWAYS | mlx5::FM_FENCE_AND_INITIATOR_SMALL, &body);
        let cqe = a.sends.wait();
        assert_eq!((cqe.opcode, cqe.wqe_counter, cqe.send_opcode), (CqeOpcode::REQ, index, flush));
        assert_eq!(a.bytes(0, bytes.len()), bytes, "{flush}");
    }
}

#[test]
fn sends_may_have_as_many_buffers_as_a_wqe_holds() {
    let (mut a, mut b) = Program::pair(64);
    let payload = pattern(61 * 3);
    a.memory.write(0, &payload).unwrap();
    for round in 0..10 {
        b.receive(&[b.sge(0, 10), b.sge(64, 90), b.sge(256, 500)]);
        let sges: Vec<_> = (0..61).map(|n| a.sge(3 * n, 3)).collect();
        a.post(Opcode::SEND, CE_ALWAYS, &sges);
        assert_eq!(b.recvs.wait().byte_cnt as usize, payload.len(), "round {round}");
        a.sends.wait();
        assert_eq!([b.bytes(0, 10), b.bytes(64, 90), b.bytes(256, 83)].concat(), payload);
    }
}

#[test]
fn an_armed_queue_gets_one_event() {
    let (mut a, mut b) = Program::pair(64);
    for n in 0..20u8 {
        let word = u32::from_ne_bytes([n % 4 << 4, 0, 0, n]);
        let record = b.recvs.record.clone();
        let arm = || record.atomic32(mlx5::CQ_DBREC_ARM).unwrap().store(word, Ordering::Release);
        if n % 2 == 0 {
            arm();
        }
        b.receive(&[b.sge(0, 64)]);
        a.post(Opcode::SEND, CE_ALWAYS, &[]);
        let cqe = b.recvs.wait();
        assert_eq!(cqe.opcode, CqeOpcode::RESP_SEND);
        if n % 2 == 1 {
            // After the completion.
            arm();
        }
        b.events.wait(usize::from(n) + 1);
    }
}

#[test]
fn threads_of_the_card_take_no_signals() {
    let masks = || {
        let of_thread = |entry: std::io::Result<std::fs::DirEntry>| {
            let status = std::fs::read_to_string(entry.ok()?.path().join("status")).ok()?;
            let field = |name: &str| {
                let line = status.lines().find(|line| line.starts_with(name))?;
                Some(line.split_whitespace().nth(1)?.to_owned())
            };
            Some((field("Name:")?, field("SigBlk:")?))
        };
        std::fs::read_dir("/proc/self/task").unwrap().filter_map(of_thread).collect::<Vec<_>>()
    };
    let _program = Program::new(64);
    let has_blocked = |name: &str| {
        let signals = 1 << (libc::SIGALRM - 1) | 1 << (libc::SIGTERM - 1);
        let is_so = |mask: &str| u64::from_str_radix(mask, 16).unwrap() & signals == signals;
        masks().iter().any(|(thread, mask)| thread == name && is_so(mask))
    };
    assert!(has_blocked("gdsync-hca") && has_blocked("gdsync-port"), "{:?}", masks());
}

#[test]
fn a_queue_pair_begins_anew_after_a_reset() {
    let (mut a, mut b) = Program::pair(64);
    for round in 1..4 {
        for _ in 0..round {
            b.receive(&[b.sge(0, 64)]);
            a.post(Opcode::SEND, CE_ALWAYS, &[inline(&[round; 30])]);
            assert_eq!(
                [a.sends.wait().opcode, b.recvs.wait().opcode],
                [CqeOpcode::REQ, CqeOpcode::RESP_SEND]
            );
        }
        for program in [&mut a, &mut b] {
            let reset = QpAttr::to(QpState::RESET);
            program.card.modify_qp(program.qpn, &reset, None, TIMEOUT).unwrap();
            (program.pi, program.receives) = (0, 0);
        }
        // Posted before RTS, so it waits.
        let index = a.post(Opcode::NOP, CE_ALWAYS, &[]);
        a.connect(&b);
        b.connect(&a);
        assert_eq!(a.sends.wait().wqe_counter, index);
    }
    assert_eq!((a.sends.poll(), b.recvs.poll()), (None, None));
}
