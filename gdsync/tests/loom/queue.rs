//! The queues: doorbells to the HCA, completions from it, slots that are used again, and notes to whoever runs it.

use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use gdsync::mlx5::{self, Cqe};
use gdsync::shm::{self, Atom32, Atom64, doorbell_watch, pending_flag};
use loom::sync::{Arc, Mutex};
use loom::thread;

use super::common::{Event, L32, L64, Plain, explore};

const QPN: u32 = 0x1234;

/// A send queue whose WQEs are numbers of one block each.
struct Sq {
    blocks: Vec<Plain>,
    record: L32,
    doorbell: L64,
}

impl Sq {
    fn new(log: u32) -> Self {
        let doorbell = L64::default();
        shm::Atom64::store(&doorbell, mlx5::EMPTY, Relaxed);
        Self { blocks: (0..1 << log).map(|_| Plain::default()).collect(), record: L32::default(), doorbell }
    }

    fn wqe(&self, n: u64) -> &Plain {
        &self.blocks[usize::try_from(n).unwrap() % self.blocks.len()]
    }

    fn post(&self, n: u64, doorbell: u64) {
        self.wqe(n).set(n);
        shm::ring_doorbell(&self.record, mlx5::send_record(n + 1), || {}, &self.doorbell, doorbell);
    }

    /// Where the doorbell record is, at or after `head`.
    fn recorded(&self, head: u64) -> u64 {
        mlx5::extend16(head, shm::recorded(&self.record))
    }
}

/// The doorbell after WQE `n`.
fn doorbell(n: u64) -> u64 {
    mlx5::next_pi_doorbell(QPN, n + 1)
}

/// A completion queue; its CQEs hold a number.
struct Cq {
    slots: Vec<(Plain, L32)>,
    record: L32,
    log: u32,
}

impl Cq {
    /// The queue as it is before completion `start`.
    fn new(log: u32, start: u64) -> Self {
        let queue =
            Self { slots: (0..1 << log).map(|_| Default::default()).collect(), record: L32::default(), log };
        for n in start..start + (1 << log) {
            let before = n.checked_sub(1 << log);
            let word = before.map_or(mlx5::op_own_word(&mlx5::INITIAL_CQE), |n| queue.op_own_word(n));
            queue.slot(n).1.store(word, Relaxed);
        }
        queue.record.store(mlx5::cq_ci_record(start), Relaxed);
        queue
    }

    fn op_own_word(&self, n: u64) -> u32 {
        let cqe = Cqe {
            owner: mlx5::lap(n, self.log),
            wqe_counter: u16::try_from(n & 0xffff).unwrap(),
            ..Cqe::default()
        };
        mlx5::op_own_word(&cqe.encode())
    }

    fn slot(&self, n: u64) -> &(Plain, L32) {
        &self.slots[usize::try_from(n).unwrap() % self.slots.len()]
    }

    fn complete(&self, n: u64, data: u64) {
        let (bytes, word) = self.slot(n);
        bytes.set(data);
        shm::publish_cqe(word, self.op_own_word(n));
    }

    fn is_complete(&self, n: u64) -> bool {
        shm::is_complete(&self.slot(n).1, n, self.log)
    }

    fn poll(&self, n: u64) -> Option<u64> {
        self.is_complete(n).then(|| self.slot(n).0.get())
    }
}

fn spin<T>(mut look: impl FnMut() -> Option<T>) -> T {
    loop {
        if let Some(found) = look() {
            return found;
        }
        thread::yield_now();
    }
}

/// Two doorbells; the second may overwrite the first. Their 16-bit index wraps between them.
#[test]
fn doorbells_lose_nothing_and_come_after_record_and_wqe() {
    explore(5, || {
        const START: u64 = 0xffff;
        let queue = Arc::new(Sq::new(1));
        let poster = queue.clone();
        let poster = thread::spawn(move || (START..START + 2).for_each(|n| poster.post(n, doorbell(n))));
        let mut head = START;
        while head < START + 2 {
            let value = spin(|| shm::take_doorbell(&queue.doorbell));
            let target = mlx5::extend16(head, mlx5::Doorbell::decode(value).index);
            assert!(head < target && target <= START + 2, "doorbell {target} at {head}");
            assert!(queue.recorded(head) >= target, "the record is behind the doorbell");
            for n in head..target {
                assert_eq!(queue.wqe(n).get(), n);
            }
            head = target;
        }
        poster.join().unwrap();
        assert_eq!(shm::take_doorbell(&queue.doorbell), None);
    });
}

/// What a queue pair in error flushes: WQEs up to the record, before their doorbell was seen or even written.
#[test]
fn wqes_before_the_record_can_be_read() {
    explore(5, || {
        let queue = Arc::new(Sq::new(2));
        let poster = queue.clone();
        let poster = thread::spawn(move || (0..3).for_each(|n| poster.post(n, doorbell(n))));
        let mut head = 0;
        while head < 3 {
            let end = spin(|| Some(queue.recorded(head)).filter(|&end| end > head));
            for n in head..end {
                assert_eq!(queue.wqe(n).get(), n);
            }
            head = end;
        }
        poster.join().unwrap();
    });
}

/// A queue pair fails while receives are posted to it. Each is flushed: by the HCA as the queue pair fails, or by a call.
#[test]
fn receives_posted_to_a_failing_queue_pair_are_flushed() {
    explore(5, || {
        let shared = Arc::new((Sq::new(1), L32::default(), Mutex::new(0)));
        let flush = |queue: &Sq, head: &mut u64| {
            let end = queue.recorded(*head);
            (*head..end).for_each(|n| assert_eq!(queue.wqe(n).get(), n));
            *head = end;
        };
        let poster = shared.clone();
        let poster = thread::spawn(move || {
            let (queue, calls, head) = &*poster;
            for n in 0..2 {
                queue.wqe(n).set(n);
                queue.record.store(mlx5::recv_record(n + 1), Release);
                if shm::wants_calls(calls) {
                    flush(queue, &mut head.lock().unwrap());
                }
            }
        });
        let (queue, calls, head) = &*shared;
        let mut state = head.lock().unwrap();
        shm::request_calls(calls);
        flush(queue, &mut state);
        drop(state);
        poster.join().unwrap();
        assert_eq!(*head.lock().unwrap(), 2);
    });
}

/// Two slots, almost three laps, and the 24-bit consumer index wraps on the way.
#[test]
fn completions_arrive_once_and_whole_and_are_not_overwritten() {
    explore(3, || {
        const START: u64 = (1 << 24) - 3;
        const END: u64 = START + 5;
        let queue = Arc::new(Cq::new(1, START));
        let hca = queue.clone();
        let hca = thread::spawn(move || {
            let mut passed = START;
            for n in START..END {
                while n - passed == 2 {
                    passed = spin(|| Some(shm::freed_slots(&hca.record, passed)).filter(|&now| now > passed));
                    assert!(passed <= n);
                }
                hca.complete(n, n);
            }
        });
        for n in START..END {
            assert_eq!(spin(|| queue.poll(n)), n);
            shm::free_slots(&queue.record, n + 1);
        }
        assert!(!queue.is_complete(END));
        hca.join().unwrap();
    });
}

/// Posts `count` WQEs to a queue of `2^log` blocks, whose completion queue has as many slots and no overrun check:
/// a completion is all that a block and a slot wait for. `ring` gives the doorbell after a WQE, `target` reads it.
fn round_trips(log: u32, count: u64, ring: fn(u64) -> u64, target: fn(u64, u64) -> u64) {
    let queues = Arc::new((Sq::new(log), Cq::new(log, 0)));
    let hca = queues.clone();
    let hca = thread::spawn(move || {
        let (sq, cq) = &*hca;
        let mut head = 0;
        while head < count {
            let target = target(head, spin(|| shm::take_doorbell(&sq.doorbell)));
            assert!(head < target && target <= count, "doorbell {target} at {head}");
            assert!(sq.recorded(head) >= target, "the record is behind the doorbell");
            for n in head..target {
                cq.complete(n, sq.wqe(n).get());
            }
            head = target;
        }
    });
    let (sq, cq) = &*queues;
    for n in 0..count + (1 << log) {
        if let Some(done) = n.checked_sub(1 << log) {
            assert_eq!(spin(|| cq.poll(done)), done);
        }
        if n < count {
            sq.post(n, ring(n));
        }
    }
    hca.join().unwrap();
}

#[test]
fn one_block_goes_round_under_equal_doorbells() {
    explore(4, || round_trips(0, 4, |_| 7, |head, _| head + 1));
}

#[test]
fn two_blocks_go_round() {
    let target = |head, value| mlx5::extend16(head, mlx5::Doorbell::decode(value).index);
    explore(2, move || round_trips(1, 5, doorbell, target));
}

/// Software sleeps for each completion; loom reports a deadlock if it is never woken.
#[test]
fn completions_wake_a_sleeper() {
    explore(3, || {
        let shared = Arc::new((Cq::new(1, 0), Event::default()));
        let hca = shared.clone();
        let hca = thread::spawn(move || {
            for n in 0..2 {
                hca.0.complete(n, n);
                hca.1.raise();
            }
        });
        for n in 0..2 {
            shared.1.sleep_until(|| shared.0.is_complete(n));
            assert_eq!(shared.0.poll(n), Some(n));
        }
        hca.join().unwrap();
    });
}

/// The HCA behind a lock that nobody waits for. The lock is no stronger than it must be: one that is held may be
/// seen held a little longer, which loom's own never is.
#[derive(Default)]
struct Hca {
    locked: L32,
    note: L32,
    /// Whose doorbell was put down, as in `DoorbellSet` of the software HCA.
    doorbells: [L32; 2],
    wqes: [Plain; 2],
    /// How often each was executed, under the lock.
    executed: [Plain; 2],
}

struct Guard<'a>(&'a Hca);

impl Drop for Guard<'_> {
    fn drop(&mut self) {
        self.0.locked.swap(0, Release);
    }
}

impl Hca {
    fn try_lock(&self) -> Option<Guard<'_>> {
        (self.locked.load(Relaxed) == 0 && self.locked.swap(1, Acquire) == 0).then_some(Guard(self))
    }

    fn settle(&self, guard: Guard<'_>) {
        pending_flag::unlock(&self.note, guard, || self.try_lock(), |_| self.step());
    }

    fn execute(&self, i: usize) {
        assert_eq!(self.wqes[i].get(), 1);
        self.executed[i].set(self.executed[i].get() + 1);
    }

    fn step(&self) {
        if pending_flag::take(&self.note) {
            for i in 0..2 {
                if self.doorbells[i].load(Relaxed) != 0 && self.doorbells[i].swap(0, Acquire) != 0 {
                    self.execute(i);
                }
            }
        }
    }

    /// As `SoftHca::ring` does.
    fn ring(&self, i: usize) {
        self.wqes[i].set(1);
        if let Some(guard) = self.try_lock() {
            self.execute(i);
            self.settle(guard);
        } else {
            self.doorbells[i].swap(1, Release);
            pending_flag::set(&self.note);
            if let Some(guard) = self.try_lock() {
                self.settle(guard);
            }
        }
    }
}

#[test]
fn no_note_is_lost() {
    explore(2, || {
        let hca = Arc::new(Hca::default());
        let guard = hca.try_lock().unwrap();
        let posters = [0, 1].map(|i| {
            let hca = hca.clone();
            thread::spawn(move || hca.ring(i))
        });
        hca.step();
        hca.settle(guard);
        posters.into_iter().for_each(|p| p.join().unwrap());
        assert_eq!(hca.executed.each_ref().map(Plain::get), [1, 1]);
    });
}

/// As streams of GPUs announce doorbells and waits to an HCA that is about to turn to something else: at once, or in two halves, by who
/// has a lock between them.
#[test]
fn no_order_is_lost() {
    for (reached, in_halves) in [(0, [false; 2]), (1, [false; 2]), (0, [true, false]), (1, [true, false])] {
        explore(3, move || {
            let shared = Arc::new((L64::default(), L32::default(), Mutex::new(0)));
            shared.1.store(1, Relaxed);
            let orders = in_halves.map(|in_halves| {
                let shared = shared.clone();
                thread::spawn(move || {
                    let (until, watched, last) = &*shared;
                    let mut last = last.lock().unwrap();
                    *last += 1;
                    let number = *last;
                    if in_halves {
                        doorbell_watch::publish(until, number);
                    }
                    drop(last);
                    // Others order late.
                    let is_to_order = !in_halves || !doorbell_watch::is_watched(watched);
                    is_to_order && doorbell_watch::request(until, watched, number)
                })
            });
            let looks_on = doorbell_watch::must_poll(&shared.0, &shared.1, reached);
            let told = orders.map(|order| order.join().unwrap());
            assert!(looks_on || told != [false, false], "nobody looks");
            assert_eq!(shared.0.load(Relaxed), 2, "who looks ends before the second order");
            assert_eq!(shared.1.load(Relaxed), 1, "later orders would be told once more");
        });
    }
}

/// Who takes back what he foresaw does not take back what others ordered.
#[test]
fn only_what_was_foreseen_is_withdrawn() {
    explore(3, || {
        let shared = Arc::new((L64::default(), L32::default()));
        doorbell_watch::publish(&shared.0, 1);
        let later = {
            let shared = shared.clone();
            thread::spawn(move || doorbell_watch::request(&shared.0, &shared.1, 2))
        };
        doorbell_watch::withdraw(&shared.0, 1, 0);
        assert!(later.join().unwrap(), "nobody looked");
        assert_eq!(shared.0.load(Relaxed), 2);
    });
}
