//! Where a measurement was made.

use serde::{Deserialize, Serialize};

/// A description of machine, build and command, for reports.
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
    /// The command that this process was started with, as a shell takes it; empty in results of before it was noted.
    #[serde(default)]
    pub command: String,
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
            command: command(std::env::args_os().map(|arg| arg.to_string_lossy().into_owned())),
        }
    }
}

/// Program and arguments as a shell takes them; of the program only its name.
fn command(args: impl Iterator<Item = String>) -> String {
    let name = |program: &str| program.rsplit('/').next().unwrap_or(program).to_owned();
    let quote = |arg: String| {
        let plain = |c: char| c.is_alphanumeric() || "_-+./,:=@%".contains(c);
        if !arg.is_empty() && arg.chars().all(plain) {
            arg
        } else {
            format!("'{}'", arg.replace('\'', r"'\''"))
        }
    };
    let words = args.enumerate().map(|(i, arg)| quote(if i == 0 { name(&arg) } else { arg }));
    words.collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_can_be_typed_again() {
        let words = ["/usr/bin/gdasync", "bench", "--json", "my file", "", "it's", "a=b,c"];
        let typed = command(words.into_iter().map(str::to_owned));
        assert_eq!(typed, r"gdasync bench --json 'my file' '' 'it'\''s' a=b,c");
    }
}
