//! Pins and their handles belong to the process that made them.

use crate::error::{Error, Result};

/// The process that owns something.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Owner(u32);

impl Owner {
    pub(crate) fn this_process() -> Self {
        Self(std::process::id())
    }

    /// Whether the caller is the owner, and not a child forked since.
    pub(crate) fn is_caller(self) -> bool {
        self == Self::this_process()
    }

    /// Refuses a child forked since.
    pub(crate) fn check(self) -> Result<()> {
        let caller = Self::this_process();
        if self == caller { Ok(()) } else { Err(Error::OtherProcess { owner: self.0, caller: caller.0 }) }
    }
}
