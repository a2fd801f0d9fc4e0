//! Status codes of the resource manager: `NV_STATUS`, `nvstatuscodes.h` of the open kernel modules 580.142.

/// An `NV_STATUS`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NvStatus(pub(crate) u32);

impl NvStatus {
    pub(crate) const OK: Self = Self(0);
    pub(crate) const BUSY_RETRY: Self = Self(0x03);
    pub(crate) const CARD_NOT_PRESENT: Self = Self(0x05);
    pub(crate) const GPU_IS_LOST: Self = Self(0x0f);
    pub(crate) const GPU_IN_FULLCHIP_RESET: Self = Self(0x10);
    pub(crate) const IN_USE: Self = Self(0x17);
    pub(crate) const INSERT_DUPLICATE_NAME: Self = Self(0x19);
    pub(crate) const INSUFFICIENT_RESOURCES: Self = Self(0x1a);
    pub(crate) const INSUFFICIENT_PERMISSIONS: Self = Self(0x1b);
    pub(crate) const INVALID_ADDRESS: Self = Self(0x1e);
    pub(crate) const INVALID_ARGUMENT: Self = Self(0x1f);
    pub(crate) const INVALID_BASE: Self = Self(0x20);
    pub(crate) const INVALID_CLASS: Self = Self(0x22);
    pub(crate) const INVALID_CLIENT: Self = Self(0x23);
    pub(crate) const INVALID_COMMAND: Self = Self(0x24);
    pub(crate) const INVALID_DEVICE: Self = Self(0x26);
    pub(crate) const INVALID_FLAGS: Self = Self(0x29);
    pub(crate) const INVALID_LIMIT: Self = Self(0x2e);
    pub(crate) const INVALID_OBJECT: Self = Self(0x31);
    pub(crate) const INVALID_OBJECT_HANDLE: Self = Self(0x33);
    pub(crate) const INVALID_OBJECT_PARENT: Self = Self(0x36);
    pub(crate) const INVALID_PARAM_STRUCT: Self = Self(0x3a);
    pub(crate) const INVALID_PARAMETER: Self = Self(0x3b);
    pub(crate) const INVALID_STATE: Self = Self(0x40);
    pub(crate) const NO_MEMORY: Self = Self(0x51);
    pub(crate) const NOT_SUPPORTED: Self = Self(0x56);
    pub(crate) const OBJECT_NOT_FOUND: Self = Self(0x57);
    pub(crate) const OPERATING_SYSTEM: Self = Self(0x59);
    pub(crate) const RESET_REQUIRED: Self = Self(0x62);
    pub(crate) const TIMEOUT: Self = Self(0x65);
    pub(crate) const TIMEOUT_RETRY: Self = Self(0x66);
    pub(crate) const GENERIC: Self = Self(0xffff);

    /// The name without `NV_ERR_`, and what the user can do.
    pub(crate) fn explain(self) -> (&'static str, &'static str) {
        const RETRY: &str = "the driver is busy; try again";
        const LOST: &str = "the GPU must be reset (nvidia-smi -r, or a reboot)";
        const FREED: &str = "the memory may have been freed meanwhile; pin live memory";
        const UNKNOWN: &str =
            "use another backend (GDRCOPY_BACKEND) and report this with the driver's version";
        const REFUSED: &str = "this driver or GPU does not do this; use another backend (GDRCOPY_BACKEND)";
        const MEMORY: &str = "the driver is out of memory; unpin something";
        match self {
            Self::OK => ("OK", ""),
            Self::BUSY_RETRY => ("BUSY_RETRY", RETRY),
            Self::CARD_NOT_PRESENT => ("CARD_NOT_PRESENT", LOST),
            Self::GPU_IS_LOST => ("GPU_IS_LOST", LOST),
            Self::GPU_IN_FULLCHIP_RESET => ("GPU_IN_FULLCHIP_RESET", LOST),
            Self::IN_USE => ("IN_USE", RETRY),
            Self::INSERT_DUPLICATE_NAME => ("INSERT_DUPLICATE_NAME", UNKNOWN),
            Self::INSUFFICIENT_RESOURCES => ("INSUFFICIENT_RESOURCES", MEMORY),
            Self::INSUFFICIENT_PERMISSIONS => (
                "INSUFFICIENT_PERMISSIONS",
                "the memory belongs to a client that does not share it (an MPS server, another user); run without \
                 MPS, as the user that allocated it",
            ),
            Self::INVALID_ADDRESS => ("INVALID_ADDRESS", UNKNOWN),
            Self::INVALID_ARGUMENT => ("INVALID_ARGUMENT", UNKNOWN),
            Self::INVALID_BASE => ("INVALID_BASE", UNKNOWN),
            Self::INVALID_CLASS => ("INVALID_CLASS", REFUSED),
            Self::INVALID_CLIENT => ("INVALID_CLIENT", FREED),
            Self::INVALID_COMMAND => ("INVALID_COMMAND", REFUSED),
            Self::INVALID_DEVICE => ("INVALID_DEVICE", UNKNOWN),
            Self::INVALID_FLAGS => ("INVALID_FLAGS", UNKNOWN),
            Self::INVALID_LIMIT => ("INVALID_LIMIT", UNKNOWN),
            Self::INVALID_OBJECT => ("INVALID_OBJECT", FREED),
            Self::INVALID_OBJECT_HANDLE => ("INVALID_OBJECT_HANDLE", FREED),
            Self::INVALID_OBJECT_PARENT => ("INVALID_OBJECT_PARENT", UNKNOWN),
            Self::INVALID_PARAM_STRUCT => ("INVALID_PARAM_STRUCT", UNKNOWN),
            Self::INVALID_PARAMETER => ("INVALID_PARAMETER", UNKNOWN),
            Self::INVALID_STATE => ("INVALID_STATE", UNKNOWN),
            Self::NO_MEMORY => ("NO_MEMORY", MEMORY),
            Self::NOT_SUPPORTED => ("NOT_SUPPORTED", REFUSED),
            Self::OBJECT_NOT_FOUND => ("OBJECT_NOT_FOUND", FREED),
            Self::OPERATING_SYSTEM => ("OPERATING_SYSTEM", UNKNOWN),
            Self::RESET_REQUIRED => ("RESET_REQUIRED", LOST),
            Self::TIMEOUT => ("TIMEOUT", LOST),
            Self::TIMEOUT_RETRY => ("TIMEOUT_RETRY", RETRY),
            Self::GENERIC => ("GENERIC", UNKNOWN),
            _ => ("see nvstatuscodes.h", UNKNOWN),
        }
    }

    /// Whether the same call may succeed later.
    pub(crate) fn is_transient(self) -> bool {
        matches!(
            self,
            Self::BUSY_RETRY
                | Self::TIMEOUT_RETRY
                | Self::IN_USE
                | Self::INSUFFICIENT_RESOURCES
                | Self::NO_MEMORY
                | Self::OPERATING_SYSTEM
        )
    }
}
