//! Who else of this library uses a GPU: kernels that wait keep other processes from it for whole time slices.
//!
//! Every process binds a socket of an abstract name for each GPU it has open. Nobody connects: the names are listed by the
//! kernel, and go with the process. Other network namespaces are not seen, nor processes without this library.

use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::sync::atomic::{AtomicU64, Ordering};
use std::{fmt, fs, io};

/// A sign that this process uses a GPU.
pub(super) struct Sign {
    /// Of all signs on this GPU.
    prefix: String,
    _socket: Option<UnixDatagram>,
}

impl fmt::Debug for Sign {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Sign({})", self.prefix)
    }
}

impl Sign {
    /// Puts one up for the GPU with this PCI address. Where that cannot be, others do not see this process.
    pub(super) fn new(pci: &str) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let prefix = format!("gdsync-gpu/{}/", pci.to_lowercase());
        let name = format!("{prefix}{}/{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let bound = SocketAddr::from_abstract_name(name).and_then(|name| UnixDatagram::bind_addr(&name));
        let socket =
            bound.inspect_err(|error| tracing::debug!(%error, "no sign of this process on its GPU")).ok();
        Self { prefix, _socket: socket }
    }

    /// Whether other processes have put up theirs.
    pub(super) fn others(&self) -> io::Result<bool> {
        let own = std::process::id().to_string();
        let names = fs::read_to_string("/proc/net/unix")?;
        // The last column; an abstract name begins with an @.
        let signs = names.lines().filter_map(|line| line.rsplit_once('@')?.1.strip_prefix(&self.prefix));
        Ok(signs.filter_map(|sign| sign.split_once('/')).any(|(process, _)| process != own))
    }
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
}
