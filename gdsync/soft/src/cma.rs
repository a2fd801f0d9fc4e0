//! Which payload in host memory is copied in one.

use std::str::FromStr;

use gdsync_device::error::Error;

/// Which payload in host memory, in one buffer, is copied in one, by receiver and sender together (`process_vm_readv`,
/// `process_vm_writev`), and which is sent through shared memory (two copies, which overlap). Where the kernel does not let the
/// receiver read, all is sent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum CmaPolicy {
    /// From 64 KiB on what is quicker: both are tried with each peer, now and then again.
    #[default]
    Quicker,
    /// From so many bytes on.
    From(usize),
    /// None.
    Never,
}

/// `auto`, `never`, or a number of bytes.
impl FromStr for CmaPolicy {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        match text {
            "auto" => Ok(Self::Quicker),
            "never" => Ok(Self::Never),
            _ => text.parse().map(Self::From).map_err(|_| {
                Error::invalid("GDSYNC_PULL", format!("'{text}'"), "auto, never, or a number of bytes")
            }),
        }
    }
}
