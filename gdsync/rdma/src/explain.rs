//! Explains failed libibverbs calls and how to fix the cause.

use std::fmt::{self, Display};
use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use gdsync_device::QpState;
use gdsync_device::error::Error;

/// A call and its circumstances.
#[derive(Clone, Debug)]
pub(crate) enum Call {
    /// Opening a device through this file.
    Open { node: Option<PathBuf> },
    /// Registering host memory.
    Register { len: usize, memlock: Memlock },
    /// Registering GPU memory by dma-buf.
    RegisterDmaBuf { len: usize },
    /// Registering GPU memory with DevX by dma-buf.
    UmemDmaBuf { len: usize },
    /// Registering GPU memory by address.
    RegisterGpu { len: usize },
    /// Creating a completion queue.
    CreateCq { entries: u64, most: u64, memlock: Memlock },
    /// Creating a queue pair: requested values with the device's limits.
    CreateQp { asked: Vec<Asked>, memlock: Memlock },
    /// Modifying a queue pair.
    Modify(Step),
    /// Any other call.
    Other,
}

/// A requested value and the device's limit.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Asked {
    pub(crate) what: &'static str,
    pub(crate) value: u64,
    pub(crate) most: u64,
}

/// A queue pair transition.
#[derive(Clone, Debug)]
pub(crate) struct Step {
    pub(crate) from: QpState,
    pub(crate) to: QpState,
    /// Its attributes, for the message.
    pub(crate) attributes: String,
    pub(crate) port: u8,
    pub(crate) gid_index: u8,
    pub(crate) peer: Option<String>,
    pub(crate) asked: Vec<Asked>,
}

/// Limit of locked memory (RLIMIT_MEMLOCK) in bytes; `None` if unlimited.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Memlock(pub(crate) Option<u64>);

impl Memlock {
    /// Limit of this process.
    pub(crate) fn here() -> Self {
        let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
        // SAFETY: `limit` is writable.
        let failed = unsafe { libc::getrlimit(libc::RLIMIT_MEMLOCK, &raw mut limit) } != 0;
        Self((!failed && limit.rlim_cur != libc::RLIM_INFINITY).then_some(limit.rlim_cur))
    }

    fn advice(self) -> String {
        match self.0 {
            Some(bytes) => format!(
                "the process may lock {} KiB (RLIMIT_MEMLOCK): raise it with `ulimit -l unlimited`, `memlock` in \
                 /etc/security/limits.conf, LimitMEMLOCK= of the service, or `--ulimit memlock=-1` of the container",
                bytes / 1024
            ),
            None => "memory is short: the process may lock as much as it likes (RLIMIT_MEMLOCK)".into(),
        }
    }
}

const GONE: &str = "the device is gone or in a fatal state: check `dmesg`, and open it again";
const NOT_HERE: &str = "the device's driver does not support it: see `ibv_devinfo -v`";
const INTERRUPTED: &str = "the kernel or the card refused: check `dmesg`";

/// The requested values that exceed their limits.
fn above(asked: &[Asked]) -> Option<String> {
    let above: Vec<_> = asked
        .iter()
        .filter(|asked| asked.value > asked.most)
        .map(|Asked { what, value, most }| format!("{what} is {value}, the device allows {most}"))
        .collect();
    (!above.is_empty()).then(|| above.join("; "))
}

/// Advice for `errno` of a call.
pub(crate) fn advice(call: &Call, errno: i32) -> String {
    // These errors mean the same for every call.
    match errno {
        libc::EIO | libc::ENODEV if !matches!(call, Call::Modify(_)) => return GONE.into(),
        libc::EMFILE => return "too many files are open: raise `ulimit -n`".into(),
        libc::ENFILE => return "the machine has too many files open: raise fs.file-max".into(),
        _ => {}
    }
    match call {
        Call::Open { node } => open(node.as_deref().map(|p| p.display().to_string()), errno),
        Call::Register { len, memlock } => register(*len, *memlock, errno),
        Call::RegisterDmaBuf { len } => register_dma_buf(*len, errno),
        Call::UmemDmaBuf { len } => umem_dma_buf(*len, errno),
        Call::RegisterGpu { len } => register_gpu(*len, errno),
        Call::CreateCq { entries, most, memlock } => {
            let asked = [Asked { what: "the number of entries", value: *entries, most: *most }];
            create("completion queue", &asked, *memlock, errno)
        }
        Call::CreateQp { asked, memlock } => create("queue pair", asked, *memlock, errno),
        Call::Modify(step) => modify(step, errno),
        Call::Other => match errno {
            libc::ENOMEM => Memlock::here().advice(),
            libc::ENOSYS | libc::EOPNOTSUPP => NOT_HERE.into(),
            libc::ENOSPC => "the card has no more of these: close some, also of other processes".into(),
            libc::EPERM | libc::EACCES => "the process may not: give it access to /dev/infiniband".into(),
            _ => INTERRUPTED.into(),
        },
    }
}

fn open(node: Option<String>, errno: i32) -> String {
    let node = node.unwrap_or_else(|| "/dev/infiniband/uverbsN".into());
    match errno {
        libc::EACCES | libc::EPERM => format!(
            "the process may not use {node}: give it read and write access (`sudo chmod a+rw {node}`, or a udev rule \
             with MODE=\"0666\"); in a container, allow the device (`--device={node}`)"
        ),
        libc::ENOENT | libc::ENXIO => format!(
            "{node} is not there: load the module (`sudo modprobe ib_uverbs`); in a container, pass the device \
             (`--device=/dev/infiniband`)"
        ),
        libc::ENOSYS | libc::EPROTONOSUPPORT => {
            "the kernel's ib_uverbs is missing, or of another version than libibverbs: load it, or update rdma-core".into()
        }
        libc::ENOMEM => Memlock::here().advice(),
        libc::EBUSY | libc::EAGAIN => "the device is being taken away or reset: try again".into(),
        _ => format!("check {node}, and that the provider of rdma-core fits the kernel (`ibv_devinfo`)"),
    }
}

fn register(len: usize, memlock: Memlock, errno: i32) -> String {
    match errno {
        libc::ENOMEM | libc::EAGAIN => format!("{len} bytes could not be locked: {}", memlock.advice()),
        libc::EFAULT => format!(
            "{len} bytes are not all mapped, or are memory of a device, which cannot be locked: \
             register GPU memory as such (Gpu::alloc, Gpu::wrap)"
        ),
        libc::EACCES | libc::EPERM => {
            "the memory is mapped read-only: leave LOCAL_WRITE and remote writes away, or map it writable"
                .into()
        }
        libc::EINVAL => {
            format!(
                "{len} bytes or these access rights are not accepted: see `max_mr_size` of `ibv_devinfo -v`"
            )
        }
        libc::EOPNOTSUPP | libc::ENOSYS => NOT_HERE.into(),
        libc::ENOSPC => "the card has no more keys: deregister memory, also of other processes".into(),
        _ => INTERRUPTED.into(),
    }
}

/// How to enable registration of GPU memory.
const GPU_FIXES: &str = "either by a dma-buf (Linux 5.12, rdma-core 34, the NVIDIA driver's open kernel modules, CUDA 11.7), or \
                         by nvidia-peermem (`sudo modprobe nvidia-peermem`, on MLNX_OFED or DOCA-OFED)";

/// Advice when GPU memory cannot be registered in either way.
pub(crate) fn no_gpu_path(dma_buf: &str, peermem: &str) -> String {
    format!(
        "by dma-buf: {dma_buf}; by nvidia-peermem: {peermem}; GPU memory is registered {GPU_FIXES}; \
             GDSYNC_PATH=proxy stages it in host memory"
    )
}

fn register_dma_buf(len: usize, errno: i32) -> String {
    match errno {
        libc::EOPNOTSUPP | libc::ENOSYS | libc::ENOTTY | libc::EPROTONOSUPPORT => {
            "the kernel (before 5.12) or the driver of this device takes no dma-buf".into()
        }
        libc::EINVAL => format!("{len} bytes, or these access rights, are not accepted for a dma-buf"),
        libc::ENOMEM => "the GPU's window (BAR1) or the card's tables are full: register less".into(),
        libc::EBADF => "CUDA gave no dma-buf".into(),
        libc::ENXIO | libc::EFAULT | libc::EREMOTEIO => {
            "the device cannot reach the GPU: check that PCIe peer-to-peer works (ACS, IOMMU)".into()
        }
        libc::EPERM | libc::EACCES => "the process may not register this dma-buf".into(),
        _ => INTERRUPTED.into(),
    }
}

fn umem_dma_buf(len: usize, errno: i32) -> String {
    match errno {
        libc::EINVAL | libc::EOPNOTSUPP | libc::ENOSYS | libc::EPROTONOSUPPORT => {
            "the kernel (before Linux 6.1) or its mlx5_ib takes no dma-buf for DevX, or libmlx5 does not (before rdma-core 43, which \
             brought MLX5DV_UMEM_MASK_DMABUF): update the older of both"
                .into()
        }
        _ => register_dma_buf(len, errno),
    }
}

fn register_gpu(len: usize, errno: i32) -> String {
    match errno {
        libc::EFAULT => "the kernel does not know the address: nvidia-peermem is loaded without the peer-memory interface of \
                         MLNX_OFED or DOCA-OFED"
            .into(),
        libc::ENOMEM => format!("{len} bytes do not fit into the GPU's window (BAR1) or the card's tables"),
        libc::EINVAL => format!("{len} bytes, or these access rights, are not accepted"),
        _ => INTERRUPTED.into(),
    }
}

fn create(what: &str, asked: &[Asked], memlock: Memlock, errno: i32) -> String {
    match errno {
        libc::EINVAL => above(asked).unwrap_or_else(|| {
            let asked: Vec<_> = asked.iter().map(|a| format!("{} {}", a.what, a.value)).collect();
            format!("the device refuses this {what}: {}", asked.join(", "))
        }),
        libc::ENOMEM => above(asked).unwrap_or_else(|| memlock.advice()),
        libc::EFAULT => {
            "its rings are in memory that cannot be locked: they must be host memory of the process".into()
        }
        libc::ENOSPC => format!("the card has no more of these: destroy a {what}, also of other processes"),
        libc::EOPNOTSUPP | libc::ENOSYS => NOT_HERE.into(),
        libc::EPERM | libc::EACCES => {
            format!(
                "the process may not create this {what}: give it CAP_NET_RAW, or access to /dev/infiniband"
            )
        }
        _ => INTERRUPTED.into(),
    }
}

fn modify(step: &Step, errno: i32) -> String {
    let Step { from, to, attributes, port, gid_index, peer, asked } = step;
    let peer = peer.as_deref().unwrap_or("the peer");
    match errno {
        libc::EINVAL => above(asked).unwrap_or_else(|| {
            let gid = if *to == QpState::RTR {
                format!(
                    "; check that entry {gid_index} of the GID table of port {port} is of the peer's network and type \
                     (GDSYNC_GID_INDEX chooses), and that {peer} is right"
                )
            } else {
                String::new()
            };
            format!("the device refuses {from} to {to} with {attributes}{gid}")
        }),
        libc::ETIMEDOUT | libc::EHOSTUNREACH | libc::ENETUNREACH | libc::EADDRNOTAVAIL | libc::ENOENT => {
            format!(
                "{peer} has no address on the link of port {port}: check that `ping` reaches it from GID index \
                 {gid_index}, or choose another (GDSYNC_GID_INDEX, GDSYNC_PORT)"
            )
        }
        libc::ENODEV | libc::EIO => GONE.into(),
        libc::ENOMEM => "the card has no room for this connection: close some".into(),
        libc::EOPNOTSUPP | libc::ENOSYS => format!("the driver of this device does not do {from} to {to}"),
        libc::EPERM | libc::EACCES => format!("the process may not set {attributes}"),
        _ => INTERRUPTED.into(),
    }
}

/// The current `errno`.
pub(crate) fn last_errno() -> i32 {
    std::io::Error::last_os_error().raw_os_error().filter(|&errno| errno != 0).unwrap_or(libc::EIO)
}

/// Error of a call on `subject` that failed with `errno`.
pub(crate) fn failed(name: &'static str, subject: impl Display, call: &Call, errno: i32) -> Error {
    // Some drivers return negative numbers.
    let errno = errno.abs();
    let source = Arc::new(io::Error::from_raw_os_error(errno));
    Error::Verbs { call: name, subject: subject.to_string(), source, advice: advice(call, errno) }
}

/// Error of a call that failed and set `errno`.
pub(crate) fn failed_last(name: &'static str, subject: impl Display, call: &Call) -> Error {
    let errno = io::Error::last_os_error().raw_os_error().filter(|&errno| errno != 0);
    failed(name, subject, call, errno.unwrap_or(libc::EIO))
}

impl fmt::Display for Memlock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(bytes) => write!(f, "{} KiB", bytes / 1024),
            None => f.write_str("unlimited"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOW: Memlock = Memlock(Some(64 << 10));

    fn step(to: QpState) -> Step {
        Step {
            from: QpState::INIT,
            to,
            attributes: "path_mtu 4096, remote v1/...".into(),
            port: 2,
            gid_index: 3,
            peer: Some("PEER".into()),
            asked: vec![Asked { what: "max_dest_rd_atomic", value: 16, most: 16 }],
        }
    }

    #[test]
    fn errno_is_explained_by_cause() {
        use libc::*;
        let node = || Call::Open { node: Some("/dev/infiniband/uverbs3".into()) };
        let register = || Call::Register { len: 4096, memlock: LOW };
        let dma_buf = || Call::RegisterDmaBuf { len: 4096 };
        let gpu = || Call::RegisterGpu { len: 4096 };
        let cq = |entries| Call::CreateCq { entries, most: 100, memlock: LOW };
        let qp = |value| Call::CreateQp {
            asked: vec![Asked { what: "max_send_wr", value, most: 32768 }],
            memlock: LOW,
        };
        let cases: &[(Call, i32, &[&str])] = &[
            (node(), EACCES, &["uverbs3", "chmod a+rw", "--device="]),
            (node(), EPERM, &["uverbs3", "udev"]),
            (node(), ENOENT, &["uverbs3 is not there", "modprobe ib_uverbs"]),
            (node(), ENXIO, &["uverbs3 is not there"]),
            (node(), ENOSYS, &["ib_uverbs", "rdma-core"]),
            (node(), EBUSY, &["try again"]),
            (node(), EMFILE, &["ulimit -n"]),
            (node(), ENFILE, &["fs.file-max"]),
            (node(), ENOMEM, &["RLIMIT_MEMLOCK"]),
            (node(), EIO, &["fatal state"]),
            (node(), EINVAL, &["uverbs3", "ibv_devinfo"]),
            (Call::Open { node: None }, EACCES, &["uverbsN"]),
            (register(), ENOMEM, &["4096 bytes", "64 KiB (RLIMIT_MEMLOCK)", "ulimit -l", "LimitMEMLOCK"]),
            (register(), EAGAIN, &["RLIMIT_MEMLOCK"]),
            (Call::Register { len: 1, memlock: Memlock(None) }, ENOMEM, &["memory is short"]),
            (register(), EFAULT, &["not all mapped", "Gpu::wrap"]),
            (register(), EACCES, &["read-only"]),
            (register(), EPERM, &["read-only"]),
            (register(), EINVAL, &["max_mr_size"]),
            (register(), EOPNOTSUPP, &["does not support it"]),
            (register(), ENOSPC, &["no more keys"]),
            (register(), ENODEV, &["gone"]),
            (register(), EINTR, &["dmesg"]),
            (dma_buf(), EOPNOTSUPP, &["takes no dma-buf", "5.12"]),
            (dma_buf(), ENOTTY, &["takes no dma-buf"]),
            (dma_buf(), EINVAL, &["4096 bytes", "dma-buf"]),
            (dma_buf(), ENOMEM, &["BAR1"]),
            (dma_buf(), EBADF, &["no dma-buf"]),
            (dma_buf(), ENXIO, &["peer-to-peer", "ACS"]),
            (dma_buf(), EFAULT, &["peer-to-peer"]),
            (dma_buf(), EPERM, &["may not"]),
            (dma_buf(), EINTR, &["dmesg"]),
            (gpu(), EFAULT, &["nvidia-peermem", "DOCA-OFED"]),
            (gpu(), ENOMEM, &["BAR1"]),
            (gpu(), EINVAL, &["4096 bytes"]),
            (gpu(), EINTR, &["dmesg"]),
            (cq(101), EINVAL, &["number of entries is 101, the device allows 100"]),
            (cq(100), EINVAL, &["refuses this completion queue", "entries 100"]),
            (cq(100), ENOMEM, &["RLIMIT_MEMLOCK"]),
            (cq(100), EFAULT, &["host memory"]),
            (cq(100), EOPNOTSUPP, &["does not support it"]),
            (qp(32769), EINVAL, &["max_send_wr is 32769, the device allows 32768"]),
            (qp(32769), ENOMEM, &["max_send_wr is 32769"]),
            (qp(1), EINVAL, &["refuses this queue pair", "max_send_wr 1"]),
            (qp(1), ENOMEM, &["64 KiB (RLIMIT_MEMLOCK)"]),
            (qp(1), EFAULT, &["host memory"]),
            (qp(1), ENOSPC, &["destroy a queue pair"]),
            (qp(1), EPERM, &["CAP_NET_RAW"]),
            (qp(1), EINTR, &["dmesg"]),
            (
                Call::Modify(step(QpState::RTR)),
                EINVAL,
                &["INIT to RTR", "4096", "entry 3", "port 2", "GDSYNC_GID_INDEX"],
            ),
            (Call::Modify(step(QpState::RTS)), EINVAL, &["refuses INIT to RTS"]),
            (Call::Modify(step(QpState::RTR)), ETIMEDOUT, &["PEER has no address", "ping", "GID index 3"]),
            (Call::Modify(step(QpState::RTR)), EHOSTUNREACH, &["PEER has no address"]),
            (Call::Modify(step(QpState::RTR)), ENETUNREACH, &["PEER has no address"]),
            (Call::Modify(step(QpState::RTR)), ENOMEM, &["no room"]),
            (Call::Modify(step(QpState::RTR)), ENODEV, &["gone"]),
            (Call::Modify(step(QpState::RTR)), EIO, &["gone"]),
            (Call::Modify(step(QpState::RTR)), EOPNOTSUPP, &["does not do INIT to RTR"]),
            (Call::Modify(step(QpState::RTR)), EPERM, &["may not set"]),
            (Call::Modify(step(QpState::RTR)), EINTR, &["dmesg"]),
            (Call::Other, ENOMEM, &["RLIMIT_MEMLOCK"]),
            (Call::Other, ENOSYS, &["does not support it"]),
            (Call::Other, ENOSPC, &["no more of these"]),
            (Call::Other, EACCES, &["/dev/infiniband"]),
            (Call::Other, EINVAL, &["dmesg"]),
        ];
        for (call, errno, words) in cases {
            let mut text = advice(call, *errno);
            if matches!(call, Call::Open { .. } | Call::Other) && *errno == ENOMEM {
                // The limit of this process.
                text += " (RLIMIT_MEMLOCK)";
            }
            for word in *words {
                assert!(text.contains(word), "{call:?}, errno {errno}: '{text}' lacks '{word}'");
            }
        }
    }

    #[test]
    fn values_above_limits_are_named_first() {
        let mut step = step(QpState::RTR);
        step.asked[0].most = 4;
        let text = advice(&Call::Modify(step), libc::EINVAL);
        assert_eq!(text, "max_dest_rd_atomic is 16, the device allows 4");
    }

    #[test]
    fn error_names_call_subject_errno_and_advice() {
        for errno in [libc::EACCES, -libc::EACCES] {
            let error = failed("ibv_open_device", "mlx5_0", &Call::Open { node: None }, errno);
            let text = error.to_string();
            for word in ["ibv_open_device", "mlx5_0", "Permission denied (os error 13)", "chmod"] {
                assert!(text.contains(word), "'{text}' lacks '{word}'");
            }
            assert!(matches!(error, Error::Verbs { call: "ibv_open_device", .. }));
        }
        // SAFETY: may be called at any time.
        let place = unsafe { libc::__errno_location() };
        // SAFETY: the pointer is valid for this thread.
        unsafe { *place = 0 };
        assert!(failed_last("ibv_alloc_pd", "mlx5_0", &Call::Other).to_string().contains("os error 5"));
    }

    #[test]
    fn error_names_both_ways_to_register_gpu_memory() {
        let text = no_gpu_path("REASON A", "REASON B");
        for word in ["REASON A", "REASON B", "dma-buf", "nvidia-peermem", "modprobe"] {
            assert!(text.contains(word), "{text}");
        }
    }
}
