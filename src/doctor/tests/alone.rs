//! Device files that are closed to the user, looked at by a user who may not open everything.

use super::super::machine::Machine;
use super::super::probe::Probe;
use super::super::probe::Status::{Fail, Warn};
use super::rig::{Case, all, check};

const NOBODY: libc::uid_t = 65534;

const CASES: &[Case] = &[
    Case {
        what: "a GPU that is closed",
        change: |tree, _| tree.close("dev/nvidia1"),
        says: &[("driver.nodes", "", Fail, "closed to this user: /dev/nvidia1", "chmod 666")],
    },
    Case {
        what: "gdrdrv that is closed",
        change: |tree, _| tree.close("dev/gdrdrv"),
        says: &[("modules.gdrdrv", "", Warn, "/dev/gdrdrv is closed to this user", "chmod 666 /dev/gdrdrv")],
    },
    Case {
        what: "a card that is closed",
        change: |tree, _| tree.close("dev/infiniband/uverbs0"),
        says: &[("rdma.node", "mlx5_0", Fail, "/dev/infiniband/uverbs0 is closed to this user", "udev")],
    },
];

/// Makes the calling thread another user, and none of the others: the system call does what libc does for all.
fn become_nobody() -> bool {
    // SAFETY: plain numbers.
    unsafe { libc::syscall(libc::SYS_setresuid, NOBODY, NOBODY, NOBODY) == 0 }
}

/// The probes as somebody who is not root sees them. `None` where root may not become somebody else.
fn as_nobody(machine: &Machine) -> Option<Vec<Probe>> {
    // SAFETY: it may be called at any time.
    let is_root = unsafe { libc::geteuid() } == 0;
    std::thread::scope(|scope| {
        let look = scope.spawn(|| (!is_root || become_nobody()).then(|| all(machine)));
        look.join().expect("the thread only looks")
    })
}

/// The probes that complain.
pub(super) fn complaints() -> Vec<&'static str> {
    let tree = super::Tree::healthy();
    if as_nobody(&super::healthy(&tree)).is_none() {
        eprintln!("skipped: this root may not become another user, and opens everything");
        return Vec::new();
    }
    let look = |machine: &Machine| as_nobody(machine).expect("as a moment ago");
    CASES.iter().flat_map(|case| check(case, |_, _| {}, look)).collect()
}
