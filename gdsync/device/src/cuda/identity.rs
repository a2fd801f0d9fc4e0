//! What tells whether memory of a GPU is still the same, and how much of it devices can reach.

use std::path::Path;

use gdrcopy::cuda::CudaStatus;
use gdrcopy::cuda::raw::layout::pointer_attribute::BUFFER_ID;

use super::Gpu;
use crate::error::{Error, Result};

impl Gpu {
    /// The number of the CUDA allocation at an address. No two allocations of a process have the same, so another number, or
    /// 0, means that what was there has been freed. 0 where CUDA knows no memory.
    ///
    /// # Errors
    /// [`Error::Cuda`].
    pub fn buffer_id(&self, addr: u64) -> Result<u64> {
        let mut id = 0u64;
        let asked = self.within(|api| {
            // SAFETY: a place for the answer, which has eight bytes.
            unsafe { api.pointer_get_attribute((&raw mut id).cast(), BUFFER_ID, addr) }
        });
        match asked {
            Ok(()) => Ok(id),
            Err(gdrcopy::Error::Cuda { status: CudaStatus::INVALID_VALUE, .. }) => Ok(0),
            Err(error) => Err(Error::cuda("asking CUDA for the number of an allocation")(error)),
        }
    }

    /// Bytes of its window (BAR1), through which devices and the CPU reach its memory; `None` where the system does not tell.
    pub fn window(&self) -> Option<u64> {
        let device = Path::new("/sys/bus/pci/devices").join(self.pci_address()?);
        window_in(&std::fs::read_to_string(device.join("resource")).ok()?)
    }
}

/// Bytes of BAR1, by the second line of a PCI device's `resource`: first and last address, and flags.
fn window_in(resource: &str) -> Option<u64> {
    let mut numbers = resource
        .lines()
        .nth(1)?
        .split_whitespace()
        .map(|number| u64::from_str_radix(number.trim_start_matches("0x"), 16).ok());
    let (first, last) = (numbers.next()??, numbers.next()??);
    last.checked_sub(first)?.checked_add(1).filter(|_| last > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_window_is_the_second_resource() {
        let resource = "\
            0x00000000c0000000 0x00000000c0ffffff 0x0000000000040200\n\
            0x0000380000000000 0x0000383fffffffff 0x000000000014220c\n\
            0x0000000000000000 0x0000000000000000 0x0000000000000000\n";
        assert_eq!(window_in(resource), Some(256 << 30));
        let without = "0x1 0x2 0x3\n0x0000000000000000 0x0000000000000000 0x0000000000000000\n";
        assert_eq!(
            (window_in(without), window_in("0x1 0x2 0x3\n"), window_in("x\ny z\n")),
            (None, None, None)
        );
    }
}
