//! Many messages of any size, in every mode, between all ranks. `GDSYNC_TEST_MESSAGES=N`: how many in all.

mod common;

use std::env;
use std::fs;

use common::{LONG, buffer, bytes, job, message, stream};
use gdsync::stream::{Batch, Stream};
use mp::{Communicator, Registration, Request};

const RANKS: usize = 8;
/// Messages in a row from one rank to another.
const WINDOW: usize = 16;
/// Bytes of the largest.
const LARGEST: usize = 20_000;

/// A number that both ends of a message know.
fn chance(from: usize, to: usize, n: usize, of: usize) -> usize {
    let bytes = message(from, to, n, 8);
    usize::from_le_bytes(*bytes.first_chunk().expect("8 bytes")) % of
}

/// Mostly short ones.
fn length(from: usize, to: usize, n: usize) -> usize {
    let most = [9, 257, 4097, LARGEST + 1][chance(from, to, n, 4)];
    chance(to, from, n, most)
}

/// Sends a window to `to`, in the mode that chance wants.
fn send(comm: &Communicator, s: &Stream, outbox: &Registration, to: usize, first: usize) -> Vec<Request> {
    let me = comm.rank();
    let messages = (first..first + WINDOW).map(|n| {
        let (start, len) = ((n - first) * LARGEST, length(me, to, n));
        outbox.memory().write(start, &message(me, to, n, len)).unwrap();
        start..start + len
    });
    match chance(me, to, first, 5) {
        0 => messages.map(|range| comm.isend(outbox, range, to).unwrap()).collect(),
        1 => messages.map(|range| comm.isend_on_stream(s, outbox, range, to).unwrap()).collect(),
        2 => {
            let prepared: Vec<_> =
                messages.map(|range| comm.prepare_send(outbox, range, to).unwrap()).collect();
            comm.post_all_on_stream(s, prepared).unwrap()
        }
        3 => {
            let mut batch = Batch::new();
            let sent =
                messages.map(|range| comm.isend_in_batch(&mut batch, outbox, range, to).unwrap()).collect();
            s.submit(&mut batch).unwrap();
            sent
        }
        _ => messages
            .map(|range| {
                let middle = range.start + range.len() / 3;
                comm.isend_vectored(&[(outbox, range.start..middle), (outbox, middle..range.end)], to).unwrap()
            })
            .collect(),
    }
}

/// Memory of this process in KiB.
fn resident() -> usize {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").parse().unwrap()
}

#[test]
fn any_messages_between_all_ranks() {
    let wanted: usize = env::var("GDSYNC_TEST_MESSAGES").map_or(8_000, |n| n.parse().expect("a number"));
    job("any_messages_between_all_ranks", RANKS, |comm| {
        let me = comm.rank();
        let (outbox, inbox) = (buffer(comm, WINDOW * LARGEST), buffer(comm, WINDOW * LARGEST));
        let s = stream("soak");
        let windows = wanted.div_ceil(RANKS * WINDOW);
        let mut early = 0;
        for window in 0..windows {
            // Every rank has a partner each time, and each other rank in turn.
            let peer = me ^ (1 + window % (RANKS - 1));
            let first = window * WINDOW;
            let slot = |i: usize| i * LARGEST..(i + 1) * LARGEST;
            let received: Vec<_> = (0..WINDOW).map(|i| comm.irecv(&inbox, slot(i), peer).unwrap()).collect();
            let sent = send(comm, &s, &outbox, peer, first);
            if chance(peer, me, first, 2) == 0 {
                comm.wait_all_on_stream(&s, &received).unwrap();
            }
            comm.wait_all(&received, LONG).unwrap();
            comm.wait_all(&sent, LONG).unwrap();
            s.synchronize(LONG).unwrap();
            for (i, received) in received.iter().enumerate() {
                let len = length(peer, me, first + i);
                assert_eq!(received.test().unwrap().map(|status| status.bytes), Some(len));
                let start = i * LARGEST;
                let right = bytes(&inbox, start..start + len) == message(peer, me, first + i, len);
                assert!(right, "message {} of rank {peer}", first + i);
            }
            if window == windows / 4 {
                early = resident();
            }
        }
        // Nothing is kept of messages that are over.
        assert!(resident() < early + 8192, "{} KiB after {early}", resident());
    });
}
