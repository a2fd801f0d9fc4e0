//! Objects belong to the process that created them. A forked child has neither the threads nor the rings of its parent, but shares files
//! and devices with it: there calls are refused, and dropped objects are leaked.

use std::sync::Arc;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::thread::JoinHandle;
use std::{mem, ptr};

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

/// A static value of each process, made by its first use. A forked child makes one of its own, since a thread of the parent may have
/// locked the parent's for ever. It is never freed: threads may use it until the process ends.
#[derive(Debug)]
pub struct PerProcess<T>(AtomicPtr<(ForkGuard, T)>);

impl<T> Default for PerProcess<T> {
    fn default() -> Self {
        Self::new()
    }
}

impl<T> PerProcess<T> {
    /// Makes nothing yet.
    #[must_use]
    pub const fn new() -> Self {
        Self(AtomicPtr::new(ptr::null_mut()))
    }
}

impl<T: Send + Sync> PerProcess<T> {
    /// The value of this process; `make` makes the first one.
    ///
    /// # Errors
    /// Those of `make`.
    pub fn get_or_try<E>(&self, make: impl Fn() -> std::result::Result<T, E>) -> std::result::Result<&T, E> {
        loop {
            let known = self.0.load(Ordering::Acquire);
            // SAFETY: null, or a box that is never freed, published with Release; no other reference to it is exclusive.
            if let Some((_, value)) = unsafe { known.as_ref() }.filter(|(guard, _)| guard.is_here()) {
                return Ok(value);
            }
            let new = Box::into_raw(Box::new((ForkGuard::default(), make()?)));
            if self.0.compare_exchange(known, new, Ordering::AcqRel, Ordering::Acquire).is_err() {
                // SAFETY: it comes from `into_raw` above and was not published.
                drop(unsafe { Box::from_raw(new) });
            }
        }
    }
}

impl<T: Send + Sync + Default> PerProcess<T> {
    /// The value of this process, at first the default one.
    pub fn get(&self) -> &T {
        let Ok(value) = self.get_or_try(|| Ok::<_, std::convert::Infallible>(T::default()));
        value
    }
}
