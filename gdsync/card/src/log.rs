//! The log of the card: requests of the program that are not supported, and failures.

use std::fmt;
use std::os::fd::OwnedFd;
use std::sync::OnceLock;

use rustix::fs::{Mode, OFlags};

/// Names the file; `-` is standard error.
const VARIABLE: &str = "GDASYNC_CARD_LOG";

/// Where lines go. Inherited by forked children, which append to the same file.
static FILE: OnceLock<Option<Target>> = OnceLock::new();

#[derive(Debug)]
enum Target {
    Stderr,
    File(OwnedFd),
}

/// Writes a line. System calls are made directly, so that no interposed function is called.
pub(crate) fn line(text: fmt::Arguments<'_>) {
    let target = FILE.get_or_init(|| {
        let path = std::env::var_os(VARIABLE).filter(|path| !path.is_empty())?;
        if path == "-" {
            return Some(Target::Stderr);
        }
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::APPEND | OFlags::CLOEXEC;
        rustix::fs::open(path.as_os_str(), flags, Mode::from_raw_mode(0o644)).ok().map(Target::File)
    });
    let Some(target) = target else { return };
    let line = format!("gdasync card [{}]: {text}\n", std::process::id());
    _ = match target {
        Target::Stderr => rustix::io::write(rustix::stdio::stderr(), line.as_bytes()),
        Target::File(file) => rustix::io::write(file, line.as_bytes()),
    };
}

macro_rules! log {
    ($($text:tt)*) => { $crate::log::line(format_args!($($text)*)) };
}
pub(crate) use log;
