//! The report on the recordings of processes: waits, queue pairs, last records.

use std::collections::{BTreeMap, HashSet};
use std::time::Duration;

use gdasync::gdsync::mlx5::Syndrome;
use gdasync::gdsync::recorder::{Event, Liveness, Peer, Purpose, Queue, Record, Recording, Stage, Wait};
use serde::Serialize;
use serde_json::{Value, json};

#[derive(Serialize)]
pub(super) struct Report {
    pub(super) processes: Vec<Process>,
    /// Waits that are stuck.
    pub(super) stuck: usize,
}

#[derive(Serialize)]
pub(super) struct Process {
    pub(super) pid: u32,
    pub(super) command: String,
    pub(super) rank: Option<u32>,
    /// "alive", "dead" or "unknown".
    pub(super) state: &'static str,
    pub(super) file: String,
    /// Nanoseconds since 1970 when the recording was begun.
    pub(super) begun_unix_ns: u64,
    /// Seconds since then, and since the last event.
    pub(super) age_s: f64,
    pub(super) idle_s: f64,
    pub(super) threads: usize,
    pub(super) records: usize,
    pub(super) torn: u64,
    pub(super) lost: u64,
    pub(super) waits: Vec<Waiting>,
    pub(super) queue_pairs: Vec<Value>,
    /// The last ones.
    pub(super) last_records: Vec<Value>,
}

#[derive(Serialize)]
pub(super) struct Waiting {
    pub(super) stuck: bool,
    /// "CPU", "host stream" or "CUDA stream".
    pub(super) by: &'static str,
    pub(super) thread: String,
    pub(super) tid: u64,
    /// "send", "receive", "shared CQ" or "word".
    pub(super) queue: &'static str,
    pub(super) qpn: Option<u32>,
    /// The number of the request that is waited for in its queue.
    pub(super) sequence: Option<u64>,
    /// Of a word.
    pub(super) address: Option<String>,
    pub(super) value: Option<u32>,
    /// What it stands for in terms of ranks, if the recording has that: a message, a free place, a receive, a signal.
    pub(super) purpose: Option<String>,
    pub(super) peer: Option<Other>,
    pub(super) for_s: f64,
    /// Requests posted to the queue and completed when the wait began.
    pub(super) posted: u64,
    pub(super) completed: u64,
    /// The last that was recorded of the request.
    pub(super) last_state: String,
}

/// The other end of a queue pair.
#[derive(Clone, Serialize)]
pub(super) struct Other {
    pub(super) rank: Option<u32>,
    pub(super) qpn: u32,
    pub(super) gid: String,
    /// Its process, where that has a recording on this machine.
    pub(super) pid: Option<u32>,
    pub(super) state: Option<&'static str>,
    /// The last of its sends that it has prepared, fetched and seen complete, there.
    pub(super) sends: Option<Value>,
}

pub(super) fn seconds(ns: u64) -> f64 {
    Duration::from_nanos(ns).as_secs_f64()
}

pub(super) fn micros(ns: u64) -> f64 {
    // Seconds and the rest apart, so that nanoseconds stay what they are.
    let time = Duration::from_nanos(ns);
    f64::from(u32::try_from(time.as_secs()).unwrap_or(u32::MAX)) * 1e6 + f64::from(time.subsec_nanos()) / 1e3
}

pub(super) fn state(liveness: Liveness) -> &'static str {
    match liveness {
        Liveness::Alive => "alive",
        Liveness::Dead => "dead",
        Liveness::Unknown => "unknown",
    }
}

pub(super) fn status(event: &Event) -> Option<String> {
    (event.status != 0).then(|| Syndrome(event.status).to_string())
}

impl Report {
    /// Of these processes; `others` are where their peers may be found. The last `records` of each are listed.
    pub(super) fn of(
        recordings: &[Recording],
        others: &[Recording],
        stuck: Duration,
        records: usize,
    ) -> Self {
        let stuck_after = u64::try_from(stuck.as_nanos()).unwrap_or(u64::MAX);
        let known: Vec<_> = recordings.iter().chain(others).collect();
        let processes: Vec<_> =
            recordings.iter().map(|recording| Process::of(recording, &known, stuck_after, records)).collect();
        let waits = processes.iter().flat_map(|process| &process.waits);
        let stuck = waits.filter(|wait| wait.stuck).count();
        Self { processes, stuck }
    }
}

impl Process {
    fn of(recording: &Recording, known: &[&Recording], stuck_after: u64, records: usize) -> Self {
        let since = |time: u64| seconds(recording.now.saturating_sub(time));
        let waits =
            recording.open_waits().map(|wait| Waiting::of(recording, known, wait, stuck_after)).collect();
        Self {
            pid: recording.pid,
            command: recording.command.clone(),
            rank: recording.rank,
            state: state(recording.liveness),
            file: recording.path.display().to_string(),
            begun_unix_ns: recording.time_of_day,
            age_s: since(recording.begun),
            idle_s: since(recording.last()),
            threads: recording.threads.iter().filter(|thread| thread.tid != 0).count(),
            records: recording.records.len(),
            torn: recording.torn,
            lost: recording.lost,
            waits,
            queue_pairs: recording.peers.iter().map(|peer| queue_pair(recording, known, peer)).collect(),
            last_records: last_records(recording, records),
        }
    }
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
    let mut last: Vec<_> = recording
        .records
        .iter()
        .rev()
        .filter(shown)
        .take(count)
        .map(|record| line(recording, record))
        .collect();
    last.reverse();
    last
}

impl Waiting {
    fn of(recording: &Recording, known: &[&Recording], wait: &Wait, stuck_after: u64) -> Self {
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
        let awaited_of_rank = || peer?.rank.map(|(rank, traffic)| traffic.awaited(awaited.queue, rank));
        Self {
            stuck: recording.liveness == Liveness::Dead || lasted >= stuck_after,
            by: wait.by.name(),
            thread: thread.name.clone(),
            tid: thread.tid,
            queue: awaited.queue.name(),
            qpn: (!is_word).then_some(awaited.qpn),
            sequence: (!is_word).then_some(awaited.number),
            address: is_word.then(|| format!("{:#x}", awaited.number)),
            value: is_word.then_some(awaited.value),
            purpose: words
                .map(|words| words.awaited(awaited.number, awaited.value.into()))
                .or_else(awaited_of_rank),
            peer: peer.and_then(|peer| Other::of(known, peer)),
            for_s: seconds(lasted),
            posted: awaited.posted,
            completed: awaited.completed,
            last_state: last_state(recording, wait),
        }
    }
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

impl Other {
    fn of(known: &[&Recording], peer: &Peer) -> Option<Self> {
        let (gid, qpn) = peer.remote?;
        let is_it = |other: &&Peer| (other.gid, other.qpn) == (gid, qpn);
        let found =
            known.iter().find_map(|recording| Some((*recording, recording.peers.iter().find(is_it)?)));
        Some(Self {
            rank: peer.rank.map(|(rank, _)| rank).or(found.and_then(|(recording, _)| recording.rank)),
            qpn,
            gid: gid.to_string(),
            pid: found.map(|(recording, _)| recording.pid),
            state: found.map(|(recording, _)| state(recording.liveness)),
            sends: found.map(|(recording, other)| progress(recording, other, Queue::Send)),
        })
    }
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
        "peer": Other::of(known, peer),
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
