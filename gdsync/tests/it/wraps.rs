//! Rings that go round: laps of small queues, requests across the ring's end, and the wraps of every counter on the wire.

use crate::common::{
    PATIENCE, Side, assert_clean, bytes, loopback, pair, pattern, received, sent, stream, tier,
};
use gdsync::stream::Batch;
use gdsync::verbs::{Completion, RecvWr, SendWr};

fn take(side: &Side, is_send: bool) -> Option<u64> {
    let wc = if is_send { side.qp.poll_send() } else { side.qp.poll_recv() };
    wc.map(|wc| wc.ok().unwrap())
        .inspect(|wc| assert_eq!(wc.imm, (!is_send).then(|| u32::try_from(wc.wr_id).unwrap())))
        .map(|wc| wc.wr_id)
}

/// Every size of queue crosses the 16-bit wrap of both producer indices, with full and empty queues on the way.
#[test]
fn small_queues_carry_many_messages() {
    let each = tier(5000, 70_000, 700_000);
    for (a, b) in [1, 2, 4, 8].map(|n| loopback(4096, |q| q.max_send_wr(n).max_recv_wr(n).max_inline(0))) {
        let (mut recvs, mut sends, mut done, mut got) = (0, 0, 0, 0);
        while done < each || got < each {
            while recvs < each && b.qp.post_recv(&[RecvWr::new(&[]).id(recvs)]).is_ok() {
                recvs += 1;
            }
            let imm = |id| u32::try_from(id).unwrap();
            while sends < recvs && a.qp.post_send(&[SendWr::send(&[]).imm(imm(sends)).id(sends)]).is_ok() {
                sends += 1;
            }
            while let Some(id) = take(&a, true) {
                assert_eq!(id, done);
                done += 1;
            }
            while let Some(id) = take(&b, false) {
                assert_eq!(id, got);
                got += 1;
            }
        }
        assert_clean(&[&a, &b]);
    }
}

/// Past 2^24 completions on one queue: taken by the CPU, and around the wrap by a stream too.
#[test]
fn completion_counter_of_24_bits_wraps() {
    const DEPTH: u64 = 4096;
    // The fast tier stops before the wrap, which the full one passes.
    let end = tier(1 << 18, (1 << 24) + 8 * DEPTH, (1 << 26) + 8 * DEPTH);
    let (a, b) = loopback(4096, |q| q.max_send_wr(4096).max_inline(0));
    let stream = stream("wrap");
    let wrs: Vec<_> = (0..DEPTH).map(|id| SendWr::nop().id(id)).collect();
    let mut done = 0;
    while done < end {
        if (done + 4 * DEPTH) % (1 << 24) < 8 * DEPTH {
            let mut batch = Batch::new();
            for part in wrs.chunks(1000) {
                batch.sends(&a.qp, part).unwrap();
                batch.wait_send(&a.qp).unwrap();
            }
            let last: Completion = batch.wait_all_sends(&a.qp).unwrap();
            stream.submit(&mut batch).unwrap();
            stream.synchronize(PATIENCE).unwrap();
            assert_eq!(last.status().unwrap().unwrap().wr_id, DEPTH - 1, "after {done}");
        } else {
            a.qp.post_send(&wrs).unwrap();
            for id in 0..DEPTH {
                let wc = a.qp.poll_send().unwrap_or_else(|| sent(&a));
                assert_eq!((wc.wr_id, wc.syndrome), (id, None), "after {done}");
            }
        }
        done += DEPTH;
    }
    assert_clean(&[&a, &b]);
}

/// A request of `blocks` blocks: 1 without data, 2 and 3 with inline data.
fn inline(blocks: usize) -> usize {
    [0, 60, 120][blocks - 1]
}

/// Requests of one to three blocks begin at every block of the ring and cross its end in every way, some of them
/// prepared and given up.
#[test]
fn requests_of_all_sizes_cross_the_end_of_the_ring() {
    for (a, b) in [
        loopback(4096, |q| q.max_send_wr(2).max_inline(120)),
        pair(4096, |q| q.max_send_wr(2).max_inline(120)),
    ] {
        let s = stream("straddle");
        // Eight blocks. Steps of 1 to 3 with all orders reach every offset; the counter passes 2^16 blocks.
        for i in 0..tier(2000, 20_000, 200_000usize) {
            let size = |k: usize| 1 + (i / 3usize.pow(u32::try_from(k).unwrap()) + i * k) % 3;
            let data = pattern(inline(size(0)), i);
            let more = pattern(inline(size(1)), i + 1);
            b.memory().fill(0, 256, 0).unwrap();
            let remote = |at| b.mr.remote(at).unwrap();
            let first = SendWr::write_inline(remote(0), &data).id(1);
            let second = SendWr::write_inline(remote(128), &more).id(2);
            let expected: &[u64] = match i % 5 {
                // Given up at the end of the queue: its blocks are used again.
                0 => {
                    drop(a.qp.prepare_send(&[first]).unwrap());
                    a.qp.post_send(&[first, second]).unwrap();
                    &[1, 2]
                }
                // Given up before another: its blocks stay, and nothing happens in them.
                1 => {
                    let given_up = a.qp.prepare_send(&[first]).unwrap();
                    let kept = a.qp.prepare_send(&[second]).unwrap();
                    drop(given_up);
                    let mut batch = Batch::new();
                    batch.post(kept);
                    s.submit(&mut batch).unwrap();
                    &[2]
                }
                2 => {
                    a.qp.post_send(&[first]).unwrap();
                    a.qp.post_send(&[second]).unwrap();
                    &[1, 2]
                }
                3 => {
                    a.qp.post_send(&[SendWr::nop().id(7), second, SendWr::nop().id(8)]).unwrap();
                    &[7, 2, 8]
                }
                _ => {
                    a.qp.post_send(&[first]).unwrap();
                    &[1]
                }
            };
            for id in expected {
                assert_eq!(sent(&a).ok().unwrap().wr_id, *id, "round {i}");
            }
            assert_eq!(a.qp.poll_send(), None);
            if expected.contains(&1) {
                assert_eq!(bytes(&b, 0, data.len()), data, "round {i}");
            } else {
                assert_eq!(bytes(&b, 0, 128), [0; 128], "round {i}: a request that was given up was done");
            }
            if expected.contains(&2) {
                assert_eq!(bytes(&b, 128, more.len()), more, "round {i}");
            }
        }
        assert_clean(&[&a, &b]);
    }
}

/// Receives of several strides, with lists of every length in rings of every size.
#[test]
fn receive_rings_of_every_stride_go_round() {
    for (max_sge, depth) in [(1, 1), (2, 2), (3, 4), (8, 2), (32, 2)] {
        let (a, b) = loopback(4096, |q| q.max_recv_sge(max_sge).max_recv_wr(depth).max_inline(64));
        for i in 0..300usize {
            let parts = 1 + i % usize::try_from(max_sge).unwrap();
            let sges: Vec<_> = (0..parts).map(|k| b.mr.sge(100 * k, 2).unwrap()).collect();
            b.qp.post_recv(&[RecvWr::new(&sges).id(i as u64)]).unwrap();
            let data = pattern(2 * parts, i);
            a.qp.post_send(&[SendWr::send_inline(&data)]).unwrap();
            let wc = received(&b).ok().unwrap();
            assert_eq!((wc.wr_id, wc.byte_len as usize), (i as u64, 2 * parts));
            let seen: Vec<_> = (0..parts).flat_map(|k| bytes(&b, 100 * k, 2)).collect();
            assert_eq!(seen, data);
            sent(&a).ok().unwrap();
        }
    }
}
