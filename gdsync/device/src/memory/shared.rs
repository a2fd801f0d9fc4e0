//! Memory that processes of one host share.

use std::ffi::CStr;
use std::os::fd::{AsFd, OwnedFd};

use super::Memory;
use crate::error::Result;
use crate::{check_memfd, memfd};

impl Memory {
    /// Allocates `len` zeroed bytes that other processes can map too, by the file that comes with it; nobody can make that
    /// shorter, and it goes with the last that has it. `name` is shown in `/proc`.
    ///
    /// # Errors
    /// As [`Memory::alloc`].
    #[doc(hidden)] // for messaging layers of this workspace
    pub fn shared(name: &CStr, len: usize) -> Result<(Self, OwnedFd)> {
        let file = memfd(name, super::page_round(len)?)?;
        Ok((Self::map_shared(file.as_fd(), len)?, file))
    }

    /// Maps the first `len` bytes of a file that another process has from [`Memory::shared`].
    ///
    /// # Errors
    /// [`Error::InvalidArgument`](crate::Error::InvalidArgument) for a file that is shorter or could become so;
    /// [`Error::Sys`](crate::Error::Sys).
    #[doc(hidden)] // for messaging layers of this workspace
    pub fn of_shared(file: &OwnedFd, len: usize) -> Result<Self> {
        check_memfd(file, len)?;
        Self::map_shared(file.as_fd(), len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_mappings_have_the_same_bytes() {
        let (memory, file) = Memory::shared(c"gdsync-test", 100).unwrap();
        let other = Memory::of_shared(&file, 100).unwrap();
        memory.write(7, b"shared").unwrap();
        assert_eq!(other.to_vec()[7..13], *b"shared");
        assert!(Memory::of_shared(&file, 5000).is_err(), "it is one page long");
        let file = std::fs::File::open("/proc/self/exe").unwrap().into();
        assert!(Memory::of_shared(&file, 100).is_err(), "it could become shorter");
    }
}
