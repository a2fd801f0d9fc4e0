//! What was made before a process forked belongs to the parent. The child has neither its threads nor its rings, and shares
//! files and devices with it: there calls are refused, and what is dropped is left alone.

use std::mem;
use std::sync::Arc;
use std::thread::JoinHandle;

use gdrcopy::fork::Owner;

use crate::error::{Error, Result};

/// The process that made something.
#[derive(Clone, Copy, Debug)]
pub struct ForkGuard(Owner);

impl Default for ForkGuard {
    fn default() -> Self {
        Self(Owner::this_process())
    }
}

impl ForkGuard {
    /// Whether this is the process, and not a child forked since.
    #[inline]
    pub fn is_here(self) -> bool {
        self.0.is_caller()
    }

    /// Refuses a child.
    #[inline]
    pub fn check(self) -> Result<()> {
        match self.0.check() {
            Ok(()) => Ok(()),
            Err(gdrcopy::Error::OtherProcess { owner, caller }) => Err(Error::OtherProcess { owner, caller }),
            Err(other) => Err(Error::cuda("asking which process this is")(other)),
        }
    }

    /// For the drop of what has a thread: takes the thread to be joined, if there is one. In a child there is none, and its handle
    /// is not dropped either: that would detach the thread of the child that has its number now.
    pub fn take_thread(self, thread: &mut Option<JoinHandle<()>>) -> Option<JoinHandle<()>> {
        let thread = thread.take();
        if self.is_here() {
            return thread;
        }
        mem::forget(thread);
        None
    }

    /// For the drop of something that holds on to `kept`: whether to go about it. In a child `kept` then outlives it.
    pub fn may_end<T: ?Sized>(self, free_list: &Arc<T>) -> bool {
        let here = self.is_here();
        if !here {
            mem::forget(free_list.clone());
        }
        here
    }
}
