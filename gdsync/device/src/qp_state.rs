//! The states of a queue pair.

use std::fmt;

/// State of a queue pair (`enum ibv_qp_state`).
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
#[repr(transparent)]
pub struct QpState(pub u8);

impl QpState {
    /// Initial state: nothing may be posted.
    pub const RESET: Self = Self(0);
    /// Receives may be posted.
    pub const INIT: Self = Self(1);
    /// Ready to receive.
    pub const RTR: Self = Self(2);
    /// Ready to send.
    pub const RTS: Self = Self(3);
    /// A datagram could not be sent: sends complete with a flush error, receives go on.
    pub const SQE: Self = Self(5);
    /// Everything posted completes with a flush error.
    pub const ERR: Self = Self(6);
}

impl fmt::Display for QpState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match *self {
            Self::RESET => "RESET",
            Self::INIT => "INIT",
            Self::RTR => "RTR",
            Self::RTS => "RTS",
            Self::SQE => "SQE",
            Self::ERR => "ERR",
            Self(other) => return write!(f, "state {other}"),
        })
    }
}

impl fmt::Debug for QpState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}
