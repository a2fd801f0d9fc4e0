//! Detects other processes of this library on a GPU, which waiting kernels would block for whole time slices; identity and BAR1 of a GPU.
//!
//! Each process binds an abstract socket name for each open GPU. The kernel lists the names, and removes them with the process. Processes
//! in other network namespaces, or without this library, are not detected.

use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::{fmt, fs, io};

use gdrcopy::cuda::CudaStatus;
use gdrcopy::cuda::raw::layout::pointer_attribute::BUFFER_ID;

use super::Gpu;
use crate::error::{Error, Result};

/// Announces that this process uses a GPU.
pub(super) struct Sign {
    /// Common prefix of all names for this GPU.
    prefix: String,
    _socket: Option<UnixDatagram>,
}

impl fmt::Debug for Sign {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Sign({})", self.prefix)
    }
}

impl Sign {
    /// Announces use of the GPU with this PCI address. If that fails, others do not detect this process.
    pub(super) fn new(pci: &str) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let prefix = format!("gdsync-gpu/{}/", pci.to_lowercase());
        let name = format!("{prefix}{}/{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let bound = SocketAddr::from_abstract_name(name).and_then(|name| UnixDatagram::bind_addr(&name));
        let socket =
            bound.inspect_err(|error| tracing::debug!(%error, "no sign of this process on its GPU")).ok();
        Self { prefix, _socket: socket }
    }

    /// Whether other processes use the GPU.
    pub(super) fn others(&self) -> io::Result<bool> {
        let own = std::process::id().to_string();
        let names = fs::read_to_string("/proc/net/unix")?;
        // The last column; an abstract name begins with an @.
        let signs = names.lines().filter_map(|line| line.rsplit_once('@')?.1.strip_prefix(&self.prefix));
        Ok(signs.filter_map(|sign| sign.split_once('/')).any(|(process, _)| process != own))
    }
}

impl Gpu {
    /// The number of the CUDA allocation at an address, unique in the process; 0 if there is none. A different number means that the
    /// earlier allocation was freed.
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

    /// Bytes of BAR1, through which devices and the CPU access GPU memory, if known.
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
    fn other_processes_are_seen_and_the_own_one_is_not() {
        let sign = Sign::new("test:0");
        let again = Sign::new("test:0");
        assert!(!sign.others().unwrap() && !again.others().unwrap());
        let name = SocketAddr::from_abstract_name("gdsync-gpu/test:0/1/0").unwrap();
        let other = UnixDatagram::bind_addr(&name).unwrap();
        assert!(sign.others().unwrap());
        assert!(!Sign::new("test:00").others().unwrap(), "another GPU");
        drop(other);
        assert!(!sign.others().unwrap());
    }

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
