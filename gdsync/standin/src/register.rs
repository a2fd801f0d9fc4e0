//! Doorbell pages. As those of libmlx5, they stay mapped when nobody uses them: CUDA may know them longer than their user did.

use std::ffi::c_int;

use gdsync::memory::{Memory, Word64, host_page};
use parking_lot::Mutex;

/// Bytes of a doorbell page of the card, of which a page of the host may have several.
const UAR: usize = 4096;
/// Where the first doorbell lies in its page.
const REGISTER: usize = 0x800;

static IDLE: Mutex<Vec<Memory>> = Mutex::new(Vec::new());

/// A page with one doorbell in use.
#[derive(Debug)]
pub(crate) struct Register(Memory);

impl Register {
    /// # Errors
    /// `ENOMEM`
    pub(crate) fn alloc() -> Result<Self, c_int> {
        let mut idle = IDLE.lock();
        if idle.is_empty() {
            let page = Memory::alloc(host_page()).map_err(|_| libc::ENOMEM)?;
            let uars = (0..page.len() / UAR).rev();
            idle.extend(uars.map(|n| page.slice(n * UAR, UAR).expect("it lies in the page")));
        }
        Ok(Self(idle.pop().expect("a page of the host has at least one")))
    }

    /// The address of the page.
    pub(crate) fn page(&self) -> *mut u8 {
        self.0.addr() as *mut u8
    }

    /// The address of the doorbell.
    pub(crate) fn at(&self) -> *mut u8 {
        self.page().wrapping_add(REGISTER)
    }

    /// The doorbell.
    pub(crate) fn word(&self) -> Word64 {
        self.0.word64(REGISTER).expect("a doorbell lies in its page")
    }
}

impl Drop for Register {
    fn drop(&mut self) {
        IDLE.lock().push(self.0.clone());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pages;

    #[test]
    fn pages_that_nobody_uses_stay_mapped() {
        let registers: Vec<_> = (0..8).map(|_| Register::alloc().unwrap()).collect();
        let addrs: Vec<_> = registers.iter().map(|register| register.page().addr()).collect();
        drop(registers);
        assert!(addrs.iter().all(|addr| pages::pin(*addr, UAR, true) == Ok(())));
    }
}
