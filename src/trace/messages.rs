//! The stages of sends, put together from their records.

use std::collections::BTreeMap;

use gdasync::gdsync::recorder::{Queue, Recording, Stage};
use serde::Serialize;

use super::report::micros;

/// A send and when it reached which stage, in nanoseconds of the monotonic clock.
#[derive(Clone, Copy, Default)]
pub(super) struct Message {
    pub(super) device: u8,
    pub(super) qpn: u32,
    pub(super) number: u64,
    pub(super) len: u32,
    pub(super) enqueue: Option<u64>,
    pub(super) trigger: Option<u64>,
    pub(super) fetched: Option<u64>,
    pub(super) completed: Option<u64>,
    pub(super) released: Option<u64>,
    pub(super) status: u8,
}

/// The sends of a process whose beginning the recording still has, in the order of their beginning.
pub(super) fn sends(recording: &Recording) -> Vec<Message> {
    let mut all: Vec<Message> = Vec::new();
    // Where the send of a number is, the last one of it: after a reset numbers are given again.
    let mut places = BTreeMap::new();
    // When the last doorbell of a queue pair was seen.
    let mut triggers = BTreeMap::new();
    for record in recording.records.iter().filter(|record| record.event.queue == Queue::Send) {
        let (event, at) = (&record.event, record.at);
        let queue = (event.device, event.qpn);
        let key = (queue, event.number);
        if event.stage == Stage::Prepared {
            places.insert(key, all.len());
            let (device, qpn) = queue;
            let begun = Message { device, qpn, number: event.number, len: event.len, ..Message::default() };
            all.push(Message { enqueue: Some(at), ..begun });
            continue;
        }
        if event.stage == Stage::Triggered {
            triggers.insert(queue, at);
            continue;
        }
        let Some(message) = places.get(&key).and_then(|&place| all.get_mut(place)) else { continue };
        match event.stage {
            Stage::Fetched => (message.trigger, message.fetched) = (triggers.get(&queue).copied(), Some(at)),
            Stage::Completed => (message.completed, message.status) = (Some(at), event.status),
            Stage::Released => message.released = Some(at),
            _ => {}
        }
    }
    all
}

/// Messages for a picture.
#[derive(Serialize)]
pub(super) struct Timeline {
    unit: &'static str,
    pub(super) messages: Vec<Stages>,
}

/// When a message reached which stage.
#[derive(Serialize)]
pub(super) struct Stages {
    rank: u32,
    qpn: u32,
    seq: u64,
    bytes: u32,
    enqueue: f64,
    trigger: f64,
    fetched: f64,
    completed: f64,
    released: f64,
}

/// The last `count` messages of all processes that have all stages, from the first of their beginnings on. A process without a
/// rank has its place among those named.
pub(super) fn timeline(recordings: &[Recording], count: usize) -> Timeline {
    let whole = |message: &Message| {
        let Message { enqueue, trigger, fetched, completed, released, .. } = *message;
        Some([enqueue?, trigger?, fetched?, completed?, released?])
    };
    let mut found = Vec::new();
    for (recording, place) in recordings.iter().zip(0..) {
        let rank = recording.rank.unwrap_or(place);
        found.extend(sends(recording).iter().filter_map(|message| Some((whole(message)?, rank, *message))));
    }
    found.sort_by_key(|(times, ..)| *times);
    let found = &found[found.len().saturating_sub(count)..];
    let zero = found.first().map_or(0, |([enqueue, ..], ..)| *enqueue);
    let messages = found.iter().map(|(times, rank, message)| {
        let [enqueue, trigger, fetched, completed, released] = times.map(|time| micros(time - zero));
        let (rank, qpn, seq, bytes) = (*rank, message.qpn, message.number, message.len);
        Stages { rank, qpn, seq, bytes, enqueue, trigger, fetched, completed, released }
    });
    Timeline { unit: "us", messages: messages.collect() }
}
