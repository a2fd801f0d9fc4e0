//! Where the kernel's directories are: `/sys`, `/proc` and `/dev`, or copies of them in a test.

use std::fs;
use std::path::{Path, PathBuf};

use rustix::fs::Access;

/// A directory that has `sys`, `proc` and `dev`.
#[derive(Clone, Debug)]
pub(super) struct System {
    root: PathBuf,
}

/// What this process may do with a device file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Node {
    /// Read and write.
    Usable,
    /// It is there, and closed to this user.
    Closed,
    /// It is not there.
    Missing,
}

impl System {
    pub(super) fn at(root: &Path) -> Self {
        Self { root: root.to_owned() }
    }

    /// A path such as `/sys/class/net`, in this root.
    pub(super) fn path(&self, path: &str) -> PathBuf {
        self.root.join(path.trim_start_matches('/'))
    }

    pub(super) fn sysfs(&self) -> PathBuf {
        self.path("/sys")
    }

    /// The trimmed text of a file; `None` where there is none or it is empty.
    pub(super) fn text(&self, path: &str) -> Option<String> {
        text(&self.path(path))
    }

    /// The names in a directory, sorted; none where there is no such directory.
    pub(super) fn names(&self, path: &str) -> Vec<String> {
        let entries = fs::read_dir(self.path(path)).into_iter().flatten();
        let mut names: Vec<_> =
            entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok()).collect();
        names.sort();
        names
    }

    pub(super) fn exists(&self, path: &str) -> bool {
        self.path(path).exists()
    }

    /// Asks for the rights of this process without opening the file, which could start something.
    pub(super) fn node(&self, path: &str) -> Node {
        let path = self.path(path);
        match path.exists().then(|| rustix::fs::access(path, Access::READ_OK | Access::WRITE_OK)) {
            None => Node::Missing,
            Some(Ok(())) => Node::Usable,
            Some(Err(_)) => Node::Closed,
        }
    }

    /// The directory of a PCI device, by its address.
    pub(super) fn pci(&self, address: &str) -> String {
        format!("/sys/bus/pci/devices/{address}")
    }

    /// The name of what a link points to, such as the driver of a device.
    pub(super) fn link(&self, path: &str) -> Option<String> {
        Some(fs::read_link(self.path(path)).ok()?.file_name()?.to_string_lossy().into_owned())
    }
}

pub(super) fn text(path: &Path) -> Option<String> {
    let bytes = fs::read(path).ok()?;
    let text = String::from_utf8_lossy(&bytes).trim().to_owned();
    (!text.is_empty()).then_some(text)
}
