//! Copies and signals into memory of another GPU, by kernels of streams or the copy engine; GPUs of one process, and of two.

mod processes;

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use gdsync::Error;
use gdsync::cuda::Gpu;
use gdsync::memory::{ExportedMemory, Memory, PeerMemory, Word64};
use gdsync::recorder::{Marks, Recording};
use gdsync::stream::{
    Batch, Cond, CudaStreamConfig, FreePlaces, Graph, Inbox, PeerInbox, PeerSignal, Stream, Via,
};
use gdsync_testkit::driver::Control;

use crate::child::own_process;
use crate::common::{PATIENCE, Side, pair, pattern, stream, tier, until};
use crate::place::{places, shared};

/// Lengths of one block and of several, in which 16 bytes go up or not.
const LENGTHS: [usize; 14] =
    [1, 8, 15, 16, 17, 511, 513, 8_192, 8_193, 32_768, 65_537, 300_003, 600_000, 2_200_001];
/// Bytes that no copy may touch, on both sides.
const MARGIN: usize = 64;
const ROOM: usize = 2_300_000;

/// What runs the operations of a stream, and what its copies.
type Ways = (Via, Via);
const WAYS: [Ways; 4] =
    [(Via::Kernel, Via::Kernel), (Via::MemOp, Via::Kernel), (Via::Kernel, Via::MemOp), NO_KERNEL];
/// Nothing adds to a word of a peer.
const NO_KERNEL: Ways = (Via::MemOp, Via::MemOp);

/// Two GPUs, or twice the only one.
fn gpus() -> Option<[Gpu; 2]> {
    // Takes the permit of this test.
    let first = places().next()?.gpu;
    Some([first.clone(), shared(1).unwrap_or(first)])
}

/// Memory of one GPU, and a word, and what the other GPU has opened of it.
struct Target {
    memory: Memory,
    word: Word64,
    peer: PeerMemory,
}

/// Where the word is.
const WORD: usize = ROOM;

impl Target {
    fn new(on: &Gpu, reached_by: &Gpu) -> Self {
        let memory = on.alloc(ROOM + 8).unwrap();
        memory.fill(0, memory.len(), 0).unwrap();
        let exported = ExportedMemory::from_bytes(&memory.export().unwrap().to_bytes()).unwrap();
        let peer = PeerMemory::open(reached_by, &exported).unwrap();
        Self { word: memory.word64(WORD).unwrap(), memory, peer }
    }

    fn signal(&self, value: u64, add: bool) -> PeerSignal {
        PeerSignal { to: self.peer.clone(), offset: WORD, value, add }
    }

    /// Whether these bytes are at `offset`, and nothing is beside them; then all are 0 again.
    fn takes(&self, offset: usize, bytes: &[u8]) -> bool {
        let mut found = vec![0; bytes.len() + 2 * MARGIN];
        self.memory.read(offset - MARGIN, &mut found).unwrap();
        self.memory.fill(offset, bytes.len(), 0).unwrap();
        self.memory.flush().unwrap();
        let (before, rest) = found.split_at(MARGIN);
        let (inside, behind) = rest.split_at(bytes.len());
        inside == bytes && before.iter().chain(behind).all(|byte| *byte == 0)
    }
}

fn stream_on(gpu: &Gpu, (via, copies): Ways, wait_limit: Duration) -> Stream {
    let name = format!("{via} on {}, copies by {copies}", gpu.ordinal());
    let config = CudaStreamConfig { name, via, copies, wait_limit, ..CudaStreamConfig::default() };
    Stream::cuda(gpu, config).unwrap()
}

/// Memory of the sender, with a pattern.
fn source(gpu: &Gpu, seed: usize) -> (Memory, Vec<u8>) {
    let (memory, bytes) = (gpu.alloc(ROOM).unwrap(), pattern(ROOM, seed));
    memory.write(0, &bytes).unwrap();
    memory.flush().unwrap();
    (memory, bytes)
}

#[test]
fn puts_are_whole_when_their_signal_is_seen() {
    let Some([a, b]) = gpus() else { return };
    for via in WAYS {
        let (from, bytes) = source(&a, 1);
        let to = Target::new(&b, &a);
        let gate = Memory::alloc(8).unwrap().word64(0).unwrap();
        let streams = [stream_on(&a, via, PATIENCE), stream_on(&b, via, PATIENCE)];
        let mut signals = 0;
        for len in LENGTHS {
            for (start, offset) in [(0, MARGIN), (3, MARGIN), (16, MARGIN + 5), (7, MARGIN + 9)] {
                signals += 1;
                // The signal is set, or added to; alone, or behind a wait in the same batch.
                let adds = start == 3 && via != NO_KERNEL;
                let signal = to.signal(if adds { 1 } else { signals }, adds);
                let mut batch = Batch::new();
                if offset % 2 == 1 {
                    batch.wait_value64(&gate, signals, Cond::Geq);
                }
                batch.put_peer(&from, start..start + len, &to.peer, offset, Some(signal)).unwrap();
                streams[0].submit(&mut batch).unwrap();
                streams[1].wait_value64(&to.word, signals, Cond::Geq).unwrap();
                gate.store(signals);
                streams[1].synchronize(PATIENCE).unwrap();
                assert!(
                    to.takes(offset, &bytes[start..start + len]),
                    "{via:?}: {len} from {start} to {offset}"
                );
                assert_eq!(to.word.load(), signals, "{via:?}");
            }
        }
        streams[0].synchronize(PATIENCE).unwrap();
    }
}

#[test]
fn gets_bring_what_the_peer_has() {
    let Some([a, b]) = gpus() else { return };
    let (there, bytes) = source(&b, 2);
    let there = PeerMemory::open(&a, &there.export().unwrap()).unwrap();
    let here = Target::new(&a, &a);
    for via in WAYS {
        let stream = stream_on(&a, via, PATIENCE);
        for len in LENGTHS {
            for (start, offset) in [(32, MARGIN), (5, MARGIN + 16), (1, MARGIN + 11)] {
                stream.get_peer(&there, start, &here.memory, offset..offset + len).unwrap();
                stream.synchronize(PATIENCE).unwrap();
                assert!(here.takes(offset, &bytes[start..start + len]), "{via:?}: {len} from {start}");
            }
        }
    }
}

/// Copies of any length, waits, writes and signals in one batch: what is behind a copy is done once, and after it.
#[test]
fn batches_of_many_operations_keep_their_order() {
    let Some([a, b]) = gpus() else { return };
    for via in WAYS {
        let (from, bytes) = source(&a, 3);
        let (there, here) = (Target::new(&b, &a), a.alloc(ROOM).unwrap());
        let words = Memory::alloc(16).unwrap();
        let [ready, done] = [0, 8].map(|at| words.word64(at).unwrap());
        let stream = stream_on(&a, via, PATIENCE);
        for (round, len) in [700_000, 100, 100_000, 40_000, 20_000].into_iter().enumerate() {
            let n = round as u64 + 1;
            let signal = |nth| match via {
                NO_KERNEL => there.signal(nth, false),
                _ => there.signal(1, true),
            };
            let mut batch = Batch::new();
            batch.wait_value64(&ready, n, Cond::Geq);
            batch.put_peer(&from, 1..1 + len, &there.peer, MARGIN, Some(signal(2 * n - 1))).unwrap();
            batch.wait_value64(&ready, n, Cond::Eq);
            batch.get_peer(&there.peer, MARGIN, &here, 0..len).unwrap();
            batch.barrier();
            // Back to where it came from, somewhere else.
            batch.put_peer(&here, 0..len, &there.peer, MARGIN + len + 1, None).unwrap();
            batch.signal_peer(signal(2 * n)).unwrap();
            batch.write_value64(&done, n);
            stream.submit(&mut batch).unwrap();
            ready.store(n);
            stream.synchronize(PATIENCE).unwrap();
            assert_eq!((done.load(), there.word.load()), (n, 2 * n), "{via:?}");
            let mut found = vec![0; 2 * len + 1];
            there.memory.read(MARGIN, &mut found).unwrap();
            assert!(found[..len] == bytes[1..=len] && found[len + 1..] == bytes[1..=len], "{via:?}: {len}");
        }
    }
}

/// Both ends of messages from one GPU to places of another one.
pub(crate) struct Slots {
    /// Of the streams that wait.
    pub(crate) sides: (Side, Side),
    pub(crate) inbox: Arc<Inbox>,
    slots: Memory,
    pub(crate) places: Memory,
    pub(crate) ranges: Vec<Range<usize>>,
    pub(crate) to: Arc<PeerInbox>,
    pub(crate) free: Arc<FreePlaces>,
}

impl Slots {
    /// Places of these lengths, with margins between them.
    pub(crate) fn new(from: &Gpu, on: &Gpu, lens: &[usize]) -> Self {
        let zeros = |gpu: &Gpu, len| {
            let memory = gpu.alloc(len).unwrap();
            memory.fill(0, len, 0).unwrap();
            memory.flush().unwrap();
            memory
        };
        let open = |memory: &Memory, by: &Gpu| PeerMemory::open(by, &memory.export().unwrap()).unwrap();
        let places = zeros(on, ROOM);
        let ends = lens.iter().scan(0, |end, len| {
            *end += MARGIN + 3 + len;
            Some(*end - len..*end)
        });
        let ranges: Vec<_> = ends.collect();
        let of_places: Vec<_> =
            ranges.iter().map(|range| places.slice(range.start, range.len()).unwrap()).collect();
        let slots = zeros(on, Inbox::bytes(lens.iter().copied()));
        let pairs: Vec<_> = ranges.iter().map(|range| (places.clone(), range.clone())).collect();
        let sides = pair(8, |q| q);
        let inbox = Inbox::new(&sides.0.qp, &slots, &pairs).unwrap();
        let free = zeros(from, 64);
        let to = of_places.iter().map(|place| open(place, from)).collect();
        let to = PeerInbox::new(&sides.0.qp, open(&slots, from), 0, to, free.word64(0).unwrap()).unwrap();
        let free = FreePlaces::new(&sides.0.qp, &inbox, open(&free, on), 0).unwrap();
        Self { sides, inbox, slots, places, ranges, to, free }
    }
}

impl Slots {
    /// Frees a place, and takes the message that comes to it.
    fn receive(&self, batch: &mut Batch) {
        _ = batch.free_in_inbox(&self.free);
        _ = batch.take_from_inbox(&self.inbox);
    }

    /// A message of the first 8 bytes, by one stream at both ends.
    pub(crate) fn pass(&self, batch: &mut Batch, from: &Memory) -> gdsync::Result<()> {
        _ = batch.free_in_inbox(&self.free);
        _ = batch.send_to_inbox(&self.to, from, 0..8)?;
        _ = batch.take_from_inbox(&self.inbox);
        Ok(())
    }
}

/// Through lines and into places, on each kind of stream at either end.
#[test]
fn messages_come_whole_through_slots() {
    let Some([a, b]) = gpus() else { return };
    let (from, bytes) = source(&a, 4);
    for (send, take) in WAYS.into_iter().flat_map(|send| WAYS.map(|take| (send, take))) {
        let ends = Slots::new(&a, &b, &[1, 100, 8_192, 40_000, 262_144, 300_001]);
        let streams = [stream_on(&a, send, PATIENCE), stream_on(&b, take, PATIENCE)];
        let mut image = vec![0; ROOM];
        for n in 1..=60 {
            let place = ends.ranges[(n - 1) % ends.ranges.len()].clone();
            let start = n % 9 * (n % 2);
            let len = [place.len(), 0, place.len() / 2, 9, 1][n % 5].min(place.len());
            let [mut sends, mut takes] = [Batch::new(), Batch::new()];
            _ = sends.send_to_inbox(&ends.to, &from, start..start + len).unwrap();
            streams[0].submit(&mut sends).unwrap();
            assert_eq!(ends.inbox.len_of(n as u64), None);
            _ = takes.free_in_inbox(&ends.free);
            let taken = takes.take_from_inbox(&ends.inbox);
            assert_eq!(taken.number(), None);
            streams[1].submit(&mut takes).unwrap();
            assert_eq!(taken.number(), Some(n as u64));
            streams.iter().for_each(|stream| stream.synchronize(PATIENCE).unwrap());
            image[place.start..place.start + len].copy_from_slice(&bytes[start..start + len]);
            assert!(
                ends.places.to_vec() == image,
                "message {n} of {len} bytes from {start}, {send:?} to {take:?}"
            );
            assert_eq!(ends.inbox.len_of(n as u64), Some(len), "{n}, {send:?} to {take:?}");
            // One place has lines for 8 KiB only: none gets more.
            let in_lines = send == WAYS[0] && take == WAYS[0] && len <= 8_192;
            if n % ends.ranges.len() == 1 {
                assert_eq!(
                    ends.slots.word64(0).unwrap().load() & 1 == 1,
                    in_lines,
                    "{n}, {send:?} to {take:?}"
                );
            }
        }
    }
}

/// In lines, and into its place.
#[test]
fn messages_wait_for_their_place() {
    let Some([a, b]) = gpus() else { return };
    let (from, _) = source(&a, 5);
    for (send, len) in [(WAYS[0], 8), (WAYS[0], 300_000), (WAYS[1], 300_000)] {
        let ends = Slots::new(&a, &b, &[300_000]);
        let stream = stream_on(&a, send, Duration::from_millis(50));
        let mut batch = Batch::new();
        _ = batch.send_to_inbox(&ends.to, &from, 0..len).unwrap();
        stream.submit(&mut batch).unwrap();
        stream.synchronize(PATIENCE).unwrap_err();
        assert_eq!(ends.slots.word64(0).unwrap().load(), 0, "{send:?}");
        assert!(ends.places.to_vec().iter().all(|byte| *byte == 0), "{send:?}: {len}");
    }
}

/// Of two messages that wait for their places, the error names the one that has none.
#[test]
fn late_places_are_named() {
    let Some([a, b]) = gpus() else { return };
    let (ends, (from, _)) = (Slots::new(&a, &b, &[64, 64]), source(&a, 5));
    let (sends, frees) =
        (stream_on(&a, WAYS[0], Duration::from_millis(50)), stream_on(&b, WAYS[0], PATIENCE));
    let mut batch = Batch::new();
    _ = batch.free_in_inbox(&ends.free);
    frees.submit(&mut batch).unwrap();
    frees.synchronize(PATIENCE).unwrap();
    (0..2).for_each(|_| _ = batch.send_to_inbox(&ends.to, &from, 0..8).unwrap());
    sends.submit(&mut batch).unwrap();
    let error = sends.synchronize(PATIENCE).unwrap_err().to_string();
    assert!(error.contains("to reach 0x400000000"), "{error}");
}

#[test]
fn recorder_tells_which_message_is_awaited() {
    own_process!();
    let Some([a, b]) = gpus() else { return };
    let (ends, (from, _)) = (Slots::new(&a, &b, &[64, 64]), source(&a, 5));
    let streams = [&a, &b].map(|gpu| stream_on(gpu, WAYS[0], PATIENCE));
    let [mut sends, mut takes] = [Batch::new(), Batch::new()];
    for n in 1..=2 {
        ends.receive(&mut takes);
        streams[1].submit(&mut takes).unwrap();
        until(|| {
            let recording = Recording::read(&Marks::open().unwrap().path().unwrap()).unwrap();
            recording.open_waits().any(|wait| wait.awaited.value == n)
        });
        _ = sends.send_to_inbox(&ends.to, &from, 0..8).unwrap();
        streams[0].submit(&mut sends).unwrap();
        streams.iter().for_each(|stream| stream.synchronize(PATIENCE).unwrap());
    }
}

/// Writes, and other messages, in one kernel with a message.
#[test]
fn messages_have_what_was_written_before_them() {
    let Some([a, b]) = gpus() else { return };
    let ends = Slots::new(&a, &b, &[8_192; 3]);
    let (from, _) = source(&a, 5);
    let streams = [stream_on(&a, WAYS[0], PATIENCE), stream_on(&b, WAYS[0], PATIENCE)];
    let last = from.word64(8_184).unwrap();
    for n in (1..=90).step_by(3) {
        let [mut sends, mut takes] = [Batch::new(), Batch::new()];
        (0..3).for_each(|_| _ = takes.free_in_inbox(&ends.free));
        for n in n..n + 3 {
            sends.write_value64(&last, n);
            _ = sends.send_to_inbox(&ends.to, &from, 0..8_192).unwrap();
            _ = takes.take_from_inbox(&ends.inbox);
        }
        streams[1].submit(&mut takes).unwrap();
        streams[0].submit(&mut sends).unwrap();
        streams.iter().for_each(|stream| stream.synchronize(PATIENCE).unwrap());
        for (n, range) in (n..).zip(&ends.ranges) {
            let mut word = [0; 8];
            ends.places.read(range.end - 8, &mut word).unwrap();
            assert_eq!(u64::from_ne_bytes(word), n);
        }
    }
}

/// A graph of one batch.
fn captured(stream: &Stream, add: impl Fn(&mut Batch) -> gdsync::Result<()>) -> Graph {
    let captured = stream.capture(|stream| {
        let mut batch = Batch::new();
        add(&mut batch)?;
        stream.submit(&mut batch)
    });
    captured.unwrap()
}

/// A graph sends to places of any length.
#[test]
fn graphs_send_to_each_place() {
    let Some([a, b]) = gpus() else { return };
    let ends = Slots::new(&a, &b, &[20_000, 300_000]);
    let (from, bytes) = source(&a, 1);
    let (sends, takes) = (stream_on(&a, WAYS[0], PATIENCE), stream_on(&b, WAYS[0], PATIENCE));
    let graph = captured(&sends, |batch| batch.send_to_inbox(&ends.to, &from, 0..10_000).map(drop));
    for (n, place) in (1..=4).zip(ends.ranges.iter().cycle()) {
        graph.launch(&sends).unwrap();
        let mut batch = Batch::new();
        ends.receive(&mut batch);
        takes.submit(&mut batch).unwrap();
        [sends.synchronize(PATIENCE), takes.synchronize(PATIENCE)].into_iter().for_each(Result::unwrap);
        assert!(ends.places.to_vec()[place.start..][..10_000] == bytes[..10_000], "{n}");
        ends.places.fill(0, ROOM, 0).unwrap();
        ends.places.flush().unwrap();
    }
}

/// A graph takes from places of any length.
#[test]
fn graphs_take_from_each_place() {
    let Some([a, b]) = gpus() else { return };
    let ends = Slots::new(&a, &b, &[256, 4_096]);
    let (from, bytes) = source(&a, 1);
    let (sends, takes) = (stream_on(&a, WAYS[0], PATIENCE), stream_on(&b, WAYS[0], PATIENCE));
    let graph = captured(&takes, |batch| {
        ends.receive(batch);
        Ok(())
    });
    for place in ends.ranges.iter().cycle().take(4) {
        graph.launch(&takes).unwrap();
        let mut batch = Batch::new();
        _ = batch.send_to_inbox(&ends.to, &from, 0..place.len()).unwrap();
        sends.submit(&mut batch).unwrap();
        [sends.synchronize(PATIENCE), takes.synchronize(PATIENCE)].into_iter().for_each(Result::unwrap);
        assert!(ends.places.to_vec()[place.clone()] == bytes[..place.len()]);
    }
}

/// A graph of kernels with one and with five parts each, which what the application captures keeps apart.
fn captured_apart(
    gpu: &Gpu,
    stream: &Stream,
    add: impl Fn(&mut Batch, usize) -> gdsync::Result<()>,
) -> (Graph, Memory) {
    let scratch = gpu.alloc(8).unwrap();
    let mut parts = 0..;
    let captured = stream.capture(|stream| {
        for count in [1, 5, 1, 5] {
            let mut batch = Batch::new();
            parts.by_ref().take(count).try_for_each(|part| add(&mut batch, part))?;
            stream.submit(&mut batch)?;
            let (addr, raw) = (scratch.gpu_addr(gpu)?, stream.raw().unwrap());
            // SAFETY: a word of the memory, which outlives the graph.
            gpu.within(|api| unsafe { api.memset_d32_async(addr, 1, 1, raw) })
                .map_err(Error::cuda("filling"))?;
        }
        gdsync::Result::Ok(())
    });
    (captured.unwrap(), scratch)
}

/// Launches that differ in the numbers of messages only: three at a time, on other streams, and behind messages of no graph, which go
/// to the place whose turn it is; then with one more free place than messages.
#[test]
fn launches_count_messages() {
    let Some([a, b]) = gpus() else { return };
    let (ends, (from, bytes)) = (Slots::new(&a, &b, &[64, 96, 72]), source(&a, 3));
    let sends = [0; 2].map(|_| stream_on(&a, WAYS[0], PATIENCE));
    let takes = [0; 2].map(|_| stream_on(&b, WAYS[0], PATIENCE));
    let send =
        |batch: &mut Batch, part| batch.send_to_inbox(&ends.to, &from, 8 * part..8 * part + 8).map(drop);
    let take = |batch: &mut Batch, _| {
        ends.receive(batch);
        Ok(())
    };
    let (sending, _scratch) = captured_apart(&a, &sends[0], send);
    let (taking, _scratch_there) = captured_apart(&b, &takes[0], take);
    let synchronize = || sends.iter().chain(&takes).for_each(|stream| stream.synchronize(PATIENCE).unwrap());
    let mut number: u64 = 0;
    for (round, (launches, eager, on)) in
        [(3, 0, 0), (3, 0, 0), (1, 1, 0), (1, 0, 0), (1, 0, 1), (2, 1, 1), (1, 0, 0), (3, 2, 1)]
            .into_iter()
            .enumerate()
    {
        let (sends, takes) = (&sends[on], &takes[1 - on]);
        from.write(0, &bytes[round..round + 96]).unwrap();
        from.flush().unwrap();
        let [mut sent, mut taken] = [Batch::new(), Batch::new()];
        (0..eager)
            .for_each(|_| [send(&mut sent, 0), take(&mut taken, 0)].into_iter().for_each(Result::unwrap));
        if round == 6 {
            _ = taken.free_in_inbox(&ends.free);
        }
        sends.submit(&mut sent).unwrap();
        takes.submit(&mut taken).unwrap();
        for _ in 0..launches {
            sending.launch(sends).unwrap();
            taking.launch(takes).unwrap();
        }
        synchronize();
        number += eager + 12 * launches;
        for (part, number) in [(10, number - 1), (11, number)] {
            let place = &ends.ranges[usize::try_from((number - 1) % 3).unwrap()];
            let at = round + 8 * part;
            assert!(
                ends.places.to_vec()[place.start..][..8] == bytes[at..at + 8],
                "{round}: message {number}"
            );
            assert_eq!(ends.inbox.len_of(number), Some(8), "{round}: message {number}");
        }
    }
}

/// A launch like the one before with these operations makes no calls for its kernels; an error names the message that is late.
#[test]
fn launches_that_only_count_change_no_kernels() {
    own_process!();
    let control = Control::take();
    let gpus = [0, 1].map(|ordinal| crate::simulated::gpu(ordinal).unwrap());
    let ends = Slots::new(&gpus[0], &gpus[1], &[64, 96]);
    let stream = stream_on(&gpus[1], WAYS[0], Duration::from_millis(200));
    let (from, _) = source(&gpus[0], 3);
    let sends = stream_on(&gpus[0], WAYS[0], PATIENCE);
    let (graph, _scratch) = captured_apart(&gpus[1], &stream, |batch, _| {
        ends.receive(batch);
        Ok(())
    });
    let mut calls = Vec::new();
    for _ in 0..5 {
        let mut sent = Batch::new();
        (0..12).for_each(|_| _ = sent.send_to_inbox(&ends.to, &from, 0..8).unwrap());
        sends.submit(&mut sent).unwrap();
        graph.launch(&stream).unwrap();
        stream.synchronize(PATIENCE).unwrap();
        calls.push(control.calls("cuGraphExecKernelNodeSetParams"));
    }
    assert_eq!(calls[3], calls[4], "{calls:?}");
    graph.launch(&stream).unwrap();
    let error = stream.synchronize(PATIENCE).unwrap_err().to_string();
    assert!(error.contains(&format!("to reach {:#x}", 61_u64 << 33)), "{error}");
}

/// A message that does not fit into the place whose turn it is has no number.
#[test]
fn messages_that_do_not_fit_are_refused() {
    let Some([a, b]) = gpus() else { return };
    let (ends, (from, _)) = (Slots::new(&a, &b, &[64, 8]), source(&a, 1));
    let (sends, takes) = (stream_on(&a, WAYS[0], PATIENCE), stream_on(&b, WAYS[0], PATIENCE));
    let send = |len| {
        let mut batch = Batch::new();
        _ = batch.send_to_inbox(&ends.to, &from, 0..len)?;
        sends.submit(&mut batch)
    };
    let graph = sends.capture(|_| send(64)).unwrap();
    graph.launch(&sends).unwrap();
    for refused in [graph.launch(&sends).map(drop), send(64)] {
        assert!(matches!(refused, Err(Error::OutOfBounds { len: 64, size: 8, .. })), "{refused:?}");
    }
    assert_eq!(ends.to.order.last_number(), 1);
    send(8).unwrap();
    graph.launch(&sends).unwrap();
    for _ in 0..3 {
        let mut batch = Batch::new();
        ends.receive(&mut batch);
        takes.submit(&mut batch).unwrap();
    }
    [sends.synchronize(PATIENCE), takes.synchronize(PATIENCE)].into_iter().for_each(Result::unwrap);
    assert_eq!([1, 2, 3].map(|n| ends.inbox.len_of(n)), [None, Some(8), Some(64)]);
}

/// Who frees places by kernels takes messages by kernels. A peer that tells of lines and sends none fails the stream in time.
#[test]
fn messages_that_cannot_be_taken_are_errors() {
    let Some([a, b]) = gpus() else { return };
    let ends = Slots::new(&a, &b, &[64]);
    let by_kernel = stream_on(&b, WAYS[0], Duration::from_millis(50));
    let (mut free, mut take) = (Batch::new(), Batch::new());
    _ = free.free_in_inbox(&ends.free);
    by_kernel.submit(&mut free).unwrap();
    _ = take.take_from_inbox(&ends.inbox);
    for other in &WAYS[1..] {
        let refused = stream_on(&b, *other, PATIENCE).submit(&mut take).unwrap_err();
        assert!(refused.to_string().contains("the same `via` and `copies`"), "{refused}");
    }
    if a.ordinal() != b.ordinal() {
        let refused = stream_on(&a, WAYS[0], PATIENCE).submit(&mut take).unwrap_err();
        assert!(matches!(refused, Error::InvalidArgument { .. }), "{refused}");
    }
    drop(take);
    let (from, _) = source(&a, 5);
    let long = Batch::new().send_to_inbox(&ends.to, &from, 0..65).unwrap_err();
    assert!(matches!(long, Error::OutOfBounds { len: 65, size: 64, .. }), "{long:?}");
    for len in [8, u64::from(u32::MAX)] {
        // The failure of a stream that waits breaks the queue pair.
        let (ends, stream) = (Slots::new(&a, &b, &[64]), stream_on(&b, WAYS[0], Duration::from_millis(50)));
        ends.slots.word64(0).unwrap().store(1 << 33 | len << 1 | 1);
        let mut take = Batch::new();
        _ = take.take_from_inbox(&ends.inbox);
        stream.submit(&mut take).unwrap();
        let failed = stream.synchronize(PATIENCE).unwrap_err();
        assert!(failed.to_string().contains("50 ms for the rest of a message"), "{failed}");
        assert!(ends.places.to_vec().iter().all(|byte| *byte == 0));
        assert!(ends.inbox.len_of(1).unwrap() <= 64);
    }
    let memory = a.alloc(4096).unwrap();
    for (start, len, places) in
        [(0, 64, &[(memory.clone(), 0..4096)][..]), (8, 1024, &[(memory.clone(), 0..64)]), (0, 64, &[])]
    {
        Inbox::new(&ends.sides.0.qp, &memory.slice(start, len).unwrap(), places).unwrap_err();
    }
}

/// Few kernels are changed by each launch, many read their programs from memory.
#[test]
fn graphs_copy_again_in_each_launch() {
    let Some([a, b]) = gpus() else { return };
    for (via, batches) in WAYS.into_iter().flat_map(|via| [(via, 1), (via, 6)]) {
        let (from, to) = (a.alloc(ROOM).unwrap(), Target::new(&b, &a));
        let streams = [stream_on(&a, via, PATIENCE), stream_on(&b, via, PATIENCE)];
        let part = |i: usize| (i * 300_000, [9, 166_000, 290_001, 8_200, 131_072, 33_333][i]);
        let graph = streams[0]
            .capture(|stream| {
                (0..batches).try_for_each(|i| {
                    let (at, len) = part(i);
                    let signal = match via {
                        NO_KERNEL => to.signal(i as u64 + 1, false),
                        _ => to.signal(1, true),
                    };
                    stream.put_peer(&from, at..at + len, &to.peer, MARGIN + at, Some(signal))
                })
            })
            .unwrap();
        for round in 1..=tier(3, 8, 50) {
            let bytes = pattern(ROOM, round);
            from.write(0, &bytes).unwrap();
            from.flush().unwrap();
            to.word.store(0);
            graph.launch(&streams[0]).unwrap();
            streams[1].wait_value64(&to.word, batches as u64, Cond::Geq).unwrap();
            streams.iter().for_each(|stream| stream.synchronize(PATIENCE).unwrap());
            for (at, len) in (0..batches).map(part) {
                assert!(to.takes(MARGIN + at, &bytes[at..at + len]), "{via:?}, {batches}: {len}");
            }
        }
    }
}

/// A stream whose wait ends by the limit copies and signals nothing behind it, also in graphs.
#[test]
fn failed_streams_copy_nothing() {
    let Some([a, b]) = gpus() else { return };
    let (from, to) = (source(&a, 4).0, Target::new(&b, &a));
    for via in [(Via::Kernel, Via::Kernel), (Via::MemOp, Via::Kernel)] {
        for len in [8, 20_000, 100_000, 1_200_000] {
            for in_graph in [false, true] {
                let never = Memory::alloc(8).unwrap().word64(0).unwrap();
                let stream = stream_on(&a, via, Duration::from_millis(50));
                let put = |stream: &Stream| {
                    let mut batch = Batch::new();
                    batch.wait_value64(&never, 1, Cond::Geq);
                    batch.put_peer(&from, 0..len, &to.peer, 0, Some(to.signal(1, true)))?;
                    batch.put_peer(&from, 0..8, &to.peer, 0, Some(to.signal(1, false)))?;
                    stream.submit(&mut batch)
                };
                let submitted = match in_graph {
                    true => stream.capture(put).and_then(|graph| graph.launch(&stream)).map(drop),
                    false => put(&stream),
                };
                submitted.unwrap();
                let error = stream.synchronize(PATIENCE).unwrap_err();
                assert!(matches!(error, Error::StreamWait { .. }), "{via:?}: {error}");
                drop(stream);
                assert_eq!(to.word.load(), 0, "{via:?}: {len}");
                assert!(to.takes(MARGIN, &vec![0; len]), "{via:?}: {len}");
            }
        }
    }
}

/// The copy engine does not know of failures, but kernels signal nothing then.
#[test]
fn failed_streams_of_kernels_do_not_signal_what_the_copy_engine_copies() {
    let Some([a, b]) = gpus() else { return };
    let (from, to) = (source(&a, 4).0, Target::new(&b, &a));
    let never = Memory::alloc(8).unwrap().word64(0).unwrap();
    let stream = stream_on(&a, (Via::Kernel, Via::MemOp), Duration::from_millis(50));
    // One submission: the limit may be over before a second one.
    let mut batch = Batch::new();
    batch.wait_value64(&never, 1, Cond::Geq);
    batch.put_peer(&from, 0..8, &to.peer, 0, Some(to.signal(1, true))).unwrap();
    batch.signal_peer(to.signal(1, false)).unwrap();
    stream.submit(&mut batch).unwrap();
    let error = stream.synchronize(PATIENCE).unwrap_err();
    assert!(matches!(error, Error::StreamWait { .. }), "{error}");
    drop(stream);
    assert_eq!(to.word.load(), 0);
}

#[test]
fn what_cannot_be_copied_is_refused() {
    let Some([a, b]) = gpus() else { return };
    let (from, to) = (a.alloc(4096).unwrap(), Target::new(&b, &a));
    let mut batch = Batch::new();
    let beyond = batch.put_peer(&from, 0..8, &to.peer, WORD + 1, None).unwrap_err();
    assert!(matches!(beyond, Error::OutOfBounds { offset, .. } if offset == WORD + 1), "{beyond}");
    assert!(batch.put_peer(&from, 4090..4097, &to.peer, 0, None).is_err());
    assert!(batch.get_peer(&to.peer, usize::MAX, &from, 0..8).is_err());
    let signal = PeerSignal { offset: WORD + 1, ..to.signal(1, false) };
    assert!(batch.put_peer(&from, 0..8, &to.peer, 0, Some(signal)).is_err());
    assert!(batch.is_empty(), "nothing of it is in the batch");
    batch.put_peer(&from, 5..5, &to.peer, 0, None).unwrap();
    assert!(batch.is_empty(), "nothing to do");

    batch.put_peer(&from, 0..8, &to.peer, 0, None).unwrap();
    let host = stream("host").submit(&mut batch).unwrap_err();
    assert!(host.to_string().contains("a stream of a GPU"), "{host}");
    assert!(batch.run(PATIENCE).is_err());
    let added = stream_on(&a, NO_KERNEL, PATIENCE).signal_peer(to.signal(1, true)).unwrap_err();
    assert!(added.to_string().contains("launches no kernel for it"), "{added}");
    let on_a = stream_on(&a, WAYS[0], PATIENCE);
    let signal = PeerSignal { offset: 4, ..to.signal(1, false) };
    let unaligned = on_a.signal_peer(signal).unwrap_err();
    assert!(unaligned.to_string().contains("aligned 64-bit word"), "{unaligned}");
    on_a.synchronize(PATIENCE).unwrap();

    let host = Memory::alloc(4096).unwrap().export().unwrap_err();
    assert!(host.to_string().contains("host memory"), "{host}");
    let exported = from.export().unwrap();
    drop((batch, from));
    let gone = PeerMemory::open(&b, &exported).unwrap_err();
    assert!(gone.to_string().contains("has not freed"), "{gone}");
}

/// A GPU whose kernels cannot be loaded: the copy engine is taken unasked.
#[test]
fn gpus_without_kernels_take_the_copy_engine() {
    own_process!();
    let control = Control::take();
    control.fail("cuModuleLoadData", 218);
    let gpus = [0, 1].map(|ordinal| crate::simulated::gpu(ordinal).unwrap());
    let (from, bytes) = source(&gpus[0], 5);
    let to = Target::new(&gpus[1], &gpus[0]);
    let stream = stream_on(&gpus[0], (Via::MemOp, Via::Auto), PATIENCE);
    stream.put_peer(&from, 0..100, &to.peer, MARGIN, Some(to.signal(1, false))).unwrap();
    stream.synchronize(PATIENCE).unwrap();
    assert!(to.takes(MARGIN, &bytes[..100]));
    assert_eq!((to.word.load(), control.calls("cuLaunchKernelEx")), (1, 0));
    let config = CudaStreamConfig { copies: Via::Kernel, ..CudaStreamConfig::default() };
    assert!(Stream::cuda(&gpus[0], config).is_err());
}

/// A driver whose GPUs are linked by PCIe, or not at all.
#[test]
fn links_without_atomics_take_no_additions() {
    own_process!();
    let control = Control::take();
    let gpus = [0, 1].map(|ordinal| crate::simulated::gpu(ordinal).unwrap());
    control.p2p_attribute(3, 0);
    let to = Target::new(&gpus[1], &gpus[0]);
    assert!(!to.peer.can_add() && Target::new(&gpus[0], &gpus[0]).peer.can_add());
    let mut batch = Batch::new();
    let error = batch.signal_peer(to.signal(1, true)).unwrap_err();
    assert!(error.to_string().contains("write the signal's value"), "{error}");
    batch.signal_peer(to.signal(1, false)).unwrap();
    let stream = stream_on(&gpus[0], WAYS[0], PATIENCE);
    stream.submit(&mut batch).unwrap();
    stream.synchronize(PATIENCE).unwrap();
    assert_eq!(to.word.load(), 1);
    control.p2p_attribute(2, 0);
    let error = PeerMemory::open(&gpus[0], &to.memory.export().unwrap()).unwrap_err();
    assert!(error.to_string().contains("peer access over PCIe"), "{error}");
}
