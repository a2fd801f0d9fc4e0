//! Objects belong to the process that created them. A forked child has neither the threads nor the rings of its parent, but shares files
//! and devices with it: there calls are refused, and dropped objects are leaked.

use std::mem;
use std::sync::Arc;
use std::thread::JoinHandle;

use gdrcopy::fork::Owner;

use crate::error::{Error, Result};

/// The process that created an object.
#[derive(Clone, Copy, Debug)]
pub struct ForkGuard(Owner);

impl Default for ForkGuard {
    fn default() -> Self {
        Self(Owner::this_process())
    }
}

impl ForkGuard {
    /// Whether the caller is that process, not a forked child.
    #[inline]
    pub fn is_here(self) -> bool {
        self.0.is_caller()
    }

    /// Checks that the caller is that process.
    ///
    /// # Errors
    /// [`Error::OtherProcess`] in a forked child.
    #[inline]
    pub fn check(self) -> Result<()> {
        if self.is_here() { Ok(()) } else { self.refuse() }
    }

    #[cold]
    fn refuse(self) -> Result<()> {
        match self.0.check() {
            Ok(()) => Ok(()),
            Err(gdrcopy::Error::OtherProcess { owner, caller }) => Err(Error::OtherProcess { owner, caller }),
            Err(other) => Err(Error::cuda("asking which process this is")(other)),
        }
    }

    /// For drops of objects with a thread: takes the thread to be joined, if there is one. In a child the handle is leaked: dropping it
    /// would detach whichever thread of the child has the same number.
    pub fn take_thread(self, thread: &mut Option<JoinHandle<()>>) -> Option<JoinHandle<()>> {
        let thread = thread.take();
        if self.is_here() {
            return thread;
        }
        mem::forget(thread);
        None
    }

    /// For drops of objects that hold `kept`: whether to run the drop. In a child `kept` is leaked.
    pub fn may_end<T: ?Sized>(self, kept: &Arc<T>) -> bool {
        let here = self.is_here();
        if !here {
            mem::forget(kept.clone());
        }
        here
    }
}
