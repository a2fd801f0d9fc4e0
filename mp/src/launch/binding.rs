//! Divides the CPUs of this host between the ranks that start each other.

use std::collections::BTreeMap;
use std::fs;
use std::thread::{ThreadId, current};

use parking_lot::Mutex;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use crate::error::{Error, Result};
use crate::path::choice;
use gdsync::env::variable;

/// Overrides [`CommunicatorBuilder::bind`](crate::CommunicatorBuilder::bind).
const VARIABLE: &str = "MP_BIND";

/// The thread that was bound here, its CPUs before, and since.
static BOUND: Mutex<Option<(ThreadId, CpuSet, CpuSet)>> = Mutex::new(None);

/// The choice of the program, or of the environment.
pub(super) fn is_wanted(own: bool) -> Result<bool> {
    let choices = [("1", true), ("0", false)];
    Ok(choice(own, VARIABLE, variable(VARIABLE).as_deref(), &choices, "0 or 1")?)
}

/// Gives the calling thread back what [`bind`] took from it, or from the thread that has started it, in a job that is over.
pub(super) fn unbind() {
    let mut bound = BOUND.lock();
    let Some((thread, before, since)) = *bound else { return };
    // Not if the program has bound it since.
    if sched_getaffinity(None).is_ok_and(|now| now == since) {
        // The thread had them.
        let _ = sched_setaffinity(None, &before);
    }
    bound.take_if(|_| thread == current().id());
}

/// Binds the calling thread, and those that it starts from now on.
pub(super) fn bind(share: &CpuSet) -> Result<()> {
    let failed = |error: rustix::io::Errno| {
        let fix = "switch it off: CommunicatorBuilder::bind, or MP_BIND=0";
        Error::spawn("bind this rank to its CPUs", error.into(), fix)
    };
    let before = sched_getaffinity(None).map_err(failed)?;
    sched_setaffinity(None, share).map_err(failed)?;
    *BOUND.lock() = Some((current().id(), before, *share));
    Ok(())
}

/// The CPUs that each rank gets of those that the calling thread may use; nothing where there are too few, or cannot be found out.
pub(super) fn shares(ranks: usize) -> Vec<CpuSet> {
    let Some(allowed) = sched_getaffinity(None).ok().filter(|_| ranks > 1) else { return Vec::new() };
    let cpus = (0..CpuSet::MAX_CPU).filter(|cpu| allowed.is_set(*cpu)).map(|cpu| (core(cpu), cpu));
    let set = |cpus: Vec<usize>| {
        let mut set = CpuSet::new();
        cpus.into_iter().for_each(|cpu| set.set(cpu));
        set
    };
    divide(cpus, ranks).into_iter().map(set).collect()
}

/// NUMA node, package and number of a core. Without sysfs each CPU is one.
type Core = (usize, usize, usize);

fn core(cpu: usize) -> Core {
    let folder = format!("/sys/devices/system/cpu/cpu{cpu}");
    let number = |name: &str| {
        let text = fs::read_to_string(format!("{folder}/topology/{name}")).ok()?;
        text.trim().parse().ok()
    };
    let names = fs::read_dir(&folder).into_iter().flatten().flatten().map(|entry| entry.file_name());
    let node = names.filter_map(|name| name.to_str()?.strip_prefix("node")?.parse().ok()).next();
    let package = number("physical_package_id").unwrap_or(0);
    (node.unwrap_or(0), package, number("core_id").unwrap_or(cpu))
}

/// Equal shares of neighbouring cores, each with all of its CPUs. If there are fewer cores than ranks, each rank gets one CPU: first
/// one of every core, then their siblings. Nothing if there are fewer CPUs than ranks.
fn divide(cpus: impl Iterator<Item = (Core, usize)>, ranks: usize) -> Vec<Vec<usize>> {
    let mut cores = BTreeMap::<Core, Vec<usize>>::new();
    cpus.for_each(|(core, cpu)| cores.entry(core).or_default().push(cpu));
    if cores.len() >= ranks {
        let mut shares = vec![Vec::new(); ranks];
        let count = cores.len();
        cores.into_values().enumerate().for_each(|(n, cpus)| shares[n * ranks / count].extend(cpus));
        return shares;
    }
    let siblings = cores.values().map(Vec::len).max().unwrap_or(0);
    let one_by_one = (0..siblings).flat_map(|n| cores.values().filter_map(move |cpus| cpus.get(n)));
    let shares: Vec<_> = one_by_one.take(ranks).map(|cpu| vec![*cpu]).collect();
    if shares.len() == ranks { shares } else { Vec::new() }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two nodes of two cores, each with two CPUs, numbered as Linux does: siblings last, nodes by turns.
    fn eight() -> impl Iterator<Item = (Core, usize)> {
        (0..8).map(|cpu| ((cpu % 2, cpu % 2, cpu / 2 % 2), cpu))
    }

    #[test]
    fn shares_are_whole_cores_of_a_node_while_there_are_enough() {
        assert_eq!(divide(eight(), 1), [[0, 4, 2, 6, 1, 5, 3, 7]]);
        assert_eq!(divide(eight(), 2), [[0, 4, 2, 6], [1, 5, 3, 7]]);
        assert_eq!(divide(eight(), 3), [&[0, 4, 2, 6][..], &[1, 5], &[3, 7]]);
        assert_eq!(divide(eight(), 4), [[0, 4], [2, 6], [1, 5], [3, 7]]);
    }

    #[test]
    fn siblings_come_last_and_no_cpu_twice() {
        assert_eq!(divide(eight(), 5), [[0], [2], [1], [3], [4]]);
        assert_eq!(divide(eight(), 8).concat(), [0, 2, 1, 3, 4, 6, 5, 7]);
        assert_eq!(divide(eight(), 9), Vec::<Vec<usize>>::new());
        // A mask that leaves one CPU of one core, and both of another.
        let left = |cpu: &(Core, usize)| [0, 2, 6].contains(&cpu.1);
        assert_eq!(divide(eight().filter(left), 2), [&[0][..], &[2, 6]]);
        assert_eq!(divide(eight().filter(left), 3), [[0], [2], [6]]);
    }
}
