//! `srun`, under a Slurm that `tests/launchers/slurm` starts for each test.

use std::path::Path;
use std::process::{ExitStatus, Stdio};
use std::sync::{Mutex, PoisonError};

use mp::Communicator;
use mp::collective::Collectives;
use mp::launch::{Launcher, Root};

use super::{all_are_done, outcome, rank, under};
use crate::common::{LONG, buffer, is_part_of, message, myself};

/// How the script says that there is no Slurm to be had.
const SKIPPED: i32 = 77;

/// Runs a shell's command in which `"$@"` is the part of the ranks of `test`. `None` where it cannot.
fn slurm(test: &str, shell: &str) -> Option<(ExitStatus, String)> {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/launchers/slurm");
    if !script.is_file() {
        println!("skipped: no {}", script.display());
        return None;
    }
    // The job ids of each Slurm begin with 1, and the ports of the ranks come from them.
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let _turn = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let mut command = under(&script, &["sh", "-c", shell, "sh"], &myself(test));
    command.stdin(Stdio::null());
    let (status, text) = outcome(command);
    if status.code() == Some(SKIPPED) {
        println!("{text}");
        return None;
    }
    Some((status, text))
}

/// The output of a command that must end well.
fn output(test: &str, shell: &str) -> Option<String> {
    let (status, text) = slurm(test, shell)?;
    assert!(status.success(), "{status}\n{text}");
    Some(text)
}

fn is_there(root: &Root) -> bool {
    matches!(root, Root::At(_))
}

/// With each of the PMI plug-ins, on one node and two, more ranks than CPUs, and as a job of two programs.
#[test]
fn srun() {
    const NAME: &str = "slurm::srun";
    if is_part_of(NAME) {
        return rank(is_there);
    }
    let shell = r#"set -e
        srun -n 1 "$@"
        srun -n 2 --mpi=none "$@"
        srun -n 3 --mpi=pmi2 "$@"
        ! srun --mpi=list 2>&1 | grep -qw pmix || srun -n 4 --mpi=pmix "$@"
        srun -N 2 -n 5 --distribution=cyclic "$@"
        srun -N 1 -n 9 --overcommit "$@"
        srun -n 2 "$@" : -n 4 "$@""#;
    let Some(text) = output(NAME, shell) else { return };
    for ranks in [1, 2, 3, 5, 6, 9] {
        all_are_done(ranks, &text);
    }
}

/// They have ports of their own.
#[test]
fn two_steps_at_once() {
    const NAME: &str = "slurm::two_steps_at_once";
    if is_part_of(NAME) {
        return rank(is_there);
    }
    let shell = r#"salloc --nodes=2 --ntasks=8 sh -c '
        srun --overlap -n 2 "$@" & srun --overlap -n 3 "$@" & first=$!
        srun --overlap -n 4 "$@" && wait $first && wait' sh "$@""#;
    let Some(text) = output(NAME, shell) else { return };
    for ranks in [2, 3, 4] {
        all_are_done(ranks, &text);
    }
}

/// The others hear of it by themselves, before Slurm ends them.
#[test]
fn a_rank_that_is_killed() {
    const NAME: &str = "slurm::a_rank_that_is_killed";
    if is_part_of(NAME) {
        let comm = Communicator::builder().timeout(LONG).init().unwrap();
        assert_eq!(
            mp::launch::Launch::detect().unwrap().map(|launch| launch.launcher),
            Some(Launcher::Slurm)
        );
        let (me, buffer) = (comm.rank(), buffer(&comm, 300));
        let collectives = Collectives::new(&comm).unwrap();
        buffer.memory().write(me * 100, &message(me, 0, 1, 100)).unwrap();
        collectives.allgather(&buffer, 0..300, LONG).unwrap();
        // What was sent to it has been answered.
        comm.barrier(LONG).unwrap();
        if me == 1 {
            // SAFETY: it ends this process, as an operator might.
            unsafe { libc::raise(libc::SIGKILL) };
        }
        let error = collectives.allgather(&buffer, 0..300, LONG).unwrap_err();
        return println!("rank {me} is told: {error}");
    }
    let Some((status, text)) = slurm(NAME, r#"srun -n 3 --kill-on-bad-exit=0 --wait=0 "$@""#) else { return };
    assert!(!status.success(), "{text}");
    for rank in [0, 2] {
        assert_eq!(text.matches(&format!("rank {rank} is told: ")).count(), 1, "{text}");
    }
}
