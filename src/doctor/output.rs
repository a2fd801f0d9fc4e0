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
        let lines = alike(&probes);
        let skipped = |line: &(Vec<&str>, &Probe)| line.1.status == Status::Skip && line.1.fix.is_none();
        let reasons: Vec<_> =
            lines.iter().filter(|line| skipped(line)).map(|line| line.1.found.as_str()).collect();
        for (at, (subjects, probe)) in lines.iter().enumerate() {
            let same = |line: &&(Vec<&str>, &Probe)| skipped(line) && line.1.found == probe.found;
            if verbose
                || !skipped(&lines[at])
                || reasons.iter().filter(|why| **why == probe.found).count() == 1
            {
                line(out, subjects, probe, color, verbose)?;
            } else if !lines[..at].iter().any(|line| same(&line)) {
                let names: Vec<_> = lines.iter().filter(same).map(|line| line.1.name).collect();
                merged(out, &names, probe, color)?;
            }
        }
        if area.name == "topology" {
            matrix(out, &report.topology)?;
        }
    }
    let count = |status| report.probes.iter().filter(|probe| probe.status == status).count();
    let (fail, warn, skip, ok) =
        (count(Status::Fail), count(Status::Warn), count(Status::Skip), count(Status::Ok));
    writeln!(out, "\n{ok} ok, {warn} warnings, {fail} failed, {skip} skipped")?;
    out.flush()
}

/// Probes that say the same of several devices are one line.
fn alike<'a>(probes: &[&'a Probe]) -> Vec<(Vec<&'a str>, &'a Probe)> {
    let mut lines: Vec<(Vec<&str>, &Probe)> = Vec::new();
    for probe in probes {
        let same = |line: &&mut (Vec<&str>, &Probe)| {
            Probe { subject: None, ..line.1.clone() } == Probe { subject: None, ..(*probe).clone() }
        };
        match lines.iter_mut().find(same) {
            Some((subjects, _)) => subjects.extend(probe.subject.as_deref()),
            None => lines.push((probe.subject.as_deref().into_iter().collect(), probe)),
        }
    }
    lines
}

fn line(
    out: &mut impl Write,
    subjects: &[&str],
    probe: &Probe,
    color: bool,
    verbose: bool,
) -> io::Result<()> {
    let paint = match probe.status {
        _ if !color => ("", ""),
        Status::Ok => ("\x1b[32m", "\x1b[0m"),
        Status::Skip => ("\x1b[2m", "\x1b[0m"),
        Status::Warn => ("\x1b[33m", "\x1b[0m"),
        Status::Fail => ("\x1b[1;31m", "\x1b[0m"),
    };
    let of = if subjects.is_empty() { String::new() } else { format!("{}: ", subjects.join(", ")) };
    writeln!(out, "  {}{:4}{}  {:NAME$}  {of}{}", paint.0, probe.status, paint.1, probe.name, probe.found)?;
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

/// Probes that were skipped for one reason.
fn merged(out: &mut impl Write, names: &[&str], probe: &Probe, color: bool) -> io::Result<()> {
    let (on, off) = if color { ("\x1b[2m", "\x1b[0m") } else { ("", "") };
    let name = format!("{}.* ({})", area_of(probe.name), names.len());
    writeln!(out, "  {on}{:4}{off}  {name:NAME$}  {}", probe.status, probe.found)
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
        "  PIX one switch, PXB several, PHB host bridge, NODE two host bridges of a NUMA node, SYS across sockets"
    )
}
