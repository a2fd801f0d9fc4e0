//! Sends whose payload a kernel of the stream puts into the receive, and what it does not take for one.

use std::time::Duration;

use gdsync::Error;
use gdsync::hca::FaultPlan;
use gdsync::memory::{Memory, PeerMemory};
use gdsync::stream::{Batch, OpenMemory, PeerSignal, Placement, ReceiveLine, Stream, Via};
use gdsync::verbs::{Access, Completion, RecvWr, SendWr};

use crate::common::{PATIENCE, is_device_named, pair, pattern, stream};
use crate::place::places;

/// A stream that goes on would have done so.
const SHORT: Duration = Duration::from_millis(5);
const ROOM: usize = 200_000;
const LINE: ReceiveLine = ReceiveLine { number: 5, len: 150_000, slot: 2, generation: 7, offset: 100 };

#[test]
fn only_right_lines_are_followed() {
    if is_device_named() {
        return;
    }
    for place in places() {
        let gpu = &place.gpu;
        let (a, b) = pair(64, |build| build.on_gpu(gpu, place.on_gpu));
        let [from, to] = [(&a, ROOM), (&b, ROOM + 16)].map(|(side, len)| {
            let memory = gpu.alloc(len).unwrap();
            side.pd.register(&memory, Access::all()).unwrap()
        });
        let open = OpenMemory::new(gpu, 4).unwrap();
        let peer = PeerMemory::open(gpu, &to.memory().export().unwrap()).unwrap();
        open.set(2, 6, peer.clone()).unwrap();
        open.set(2, 7, peer.clone()).unwrap();
        let told = PeerSignal { to: peer, offset: ROOM.next_multiple_of(8), value: 0, add: false };
        let word = to.memory().word64(told.offset).unwrap();
        let lines = Memory::alloc(64).unwrap();
        let s = place.stream(PATIENCE);
        let longer = ReceiveLine { offset: (ROOM + 16 - 149_999) as u64, ..LINE };
        let lines_and_answers = [
            (LINE, 1, true),
            (LINE, 600, true),
            (LINE, 150_000, true),
            (LINE, 150_001, false),
            (ReceiveLine { number: 4, ..LINE }, 600, false),
            (ReceiveLine { number: LINE.number + 1024, ..LINE }, 600, false),
            (ReceiveLine { slot: 1, ..LINE }, 600, false),
            (ReceiveLine { slot: 0, generation: 0, ..LINE }, 600, false),
            (ReceiveLine { generation: 6, ..LINE }, 600, false),
            (longer, 150_000, false),
            (ReceiveLine { offset: ReceiveLine::MAX_OFFSET - 1, ..LINE }, 600, false),
        ];
        // Found by the kernel, and by the CPU before.
        let cases =
            lines_and_answers.iter().flat_map(|case| [false, true].map(|is_posted| (*case, is_posted)));
        for (n, ((line, len, is_right), is_posted)) in (1_u32..).zip(cases) {
            // No kernel is launched for a short one beside memory operations.
            let is_right = is_right && (place.via == Via::Kernel || len >= 4096);
            let (bytes, before) = (pattern(len, len), b.context.stats().placed);
            from.memory().write(3, &bytes).unwrap();
            from.memory().flush().unwrap();
            let received = b.qp.post_recv(&[RecvWr::new(&[to.sge(100, 150_001).unwrap()])]).unwrap();
            line.store(&lines, 16).unwrap();
            let send = a.qp.prepare_send(&[SendWr::send(&[from.sge(3, len).unwrap()])]).unwrap();
            let placement = Placement {
                payload: from.memory().slice(3, len).unwrap(),
                line: lines.slice(16, ReceiveLine::BYTES).unwrap(),
                number: LINE.number,
                is_posted,
                open: open.clone(),
                gaps: 0,
                told: Some(PeerSignal { value: u64::from(n) << 32 | 7, ..told.clone() }),
            };
            let mut batch = Batch::new();
            let sent = batch.post_placed(send, placement);
            batch.wait_or_arrival(&received, &word, n).unwrap();
            batch.wait_unless_placed(&sent).unwrap();
            s.submit(&mut batch).unwrap();
            s.synchronize(PATIENCE).unwrap();
            let mut came = vec![0; len];
            to.memory().read(100, &mut came).unwrap();
            assert!(came == bytes, "{line:?}, {len}, {place:?}");
            assert_eq!(received.wait(PATIENCE).unwrap().byte_len as usize, len);
            sent.wait(PATIENCE).unwrap().ok().unwrap();
            let is_placed = b.context.stats().placed > before;
            assert_eq!(is_placed, is_right, "{line:?}, {len}, {place:?}");
            assert_eq!(word.load() >> 32 == u64::from(n), is_right, "{line:?}, {len}, {place:?}");
        }
    }
}

/// A CPU that runs the stream leaves it to the device.
#[test]
fn streams_of_the_host_place_nothing() {
    let Some(place) = places().find(|place| place.via == Via::Kernel) else { return };
    let (a, b) = pair(64, |build| build);
    let from = a.pd.register(&place.gpu.alloc(64).unwrap(), Access::all()).unwrap();
    let open = OpenMemory::new(&place.gpu, 4).unwrap();
    let (lines, s) = (Memory::alloc(64).unwrap(), stream("host"));
    LINE.store(&lines, 0).unwrap();
    let received = b.qp.post_recv(&[RecvWr::new(&[b.mr.sge(0, 64).unwrap()])]).unwrap();
    from.memory().write(0, &pattern(64, 1)).unwrap();
    let send = a.qp.prepare_send(&[SendWr::send(&[from.sge(0, 64).unwrap()])]).unwrap();
    let (payload, line) = (from.memory().clone(), lines.slice(0, 16).unwrap());
    let mut batch = Batch::new();
    let (number, is_posted, told) = (LINE.number, true, None);
    _ = batch.post_placed(send, Placement { payload, line, number, is_posted, open, gaps: 0, told });
    batch.wait(&received).unwrap();
    s.submit(&mut batch).unwrap();
    s.synchronize(PATIENCE).unwrap();
    assert_eq!(b.memory().to_vec(), pattern(64, 1));
}

/// Both streams go on while the device is still busy with the message; one whose payload the device moves waits.
#[test]
fn streams_do_not_wait_for_the_device() {
    if is_device_named() {
        return;
    }
    for place in places().filter(|place| place.via == Via::Kernel) {
        let gpu = &place.gpu;
        let (a, b) = pair(64, |build| build.on_gpu(gpu, place.on_gpu).timeout(17));
        let [from, to] =
            [&a, &b].map(|side| side.pd.register(&gpu.alloc(64).unwrap(), Access::all()).unwrap());
        let open = OpenMemory::new(gpu, 4).unwrap();
        let peer = PeerMemory::open(gpu, &to.memory().export().unwrap()).unwrap();
        open.set(2, 7, peer.clone()).unwrap();
        let (line, word) = (Memory::alloc(16).unwrap(), to.memory().word64(56).unwrap());
        let line_of = |number| ReceiveLine { number, len: 8, offset: 0, ..LINE };
        let [sender, receiver] = [(); 2].map(|()| place.stream(PATIENCE));
        for (n, is_right) in [(1, true), (2, false), (3, true)] {
            let value = u64::from(n);
            from.memory().word64(0).unwrap().store(10 + value);
            let received = b.qp.post_recv(&[RecvWr::new(&[to.sge(0, 8).unwrap()])]).unwrap();
            line_of(if is_right { n } else { 9 }).store(&line, 0).unwrap();
            // All packets are lost for now.
            let lose = |drop| a.context.inject(FaultPlan { drop, ..FaultPlan::default() }).unwrap();
            lose(if is_right { 1.0 } else { 0.0 });
            let send = a.qp.prepare_send(&[SendWr::send(&[from.sge(0, 8).unwrap()])]).unwrap();
            let told = Some(PeerSignal { to: peer.clone(), offset: 56, value: value << 32 | 8, add: false });
            let (payload, line, open) = (from.memory().slice(0, 8).unwrap(), line.clone(), open.clone());
            let mut batch = Batch::new();
            let sent = batch.post_placed(
                send,
                Placement { payload, line, number: n, is_posted: false, open, gaps: 0, told },
            );
            batch.wait_unless_placed(&sent).unwrap();
            sender.submit(&mut batch).unwrap();
            batch.wait_or_arrival(&received, &word, n).unwrap();
            receiver.submit(&mut batch).unwrap();
            [&sender, &receiver].iter().for_each(|s| s.synchronize(PATIENCE).unwrap());
            assert_eq!(to.memory().word64(0).unwrap().load(), 10 + value, "{n}, {place:?}");
            assert_eq!(received.status().unwrap().is_none(), is_right, "{n}, {place:?}");
            lose(0.0);
            // The queue is the CPU's again.
            let next = a.qp.post_send(&[SendWr::write_inline(to.remote(8).unwrap(), &[1; 8])]).unwrap();
            [received, sent, next]
                .iter()
                .for_each(|completion| _ = completion.wait(PATIENCE).unwrap().ok().unwrap());
        }
    }
}

/// The stream goes on by the word, and the completion comes later: over several laps of the ring.
#[test]
fn waits_are_over_by_the_word_before_the_completion() {
    if is_device_named() {
        return;
    }
    for place in places().filter(|place| place.via == Via::Kernel) {
        let (a, b) = pair(64, |build| build.on_gpu(&place.gpu, place.on_gpu).max_recv_wr(4));
        let word = place.gpu.alloc(64).unwrap().word64(0).unwrap();
        let streams = [(); 2].map(|()| place.stream(PATIENCE));
        let receive = || b.qp.post_recv(&[RecvWr::new(&[b.mr.sge(0, 64).unwrap()])]).unwrap();
        let send = || a.qp.post_send(&[SendWr::send(&[a.mr.sge(0, 64).unwrap()])]).unwrap();
        let wait = |s: &Stream, completion: &Completion, number| {
            let mut batch = Batch::new();
            batch.wait_or_arrival(completion, &word, number).unwrap();
            s.submit(&mut batch).unwrap();
        };
        for n in 1..20_u32 {
            let [s, other] = [0, n / 2 % 2].map(|at| &streams[usize::try_from(at).unwrap()]);
            let received = receive();
            wait(s, &received, n);
            assert!(matches!(s.synchronize(SHORT), Err(Error::Deadline { .. })), "{n}, {place:?}");
            word.store(u64::from(n) << 32 | 5);
            s.synchronize(PATIENCE).unwrap();
            assert!(received.status().unwrap().is_none());
            // The next one is waited for meanwhile, also by another stream, and neither takes the completion of the other.
            let next = receive();
            other.wait(&received).unwrap();
            wait(other, &next, 0);
            send().wait(PATIENCE).unwrap().ok().unwrap();
            received.wait(PATIENCE).unwrap().ok().unwrap();
            assert!(matches!(other.synchronize(SHORT), Err(Error::Deadline { .. })), "{n}, {place:?}");
            send().wait(PATIENCE).unwrap().ok().unwrap();
            other.synchronize(PATIENCE).unwrap();
            next.wait(PATIENCE).unwrap().ok().unwrap();
        }
        // The word tells of one receive only, also where the wait for the one before was dropped.
        let s = &streams[0];
        for drops in [false, true] {
            let [first, second] = [receive(), receive()];
            let [mut dropped, mut batch] = [(); 2].map(|()| Batch::new());
            if drops {
                dropped.wait(&first).unwrap();
            }
            batch.wait_or_arrival(&second, &word, 19).unwrap();
            drop(dropped);
            s.submit(&mut batch).unwrap();
            assert!(matches!(s.synchronize(SHORT), Err(Error::Deadline { .. })), "{drops}, {place:?}");
            [send(), send()].iter().for_each(|sent| _ = sent.wait(PATIENCE).unwrap().ok().unwrap());
            s.synchronize(PATIENCE).unwrap();
            [first, second].iter().for_each(|received| _ = received.wait(PATIENCE).unwrap().ok().unwrap());
        }
    }
}
