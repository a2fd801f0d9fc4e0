//! The resource manager's structures and numbers, as far as mappings need them.
//!
//! Taken from the headers of NVIDIA's open kernel modules (github.com/NVIDIA/open-gpu-kernel-modules, MIT),
//! version 580.142: `nvos.h`, `class/cl0080.h`, `class/cl2080.h`, `class/clcb33.h`,
//! `ctrl/ctrl0000/ctrl0000gpu.h`, `ctrl/ctrl2080/ctrl2080gpu.h` and `ctrl/ctrlcb33.h` under `src/common/sdk/nvidia/inc`; `nv_escape.h`, `nv-ioctl.h`, `nv-ioctl-numbers.h` and
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
    const NUMBER: u8;
    /// What the call is for, in errors; also the name of its fault in a simulated driver.
    const NAME: &'static str;
    /// The `ioctl` request: type `'F'`, read and write, size of the structure.
    const REQUEST: u32 = rustix::ioctl::opcode::read_write::<Self>(b'F', Self::NUMBER) as u32;

    /// What the resource manager said: `NV_STATUS`, 0 where the structure has none.
    fn status(&self) -> u32 {
        0
    }
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

/// Declares structures of the driver, each with its trait, number, name, and `status` if it returns one.
macro_rules! structures {
    (@implement $name:ident Escape $number:literal $text:literal $($status:ident)?) => {
        // SAFETY: see the layout tests.
        unsafe impl Escape for $name {
            const NUMBER: u8 = $number;
            const NAME: &'static str = $text;
            $(fn status(&self) -> u32 {
                self.$status
            })?
        }
    };
    (@implement $name:ident Class $number:literal $text:literal) => {
        // SAFETY: see the layout tests; no pointers.
        unsafe impl Class for $name {
            const CLASS: u32 = $number;
            const NAME: &'static str = $text;
        }
    };
    (@implement $name:ident Control $number:literal $text:literal) => {
        // SAFETY: see the layout tests; whoever fills in `list` of `GpuInfoQuery` guarantees that pointer.
        unsafe impl Control for $name {
            const COMMAND: u32 = $number;
            const NAME: &'static str = $text;
        }
    };
    ($(
        $(#[$meta:meta])*
        $name:ident: $kind:ident $number:literal $text:literal $($status:ident)? {
            $($(#[$inner:meta])* $field:ident: $type:ty),* $(,)?
        }
    )*) => {$(
        $(#[$meta])*
        #[repr(C)]
        #[derive(Clone, Copy, Debug, Default)]
        pub(crate) struct $name {
            $($(#[$inner])* pub(crate) $field: $type,)*
        }

        structures!(@implement $name $kind $number $text $($status)?);
    )*};
}

structures! {
    /// `NVOS64_PARAMETERS`.
    Alloc: Escape 0x2b "rm alloc" status {
        root: u32,
        parent: u32,
        /// 0 lets the resource manager choose; the handle on return.
        object: u32,
        class: u32,
        params: u64,
        rights: u64,
        params_size: u32,
        flags: u32,
        status: u32,
    }

    /// `NVOS00_PARAMETERS`.
    Free: Escape 0x29 "rm free" status {
        root: u32, parent: u32, object: u32, status: u32,
    }

    /// `NVOS54_PARAMETERS`.
    ControlCall: Escape 0x2a "rm control" status {
        client: u32, object: u32, command: u32, flags: u32, params: u64, params_size: u32, status: u32,
    }

    /// `NVOS55_PARAMETERS`.
    Dup: Escape 0x34 "rm dup" status {
        client: u32,
        parent: u32,
        /// 0 lets the resource manager choose; the handle on return.
        object: u32,
        source_client: u32,
        source_object: u32,
        flags: u32,
        status: u32,
    }

    /// `nv_ioctl_nvos33_parameters_with_fd`.
    Map: Escape 0x4e "rm map" status {
        client: u32,
        /// A device or subdevice.
        device: u32,
        memory: u32,
        offset: u64,
        length: u64,
        /// On return what [`Unmap`] wants to see again: the bus address.
        linear: u64,
        status: u32,
        flags: u32,
        /// An open `/dev/nvidiaN` without a mapping; its `mmap` at offset 0 gives the range.
        fd: i32,
    }

    /// `NVOS34_PARAMETERS`.
    Unmap: Escape 0x4f "rm unmap" status {
        client: u32, device: u32, memory: u32, linear: u64, status: u32, flags: u32,
    }

    /// `nv_ioctl_register_fd_t`.
    RegisterFd: Escape 201 "rm register fd" {
        control_fd: i32,
    }

    /// `NV0080_ALLOC_PARAMETERS`: a device.
    Device: Class 0x80 "rm alloc device" {
        instance: u32, client_share: u32, target_client: u32, target_device: u32, flags: u32, va_size: u64,
        va_start: u64, va_limit: u64, va_mode: u32,
    }

    /// `NV2080_ALLOC_PARAMETERS`: a subdevice.
    Subdevice: Class 0x2080 "rm alloc subdevice" {
        instance: u32,
    }

    /// `NV_CONFIDENTIAL_COMPUTE_ALLOC_PARAMS`.
    ConfidentialCompute: Class 0xcb33 "rm alloc confidential compute" {
        client: u32,
    }

    /// `NV0000_CTRL_GPU_GET_ID_INFO_V2_PARAMS`.
    IdInfo: Control 0x205 "rm id info" {
        gpu_id: u32, flags: u32, device: u32, subdevice: u32, sli: u32, board: u32, gpu: u32, numa: i32,
    }

    /// `NV2080_CTRL_GPU_GET_INFO_PARAMS`. Its successor's size changes from version to version.
    GpuInfoQuery: Control 0x2080_0101 "rm gpu info" {
        entries: u32, list: u64,
    }

    /// `NV_CONF_COMPUTE_CTRL_CMD_SYSTEM_GET_CAPABILITIES_PARAMS`, from 550 on.
    CcCapabilities: Control 0xcb33_0101 "rm confidential compute" {
        cpu: u8,
        gpus: u8,
        environment: u8,
        /// 0: disabled.
        feature: u8,
        dev_tools: u8,
        multi_gpu: u8,
    }
}

impl Map {
    /// `NVOS33_FLAGS_MAPPING_DIRECT`, `NVOS33_FLAGS_CACHING_TYPE_DEFAULT`.
    pub(crate) const FLAGS: u32 = 1 << 15 | 6 << 23;
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
    const NUMBER: u8 = 200;
    const NAME: &'static str = "rm card info";
}

/// Allocation of a root client, `NV01_ROOT_CLIENT`; it has no parameters.
pub(crate) const ROOT_CLIENT: u32 = 0x41;

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

/// A status of the resource manager: `NV_STATUS` of `nvstatuscodes.h`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NvStatus(pub(crate) u32);

const RETRY: &str = "the driver is busy; try again";
const LOST: &str = "the GPU must be reset (nvidia-smi -r, or a reboot)";
const FREED: &str = "the memory may have been freed meanwhile; pin live memory";
const UNKNOWN: &str = "use another backend (GDRCOPY_BACKEND) and report this with the driver's version";
const REFUSED: &str = "this driver or GPU does not do this; use another backend (GDRCOPY_BACKEND)";
const MEMORY: &str = "the driver is out of memory; unpin something";
const NOT_SHARED: &str = "the memory belongs to a client that does not share it (an MPS server, another user); run without \
     MPS, as the user that allocated it";

/// Declares the statuses, each with its number and what the user can do.
macro_rules! statuses {
    ($($name:ident = $number:literal, $fix:expr;)*) => {
        impl NvStatus {
            $(pub(crate) const $name: Self = Self($number);)*

            /// The name without `NV_ERR_`, and what the user can do.
            pub(crate) fn explain(self) -> (&'static str, &'static str) {
                match self {
                    $(Self::$name => (stringify!($name), $fix),)*
                    _ => ("see nvstatuscodes.h", UNKNOWN),
                }
            }
        }
    };
}

statuses! {
    OK = 0, "";
    BUSY_RETRY = 0x03, RETRY;
    CARD_NOT_PRESENT = 0x05, LOST;
    GPU_IS_LOST = 0x0f, LOST;
    GPU_IN_FULLCHIP_RESET = 0x10, LOST;
    IN_USE = 0x17, RETRY;
    INSERT_DUPLICATE_NAME = 0x19, UNKNOWN;
    INSUFFICIENT_RESOURCES = 0x1a, MEMORY;
    INSUFFICIENT_PERMISSIONS = 0x1b, NOT_SHARED;
    INVALID_ADDRESS = 0x1e, UNKNOWN;
    INVALID_ARGUMENT = 0x1f, UNKNOWN;
    INVALID_BASE = 0x20, UNKNOWN;
    INVALID_CLASS = 0x22, REFUSED;
    INVALID_CLIENT = 0x23, FREED;
    INVALID_COMMAND = 0x24, REFUSED;
    INVALID_DEVICE = 0x26, UNKNOWN;
    INVALID_FLAGS = 0x29, UNKNOWN;
    INVALID_LIMIT = 0x2e, UNKNOWN;
    INVALID_OBJECT = 0x31, FREED;
    INVALID_OBJECT_HANDLE = 0x33, FREED;
    INVALID_OBJECT_PARENT = 0x36, UNKNOWN;
    INVALID_PARAM_STRUCT = 0x3a, UNKNOWN;
    INVALID_PARAMETER = 0x3b, UNKNOWN;
    INVALID_STATE = 0x40, UNKNOWN;
    NO_MEMORY = 0x51, MEMORY;
    NOT_SUPPORTED = 0x56, REFUSED;
    OBJECT_NOT_FOUND = 0x57, FREED;
    OPERATING_SYSTEM = 0x59, UNKNOWN;
    RESET_REQUIRED = 0x62, LOST;
    TIMEOUT = 0x65, LOST;
    TIMEOUT_RETRY = 0x66, RETRY;
    GENERIC = 0xffff, UNKNOWN;
}
