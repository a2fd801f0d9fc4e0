//! Messages of CPUs and streams, short and long, in both directions, in phases that let slots open and close again and again:
//! each arrives once, in order, whole. `GDSYNC_TEST_MESSAGES=N`: how many in all.

mod common;

use std::collections::VecDeque;
use std::env;

use common::{LONG, buffer, bytes, job, message, stream};
use gdsync::stream::{Batch, Stream};
use mp::{Communicator, Registration, Request, Status};

/// Messages of a window, at most, and bytes of the largest.
const WINDOW: usize = 48;
const LARGEST: usize = 6000;

/// A number below `of` that both ranks know.
fn chance(what: usize, rank: usize, window: usize, of: usize) -> usize {
    let bytes = message(what, rank, window, 8);
    usize::from_le_bytes(*bytes.first_chunk().expect("8 bytes")) % of
}

/// How a window goes in one direction.
#[derive(Clone, Copy)]
struct Plan {
    from: usize,
    window: usize,
}

impl Plan {
    /// Phases of windows have the same character: most are of the CPUs alone.
    fn is_plain(self) -> bool {
        chance(1, self.from, self.window / 24, 4) > 0
    }

    fn count(self) -> usize {
        1 + chance(2, self.from, self.window, WINDOW)
    }

    fn len(self, n: usize) -> usize {
        let most =
            if self.is_plain() { [9, 65, 4097][chance(3, self.from, self.window, 3)] } else { LARGEST };
        chance(4, self.from, self.window * WINDOW + n, most)
    }

    fn message(self, n: usize) -> Vec<u8> {
        message(self.from, 1 - self.from, self.window * WINDOW + n, self.len(n))
    }

    /// How its messages are sent: 0 is by the CPU.
    fn sends_by(self) -> usize {
        if self.is_plain() { 0 } else { chance(5, self.from, self.window, 6) }
    }

    /// Whether a stream waits for message `n`.
    fn is_awaited_by_stream(self, n: usize) -> bool {
        !self.is_plain() && chance(6, self.from, self.window * WINDOW + n, 8) == 0
    }

    /// Receives posted before anything is sent; the others come one by one.
    fn early(self) -> usize {
        chance(7, self.from, self.window, self.count() + 1)
    }
}

fn slot(n: usize) -> std::ops::Range<usize> {
    n * LARGEST..(n + 1) * LARGEST
}

fn send(comm: &Communicator, s: &Stream, outbox: &Registration, plan: Plan, n: usize) -> Request {
    let to = 1 - comm.rank();
    let bytes = plan.message(n);
    let (start, middle, end) = (slot(n).start, slot(n).start + bytes.len() / 2, slot(n).start + bytes.len());
    outbox.memory().write(start, &bytes).unwrap();
    match plan.sends_by() {
        0 | 1 => comm.isend(outbox, start..end, to).unwrap(),
        2 => comm.isend_vectored(&[(outbox, start..middle), (outbox, middle..end)], to).unwrap(),
        3 => comm.isend_on_stream(s, outbox, start..end, to).unwrap(),
        4 => {
            // One that is taken back has never been.
            drop(comm.prepare_send(outbox, start..end, to).unwrap());
            comm.prepare_send(outbox, start..end, to).unwrap().post_on_stream(s).unwrap()
        }
        _ => {
            let mut batch = Batch::new();
            let sent = comm.isend_in_batch(&mut batch, outbox, start..end, to).unwrap();
            s.submit(&mut batch).unwrap();
            sent
        }
    }
}

/// Both directions of a window.
fn play(comm: &Communicator, [s, waits]: [&Stream; 2], [outbox, inbox]: [&Registration; 2], window: usize) {
    let (me, peer) = (comm.rank(), 1 - comm.rank());
    let (ours, theirs) = (Plan { from: me, window }, Plan { from: peer, window });
    let mut posted = 0;
    let mut receive = || {
        let request = comm.irecv(inbox, slot(posted), peer).unwrap();
        if theirs.is_awaited_by_stream(posted) {
            comm.wait_on_stream(waits, &request).unwrap();
        }
        posted += 1;
        request
    };
    let mut received: VecDeque<Request> = (0..theirs.early()).map(|_| receive()).collect();
    let mut sent = Vec::new();
    let mut arrived = 0;
    let mut arrive = |request: &Request| {
        let status = comm.wait(request, LONG).unwrap();
        assert_eq!(status, Status { rank: peer, bytes: theirs.len(arrived) }, "{arrived} of window {window}");
        let start = slot(arrived).start;
        assert!(
            bytes(inbox, start..start + status.bytes) == theirs.message(arrived),
            "{arrived} of window {window}"
        );
        arrived += 1;
    };
    for n in 0..ours.count().max(theirs.count()) {
        if n < ours.count() {
            sent.push(send(comm, s, outbox, ours, n));
        }
        if theirs.early() + n < theirs.count() {
            received.push_back(receive());
        }
        // Only messages that the other rank has surely sent: its streams wait for those of this one.
        if ours.is_plain() && theirs.is_plain() && n < theirs.count() {
            received.pop_front().iter().for_each(&mut arrive);
        }
    }
    received.iter().for_each(&mut arrive);
    comm.wait_all(&sent, LONG).unwrap();
    s.synchronize(LONG).unwrap();
    waits.synchronize(LONG).unwrap();
    assert_eq!(arrived, theirs.count());
}

#[test]
fn messages_of_every_kind_take_turns() {
    let wanted: usize = env::var("GDSYNC_TEST_MESSAGES").map_or(15_000, |n| n.parse().expect("a number"));
    job("messages_of_every_kind_take_turns", 2, |comm| {
        let peer = 1 - comm.rank();
        let (outbox, inbox) = (buffer(comm, WINDOW * LARGEST), buffer(comm, WINDOW * LARGEST));
        // What waits must not hold up what the other rank waits for.
        let (s, waits) = (stream("mixed"), stream("waits"));
        let windows = wanted.div_ceil(WINDOW);
        (0..windows).for_each(|window| play(comm, [&s, &waits], [&outbox, &inbox], window));
        let all: usize = (0..windows).map(|window| Plan { from: comm.rank(), window }.count()).sum();
        let (sent, received) = comm.fifo_messages(peer).unwrap();
        println!("{sent} of {all} messages were sent through slots, {received} received");
        assert!(sent < all as u64, "others were sent by streams");
    });
}
