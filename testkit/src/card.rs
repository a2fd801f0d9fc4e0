//! Programs on the emulated card, for tests that need an mlx5 card.

use std::ffi::{CStr, OsStr};
use std::path::PathBuf;
use std::process::Command;

/// The device.
pub const DEVICE: &str = "mlx5_0";

/// What is preloaded.
const LIBRARY: &str = "libgdasync_card.so";
/// What programs find the card through.
const RDMA_CORE: [&CStr; 2] = [c"libibverbs.so.1", c"libmlx5.so.1"];

/// A command that runs a program on the card. `None` without rdma-core, which is then said on standard error.
///
/// # Panics
/// If cargo has not built the card: the package of the test needs `gdsync-card` among its development dependencies.
pub fn command(program: impl AsRef<OsStr>) -> Option<Command> {
    // SAFETY: the name is a string, and the initialization of these libraries has no conditions.
    let is_missing = |name: &&CStr| unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_LAZY) }.is_null();
    if let Some(missing) = RDMA_CORE.into_iter().find(is_missing) {
        eprintln!("skipped: {missing:?} is not installed (Debian: libibverbs1 ibverbs-providers)");
        return None;
    }
    let mut command = Command::new(program);
    command.env("LD_PRELOAD", library());
    Some(command)
}

/// Beside the test, or below.
fn library() -> PathBuf {
    let test = std::env::current_exe().expect("a test has a path");
    let found = test.ancestors().map(|dir| dir.join(LIBRARY)).find(|library| library.exists());
    found.unwrap_or_else(|| {
        panic!("cargo builds {LIBRARY} with the tests of packages that depend on gdsync-card")
    })
}
