//! The kinds of results, told apart by what is in them: old ones do not say what wrote them.

use gdasync::measure::series::Unit;
use gdasync::measure::size;

use super::node::Node;
use super::{At, Axis, Group, Results, Shape, timeline};

type Result<T> = std::result::Result<T, Shape>;
type Read = fn(&Node<'_>, &mut Results) -> Result<()>;

/// What a list of measurements is called, a key that all its elements have in this kind only, and the reader.
const KINDS: [(&str, &str, &str, Read); 8] = [
    ("lines", "mode", "bench mp", messages),
    ("results", "half_rtt_us", "pingpong", ping_pong),
    ("results", "memory", "bench register", register),
    ("results", "baseline", "bench hca", tests),
    ("rows", "way", "bench copy", copies),
    ("rows", "variant", "bench trigger", triggers),
    ("rows", "library_us", "bench stream", calls),
    ("series", "points", "bench", curves),
];

pub(super) fn read(root: &Node<'_>) -> Result<Results> {
    let facts = facts(root);
    if root.find("messages").is_some() {
        return timeline::read(root, facts);
    }
    let lists: Vec<_> = KINDS.iter().filter(|(list, ..)| root.find(list).is_some()).collect();
    let Some((list, ..)) = lists.first() else {
        return Err(Shape::Lacks("results`, `rows`, `lines`, `series` or `messages".into()));
    };
    let Some(first) = root.list(list)?.into_iter().next() else {
        return Err(Shape::Empty("its list of measurements is empty"));
    };
    let Some((_, _, kind, read)) = lists.iter().find(|(_, key, ..)| first.find(key).is_some()) else {
        let keys: Vec<_> = lists.iter().map(|(_, key, ..)| *key).collect();
        return Err(Shape::Lacks(format!("{list}[0].{}", keys.join("` or `"))));
    };
    let kind = match root.find("benchmark") {
        Some(name) => format!("bench {}", name.words()),
        None => (*kind).to_owned(),
    };
    let (groups, messages, missing) = Default::default();
    let mut results = Results { stem: String::new(), kind, facts, groups, messages, missing };
    read(root, &mut results)?;
    Ok(results)
}

/// Everything but the measurements.
fn facts(root: &Node<'_>) -> Vec<(String, String)> {
    let mut facts = Vec::new();
    let mut add = |name: &str, value: String| {
        if !value.is_empty() && value != "null" {
            facts.push((name.to_owned(), value));
        }
    };
    if let Some(machine) = root.find("machine") {
        let word = |key| machine.find(key).map(|value| value.words()).unwrap_or_default();
        add("command", word("command"));
        add("machine", format!("{} x {}", word("cpus"), word("cpu")));
        add("kernel", word("kernel"));
        add("commit", word("commit"));
        add("version", word("version"));
        add("compiler", word("rustc"));
    }
    for (key, value) in root.fields() {
        match key.as_str() {
            "machine" | "lines" | "calls" | "results" | "rows" | "series" | "messages" | "calibration"
            | "plan" | "skipped" | "benchmark" | "unit" => {}
            "gpu" => add("GPU", value.words()),
            "settings" | "options" => {
                for (key, value) in value.fields() {
                    let value = if key == "gpus" {
                        value.words().replace(['[', ']', '"'], "")
                    } else {
                        value.words()
                    };
                    add(if key == "gpus" { "GPU" } else { &key }, value);
                }
            }
            _ => add(&key, value.words()),
        }
    }
    facts
}

fn bytes(row: &Node<'_>) -> Result<At> {
    row.count("bytes").map(At::Number)
}

fn ping_pong(root: &Node<'_>, results: &mut Results) -> Result<()> {
    let mut groups = [
        "half round trip",
        "whole iteration",
        "CPU time of the thread, each message",
        "CPU time of the process, each message",
    ]
    .map(|name| Group::new(name, Axis::Bytes, Unit::Micros));
    for row in root.list("results")? {
        let (mode, at) = (row.text("mode")?, bytes(&row)?);
        groups[0].add(mode, at.clone(), row.micros("half_rtt_us")?)?;
        for (group, key) in
            groups[1..].iter_mut().zip(["iteration_us", "cpu_us_per_msg", "process_cpu_us_per_msg"])
        {
            if let Some(us) = row.number_if_any(key)? {
                group.add(mode, at.clone(), us)?;
            }
        }
    }
    results.groups.extend(groups);
    Ok(())
}

fn messages(root: &Node<'_>, results: &mut Results) -> Result<()> {
    let mut latency = Group::new("half round trip", Axis::Bytes, Unit::Micros);
    let mut rate = Group::new("one message of many", Axis::Bytes, Unit::Micros);
    for line in root.list("lines")? {
        let mode = line.text("mode")?;
        let group = if mode == "rate" { &mut rate } else { &mut latency };
        group.add(mode, bytes(&line)?, line.micros("us")?)?;
    }
    let mut calls = Group::new("calls with 8 bytes", Axis::Names, Unit::Micros);
    for call in root.list("calls")? {
        let at = || call.text("name").map(|name| At::Name(name.to_owned()));
        calls.add("mp", at()?, call.micros("mp_us")?)?;
        calls.add("gdsync alone", at()?, call.micros("gdsync_us")?)?;
    }
    results.groups.extend([latency, rate, calls]);
    Ok(())
}

/// `bench hca` and `bench proxy`: a list of tests with names.
fn tests(root: &Node<'_>, results: &mut Results) -> Result<()> {
    let rows = root.list("results")?;
    let is_proxy =
        rows.iter().any(|row| row.text("name").is_ok_and(|name| name.starts_with("ibv_post_send")));
    let name = if is_proxy { "RDMA WRITE of 8 bytes, to itself" } else { "8 bytes, half round trip" };
    if is_proxy {
        results.kind = "bench proxy".into();
    }
    let mut group = Group::new(name, Axis::Names, Unit::Micros);
    let series = root.text("device")?;
    for row in rows {
        group.add(series, At::Name(row.text("name")?.to_owned()), row.micros("us")?)?;
    }
    results.groups.push(group);
    Ok(())
}

fn register(root: &Node<'_>, results: &mut Results) -> Result<()> {
    let range = usize::try_from(root.count("bytes")?).map(size).unwrap_or_default();
    let mut group = Group::new(format!("calls with ranges of {range} bytes"), Axis::Names, Unit::Micros);
    for row in root.list("results")? {
        let series = format!("{} memory", row.text("memory")?);
        group.add(&series, At::Name(row.text("call")?.to_owned()), row.micros("us")?)?;
    }
    results.groups.push(group);
    Ok(())
}

/// The group of this name, which need not be there yet.
fn group<'a>(groups: &'a mut Vec<Group>, name: &str, axis: &Axis, unit: Unit) -> &'a mut Group {
    let index = groups.iter().position(|group| group.name == name).unwrap_or_else(|| {
        groups.push(Group::new(name, axis.clone(), unit));
        groups.len() - 1
    });
    &mut groups[index]
}

fn copies(root: &Node<'_>, results: &mut Results) -> Result<()> {
    for row in root.list("rows")? {
        let group = group(&mut results.groups, row.text("group")?, &Axis::Bytes, Unit::Micros);
        group.add(row.text("way")?, bytes(&row)?, row.micros("us")?)?;
    }
    Ok(())
}

fn triggers(root: &Node<'_>, results: &mut Results) -> Result<()> {
    let rows = root.list("rows")?;
    // What the benchmark is about comes first, whatever it measured first.
    for name in ["trigger", "wake", "enqueue"] {
        group(&mut results.groups, name, &Axis::Names, Unit::Micros);
    }
    for row in rows {
        let (name, variant) = (row.text("group")?, row.text("variant")?);
        let series = match row.count("busy")? {
            0 => "idle GPU".to_owned(),
            busy => format!("{busy} busy streams"),
        };
        match row.find("failed") {
            Some(reason) => results.missing.push(format!("{name}: {variant}, {series}: {}", reason.words())),
            None => group(&mut results.groups, name, &Axis::Names, Unit::Micros).add(
                &series,
                At::Name(variant.to_owned()),
                row.micros_here()?,
            )?,
        }
    }
    if let Some(reason) = root.find("incomplete") {
        results.missing.push(format!("the run ended early: {}", reason.words()));
    }
    Ok(())
}

fn calls(root: &Node<'_>, results: &mut Results) -> Result<()> {
    for row in root.list("rows")? {
        let name = format!("CPU time of a call, queues in {} memory", row.text("queues")?);
        let (via, at) = (row.text("via")?, At::Name(row.text("call")?.to_owned()));
        let group = group(&mut results.groups, &name, &Axis::Names, Unit::Micros);
        group.add(&format!("{via}: library"), at.clone(), row.micros("library_us")?)?;
        group.add(&format!("{via}: driver alone"), at, row.micros("driver_us")?)?;
    }
    Ok(())
}

/// What a unit measures.
fn quantity(unit: Unit) -> &'static str {
    match unit {
        Unit::Micros => "time",
        Unit::GigabytesPerSecond => "bandwidth",
        Unit::PerSecond => "rate",
        Unit::Ratio => "ratio",
    }
}

/// The common shape, `measure::series`.
fn curves(root: &Node<'_>, results: &mut Results) -> Result<()> {
    for series in root.list("series")? {
        let (name, x, unit) = (series.text("name")?, series.text("x")?, series.text("unit")?);
        let known = [Unit::Micros, Unit::GigabytesPerSecond, Unit::PerSecond, Unit::Ratio];
        let Some(unit) = known.into_iter().find(|known| known.to_string() == unit) else {
            return Err(Shape::Expected {
                path: format!("series `{name}`.unit"),
                what: "us, GB/s, 1/s or ratio",
            });
        };
        let axis = if x == "bytes" { Axis::Bytes } else { Axis::Count(x.to_owned()) };
        let group = group(&mut results.groups, &format!("{} by {x}", quantity(unit)), &axis, unit);
        for point in series.list("points")? {
            group.add(name, At::Number(point.count("x")?), point.micros_here()?)?;
        }
    }
    if root.find("skipped").is_some() {
        for skipped in root.list("skipped")? {
            results.missing.push(format!("{}: {}", skipped.text("name")?, skipped.text("reason")?));
        }
    }
    Ok(())
}
