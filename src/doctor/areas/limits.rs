//! How much memory this process may lock, as it really is.

use std::ptr;

use rustix::io::Errno;
use rustix::mm::{MapFlags, MlockFlags, ProtFlags, mlock_with, mmap_anonymous, munmap};
use rustix::process::{Resource, getrlimit};

use super::super::machine::Machine;
use super::super::probe::{Check, Probe};

/// What limits the memory that network cards may use.
#[derive(Clone, Copy, Debug)]
pub(in crate::doctor) struct Limits {
    /// `RLIMIT_MEMLOCK` in bytes; `None` for no limit.
    pub(in crate::doctor) memlock: Option<u64>,
    /// Whether the process holds `CAP_IPC_LOCK`.
    pub(in crate::doctor) ipc_lock: bool,
    /// Whether more than the limit could be locked; `None` where that was not tried.
    pub(in crate::doctor) beyond: Option<bool>,
}

const MEMLOCK: Check = Check {
    name: "limits.memlock",
    tried: "getrlimit(RLIMIT_MEMLOCK), and mlock of more than that",
    why: "an RDMA device can only use memory that is locked: rings, buffers and registered regions count",
};
const IPC_LOCK: Check = Check {
    name: "limits.ipc_lock",
    tried: "CapEff of /proc/self/status, and mlock of more than RLIMIT_MEMLOCK",
    why: "CAP_IPC_LOCK lifts the limit, but only where the kernel honours it: in a user namespace it does nothing",
};

pub(super) const CHECKS: &[&Check] = &[&MEMLOCK, &IPC_LOCK];

/// What a few queue pairs with their buffers take.
const NEEDED: u64 = 1 << 20;
/// What applications register without thinking.
const COMFORTABLE: u64 = 1 << 30;
/// More than this is not locked to find out.
const MOST_TRIED: u64 = 64 << 20;
const FIX: &str = "raise it: `ulimit -l unlimited`, `* - memlock unlimited` in /etc/security/limits.conf, \
                   LimitMEMLOCK=infinity of the service, or `--ulimit memlock=-1` of the container";

impl Limits {
    /// Of this process. What is locked to find out is unlocked at once.
    pub(in crate::doctor) fn here() -> Self {
        let memlock = getrlimit(Resource::Memlock).current;
        let tried = memlock.filter(|limit| *limit <= MOST_TRIED);
        Self { memlock, ipc_lock: holds_ipc_lock(), beyond: tried.and_then(locks_more) }
    }

    /// Bytes that may be locked; `None` for all.
    pub(in crate::doctor) fn effective(&self) -> Option<u64> {
        let lifted = self.ipc_lock && self.beyond != Some(false);
        if lifted { None } else { self.memlock }
    }
}

fn holds_ipc_lock() -> bool {
    const CAP_IPC_LOCK: u32 = 14;
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok())
        .is_some_and(|mask| mask >> CAP_IPC_LOCK & 1 != 0)
}

/// Whether more than the limit can be locked; `None` where the kernel refuses for another reason.
fn locks_more(limit: u64) -> Option<bool> {
    let page = gdrcopy::host_page() as u64;
    let len = usize::try_from(limit.next_multiple_of(page) + page).ok()?;
    let kind = MapFlags::PRIVATE | MapFlags::NORESERVE;
    // SAFETY: a new mapping wherever the kernel likes.
    let at = unsafe { mmap_anonymous(ptr::null_mut(), len, ProtFlags::empty(), kind) }.ok()?;
    // SAFETY: the mapping made above. Its pages cannot be touched, so none is made when they are locked on fault.
    let locked = unsafe { mlock_with(at, len, MlockFlags::ONFAULT) };
    // SAFETY: the mapping made above, of which nothing is used.
    let _ = unsafe { munmap(at, len) };
    match locked {
        Ok(()) => Some(true),
        Err(Errno::NOMEM | Errno::PERM | Errno::AGAIN) => Some(false),
        Err(_) => None,
    }
}

pub(super) fn probe(machine: &Machine) -> Vec<Probe> {
    vec![memlock(machine), ipc_lock(machine)]
}

fn memlock(machine: &Machine) -> Probe {
    let limits = &machine.limits;
    let Some(limit) = limits.effective() else {
        return MEMLOCK.ok(match limits.memlock {
            None => "no limit".into(),
            Some(limit) => format!("the limit of {} does not count: CAP_IPC_LOCK lifts it", bytes(limit)),
        });
    };
    let found = format!("{} may be locked", bytes(limit));
    match limit {
        _ if machine.hcas().is_empty() => {
            MEMLOCK.ok(format!("{found}; there is no RDMA device that needs it"))
        }
        limit if limit < NEEDED => MEMLOCK.fail(format!("{found}, too little for queue pairs"), FIX),
        limit if limit < COMFORTABLE => {
            MEMLOCK.warn(format!("{found}, so larger buffers cannot be registered"), FIX)
        }
        _ => MEMLOCK.ok(found),
    }
}

fn ipc_lock(machine: &Machine) -> Probe {
    match (machine.limits.ipc_lock, machine.limits.beyond) {
        (false, _) => IPC_LOCK.ok("not held; only the limit counts"),
        (true, Some(false)) if machine.hcas().is_empty() => {
            IPC_LOCK.ok("held, but without effect; there is no RDMA device that needs it")
        }
        (true, Some(false)) => IPC_LOCK.warn(
            "held, but without effect: the limit still counts",
            format!("the capability is that of a user namespace, which the kernel ignores; {FIX}"),
        ),
        (true, Some(true)) => IPC_LOCK.ok("held and effective: more than the limit was locked"),
        (true, None) => IPC_LOCK.ok("held; not tried, the limit is high"),
    }
}

/// A number of bytes for people.
pub(super) fn bytes(count: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut unit = 0;
    let mut scale = 1;
    while unit + 1 < UNITS.len() && count / scale >= 1024 {
        scale *= 1024;
        unit += 1;
    }
    match (count / scale, count % scale * 10 / scale) {
        (whole, 0) => format!("{whole} {}", UNITS[unit]),
        (whole, tenths) => format!("{whole}.{tenths} {}", UNITS[unit]),
    }
}
