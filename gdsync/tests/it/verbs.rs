//! Every operation posted by the CPU, within one HCA and between two: bytes, completions, and what stays untouched.

use std::os::fd::AsFd;

use crate::card::has_dma_bufs;
use crate::common::{
    PATIENCE, Side, assert_clean, bytes, hca, is_device_named, loopback, pair, pattern, receive, received,
    sent,
};
use gdsync::Error;
use gdsync::memory::{Memory, host_page};
use gdsync::mlx5::{CqeOpcode, Opcode};
use gdsync::verbs::{Access, QpBuilder, RecvWr, RemoteAddr, SendWr, Sge, Wc};

/// Payload of one packet of the software HCA.
const SEGMENT: usize = 16 * 1024;
const MAX: usize = (4 << 20) + 3;
const LENGTHS: [usize; 16] = [
    0,
    1,
    2,
    63,
    64,
    65,
    4096,
    SEGMENT - 1,
    SEGMENT,
    SEGMENT + 1,
    2 * SEGMENT,
    3 * SEGMENT + 7,
    // Those of links to other hosts.
    4 * SEGMENT,
    4 * SEGMENT + 1,
    70 * SEGMENT,
    MAX,
];
/// Untouched bytes around every target.
const EDGE: usize = 32;

/// A pair on one HCA, and one on two.
fn both(bytes: usize, build: impl Fn(QpBuilder) -> QpBuilder + Copy) -> [(Side, Side); 2] {
    [loopback(bytes, build), pair(bytes, build)]
}

/// The end of a test, in which nothing went wrong.
fn done(a: &Side, b: &Side) {
    assert_clean(&[a, b]);
    assert!(a.qp.poll_send().is_none() && b.qp.poll_recv().is_none(), "a completion too many");
}

/// Where an operation of `len` bytes puts them, and with nothing else touched.
fn assert_lands(to: &Side, data: &[u8]) {
    let seen = bytes(to, 0, data.len() + 2 * EDGE);
    assert!(seen[EDGE..EDGE + data.len()] == *data, "{} bytes arrived wrong", data.len());
    assert_eq!(seen[..EDGE], [0xa5; EDGE], "before {} bytes", data.len());
    assert_eq!(seen[EDGE + data.len()..], [0xa5; EDGE], "behind {} bytes", data.len());
}

/// A completion as it should be.
fn wc(
    of: &Side,
    wr_id: u64,
    opcode: CqeOpcode,
    send_opcode: Opcode,
    byte_len: usize,
    imm: Option<u32>,
) -> Wc {
    let byte_len = u32::try_from(byte_len).unwrap();
    Wc {
        wr_id,
        qpn: of.qp.qpn(),
        opcode,
        send_opcode,
        byte_len,
        imm,
        syndrome: None,
        vendor: 0,
        deregistered: false,
    }
}

/// A file in shared memory in place of the dma-buf of another driver.
#[test]
fn dma_bufs_are_sent_from_and_received_into() {
    if is_device_named() && !has_dma_bufs() {
        return;
    }
    const OFFSET: u64 = 4096 + 64;
    let (all, file) = Memory::shared(c"dma-buf", 4 * 4096).unwrap();
    let whole = |offset, len| Memory::of_dma_buf(file.as_fd(), offset, len);
    for (offset, len) in [(0, 0), (0, 4 * 4096 + 1), (4 * 4096, 1), (u64::MAX, 2)] {
        assert!(matches!(whole(offset, len), Err(Error::InvalidArgument { .. })), "{offset} {len}");
    }
    let (a, b) = &pair(4096, |q| q);
    let (data, memory) = (pattern(700, 3), whole(OFFSET, 2048).unwrap());
    let regions = [a, b].map(|side| side.pd.register(&memory, Access::all()).unwrap());
    assert_eq!(memory.dma_buf().map(|(_, offset)| offset), Some(OFFSET));
    assert_eq!(memory.slice(10, 20).unwrap().dma_buf().map(|(_, offset)| offset), Some(OFFSET + 10));
    drop(memory);
    all.write(4096 + 64 + 100, &data).unwrap();
    receive(b, 1, 0, 700);
    a.qp.post_send(&[SendWr::send(&[regions[0].sge(100, 700).unwrap()])]).unwrap();
    received(b);
    sent(a);
    assert_eq!(bytes(b, 0, 700), data);
    b.qp.post_recv(&[RecvWr::new(&[regions[1].sge(1000, 700).unwrap()])]).unwrap();
    a.memory().write(0, &data).unwrap();
    a.qp.post_send(&[SendWr::send(&[a.mr.sge(0, 700).unwrap()])]).unwrap();
    received(b);
    sent(a);
    assert_eq!(all.to_vec()[4096 + 64 + 1000..][..700], data);
}

#[test]
fn messages_of_every_length_arrive_and_touch_nothing_else() {
    for (a, b) in &both(MAX + 2 * EDGE, |q| q) {
        for (i, len) in LENGTHS.into_iter().enumerate() {
            let id = 0xfeed_0000_0000 + i as u64;
            let imm = 0x0102_0304 + u32::try_from(i).unwrap();
            for kind in 0..5 {
                let data = pattern(len, kind + 7 * i);
                let (from, to) = if kind == 4 { (b, a) } else { (a, b) };
                from.memory().write(EDGE, &data).unwrap();
                to.memory().fill(0, len + 2 * EDGE, 0xa5).unwrap();
                let sges = [a.mr.sge(EDGE, len).unwrap()];
                let remote = b.mr.remote(EDGE).unwrap();
                let (wr, opcode, at_b) = match kind {
                    0 => (SendWr::send(&sges), Opcode::SEND, Some(CqeOpcode::RESP_SEND)),
                    1 => (SendWr::send(&sges).imm(imm), Opcode::SEND_IMM, Some(CqeOpcode::RESP_SEND_IMM)),
                    2 => (SendWr::write(remote, &sges), Opcode::RDMA_WRITE, None),
                    3 => (
                        SendWr::write(remote, &sges).imm(imm),
                        Opcode::RDMA_WRITE_IMM,
                        Some(CqeOpcode::RESP_WR_IMM),
                    ),
                    _ if len == 0 => continue, // A READ of nothing is refused: see errors.rs.
                    _ => (SendWr::read(remote, &sges), Opcode::RDMA_READ, None),
                };
                if at_b.is_some() {
                    // A receive with room to spare: only the message may be written.
                    receive(b, id + 1, EDGE, len + EDGE);
                }
                a.qp.post_send(&[wr.id(id)]).unwrap();
                let read = if kind == 4 { len } else { 0 };
                assert_eq!(sent(a), wc(a, id, CqeOpcode::REQ, opcode, read, None));
                if let Some(at_b) = at_b {
                    let imm = (kind % 2 == 1).then_some(imm);
                    assert_eq!(received(b), wc(b, id + 1, at_b, Opcode::NOP, len, imm));
                }
                assert_lands(to, &data);
            }
        }
        done(a, b);
    }
}

/// Cuts `len` bytes from `offset` on into SGEs of the given lengths and a last one with the rest.
fn cut(side: &Side, offset: usize, len: usize, lens: &[usize]) -> Vec<Sge> {
    let mut at = 0;
    let mut sges = Vec::new();
    for part in lens.iter().copied().chain([usize::MAX]) {
        let part = part.min(len - at);
        sges.push(side.mr.sge(offset + at, part).unwrap());
        at += part;
    }
    sges
}

#[test]
fn gather_and_scatter_lists_of_any_cut_move_the_same_bytes() {
    let cuts: [&[usize]; 6] = [
        &[],
        &[1],
        &[0, 5, 0, 3],
        &[SEGMENT - 1, 2],
        &[SEGMENT, SEGMENT],
        &[7, 64, 1000, SEGMENT + 3, 1, 0, 20],
    ];
    for (a, b) in &both(4 * SEGMENT, |q| q.max_send_sge(8).max_recv_sge(8)) {
        for (i, left) in cuts.iter().enumerate() {
            for (j, right) in cuts.iter().enumerate() {
                for len in [3, 2 * SEGMENT + 9] {
                    let data = pattern(len, i * 6 + j);
                    let wipe = || b.memory().fill(0, len + 2 * EDGE, 0xa5).unwrap();
                    a.memory().write(EDGE, &data).unwrap();
                    let from = cut(a, EDGE, len, left);
                    let to = cut(b, EDGE, len, right);
                    wipe();
                    b.qp.post_recv(&[RecvWr::new(&to).id(1)]).unwrap();
                    a.qp.post_send(&[SendWr::send(&from)]).unwrap();
                    assert_eq!(received(b).ok().unwrap().byte_len as usize, len);
                    sent(a).ok().unwrap();
                    assert_lands(b, &data);
                    wipe();
                    a.qp.post_send(&[SendWr::write(b.mr.remote(EDGE).unwrap(), &from)]).unwrap();
                    sent(a).ok().unwrap();
                    assert_lands(b, &data);
                    wipe();
                    // From the other side, so that the READ scatters to the same place.
                    b.qp.post_send(&[SendWr::read(a.mr.remote(EDGE).unwrap(), &to)]).unwrap();
                    assert_eq!(sent(b).ok().unwrap().byte_len as usize, len);
                    assert_lands(b, &data);
                }
            }
        }
        done(a, b);
    }
}

#[test]
fn inline_data_of_every_length_is_taken_when_it_is_posted() {
    for (a, b) in &both(4096, |q| q.max_inline(200)) {
        for len in 0..=200 {
            let data = pattern(len, len);
            b.memory().fill(0, len + 2 * EDGE, 0xa5).unwrap();
            receive(b, 3, EDGE, len);
            let mut buffer = data.clone();
            a.qp.post_send(&[SendWr::send_inline(&buffer).imm(9)]).unwrap();
            buffer.fill(0);
            let got = received(b);
            assert_eq!(got, wc(b, 3, CqeOpcode::RESP_SEND_IMM, Opcode::NOP, len, Some(9)));
            assert_eq!(sent(a), wc(a, 0, CqeOpcode::REQ, Opcode::SEND_IMM, 0, None));
            assert_lands(b, &data);

            b.memory().fill(0, len + 2 * EDGE, 0xa5).unwrap();
            let mut buffer = data.clone();
            a.qp.post_send(&[SendWr::write_inline(b.mr.remote(EDGE).unwrap(), &buffer)]).unwrap();
            buffer.fill(0);
            sent(a).ok().unwrap();
            assert_lands(b, &data);
        }
        done(a, b);
    }
}

#[test]
fn atomics_return_the_old_value_and_change_one_word() {
    for (a, b) in &both(4096, |q| q) {
        let word = |side: &Side, at: usize| u64::from_ne_bytes(bytes(side, at, 8).try_into().unwrap());
        b.memory().fill(0, 64, 0xa5).unwrap();
        let start = 0x0123_4567_89ab_cdefu64;
        b.memory().write(16, &start.to_ne_bytes()).unwrap();
        let remote = b.mr.remote(16).unwrap();
        // The result needs no alignment.
        let result = a.mr.sge(3, 8).unwrap();
        let mut value = start;
        let steps = [
            (SendWr::compare_swap(remote, start, 77, result), Opcode::ATOMIC_CS, 77),
            (SendWr::compare_swap(remote, start, 99, result), Opcode::ATOMIC_CS, 77),
            (SendWr::fetch_add(remote, 3, result), Opcode::ATOMIC_FA, 80),
            (SendWr::fetch_add(remote, u64::MAX, result), Opcode::ATOMIC_FA, 79),
            (SendWr::compare_swap(remote, 79, u64::MAX, result), Opcode::ATOMIC_CS, u64::MAX),
            (SendWr::fetch_add(remote, 2, result), Opcode::ATOMIC_FA, 1),
        ];
        for (wr, opcode, after) in steps {
            a.memory().fill(0, 16, 0xa5).unwrap();
            a.qp.post_send(&[wr.id(value)]).unwrap();
            assert_eq!(sent(a), wc(a, value, CqeOpcode::REQ, opcode, 8, None));
            assert_eq!(word(a, 3), value, "the old value");
            assert_eq!((bytes(a, 0, 3), bytes(a, 11, 5)), (vec![0xa5; 3], vec![0xa5; 5]));
            assert_eq!(word(b, 16), after);
            assert_eq!((word(b, 8), word(b, 24)), (0xa5a5_a5a5_a5a5_a5a5, 0xa5a5_a5a5_a5a5_a5a5));
            value = after;
        }
        done(a, b);
    }
}

/// Also the one place where a small queue is kept full, by both sides at once.
#[test]
fn atomics_both_ways_through_full_queues_are_done_once_each() {
    const EACH: u64 = 2000;
    for (a, b) in &both(4096, |q| q.max_send_wr(16)) {
        let (mut posted, mut taken) = ([0; 2], [0; 2]);
        while taken != [EACH; 2] {
            for (i, (side, peer)) in [(a, b), (b, a)].into_iter().enumerate() {
                let wr = SendWr::fetch_add(peer.mr.remote(0).unwrap(), 1, side.mr.sge(64, 8).unwrap());
                while posted[i] < EACH && side.qp.post_send(&[wr]).is_ok() {
                    posted[i] += 1;
                }
                while let Some(wc) = side.qp.poll_send() {
                    wc.ok().unwrap();
                    taken[i] += 1;
                }
            }
        }
        for side in [a, b] {
            assert_eq!(bytes(side, 0, 8), EACH.to_ne_bytes());
        }
        done(a, b);
    }
}

#[test]
fn messages_of_no_bytes_need_no_memory() {
    for (a, b) in &both(4096, |q| q) {
        let nowhere = RemoteAddr { addr: 0xdead_beef, rkey: 0x1234_5678 };
        let wrs = [
            SendWr::send(&[]).id(1),
            SendWr::send_inline(&[]).id(2).imm(5),
            SendWr::write(nowhere, &[]).id(3),
            SendWr::write_inline(nowhere, &[]).id(4).imm(6),
            SendWr::nop().id(5),
        ];
        for wr_id in [10, 11, 12] {
            b.qp.post_recv(&[RecvWr::new(&[]).id(wr_id)]).unwrap();
        }
        a.qp.post_send(&wrs).unwrap();
        let opcodes =
            [Opcode::SEND, Opcode::SEND_IMM, Opcode::RDMA_WRITE, Opcode::RDMA_WRITE_IMM, Opcode::NOP];
        for (id, opcode) in (1..).zip(opcodes) {
            assert_eq!(sent(a), wc(a, id, CqeOpcode::REQ, opcode, 0, None));
        }
        assert_eq!(received(b), wc(b, 10, CqeOpcode::RESP_SEND, Opcode::NOP, 0, None));
        assert_eq!(received(b), wc(b, 11, CqeOpcode::RESP_SEND_IMM, Opcode::NOP, 0, Some(5)));
        assert_eq!(received(b), wc(b, 12, CqeOpcode::RESP_WR_IMM, Opcode::NOP, 0, Some(6)));
        done(a, b);
    }
}

/// Each step uses what the one before brought: without the fence it would send what was there before.
#[test]
fn fence_holds_a_send_until_reads_and_atomics_are_done() {
    const LEN: usize = 3 * SEGMENT;
    for (a, b) in &both(4 * LEN, |q| q.max_send_wr(8)) {
        for round in 0..30u64 {
            let data = pattern(LEN, usize::try_from(round).unwrap());
            b.memory().write(0, &data).unwrap();
            b.memory().write(3 * LEN, &round.to_ne_bytes()).unwrap();
            receive(b, round, 2 * LEN, 8);
            let (big, old) = ([a.mr.sge(0, LEN).unwrap()], [a.mr.sge(LEN, 8).unwrap()]);
            let wrs = [
                SendWr::read(b.mr.remote(0).unwrap(), &big),
                SendWr::write(b.mr.remote(LEN).unwrap(), &big).fence(),
                SendWr::fetch_add(b.mr.remote(3 * LEN).unwrap(), 1, old[0]),
                SendWr::send(&old).fence(),
            ];
            a.qp.post_send(&wrs).unwrap();
            for _ in &wrs {
                sent(a).ok().unwrap();
            }
            received(b).ok().unwrap();
            assert!(
                bytes(b, LEN, LEN) == data,
                "round {round}: the WRITE sent what was there before the READ"
            );
            assert_eq!(bytes(b, 2 * LEN, 8), round.to_ne_bytes(), "the SEND overtook the atomic");
        }
        done(a, b);
    }
}

/// More READs than may be outstanding, with other work between: they queue, and complete in order.
#[test]
fn reads_beyond_the_limit_wait_their_turn() {
    for (a, b) in &both(4 * SEGMENT, |q| q.rd_atomic(2).max_send_wr(64)) {
        b.memory().write(0, &pattern(2 * SEGMENT, 3)).unwrap();
        let to = [a.mr.sge(0, 2 * SEGMENT).unwrap()];
        let wrs: Vec<_> = (0..60u64)
            .map(|i| match i % 3 {
                0 => SendWr::read(b.mr.remote(0).unwrap(), &to).id(i),
                1 => {
                    SendWr::fetch_add(b.mr.remote(3 * SEGMENT).unwrap(), 1, a.mr.sge(3 * SEGMENT, 8).unwrap())
                        .id(i)
                }
                _ => SendWr::nop().id(i),
            })
            .collect();
        a.qp.post_send(&wrs).unwrap();
        for i in 0..60 {
            assert_eq!(a.qp.send_cq().wait(PATIENCE).unwrap().ok().unwrap().wr_id, i);
        }
        assert!(bytes(a, 0, 2 * SEGMENT) == pattern(2 * SEGMENT, 3));
        assert_eq!(bytes(b, 3 * SEGMENT, 8), 20u64.to_ne_bytes());
        done(a, b);
    }
}

#[test]
fn memory_that_is_not_mapped_is_refused_as_by_a_card() {
    let (context, page) = (hca(), host_page());
    let pd = context.alloc_pd().unwrap();
    // Where no other thread gets memory in place of the page that is unmapped.
    let remote = std::ptr::without_provenance_mut(1 << 44);
    let (rights, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    // SAFETY: new memory, there or anywhere.
    let two = unsafe { libc::mmap(remote, 2 * page, rights, flags, -1, 0) }.cast::<u8>();
    // SAFETY: the second of these pages, which nothing uses.
    assert_eq!(unsafe { libc::munmap(two.wrapping_add(page).cast(), page) }, 0);
    for (len, is_there) in [(page, true), (page + 1, false)] {
        // SAFETY: registered, and not used: the registration is refused or ends here.
        let memory = unsafe { Memory::from_raw(two, len) }.unwrap();
        let refused = pd.register(&memory, Access::all()).err();
        match refused.map(|error| error.errno()) {
            None => assert!(is_there, "{len}"),
            // libibverbs protects the memory from forks first, which is refused with ENOMEM.
            Some(errno) => {
                assert!(!is_there && [libc::EFAULT, libc::ENOMEM].contains(&errno), "{len}: {errno}")
            }
        }
    }
}
