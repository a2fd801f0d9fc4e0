//! Programs on the emulated card, for tests that need an mlx5 card.

use std::ffi::{CStr, OsStr};
use std::path::PathBuf;
use std::process::Command;

use crate::process::built;

/// The device.
pub const DEVICE: &str = "mlx5_0";

/// What programs find the card through.
const RDMA_CORE: [&CStr; 2] = [c"libibverbs.so.1", c"libmlx5.so.1"];

/// Whether rdma-core is installed. Says on standard error if it is not.
pub fn has_rdma_core() -> bool {
    // SAFETY: the name is a string, and the initialization of these libraries has no conditions.
    let is_missing = |name: &&CStr| unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_LAZY) }.is_null();
    let missing = RDMA_CORE.into_iter().find(is_missing);
    if let Some(missing) = missing {
        eprintln!("skipped: {missing:?} is not installed (Debian: libibverbs1 ibverbs-providers)");
    }
    missing.is_none()
}

/// The library of the card.
///
/// # Panics
/// As [`built`].
pub fn library() -> PathBuf {
    built("libgdasync_card.so")
}

/// A command that runs a program on the card. `None` without rdma-core.
///
/// # Panics
/// As [`built`].
pub fn command(program: impl AsRef<OsStr>) -> Option<Command> {
    has_rdma_core().then(|| {
        let mut command = Command::new(program);
        command.env("LD_PRELOAD", library());
        command
    })
}
