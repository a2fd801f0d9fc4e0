//! Every interleaving (up to a bound of preemptions) and every allowed reordering of the wire's two hand-overs.

use std::sync::atomic::Ordering;

use gdsync::protocol::record::{Consumer, Corrupt, Lines, Producer};
use gdsync::protocol::{Atom32, Atom64, bell};
use loom::sync::atomic::{AtomicU32, AtomicU64, fence};
use loom::sync::{Arc, Condvar, Mutex};
use loom::thread;

#[derive(Default)]
struct L32(AtomicU32);
#[derive(Default)]
struct L64(AtomicU64);

impl Atom32 for L32 {
    fn load(&self, order: Ordering) -> u32 {
        self.0.load(order)
    }
    fn store(&self, value: u32, order: Ordering) {
        self.0.store(value, order);
    }
    fn swap(&self, value: u32, order: Ordering) -> u32 {
        self.0.swap(value, order)
    }
    fn fetch_add(&self, value: u32, order: Ordering) -> u32 {
        self.0.fetch_add(value, order)
    }
    fn fence(order: Ordering) {
        fence(order);
    }
}

impl Atom64 for L64 {
    fn load(&self, order: Ordering) -> u64 {
        self.0.load(order)
    }
    fn store(&self, value: u64, order: Ordering) {
        self.0.store(value, order);
    }
    fn swap(&self, value: u64, order: Ordering) -> u64 {
        self.0.swap(value, order)
    }
}

/// The two words of a bell, and a futex made of a lock and a condition variable.
#[derive(Default)]
struct Futex {
    sleepers: L32,
    sequence: L32,
    lock: Mutex<()>,
    woken: Condvar,
}

impl Futex {
    /// Returns once `ready`; loom reports a deadlock if the wake-up is lost.
    fn sleep_until(&self, ready: impl Fn() -> bool) {
        while !ready() {
            let ticket = bell::announce(&self.sleepers, &self.sequence);
            if ready() {
                return;
            }
            let mut guard = self.lock.lock().unwrap();
            while self.sequence.load(Ordering::Relaxed) == ticket {
                guard = self.woken.wait(guard).unwrap();
            }
        }
    }

    fn ring(&self) {
        if bell::ring(&self.sleepers, &self.sequence) {
            drop(self.lock.lock().unwrap());
            self.woken.notify_all();
        }
    }
}

fn explore(preemptions: usize, test: impl Fn() + Sync + Send + 'static) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(preemptions);
    model.max_branches = 10_000;
    model.check(test);
}

#[test]
fn one_sleeper_hears_two_rings() {
    explore(4, || {
        let shared = Arc::new((Futex::default(), AtomicU32::new(0)));
        let ringer = shared.clone();
        let ringer = thread::spawn(move || {
            for work in 1..=2 {
                ringer.1.store(work, Ordering::Relaxed);
                ringer.0.ring();
            }
        });
        for work in 1..=2 {
            shared.0.sleep_until(|| shared.1.load(Ordering::Relaxed) >= work);
        }
        ringer.join().unwrap();
    });
}

#[test]
fn two_ringers_share_a_bell() {
    explore(3, || {
        let shared = Arc::new((Futex::default(), [AtomicU32::new(0), AtomicU32::new(0)]));
        let ringers = [0, 1].map(|i| {
            let shared = shared.clone();
            thread::spawn(move || {
                shared.1[i].store(1, Ordering::Relaxed);
                shared.0.ring();
            })
        });
        for i in 0..2 {
            shared.0.sleep_until(|| shared.1[i].load(Ordering::Relaxed) == 1);
        }
        ringers.map(|r| r.join().unwrap());
    });
}

#[test]
fn two_sleepers_share_a_bell() {
    explore(3, || {
        let shared = Arc::new((Futex::default(), [AtomicU32::new(0), AtomicU32::new(0)]));
        let sleepers = [0, 1].map(|i| {
            let shared = shared.clone();
            thread::spawn(move || shared.0.sleep_until(|| shared.1[i].load(Ordering::Relaxed) == 1))
        });
        for work in &shared.1 {
            work.store(1, Ordering::Relaxed);
            shared.0.ring();
        }
        sleepers.map(|s| s.join().unwrap());
    });
}

/// Eight lines of two words each. The first word of a line is a marker or, inside a record, data.
#[derive(Default)]
struct Tiny {
    words: [[L32; 2]; 8],
    consumed: L64,
}

impl Lines for Tiny {
    type Marker = L32;
    type Position = L64;
    fn count(&self) -> u64 {
        8
    }
    fn marker(&self, line: u64) -> &L32 {
        &self.words[line as usize][0]
    }
    fn consumed(&self) -> &L64 {
        &self.consumed
    }
}

/// Data that looks like the marker of a record of one line.
fn data(record: u32) -> u32 {
    1 << 31 | record
}

fn push(ring: &Tiny, producer: &mut Producer, record: u32, len: u32) -> Result<bool, Corrupt> {
    let Some(line) = producer.reserve(ring, len)? else { return Ok(false) };
    let line = line as usize;
    ring.words[line][1].store(data(record), Ordering::Relaxed);
    if len > 32 {
        ring.words[line + 1].iter().for_each(|w| w.store(data(record), Ordering::Relaxed));
    }
    producer.publish(ring, len);
    Ok(true)
}

fn pop(ring: &Tiny, consumer: &mut Consumer, record: u32, len: u32) -> Result<bool, Corrupt> {
    let Some(found) = consumer.peek(ring)? else { return Ok(false) };
    assert_eq!(found.len, len, "length of record {record}");
    let line = found.line as usize;
    assert_eq!(ring.words[line][1].load(Ordering::Relaxed), data(record));
    if len > 32 {
        for word in &ring.words[line + 1] {
            assert_eq!(word.load(Ordering::Relaxed), data(record));
        }
    }
    consumer.pop(ring, found);
    Ok(true)
}

/// Runs producer and consumer of these body lengths to the end.
fn transfer(lens: &'static [u32]) {
    let ring = Arc::new(Tiny::default());
    let producer = ring.clone();
    let producer = thread::spawn(move || {
        let mut side = Producer::default();
        for (record, &len) in (0..).zip(lens) {
            while !push(&producer, &mut side, record, len).unwrap() {
                thread::yield_now();
            }
        }
    });
    let mut side = Consumer::default();
    for (record, &len) in (0..).zip(lens) {
        while !pop(&ring, &mut side, record, len).unwrap() {
            thread::yield_now();
        }
    }
    producer.join().unwrap();
}

#[test]
fn records_of_one_and_two_lines_cross_two_laps() {
    // 2+1+2+2, a pad of 1; 2+2+1+2, a pad of 1; 2+1 in the third lap.
    explore(2, || transfer(&[40, 8, 40, 40, 40, 40, 8, 40, 40, 8]));
}

#[test]
fn short_records_cross_two_laps() {
    explore(2, || transfer(&[8; 18]));
}
