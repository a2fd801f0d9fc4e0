//! The report on the recordings of processes, as JSON: waits, queue pairs, last records.

use std::collections::{BTreeMap, HashSet};
use std::time::Duration;

use gdasync::gdsync::mlx5::Syndrome;
use gdasync::gdsync::recorder::{Event, Liveness, Peer, Purpose, Queue, Record, Recording, Stage, Wait};
use serde_json::{Value, json};

fn seconds(ns: u64) -> f64 {
    Duration::from_nanos(ns).as_secs_f64()
}

pub(super) fn micros(ns: u64) -> f64 {
    // Seconds and the rest apart, so that nanoseconds stay what they are.
    let time = Duration::from_nanos(ns);
    f64::from(u32::try_from(time.as_secs()).unwrap_or(u32::MAX)) * 1e6 + f64::from(time.subsec_nanos()) / 1e3
}

fn state(liveness: Liveness) -> &'static str {
    match liveness {
        Liveness::Alive => "alive",
        Liveness::Dead => "dead",
        Liveness::Unknown => "unknown",
    }
}

pub(super) fn status(event: &Event) -> Option<String> {
    (event.status != 0).then(|| Syndrome(event.status).to_string())
}

/// Of these processes; `others` are where their peers may be found. The last `records` of each are listed.
pub(super) fn report(
    recordings: &[Recording],
    others: &[Recording],
    stuck: Duration,
    records: usize,
) -> Value {
    let stuck_after = u64::try_from(stuck.as_nanos()).unwrap_or(u64::MAX);
    let known: Vec<_> = recordings.iter().chain(others).collect();
    let process = |recording| process(recording, &known, stuck_after, records);
    let processes: Vec<_> = recordings.iter().map(process).collect();
    let waits = processes.iter().filter_map(|process| process["waits"].as_array()).flatten();
    let stuck = waits.filter(|wait| wait["stuck"] == true).count();
    json!({ "processes": processes, "stuck": stuck })
}

fn process(recording: &Recording, known: &[&Recording], stuck_after: u64, records: usize) -> Value {
    let since = |time: u64| seconds(recording.now.saturating_sub(time));
    let waits = recording.open_waits().map(|wait| waiting(recording, known, wait, stuck_after));
    let queue_pairs = recording.peers.iter().map(|peer| queue_pair(recording, known, peer));
    json!({
        "pid": recording.pid,
        "command": recording.command,
        "rank": recording.rank,
        "state": state(recording.liveness),
        "file": recording.path.display().to_string(),
        "begun_unix_ns": recording.time_of_day,
        // Seconds since then, and since the last event.
        "age_s": since(recording.begun),
        "idle_s": since(recording.last()),
        "threads": recording.threads.iter().filter(|thread| thread.tid != 0).count(),
        "records": recording.records.len(),
        "torn": recording.torn,
        "lost": recording.lost,
        "waits": waits.collect::<Vec<_>>(),
        "queue_pairs": queue_pairs.collect::<Vec<_>>(),
        "last_records": last_records(recording, records),
    })
}

/// Without the sends of `mp`'s watchdog, whose heartbeats would soon be all that is seen.
fn last_records(recording: &Recording, count: usize) -> Vec<Value> {
    let send = |record: &Record| {
        let Event { queue, device, qpn, number, .. } = record.event;
        (queue == Queue::Send).then_some((device, qpn, number))
    };
    let is_watchdogs = |record: &&Record| {
        record.event.stage == Stage::Prepared && recording.threads[record.thread].name == "mp-watch"
    };
    let hidden: HashSet<_> = recording.records.iter().filter(is_watchdogs).filter_map(send).collect();
    let shown = |record: &&Record| {
        record.event.status != 0 || send(record).is_none_or(|send| !hidden.contains(&send))
    };
    let all: Vec<_> = recording.records.iter().filter(shown).collect();
    let last = &all[all.len().saturating_sub(count)..];
    last.iter().map(|record| line(recording, record)).collect()
}

fn waiting(recording: &Recording, known: &[&Recording], wait: &Wait, stuck_after: u64) -> Value {
    let awaited = &wait.awaited;
    let lasted = recording.now.saturating_sub(wait.since);
    let thread = &recording.threads[wait.thread];
    let is_word = awaited.queue == Queue::None;
    let words = recording.words_at(awaited.number).filter(|_| is_word);
    let peer = match words.map(|words| words.purpose) {
        Some(Purpose::Receives { rank } | Purpose::Collectives { rank }) => recording
            .peers
            .iter()
            .find(|peer| peer.rank.is_some_and(|(known, _)| known == rank) && !peer.is_gone),
        _ => recording.peer(awaited.device, awaited.qpn).filter(|_| !is_word),
    };
    let purpose = words.map(|words| words.awaited(awaited.number, awaited.value.into()));
    let awaited_of_rank = || peer?.rank.map(|(rank, traffic)| traffic.awaited(awaited.queue, rank));
    json!({
        "stuck": recording.liveness == Liveness::Dead || lasted >= stuck_after,
        "by": wait.by.name(),
        "thread": thread.name,
        "tid": thread.tid,
        "queue": awaited.queue.name(),
        "qpn": (!is_word).then_some(awaited.qpn),
        // The number of the request that is waited for in its queue.
        "sequence": (!is_word).then_some(awaited.number),
        "address": is_word.then(|| format!("{:#x}", awaited.number)),
        "value": is_word.then_some(awaited.value),
        // In terms of ranks, if the recording has that: a message, a free place, a receive, a signal.
        "purpose": purpose.or_else(awaited_of_rank),
        "peer": peer.and_then(|peer| other_end(known, peer)),
        "for_s": seconds(lasted),
        // Requests posted to the queue and completed when the wait began.
        "posted": awaited.posted,
        "completed": awaited.completed,
        "last_state": last_state(recording, wait),
    })
}

/// What was last recorded of what a wait waits for.
fn last_state(recording: &Recording, wait: &Wait) -> String {
    let awaited = &wait.awaited;
    let waits = [Stage::WaitSubmitted, Stage::WaitBegun, Stage::WaitEnded, Stage::WaitGivenUp];
    let is_it = |record: &&Record| {
        let event = &record.event;
        (event.device, event.qpn, event.queue, event.number)
            == (awaited.device, awaited.qpn, awaited.queue, awaited.number)
            && !waits.contains(&event.stage)
    };
    if awaited.queue == Queue::None {
        return "writes to words are not recorded".into();
    }
    let Some(record) = recording.records.iter().rev().find(is_it) else {
        return "no record of it is left: newer ones have its place".into();
    };
    let ago = seconds(recording.now.saturating_sub(record.at));
    let status = status(&record.event).map_or_else(String::new, |status| format!(" with {status}"));
    format!("{}{status} {ago:.3} s ago", record.event.stage)
}

/// The other end of a queue pair. Its process, and what that has done, where it has a recording on this machine.
fn other_end(known: &[&Recording], peer: &Peer) -> Option<Value> {
    let (gid, qpn) = peer.remote?;
    let is_it = |other: &&Peer| (other.gid, other.qpn) == (gid, qpn);
    let found = known.iter().find_map(|recording| Some((*recording, recording.peers.iter().find(is_it)?)));
    Some(json!({
        "rank": peer.rank.map(|(rank, _)| rank).or(found.and_then(|(recording, _)| recording.rank)),
        "qpn": qpn,
        "gid": gid.to_string(),
        "pid": found.map(|(recording, _)| recording.pid),
        "state": found.map(|(recording, _)| state(recording.liveness)),
        "sends": found.map(|(recording, other)| progress(recording, other, Queue::Send)),
    }))
}

/// Numbers of the last requests of a queue that reached a stage, as far as the recording still has them.
fn progress(recording: &Recording, peer: &Peer, queue: Queue) -> Value {
    let last = |stage| recording.last_of(peer, queue, Some(stage)).map(|record| record.event.number);
    let stages = [Stage::Prepared, Stage::Triggered, Stage::Fetched, Stage::Completed, Stage::Released];
    json!(stages.map(|stage| (stage.name(), last(stage))).into_iter().collect::<BTreeMap<_, _>>())
}

fn queue_pair(recording: &Recording, known: &[&Recording], peer: &Peer) -> Value {
    let its = || {
        let is_its = |record: &&Record| {
            (record.event.device, record.event.qpn) == (peer.device, peer.qpn) && peer.qpn != 0
        };
        recording.records.iter().filter(is_its)
    };
    let failed = its().find(|record| record.event.stage == Stage::Completed && record.event.status != 0);
    let failure = failed.and_then(|record| {
        let Event { queue, number, .. } = record.event;
        Some(format!("{queue} {number}: {}", status(&record.event)?))
    });
    let stopped = || its().any(|record| record.event.stage == Stage::Stopped).then(|| "stopped".to_owned());
    let idle = its().next_back().map(|record| seconds(recording.now.saturating_sub(record.at)));
    json!({
        "device": peer.device,
        "qpn": peer.qpn,
        "gone": peer.is_gone,
        "peer": other_end(known, peer),
        "sends": progress(recording, peer, Queue::Send),
        "receives": progress(recording, peer, Queue::Receive),
        // Seconds since its last event.
        "idle_s": idle,
        // The first completion with an error that the recording still has, or that it was stopped.
        "failure": failure.or_else(stopped),
    })
}

fn line(recording: &Recording, record: &Record) -> Value {
    let event = &record.event;
    json!({
        // Microseconds since the recording was begun.
        "at_us": micros(record.at.saturating_sub(recording.begun)),
        "thread": recording.threads[record.thread].name,
        "by": event.by.name(),
        "stage": event.stage.name(),
        "queue": event.queue.name(),
        "qpn": (event.qpn != 0).then_some(event.qpn),
        "number": event.number,
        "len": event.len,
        "status": status(event),
        "stream": (event.stream != 0).then_some(event.stream),
    })
}
