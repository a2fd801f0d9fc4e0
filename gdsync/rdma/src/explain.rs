//! Explains failed libibverbs calls and how to fix the cause.

use std::fmt::{self, Display};
use std::io;
use std::path::PathBuf;
use std::sync::Arc;

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
    pub(crate) from: &'static str,
    pub(crate) to: &'static str,
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
            let gid = if *to == "RTR" {
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
mod tests;
