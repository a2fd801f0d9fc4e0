//! The resource manager's structures and numbers, as far as mappings need them.
//!
//! Taken from the headers of NVIDIA's open kernel modules (github.com/NVIDIA/open-gpu-kernel-modules, MIT),
//! version 580.142: `nvos.h`, `class/cl0080.h`, `class/cl2080.h`, `class/clcb33.h`,
//! `ctrl/ctrl0000/ctrl0000gpu.h`, `ctrl/ctrl0000/ctrl0000unix.h`, `ctrl/ctrl2080/ctrl2080gpu.h` and
//! `ctrl/ctrlcb33.h` under `src/common/sdk/nvidia/inc`; `nv_escape.h`, `nv-ioctl.h`, `nv-ioctl-numbers.h` and
//! `nv-unix-nvos-params-wrappers.h` under `src/nvidia/arch/nvalloc/unix/include`.
//!
//! Compiled, the headers of 535.43.02, 535.54.03, 535.104.05, 535.129.03, 535.288.01, 545.29.06, 550.163.01,
//! 555.58.02, 560.35.03, 565.77, 570.211.01, 575.64.05, 580.142, 590.48.01 and 595.45.04 give the same layouts
//! and numbers, but for the last field of [`CcCapabilities`], which came with 550: before, that query is
//! refused. 530 and older have no `paramsSize` in the allocation structure: there the kernel refuses our size
//! with `EINVAL`, before it reads anything. `libcuda` is the same for the open and the proprietary modules of a
//! version, so their interfaces are too.

/// A structure passed to `ioctl`.
///
/// # Safety
/// The type must have the layout that the driver gives to the structure of escape `NUMBER`.
pub(crate) unsafe trait Escape: Sized {
    /// The escape's number.
    const NUMBER: u32;
    /// What the call is for, in errors; also the name of its fault in a simulated driver.
    const NAME: &'static str;
    /// The `ioctl` request: type `'F'`, read and write, size of the structure.
    const REQUEST: u32 = request(Self::NUMBER, size_of::<Self>());

    /// What the resource manager said: `NV_STATUS`, 0 where the structure has none.
    fn status(&self) -> u32 {
        0
    }
}

/// `_IOWR('F', number, size)`.
#[expect(clippy::cast_possible_truncation, reason = "sizes are far below the 14 bits that a request has")]
const fn request(number: u32, size: usize) -> u32 {
    assert!(size < 1 << 14);
    3 << 30 | (size as u32) << 16 | (b'F' as u32) << 8 | number
}

/// Parameters with which an object of a class is allocated.
///
/// # Safety
/// The type must have the layout that the driver gives to the parameters of class `CLASS`, and no pointers.
pub(crate) unsafe trait Class {
    const CLASS: u32;
    const NAME: &'static str;
}

/// Parameters of a control call.
///
/// # Safety
/// The type must have the layout that the driver gives to the parameters of command `COMMAND`, and every
/// pointer in it must be valid.
pub(crate) unsafe trait Control {
    const COMMAND: u32;
    const NAME: &'static str;
}

/// `NVOS64_PARAMETERS`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Alloc {
    pub(crate) root: u32,
    pub(crate) parent: u32,
    /// 0 lets the resource manager choose; the handle on return.
    pub(crate) object: u32,
    pub(crate) class: u32,
    pub(crate) params: u64,
    pub(crate) rights: u64,
    pub(crate) params_size: u32,
    pub(crate) flags: u32,
    pub(crate) status: u32,
}

// SAFETY: see the layout tests.
unsafe impl Escape for Alloc {
    const NUMBER: u32 = 0x2b;
    const NAME: &'static str = "rm alloc";
    fn status(&self) -> u32 {
        self.status
    }
}

/// `NVOS00_PARAMETERS`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Free {
    pub(crate) root: u32,
    pub(crate) parent: u32,
    pub(crate) object: u32,
    pub(crate) status: u32,
}

// SAFETY: see the layout tests.
unsafe impl Escape for Free {
    const NUMBER: u32 = 0x29;
    const NAME: &'static str = "rm free";
    fn status(&self) -> u32 {
        self.status
    }
}

/// `NVOS54_PARAMETERS`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct ControlCall {
    pub(crate) client: u32,
    pub(crate) object: u32,
    pub(crate) command: u32,
    pub(crate) flags: u32,
    pub(crate) params: u64,
    pub(crate) params_size: u32,
    pub(crate) status: u32,
}

// SAFETY: see the layout tests.
unsafe impl Escape for ControlCall {
    const NUMBER: u32 = 0x2a;
    const NAME: &'static str = "rm control";
    fn status(&self) -> u32 {
        self.status
    }
}

/// `NVOS55_PARAMETERS`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Dup {
    pub(crate) client: u32,
    pub(crate) parent: u32,
    /// 0 lets the resource manager choose; the handle on return.
    pub(crate) object: u32,
    pub(crate) source_client: u32,
    pub(crate) source_object: u32,
    pub(crate) flags: u32,
    pub(crate) status: u32,
}

// SAFETY: see the layout tests.
unsafe impl Escape for Dup {
    const NUMBER: u32 = 0x34;
    const NAME: &'static str = "rm dup";
    fn status(&self) -> u32 {
        self.status
    }
}

/// `nv_ioctl_nvos33_parameters_with_fd`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Map {
    pub(crate) client: u32,
    /// A device or subdevice.
    pub(crate) device: u32,
    pub(crate) memory: u32,
    pub(crate) offset: u64,
    pub(crate) length: u64,
    /// On return what [`Unmap`] wants to see again: the bus address.
    pub(crate) linear: u64,
    pub(crate) status: u32,
    pub(crate) flags: u32,
    /// An open `/dev/nvidiaN` without a mapping; its `mmap` at offset 0 gives the range.
    pub(crate) fd: i32,
}

impl Map {
    /// `NVOS33_FLAGS_MAPPING_DIRECT`, `NVOS33_FLAGS_CACHING_TYPE_DEFAULT`.
    pub(crate) const FLAGS: u32 = 1 << 15 | 6 << 23;
}

// SAFETY: see the layout tests.
unsafe impl Escape for Map {
    const NUMBER: u32 = 0x4e;
    const NAME: &'static str = "rm map";
    fn status(&self) -> u32 {
        self.status
    }
}

/// `NVOS34_PARAMETERS`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Unmap {
    pub(crate) client: u32,
    pub(crate) device: u32,
    pub(crate) memory: u32,
    pub(crate) linear: u64,
    pub(crate) status: u32,
    pub(crate) flags: u32,
}

// SAFETY: see the layout tests.
unsafe impl Escape for Unmap {
    const NUMBER: u32 = 0x4f;
    const NAME: &'static str = "rm unmap";
    fn status(&self) -> u32 {
        self.status
    }
}

/// `nv_ioctl_register_fd_t`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct RegisterFd {
    pub(crate) control_fd: i32,
}

// SAFETY: see the layout tests.
unsafe impl Escape for RegisterFd {
    const NUMBER: u32 = 201;
    const NAME: &'static str = "rm register fd";
}

/// `NV_MAX_DEVICES`.
pub(crate) const MAX_DEVICES: usize = 32;

/// `nv_ioctl_card_info_t`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Card {
    pub(crate) valid: u8,
    pub(crate) domain: u32,
    pub(crate) bus: u8,
    pub(crate) slot: u8,
    /// Always 0: the driver does not fill it in.
    pub(crate) function: u8,
    pub(crate) vendor: u16,
    pub(crate) device: u16,
    pub(crate) gpu_id: u32,
    pub(crate) interrupt: u16,
    pub(crate) registers: u64,
    pub(crate) registers_size: u64,
    pub(crate) framebuffer: u64,
    pub(crate) framebuffer_size: u64,
    /// The N of `/dev/nvidiaN`.
    pub(crate) minor: u32,
    pub(crate) name: [u8; 10],
}

/// The argument of `NV_ESC_CARD_INFO`: a table of all GPUs of the machine.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Cards(pub(crate) [Card; MAX_DEVICES]);

// SAFETY: see the layout tests.
unsafe impl Escape for Cards {
    const NUMBER: u32 = 200;
    const NAME: &'static str = "rm card info";
}

/// Allocation of a root client, `NV01_ROOT_CLIENT`; it has no parameters.
pub(crate) const ROOT_CLIENT: u32 = 0x41;

/// `NV0080_ALLOC_PARAMETERS`: a device.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Device {
    pub(crate) instance: u32,
    pub(crate) client_share: u32,
    pub(crate) target_client: u32,
    pub(crate) target_device: u32,
    pub(crate) flags: u32,
    pub(crate) va_size: u64,
    pub(crate) va_start: u64,
    pub(crate) va_limit: u64,
    pub(crate) va_mode: u32,
}

// SAFETY: see the layout tests.
unsafe impl Class for Device {
    const CLASS: u32 = 0x80;
    const NAME: &'static str = "rm alloc device";
}

/// `NV2080_ALLOC_PARAMETERS`: a subdevice.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Subdevice {
    pub(crate) instance: u32,
}

// SAFETY: see the layout tests.
unsafe impl Class for Subdevice {
    const CLASS: u32 = 0x2080;
    const NAME: &'static str = "rm alloc subdevice";
}

/// `NV_CONFIDENTIAL_COMPUTE_ALLOC_PARAMS`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct ConfidentialCompute {
    pub(crate) client: u32,
}

// SAFETY: see the layout tests.
unsafe impl Class for ConfidentialCompute {
    const CLASS: u32 = 0xcb33;
    const NAME: &'static str = "rm alloc confidential compute";
}

/// `NV0000_CTRL_GPU_GET_ID_INFO_V2_PARAMS`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct IdInfo {
    pub(crate) gpu_id: u32,
    pub(crate) flags: u32,
    pub(crate) device: u32,
    pub(crate) subdevice: u32,
    pub(crate) sli: u32,
    pub(crate) board: u32,
    pub(crate) gpu: u32,
    pub(crate) numa: i32,
}

// SAFETY: see the layout tests; no pointers.
unsafe impl Control for IdInfo {
    const COMMAND: u32 = 0x205;
    const NAME: &'static str = "rm id info";
}

/// `NV0000_CTRL_OS_UNIX_IMPORT_OBJECT_FROM_FD_PARAMS`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Import {
    pub(crate) fd: i32,
    /// [`Import::RM`].
    pub(crate) kind: u32,
    pub(crate) device: u32,
    pub(crate) parent: u32,
    /// 0 lets the resource manager choose; the handle on return.
    pub(crate) object: u32,
}

impl Import {
    /// `NV0000_CTRL_OS_UNIX_EXPORT_OBJECT_TYPE_RM`.
    pub(crate) const RM: u32 = 1;
}

// SAFETY: see the layout tests; no pointers.
unsafe impl Control for Import {
    const COMMAND: u32 = 0x3d06;
    const NAME: &'static str = "rm import";
}

/// `NV2080_CTRL_GPU_INFO`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct GpuInfoEntry {
    pub(crate) index: u32,
    pub(crate) data: u32,
}

impl GpuInfoEntry {
    /// `NV2080_CTRL_GPU_INFO_INDEX_GPU_SMC_MODE`: multi-instance mode.
    pub(crate) const SMC_MODE: u32 = 0x2a;
    /// `NV2080_CTRL_GPU_INFO_GPU_SMC_MODE_ENABLED`.
    pub(crate) const SMC_ENABLED: u32 = 1;
}

/// `NV2080_CTRL_GPU_GET_INFO_PARAMS`. Its successor's size changes from version to version.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct GpuInfoQuery {
    pub(crate) entries: u32,
    pub(crate) list: u64,
}

// SAFETY: see the layout tests; who fills in `list` vouches for it.
unsafe impl Control for GpuInfoQuery {
    const COMMAND: u32 = 0x2080_0101;
    const NAME: &'static str = "rm gpu info";
}

/// `NV_CONF_COMPUTE_CTRL_CMD_SYSTEM_GET_CAPABILITIES_PARAMS`, from 550 on.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct CcCapabilities {
    pub(crate) cpu: u8,
    pub(crate) gpus: u8,
    pub(crate) environment: u8,
    /// 0: disabled.
    pub(crate) feature: u8,
    pub(crate) dev_tools: u8,
    pub(crate) multi_gpu: u8,
}

// SAFETY: see the layout tests; no pointers.
unsafe impl Control for CcCapabilities {
    const COMMAND: u32 = 0xcb33_0101;
    const NAME: &'static str = "rm confidential compute";
}
