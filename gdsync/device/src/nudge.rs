//! How a device makes a GPU look again at what its streams wait for.

use std::fmt;

/// Prods a GPU to look at what its streams wait for.
pub trait GpuNudge: Send + Sync + fmt::Debug {
    /// Called after a completion was written, without locks.
    fn nudge(&self);
}
