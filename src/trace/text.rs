//! Prints a report as text.

use std::io::Result;

use comfy_table::Table;
use gdasync::out;
use gdasync::results::plain_table;

use super::report::{Line, Other, Process, Progress, QueuePair, Report, Waiting};

/// Without the blanks at the ends of lines.
fn put(table: &Table) -> Result<()> {
    table.lines().try_for_each(|line| out!("  {}", line.trim_end()))
}

/// A dash where there is none.
fn number<T: ToString>(number: Option<T>) -> String {
    number.map_or_else(|| "-".into(), |number| number.to_string())
}

pub(super) fn list(report: &Report) -> Result<()> {
    let mut table = plain_table(
        ["PID", "program", "rank", "state", "begun s ago", "idle s", "waits", "file"],
        [0, 2, 4, 5, 6],
    );
    for process in &report.processes {
        table.add_row([
            process.pid.to_string(),
            process.command.clone(),
            number(process.rank),
            process.state.into(),
            format!("{:.1}", process.age_s),
            format!("{:.3}", process.idle_s),
            process.waits.len().to_string(),
            process.file.clone(),
        ]);
    }
    put(&table)
}

pub(super) fn print(report: &Report) -> Result<()> {
    for (at, process) in report.processes.iter().enumerate() {
        if at > 0 {
            out!("")?;
        }
        head(process)?;
        process.waits.iter().try_for_each(waiting)?;
        queue_pairs(&process.queue_pairs)?;
        records(&process.last_records)?;
    }
    if report.stuck == 0 {
        out!("\nnothing is stuck")?;
    }
    Ok(())
}

fn head(process: &Process) -> Result<()> {
    let Process { pid, command, state, age_s, idle_s, records, threads, torn, lost, .. } = process;
    let rank = process.rank.map_or_else(String::new, |rank| format!(", rank {rank}"));
    out!("process {pid} {command}{rank}, {state}; begun {age_s:.1} s ago, last event {idle_s:.3} s ago")?;
    let torn = if *torn > 0 { format!(", {torn} being written") } else { String::new() };
    let lost = if *lost > 0 { format!(", {lost} lost: more than 256 threads") } else { String::new() };
    out!("  {records} records of {threads} threads{torn}{lost}")
}

fn waiting(wait: &Waiting) -> Result<()> {
    let stuck = if wait.stuck { "STUCK" } else { "waits" };
    let what = match (wait.qpn, wait.sequence, &wait.address) {
        (Some(qpn), Some(sequence), _) => {
            let request = format!("{} {sequence} of QP {qpn:#x}", wait.queue);
            wait.purpose.as_ref().map_or_else(|| request.clone(), |purpose| format!("{purpose} ({request})"))
        }
        (_, _, address) => wait.purpose.clone().unwrap_or_else(|| {
            let (address, value) = (address.as_deref().unwrap_or_default(), wait.value.unwrap_or_default());
            format!("the word at {address} (value {value:#x})")
        }),
    };
    let peer = wait.peer.as_ref().map_or_else(String::new, |other| format!(", peer {}", name(other)));
    let Waiting { by, thread, tid, for_s, last_state, posted, completed, .. } = wait;
    out!("\n{stuck} for {for_s:.3} s: {by} (thread {thread}, {tid}) waits for {what}{peer}")?;
    out!("  last state: {last_state}")?;
    if wait.qpn.is_none() {
        return Ok(());
    }
    out!("  when it began, {posted} were posted to that queue and {completed} completed")?;
    let Some((other, sends)) = wait.peer.as_ref().and_then(|other| Some((other, other.sends?))) else {
        return Ok(());
    };
    let Progress { prepared, fetched, completed, .. } = sends;
    let [prepared, fetched, completed] = [prepared, fetched, completed].map(number);
    let pid = other.pid.map_or_else(String::new, |pid| format!(" (process {pid})"));
    out!("  last sends of the peer{pid}: prepared {prepared}, fetched {fetched}, completed {completed}")
}

fn name(other: &Other) -> String {
    let Other { qpn, gid, .. } = other;
    let process = match (other.pid, other.state) {
        (Some(pid), Some(state)) => format!("process {pid}, {state}"),
        _ => format!("at {gid}"),
    };
    let rank = other.rank.map_or_else(String::new, |rank| format!("rank {rank}, "));
    format!("{rank}QP {qpn:#x} {process}")
}

fn queue_pairs(pairs: &[QueuePair]) -> Result<()> {
    if pairs.is_empty() {
        return Ok(());
    }
    out!("\nqueue pairs: the last request at each stage that the recording still has")?;
    let header = [
        "device",
        "QP",
        "peer",
        "sends: prepared",
        "triggered",
        "fetched",
        "completed",
        "released",
        "receives: prepared",
        "completed",
        "released",
        "idle s",
        "failure",
    ];
    let mut table = plain_table(header, [0, 3, 4, 5, 6, 7, 8, 9, 10, 11]);
    // Unused ones are in the JSON only.
    for pair in pairs.iter().filter(|pair| !pair.gone || pair.idle_s.is_some()) {
        let Progress { prepared, triggered, fetched, completed, released } = pair.sends;
        let receives = [pair.receives.prepared, pair.receives.completed, pair.receives.released];
        let numbers =
            [prepared, triggered, fetched, completed, released].into_iter().chain(receives).map(number);
        let gone = if pair.gone { " (gone)" } else { "" };
        let peer = pair.peer.as_ref().map_or_else(|| "-".into(), name);
        let idle = pair.idle_s.map_or_else(|| "-".into(), |idle| format!("{idle:.3}"));
        let first = [pair.device.to_string(), format!("{:#x}{gone}", pair.qpn), peer];
        let last = [idle, pair.failure.clone().unwrap_or_default()];
        table.add_row(first.into_iter().chain(numbers).chain(last));
    }
    put(&table)
}

fn records(lines: &[Line]) -> Result<()> {
    if lines.is_empty() {
        return Ok(());
    }
    out!("\nthe last {} records", lines.len())?;
    let mut table = plain_table(
        ["us", "thread", "by", "stage", "queue", "QP", "number", "bytes", "stream", "status"],
        [0, 6, 7, 8],
    );
    for line in lines {
        let is_word = line.queue == "word" && line.stage.starts_with("wait");
        table.add_row([
            format!("{:.3}", line.at_us),
            line.thread.clone(),
            line.by.into(),
            line.stage.into(),
            line.queue.into(),
            line.qpn.map_or_else(String::new, |qpn| format!("{qpn:#x}")),
            if is_word { format!("{:#x}", line.number) } else { line.number.to_string() },
            line.len.to_string(),
            line.stream.map_or_else(String::new, |stream| stream.to_string()),
            line.status.clone().unwrap_or_default(),
        ]);
    }
    put(&table)
}
