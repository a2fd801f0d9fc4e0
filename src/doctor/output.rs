//! The report for people.

use std::io::{self, IsTerminal, Write};
use std::process::ExitCode;

use super::Report;
use super::areas::AREAS;
use super::areas::topology::Pair;
use super::probe::{Probe, Status, area_of};

/// Names of the widest probe fit.
const NAME: usize = 24;

/// Lists the probes.
pub(super) fn list() -> Result<ExitCode, String> {
    let mut out = io::stdout().lock();
    for area in AREAS {
        for check in area.checks {
            if writeln!(out, "{:NAME$}  {}", check.name, check.tried).is_err() {
                return Ok(ExitCode::SUCCESS);
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// The report, by area: a line for each probe, and below it what to do.
pub(super) fn text(out: &mut impl Write, report: &Report, verbose: bool) -> io::Result<()> {
    let color = io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none();
    let machine = &report.machine;
    writeln!(out, "gdasync doctor {}: {}, Linux {}", machine.version, machine.cpu, machine.kernel)?;
    for area in AREAS {
        let probes: Vec<_> = report.probes.iter().filter(|probe| area_of(probe.name) == area.name).collect();
        if probes.is_empty() {
            continue;
        }
        writeln!(out, "\n{}", area.title)?;
        let order = |line: &Line| area.checks.iter().position(|check| check.name == line.names[0]);
        let mut lines = alike(&probes);
        lines.sort_by_key(order);
        if !verbose {
            lines = merged(lines);
        }
        for line in &lines {
            write_line(out, line, color, verbose)?;
        }
        if area.name == "topology" {
            matrix(out, &report.topology)?;
        }
    }
    let count = |status| report.probes.iter().filter(|probe| probe.status == status).count();
    let (fail, warn, skip, ok) =
        (count(Status::Fail), count(Status::Warn), count(Status::Skip), count(Status::Ok));
    writeln!(out, "\n{ok} ok, {warn} warn, {fail} fail, {skip} skip")?;
    out.flush()
}

/// A line: what a probe says, of some devices; or what some say that were skipped.
#[derive(Debug)]
struct Line<'a> {
    names: Vec<&'a str>,
    subjects: Vec<&'a str>,
    probe: &'a Probe,
}

/// Probes that say the same of several devices are one line.
fn alike<'a>(probes: &[&'a Probe]) -> Vec<Line<'a>> {
    let words = |probe: &Probe| Probe { subject: None, ..probe.clone() };
    let mut lines: Vec<Line<'_>> = Vec::new();
    for probe in probes {
        let subject = probe.subject.as_deref();
        match lines.iter_mut().find(|line| words(line.probe) == words(probe)) {
            Some(line) => line.subjects.extend(subject),
            None => {
                lines.push(Line { names: vec![probe.name], subjects: subject.into_iter().collect(), probe })
            }
        }
    }
    lines
}

/// Probes that were skipped for one reason are one line.
fn merged(lines: Vec<Line<'_>>) -> Vec<Line<'_>> {
    let mut rows: Vec<Line<'_>> = Vec::new();
    for line in lines {
        let is_plain = |probe: &Probe| probe.status == Status::Skip && probe.fix.is_none();
        let same = |row: &&mut Line<'_>| is_plain(row.probe) && row.probe.found == line.probe.found;
        match rows.iter_mut().find(same).filter(|_| is_plain(line.probe)) {
            Some(row) => row.names.extend(line.names),
            None => rows.push(line),
        }
    }
    rows
}

fn write_line(out: &mut impl Write, line: &Line<'_>, color: bool, verbose: bool) -> io::Result<()> {
    let probe = line.probe;
    let (on, off) = match probe.status {
        _ if !color => ("", ""),
        Status::Ok => ("\x1b[32m", "\x1b[0m"),
        Status::Skip => ("\x1b[2m", "\x1b[0m"),
        Status::Warn => ("\x1b[33m", "\x1b[0m"),
        Status::Fail => ("\x1b[1;31m", "\x1b[0m"),
    };
    let name = match line.names[..] {
        [name] => name.to_owned(),
        _ => format!("{}.* ({})", area_of(probe.name), line.names.len()),
    };
    let of = match line.subjects[..] {
        [] => String::new(),
        _ => format!("{}: ", line.subjects.join(", ")),
    };
    writeln!(out, "  {on}{:4}{off}  {name:NAME$}  {of}{}", probe.status, probe.found)?;
    let is_wrong = probe.status >= Status::Warn;
    let mut note = |what: &str, text: &str| writeln!(out, "        {what}: {text}");
    if verbose {
        note("tried", probe.tried)?;
    }
    if verbose || is_wrong {
        note("why", probe.why)?;
    }
    match &probe.fix {
        Some(fix) => note(if is_wrong { "fix" } else { "advice" }, fix),
        None => Ok(()),
    }
}

/// The paths between all devices, as `nvidia-smi topo -m` shows them.
fn matrix(out: &mut impl Write, pairs: &[Pair]) -> io::Result<()> {
    let mut names: Vec<&str> = Vec::new();
    for name in pairs.iter().flat_map(|pair| [pair.from.as_str(), pair.to.as_str()]) {
        if !names.contains(&name) {
            names.push(name);
        }
    }
    // The address of a GPU stands in its probes.
    let short = |name: &str| name.split(" (").next().unwrap_or(name).to_owned();
    let width = names.iter().map(|name| short(name).len()).max().unwrap_or(0).max(4);
    if names.is_empty() {
        return Ok(());
    }
    write!(out, "  {:width$}", "")?;
    for name in &names {
        write!(out, "  {:>width$}", short(name))?;
    }
    writeln!(out)?;
    for from in &names {
        write!(out, "  {:width$}", short(from))?;
        for to in &names {
            let is_it = |pair: &&Pair| {
                (pair.from == *from && pair.to == *to) || (pair.from == *to && pair.to == *from)
            };
            let path = pairs.iter().find(is_it).map_or("X", |pair| pair.path);
            write!(out, "  {path:>width$}")?;
        }
        writeln!(out)?;
    }
    writeln!(
        out,
        "  NV NVLink, PIX one switch, PXB several, PHB host bridge, NODE two host bridges of a NUMA node, SYS across sockets"
    )
}
