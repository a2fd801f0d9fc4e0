//! Prints a report as text.

use std::io::Result;

use gdasync::out;
use gdasync::results::plain_table;
use serde::Serialize;
use serde_json::{Value, to_value};

use super::report::{Other, Process, Report, Waiting};

/// A field of the JSON; `/` leads to one within another.
fn cell(row: &Value, field: &str) -> String {
    match row.pointer(&format!("/{field}")) {
        None | Some(Value::Null) => "-".into(),
        Some(Value::String(text)) => text.clone(),
        Some(Value::Array(all)) => all.len().to_string(),
        Some(Value::Number(number)) if number.is_f64() => format!("{:.3}", number.as_f64().unwrap_or(0.0)),
        Some(Value::Number(number))
            if field.ends_with("qpn") || (field == "number" && row["queue"] == "word") =>
        {
            format!("{:#x}", number.as_u64().unwrap_or(0))
        }
        Some(other) => other.to_string(),
    }
}

/// Prints a row for each value, with these fields.
fn table(rows: &impl Serialize, fields: &str) -> Result<()> {
    let rows = to_value(rows)?;
    let rows = rows.as_array().map_or(&[][..], Vec::as_slice);
    let is_number =
        |field: &str| rows.iter().any(|row| row.pointer(&format!("/{field}")).is_some_and(Value::is_number));
    let right = fields.split(' ').enumerate().filter(|(_, field)| is_number(field)).map(|(at, _)| at);
    let mut table = plain_table(fields.split(' ').map(|field| field.replace('/', " ")), right);
    for row in rows {
        table.add_row(fields.split(' ').map(|field| cell(row, field)));
    }
    // Without the blanks at the ends of lines.
    table.lines().try_for_each(|line| out!("  {}", line.trim_end()))
}

pub(super) fn list(report: &Report) -> Result<()> {
    table(&report.processes, "pid command rank state age_s idle_s waits file")
}

pub(super) fn print(report: &Report) -> Result<()> {
    for (at, process) in report.processes.iter().enumerate() {
        if at > 0 {
            out!("")?;
        }
        head(process)?;
        process.waits.iter().try_for_each(waiting)?;
        // Unused ones are in the JSON only.
        let used = |pair: &&Value| pair["gone"] == false || !pair["idle_s"].is_null();
        let pairs: Vec<_> = process.queue_pairs.iter().filter(used).collect();
        if !pairs.is_empty() {
            out!("\nqueue pairs: the last request at each stage that the recording still has")?;
            table(&pairs, QUEUE_PAIR)?;
        }
        if !process.last_records.is_empty() {
            out!("\nthe last {} records", process.last_records.len())?;
            table(&process.last_records, "at_us thread by stage queue qpn number len stream status")?;
        }
    }
    if report.stuck == 0 {
        out!("\nnothing is stuck")?;
    }
    Ok(())
}

const QUEUE_PAIR: &str = "device qpn gone peer/rank peer/qpn sends/prepared sends/triggered sends/fetched sends/completed \
                          sends/released receives/prepared receives/completed receives/released idle_s failure";

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
    let Some((other, sends)) = wait.peer.as_ref().and_then(|other| Some((other, other.sends.as_ref()?)))
    else {
        return Ok(());
    };
    let [prepared, fetched, completed] = ["prepared", "fetched", "completed"].map(|stage| cell(sends, stage));
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
