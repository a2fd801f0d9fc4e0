//! The C interface: layouts and symbols, headers, and C programs of two ranks on a simulated GPU, on the software HCA and the
//! emulated card.

mod headers;
mod programs;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use gdsync_testkit::c::Package;
use gdsync_testkit::card;
use gdsync_testkit::process::printed;

const PACKAGE: Package = Package {
    root: env!("CARGO_MANIFEST_DIR"),
    scratch: env!("CARGO_TARGET_TMPDIR"),
    includes: &[
        "include",
        "../../gdsync/capi/include",
        "../../gdrcopy/capi/include",
        "tests/c/include",
        "../../gdsync/capi/tests/c/include",
    ],
    file: "libmp_c.so",
    name: "libmp",
    version: 2,
    limit: Duration::from_secs(300),
};

/// Whether `mp/device.cuh` compiles, which includes `gdsync.h`.
fn has_verbs_header() -> bool {
    let found = Path::new("/usr/include/infiniband/verbs.h").exists();
    if !found {
        eprintln!("skipped: infiniband/verbs.h is not installed (libibverbs-dev)");
    }
    found
}

/// A device that programs run on.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Hca {
    Soft,
    Card,
}

/// A compiled program of `tests/c`, in a directory with links to the libraries under the names that it looks for.
struct Program(PathBuf);

impl Program {
    fn compile(name: &str) -> Self {
        Self::of(name, &format!("tests/c/{name}.c"), &[])
    }

    /// Of this source, relative to the package.
    fn of(name: &str, source: &str, flags: &[&str]) -> Self {
        let directory = PACKAGE.linked_with_cuda(name);
        let mut compiler = PACKAGE.compiler("gcc", &["-std=gnu11", "-pedantic"]);
        compiler.args(flags);
        PACKAGE.compile(compiler, &[source], &directory, &["-lmp", "-lcuda"]);
        Self(directory)
    }

    /// What runs it on a device.
    fn command(&self, hca: Hca) -> Command {
        let preloaded = if hca == Hca::Card { vec![card::library()] } else { Vec::new() };
        let mut command = PACKAGE.program(&self.0, &preloaded);
        for variable in [
            "MP_ENABLE_DEBUG",
            "MP_ENABLE_UD",
            "MP_USE_IB_HCA",
            "GDSYNC_CAPI_WAIT_LIMIT",
            "GDSYNC_FAULTS",
            "RANK",
            "MASTER_ADDR",
        ] {
            command.env_remove(variable);
        }
        match hca {
            Hca::Soft => command.env("GDSYNC_DEVICE", "soft0"),
            Hca::Card => command.env("MP_USE_IB_HCA", "lx5_"),
        };
        command
    }

    /// What it says on a device. It must pass there.
    fn passes(&self, hca: Hca, environment: &[(&str, &str)]) -> String {
        let output = PACKAGE.finish(self.command(hca).envs(environment.iter().copied()));
        assert!(output.status.success(), "{hca:?} {environment:?}: {}: {}", output.status, printed(&output));
        printed(&output)
    }
}
