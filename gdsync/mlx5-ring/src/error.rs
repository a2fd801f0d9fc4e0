//! Why an operation has no WQE.

/// The longest message, `MAX_MESSAGE`: stated here because the segments use these errors.
const MAX_MESSAGE: u32 = 1 << 30;

/// Why an operation has no WQE.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum WqeError {
    /// More buffers than the WQE has room for; empty ones are not counted.
    #[error("{got} buffers do not fit in one work request: at most {max} here")]
    TooManySges {
        /// Buffers that are not empty.
        got: usize,
        /// Most that fit.
        max: usize,
    },
    /// More inline bytes than the WQE has room for.
    #[error("{len} bytes do not fit inline: at most {max} here; send them from registered memory")]
    InlineTooLong {
        /// Length in bytes.
        len: usize,
        /// Longest that fits.
        max: usize,
    },
    /// A buffer is longer than one entry may be.
    #[error("a buffer of {len} bytes is too long: at most {max}; split it")]
    SgeTooLong {
        /// Length in bytes.
        len: u32,
        /// Longest that is allowed.
        max: u32,
    },
    /// The buffers together are longer than a message may be.
    #[error("a message of {len} bytes is too long: at most {max}; split it", max = MAX_MESSAGE)]
    TotalTooLong {
        /// Length in bytes.
        len: u64,
    },
    /// A read of no bytes.
    #[error("a read needs a local buffer of at least one byte")]
    ReadNeedsBuffer,
    /// The result buffer of an atomic has the wrong length.
    #[error("the result of an atomic takes 8 bytes, not {len}")]
    AtomicResult {
        /// Length in bytes.
        len: u32,
    },
    /// The number of the queue pair has more than 24 bits.
    #[error("{0:#x} is no queue pair number: it has more than 24 bits")]
    Qpn(u32),
}
