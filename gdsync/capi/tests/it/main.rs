//! The C interface: layouts and symbols, headers, and C programs on the emulated card and a simulated GPU.

mod headers;
mod programs;

use std::path::{Path, PathBuf};
use std::process::Output;
use std::time::Duration;

use gdsync_testkit::c::Package;
use gdsync_testkit::card;

/// The headers of rdma-core are not ours to check.
const PACKAGE: Package = Package {
    root: env!("CARGO_MANIFEST_DIR"),
    scratch: env!("CARGO_TARGET_TMPDIR"),
    includes: &["include", "tests/c/include", "../../gdrcopy/capi/include"],
    file: "libgdsync_c.so",
    name: "libgdsync",
    version: 2,
    limit: Duration::from_secs(300),
};

/// Whether the headers and libraries of rdma-core are installed. Says so if they are not.
fn has_rdma_core() -> bool {
    if !card::has_rdma_core() {
        return false;
    }
    let has_header = Path::new("/usr/include/infiniband/verbs.h").exists();
    if !has_header {
        eprintln!("skipped: infiniband/verbs.h is not installed (libibverbs-dev)");
    }
    has_header
}

/// A compiled program of `tests/c`, in a directory with links to the libraries under the names that it looks for.
struct Program(PathBuf);

impl Program {
    fn compile(name: &str) -> Self {
        Self::of(name, &format!("tests/c/{name}.c"))
    }

    /// As [`Program::compile`], of this file.
    fn of(name: &str, source: &str) -> Self {
        let directory = PACKAGE.linked_with_cuda(name);
        let compiler = PACKAGE.compiler("gcc", &["-std=gnu11", "-pedantic"]);
        let libraries = ["-lgdsync", "-lcuda", "-libverbs"];
        PACKAGE.compile(compiler, &[source], &directory, &libraries);
        Self(directory)
    }

    /// Runs on the emulated card.
    fn run(&self, environment: &[(&str, &str)]) -> Output {
        let mut command = PACKAGE.program(&self.0, &[card::library()]);
        for variable in ["GDS_ENABLE_DEBUG", "GDSYNC_CAPI_WAIT_LIMIT", "GDSYNC_FAULTS"] {
            command.env_remove(variable);
        }
        PACKAGE.finish(command.envs(environment.iter().copied()))
    }
}
