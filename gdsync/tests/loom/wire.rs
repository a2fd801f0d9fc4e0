//! The wire's two hand-overs: the bell and the ring of records.

use std::sync::atomic::Ordering::Relaxed;

use gdsync::shm::Atom32;
use gdsync::shm::packet_ring::{Consumer, Corrupt, Lines, Producer};
use loom::sync::Arc;
use loom::sync::atomic::AtomicU32;
use loom::thread;

use super::common::{Event, L32, L64, Plain, explore};

#[test]
fn one_sleeper_hears_two_rings() {
    explore(4, || {
        let shared = Arc::new((Event::default(), AtomicU32::new(0)));
        let ringer = shared.clone();
        let ringer = thread::spawn(move || {
            for work in 1..=2 {
                ringer.1.store(work, Relaxed);
                ringer.0.raise();
            }
        });
        for work in 1..=2 {
            shared.0.sleep_until(|| shared.1.load(Relaxed) >= work);
        }
        ringer.join().unwrap();
    });
}

#[test]
fn two_ringers_share_a_bell() {
    explore(3, || {
        let shared = Arc::new((Event::default(), [AtomicU32::new(0), AtomicU32::new(0)]));
        let ringers = [0, 1].map(|i| {
            let shared = shared.clone();
            thread::spawn(move || {
                shared.1[i].store(1, Relaxed);
                shared.0.raise();
            })
        });
        for i in 0..2 {
            shared.0.sleep_until(|| shared.1[i].load(Relaxed) == 1);
        }
        ringers.into_iter().for_each(|r| r.join().unwrap());
    });
}

#[test]
fn two_sleepers_share_a_bell() {
    explore(3, || {
        let shared = Arc::new((Event::default(), [AtomicU32::new(0), AtomicU32::new(0)]));
        let sleepers = [0, 1].map(|i| {
            let shared = shared.clone();
            thread::spawn(move || shared.0.sleep_until(|| shared.1[i].load(Relaxed) == 1))
        });
        for work in &shared.1 {
            work.store(1, Relaxed);
            shared.0.raise();
        }
        sleepers.into_iter().for_each(|s| s.join().unwrap());
    });
}

/// The fewest lines a ring may have, each of two words. The first is a marker or, inside a record, data.
#[derive(Default)]
struct Tiny {
    lines: [(L32, Plain); 4],
    consumed: L64,
}

impl Lines for Tiny {
    type Marker = L32;
    type Position = L64;
    fn count(&self) -> u64 {
        4
    }
    fn marker(&self, line: u64) -> &L32 {
        &self.lines[usize::try_from(line).unwrap()].0
    }
    fn consumed(&self) -> &L64 {
        &self.consumed
    }
}

/// Body lengths of one line and of two.
const SHORT: u32 = 8;
const LONG: u32 = 40;

/// Data that looks like the marker of a record of one line.
fn data(record: u32) -> u32 {
    1 << 31 | record
}

fn push(ring: &Tiny, producer: &mut Producer, record: u32, len: u32) -> Result<bool, Corrupt> {
    let Some(line) = producer.reserve(ring, len)? else { return Ok(false) };
    let line = usize::try_from(line).unwrap();
    ring.lines[line].1.set(record.into());
    if len == LONG {
        ring.lines[line + 1].0.store(data(record), Relaxed);
        ring.lines[line + 1].1.set(record.into());
    }
    producer.publish(ring, len);
    Ok(true)
}

fn pop(ring: &Tiny, consumer: &mut Consumer, record: u32, len: u32) -> Result<bool, Corrupt> {
    let Some(found) = consumer.peek(ring)? else { return Ok(false) };
    assert_eq!(found.len, len, "length of record {record}");
    let line = usize::try_from(found.line).unwrap();
    assert_eq!(ring.lines[line].1.get(), u64::from(record));
    if len == LONG {
        assert_eq!(ring.lines[line + 1].0.load(Relaxed), data(record));
        assert_eq!(ring.lines[line + 1].1.get(), u64::from(record));
    }
    consumer.pop(ring, found);
    Ok(true)
}

/// Sends records of these lengths, the first `before` of them before the two sides run at the same time.
fn transfer(before: usize, lens: &'static [u32]) {
    let ring = Arc::new(Tiny::default());
    let (mut producer, mut consumer) = (Producer::default(), Consumer::default());
    let mut records = (0..).zip(lens.iter().copied());
    for (record, len) in records.by_ref().take(before) {
        assert!(push(&ring, &mut producer, record, len).unwrap());
        assert!(pop(&ring, &mut consumer, record, len).unwrap());
    }
    let shared = ring.clone();
    let all = records.clone();
    let thread = thread::spawn(move || {
        for (record, len) in all {
            while !push(&shared, &mut producer, record, len).unwrap() {
                thread::yield_now();
            }
        }
    });
    for (record, len) in records {
        while !pop(&ring, &mut consumer, record, len).unwrap() {
            thread::yield_now();
        }
    }
    thread.join().unwrap();
}

#[test]
fn short_records_cross_two_laps() {
    explore(1, || transfer(0, &[SHORT; 8]));
}

/// From every line, more than a lap.
#[test]
fn short_records_cross_any_line() {
    for before in 0..4 {
        explore(3, move || transfer(before, &[SHORT; 8][..before + 5]));
    }
}

#[test]
fn long_records_cross_three_laps() {
    explore(3, || transfer(0, &[LONG; 7]));
}

#[test]
fn mixed_records_cross_two_laps() {
    explore(2, || transfer(0, &[SHORT, LONG, SHORT, SHORT, LONG, SHORT, LONG]));
}

#[test]
fn pads_cross_two_laps() {
    // A pad before each long record but the first.
    explore(2, || transfer(0, &[LONG, SHORT, LONG, SHORT, LONG, SHORT, LONG]));
}

/// What was written for a record that was given up is not taken for a record after the shorter one sent instead.
#[test]
fn a_record_given_up_leaves_no_marker() {
    explore(3, || {
        let ring = Arc::new(Tiny::default());
        let shared = ring.clone();
        let producer = thread::spawn(move || {
            let mut side = Producer::default();
            for record in 0..3 {
                if let Some(line) = side.reserve(&*shared, LONG).unwrap() {
                    shared.marker(line + 1).store(data(7), Relaxed);
                }
                while !push(&shared, &mut side, record, SHORT).unwrap() {
                    thread::yield_now();
                }
            }
        });
        let mut side = Consumer::default();
        for record in 0..3 {
            while !pop(&ring, &mut side, record, SHORT).unwrap() {
                thread::yield_now();
            }
        }
        producer.join().unwrap();
        assert!(side.peek(&*ring).unwrap().is_none());
    });
}
