//! `torchrun`, whose own store listens at `MASTER_PORT`.

use std::path::Path;
use std::process::{Command, exit};

use mp::Communicator;
use mp::launch::{Launch, Root};

use super::{all_are_done, output, port, programs, rank, under};
use crate::common::{LONG, is_part_of, myself};

const RANKS: usize = 3;

/// Underscores are what every version understands.
fn torchrun(launcher: &Path, options: &[&str], ranks: usize, what: &Command) -> Command {
    let ranks = ranks.to_string();
    under(launcher, &[options, &["--no_python", "--nproc_per_node", &ranks]].concat(), what)
}

/// Starts ranks in each of the ways, by each torchrun that can start anything.
fn launched(test: &str, ways: &[&[&str]]) {
    let launchers = programs(&["torchrun"]);
    if launchers.is_empty() {
        println!("skipped: no torchrun in PATH");
    }
    for launcher in launchers {
        let probe = torchrun(&launcher, &["--standalone"], 1, &Command::new("true")).output().unwrap();
        if !probe.status.success() {
            let text = String::from_utf8_lossy(&probe.stderr);
            let last = text.lines().last().unwrap_or_default();
            println!("skipped: {} starts nothing: {last}", launcher.display());
            continue;
        }
        for way in ways {
            all_are_done(RANKS, &output(torchrun(&launcher, way, RANKS, &myself(test))));
            println!("{} {way:?} has started {RANKS} ranks", launcher.display());
        }
    }
}

#[test]
fn stores() {
    const NAME: &str = "torchrun::stores";
    if is_part_of(NAME) {
        return rank(|root| matches!(root, Root::At(_)));
    }
    let port = port(2);
    launched(NAME, &[&["--standalone"], &["--master_port", &port]]);
}

/// A rank fails, and all are started anew at the same store.
#[test]
fn restarts() {
    const NAME: &str = "torchrun::restarts";
    if is_part_of(NAME) {
        let launch = Launch::detect().unwrap().expect("started by a launcher");
        if std::env::var("TORCHELASTIC_RESTART_COUNT").is_ok_and(|count| count == "0") {
            let comm = Communicator::builder().timeout(LONG).init().unwrap();
            comm.barrier(LONG).unwrap();
            if launch.rank == RANKS - 1 {
                exit(3);
            }
            // Until torchrun ends it.
            let error = comm.barrier(LONG).unwrap_err();
            println!("rank {} is told: {error}", launch.rank);
            exit(4);
        }
        return rank(|root| matches!(root, Root::At(_)));
    }
    launched(NAME, &[&["--standalone", "--max_restarts", "1"]]);
}
