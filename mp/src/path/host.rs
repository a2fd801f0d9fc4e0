//! Who can reach each other through shared memory.

use std::fs;
use std::os::unix::fs::MetadataExt;

/// What processes have in common that can meet on the software HCA's wire: a running kernel, and its network namespace, where
/// the addresses of its sockets are. Empty where that is not known.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Host(Vec<u8>);

impl Host {
    /// That of this process.
    pub(super) fn here() -> Self {
        let text = |path| fs::read_to_string(path).map(|text| text.trim().to_owned());
        let boot = text("/proc/sys/kernel/random/boot_id").ok();
        let net = fs::metadata("/proc/self/ns/net").map(|net| (net.dev(), net.ino())).ok();
        // Copies of one virtual machine may have the same boot.
        let name = text("/proc/sys/kernel/hostname").unwrap_or_default();
        Self(
            boot.zip(net)
                .map(|(boot, (dev, ino))| format!("{boot} {dev} {ino} {name}"))
                .unwrap_or_default()
                .into(),
        )
    }

    pub(super) fn from_bytes(bytes: &[u8]) -> Self {
        Self(bytes.to_vec())
    }

    pub(super) fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    pub(super) fn shares_memory_with(&self, other: &Self) -> bool {
        !self.0.is_empty() && self == other
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_on_its_own_host() {
        let here = Host::here();
        assert!(here.shares_memory_with(&Host::here()), "{here:?}");
        assert!(here.shares_memory_with(&Host::from_bytes(here.as_bytes())));
        let elsewhere = [here.as_bytes(), b"!"].concat();
        assert!(!here.shares_memory_with(&Host::from_bytes(&elsewhere)));
    }
}
