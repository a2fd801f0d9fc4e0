//! A card as the programs of other people use it: rings written by hand, and doorbell records only.

mod datagrams;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use parking_lot::Mutex;

use super::*;
use crate::AsyncEvent;
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

/// Collects asynchronous events.
#[derive(Debug, Default)]
struct Raised(Mutex<Vec<AsyncEvent>>);

impl AsyncEvents for Raised {
    fn raise(&self, event: AsyncEvent) {
        self.0.lock().push(event);
    }
}

impl Raised {
    /// Waits for these events, in this order.
    fn wait(&self, events: &[AsyncEvent]) {
        let start = Instant::now();
        while *self.0.lock() != events {
            assert!(start.elapsed() < TIMEOUT, "{:?}", self.0.lock());
            std::thread::yield_now();
        }
    }
}

fn card() -> (Arc<Card>, Arc<Raised>) {
    let raised = Arc::<Raised>::default();
    (Arc::new(Card::start(&SoftHcaConfig::default(), raised.clone()).unwrap()), raised)
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
    card: Arc<Card>,
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
        Self::on(card().0, entry, None, CardTransport::Connection)
    }

    fn on(card: Arc<Card>, entry: usize, srqn: Option<u32>, transport: CardTransport) -> Self {
        Self::rung_by(card, entry, srqn, transport, CardDoorbell::Record)
    }

    fn rung_by(
        card: Arc<Card>,
        entry: usize,
        srqn: Option<u32>,
        transport: CardTransport,
        doorbell: CardDoorbell,
    ) -> Self {
        let events = Arc::<Events>::default();
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
            doorbell,
            uidx: UIDX,
            transport,
            srqn,
            flushes_by_doorbell: false,
        };
        let qpn = card.create_qp(qp).unwrap();
        Self { card, memory, key, qpn, sq, rq, record, pi: 0, receives: 0, sends, recvs, events }
    }

    fn connect(&self, to: &Self) {
        self.go_to_rts(Some(QpAddress::new(to.card.gid(), to.qpn, 7)));
    }

    fn go_to_rts(&self, remote: Option<QpAddress>) {
        let init = QpAttr::to(QpState::INIT).access(Access::all());
        let rtr = QpAttr { remote, ..QpAttr::to(QpState::RTR) }.path_mtu(1024).max_dest_rd_atomic(16);
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
        self.post_with(0, opcode, fm_ce_se, body)
    }

    fn post_with(&mut self, opmod: u8, opcode: Opcode, fm_ce_se: u8, body: &[Vec<u8>]) -> u16 {
        let body = body.concat();
        let (index, ds) = (low16(self.pi), u8::try_from(1 + body.len() / SEGMENT).unwrap());
        let ctrl = Ctrl { opmod, index, opcode, qpn: self.qpn, ds, fm_ce_se, ..Ctrl::default() };
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

#[test]
fn reads_of_no_bytes_need_no_key() {
    let (mut a, _b) = Program::pair(64);
    for body in [vec![RemoteAddr::default().to_bytes().to_vec()], vec![]] {
        let index = a.post(Opcode::RDMA_READ, CE_ALWAYS, &body);
        let cqe = a.sends.wait();
        let expected = if body.is_empty() { Syndrome::LOC_QP_OP_ERR } else { Syndrome::default() };
        assert_eq!((cqe.wqe_counter, cqe.syndrome, cqe.byte_cnt), (index, expected, 0));
    }
}

#[test]
fn masked_atomics_change_chosen_bits_of_words_of_4_and_8_bytes() {
    let (mut a, b) = Program::pair(64);
    let word = |at: usize| b.memory.word64(at).unwrap();
    word(64).store(0x1122_3344_5566_7788);
    let mut run = |opcode, opmod: u8, operands: Vec<u8>, at, len| {
        let segments = [b.remote(at), operands, a.sge(8, len)];
        let index = a.post_with(opmod, opcode, CE_ALWAYS, &segments);
        let cqe = a.sends.wait();
        assert_eq!((cqe.wqe_counter, cqe.opcode, cqe.byte_cnt as usize), (index, CqeOpcode::REQ, len));
        a.bytes(8, len)
    };
    let be32 = |words: [u32; 4]| words.map(u32::to_be_bytes).concat();
    let be64 = |words: &[u64]| words.iter().flat_map(|word| word.to_be_bytes()).collect::<Vec<_>>();
    // Old values of 8 bytes come in the order of the host, those of 4 bytes in that of the network.
    let old = run(Opcode::ATOMIC_MASKED_CS, 9, be64(&[0xff, 0x88, 0xff00_00ff, 0xff]), 64, 8);
    assert_eq!(old, 0x1122_3344_5566_7788u64.to_le_bytes());
    assert_eq!(word(64).load(), 0x1122_3344_0066_77ff);
    let old = run(Opcode::ATOMIC_MASKED_FA, 9, be64(&[0x11, u64::MAX]), 64, 8);
    assert_eq!(old, 0x1122_3344_0066_77ffu64.to_le_bytes());
    assert_eq!(word(64).load(), 0x1122_3344_0066_77ee, "fields of one bit");
    let old = run(Opcode::ATOMIC_MASKED_FA, 8, be32([0xf000_0000, 0, 0, 0]), 68, 4);
    assert_eq!(old, 0x1122_3344u32.to_be_bytes());
    assert_eq!(word(64).load(), 0x0122_3344_0066_77ee, "nothing is carried out of the word");
    let old = run(Opcode::ATOMIC_MASKED_CS, 8, be32([7, 0, u32::MAX, 0]), 64, 4);
    assert_eq!(old, 0x0066_77eeu32.to_be_bytes());
    assert_eq!(word(64).load(), 0x0122_3344_0000_0007);
    a.post_with(8, Opcode::ATOMIC_MASKED_FA, CE_ALWAYS, &[b.remote(66), be32([1, 0, 0, 0]), a.sge(8, 4)]);
    assert_eq!(a.sends.wait().syndrome, Syndrome::REM_INV_REQ_ERR, "it is not aligned");
}

/// As DOCA GPUNetIO counts the ends of its sends: on a companion queue pair, which waits for the completion of the first.
#[test]
fn a_wait_holds_the_queue_until_another_one_has_completed() {
    let (mut a, b) = Program::pair(64);
    let mut companion = Program::on(a.card.clone(), 64, None, CardTransport::Connection);
    let loopback = Program::on(a.card.clone(), 64, None, CardTransport::Connection);
    companion.connect(&loopback);
    loopback.connect(&companion);
    let wait = |cqn: u32, index: u32| {
        [[0; 8].to_vec(), index.to_be_bytes().to_vec(), cqn.to_be_bytes().to_vec()].concat()
    };
    for index in 0..20 {
        let held = companion.post(Opcode::WAIT, CE_ALWAYS, &[wait(a.sends.cqn, index)]);
        companion.post(Opcode::RDMA_WRITE, CE_ALWAYS, &[loopback.remote(0), inline(&index.to_le_bytes())]);
        // Its own sends go on, and are not held.
        a.post(Opcode::RDMA_WRITE, 0, &[b.remote(0), inline(&[1; 8])]);
        assert_eq!((companion.sends.poll(), a.sends.poll()), (None, None));
        a.post(Opcode::RDMA_WRITE, CE_ALWAYS, &[b.remote(8), inline(&[2; 8])]);
        let cqe = companion.sends.wait();
        assert_eq!((cqe.wqe_counter, cqe.send_opcode), (held, Opcode::WAIT));
        assert_eq!(a.sends.poll().map(|cqe| cqe.opcode), Some(CqeOpcode::REQ), "it was complete before");
        assert_eq!(companion.sends.wait().opcode, CqeOpcode::REQ);
        assert_eq!(loopback.bytes(0, 4), index.to_le_bytes());
    }
    companion.post(Opcode::WAIT, CE_ALWAYS, &[wait(0xff_fffe, 0)]);
    assert_eq!(companion.sends.wait().syndrome, Syndrome::LOC_QP_OP_ERR, "no such queue");
}

#[test]
fn a_peer_that_gets_no_processor_is_not_given_up() {
    let (mut a, mut b) = Program::pair(64);
    a.card.modify_qp(a.qpn, &QpAttr::default().timeout(1).retry_cnt(1), None, TIMEOUT).unwrap();
    for _ in 0..3 {
        b.receive(&[b.sge(0, 64)]);
        b.card.clone().0.shared.with(|_| {
            a.post(Opcode::SEND, CE_ALWAYS, &[inline(&[1; 30])]);
            // Many times the patience of the queue pair: 8 us, twice.
            std::thread::sleep(Duration::from_millis(20));
            assert_eq!(a.sends.poll(), None);
        });
        assert_eq!((a.sends.wait().syndrome, b.recvs.wait().byte_cnt), (Syndrome::default(), 30));
    }
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

/// A card goes to RTR without its peer, and finds out by its packets.
#[test]
fn a_peer_that_is_not_there_is_a_retry_error() {
    let mut a = Program::new(64);
    a.go_to_rts(Some(QpAddress::new(Gid::random().unwrap(), 0x1234, 7)));
    let [first, second] = [(); 2].map(|()| a.post(Opcode::SEND, CE_ALWAYS, &[]));
    let failed = [(first, Syndrome::RETRY_EXC_ERR), (second, Syndrome::WR_FLUSH_ERR)];
    assert_eq!([(); 2].map(|()| a.sends.wait()).map(|cqe| (cqe.wqe_counter, cqe.syndrome)), failed);
}

/// Both connect at once, and answers come over the link that is not added here yet.
#[test]
fn a_link_that_is_being_made_is_no_retry_error() {
    let (mut a, b) = Program::pair(64);
    let peer = b.card.gid();
    while a.card.0.shared.with(|core| core.peers.is_sought(peer)) {
        std::thread::yield_now();
    }
    b.card.modify_qp(b.qpn, &QpAttr::to(QpState::RESET), None, TIMEOUT).unwrap();
    a.card.0.shared.with(|core| core.peers.seek(peer));
    a.post(Opcode::SEND, CE_ALWAYS, &[]);
    std::thread::sleep(Duration::from_secs(1));
    assert!(a.sends.poll().is_none(), "all retries take 0.54 s");
    a.card.0.shared.with(|core| core.peers.tried(peer, false));
    assert_eq!(a.sends.wait().syndrome, Syndrome::RETRY_EXC_ERR);
}

#[test]
fn unmapped_memory_is_a_protection_error_and_no_fault() {
    let unmapped = |program: &mut Program| {
        let owner = Memory::alloc(8192).unwrap();
        let base = std::ptr::with_exposed_provenance_mut(usize::try_from(owner.addr()).unwrap());
        // SAFETY: nothing else uses the pages.
        let memory = unsafe { Memory::of_program(base, 8192) }.unwrap();
        program.key = program.card.register(PD, &memory, memory.addr(), Access::all()).unwrap();
        program.memory = memory;
        // As if unmapped; but no other thread can map something there.
        // SAFETY: the pages are those of `owner`, and nobody uses them any more.
        assert_eq!(unsafe { libc::mprotect(base.cast(), 8192, libc::PROT_NONE) }, 0);
        owner
    };
    let (mut a, mut b) = Program::pair(64);
    let _pages = unmapped(&mut a);
    b.receive(&[b.sge(0, 100)]);
    a.post(Opcode::SEND, 0, &[a.sge(8, 50)]);
    assert_eq!(a.sends.wait().syndrome, Syndrome::LOC_PROT_ERR);

    for opcode in [Opcode::RDMA_READ, Opcode::RDMA_WRITE, Opcode::ATOMIC_FA] {
        let (mut a, mut b) = Program::pair(64);
        let _pages = unmapped(&mut b);
        let mut body = vec![b.remote(8)];
        body.extend((opcode == Opcode::ATOMIC_FA).then(|| vec![0; 16]));
        body.push(a.sge(0, 8));
        a.post(opcode, 0, &body);
        let refused = [Syndrome::REM_OP_ERR, Syndrome::REM_INV_REQ_ERR];
        let syndrome = a.sends.wait().syndrome;
        assert!(refused.contains(&syndrome), "{opcode:?}: {syndrome:?}");
    }

    let (mut a, mut b) = Program::pair(64);
    let _pages = unmapped(&mut b);
    b.receive(&[b.sge(0, 100)]);
    a.post(Opcode::SEND, 0, &[a.sge(8, 50)]);
    assert_eq!(a.sends.wait().syndrome, Syndrome::REM_OP_ERR);
    assert_eq!(b.recvs.wait().syndrome, Syndrome::LOC_PROT_ERR);
}

#[test]
fn an_armed_queue_gets_one_event() {
    let (mut a, mut b) = Program::pair(64);
    for n in 0..20u8 {
        let word = u32::from_ne_bytes([(n % 4) << 4, 0, 0, n]);
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
    // A thread takes its name when it first runs.
    let start = Instant::now();
    while !(has_blocked("gdsync-hca") && has_blocked("gdsync-port")) {
        assert!(start.elapsed() < TIMEOUT, "{:?}", masks());
        std::thread::yield_now();
    }
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

/// A shared receive queue as libmlx5 fills it: free entries are a list, and one that is given back becomes its end.
struct Srq {
    srqn: u32,
    ring: Memory,
    record: Memory,
    head: u16,
    tail: u16,
    posted: u64,
}

const SRQ_STRIDE: usize = 64;

impl Srq {
    fn new(card: &Card, entries: u16) -> Self {
        let ring = Memory::alloc(usize::from(entries) * SRQ_STRIDE).unwrap();
        let record = Memory::alloc(8).unwrap();
        let of_card =
            CardSrq { ring: ring.clone(), stride: SRQ_STRIDE, record: record.clone(), is_cyclic: false };
        let srqn = card.create_srq(of_card).unwrap();
        let srq = Self { srqn, ring, record, head: 0, tail: entries - 1, posted: 0 };
        (0..entries).for_each(|n| srq.link(n, (n + 1) % entries));
        srq
    }

    fn link(&self, entry: u16, next: u16) {
        self.ring.write(usize::from(entry) * SRQ_STRIDE + 2, &next.to_be_bytes()).unwrap();
    }

    /// Posts a receive and returns its index.
    fn post(&mut self, sge: &[u8]) -> u16 {
        let (index, at) = (self.head, usize::from(self.head) * SRQ_STRIDE);
        let mut next = [0; 2];
        self.ring.read(at + 2, &mut next).unwrap();
        self.head = u16::from_be_bytes(next);
        let end = [0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0];
        self.ring.write(at + 16, &[sge, &end].concat()).unwrap();
        self.posted += 1;
        self.record.atomic32(0).unwrap().store(mlx5::recv_record(self.posted), Ordering::Release);
        index
    }

    fn free(&mut self, index: u16) {
        self.link(self.tail, index);
        self.tail = index;
    }
}

#[test]
fn queue_pairs_share_a_receive_queue() {
    let (b, raised) = card();
    let mut srq = Srq::new(&b, 8);
    let mut receivers =
        [(); 2].map(|()| Program::on(b.clone(), 64, Some(srq.srqn), CardTransport::Connection));
    let mut senders = [(); 2].map(|()| Program::new(64));
    for (a, b) in senders.iter().zip(&receivers) {
        a.connect(b);
        b.connect(a);
    }
    let sge = receivers[0].sge(0, 64);
    // Posted in a changing order of indices, because they are not given back in the order in which they were taken.
    let mut posted: std::collections::VecDeque<_> = (0..6).map(|_| srq.post(&sge)).collect();
    let mut used = Vec::new();
    for n in 0..200u8 {
        let which = usize::from(n % 3 == 0);
        senders[which].post(Opcode::SEND, CE_ALWAYS, &[inline(&[n; 20])]);
        let cqe = receivers[which].recvs.wait();
        assert_eq!((cqe.opcode, cqe.byte_cnt, cqe.qpn), (CqeOpcode::RESP_SEND, 20, receivers[which].qpn));
        assert_eq!(Some(cqe.wqe_counter), posted.pop_front(), "message {n}");
        assert_eq!(receivers[0].bytes(0, 20), [n; 20]);
        senders[which].sends.wait();
        used.push(cqe.wqe_counter);
        if used.len() == 3 {
            used.drain(..).rev().for_each(|index| srq.free(index));
            posted.extend((0..3).map(|_| srq.post(&sge)));
        }
    }
    assert_eq!(*raised.0.lock(), []);
}

#[test]
fn an_empty_shared_receive_queue_holds_senders_up() {
    let (b, raised) = card();
    let mut srq = Srq::new(&b, 8);
    let mut receiver = Program::on(b, 64, Some(srq.srqn), CardTransport::Connection);
    let mut a = Program::new(64);
    a.connect(&receiver);
    receiver.connect(&a);
    a.post(Opcode::SEND, CE_ALWAYS, &[inline(&[5; 20])]);
    let start = Instant::now();
    while receiver.card.stats().rnr_naks == 0 {
        assert!(start.elapsed() < TIMEOUT && a.sends.poll().is_none());
        std::thread::yield_now();
    }
    srq.post(&receiver.sge(0, 64));
    assert_eq!([a.sends.wait().opcode, receiver.recvs.wait().opcode], [CqeOpcode::REQ, CqeOpcode::RESP_SEND]);
    // The event comes once, when fewer than the limit are left.
    (0..4).for_each(|_| _ = srq.post(&receiver.sge(0, 64)));
    receiver.card.set_srq_limit(srq.srqn, 3);
    for n in 0..3 {
        assert_eq!(raised.0.lock().len(), usize::from(n == 2), "{n} of four are taken");
        assert_eq!(receiver.card.srq_limit(srq.srqn), if n == 2 { 0 } else { 3 });
        a.post(Opcode::SEND, CE_ALWAYS, &[]);
        a.sends.wait();
        receiver.recvs.wait();
    }
    raised.wait(&[AsyncEvent::SrqLimitReached(srq.srqn)]);
    // The end of a queue pair takes nothing, and is reported.
    receiver.card.modify_qp(receiver.qpn, &QpAttr::to(QpState::ERR), None, TIMEOUT).unwrap();
    raised.wait(&[AsyncEvent::SrqLimitReached(srq.srqn), AsyncEvent::QpLastWqeReached(receiver.qpn)]);
    assert_eq!(receiver.recvs.poll(), None);
}

/// The links, which say otherwise, do not count.
#[test]
fn a_cyclic_receive_queue_is_taken_in_the_order_of_its_ring() {
    let (b, _) = card();
    let ring = Memory::alloc(4 * SRQ_STRIDE).unwrap();
    let record = Memory::alloc(8).unwrap();
    let of_card = CardSrq { ring: ring.clone(), stride: SRQ_STRIDE, record: record.clone(), is_cyclic: true };
    let srqn = b.create_srq(of_card).unwrap();
    let mut receiver = Program::on(b, 64, Some(srqn), CardTransport::Connection);
    let mut a = Program::new(64);
    a.connect(&receiver);
    receiver.connect(&a);
    let end = [0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    for n in 0..4 {
        ring.write(n * SRQ_STRIDE + 16, &[&receiver.sge(100 * n, 64)[..], &end].concat()).unwrap();
    }
    for n in 0..10u8 {
        record.atomic32(0).unwrap().store(mlx5::recv_record(u64::from(n) + 1), Ordering::Release);
        a.post(Opcode::SEND, CE_ALWAYS, &[inline(&[n; 20])]);
        let slot = u16::from(n % 4);
        assert_eq!(receiver.recvs.wait().wqe_counter, slot);
        assert_eq!(receiver.bytes(100 * usize::from(slot), 20), [n; 20]);
        a.sends.wait();
    }
}

/// As libmlx5 and the queue pairs of a doorbell page use its registers.
#[test]
fn doorbells_in_shared_registers_are_found_by_their_qpn() {
    let page = Memory::alloc(4096).unwrap();
    let registers = [0x800, 0x900, 0xa00, 0xb00].map(|at| page.word64(at).unwrap());
    let card = card().0;
    let program = || {
        let doorbell = CardDoorbell::Shared(registers.clone());
        Program::rung_by(card.clone(), 64, None, CardTransport::Connection, doorbell)
    };
    let (mut a, mut b) = (program(), program());
    a.connect(&b);
    b.connect(&a);
    for round in 0..40u8 {
        for (from, to) in [(&mut a, 0), (&mut b, 2)] {
            let index = from.post(Opcode::NOP, CE_ALWAYS, &[]);
            // The record alone says nothing.
            assert!((0..100).all(|_| from.sends.poll().is_none()));
            let at = usize::try_from((from.pi - 1) % 64).unwrap() * BB;
            let mut first = [0; 8];
            from.sq.read(at, &mut first).unwrap();
            registers[to + usize::from(round % 2)].store(u64::from_ne_bytes(first));
            assert_eq!(from.sends.wait().wqe_counter, index);
        }
    }
    assert_eq!(card.stats().violations, 0);
}
