//! A value that is made at its first need.

use std::sync::OnceLock;

use parking_lot::Mutex;

use crate::error::Result;

/// Made once, by the first caller that needs it and succeeds; a failure is the caller's alone, and the next one tries
/// again.
///
/// A forked child may make the value if its parent had not begun to. If a thread of the parent was at it, the child
/// would wait for a thread that it does not have, so only the process that owns the value may ask for it.
#[derive(Debug)]
pub(crate) struct Late<T> {
    value: OnceLock<T>,
    making: Mutex<()>,
}

impl<T> Late<T> {
    pub(crate) fn new() -> Self {
        Self { value: OnceLock::new(), making: Mutex::new(()) }
    }

    /// The value, if it has been made.
    pub(crate) fn get(&self) -> Option<&T> {
        self.value.get()
    }

    /// The value; made now if it has not been. Callers wait for one that is making it.
    pub(crate) fn get_or_make(&self, make: impl FnOnce() -> Result<T>) -> Result<&T> {
        if let Some(value) = self.get() {
            return Ok(value);
        }
        let _alone = self.making.lock();
        if let Some(value) = self.get() {
            return Ok(value);
        }
        let value = make()?;
        Ok(self.value.get_or_init(|| value))
    }
}
