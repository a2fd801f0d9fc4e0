//! `mpirun` and `mpiexec` of every MPI in `PATH`.

use std::path::{Path, PathBuf};
use std::process::Command;

use mp::launch::Root;

use super::{all_are_done, output, port, programs, rank, under};
use crate::common::{is_part_of, myself};

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

/// Starts ranks by each launcher of the brand that is there and can start anything.
fn launched(
    test: &str,
    brand: &Brand,
    arguments: &[&str],
    kind: fn(&Root) -> bool,
    options: &[(&str, &str)],
) {
    if is_part_of(test) {
        return rank(kind);
    }
    let launchers = brand.launchers();
    if launchers.is_empty() {
        println!("skipped: none of {:?} in PATH is of {:?}", brand.0, brand.1);
    }
    for launcher in launchers {
        let name = launcher.display();
        match mpirun(&launcher, arguments, 1, &Command::new("true")).output() {
            Ok(output) if output.status.success() => {}
            Ok(output) => {
                println!("skipped: {name} starts nothing: {}", String::from_utf8_lossy(&output.stderr));
                continue;
            }
            Err(error) => {
                println!("skipped: {name}: {error}");
                continue;
            }
        }
        for ranks in [1, 3] {
            let mut command = mpirun(&launcher, arguments, ranks, &myself(test));
            command.envs(options.iter().copied());
            all_are_done(ranks, &output(command));
        }
        println!("{name} has started 1 and 3 ranks");
    }
}

fn test_name(name: &str) -> String {
    format!("mpirun::{name}")
}

#[test]
fn open_mpi() {
    let kind = |root: &Root| matches!(root, Root::File(_) | Root::At(_));
    launched(&test_name("open_mpi"), &OPEN_MPI, &[], kind, &[]);
}

#[test]
fn mpich() {
    launched(&test_name("mpich"), &MPICH, &[], |root| matches!(root, Root::Pmi { .. }), &[]);
}

#[test]
fn intel_mpi() {
    launched(&test_name("intel_mpi"), &INTEL_MPI, &[], |root| matches!(root, Root::Pmi { .. }), &[]);
}

/// Names of this host that the launcher takes for two.
const TWO_HOSTS: [&str; 4] = ["-launcher", "fork", "-hosts", "127.0.0.1,localhost"];

/// Rank 0 gives its own name to the others.
#[test]
fn mpich_on_two_hosts() {
    let named = |root: &Root| matches!(root, Root::Pmi { host: Some(host) } if host == "127.0.0.1" || host == "localhost");
    launched(&test_name("mpich_on_two_hosts"), &MPICH, &TWO_HOSTS, named, &[]);
}

/// It tells no rank the name of its host: rank 0 gives what the system calls it.
#[test]
fn intel_mpi_on_two_hosts() {
    let kind = |root: &Root| matches!(root, Root::Pmi { .. });
    launched(&test_name("intel_mpi_on_two_hosts"), &INTEL_MPI, &TWO_HOSTS, kind, &[]);
}

/// The variables win over what the launcher offers.
#[test]
fn mpich_with_variables() {
    let port = port(0);
    let options = [("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", &port)];
    let name = test_name("mpich_with_variables");
    launched(&name, &MPICH, &[], |root| matches!(root, Root::At(_)), &options);
}
