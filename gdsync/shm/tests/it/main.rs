//! Hand-overs of plain memory between threads, and rings whose peer writes anything into them.
//!
//! The loom tests explore the atomics of each hand-over. Here the threads are real and the payload is plain memory, so that
//! ThreadSanitizer and Miri report an access that no hand-over orders, and aarch64 runs the code of its own memory order.

use std::cell::UnsafeCell;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicU32, AtomicU64, fence};
use std::thread;
use std::time::{Duration, Instant};

use gdsync_shm::packet_ring::{Consumer, Lines, Producer, carries, lines_of};
use gdsync_shm::shm_fifo::{Next, Receiver, Sender, Slots};
use gdsync_shm::{SpinLock, recorded, ring_doorbell, seqlock, take_doorbell};

/// Repetitions of each hand-over. Miri runs about a thousand times slower.
const ROUNDS: u32 = if cfg!(miri) { 200 } else { 100_000 };

/// Memory without atomics, which the hand-over under test gives to one thread at a time.
#[derive(Debug, Default)]
struct Plain(UnsafeCell<u64>);

// SAFETY: the tests touch the value only where the hand-over says that it is theirs; the sanitizers check that.
unsafe impl Sync for Plain {}

impl Plain {
    fn set(&self, value: u64) {
        // SAFETY: as the hand-over under test promises, no other thread has the value now.
        unsafe { *self.0.get() = value }
    }

    fn get(&self) -> u64 {
        // SAFETY: as the hand-over under test promises, no other thread writes the value now.
        unsafe { *self.0.get() }
    }
}

fn index(number: u64, count: usize) -> usize {
    usize::try_from(number).unwrap() % count
}

/// Runs one side in a thread and the other one here. Joins it: ThreadSanitizer does not see how a scope waits.
fn both(theirs: impl FnOnce() + Send, ours: impl FnOnce()) {
    thread::scope(|scope| {
        let theirs = scope.spawn(theirs);
        ours();
        theirs.join().unwrap();
    });
}

/// Polls, and fails rather than hang when the other side has failed.
fn until<T>(mut poll: impl FnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(found) = poll() {
            return found;
        }
        assert!(start.elapsed() < Duration::from_secs(60), "the other side does not go on");
        thread::yield_now();
    }
}

const LINES: usize = 16;

/// A packet ring with one word of payload in each line.
#[derive(Default)]
struct Ring {
    lines: [(AtomicU32, Plain); LINES],
    consumed: AtomicU64,
}

impl Lines for Ring {
    type Marker = AtomicU32;
    type Position = AtomicU64;
    fn count(&self) -> u64 {
        LINES as u64
    }
    fn marker(&self, line: u64) -> &AtomicU32 {
        &self.lines[usize::try_from(line).unwrap()].0
    }
    fn consumed(&self) -> &AtomicU64 {
        &self.consumed
    }
}

/// The places of the payload of a record.
fn payload(ring: &Ring, line: u64, len: u32) -> impl Iterator<Item = &Plain> {
    let lines = usize::try_from(line).unwrap()..usize::try_from(line + lines_of(len)).unwrap();
    ring.lines[lines].iter().map(|(_, word)| word)
}

#[test]
fn packet_ring_hands_over_its_lines() {
    let ring = Ring::default();
    let len = |n: u32| [0, 32, 33, 100, 350][n as usize % 5];
    assert!(carries(ring.count(), 350));
    both(
        || {
            let mut producer = Producer::default();
            for n in 0..ROUNDS {
                let line = until(|| producer.reserve(&ring, len(n)).unwrap());
                payload(&ring, line, len(n)).for_each(|word| word.set(n.into()));
                producer.publish(&ring, len(n));
            }
        },
        || {
            let mut consumer = Consumer::default();
            for n in 0..ROUNDS {
                let found = until(|| consumer.peek(&ring).unwrap());
                assert_eq!(found.len, len(n));
                assert!(payload(&ring, found.line, found.len).all(|word| word.get() == n.into()));
                consumer.pop(&ring, found);
            }
        },
    );
}

/// Any word in the shared part, at any time: no panic, and no line outside of the ring.
#[cfg(not(target_arch = "aarch64"))]
#[test]
fn packet_ring_survives_its_peer() {
    bolero::check!().with_type::<Vec<(u8, u32)>>().for_each(|steps| {
        let ring = Ring::default();
        let (mut producer, mut consumer) = (Producer::default(), Consumer::default());
        for &(step, value) in steps {
            match step % 4 {
                0 => ring.marker(u64::from(step / 4) % LINES as u64).store(value, Relaxed),
                1 => ring.consumed.store(u64::from(value) << (step / 4), Relaxed),
                2 => {
                    let len = value % 350;
                    if let Ok(Some(line)) = producer.reserve(&ring, len) {
                        payload(&ring, line, len).for_each(|word| word.set(1));
                        producer.publish(&ring, len);
                    }
                }
                _ => {
                    if let Ok(Some(found)) = consumer.peek(&ring) {
                        payload(&ring, found.line, found.len).for_each(|word| _ = word.get());
                        consumer.pop(&ring, found);
                    }
                }
            }
        }
    });
}

const SLOTS: usize = 16;

/// A shared-memory FIFO, and a queue pair in whose place messages lie in the order of their receives.
#[derive(Default)]
struct Fifo {
    word: AtomicU64,
    begun: AtomicU32,
    resumed: AtomicU32,
    taken: AtomicU64,
    slots: [(AtomicU64, Plain); SLOTS],
    queue_pair: Vec<Plain>,
    sent: AtomicU32,
}

impl Slots for Fifo {
    type W32 = AtomicU32;
    type W64 = AtomicU64;
    fn count(&self) -> u64 {
        SLOTS as u64
    }
    fn word(&self) -> &AtomicU64 {
        &self.word
    }
    fn begun(&self) -> &AtomicU32 {
        &self.begun
    }
    fn resumed(&self) -> &AtomicU32 {
        &self.resumed
    }
    fn taken(&self) -> &AtomicU64 {
        &self.taken
    }
    fn header(&self, slot: u64) -> &AtomicU64 {
        &self.slots[usize::try_from(slot).unwrap()].0
    }
}

/// Messages by slots and by the queue pair, which either side chooses at times of its own.
#[test]
fn fifo_hands_over_its_slots() {
    let fifo = Fifo { queue_pair: (0..ROUNDS).map(|_| Plain::default()).collect(), ..Fifo::default() };
    // Open from the start: the sender may be through before the other thread runs.
    let mut receiver = Receiver::default();
    receiver.open(&fifo, 0);
    both(
        || {
            let (mut side, mut sent) = (Sender::default(), 0);
            for n in 0..u64::from(ROUNDS) {
                let by_slot = n % 64 != 17;
                if let Some(number) = by_slot.then(|| side.claim(&fifo, SLOTS as u64, 1000)).flatten() {
                    fifo.slots[index(number, SLOTS)].1.set(n);
                    side.publish(&fifo, number, 8);
                    continue;
                }
                side.begin(&fifo);
                fifo.queue_pair[sent as usize].set(n);
                sent += 1;
                fifo.sent.store(sent, Release);
                side.count(&fifo, sent);
            }
        },
        || {
            let (mut side, mut posted, mut by_slot) = (receiver, 0, 0);
            for n in 0..u64::from(ROUNDS) {
                match n % 96 {
                    5 => _ = side.close(&fifo),
                    _ => side.open(&fifo, posted),
                }
                until(|| {
                    if side.end() == Some(side.next()) {
                        posted += 1;
                        until(|| (fifo.sent.load(Acquire) >= posted).then_some(()));
                        assert_eq!(fifo.queue_pair[posted as usize - 1].get(), n);
                        return Some(());
                    }
                    match side.peek(&fifo) {
                        Next::Message(len) => {
                            assert_eq!((len, fifo.slots[index(side.next(), SLOTS)].1.get()), (8, n));
                            side.take(&fifo);
                            by_slot += 1;
                            Some(())
                        }
                        Next::Closed | Next::Nothing => {
                            side.check_closed(&fifo);
                            None
                        }
                    }
                });
            }
            assert!(by_slot > 0, "no message came by a slot");
        },
    );
}

#[cfg(not(target_arch = "aarch64"))]
#[test]
fn fifo_survives_its_peer() {
    bolero::check!().with_type::<Vec<(u8, u64)>>().for_each(|steps| {
        let fifo = Fifo::default();
        let (mut sender, mut receiver) = (Sender::default(), Receiver::default());
        #[expect(clippy::cast_possible_truncation, reason = "any value does")]
        for &(step, value) in steps {
            match step % 12 {
                0 => fifo.word.store(value, Relaxed),
                1 => fifo.begun.store(value as u32, Relaxed),
                2 => fifo.resumed.store(value as u32, Relaxed),
                3 => fifo.taken.store(value, Relaxed),
                4 => fifo.slots[index(u64::from(step / 12), SLOTS)].0.store(value, Relaxed),
                5 => {
                    if let Some(number) = sender.claim(&fifo, SLOTS as u64, 1) {
                        sender.publish(&fifo, number, value as u32);
                    }
                }
                6 => {
                    let was_uncertain = sender.begin(&fifo);
                    match value % 3 {
                        0 => sender.undo(&fifo, was_uncertain),
                        1 => sender.count(&fifo, value as u32),
                        _ => {}
                    }
                }
                7 => _ = receiver.close(&fifo),
                8 => receiver.open(&fifo, value as u32),
                9 => receiver.check_closed(&fifo),
                10 if value % 8 == 0 => receiver.refuse(&fifo),
                _ => {
                    if let Next::Message(_) = receiver.peek(&fifo) {
                        receiver.take(&fifo);
                    }
                }
            }
        }
    });
}

/// A queue of requests, the doorbell that hands them over, and the completions that come back.
#[test]
fn requests_and_completions_are_handed_over() {
    const LOG: u32 = 3;
    const DEPTH: usize = 1 << LOG;
    let slots: [(Plain, Plain, AtomicU32); DEPTH] = Default::default();
    slots.iter().for_each(|slot| slot.2.store(mlx5_ring::op_own_word(&mlx5_ring::INITIAL_CQE), Relaxed));
    let (record, doorbell, consumed) =
        (AtomicU32::new(0), AtomicU64::new(mlx5_ring::EMPTY), AtomicU32::new(0));
    both(
        || {
            let (mut done, mut freed) = (0, 0);
            while done < ROUNDS.into() {
                until(|| take_doorbell(&doorbell));
                let recorded = mlx5_ring::extend16(done, recorded(&record));
                for n in done..recorded {
                    freed = gdsync_shm::freed_slots(&consumed, freed);
                    assert!(n - freed < DEPTH as u64);
                    let (request, cqe, word) = &slots[index(n, DEPTH)];
                    assert_eq!(request.get(), n);
                    cqe.set(!n);
                    gdsync_shm::publish_cqe(word, u32::from(mlx5_ring::lap(n, LOG)) << 24);
                }
                done = recorded;
            }
        },
        || {
            let (mut posted, mut completed) = (0, 0);
            while completed < ROUNDS.into() {
                let room = u64::from(ROUNDS).min(completed + DEPTH as u64);
                (posted..room).for_each(|n| slots[index(n, DEPTH)].0.set(n));
                posted = room;
                let fence = || fence(AcqRel);
                ring_doorbell(&record, mlx5_ring::send_record(posted), fence, &doorbell, posted);
                let (_, cqe, word) = &slots[index(completed, DEPTH)];
                until(|| gdsync_shm::is_complete(word, completed, LOG).then_some(()));
                assert_eq!(cqe.get(), !completed);
                completed += 1;
                gdsync_shm::free_slots(&consumed, completed);
            }
        },
    );
}

#[test]
fn a_record_that_is_accepted_is_whole() {
    let words: [AtomicU64; 4] = Default::default();
    let copy = || {
        let [a, b, c] = [0, 1, 2].map(|word: usize| words[word].load(Relaxed));
        fence(Acquire);
        [a, b, c, words[3].load(Acquire)]
    };
    both(
        || (1..=u64::from(ROUNDS)).for_each(|n| seqlock::write(&words, [n, n << 7, !n, n])),
        || {
            until(|| {
                let [a, b, c, check] = seqlock::accept(copy(), copy())?;
                assert_eq!((a, b, c), (check, check << 7, !check));
                (check == ROUNDS.into()).then_some(())
            });
        },
    );
}

#[test]
fn a_spin_lock_excludes() {
    let (lock, count) = (SpinLock::new(()), Plain::default());
    let add = || {
        for _ in 0..ROUNDS {
            let guard = lock.lock();
            count.set(count.get() + 1);
            drop(guard);
        }
    };
    both(add, add);
    assert_eq!(count.get(), 2 * u64::from(ROUNDS));
}
