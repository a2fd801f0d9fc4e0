//! `gdasync card`: runs a program on an emulated card.

use std::ffi::OsString;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use clap::{Args, ValueEnum};
use gdasync::note;
use gdasync::terminal::name;

const LIBRARY: &str = "libgdasync_card.so";

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Link {
    /// InfiniBand, with LIDs.
    Ib,
    /// Ethernet, with RoCE v1 and v2.
    Eth,
}

/// Runs a program on an emulated mlx5 card, without hardware: `gdasync card ibv_devinfo -v`.
///
/// The program finds the card, mlx5_0, through the installed libibverbs and libmlx5. It needs no kernel module and no root.
/// Processes of one host that run so reach each other. What a program asks for and the card does not have is in the log
/// that GDASYNC_CARD_LOG names: a path, or - for standard error.
#[derive(Args, Debug)]
pub(crate) struct Options {
    /// Link layer of the ports.
    #[arg(long, value_enum, default_value = "eth")]
    link: Link,
    /// Number of devices: mlx5_0, mlx5_1 ...
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=8))]
    devices: u8,
    /// The program and its arguments.
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true, value_name = "PROGRAM")]
    command: Vec<OsString>,
}

impl Options {
    /// Becomes the program. Returns only if that fails.
    pub(crate) fn run(self) -> Result<ExitCode, String> {
        let mut preload = find_library()?.into_os_string();
        let [program, arguments @ ..] = &self.command[..] else { return Ok(ExitCode::FAILURE) };
        if let Some(others) = std::env::var_os("LD_PRELOAD").filter(|others| !others.is_empty()) {
            preload.push(":");
            preload.push(others);
        }
        let error = Command::new(program)
            .args(arguments)
            .env("LD_PRELOAD", preload)
            .env("GDASYNC_CARD_LINK", name(&self.link))
            .env("GDASYNC_CARD_DEVICES", self.devices.to_string())
            .exec();
        note!("gdasync: {}: {error}", program.display());
        // As shells do.
        Ok(ExitCode::from(if error.kind() == std::io::ErrorKind::NotFound { 127 } else { 126 }))
    }
}

/// The library to preload, if the program will find rdma-core.
fn find_library() -> Result<PathBuf, String> {
    for (name, package) in [(c"libibverbs.so.1", "libibverbs1"), (c"libmlx5.so.1", "ibverbs-providers")] {
        // SAFETY: the name is a string, and the library is one of rdma-core, whose initialization has no conditions.
        if unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_LAZY) }.is_null() {
            return Err(format!(
                "{} is not installed, which programs find the card through; install the package {package} \
                 (rdma-core-libs, libibverbs on other distributions)",
                name.to_string_lossy()
            ));
        }
    }
    let binary = std::env::current_exe().map_err(|error| format!("the own path is not known: {error}"))?;
    let beside = |dir: &Path| dir.join(LIBRARY);
    let dir = binary.parent().ok_or("the own path has no directory")?;
    // The last one is where cargo puts it for tests.
    let places = [beside(dir), beside(&dir.join("../lib")), beside(&dir.join("deps"))];
    let library = places.iter().find(|path| path.exists()).ok_or_else(|| {
        format!(
            "{LIBRARY} is neither in {} nor in ../lib; build it with `cargo build -p gdsync-card`, or put it there",
            dir.display()
        )
    })?;
    // The dynamic linker separates the libraries of LD_PRELOAD by both, and knows no quotes.
    if library.as_os_str().as_encoded_bytes().iter().any(|byte| b" :".contains(byte)) {
        return Err(format!(
            "{} cannot be preloaded, as its path has a blank or colon; put the two files into another directory",
            library.display()
        ));
    }
    Ok(library.clone())
}
