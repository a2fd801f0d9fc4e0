//! What an `errno` of the driver means and what to do about it (`gdrdrv.c` 2.6, `nv-p2p.c` of the GPU driver).

use std::io;

use super::abi;
use crate::cuda::{Cuda, MemoryKind, PointerInfo};
use crate::error::{Error, Result};
use crate::system::Kernel;
use crate::types::{ENOTSUPP, MappingType, PinFlags};

/// `CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED` of `cuda.h`.
const CU_GPU_DIRECT_RDMA: u32 = 116;

const LOAD: &str = "load the module: `sudo modprobe gdrdrv` (package gdrdrv-dkms), then make its device file";
const MKNOD: &str = "make it: `sudo mknod /dev/gdrdrv c $(awk '$2==\"gdrdrv\"{print $1}' /proc/devices) 0 && \
     sudo chmod 666 /dev/gdrdrv`; in a container pass `--device /dev/gdrdrv` or NVIDIA_GDRCOPY=enabled";
const STALE: &str = "the device file has another module's number: `sudo rm /dev/gdrdrv && sudo mknod /dev/gdrdrv c \
     $(awk '$2==\"gdrdrv\"{print $1}' /proc/devices) 0 && sudo chmod 666 /dev/gdrdrv`";
const ELSEWHERE: &str = "the device file serves the process that opened it; open again after a fork";

/// The error of a failed `open`.
pub(super) fn open(kernel: &dyn Kernel, error: io::Error) -> Error {
    let devices = kernel.read("/proc/devices").ok();
    let major = devices.as_deref().map(major);
    let state = match major {
        None => "/proc/devices unreadable".to_owned(),
        Some(None) => "module not loaded".to_owned(),
        Some(Some(major)) => format!("module loaded with major number {major}"),
    };
    let loaded = !matches!(major, Some(None));
    let fix = match error.raw_os_error() {
        Some(libc::ENOENT | libc::ENXIO | libc::ENODEV) if !loaded => LOAD,
        Some(libc::ENOENT) => MKNOD,
        Some(libc::ENXIO | libc::ENODEV) => STALE,
        Some(libc::EACCES) => {
            "let this user open it: `sudo chmod 666 /dev/gdrdrv`, or join the group that `ls -l /dev/gdrdrv` shows"
        }
        Some(libc::EPERM) => {
            "this container may not use the device: pass `--device /dev/gdrdrv` or NVIDIA_GDRCOPY=enabled"
        }
        Some(libc::EMFILE | libc::ENFILE) => "raise the limit of open files: `ulimit -n`",
        _ => "see the kernel log",
    };
    Error::sys(format!("open {} ({state})", abi::PATH.to_string_lossy()), error, fix)
}

/// The module's number among the character devices of `/proc/devices`.
fn major(devices: &str) -> Option<u32> {
    let (characters, _) = devices.split_once("Block devices:").unwrap_or((devices, ""));
    characters.lines().find_map(|line| line.trim().strip_suffix(" gdrdrv")?.trim().parse().ok())
}

/// The error of a failed version request.
pub(super) fn version(error: io::Error) -> Error {
    match error.raw_os_error() {
        Some(libc::ENOTTY | libc::EINVAL) => too_old(),
        _ => call("GET_VERSION", error),
    }
}

/// The module is too old (32-bit handles), or the device file is of another module.
pub(super) fn too_old() -> Error {
    Error::Unsupported {
        what: "the interface of gdrdrv 2.0".into(),
        by: "/dev/gdrdrv",
        fix: "load gdrdrv 2.5 or newer; if it is loaded, the device file has another module's number: make it anew",
    }
}

/// The refusal of a module that takes mappings away.
pub(super) fn volatile(known: bool) -> Error {
    let what = "memory that stays until it is unpinned".into();
    if known {
        let fix = "reload it with use_persistent_mapping=1; or, if a SIGBUS on access to freed memory is acceptable, \
                   use Gdr::builder().allow_volatile()";
        Error::Unsupported { what, by: "gdrdrv as it is loaded here", fix }
    } else {
        let fix = "load gdrdrv 2.5 or newer; or, if a SIGBUS on access to freed memory is acceptable, \
                   use Gdr::builder().allow_volatile()";
        Error::Unsupported { what, by: "this version of gdrdrv, as far as it reports", fix }
    }
}

/// A refused pin.
#[derive(Debug)]
pub(super) struct RefusedPin<'a> {
    pub(super) addr: u64,
    pub(super) len: usize,
    pub(super) flags: PinFlags,
    /// Whether the module knows `FORCE_PCIE`.
    pub(super) force_pcie: bool,
    /// CUDA and its information about the address.
    pub(super) cuda: Option<(&'a dyn Cuda, PointerInfo)>,
}

impl RefusedPin<'_> {
    pub(super) fn explain(&self, error: io::Error) -> Error {
        let forced = self.flags.contains(PinFlags::FORCE_PCIE);
        let fix = match error.raw_os_error() {
            Some(libc::EINVAL | libc::ENOTTY) if forced && !self.force_pcie => {
                return Error::Unsupported {
                    what: "FORCE_PCIE".into(),
                    by: "this gdrdrv",
                    fix: "pin without it; or load gdrdrv 2.5 or newer, built for driver R570 or newer, with \
                          use_persistent_mapping=1",
                };
            }
            Some(ENOTSUPP | libc::EOPNOTSUPP) if forced => {
                return Error::Unsupported {
                    what: "FORCE_PCIE".into(),
                    by: "the driver of this GPU",
                    fix: "pin without it",
                };
            }
            Some(ENOTSUPP | libc::EOPNOTSUPP) => {
                return Error::Unsupported {
                    what: "memory that stays until it is unpinned".into(),
                    by: "the driver of this GPU (as on MIG and vGPU)",
                    fix: "turn MIG off; or load gdrdrv with use_persistent_mapping=0 and use \
                          Gdr::builder().allow_volatile()",
                };
            }
            Some(libc::EINVAL) => match self.refused_address() {
                Ok(fix) => fix,
                Err(error) => return error,
            },
            Some(libc::ENOMEM) => {
                return Error::Exhausted {
                    what: "PCIe BAR1 space of the GPU",
                    len: self.len,
                    fix: "unpin memory (`nvidia-smi -q -d MEMORY` shows BAR1 use), or enable Resizable BAR in the BIOS",
                };
            }
            Some(libc::EFAULT) => "gdrdrv was built for another NVIDIA driver: build it anew",
            errno => general(errno),
        };
        Error::sys(format!("gdrdrv: pin {} bytes at {:#x}", self.len, self.addr), error, fix)
    }

    /// The GPU driver gives one number for everything that it does not pin.
    fn refused_address(&self) -> Result<&'static str> {
        let Some((cuda, memory)) = self.cuda else {
            return Ok(
                "the address must be that of GPU memory of this process, on a GPU with GPUDirect RDMA \
                       (data-center and RTX professional GPUs, not GeForce)",
            );
        };
        if cuda.device_attribute(memory.device, CU_GPU_DIRECT_RDMA)? == 0 {
            return Err(Error::Unsupported {
                what: "GPUDirect RDMA".into(),
                by: "this class of GPU",
                fix: "use a data-center or RTX professional GPU; GeForce has none",
            });
        }
        let end = memory.base.saturating_add(memory.size as u64);
        Ok(match memory.kind {
            // By this much it may leave the allocation, but not the driver's memory.
            MemoryKind::Malloc if self.addr < memory.base || self.addr + self.len as u64 > end => {
                let (addr, len, base, size) = (self.addr, self.len, memory.base, memory.size);
                return Err(Error::BeyondAllocation { addr, len, base, size });
            }
            MemoryKind::Vmm => "set gpuDirectRDMACapable in the properties of cuMemCreate",
            MemoryKind::Pool => {
                "stream-ordered memory is not pinned by this driver: allocate with cuMemAlloc"
            }
            _ => {
                "see the kernel log; a module that `modinfo gdrdrv` shows to depend on nv-p2p-dummy refuses everything"
            }
        })
    }
}

/// The error of a mapping type that the platform lacks.
pub(super) fn mapping_type(request: MappingType) -> Error {
    let fix = match request {
        MappingType::Cached => "only coherent links (Grace, POWER9) have cached mappings; ask for no type",
        MappingType::WriteCombining => "this platform demands device mappings; ask for no type",
        MappingType::Device => "only platforms that demand them have device mappings; ask for no type",
    };
    request.unsupported("gdrdrv on this platform", fix)
}

/// The error of a failed `mmap`; the caller has checked the pin's state.
pub(super) fn map(len: usize, error: io::Error) -> Error {
    let fix = match error.raw_os_error() {
        Some(libc::EAGAIN) => {
            "the pages have another caching attribute already (PAT); see the kernel log, and boot \
                               without `nopat`"
        }
        Some(libc::ENOMEM) => "too many mappings: raise vm.max_map_count, or the limit of `ulimit -v`",
        errno => general(errno),
    };
    Error::sys(format!("gdrdrv: mmap of {len} bytes"), error, fix)
}

/// The error of any other request.
pub(super) fn call(name: &'static str, error: io::Error) -> Error {
    let fix = general(error.raw_os_error());
    Error::sys(format!("gdrdrv: {name}"), error, fix)
}

fn general(errno: Option<i32>) -> &'static str {
    match errno {
        Some(libc::EACCES) => ELSEWHERE,
        Some(libc::EIO) => {
            "the GPU or the device file is in an error state: see the kernel log, then open again"
        }
        Some(libc::EBUSY) => "the GPU is being reset or is in use: try again",
        Some(libc::ENODEV) => {
            "no NVIDIA driver serves the module (see the kernel log), or the GPU is gone from the bus: see nvidia-smi"
        }
        Some(libc::ENOMEM) => "free system memory",
        _ => "this is not expected of gdrdrv: see the kernel log",
    }
}

/// The error of a dma-buf that was not pinned.
pub(super) fn dma_buf(error: io::Error) -> Error {
    let fix = match error.raw_os_error() {
        Some(ENOTSUPP | libc::EOPNOTSUPP) => {
            "the GPU driver lets no other device at this memory; load the module with dmabuf=0 or use another backend"
        }
        Some(libc::ENOMEM) => {
            "unpin memory (`nvidia-smi -q -d MEMORY` shows BAR1 use), or enable Resizable BAR in the BIOS"
        }
        _ => "see the kernel log",
    };
    Error::sys("gdrdrv: PIN_DMABUF", error, fix)
}
