//! Sends whose payload a kernel of the stream puts into the receive, and what it does not take for one.

use gdsync::memory::{Memory, PeerMemory};
use gdsync::stream::{Batch, OpenMemory, Placement, ReceiveLine, Via};
use gdsync::verbs::{Access, RecvWr, SendWr};

use crate::common::{PATIENCE, is_device_named, pair, pattern, stream};
use crate::place::places;

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
        let [from, to] = [(&a, ROOM), (&b, ROOM)].map(|(side, len)| {
            let memory = gpu.alloc(len).unwrap();
            side.pd.register(&memory, Access::all()).unwrap()
        });
        let open = OpenMemory::new(gpu, 4).unwrap();
        let peer = PeerMemory::open(gpu, &to.memory().export().unwrap()).unwrap();
        open.set(2, 6, peer.clone()).unwrap();
        open.set(2, 7, peer).unwrap();
        let lines = Memory::alloc(64).unwrap();
        let s = place.stream(PATIENCE);
        let longer = ReceiveLine { offset: (ROOM - 149_999) as u64, ..LINE };
        for (line, len, is_right) in [
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
        ] {
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
                open: open.clone(),
            };
            let mut batch = Batch::new();
            let sent = batch.post_placed(send, placement);
            batch.wait(&received).unwrap();
            batch.wait(&sent).unwrap();
            s.submit(&mut batch).unwrap();
            s.synchronize(PATIENCE).unwrap();
            let mut came = vec![0; len];
            to.memory().read(100, &mut came).unwrap();
            assert!(came == bytes, "{line:?}, {len}, {place:?}");
            assert_eq!(received.status().unwrap().unwrap().byte_len as usize, len);
            let is_placed = b.context.stats().placed > before;
            assert_eq!(is_placed, is_right, "{line:?}, {len}, {place:?}");
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
    _ = batch.post_placed(send, Placement { payload, line, number: LINE.number, open });
    batch.wait(&received).unwrap();
    s.submit(&mut batch).unwrap();
    s.synchronize(PATIENCE).unwrap();
    assert_eq!(b.memory().to_vec(), pattern(64, 1));
}
