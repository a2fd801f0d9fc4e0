//! Ranks that the real launchers start: `mpirun` of Open MPI and MPICH, where they are installed, and shells without one.

mod common;

use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::sleep;
use std::time::{Duration, Instant};

use common::{LONG, buffer, bytes, is_part_of, message, myself};
use mp::Communicator;
use mp::collective::Collectives;
use mp::launch::{Launch, Root};

/// What each rank does: two communicators, one after the other, and a third beside it.
fn rank(kind: fn(&Root) -> bool) {
    let launch = Launch::detect().unwrap().expect("started by a launcher");
    assert!(kind(&launch.root), "{launch:?}");
    for _ in 0..3 {
        let comm = Communicator::builder().timeout(LONG).init().unwrap();
        assert_eq!((comm.rank(), comm.size()), (launch.rank, launch.size));
        let beside = Communicator::builder().timeout(LONG).init().unwrap();
        for comm in [&comm, &beside] {
            let (me, size) = (comm.rank(), comm.size());
            let buffer = buffer(comm, size * 100);
            buffer.memory().write(me * 100, &message(me, 0, 1, 100)).unwrap();
            Collectives::new(comm).unwrap().allgather(&buffer, 0..size * 100, LONG).unwrap();
            let expected: Vec<_> = (0..size).flat_map(|rank| message(rank, 0, 1, 100)).collect();
            assert!(bytes(&buffer, 0..size * 100) == expected);
        }
        beside.finalize(LONG).unwrap();
        comm.finalize(LONG).unwrap();
    }
    println!("rank {} of {} is done", launch.rank, launch.size);
}

/// Ends it with the test, whatever happens.
struct Job(Child);

impl Drop for Job {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The output of a job, which must end well in time.
fn output(mut command: Command) -> String {
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
        if start.elapsed() > 2 * LONG {
            break None;
        }
        sleep(Duration::from_millis(20));
    };
    let text = std::fs::read_to_string(&path).unwrap();
    std::fs::remove_file(&path).unwrap();
    assert!(status.is_some_and(|status| status.success()), "{status:?}\n{text}");
    text
}

/// The program in `PATH`.
fn program(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|folder| folder.join(name)).find(|file| file.is_file())
}

/// As root, on few cores, in a container: what Open MPI refuses otherwise. MPICH ignores it.
fn mpirun(program: &PathBuf, arguments: &[&str], ranks: usize, what: &Command) -> Command {
    let mut command = Command::new(program);
    command.args(arguments).args(["-np", &ranks.to_string()]).arg(what.get_program()).args(what.get_args());
    for (name, value) in what.get_envs() {
        match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        };
    }
    command.envs([("OMPI_ALLOW_RUN_AS_ROOT", "1"), ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")]);
    command.envs([
        ("OMPI_MCA_rmaps_base_oversubscribe", "1"),
        ("PRTE_MCA_rmaps_default_mapping_policy", ":oversubscribe"),
    ]);
    // Left by a batch system around the tests, or meant for another test.
    command.env_remove("MASTER_ADDR").env_remove("MASTER_PORT");
    command
}

/// Starts ranks by the first of the launchers that is there and can start anything.
fn launched(
    test: &str,
    launchers: [&str; 2],
    arguments: &[&str],
    kind: fn(&Root) -> bool,
    options: &[(&str, &str)],
) {
    if is_part_of(test) {
        return rank(kind);
    }
    let Some(launcher) = launchers.iter().find_map(|name| program(name)) else {
        return println!("skipped: none of {launchers:?} is installed");
    };
    let name = launcher.display();
    match mpirun(&launcher, arguments, 1, &Command::new("true")).output() {
        Ok(output) if output.status.success() => {}
        Ok(output) => {
            return println!("skipped: {name} starts nothing: {}", String::from_utf8_lossy(&output.stderr));
        }
        Err(error) => return println!("skipped: {name}: {error}"),
    }
    for ranks in [1, 2, 4] {
        let mut command = mpirun(&launcher, arguments, ranks, &myself(test));
        command.envs(options.iter().copied());
        let text = output(command);
        for rank in 0..ranks {
            let line = format!("rank {rank} of {ranks} is done");
            assert_eq!(text.matches(&line).count(), 1, "{name}: {line}\n{text}");
        }
    }
}

const OPEN_MPI: [&str; 2] = ["mpirun.openmpi", "prterun"];
const MPICH: [&str; 2] = ["mpiexec.hydra", "mpirun.mpich"];

#[test]
fn mpirun_of_open_mpi() {
    launched("mpirun_of_open_mpi", OPEN_MPI, &[], |root| matches!(root, Root::File(_) | Root::At(_)), &[]);
}

#[test]
fn mpirun_of_mpich() {
    launched("mpirun_of_mpich", MPICH, &[], |root| matches!(root, Root::Pmi { .. }), &[]);
}

/// Names of this host that the launcher takes for two: rank 0 gives its own to the others.
#[test]
fn mpirun_of_mpich_on_two_hosts() {
    let hosts = ["-launcher", "fork", "-hosts", "127.0.0.1,localhost"];
    let named = |root: &Root| matches!(root, Root::Pmi { host: Some(host) } if host == "127.0.0.1" || host == "localhost");
    launched("mpirun_of_mpich_on_two_hosts", MPICH, &hosts, named, &[]);
}

/// The variables win over what the launcher offers.
#[test]
fn mpirun_of_mpich_with_variables() {
    let port = port(0);
    let options = [("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", &port)];
    launched("mpirun_of_mpich_with_variables", MPICH, &[], |root| matches!(root, Root::At(_)), &options);
}

/// A port of this process, below those that the system hands out meanwhile.
fn port(which: u32) -> String {
    (10_000 + std::process::id() % 5_000 * 2 + which).to_string()
}

/// What two shells would start.
#[test]
fn two_shells() {
    const NAME: &str = "two_shells";
    if is_part_of(NAME) {
        return rank(|root| matches!(root, Root::At(_)));
    }
    let port = port(1);
    let shell = |rank: &str| {
        let mut command = myself(NAME);
        command.envs([
            ("RANK", rank),
            ("WORLD_SIZE", "2"),
            ("MASTER_ADDR", "127.0.0.1"),
            ("MASTER_PORT", &port),
        ]);
        command
    };
    let mut other = Job(shell("1").stdout(Stdio::null()).spawn().unwrap());
    assert!(output(shell("0")).contains("rank 0 of 2 is done"));
    assert!(other.0.wait().unwrap().success());
}
