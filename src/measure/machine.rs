//! Where a measurement was made.

use serde::Serialize;

/// A description of machine and build, for reports.
#[derive(Clone, Debug, Serialize)]
pub struct Machine {
    /// Processor model.
    pub cpu: String,
    /// Processors this process may use.
    pub cpus: usize,
    /// Kernel release.
    pub kernel: String,
    /// Version of this package.
    pub version: &'static str,
    /// Commit it was built from.
    pub commit: &'static str,
    /// Compiler it was built with.
    pub rustc: &'static str,
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
            version: env!("CARGO_PKG_VERSION"),
            commit: env!("GDASYNC_COMMIT"),
            rustc: env!("GDASYNC_RUSTC"),
        }
    }
}
