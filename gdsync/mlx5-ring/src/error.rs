//! Errors of encoding a WQE.

/// Maximum message and SGE length in bytes (1 GiB).
///
/// The field allows 2^31 - 1 and InfiniBand 2^31; 1 GiB is what every device takes (`log_msg_max` 30).
pub const MAX_MESSAGE: u32 = 1 << 30;

/// Why an operation cannot be encoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum WqeError {
    /// More SGEs than the WQE has room for, without empty ones.
    #[error("{got} buffers do not fit in one work request: at most {max} here")]
    TooManySges {
        /// Number of SGEs that are not empty.
        got: usize,
        /// Maximum.
        max: usize,
    },
    /// More inline bytes than the WQE has room for.
    #[error("{len} bytes do not fit inline: at most {max} here; send them from registered memory")]
    InlineTooLong {
        /// Length in bytes.
        len: usize,
        /// Maximum in bytes.
        max: usize,
    },
    /// An SGE exceeds the maximum length.
    #[error("a buffer of {len} bytes is too long: at most {max}; split it")]
    SgeTooLong {
        /// Length in bytes.
        len: u32,
        /// Maximum in bytes.
        max: u32,
    },
    /// The message exceeds the maximum length.
    #[error("a message of {len} bytes is too long: at most {max}; split it", max = MAX_MESSAGE)]
    TotalTooLong {
        /// Length in bytes.
        len: u64,
    },
    /// A read of zero bytes.
    #[error("a read needs a local buffer of at least one byte")]
    ReadNeedsBuffer,
    /// The result buffer of an atomic is not 8 bytes long.
    #[error("the result of an atomic takes 8 bytes, not {len}")]
    AtomicResult {
        /// Length in bytes.
        len: u32,
    },
    /// The QPN has more than 24 bits.
    #[error("{0:#x} is not a QPN: it has more than 24 bits")]
    Qpn(u32),
}
