//! Ranks that real launchers start, where they are installed: `mpirun` of Open MPI, MPICH and Intel MPI, `srun` under a Slurm of
//! the test, `torchrun`; and two shells.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio, exit};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread::sleep;
use std::time::{Duration, Instant};

use crate::common::{LONG, buffer, bytes, is_part_of, message, myself, rank_command};
use mp::Communicator;
use mp::collective::Collectives;
use mp::launch::{Launch, Launcher, Root};

/// What each rank does: two communicators, one after the other, and a third beside it.
fn rank(kind: impl Fn(&Root) -> bool) {
    let launch = Launch::detect().unwrap().expect("started by a launcher");
    assert!(kind(&launch.root), "{launch:?}");
    for _ in 0..2 {
        let comm = Communicator::builder().timeout(LONG).init().unwrap();
        assert_eq!((comm.rank(), comm.size()), (launch.rank, launch.size));
        let beside = Communicator::builder().timeout(LONG).init().unwrap();
        for comm in [&comm, &beside] {
            let (me, size) = (comm.rank(), comm.size());
            let buffer = buffer(comm, size * 100);
            buffer.memory().write(me * 100, &message(me, 0, 1, 100)).unwrap();
            Collectives::new(comm, LONG).unwrap().allgather(&buffer, 0..size * 100, LONG).unwrap();
            let expected: Vec<_> = (0..size).flat_map(|rank| message(rank, 0, 1, 100)).collect();
            assert!(bytes(&buffer, 0..size * 100) == expected);
        }
        beside.finalize(LONG).unwrap();
        comm.finalize(LONG).unwrap();
    }
    println!("rank {} of {} is done", launch.rank, launch.size);
}

/// Each rank of a job of this size has printed once that it is done.
#[track_caller]
fn all_are_done(ranks: usize, text: &str) {
    for rank in 0..ranks {
        let line = format!("rank {rank} of {ranks} is done");
        assert_eq!(text.matches(&line).count(), 1, "{line}\n{text}");
    }
}

/// A process that ends with the test.
struct Job(Child);

impl Drop for Job {
    fn drop(&mut self) {
        if let Ok(None) = self.0.try_wait() {
            // SIGTERM first, so that it can end its children.
            let pid = i32::try_from(self.0.id()).expect("a process");
            // SAFETY: it is a child that was not waited for, so the number is its own.
            unsafe { libc::kill(pid, libc::SIGTERM) };
            let start = Instant::now();
            while matches!(self.0.try_wait(), Ok(None)) && start.elapsed() < Duration::from_secs(20) {
                sleep(Duration::from_millis(20));
            }
        }
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The exit status and the output of a job, which must end in time.
fn outcome(mut command: Command) -> (ExitStatus, String) {
    static COUNT: AtomicUsize = AtomicUsize::new(0);
    let name = format!("gdsync-launch-{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
    let path = std::env::temp_dir().join(name);
    let file = std::fs::File::create(&path).unwrap();
    command.stdin(Stdio::null()).stdout(file.try_clone().unwrap()).stderr(file);
    let mut job = Job(command.spawn().unwrap());
    let start = Instant::now();
    let status = loop {
        if let Some(status) = job.0.try_wait().unwrap() {
            break Some(status);
        }
        if start.elapsed() > 3 * LONG {
            break None;
        }
        sleep(Duration::from_millis(20));
    };
    let text = std::fs::read_to_string(&path).unwrap();
    std::fs::remove_file(&path).unwrap();
    (status.unwrap_or_else(|| panic!("{command:?} does not end\n{text}")), text)
}

/// The output of a job, which must succeed in time.
fn output(command: Command) -> String {
    let (status, text) = outcome(command);
    assert!(status.success(), "{status}\n{text}");
    text
}

/// The programs of these names in `PATH`, each once.
fn programs(names: &[&str]) -> Vec<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let files =
        std::env::split_paths(&path).flat_map(|folder| names.iter().map(move |name| folder.join(name)));
    let mut found: Vec<(PathBuf, PathBuf)> = Vec::new();
    for file in files.filter(|file| file.is_file()) {
        let real = file.canonicalize().unwrap_or_else(|_| file.clone());
        if found.iter().all(|(_, other)| *other != real) {
            found.push((file, real));
        }
    }
    found.into_iter().map(|(file, _)| file).collect()
}

/// A command started by a launcher.
fn under(launcher: &Path, arguments: &[&str], what: &Command) -> Command {
    let mut command = Command::new(launcher);
    command.args(arguments).arg(what.get_program()).args(what.get_args());
    for (name, value) in what.get_envs() {
        match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        };
    }
    // Left by a batch system around the tests, or meant for another test.
    command.env_remove("MASTER_ADDR").env_remove("MASTER_PORT");
    command
}

/// One of four ports of this process, below the ephemeral ports.
fn port(which: u32) -> String {
    (10_000 + std::process::id() % 2_500 * 4 + which).to_string()
}

/// Two ranks without a launcher.
#[test]
fn two_shells() {
    const NAME: &str = "two_shells";
    if is_part_of(NAME) {
        return rank(is_at);
    }
    let port = port(1);
    let shell = |rank: usize| rank_command(NAME, rank, 2, &port);
    let mut other = Job(shell(1).stdout(Stdio::null()).spawn().unwrap());
    assert!(output(shell(0)).contains("rank 0 of 2 is done"));
    assert!(other.0.wait().unwrap().success());
}

// `mpirun` and `mpiexec` of every MPI in `PATH`.

/// Names of an MPI's launcher, and what it has of these in what it says of its version.
struct Brand(&'static [&'static str], &'static [&'static str]);

const OPEN_MPI: Brand = Brand(&["mpirun.openmpi", "mpirun"], &["Open MPI", "OpenRTE"]);
const MPICH: Brand = Brand(&["mpiexec.hydra", "mpirun.mpich", "mpiexec"], &["HYDRA"]);
const INTEL_MPI: Brand = Brand(&["mpiexec.hydra", "mpiexec"], &["Intel(R) MPI"]);

impl Brand {
    fn launchers(&self) -> Vec<PathBuf> {
        let is_its = |file: &PathBuf| {
            let version = Command::new(file).arg("--version").output();
            version.is_ok_and(|output| {
                let text = String::from_utf8_lossy(&output.stdout);
                self.1.iter().any(|word| text.contains(word))
            })
        };
        programs(self.0).into_iter().filter(is_its).collect()
    }
}

/// As root, on few cores, in a container: what Open MPI refuses otherwise. Others ignore it.
fn mpirun(launcher: &Path, arguments: &[&str], ranks: usize, what: &Command) -> Command {
    let ranks = ranks.to_string();
    let mut command = under(launcher, &[arguments, &["-np", &ranks]].concat(), what);
    for variable in ["ALLOW_RUN_AS_ROOT", "ALLOW_RUN_AS_ROOT_CONFIRM"] {
        command.env(format!("OMPI_{variable}"), "1").env(format!("PRTE_{variable}"), "1");
    }
    command.envs([
        ("OMPI_MCA_rmaps_base_oversubscribe", "1"),
        ("PRTE_MCA_rmaps_default_mapping_policy", ":oversubscribe"),
    ]);
    command
}

/// Whether a launcher starts anything, which is tried with `true`.
fn starts(mut probe: Command) -> bool {
    let reason = match probe.output() {
        Ok(output) if output.status.success() => return true,
        Ok(output) => String::from_utf8_lossy(&output.stderr).trim_end().to_owned(),
        Err(error) => error.to_string(),
    };
    println!("skipped: {} starts nothing: {reason}", probe.get_program().display());
    false
}

fn is_at(root: &Root) -> bool {
    matches!(root, Root::At(_))
}

fn is_by_pmi(root: &Root) -> bool {
    matches!(root, Root::Pmi { .. })
}

/// Starts ranks by each launcher of the brand that is there and can start anything.
fn by_mpirun(
    test: &str,
    brand: &Brand,
    arguments: &[&str],
    options: &[(&str, &str)],
    kind: fn(&Root) -> bool,
) {
    if is_part_of(test) {
        return rank(kind);
    }
    let launchers = brand.launchers();
    if launchers.is_empty() {
        println!("skipped: none of {:?} in PATH is of {:?}", brand.0, brand.1);
    }
    for launcher in launchers {
        if !starts(mpirun(&launcher, arguments, 1, &Command::new("true"))) {
            continue;
        }
        for ranks in [1, 3] {
            let mut command = mpirun(&launcher, arguments, ranks, &myself(test));
            command.envs(options.iter().copied());
            all_are_done(ranks, &output(command));
        }
        println!("{} has started 1 and 3 ranks", launcher.display());
    }
}

/// A test of this name: the launcher of a brand with these arguments, and how the ranks find rank 0.
macro_rules! mpirun_test {
    ($name:ident, $brand:expr, $arguments:expr, $kind:expr) => {
        #[test]
        fn $name() {
            by_mpirun(stringify!($name), &$brand, &$arguments, &[], $kind);
        }
    };
}

/// Names of this host that the launcher takes for two.
const TWO_HOSTS: [&str; 4] = ["-launcher", "fork", "-hosts", "127.0.0.1,localhost"];

mpirun_test!(open_mpi, OPEN_MPI, [], |root| matches!(root, Root::File(_) | Root::At(_)));
mpirun_test!(mpich, MPICH, [], is_by_pmi);
mpirun_test!(intel_mpi, INTEL_MPI, [], is_by_pmi);
// It tells no rank the name of its host: rank 0 gives what the system calls it.
mpirun_test!(intel_mpi_on_two_hosts, INTEL_MPI, TWO_HOSTS, is_by_pmi);
// Rank 0 gives its own name to the others.
mpirun_test!(mpich_on_two_hosts, MPICH, TWO_HOSTS, |root| {
    matches!(root, Root::Pmi { host: Some(host) } if TWO_HOSTS[3].split(',').any(|name| name == host))
});

/// The variables win over what the launcher offers.
#[test]
fn mpich_with_variables() {
    let port = port(0);
    let options = [("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", &port)];
    by_mpirun("mpich_with_variables", &MPICH, &[], &options, is_at);
}

// `srun`, under a Slurm that `tests/launchers/slurm` starts for each test.

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
fn slurm_output(test: &str, shell: &str) -> Option<String> {
    let (status, text) = slurm(test, shell)?;
    assert!(status.success(), "{status}\n{text}");
    Some(text)
}

/// With each of the PMI plug-ins, on one node and two, more ranks than CPUs, and as a job of two programs.
#[test]
fn srun() {
    const NAME: &str = "srun";
    if is_part_of(NAME) {
        return rank(is_at);
    }
    let shell = r#"set -e
    srun -n 1 "$@"
    srun -n 2 --mpi=none "$@"
    srun -n 3 --mpi=pmi2 "$@"
    ! srun --mpi=list 2>&1 | grep -qw pmix || srun -n 4 --mpi=pmix "$@"
    srun -N 2 -n 5 --distribution=cyclic "$@"
    srun -N 1 -n 9 --overcommit "$@"
    srun -n 2 "$@" : -n 4 "$@""#;
    let Some(text) = slurm_output(NAME, shell) else { return };
    for ranks in [1, 2, 3, 5, 6, 9] {
        all_are_done(ranks, &text);
    }
}

/// They have ports of their own.
#[test]
fn two_steps_at_once() {
    const NAME: &str = "two_steps_at_once";
    if is_part_of(NAME) {
        return rank(is_at);
    }
    let shell = r#"salloc --nodes=2 --ntasks=8 sh -c '
    srun --overlap -n 2 "$@" & srun --overlap -n 3 "$@" & first=$!
    srun --overlap -n 4 "$@" && wait $first && wait' sh "$@""#;
    let Some(text) = slurm_output(NAME, shell) else { return };
    for ranks in [2, 3, 4] {
        all_are_done(ranks, &text);
    }
}

/// The others hear of it by themselves, before Slurm ends them.
#[test]
fn a_rank_that_is_killed() {
    const NAME: &str = "a_rank_that_is_killed";
    if is_part_of(NAME) {
        let comm = Communicator::builder().timeout(LONG).init().unwrap();
        assert_eq!(Launch::detect().unwrap().map(|launch| launch.launcher), Some(Launcher::Slurm));
        let (me, buffer) = (comm.rank(), buffer(&comm, 300));
        let collectives = Collectives::new(&comm, LONG).unwrap();
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
    let Some((status, text)) = slurm(NAME, r#"srun -n 3 --kill-on-bad-exit=0 --wait=0 "$@""#) else {
        return;
    };
    assert!(!status.success(), "{text}");
    for rank in [0, 2] {
        assert_eq!(text.matches(&format!("rank {rank} is told: ")).count(), 1, "{text}");
    }
}

// `torchrun`, whose own store listens at `MASTER_PORT`.

const RANKS: usize = 3;

/// Underscores are what every version understands.
fn torchrun(launcher: &Path, options: &[&str], ranks: usize, what: &Command) -> Command {
    let ranks = ranks.to_string();
    under(launcher, &[options, &["--no_python", "--nproc_per_node", &ranks]].concat(), what)
}

/// Starts ranks in each of the ways, by each torchrun that can start anything.
fn by_torchrun(test: &str, ways: &[&[&str]]) {
    let launchers = programs(&["torchrun"]);
    if launchers.is_empty() {
        println!("skipped: no torchrun in PATH");
    }
    for launcher in launchers {
        if !starts(torchrun(&launcher, &["--standalone"], 1, &Command::new("true"))) {
            continue;
        }
        for way in ways {
            all_are_done(RANKS, &output(torchrun(&launcher, way, RANKS, &myself(test))));
            println!("{} {way:?} has started {RANKS} ranks", launcher.display());
        }
    }
}

#[test]
fn torchrun_stores() {
    const NAME: &str = "torchrun_stores";
    if is_part_of(NAME) {
        return rank(is_at);
    }
    let port = port(2);
    by_torchrun(NAME, &[&["--standalone"], &["--master_port", &port]]);
}

/// A rank fails, and all are started anew at the same store.
#[test]
fn torchrun_restarts() {
    const NAME: &str = "torchrun_restarts";
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
        return rank(is_at);
    }
    by_torchrun(NAME, &[&["--standalone", "--max_restarts", "1"]]);
}
