//! Chrome trace events, as ui.perfetto.dev reads them: one process for each recording, a track for each thread with what it
//! recorded and waited for, and the sends of each queue pair from enqueue to release.

use std::io::{BufWriter, Write};

use gdasync::gdsync::recorder::{Record, Recording, Stage};
use serde_json::{Value, json};

use super::Result;
use super::messages::sends;
use super::report::{micros, status};

pub(super) fn write(recordings: &[Recording], out: impl Write) -> Result<()> {
    let zero = recordings.iter().map(|recording| recording.begun).min().unwrap_or(0);
    let events: Vec<_> = recordings.iter().flat_map(|recording| events(recording, zero)).collect();
    let mut out = BufWriter::new(out);
    serde_json::to_writer(&mut out, &json!({ "displayTimeUnit": "ns", "traceEvents": events }))?;
    Ok(out.flush()?)
}

fn events(recording: &Recording, zero: u64) -> Vec<Value> {
    let pid = recording.pid;
    let at = |time: u64| micros(time.saturating_sub(zero));
    let rank = recording.rank.map_or_else(String::new, |rank| format!(" rank {rank}"));
    let mut all = vec![json!({
        "ph": "M", "pid": pid, "name": "process_name", "args": { "name": format!("{}{rank}", recording.command) },
    })];
    for thread in recording.threads.iter().filter(|thread| thread.tid != 0) {
        let name = json!({ "name": thread.name });
        all.push(json!({ "ph": "M", "pid": pid, "tid": thread.tid, "name": "thread_name", "args": name }));
    }
    all.extend(recording.records.iter().filter(|record| !is_of_wait(record)).map(|record| {
        let event = &record.event;
        json!({
            "ph": "i", "s": "t", "pid": pid, "tid": recording.threads[record.thread].tid, "ts": at(record.at),
            "cat": event.queue.name(), "name": format!("{} {} {}", event.stage, event.queue, event.number),
            "args": {
                "by": event.by.name(), "qpn": event.qpn, "number": event.number, "len": event.len,
                "stream": event.stream, "status": status(event),
            },
        })
    }));
    all.extend(waits(recording).map(|(begun, ended)| {
        let event = &begun.event;
        json!({
            "ph": "X", "pid": pid, "tid": recording.threads[begun.thread].tid, "ts": at(begun.at),
            "dur": micros(ended.saturating_sub(begun.at)), "cat": "wait",
            "name": format!("wait {} {}", event.queue, event.number),
            "args": { "by": event.by.name(), "qpn": event.qpn, "number": event.number },
        })
    }));
    for message in sends(recording) {
        let ended = [message.released, message.completed, message.fetched].into_iter().flatten().next();
        let (Some(begun), Some(ended)) = (message.enqueue, ended) else { continue };
        let id = format!("{pid}.{}.{:#x}.{}.{begun}", message.device, message.qpn, message.number);
        let name = format!("QP {:#x} send {}", message.qpn, message.number);
        let both = [("b", begun), ("e", ended.max(begun))];
        all.extend(both.map(|(phase, time)| {
            json!({
                "ph": phase, "pid": pid, "tid": 0, "id": id, "cat": "send", "name": name, "ts": at(time),
                "args": { "bytes": message.len, "status": message.status },
            })
        }));
    }
    all
}

fn is_of_wait(record: &Record) -> bool {
    matches!(record.event.stage, Stage::WaitBegun | Stage::WaitEnded | Stage::WaitGivenUp)
}

/// The waits that begin in the recording, and when they end: the last event, for those that have not.
fn waits(recording: &Recording) -> impl Iterator<Item = (&Record, u64)> {
    let records = &recording.records;
    let begun = records.iter().enumerate().filter(|(_, record)| record.event.stage == Stage::WaitBegun);
    begun.map(|(place, begun)| {
        let later = &records[place + 1..];
        let end = later.iter().find(|record| record.thread == begun.thread && is_of_wait(record));
        (begun, end.map_or(recording.last(), |end| end.at))
    })
}
