//! Datagrams between cards.

use super::*;
use gdsync_device::engine::Progress as _;
use mlx5_ring::AddressVector;

/// A network of cards, by GID or LID.
#[derive(Debug)]
struct Net {
    own: Gid,
    lid: u16,
    lids: Mutex<Vec<(u16, Gid)>>,
}

impl Network for Net {
    fn destination(&self, to: &AddressVector) -> Option<Gid> {
        let of_lid = self.lids.lock().iter().find(|(lid, _)| *lid == to.rlid).map(|(_, gid)| *gid);
        of_lid.or((self.lid == 0).then_some(Gid(to.rgid)))
    }

    fn source(&self, _: u8) -> Gid {
        self.own
    }

    fn lid(&self) -> u16 {
        self.lid
    }
}

const QKEY: u32 = 0x1111_1111;

/// A program with a datagram queue pair in RTS.
fn datagrams(lid: u16, lids: &[(u16, Gid)]) -> Program {
    let card = card().0;
    let network = Arc::new(Net { own: card.gid(), lid, lids: Mutex::new(lids.to_vec()) });
    let program = Program::on(card, 64, None, CardTransport::Datagrams { mtu: 1024, network });
    program.card.set_qkey(program.qpn, QKEY);
    program.go_to_rts(None);
    program
}

fn address(to: &Program) -> AddressVector {
    AddressVector {
        qkey: QKEY,
        qpn: to.qpn,
        rgid: to.card.gid().0,
        hop_limit: 9,
        tclass: 3,
        ..AddressVector::default()
    }
}

#[test]
fn datagrams_carry_their_sender() {
    let (mut a, mut b) = (datagrams(0, &[]), datagrams(0, &[]));
    a.memory.write(0, &pattern(1024)).unwrap();
    let to = address(&b);
    // The first waits for the link.
    for len in [0, 1, 1000, 1024] {
        b.receive(&[b.sge(0, 40), b.sge(100, 1024)]);
        let body: Vec<_> =
            [to.to_bytes().to_vec()].into_iter().chain((len > 0).then(|| a.sge(0, len))).collect();
        let index = a.post(Opcode::SEND, CE_ALWAYS, &body);
        let cqe = a.sends.wait();
        assert_eq!((cqe.opcode, cqe.wqe_counter), (CqeOpcode::REQ, index));
        let cqe = b.recvs.wait();
        assert_eq!(
            (cqe.opcode, cqe.byte_cnt as usize, cqe.srqn_uidx),
            (CqeOpcode::RESP_SEND, 40 + len, UIDX)
        );
        assert_eq!((cqe.qpn, cqe.flags_rqpn, cqe.slid), (b.qpn, a.qpn | 1 << 28, 0));
        let grh = b.bytes(0, 40);
        assert_eq!((grh[0] >> 4, grh[7]), (6, 9));
        assert_eq!((&grh[8..24], &grh[24..]), (&a.card.gid().0[..], &b.card.gid().0[..]));
        assert_eq!(b.bytes(100, len), pattern(len));
    }
    // Inline, and to itself, with immediate data and the own Q_Key.
    a.receive(&[a.sge(4096, 100)]);
    let to = AddressVector { qkey: 1 << 31, ..address(&a) };
    a.post(Opcode::SEND_IMM, CE_ALWAYS, &[to.to_bytes().to_vec(), inline(&[6; 30])]);
    let cqe = a.recvs.wait();
    assert_eq!((cqe.opcode, cqe.byte_cnt, a.bytes(4136, 30)), (CqeOpcode::RESP_SEND_IMM, 70, vec![6; 30]));
}

#[test]
fn datagrams_find_a_lid() {
    let mut b = datagrams(0xb, &[]);
    let mut a = datagrams(0xa, &[(0xb, b.card.gid())]);
    b.receive(&[b.sge(0, 2000)]);
    let to = AddressVector { rlid: 0xb, sl: 5, rgid: [0; 16], ..address(&b) };
    a.post(Opcode::SEND, CE_ALWAYS, &[to.to_bytes().to_vec(), inline(&[6; 30])]);
    let cqe = b.recvs.wait();
    assert_eq!((cqe.flags_rqpn, cqe.slid, cqe.byte_cnt), (a.qpn | 5 << 24, 0xa, 70));
    assert_eq!(b.bytes(0, 70), [[0; 40].to_vec(), vec![6; 30]].concat());
}

#[test]
fn datagrams_that_nobody_takes_are_lost() {
    let (mut a, mut b) = (datagrams(0, &[]), datagrams(0, &[]));
    let to = address(&b);
    let nowhere = AddressVector { rgid: Gid::random().unwrap().0, ..to };
    let bad_key = AddressVector { qkey: QKEY + 1, ..to };
    let connection = Program::new(64);
    let other_kind = AddressVector { qpn: connection.qpn, rgid: connection.card.gid().0, ..to };
    let mut send = |to: &AddressVector, n: u8| {
        let index = a.post(Opcode::SEND, CE_ALWAYS, &[to.to_bytes().to_vec(), inline(&[n; 30])]);
        let cqe = a.sends.wait();
        assert_eq!((cqe.opcode, cqe.wqe_counter), (CqeOpcode::REQ, index), "the sender does not know");
    };
    // No receive is posted.
    send(&to, 1);
    let start = Instant::now();
    while b.card.stats().packets_discarded == 0 {
        assert!(start.elapsed() < TIMEOUT, "nothing came");
        std::thread::yield_now();
    }
    b.receive(&[b.sge(0, 100)]);
    for (to, n) in [(&nowhere, 2), (&bad_key, 3), (&other_kind, 4), (&to, 5)] {
        send(to, n);
    }
    assert_eq!((b.recvs.wait().byte_cnt, b.bytes(40, 30)), (70, vec![5; 30]));
    assert_eq!((b.recvs.poll(), b.card.stats().packets_discarded), (None, 2));
}

/// While this test holds the lock of the sending card, no link is added.
#[test]
fn datagrams_wait_for_a_peer_that_answers_late_and_hold_up_no_queue() {
    let (mut a, mut b) = (datagrams(0, &[]), datagrams(0, &[]));
    let to = address(&b).to_bytes().to_vec();
    (0..16).for_each(|n| b.receive(&[b.sge(100 * n, 100)]));
    let post = |a: &mut Program, n: u8| {
        // The program changes it once the send is complete.
        a.memory.fill(0, 30, n).unwrap();
        a.post(Opcode::SEND, CE_ALWAYS, &[to.clone(), a.sge(0, 30)])
    };
    let shared = a.card.0.shared.clone();
    let mut core = shared.core.lock();
    for n in 0..64 {
        let index = post(&mut a, n);
        while core.step(&shared.doorbells) {}
        assert_eq!(a.sends.poll().map(|cqe| (cqe.opcode, cqe.wqe_counter)), Some((CqeOpcode::REQ, index)));
    }
    assert_eq!(core.stats.packets_sent, 0);
    drop(core);
    for n in 0..16 {
        assert_eq!(b.recvs.wait().byte_cnt, 70);
        assert_eq!(b.bytes(100 * n + 40, 30), [u8::try_from(n).unwrap(); 30]);
    }
    let start = Instant::now();
    while b.card.stats().packets_received < 64 {
        assert!(start.elapsed() < TIMEOUT, "datagrams are lost");
        std::thread::yield_now();
    }
    b.receive(&[b.sge(0, 100)]);
    post(&mut a, 200);
    b.recvs.wait();
    assert_eq!((b.bytes(40, 30), b.card.stats().packets_received), (vec![200; 30], 65));
}

#[test]
fn a_silent_peer_does_not_hold_up_datagrams_for_others() {
    use std::io::Read as _;
    use std::os::linux::net::SocketAddrExt as _;
    let (mut a, mut b) = (datagrams(0, &[]), datagrams(0, &[]));
    let silent = Gid::random().unwrap();
    let name = std::os::unix::net::SocketAddr::from_abstract_name(crate::wire::name(silent)).unwrap();
    // Takes connections and does not answer, as a stopped process.
    let listener = std::os::unix::net::UnixListener::bind_addr(&name).unwrap();
    b.receive(&[b.sge(0, 100)]);
    for to in [AddressVector { rgid: silent.0, ..address(&b) }, address(&b)] {
        a.post(Opcode::SEND, CE_ALWAYS, &[to.to_bytes().to_vec(), inline(&[6; 30])]);
    }
    assert_eq!((b.recvs.wait().byte_cnt, b.bytes(40, 30)), (70, vec![6; 30]));
    let (mut stream, _) = listener.accept().unwrap();
    stream.set_read_timeout(Some(TIMEOUT)).unwrap();
    let mut bytes = [0; 1024];
    assert!(stream.read(&mut bytes).unwrap() > 0, "a greeting");
    stream.set_nonblocking(true).unwrap();
    let still = stream.read(&mut bytes).map_err(|error| error.kind());
    assert_eq!(still, Err(std::io::ErrorKind::WouldBlock), "it is still waited for");
}

#[test]
fn datagrams_that_do_not_fit_end_their_queue_pair() {
    let (mut a, mut b) = (datagrams(0, &[]), datagrams(0, &[]));
    let to = address(&b).to_bytes().to_vec();
    b.receive(&[b.sge(0, 69)]);
    a.post(Opcode::SEND, 0, &[to.clone(), inline(&[1; 30])]);
    assert_eq!(b.recvs.wait().syndrome, Syndrome::LOC_LEN_ERR);
    assert_eq!(b.card.state(b.qpn).unwrap(), QpState::ERR);
    let long = a.post(Opcode::SEND, 0, &[to.clone(), a.sge(0, 1025)]);
    let next = a.post(Opcode::SEND, 0, std::slice::from_ref(&to));
    let failed = [(long, Syndrome::LOC_LEN_ERR), (next, Syndrome::WR_FLUSH_ERR)];
    assert_eq!([(); 2].map(|()| a.sends.wait()).map(|cqe| (cqe.wqe_counter, cqe.syndrome)), failed);
    assert_eq!(a.card.state(a.qpn).unwrap(), QpState::SQE, "only sends have ended");
    a.card.modify_qp(a.qpn, &QpAttr::to(QpState::RTS), None, TIMEOUT).unwrap();
    let after = a.post(Opcode::SEND, CE_ALWAYS, &[to]);
    assert_eq!([a.sends.wait()].map(|cqe| (cqe.wqe_counter, cqe.opcode)), [(after, CqeOpcode::REQ)]);
}

#[test]
fn of_a_receive_what_is_written_must_be_in_its_region() {
    let (mut a, mut b) = (datagrams(0, &[]), datagrams(0, &[]));
    let datagram = [address(&b).to_bytes().to_vec(), inline(&[1; 30])];
    for (inside, syndrome) in [(70, Syndrome(0)), (69, Syndrome::LOC_PROT_ERR)] {
        b.receive(&[b.sge(REGION - inside, 200)]);
        a.post(Opcode::SEND, 0, &datagram);
        assert_eq!(b.recvs.wait().syndrome, syndrome, "{inside}");
    }
}

/// Programs look for the version and the check sum (`ibv_init_ah_from_wc`), and compare the addresses.
#[test]
fn between_ipv4_addresses_the_grh_is_an_ip_header() {
    let ip = |last| Gid([0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 1, 2, last]);
    let card = card().0;
    let network = |own| Arc::new(Net { own, lid: 0, lids: Mutex::new(vec![(7, card.gid())]) });
    let transport = |own| CardTransport::Datagrams { mtu: 4096, network: network(own) };
    let mut a = Program::on(card.clone(), 64, None, transport(ip(3)));
    let mut b = Program::on(card.clone(), 64, None, transport(ip(4)));
    [&a, &b].into_iter().for_each(|program| program.go_to_rts(None));
    b.receive(&[b.sge(0, 5000)]);
    let to = AddressVector { qkey: 0, rgid: ip(4).0, rlid: 7, ..address(&b) };
    a.post(Opcode::SEND, CE_ALWAYS, &[to.to_bytes().to_vec(), a.sge(8192, 4096)]);
    let cqe = b.recvs.wait();
    // UCX takes the form of the header from the CQE.
    assert_eq!((cqe.byte_cnt, cqe.flags_rqpn >> 24), (4136, 0x12));
    let header = b.bytes(20, 20);
    let sum: u32 = header.chunks(2).map(|word| u32::from(u16::from_be_bytes([word[0], word[1]]))).sum();
    assert_eq!((sum & 0xffff) + (sum >> 16), 0xffff, "check sum");
    assert_eq!((header[0], header[1], header[8], header[9]), (0x45, 3, 9, 17));
    assert_eq!((&header[12..16], &header[16..]), (&[10, 1, 2, 3][..], &[10, 1, 2, 4][..]));
    assert_eq!(b.bytes(0, 20), [0; 20]);
}

/// Any process of the user may send datagrams.
#[test]
fn random_datagrams_do_not_break_the_card() {
    const GUARD: usize = 4096;
    bolero::check!().for_each(|input: &[u8]| {
        let mut b = datagrams(0, &[]);
        b.memory.fill(0, REGION, 0xc5).unwrap();
        let port =
            crate::wire::Port::open(Gid::random().unwrap(), crate::wire::EventCount::create().unwrap(), true);
        let mut ends = port.unwrap().connect(b.card.gid(), TIMEOUT).unwrap();
        let payload = Memory::alloc(2 * crate::packet::SEGMENT).unwrap();
        let mut is_posted = false;
        for bytes in input.chunks(16).take(64) {
            let byte = |n: usize| bytes.get(n).copied().unwrap_or(0);
            if !std::mem::replace(&mut is_posted, true) {
                b.receive(&[b.sge(GUARD, 40), b.sge(GUARD + 64, usize::from(byte(0)) * 32)]);
            }
            let received = b.card.stats().packets_received;
            let op = crate::packet::PacketOp(if byte(1) < 200 { 13 } else { byte(2) });
            let mut header =
                crate::packet::Header::new(op, b.qpn, 0x1234, u32::from(byte(3)) << (byte(4) % 32));
            header.flags = if byte(5) < 200 { 3 | byte(5) & 0x2c } else { byte(6) };
            header.rkey = if byte(7) < 250 { QKEY } else { 0 };
            let len = match byte(8) % 4 {
                0 => usize::from(byte(9)),
                1 => usize::from(byte(9)) * 16,
                2 => 4096 + usize::from(byte(9) % 3) - 1,
                _ => usize::from(byte(9)) * 64,
            };
            header.len = u32::try_from(len).unwrap().wrapping_add(u32::from(byte(10) == 1));
            let pieces = [crate::wire::Piece { memory: &payload, offset: 0, len }];
            let ext = vec![7; 40 - usize::from(byte(11) == 1)];
            assert!(ends.tx.try_push(&header.to_bytes(), &ext, &pieces).unwrap());
            ends.event.notify();
            let start = Instant::now();
            while b.card.stats().packets_received == received {
                assert!(start.elapsed() < TIMEOUT, "the packet is not received");
                std::thread::yield_now();
            }
            while let Some(cqe) = b.recvs.poll() {
                assert!(cqe.byte_cnt <= 4136);
                is_posted = false;
            }
            if b.card.state(b.qpn).unwrap() == QpState::ERR {
                b.card.modify_qp(b.qpn, &QpAttr::to(QpState::RESET), None, TIMEOUT).unwrap();
                (b.receives, is_posted) = (0, false);
                b.go_to_rts(None);
            }
        }
        let bytes = b.bytes(0, REGION);
        let is_whole = |guard: &[u8]| guard.iter().all(|byte| *byte == 0xc5);
        assert!(is_whole(&bytes[..GUARD]) && is_whole(&bytes[GUARD + 64 + 255 * 32..]));
    });
}
