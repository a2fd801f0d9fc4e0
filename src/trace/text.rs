//! Prints a report as text.

use std::io::Result;

use gdasync::out;
use gdasync::results::plain_table;
use serde_json::Value;

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

fn items(list: &Value) -> &[Value] {
    list.as_array().map_or(&[], Vec::as_slice)
}

/// Prints a row for each value, with these fields.
fn table(rows: &[Value], fields: &str) -> Result<()> {
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

pub(super) fn list(report: &Value) -> Result<()> {
    table(items(&report["processes"]), "pid command rank state age_s idle_s waits file")
}

pub(super) fn print(report: &Value) -> Result<()> {
    for (at, process) in items(&report["processes"]).iter().enumerate() {
        if at > 0 {
            out!("")?;
        }
        head(process)?;
        items(&process["waits"]).iter().try_for_each(waiting)?;
        // Unused ones are in the JSON only.
        let used = |pair: &&Value| pair["gone"] == false || !pair["idle_s"].is_null();
        let pairs: Vec<_> = items(&process["queue_pairs"]).iter().filter(used).cloned().collect();
        if !pairs.is_empty() {
            out!("\nqueue pairs: the last request at each stage that the recording still has")?;
            table(&pairs, QUEUE_PAIR)?;
        }
        let last = items(&process["last_records"]);
        if !last.is_empty() {
            out!("\nthe last {} records", last.len())?;
            table(last, "at_us thread by stage queue qpn number len stream status")?;
        }
    }
    if report["stuck"] == 0 {
        out!("\nnothing is stuck")?;
    }
    Ok(())
}

const QUEUE_PAIR: &str = "device qpn gone peer/rank peer/qpn sends/prepared sends/triggered sends/fetched sends/completed \
                          sends/released receives/prepared receives/completed receives/released idle_s failure";

fn head(process: &Value) -> Result<()> {
    let [pid, command, state, age, idle] =
        ["pid", "command", "state", "age_s", "idle_s"].map(|field| cell(process, field));
    let rank = process["rank"].as_u64().map_or_else(String::new, |rank| format!(", rank {rank}"));
    out!("process {pid} {command}{rank}, {state}; begun {age} s ago, last event {idle} s ago")?;
    let [records, threads, torn, lost] =
        ["records", "threads", "torn", "lost"].map(|field| cell(process, field));
    let torn = if torn == "0" { String::new() } else { format!(", {torn} being written") };
    let lost = if lost == "0" { String::new() } else { format!(", {lost} lost: more than 256 threads") };
    out!("  {records} records of {threads} threads{torn}{lost}")
}

fn waiting(wait: &Value) -> Result<()> {
    let field = |name| cell(wait, name);
    let stuck = if wait["stuck"] == true { "STUCK" } else { "waits" };
    let is_word = wait["qpn"].is_null();
    let request = match is_word {
        true => {
            format!("the word at {} (value {:#x})", field("address"), wait["value"].as_u64().unwrap_or(0))
        }
        false => format!("{} {} of QP {}", field("queue"), field("sequence"), field("qpn")),
    };
    let what = match wait["purpose"].as_str() {
        Some(purpose) if is_word => purpose.to_owned(),
        Some(purpose) => format!("{purpose} ({request})"),
        None => request,
    };
    let peer = &wait["peer"];
    let named = if peer.is_null() { String::new() } else { format!(", peer {}", name(peer)) };
    let [by, thread, tid, lasted] = ["by", "thread", "tid", "for_s"].map(field);
    out!("\n{stuck} for {lasted} s: {by} (thread {thread}, {tid}) waits for {what}{named}")?;
    out!("  last state: {}", field("last_state"))?;
    if is_word {
        return Ok(());
    }
    let [posted, completed] = ["posted", "completed"].map(field);
    out!("  when it began, {posted} were posted to that queue and {completed} completed")?;
    if peer["sends"].is_null() {
        return Ok(());
    }
    let [pid, prepared, fetched, completed] =
        ["pid", "sends/prepared", "sends/fetched", "sends/completed"].map(|field| cell(peer, field));
    out!(
        "  last sends of the peer (process {pid}): prepared {prepared}, fetched {fetched}, completed {completed}"
    )
}

fn name(peer: &Value) -> String {
    let [qpn, gid, pid, state] = ["qpn", "gid", "pid", "state"].map(|field| cell(peer, field));
    let process = if pid == "-" { format!("at {gid}") } else { format!("process {pid}, {state}") };
    let rank = peer["rank"].as_u64().map_or_else(String::new, |rank| format!("rank {rank}, "));
    format!("{rank}QP {qpn} {process}")
}
