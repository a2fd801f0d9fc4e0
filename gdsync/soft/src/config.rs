//! Configuration of a software HCA.

use std::net::IpAddr;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use gdsync_device::copy_engine::{COPY_LIMIT, CopyEngine};
use gdsync_device::env::variable;
use gdsync_device::error::{Error, Result};
use gdsync_device::{FaultPlan, Gid};

/// Default of [`SoftHcaConfig::by_reference`]. On an H200, the CPU reads 32 KiB of GPU memory in 44 us and writes them
/// in 1.3 us; a copy engine takes 10 us, mostly startup.
const BY_REFERENCE: usize = 32 << 10;
/// Region indices have 24 bits in a key; the first 1024 are reserved.
pub(crate) const MAX_REGIONS: usize = (1 << 24) - 1024;
/// A sum with the present time must not overflow.
const MAX_COPY_LIMIT: Duration = Duration::from_secs(86400);

/// Configuration of a software HCA.
#[derive(Clone, Debug)]
pub struct SoftHcaConfig {
    /// Reports driver mistakes that a card punishes: doorbell before record, wrong owner bits, bad signature, reserved
    /// bits.
    pub strict: bool,
    /// Faults injected from the start.
    pub faults: FaultPlan,
    /// Minimum bytes of a GPU payload that the receiver's copy engine fetches by reference (default 32 KiB; see [the
    /// module](super)).
    pub by_reference: usize,
    /// Which host payloads the receiver reads by cross-memory attach.
    pub cma: CmaPolicy,
    /// After this long a copy of a copy engine is abandoned and its message fails; its memory is kept, as it may still happen (at most a day;
    /// default 10 s).
    pub copy_limit: Duration,
    /// Maximum number of memory regions, at most 2^24 - 1024 (the default).
    pub max_regions: usize,
    /// Replaces CUDA's copy engines, for tests.
    pub copy_engine: Option<Arc<dyn CopyEngine>>,
    /// The GID, which no other HCA of the host may have; a random one by default.
    pub gid: Option<Gid>,
    /// Links go over TCP from this address of the machine, also to other hosts; see [`tcp_address`](crate::tcp_address). `None`, the
    /// default: through shared memory.
    pub tcp: Option<IpAddr>,
    /// With [`SoftHcaConfig::tcp`]: the provider of libfabric that carries the packets, as `PROVIDER` or `PROVIDER/DOMAIN`; the TCP
    /// connections only tell the end of a peer then.
    pub fabric: Option<String>,
}

impl Default for SoftHcaConfig {
    fn default() -> Self {
        let faults = FaultPlan::default();
        let (by_reference, cma) = (BY_REFERENCE, CmaPolicy::default());
        Self {
            strict: false,
            faults,
            by_reference,
            cma,
            copy_limit: COPY_LIMIT,
            max_regions: MAX_REGIONS,
            copy_engine: None,
            gid: None,
            tcp: None,
            fabric: None,
        }
    }
}

impl SoftHcaConfig {
    pub(crate) fn copy_limit(&self) -> Duration {
        self.copy_limit.min(MAX_COPY_LIMIT)
    }

    /// Reads `GDSYNC_STRICT=1`, `GDSYNC_FAULTS` (see [`FaultPlan`]), `GDSYNC_BY_REFERENCE=bytes` and `GDSYNC_CMA` (see
    /// [`CmaPolicy`]).
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a value that does not parse.
    pub fn from_env() -> Result<Self> {
        let strict = match variable("GDSYNC_STRICT").as_deref() {
            None | Some("0") => false,
            Some("1") => true,
            Some(other) => return Err(Error::invalid("GDSYNC_STRICT", format!("'{other}'"), "0 or 1")),
        };
        let text = variable("GDSYNC_FAULTS").unwrap_or_default();
        let faults = text.parse().map_err(|error| match error {
            Error::InvalidArgument { what, value, expected } => {
                Error::invalid("GDSYNC_FAULTS", format!("'{text}', where {what} is {value}"), expected)
            }
            other => other,
        })?;
        let by_reference = match variable("GDSYNC_BY_REFERENCE") {
            None => BY_REFERENCE,
            Some(text) => text.parse().map_err(|_| {
                Error::invalid("GDSYNC_BY_REFERENCE", format!("'{text}'"), "a number of bytes")
            })?,
        };
        let cma = variable("GDSYNC_CMA").map_or(Ok(CmaPolicy::default()), |text| text.parse())?;
        Ok(Self { strict, faults, by_reference, cma, ..Self::default() })
    }
}

/// From this length on, one kernel copy is faster than two copies through shared memory.
const THRESHOLD: usize = 64 << 10;

/// Which single-buffer host payloads the receiver reads with `process_vm_readv` (one copy); others go through shared
/// memory (two copies, pipelined). Where the kernel denies the read, all payloads are sent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum CmaPolicy {
    /// 64 KiB and more.
    #[default]
    Auto,
    /// This many bytes and more.
    From(usize),
    /// None.
    Never,
}

impl CmaPolicy {
    /// Minimum length in bytes.
    pub(crate) fn threshold(self) -> Option<usize> {
        match self {
            Self::Auto => Some(THRESHOLD),
            Self::From(bytes) => Some(bytes),
            Self::Never => None,
        }
    }
}

/// `auto`, `never`, or a number of bytes.
impl FromStr for CmaPolicy {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        match text {
            "auto" => Ok(Self::Auto),
            "never" => Ok(Self::Never),
            _ => text.parse().map(Self::From).map_err(|_| {
                Error::invalid("GDSYNC_CMA", format!("'{text}'"), "auto, never, or a number of bytes")
            }),
        }
    }
}
