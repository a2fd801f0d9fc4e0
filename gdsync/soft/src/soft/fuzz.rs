//! Hostile peer: random packets against a live queue pair, through the real packet ring.

use std::collections::HashSet;

use super::*;
use crate::CmaPolicy;
use crate::packet::{self, Header, PacketOp, SEGMENT};
use crate::packet::{REFERENCE_BYTES, Reference};
use crate::wire::{LinkEnds, Peer, Piece};
use gdsync::verbs::{Context, Mr, Qp, RecvWr, SendWr, Wc};
use gdsync_device::QpAddress;
use gdsync_device::engine::Progress as _;
use mlx5_ring::{MAX_MESSAGE, Syndrome};

const TIMEOUT: Duration = Duration::from_secs(20);
/// QPN of the peer.
const PEER: u32 = 0x12_3456;
/// Bytes of the region that the peer may access, and of the guards around it.
const REGION: usize = 128 << 10;
const GUARD: usize = 64 << 10;
/// Posted receives.
const DEPTH: usize = 16;

/// Choices made by the fuzzer, from bytes of its input; the first one each when there are no more.
struct Random<'a>(&'a [u8]);

impl Random<'_> {
    fn bytes<const N: usize>(&mut self) -> [u8; N] {
        let mut bytes = [0; N];
        let some = self.0.split_off(..N.min(self.0.len())).expect("that many are there");
        bytes[..some.len()].copy_from_slice(some);
        bytes
    }

    fn below(&mut self, n: usize) -> usize {
        match n {
            ..=256 => usize::from(self.bytes::<1>()[0]) % n,
            _ => usize::from(u16::from_le_bytes(self.bytes())) % n,
        }
    }

    fn word(&mut self) -> u32 {
        u32::from_le_bytes(self.bytes())
    }

    /// Never without input.
    fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == n - 1
    }

    fn of<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len())]
    }
}

/// The HCA under test with one queue pair, and its peer's end of the link.
struct Bed {
    hca: Arc<SoftHca>,
    qp: Qp,
    memory: Memory,
    mr: Mr,
    ends: LinkEnds,
    gid: Gid,
    /// Keeps the link open.
    _port: Port,
    payload: Memory,
    /// Expected PSN, and opcode of the current message.
    expected: u32,
    message: Option<PacketOp>,
    /// Outstanding requests.
    posted: HashSet<u64>,
    next_id: u64,
}

impl Bed {
    fn new() -> Self {
        Self::with(&SoftHcaConfig::default())
    }

    fn with(config: &SoftHcaConfig) -> Self {
        let hca = Arc::new(SoftHca::start(config).unwrap());
        let context = Context::over(hca.clone());
        let pd = context.alloc_pd().unwrap();
        let memory = Memory::alloc(REGION + 2 * GUARD).unwrap();
        memory.write(0, &vec![0xc5; memory.len()]).unwrap();
        let mr = pd.register(&memory.slice(GUARD, REGION).unwrap(), Access::all()).unwrap();
        let qp = pd.build_qp().build().unwrap();
        let gid = Gid::random().unwrap();
        let port = Port::open(gid, EventCount::create().unwrap(), false).unwrap();
        let ends = port.connect(hca.shared.own.gid, TIMEOUT).unwrap();
        // Otherwise the queue pair would open a second link and respond there.
        let start = Instant::now();
        while hca.shared.with(|core| {
            hca.shared.accept(core);
            core.link_to(Peer::near(gid)).is_none()
        }) {
            assert!(start.elapsed() < TIMEOUT, "the link is not accepted");
            std::thread::yield_now();
        }
        let payload = Memory::alloc(2 * SEGMENT).unwrap();
        let (expected, message, posted, next_id) = (0, None, HashSet::new(), 0);
        let mut bed =
            Self { hca, qp, memory, mr, ends, gid, _port: port, payload, expected, message, posted, next_id };
        bed.connect(7);
        bed
    }

    fn connect(&mut self, psn: u32) {
        self.qp.connect(QpAddress::new(self.gid, PEER, psn)).unwrap();
        (self.expected, self.message) = (psn, None);
        for _ in 0..DEPTH {
            self.receive();
        }
    }

    fn id(&mut self) -> u64 {
        self.next_id += 1;
        self.posted.insert(self.next_id);
        self.next_id
    }

    fn receive(&mut self) {
        let wr_id = self.id();
        let sges = [self.mr.sge(0, 40 << 10).unwrap()];
        if self.qp.post_recv(&[RecvWr::new(&sges).id(wr_id)]).is_err() {
            self.posted.remove(&wr_id);
        }
    }

    fn send(&mut self, random: &mut Random<'_>) {
        let id = self.id();
        let len = random.of(&[0, 1, 100, SEGMENT, SEGMENT + 1, 3 * SEGMENT]);
        let sges = [self.mr.sge(0, len).unwrap()];
        let word = self.mr.sge(8, 8).unwrap();
        let remote = self.mr.remote(0).unwrap();
        let wr = match random.below(5) {
            0 => SendWr::send(&sges),
            1 => SendWr::write(remote, &sges),
            2 => SendWr::read(remote, &sges),
            3 => SendWr::fetch_add(remote, 1, word),
            _ => SendWr::compare_swap(remote, 1, 2, word),
        };
        if self.qp.post_send(&[wr.id(id)]).is_err() {
            self.posted.remove(&id);
        }
    }

    /// Checks off a completion; each request has one.
    fn done(&mut self, wc: &Wc) {
        assert!(self.posted.remove(&wc.wr_id), "{wc:?} completes a request that is not outstanding");
        assert!(wc.byte_len <= MAX_MESSAGE, "{wc:?}");
    }

    fn poll(&mut self) {
        while let Some(wc) = self.qp.poll_recv() {
            self.done(&wc);
            if wc.syndrome.is_none() {
                self.receive();
            }
        }
        while let Some(wc) = self.qp.poll_send() {
            self.done(&wc);
        }
    }

    /// Pushes a packet; steps the HCA while the ring is full.
    fn push(&mut self, header: &Header, ext: &[u8], len: usize) {
        let mut core = self.hca.shared.core.lock();
        self.hca.shared.accept(&mut core);
        let pieces = [Piece { memory: &self.payload, offset: 0, len }];
        while !self.ends.tx.try_push(&header.to_bytes(), ext, &pieces).unwrap() {
            core.step(&self.hca.shared.doorbells);
        }
    }

    /// Steps the HCA until idle. Returns its responses if the peer takes them, and checks how many it queues.
    fn step(&mut self, takes: bool) -> Vec<Header> {
        let mut core = self.hca.shared.core.lock();
        self.hca.shared.accept(&mut core);
        while core.step(&self.hca.shared.doorbells) {}
        let mut responses = Vec::new();
        while takes && let Some(record) = self.ends.rx.peek().unwrap() {
            responses.push(Header::from_bytes(&record.header));
            self.ends.rx.pop(record);
        }
        let held = core.with_qp(self.qp.qpn(), |qp, _| qp.resp.held()).unwrap();
        assert!(held <= 600, "{held} responses and messages are held for the peer");
        responses
    }

    fn sent_psn(&self) -> u32 {
        self.hca.shared.with(|core| core.with_qp(self.qp.qpn(), |qp, _| qp.req.sent_psn())).unwrap()
    }

    fn header(&self, op: PacketOp, psn: u32) -> Header {
        Header::new(op, self.qp.qpn(), PEER, psn)
    }

    fn guards_are_whole(&self) {
        let mut bytes = vec![0; self.memory.len()];
        self.memory.read(0, &mut bytes).unwrap();
        let is_whole = |guard: &[u8]| guard.iter().all(|byte| *byte == 0xc5);
        assert!(
            is_whole(&bytes[..GUARD]) && is_whole(&bytes[GUARD + REGION..]),
            "bytes outside of the region changed"
        );
    }

    /// Aborts and reconnects the queue pair; all outstanding requests must complete.
    fn again(&mut self, psn: u32) {
        self.qp.abort().unwrap();
        let start = Instant::now();
        while !self.posted.is_empty() {
            assert!(start.elapsed() < TIMEOUT, "lost: {:?}", self.posted);
            self.step(true);
            while let Some(wc) = self.qp.poll_recv().or_else(|| self.qp.poll_send()) {
                self.done(&wc);
            }
        }
        self.qp.modify(&QpAttr::to(QpState::RESET)).unwrap();
        self.connect(psn);
    }

    /// A packet that a correct peer could send next, or a mutation of it.
    fn random_packet(&mut self, random: &mut Random<'_>) {
        const OPS: [PacketOp; 5] =
            [PacketOp::SEND, PacketOp::WRITE, PacketOp::READ, PacketOp::COMPARE_SWAP, PacketOp::FETCH_ADD];
        let is_answer = random.one_in(3);
        let mut op = match self.message {
            Some(op) if !is_answer => op,
            _ if is_answer => PacketOp(u8::try_from(6 + random.below(7)).unwrap()),
            _ => random.of(&OPS),
        };
        let sent =
            self.hca.shared.with(|core| core.with_qp(self.qp.qpn(), |qp, _| qp.req.sent_psn())).unwrap();
        let base = if is_answer { sent.wrapping_sub(1) } else { self.expected };
        let distance = random.of(&[0, 0, 0, 0, 0, 0, 0, 0, 1, 2, 64, u32::MAX, u32::MAX - 1, u32::MAX - 63]);
        let psn = if random.one_in(50) { random.word() } else { base.wrapping_add(distance) };
        let is_first = self.message.is_none();
        let is_last = random.one_in(3) || !matches!(op, PacketOp::SEND | PacketOp::WRITE);
        let mut flags = if is_first { packet::FIRST } else { 0 } | if is_last { packet::LAST } else { 0 };
        if random.one_in(40) {
            flags = u8::try_from(random.below(128)).unwrap();
        }
        if random.one_in(60) {
            op = PacketOp(u8::try_from(random.below(16)).unwrap());
        }
        if matches!(op, PacketOp::READ | PacketOp::READ_RESPONSE) && random.one_in(2) {
            flags |= packet::REFERENCE;
        }
        if random.one_in(8) {
            flags |= packet::IMM;
        }
        let len = if is_last { random.of(&[0, 1, 100, SEGMENT]) } else { SEGMENT };
        let len = if random.one_in(60) { random.below(SEGMENT + 8) } else { len };
        let mut header = self.header(op, psn);
        header.flags = flags;
        header.rkey = if random.one_in(50) { random.word() } else { self.mr.rkey() };
        header.code = random.of(&[0, 0, 1, 0x13, 0xfe, 5, 99]);
        header.len = random.of(&[8, 4, 100, 5000, 40_000, 0, MAX_MESSAGE, MAX_MESSAGE + 1, u32::MAX]);
        if random.one_in(50) {
            header.src = random.word();
        }
        let addr = self.mr.memory().addr();
        let addr =
            addr.wrapping_add(random.of(&[0, 0, 0, 8, 64, 4, REGION as u64 - 8, REGION as u64, u64::MAX]));
        let mut ext = Vec::new();
        match op {
            PacketOp::WRITE | PacketOp::READ => ext.extend(addr.to_le_bytes()),
            PacketOp::COMPARE_SWAP | PacketOp::FETCH_ADD => {
                [addr, 1, 2, 3, 4].iter().for_each(|word| ext.extend(word.to_le_bytes()));
            }
            PacketOp::ATOMIC_RESPONSE => ext.extend(7u64.to_le_bytes()),
            _ => {}
        }
        if flags & packet::REFERENCE != 0 && op != PacketOp::READ {
            let mut bytes: [u8; REFERENCE_BYTES] = Reference::to_host(self.payload.addr()).to_bytes();
            if random.one_in(2) {
                bytes[random.below(REFERENCE_BYTES)] ^= 1 << random.below(8);
            }
            ext.extend(bytes);
        }
        if random.one_in(60) {
            ext.truncate(random.below(ext.len() + 1));
        }
        let bare = matches!(op, PacketOp::SEND | PacketOp::WRITE | PacketOp::READ_RESPONSE);
        let body = if bare && flags & packet::REFERENCE == 0 { len } else { 0 };
        self.push(&header, &ext, body);
        let now = self.hca.shared.with(|core| {
            while core.step(&self.hca.shared.doorbells) {}
            core.with_qp(self.qp.qpn(), |qp, _| qp.resp.expected_psn()).unwrap()
        });
        if now != self.expected && !is_answer {
            let goes_on = matches!(op, PacketOp::SEND | PacketOp::WRITE) && flags & packet::LAST == 0;
            self.message = goes_on.then_some(op);
        }
        self.expected = now;
    }
}

#[test]
fn random_packets_do_not_break_the_hca() {
    bolero::check!().for_each(|input: &[u8]| {
        let (random, mut takes) = (&mut Random(input), true);
        let cma = random.of(&[CmaPolicy::Auto, CmaPolicy::From(1), CmaPolicy::Never]);
        let mut bed = Bed::with(&SoftHcaConfig { cma, ..SoftHcaConfig::default() });
        while !random.0.is_empty() {
            if random.one_in(20) {
                bed.send(random);
            }
            if random.one_in(200) {
                takes = !takes;
            }
            bed.random_packet(random);
            bed.step(takes);
            bed.poll();
            if bed.qp.is_broken() || random.one_in(200) {
                takes = true;
                bed.again(random.word() & 0xff_ffff);
            }
        }
        bed.again(1);
        bed.guards_are_whole();
    });
}

#[test]
fn ack_of_unsent_packets_is_ignored() {
    let mut bed = Bed::with(&SoftHcaConfig { cma: CmaPolicy::Never, ..SoftHcaConfig::default() });
    let psn = bed.qp.address().psn;
    // More packets than the window.
    let id = bed.id();
    let sges: Vec<_> = (0..24).map(|_| bed.mr.sge(0, 4 * SEGMENT).unwrap()).collect();
    let wrs: Vec<_> = sges.iter().map(|sge| SendWr::send(std::slice::from_ref(sge)).id(id)).collect();
    wrs.iter().for_each(|wr| _ = bed.qp.post_send(&[*wr]).unwrap());
    while bed.sent_psn() < psn + 4 {
        bed.step(true);
    }
    let mut header = bed.header(PacketOp::ACK, psn + 24 * 4 - 1);
    bed.push(&header, &[], 0);
    bed.step(true);
    assert!(bed.qp.poll_send().is_none(), "a send completed by an ACK of a packet that was not sent");
    header.psn = psn + 3;
    bed.push(&header, &[], 0);
    bed.step(true);
    assert!(bed.qp.poll_send().unwrap().syndrome.is_none(), "its packets were sent");
    assert!(bed.qp.poll_send().is_none());
}

#[test]
fn endless_message_is_refused() {
    let mut bed = Bed::new();
    let packets = MAX_MESSAGE as usize / SEGMENT;
    let addr = bed.mr.memory().addr().to_le_bytes();
    let mut naks = Vec::new();
    for n in 0..=u32::try_from(packets).unwrap() {
        let mut header = bed.header(PacketOp::WRITE, bed.expected + n);
        header.flags = if n == 0 { packet::FIRST } else { 0 };
        header.rkey = bed.mr.rkey();
        bed.push(&header, &addr, SEGMENT);
        if n % 16 == 0 {
            naks.extend(bed.step(true));
        }
    }
    naks.extend(bed.step(true));
    assert!(
        naks.iter().any(|header| header.op == PacketOp::NAK && header.code == Syndrome::REM_INV_REQ_ERR.0)
    );
    assert_eq!(bed.hca.shared.with(|core| core.with_qp(bed.qp.qpn(), |qp, _| qp.state)), Some(QpState::ERR));
}

/// The receiver may be busy with a long message before it runs a step again. A reply to a short one goes before its acknowledgement.
#[test]
fn long_messages_are_acknowledged_with_their_completion() {
    let mut bed = Bed::new();
    for (n, is_long) in [(0, false), (1, true)] {
        let mut header = bed.header(PacketOp::SEND, bed.expected + n);
        // One step for all packets: the service thread has none.
        let mut core = bed.hca.shared.core.lock();
        let mut push = |header: &Header, len| {
            let pieces = [Piece { memory: &bed.payload, offset: 0, len }];
            assert!(bed.ends.tx.try_push(&header.to_bytes(), &[], &pieces).unwrap());
        };
        header.flags = packet::FIRST;
        if is_long {
            push(&header, SEGMENT);
            (header.flags, header.psn) = (0, header.psn + 1);
        }
        header.flags |= packet::LAST;
        push(&header, 8);
        assert!(core.step(&bed.hca.shared.doorbells), "there are packets");
        assert_eq!(bed.ends.rx.peek().unwrap().is_some(), is_long, "an acknowledgement in the same step");
        drop(core);
        bed.step(true);
        assert!(bed.qp.poll_recv().is_some_and(|wc| wc.syndrome.is_none()));
    }
}

#[test]
fn write_inside_a_send_is_refused_and_receive_flushed() {
    let mut bed = Bed::new();
    let mut header = bed.header(PacketOp::SEND, bed.expected);
    header.flags = packet::FIRST;
    bed.push(&header, &[], SEGMENT);
    header = bed.header(PacketOp::WRITE, bed.expected + 1);
    (header.flags, header.rkey) = (packet::LAST, bed.mr.rkey());
    bed.push(&header, &bed.mr.memory().addr().to_le_bytes(), 8);
    let naks = bed.step(true);
    assert!(
        naks.iter().any(|header| header.op == PacketOp::NAK && header.code == Syndrome::REM_INV_REQ_ERR.0)
    );
    // All receives complete, including that of the message.
    bed.again(9);
}

#[test]
fn peer_that_takes_no_responses_costs_no_memory() {
    let mut bed = Bed::new();
    for _ in 0..DEPTH {
        let mut header = bed.header(PacketOp::SEND, bed.expected);
        header.flags = packet::FIRST | packet::LAST;
        bed.push(&header, &[], 0);
        bed.expected += 1;
    }
    bed.step(false);
    // `step` checks the number of queued responses.
    for n in 0..20_000u32 {
        let psn = if n % 2 == 0 { bed.expected } else { bed.expected + 1 + n };
        let mut header = bed.header(PacketOp::SEND, psn);
        header.flags = packet::FIRST | packet::LAST;
        bed.push(&header, &[], 0);
        bed.step(false);
    }
}

/// An HCA whose READs take references.
fn reading_bed() -> Bed {
    Bed::with(&SoftHcaConfig { cma: CmaPolicy::From(1), ..SoftHcaConfig::default() })
}

#[test]
fn references_in_read_responses_end_with_their_region() {
    let mut bed = reading_bed();
    let (addr, rkey) = (bed.mr.memory().addr().to_le_bytes(), bed.mr.rkey());
    let is_grant =
        |header: &Header| header.op == PacketOp::READ_RESPONSE && header.flags & packet::REFERENCE != 0;
    let read = |bed: &mut Bed, flags| {
        let mut header = bed.header(PacketOp::READ, bed.expected);
        (header.flags, header.rkey, header.len) = (flags, rkey, 100);
        bed.push(&header, &addr, 0);
        bed.expected += 1;
        bed.step(true)
    };
    let revoked =
        |bed: &mut Bed| bed.step(true).iter().filter(|header| header.op == PacketOp::REVOKE).count();
    assert!(!read(&mut bed, 0).iter().any(is_grant), "only who asks gets a reference");
    assert!(read(&mut bed, packet::REFERENCE).iter().any(is_grant));
    // Of another region, which nobody reads.
    let other = bed.hca.reg_mr(1, &bed.payload, Access::all()).unwrap();
    bed.hca.dereg_mr(other);
    assert_eq!(revoked(&mut bed), 0);
    // As when its last handle is dropped.
    bed.hca.dereg_mr(MrKeys { lkey: bed.mr.lkey(), rkey, is_staged: false });
    assert_eq!(revoked(&mut bed), 1);
    let refused = |header: &Header| header.op == PacketOp::NAK && header.code == Syndrome::REM_ACCESS_ERR.0;
    assert!(read(&mut bed, packet::REFERENCE).iter().any(refused));
    bed.again(1);
}

#[test]
fn revoked_read_is_asked_for_again() {
    let mut bed = reading_bed();
    let (bytes, psn) = (vec![7; 100], bed.qp.address().psn);
    bed.payload.write(0, &bytes).unwrap();
    let (id, sges) = (bed.id(), [bed.mr.sge(0, 100).unwrap()]);
    let remote = bed.mr.remote(0).unwrap();
    bed.qp.post_send(&[SendWr::read(remote, &sges).id(id)]).unwrap();
    let asked = |bed: &mut Bed| {
        let is_read = |header: &Header| header.op == PacketOp::READ && header.flags & packet::REFERENCE != 0;
        bed.step(true).iter().filter(|header| is_read(header)).count()
    };
    assert_eq!(asked(&mut bed), 1);
    let mut grant = bed.header(PacketOp::READ_RESPONSE, psn);
    grant.flags = packet::REFERENCE;
    let reference = Reference::to_host(bed.payload.host_addr(0).unwrap()).to_bytes();
    let revoke = bed.header(PacketOp::REVOKE, 0);
    // Both are there before the copy begins.
    let mut core = bed.hca.shared.core.lock();
    for (header, body) in [(&grant, &reference[..]), (&revoke, &[])] {
        assert!(bed.ends.tx.try_push(&header.to_bytes(), body, &[]).unwrap());
    }
    core.step(&bed.hca.shared.doorbells);
    drop(core);
    assert_eq!(asked(&mut bed), 1);
    assert!(bed.qp.poll_send().is_none(), "a READ completed by a reference that was revoked");
    bed.push(&grant, &reference, 0);
    bed.step(true);
    let wc = bed.qp.poll_send().unwrap();
    assert_eq!((wc.wr_id, wc.syndrome, wc.byte_len), (id, None, 100));
    assert_eq!(bed.mr.memory().to_vec()[..101], [&bytes[..], &[0xc5]].concat());
    bed.posted.remove(&id);
    bed.again(1);
}
