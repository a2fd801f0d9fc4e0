//! The open device file.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;

use super::abi::{self, GetAttr, GetVersion, Request};
use super::explain;
use crate::backend::host_page;
use crate::error::{Error, Result};
use crate::fork::Owner;
use crate::system::Kernel;

/// `/dev/gdrdrv`, opened. The driver serves the process that opened it and nobody else.
#[derive(Debug)]
pub(super) struct Node {
    kernel: Arc<dyn Kernel>,
    fd: OwnedFd,
    pub(super) owner: Owner,
}

impl Node {
    pub(super) fn open(kernel: &Arc<dyn Kernel>) -> Result<Self> {
        let fd = kernel.open(abi::PATH).map_err(|error| explain::open(&**kernel, error))?;
        Ok(Self { kernel: kernel.clone(), fd, owner: Owner::this_process() })
    }

    pub(super) fn call<R: Request>(&self, request: &mut R) -> io::Result<()> {
        // SAFETY: the structure is that of the number, by the contract of `Request`.
        unsafe { self.kernel.ioctl(self.fd.as_fd(), R::CODE, std::ptr::from_mut(request).cast()) }
    }

    /// Maps the first `len` bytes of a pin.
    pub(super) fn map(&self, handle: u64, len: usize) -> io::Result<NonNull<u8>> {
        // Handles count host pages, so that each pin has offsets of its own.
        let offset = handle
            .checked_mul(host_page() as u64)
            .ok_or_else(|| io::Error::from_raw_os_error(libc::EOVERFLOW))?;
        // SAFETY: no place is asked for.
        unsafe { self.kernel.mmap(self.fd.as_fd(), len, offset, None) }
    }

    /// Agrees on the interface; gives the driver's version.
    pub(super) fn handshake(&self) -> Result<(u16, u16)> {
        let mut answer = GetVersion::default();
        self.call(&mut answer).map_err(explain::version)?;
        let GetVersion { driver, minimum_library } = answer;
        if driver < abi::MINIMUM_DRIVER {
            return Err(explain::too_old());
        }
        if minimum_library > abi::LIBRARY {
            return Err(Error::Unsupported {
                what: format!("the interface of GDRCopy {}", text(abi::LIBRARY)),
                by: "the loaded gdrdrv module",
                fix: "it asks for a newer library: update this crate, or load gdrdrv 2.6",
            });
        }
        Ok(split(driver))
    }

    /// A property of the module; `None` from drivers that do not know it.
    pub(super) fn attribute(&self, attr: u32) -> Result<Option<u32>> {
        let mut request = GetAttr { attr, val: 0 };
        match self.call(&mut request) {
            Ok(()) => Ok(Some(request.val)),
            Err(error) if is_unknown(&error) => Ok(None),
            Err(error) => Err(explain::call(GetAttr::NAME, error)),
        }
    }
}

/// Whether the driver says that it does not know the request. `EINVAL` can mean that too, or something else.
pub(super) fn is_unknown(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EINVAL | libc::ENOTTY | libc::EOPNOTSUPP))
}

fn split(version: u32) -> (u16, u16) {
    let [a, b, c, d] = version.to_be_bytes();
    (u16::from_be_bytes([a, b]), u16::from_be_bytes([c, d]))
}

fn text(version: u32) -> String {
    let (major, minor) = split(version);
    format!("{major}.{minor}")
}
