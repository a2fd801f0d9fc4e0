//! The plug-in, loaded and called as NCCL does, by ranks that are processes: without NCCL and without a GPU.

use std::mem::offset_of;
use std::time::Duration;

use gdsync_testkit::c::Package;
use nccl_rma_gda::abi::{Config, Failure, Properties, Rma14};

mod faults;
mod loom;
mod misuse;
mod nccl;
mod traffic;

// The library's own file, on the atomics of loom.
#[path = "../../src/release.rs"]
#[expect(dead_code, reason = "used in part by the models")]
mod release;

mod sync {
    pub(crate) use ::loom::sync::atomic::{AtomicU8, Ordering};

    /// Loom's, used as parking_lot's.
    #[derive(Debug)]
    pub(crate) struct Mutex<T>(::loom::sync::Mutex<T>);

    impl<T> Mutex<T> {
        pub(crate) fn new(value: T) -> Self {
            Self(::loom::sync::Mutex::new(value))
        }

        pub(crate) fn lock(&self) -> ::loom::sync::MutexGuard<'_, T> {
            self.0.lock().unwrap()
        }
    }
}

const PACKAGE: Package = Package {
    root: env!("CARGO_MANIFEST_DIR"),
    scratch: env!("CARGO_TARGET_TMPDIR"),
    includes: &["include"],
    file: "libnccl_rma_gda.so",
    name: "libnccl-rma-gda",
    version: 0,
    limit: Duration::from_secs(300),
};

#[test]
fn the_header_compiles_as_c_and_cplusplus() {
    for compiler in ["gcc", "g++"] {
        let text = "#include <gda_nccl.h>\nint main(void) { return 0; }\n";
        PACKAGE.check_standards(compiler, text, &["-pedantic"]);
    }
}

#[test]
fn layouts_agree() {
    let here = [
        ("sizeof gda_nccl_failure", size_of::<Failure>()),
        ("offsetof gda_nccl_failure rank", offset_of!(Failure, rank)),
        ("offsetof gda_nccl_failure own_rank", offset_of!(Failure, own_rank)),
        ("offsetof gda_nccl_failure cause", offset_of!(Failure, cause)),
    ];
    PACKAGE.check_layout(&["-std=c11"], &here);
}

/// These are the tables of NCCL 2.30, where `GDA_NCCL_SRC` names its sources.
#[test]
fn layouts_are_those_of_nccl() {
    let Some(source) = std::env::var_os("GDA_NCCL_SRC") else {
        return eprintln!("skipped: GDA_NCCL_SRC names no checkout of NCCL");
    };
    let directory = PACKAGE.fresh_directory("nccl");
    let mut compiler = PACKAGE.compiler("g++", &["-std=c++17", "-Wno-unused-function"]);
    for headers in ["src/include", "src/include/plugin", "src"] {
        compiler.arg("-I").arg(std::path::Path::new(&source).join(headers));
    }
    compiler.arg("-I").arg(directory.as_path());
    PACKAGE.compile(compiler, &["tests/c/nccl_layout.cc"], &directory, &[]);
    let output = PACKAGE.finish(&mut std::process::Command::new(directory.join("program")));
    let here = [
        size_of::<Rma14>(),
        offset_of!(Rma14, connect),
        offset_of!(Rma14, iput_signal),
        offset_of!(Rma14, finalize),
        size_of::<Config>(),
        size_of::<Properties>(),
        offset_of!(Properties, ptr_support),
        offset_of!(Properties, max_recvs),
        offset_of!(Properties, net_device_type),
        offset_of!(Properties, max_p2p_bytes),
        offset_of!(Properties, plane_id),
    ];
    let theirs = String::from_utf8(output.stdout).unwrap();
    let theirs: Vec<usize> = theirs.split_whitespace().map(|number| number.parse().unwrap()).collect();
    assert_eq!(theirs, here);
}

#[test]
fn only_the_tables_and_the_functions_of_the_header_are_exported() {
    let tables = ["ncclRmaPlugin_v14", "ncclRmaPlugin_v15", "ncclRmaPlugin_v16"];
    let dynamic = PACKAGE.check_exports(&["gda_nccl.h"], &tables);
    assert!(dynamic.contains("NODELETE"), "{dynamic}");
}
