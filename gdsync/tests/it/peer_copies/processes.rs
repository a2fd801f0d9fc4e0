//! Between two processes, a GPU each.

use std::fmt::Write;
use std::sync::Barrier;

use gdsync::memory::{ExportedMemory, Memory, PeerMemory, Word64};
use gdsync::stream::{Batch, Cond, PeerSignal, Stream};

use super::{NO_KERNEL, PATIENCE, WAYS, Ways, pattern, shared, stream_on, tier};
use crate::child::{Peer, role};

/// Longest message.
const ROOM: usize = 1 << 20;
/// A message arrives while the one before is looked at.
const SLOT: usize = ROOM + 64;
const WORD: usize = 2 * SLOT;

/// A process: memory into which the other puts messages, and memory from which it puts its own.
struct Here {
    inbox: Memory,
    word: Word64,
    from: Memory,
    stream: Stream,
    can_add: bool,
}

impl Here {
    fn on(ordinal: i32, via: Ways) -> Self {
        let gpu = shared(ordinal).or_else(|| shared(0)).unwrap();
        let (inbox, from) = (gpu.alloc(WORD + 8).unwrap(), gpu.alloc(ROOM + 64).unwrap());
        inbox.fill(0, inbox.len(), 0).unwrap();
        inbox.flush().unwrap();
        let word = inbox.word64(WORD).unwrap();
        let stream = stream_on(&gpu, via, PATIENCE);
        Self { inbox, word, from, stream, can_add: via != NO_KERNEL }
    }

    fn exported(&self) -> String {
        let bytes = self.inbox.export().unwrap().to_bytes();
        bytes.iter().fold("peer ".to_owned(), |mut text, byte| {
            write!(text, "{byte:02x}").unwrap();
            text
        })
    }

    fn open(&self, line: &str) -> gdsync::Result<PeerMemory> {
        let hex = line.trim().strip_prefix("peer ").unwrap().as_bytes();
        let byte = |pair: &[u8]| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap();
        let bytes: Vec<_> = hex.chunks(2).map(byte).collect();
        PeerMemory::open(self.inbox.gpu().unwrap(), &ExportedMemory::from_bytes(&bytes)?)
    }

    /// The messages of both sides by turns; every byte of each is looked at.
    fn play(&self, peer: &PeerMemory, first: bool) {
        for round in 0..tier(60, 400, 5_000) {
            let (len, start, offset) = message(round);
            let offset = offset + round % 2 * SLOT;
            let value = round as u64 + 1;
            let (own, theirs) =
                (pattern(len, 2 * round + usize::from(first)), pattern(len, 2 * round + usize::from(!first)));
            self.from.write(start, &own).unwrap();
            self.from.flush().unwrap();
            let mut batch = Batch::new();
            let wait = |batch: &mut Batch| batch.wait_value64(&self.word, value, Cond::Geq);
            if !first {
                wait(&mut batch);
            }
            let add = self.can_add && round % 3 == 0;
            let signal =
                PeerSignal { to: peer.clone(), offset: WORD, value: if add { 1 } else { value }, add };
            batch.put_peer(&self.from, start..start + len, peer, offset, Some(signal)).unwrap();
            if first {
                wait(&mut batch);
            }
            self.stream.submit(&mut batch).unwrap();
            self.stream.synchronize(PATIENCE).unwrap();
            let mut found = vec![0; len];
            self.inbox.read(offset, &mut found).unwrap();
            assert!(found == theirs, "round {round}: {len} bytes from {start} to {offset}");
        }
    }
}

/// Length, place at the sender, and place at the receiver.
fn message(round: usize) -> (usize, usize, usize) {
    let random = (round as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let bits = |shift: u32, count: u32| usize::try_from(random >> shift & ((1 << count) - 1)).unwrap();
    (1 + (bits(20, 20) >> bits(60, 4)), bits(8, 6), bits(50, 6))
}

/// Not a test of its own: the other process.
#[test]
fn child() {
    let Some(way) = role() else { return };
    let here = Here::on(1, WAYS[way.parse::<usize>().unwrap()]);
    println!("{}", here.exported());
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).unwrap();
    let peer = here.open(&line).unwrap();
    println!("ready");
    here.play(&peer, false);
    println!("done");
}

#[test]
fn messages_of_two_processes_arrive_whole() {
    for (way, via) in WAYS.into_iter().enumerate() {
        let here = Here::on(0, via);
        let mut peer = Peer::spawn("peer_copies::processes::child", &way.to_string());
        let theirs = here.open(&peer.hear("peer ")).unwrap();
        peer.tell(&here.exported());
        peer.hear("ready");
        here.play(&theirs, true);
        peer.hear("done");
    }
}

/// CUDA does not open an allocation that another thread is opening.
#[test]
fn threads_open_an_allocation_at_once() {
    let here = Here::on(0, WAYS[0]);
    let mut peer = Peer::spawn("peer_copies::processes::child", "0");
    let line = peer.hear("peer ");
    let together = Barrier::new(3);
    for _ in 0..20 {
        let open = || {
            together.wait();
            here.open(&line).map(drop)
        };
        std::thread::scope(|scope| {
            let threads = [(); 3].map(|()| scope.spawn(open));
            threads.into_iter().for_each(|thread| thread.join().unwrap().unwrap());
        });
    }
    let theirs = here.open(&line).unwrap();
    peer.tell(&here.exported());
    peer.hear("ready");
    here.play(&theirs, true);
    peer.hear("done");
}
