//! Tagged messages between processes.

use std::collections::HashMap;
use std::process::{abort, exit};
use std::time::Duration;

use crate::common::{
    LONG, buffer, bytes, failed, host_buffer, is_part_of, job_test, message, ranks, says, until, with_gpu,
};
use gdsync::memory::Memory;
use gdsync::mlx5::Syndrome;
use gdsync_testkit::tier;
use mp::tagged::{Request, Source, Tag, Tagged};
use mp::{Communicator, Error, Shrunk, Status};

/// Around the limit between eager and announced messages.
const SIZES: [usize; 8] = [0, 1, 8, 4071, 4072, 4073, 70_000, 1 << 20];

/// The exit code of a rank that has survived.
const SURVIVED: i32 = 44;

/// Every rank sends messages of all sizes to every rank, itself included; the receives are posted in another order.
fn all_pairs(comm: &Communicator) {
    pairs(comm, Tagged::new(comm, LONG).unwrap());
}

fn pairs(comm: &Communicator, tagged: Tagged) {
    let (me, all) = (comm.rank(), comm.size());
    let total: usize = SIZES.iter().sum();
    let (outbox, inbox) = (buffer(comm, all * total), buffer(comm, all * total));
    let at = |rank: usize, n: usize| rank * total + SIZES[..n].iter().sum::<usize>();
    let range = |rank: usize, n: usize| at(rank, n)..at(rank, n) + SIZES[n];
    let (mut sent, mut received) = (Vec::new(), Vec::new());
    for peer in 0..all {
        for (n, len) in SIZES.into_iter().enumerate() {
            outbox.memory().write(at(peer, n), &message(me, peer, n, len)).unwrap();
            sent.push(tagged.isend(&outbox, range(peer, n), peer, n as u64).unwrap());
        }
    }
    for n in (0..SIZES.len()).rev() {
        for peer in 0..all {
            let request = tagged.irecv(&inbox, range(peer, n), peer, n as u64).unwrap();
            received.push((request, Status { rank: peer, tag: n as u64, bytes: SIZES[n] }));
        }
    }
    for (request, status) in &received {
        assert_eq!(request.wait(LONG).unwrap(), *status);
        let (peer, n) = (status.rank, usize::try_from(status.tag).unwrap());
        assert!(bytes(&inbox, range(peer, n)) == message(peer, me, n, SIZES[n]), "{status:?}");
    }
    tagged.wait_all(&sent, LONG).unwrap();
    tagged.destroy(LONG).unwrap();
}

job_test!(messages_that_nobody_received_are_named, 2, |comm| {
    let (tagged, memory) = (Tagged::new(comm, LONG).unwrap(), host_buffer(comm, 64));
    if comm.rank() == 0 {
        for tag in [7, 9] {
            tagged.isend(&memory, 0..8, 1, tag).unwrap().wait(LONG).unwrap();
        }
        tagged.destroy(LONG).unwrap();
    } else {
        let error = tagged.destroy(LONG).unwrap_err();
        assert!(matches!(error, Error::Unfinished { .. }), "{error}");
        says(
            &error,
            &[
                "tagged messages not received here (2): 8 bytes with tag 7 from rank 0, 8 bytes with tag 9 from rank 0",
            ],
        );
    }
});

job_test!(ranks_exchange_all_sizes, [1, 2, 4], all_pairs);

job_test!(
    shallow_queues_without_fifo_or_watchdog_suffice,
    2,
    Communicator::builder().watch(false).depth(5).max_pieces(1),
    all_pairs
);

// Peers have no access to cached registrations: long messages register the memory again.
job_test!(cached_memory_is_sent, 2, |comm| {
    const LEN: usize = 1 << 16;
    let tagged = Tagged::new(comm, LONG).unwrap();
    let (me, peer) = (comm.rank(), 1 - comm.rank());
    let [outbox, inbox] = [(); 2].map(|()| Memory::alloc(LEN).unwrap());
    outbox.write(0, &message(me, peer, 0, LEN)).unwrap();
    let start = |memory: &Memory| usize::try_from(memory.addr()).unwrap();
    // SAFETY: the memory outlives the handles and messages, and no reference to it is made.
    let [from, to] = [&outbox, &inbox].map(|memory| unsafe {
        comm.register_cached(std::ptr::with_exposed_provenance_mut(start(memory)), LEN).unwrap()
    });
    let received = tagged.irecv(&to, 0..LEN, peer, 1).unwrap();
    let sent = tagged.isend(&from, 0..LEN, peer, 1).unwrap();
    assert_eq!(received.wait(LONG).unwrap().bytes, LEN);
    sent.wait(LONG).unwrap();
    assert!(inbox.to_vec() == message(peer, me, 0, LEN));
    tagged.destroy(LONG).unwrap();
});

/// A number below `of`, the same for all who ask with the same arguments.
fn chance(seed: usize, n: usize, of: usize) -> usize {
    usize::from_le_bytes(*message(seed, 77, n, 8).first_chunk().unwrap()) % of
}

/// Random sends of few tags, received by receives of all kinds: the messages of each rank and tag arrive whole, in order, once.
fn random_traffic(comm: &Communicator) {
    const COUNT: usize = 600;
    const TAGS: usize = 4;
    const LARGEST: usize = 9000;
    let tagged = Tagged::new(comm, LONG).unwrap();
    let (me, all) = (comm.rank(), comm.size());
    let len =
        |from: usize, n: usize| if chance(from, n, 3) == 0 { chance(from, n + 1, LARGEST) } else { n % 50 };
    let target = |from: usize, n: usize| (from + 1 + chance(from, n, all - 1)) % all;
    let tag = |from: usize, n: usize| chance(from, n + 7, TAGS) as u64;
    // The messages to come, by source and tag, in order.
    let mut due: HashMap<(usize, u64), Vec<usize>> = HashMap::new();
    for from in 0..all {
        for n in (0..COUNT).filter(|&n| target(from, n) == me) {
            due.entry((from, tag(from, n))).or_default().push(n);
        }
    }
    due.values_mut().for_each(|numbers| numbers.reverse());
    let count: usize = due.values().map(Vec::len).sum();
    let (outbox, inbox) = (buffer(comm, COUNT * LARGEST), buffer(comm, count * LARGEST));
    let mut sent = Vec::new();
    for n in 0..COUNT {
        let (to, bytes) = (target(me, n), message(me, target(me, n), n, len(me, n)));
        outbox.memory().write(n * LARGEST, &bytes).unwrap();
        let range = n * LARGEST..n * LARGEST + bytes.len();
        sent.push(tagged.isend(&outbox, range, to, tag(me, n)).unwrap());
    }
    // One receive at a time, so that its message is known.
    let mut left: HashMap<(usize, u64), usize> =
        due.iter().map(|(key, numbers)| (*key, numbers.len())).collect();
    for slot in 0..count {
        let mut keys: Vec<_> = left.iter().filter(|(_, left)| **left > 0).map(|(key, _)| *key).collect();
        keys.sort_unstable();
        let (rank, tag) = keys[chance(me, slot, keys.len())];
        let range = slot * LARGEST..(slot + 1) * LARGEST;
        let (source, tags) = match chance(me, slot + 3, 4) {
            0 => (Source::Any, Tag::Any),
            1 => (Source::Rank(rank), Tag::Any),
            2 => (Source::Any, Tag::Masked { value: tag, mask: 1 }),
            _ => (Source::Rank(rank), Tag::Is(tag)),
        };
        let request = match chance(me, slot + 5, 3) {
            0 => {
                let mut found = None;
                until("nothing can be probed", || {
                    found = tagged.improbe(source, tags).unwrap();
                    found.is_some()
                });
                found.unwrap().irecv(&inbox, range.clone()).unwrap()
            }
            _ => tagged.irecv(&inbox, range.clone(), source, tags).unwrap(),
        };
        let status = request.wait(LONG).unwrap();
        let n = due.get_mut(&(status.rank, status.tag)).unwrap().pop().unwrap();
        *left.get_mut(&(status.rank, status.tag)).unwrap() -= 1;
        assert_eq!(status.bytes, len(status.rank, n), "{status:?} has the length of the one sent first");
        let expected = message(status.rank, me, n, status.bytes);
        assert!(bytes(&inbox, range.start..range.start + status.bytes) == expected, "{status:?}");
    }
    tagged.wait_all(&sent, LONG).unwrap();
    tagged.destroy(LONG).unwrap();
}

job_test!(wildcards_match_each_message_once_and_in_order, 4, random_traffic);

/// Waits for the other rank, and moves messages along meanwhile.
fn meet(comm: &Communicator, tagged: &Tagged) {
    let (buffer, peer) = (host_buffer(comm, 8), 1 - comm.rank());
    let both = [comm.irecv(&buffer, 0..4, peer).unwrap(), comm.isend(&buffer, 4..8, peer).unwrap()];
    until("the other rank does not come", || {
        tagged.progress();
        both.iter().all(|one| one.test().unwrap().is_some())
    });
}

/// Both send far more messages than are kept before either receives; the last is received first.
fn flood(comm: &Communicator) {
    let count = tier(500, 2000, 2000);
    let tagged = Tagged::new(comm, LONG).unwrap();
    let (me, peer) = (comm.rank(), 1 - comm.rank());
    let (outbox, inbox) = (host_buffer(comm, count * 64), host_buffer(comm, count * 64));
    let range = |n: usize| n * 64..n * 64 + 1 + n % 64;
    let sent: Vec<_> = (0..count)
        .map(|n| {
            outbox.memory().write(n * 64, &message(me, peer, n, range(n).len())).unwrap();
            tagged.isend(&outbox, range(n), peer, n as u64).unwrap()
        })
        .collect();
    // The other rank keeps so many, and no more.
    let kept = |sent: &[Request]| sent.iter().filter(|sent| sent.test().unwrap().is_some()).count();
    until("what is kept is not sent", || kept(&sent) >= 256);
    meet(comm, &tagged);
    assert_eq!(kept(&sent), 256, "beyond what the receiver keeps nothing is complete that is not received");
    meet(comm, &tagged);
    for n in (0..count).rev() {
        let received = tagged.irecv(&inbox, range(n), peer, n as u64).unwrap();
        assert_eq!(received.wait(LONG).unwrap().bytes, range(n).len());
        assert!(bytes(&inbox, range(n)) == message(peer, me, n, range(n).len()), "{n}");
    }
    tagged.wait_all(&sent, LONG).unwrap();
    // A tagged message behind all others brings the credits back, which another queue pair may overtake.
    let last = [tagged.irecv(&inbox, 0..8, peer, 0).unwrap(), tagged.isend(&outbox, 0..8, peer, 0).unwrap()];
    tagged.wait_all(&last, LONG).unwrap();
    // Short messages are complete without a receive again.
    let sent: Vec<_> = (0..100).map(|_| tagged.isend(&outbox, 0..8, peer, 1).unwrap()).collect();
    tagged.wait_all(&sent, LONG).unwrap();
    meet(comm, &tagged);
    for _ in 0..100 {
        tagged.irecv(&inbox, 0..8, peer, 1).unwrap().wait(LONG).unwrap();
    }
}

job_test!(both_sides_may_flood, 2, flood);

job_test!(both_sides_may_flood_shallow_queues, 2, Communicator::builder().depth(4), flood);

job_test!(truncated_messages_fail_their_receive_alone, 2, |comm| {
    let tagged = Tagged::new(comm, LONG).unwrap();
    let buffer = buffer(comm, 40_000);
    let peer = 1 - comm.rank();
    if comm.rank() == 0 {
        for (tag, len) in [(1, 100), (2, 20_000), (3, 8)] {
            tagged.isend(&buffer, 0..len, peer, tag).unwrap().wait(LONG).unwrap();
        }
    } else {
        let receive = |tag: usize| tagged.irecv(&buffer, 99 * tag..99 * tag + 99, peer, tag as u64).unwrap();
        let receives = [1, 2, 3].map(receive);
        for (tag, len) in [(1, 100), (2, 20_000)] {
            match receives[tag - 1].wait(LONG).unwrap_err() {
                Error::Truncated { rank: 0, tag: of, bytes, room: 99 } => {
                    assert_eq!((of, bytes), (tag as u64, len));
                }
                other => panic!("{other}"),
            }
        }
        assert_eq!(receives[2].wait(LONG).unwrap(), Status { rank: 0, tag: 3, bytes: 8 });
    }
    tagged.destroy(LONG).unwrap();
});

job_test!(receives_are_cancelled_and_messages_probed, 2, |comm| {
    let tagged = Tagged::new(comm, LONG).unwrap();
    let buffer = buffer(comm, 64);
    let peer = 1 - comm.rank();
    let cancelled = tagged.irecv(&buffer, 0..8, peer, 5).unwrap();
    assert!(cancelled.cancel() && !cancelled.cancel(), "once");
    assert!(matches!(cancelled.wait(LONG), Err(Error::Cancelled)));
    let late = tagged.irecv(&buffer, 0..8, peer, 99).unwrap();
    let error = late.wait(Duration::from_millis(20)).unwrap_err();
    assert!(matches!(error, Error::Deadline { .. }), "nobody sends it: {error}");
    let named =
        format!("tagged receive from rank {peer} with tag 99: not done within 20 ms; see that it is sent");
    says(&error, &[&named]);
    assert!(tagged.iprobe(peer, 5).unwrap().is_none());
    comm.barrier(LONG).unwrap();
    let sent = [5, 6].map(|tag| tagged.isend(&buffer, 16..24, peer, tag).unwrap());
    until("nothing comes", || tagged.iprobe(Source::Any, 6).unwrap().is_some());
    let status = Status { rank: peer, tag: 5, bytes: 8 };
    assert_eq!(tagged.iprobe(Source::Any, Tag::Any).unwrap(), Some(status), "the first one");
    let taken = tagged.improbe(peer, Tag::Any).unwrap().unwrap();
    assert_eq!(tagged.iprobe(Source::Any, Tag::Any).unwrap().unwrap().tag, 6, "nobody else gets it");
    let words = ["with tag 99", &format!("rank {peer} has sent one with tag 6, which nobody receives")];
    says(&late.wait(Duration::from_millis(20)).unwrap_err(), &words);
    let waits = tagged.irecv(&buffer, 24..32, Source::Any, 5).unwrap();
    assert_eq!(waits.test().unwrap(), None);
    // It returns to its place, and to the receive that has come since.
    drop(taken);
    assert_eq!(waits.wait(LONG).unwrap(), status);
    assert!(!waits.cancel(), "it is complete");
    let second = tagged.improbe(Source::Any, 6).unwrap().unwrap();
    assert_eq!(second.irecv(&buffer, 32..40).unwrap().wait(LONG).unwrap().tag, 6);
    tagged.wait_all(&sent, LONG).unwrap();
    assert!(late.cancel());
    tagged.destroy(LONG).unwrap();
});

job_test!(tagged_and_plain_messages_never_mix, 2, |comm| {
    let [first, second] = [(); 2].map(|()| Tagged::new(comm, LONG).unwrap());
    let (me, peer) = (comm.rank(), 1 - comm.rank());
    let (outbox, inbox) = (buffer(comm, 3 * 8), buffer(comm, 3 * 8));
    outbox.memory().write(0, &message(me, peer, 0, 24)).unwrap();
    let tagged = [(&second, 1), (&first, 0)].map(|(tagged, n)| {
        let range = n * 8..n * 8 + 8;
        (
            tagged.isend(&outbox, range.clone(), peer, 7).unwrap(),
            tagged.irecv(&inbox, range, peer, 7).unwrap(),
        )
    });
    let (sent, received) =
        (comm.isend(&outbox, 16..24, peer).unwrap(), comm.irecv(&inbox, 16..24, peer).unwrap());
    comm.wait_all([&sent, &received], LONG).unwrap();
    for (sent, received) in &tagged {
        sent.wait(LONG).unwrap();
        received.wait(LONG).unwrap();
    }
    assert_eq!(bytes(&inbox, 0..24), message(peer, me, 0, 24));
    comm.barrier(LONG).unwrap();
});

job_test!(four_threads_share_a_tagged, 2, |comm| {
    let tagged = Tagged::new(comm, LONG).unwrap();
    let (me, peer) = (comm.rank(), 1 - comm.rank());
    std::thread::scope(|scope| {
        for thread in 0..4_usize {
            let (tagged, comm) = (&tagged, comm.clone());
            scope.spawn(move || {
                let buffer = buffer(&comm, 2 * 5000);
                for n in 0..100 {
                    let len = if n % 4 == 0 { 5000 } else { n };
                    buffer.memory().write(0, &message(me, thread, n, len)).unwrap();
                    let received = tagged.irecv(&buffer, 5000..10_000, peer, thread as u64).unwrap();
                    let sent = tagged.isend(&buffer, 0..len, peer, thread as u64).unwrap();
                    assert_eq!(received.wait(LONG).unwrap().bytes, len);
                    sent.wait(LONG).unwrap();
                    assert!(
                        bytes(&buffer, 5000..5000 + len) == message(peer, thread, n, len),
                        "{thread} {n}"
                    );
                }
            });
        }
    });
    tagged.destroy(LONG).unwrap();
});

/// Runs the test `name` in three processes, which end with these codes; `None` for one that aborts.
#[track_caller]
fn survive(name: &str, expected: [Option<i32>; 3]) {
    let outputs = ranks(name, 3);
    let codes: Vec<_> = outputs.iter().map(|output| output.status.code()).collect();
    let text: Vec<_> = outputs.iter().map(|output| String::from_utf8_lossy(&output.stderr)).collect();
    assert_eq!(codes, expected, "{text:#?}");
}

#[test]
fn dead_ranks_fail_their_messages_alone() {
    const NAME: &str = "dead_ranks_fail_their_messages_alone";
    if !is_part_of(NAME) {
        return survive(NAME, [Some(SURVIVED), Some(SURVIVED), None]);
    }
    let comm = Communicator::builder().timeout(LONG).init().unwrap();
    let tagged = Tagged::new(&comm, LONG).unwrap();
    // Host memory on any machine: sends from a GPU complete only when they are received.
    let buffer = host_buffer(&comm, 1 << 16);
    if comm.rank() == 2 {
        for rank in [0, 1] {
            tagged.isend(&buffer, 0..8, rank, 1).unwrap().wait(LONG).unwrap();
            // Announced, and never read.
            let _announced = tagged.isend(&buffer, 0..1 << 16, rank, 2).unwrap();
        }
        comm.barrier(LONG).unwrap();
        abort();
    }
    let peer = 1 - comm.rank();
    let (any, from_it) =
        (tagged.irecv(&buffer, 0..8, Source::Any, 9).unwrap(), tagged.irecv(&buffer, 8..16, 2, 3).unwrap());
    let to_it = tagged.isend(&buffer, 0..1 << 16, 2, 4).unwrap();
    until("its messages do not come", || tagged.iprobe(2, 2).unwrap().is_some());
    comm.barrier(LONG).unwrap();
    let causes = [Syndrome::RETRY_EXC_ERR];
    failed(&from_it.wait(LONG).unwrap_err(), 2, &causes);
    failed(&to_it.wait(LONG).unwrap_err(), 2, &causes);
    // Eager messages have arrived; announced ones are lost.
    assert_eq!(tagged.irecv(&buffer, 8..16, 2, 1).unwrap().wait(LONG).unwrap().bytes, 8);
    failed(&tagged.irecv(&buffer, 8..1 << 16, 2, 2).unwrap().wait(LONG).unwrap_err(), 2, &causes);
    failed(&tagged.irecv(&buffer, 8..16, 2, 3).unwrap_err(), 2, &causes);
    failed(&tagged.isend(&buffer, 8..16, 2, 3).unwrap_err(), 2, &causes);
    // The other one may still send.
    tagged.isend(&buffer, 16..24, peer, 9).unwrap().wait(LONG).unwrap();
    assert_eq!(any.wait(LONG).unwrap(), Status { rank: peer, tag: 9, bytes: 8 });
    if comm.rank() == 1 {
        // All others are lost.
        let any = tagged.irecv(&buffer, 0..8, Source::Any, Tag::Any).unwrap();
        tagged.isend(&buffer, 16..24, peer, 10).unwrap().wait(LONG).unwrap();
        any.wait(LONG).unwrap_err();
        tagged.irecv(&buffer, 0..8, Source::Any, Tag::Any).unwrap_err();
    } else {
        tagged.irecv(&buffer, 16..24, peer, 10).unwrap().wait(LONG).unwrap();
    }
    exit(SURVIVED);
}

#[test]
fn survivors_shrink_and_go_on() {
    const NAME: &str = "survivors_shrink_and_go_on";
    if !is_part_of(NAME) {
        return survive(NAME, [Some(SURVIVED), None, Some(SURVIVED)]);
    }
    let comm = with_gpu(Communicator::builder()).timeout(LONG).init().unwrap();
    let tagged = Tagged::new(&comm, LONG).unwrap();
    let buffer = host_buffer(&comm, 1 << 16);
    // The others are through with Tagged::new, too.
    comm.barrier(LONG).unwrap();
    if comm.rank() == 1 {
        abort();
    }
    let peer = 2 - comm.rank();
    tagged.isend(&buffer, 0..8, peer, 1).unwrap().wait(LONG).unwrap();
    let announced = tagged.isend(&buffer, 0..1 << 16, peer, 2).unwrap();
    let received = tagged.irecv(&buffer, 8..16, peer, 3).unwrap();
    let left = comm.shrink(LONG).unwrap();
    let smaller = tagged.shrink(&left, LONG).unwrap();
    // All is over there except what has arrived.
    for under_way in [announced, received] {
        let error = under_way.wait(LONG).unwrap_err();
        assert!(!matches!(error, Error::Deadline { .. }), "{error}");
    }
    assert_eq!(tagged.irecv(&buffer, 8..16, peer, 1).unwrap().wait(LONG).unwrap().bytes, 8);
    tagged.isend(&buffer, 0..8, peer, 3).unwrap_err();
    let Shrunk { communicator, former, .. } = left;
    assert_eq!(former, [0, 2]);
    pairs(&communicator, smaller);
    communicator.finalize(LONG).unwrap();
    exit(SURVIVED);
}
