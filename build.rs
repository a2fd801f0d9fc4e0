//! Build facts for reports: which source and which compiler made this binary. Needs no system package.

use std::path::Path;
use std::process::Command;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    // The log of HEAD grows with each commit; HEAD itself names a branch.
    for name in ["HEAD", "logs/HEAD"] {
        let path = output(Command::new("git").args(["rev-parse", "--git-path", name]));
        if let Some(path) = path.filter(|path| Path::new(path).exists()) {
            println!("cargo::rerun-if-changed={path}");
        }
    }
    let commit = output(Command::new("git").args(["rev-parse", "--short=12", "HEAD"]));
    let rustc = std::env::var_os("RUSTC").and_then(|rustc| output(Command::new(rustc).arg("--version")));
    println!("cargo::rustc-env=GDASYNC_COMMIT={}", commit.as_deref().unwrap_or("unknown"));
    println!("cargo::rustc-env=GDASYNC_RUSTC={}", rustc.as_deref().unwrap_or("unknown"));
}

/// What a command prints, if it can be run and succeeds: a source archive has no git.
fn output(command: &mut Command) -> Option<String> {
    let output = command.output().ok().filter(|o| o.status.success())?;
    Some(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}
