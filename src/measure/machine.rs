//! Where a measurement was made.

use serde::{Deserialize, Serialize};

/// A description of machine and build, for reports.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Machine {
    /// Processor model.
    pub cpu: String,
    /// Processors this process may use.
    pub cpus: usize,
    /// Kernel release.
    pub kernel: String,
    /// Version of this package.
    pub version: String,
    /// Commit it was built from.
    pub commit: String,
    /// Compiler it was built with.
    pub rustc: String,
}

impl Machine {
    /// This machine.
    pub fn here() -> Self {
        let read = |path| std::fs::read_to_string(path).unwrap_or_default();
        let info = read("/proc/cpuinfo");
        let model = info.lines().find_map(|line| line.strip_prefix("model name")?.split_once(": "));
        Self {
            cpu: model.map_or(std::env::consts::ARCH, |(_, model)| model).to_owned(),
            cpus: std::thread::available_parallelism().map_or(1, usize::from),
            kernel: read("/proc/sys/kernel/osrelease").trim().to_owned(),
            version: env!("CARGO_PKG_VERSION").into(),
            commit: env!("GDASYNC_COMMIT").into(),
            rustc: env!("GDASYNC_RUSTC").into(),
        }
    }
}
