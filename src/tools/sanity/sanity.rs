//! `sanity`: is everything about CPU mappings of GPU memory right on this machine?

mod arguments;
mod basic;
mod case;
mod cases;
mod data;
mod descriptors;
mod exhaustion;
mod fork;
mod forks;
mod invalidation;
mod leaks;
mod memory;
mod nvml;
mod resources;
mod runner;

use crate::out;
use std::time::Duration;

use clap::Args;
use serde::Serialize;

use super::Program;
use super::tools_shared::{Failure, Result};
use super::tools_shared::{Common, usage};
use super::tools_shared::{Output, say};
use super::tools_shared::{Report, Setup};
use crate::measure::Machine;
use case::{Case, Env, Group};
use cases::CASES;
use runner::{Runner, Status, Verdict};

/// Tests CPU mappings of GPU memory on this machine. Each case runs in a process of its own.
#[derive(Args, Clone, Debug, Serialize)]
#[command(args_override_self = true)]
pub struct Sanity {
    #[command(flatten)]
    #[serde(skip)]
    common: Common,
    /// Says what each case does.
    #[arg(short = 'v', long)]
    #[serde(skip)]
    verbose: bool,
    /// Prints no summary.
    #[arg(short = 's', long)]
    #[serde(skip)]
    no_summary: bool,
    /// Lists the cases.
    #[arg(short = 'l', long)]
    #[serde(skip)]
    list: bool,
    /// Runs this case only; may be repeated.
    #[arg(short = 't', long = "test", value_name = "CASE")]
    tests: Vec<String>,
    /// Runs the extended cases too.
    #[arg(short = 'e', long)]
    extended: bool,
    /// Repetitions in the cases that repeat, among them "stress".
    #[arg(long, value_name = "COUNT", default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..))]
    cycles: u32,
    /// Threads in the cases that have many.
    #[arg(long, value_name = "COUNT", default_value_t = 4, value_parser = clap::value_parser!(u16).range(1..=256))]
    threads: u16,
    /// Seconds after which a case is ended as failed; those that repeat get more.
    #[arg(long, value_name = "SECONDS", default_value_t = 60,
          value_parser = clap::value_parser!(u64).range(1..=86_400))]
    timeout: u64,
    /// Runs a case in this very process. The tool gives this option to the processes that it starts.
    #[arg(long, hide = true, value_name = "CASE")]
    #[serde(skip)]
    child: Option<String>,
}

/// In place of a case: the process tells what mappings are made with.
const DESCRIBE: &str = "describe";

impl Program for Sanity {
    const NAME: &'static str = "gdrcopy_sanity";

    fn run(&self) -> Result<()> {
        if let Some(name) = &self.child {
            return self.run_child(name);
        }
        let mut output = Output::open(self.common.json.as_deref())?;
        if self.list {
            return list(&output);
        }
        let cases = self.selected()?;
        let runner = Runner::new(self.verbose)?;
        let setup = self.describe(&runner)?;
        setup.tell(&output)?;
        output.steps(cases.len());
        let mut results = Vec::new();
        for case in cases {
            output.step(case.name);
            if self.verbose {
                say!(output, "&&&& RUNNING {}", case.name)?;
            }
            let verdict = runner.run(case.name, self.deadline(case))?;
            if self.verbose {
                say!(output, "&&&& {} {}", verdict.status.word(), case.name)?;
            }
            results.push(verdict);
            output.stepped();
        }
        let count = |status| results.iter().filter(|verdict| verdict.status == status).count();
        let failed = count(Status::Failed);
        if !self.no_summary {
            let (total, passed, waived) = (results.len(), count(Status::Passed), count(Status::Waived));
            say!(output, "Total: {total}, Passed: {passed}, Failed: {failed}, Waived: {waived}")?;
            for status in [Status::Failed, Status::Waived] {
                summarize(&output, status, &results)?;
            }
        }
        let report =
            Report { tool: Self::NAME, machine: Machine::here(), setup: &setup, parameters: self, results };
        output.finish(&report)?;
        if failed > 0 { Err(Failure::failed(format_args!("{failed} cases failed"))) } else { Ok(()) }
    }
}

impl Sanity {
    fn selected(&self) -> Result<Vec<&'static Case>> {
        if self.tests.is_empty() {
            let wanted = |case: &&Case| match case.group {
                Group::Standard => true,
                Group::Extended => self.extended,
                Group::Tool => false,
            };
            return Ok(CASES.iter().filter(wanted).collect());
        }
        let find = |name: &String| {
            CASES
                .iter()
                .find(|case| case.name == name)
                .ok_or_else(|| Failure::Usage(format!("-t {name}: there is no such case; -l lists them")))
        };
        self.tests.iter().map(find).collect()
    }

    fn deadline(&self, case: &Case) -> Duration {
        let once = Duration::from_secs(self.timeout);
        // A cycle takes well below a millisecond, unless all threads wait for the driver.
        if case.repeats {
            once + Duration::from_millis(5) * self.cycles * u32::from(self.threads)
        } else {
            once
        }
    }

    fn describe(&self, runner: &Runner) -> Result<Setup> {
        let (status, said) = runner.say(DESCRIBE, Duration::from_secs(self.timeout))?;
        if status != Status::Passed {
            return Err(Failure::Failed(said));
        }
        let setup: Setup = serde_json::from_str(&said)?;
        let gpu = self.common.gpu;
        usage(setup.gpu.is_some() || setup.is_plain() && gpu == 0, || format!("there is no GPU {gpu}"))?;
        Ok(setup)
    }

    /// The whole life of a process that the tool started.
    fn run_child(&self, name: &str) -> Result<()> {
        runner::die_with_parent();
        if name == DESCRIBE {
            let gdr = case::open(&self.common)?;
            let setup = Setup::of(&gdr, &gdr.gpus()?, self.common.gpu);
            out!("{}", serde_json::to_string(&setup)?)?;
            return Ok(());
        }
        let case = CASES.iter().find(|case| case.name == name);
        let case = case.ok_or_else(|| Failure::Usage(format!("--child {name}: there is no such case")))?;
        let env = Env::new(self.common.clone(), case.alloc, self.cycles, self.threads, self.verbose);
        runner::exit_with((case.run)(&env))
    }
}

fn list(output: &Output) -> Result<()> {
    let groups = [
        (Group::Standard, "List of all available tests:"),
        (Group::Extended, "List of all available extended tests (-e):"),
        (Group::Tool, "List of all tests of this tool itself (only by -t):"),
    ];
    for (group, title) in groups {
        say!(output, "{title}")?;
        for case in CASES.iter().filter(|case| case.group == group) {
            say!(output, "    {:<58} {}", case.name, case.what)?;
        }
        say!(output, "")?;
    }
    Ok(())
}

fn summarize(output: &Output, status: Status, results: &[Verdict]) -> Result<()> {
    let mut chosen = results.iter().filter(|verdict| verdict.status == status).peekable();
    if chosen.peek().is_some() {
        say!(output, "")?;
        say!(output, "List of {} tests:", status.word().to_lowercase())?;
    }
    chosen.try_for_each(|verdict| say!(output, "    {}: {}", verdict.name, verdict.reason.trim_end()))
}
