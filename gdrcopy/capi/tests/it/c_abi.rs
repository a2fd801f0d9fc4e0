//! The C interface: layouts, symbols, and C programs that run on plain memory.

use std::ffi::OsStr;
use std::mem::offset_of;
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{Command, Output};
use std::time::Duration;

use gdrapi::{
    GDR_MAPPING_TYPE_NONE, GPU_PAGE_SIZE, INFO_MAPPED, INFO_WC_MAPPING, VERSION, gdr_info_v1_t,
    gdr_info_v2_t, gdr_mh_t, gdr_t,
};
use gdrcopy::{Attribute, MappingType, PinFlags};
use gdsync_testkit::c::Package;
use gdsync_testkit::process::printed;

const PACKAGE: Package = Package {
    root: env!("CARGO_MANIFEST_DIR"),
    scratch: env!("CARGO_TARGET_TMPDIR"),
    includes: &["include"],
    file: "libgdrapi.so",
    name: "libgdrapi",
    version: 2,
    limit: Duration::from_secs(120),
};

/// A compiled program of `tests/c`, in a directory with links to the library.
#[derive(Debug)]
pub(crate) struct Program(PathBuf);

impl Program {
    /// Compiles with every warning an error. A test uses a program that no other uses.
    pub(crate) fn compile(name: &str) -> Self {
        Self::compile_with(name, "gcc", &["-std=gnu99", "-pedantic"])
    }

    pub(crate) fn compile_with(name: &str, compiler: &str, flags: &[&str]) -> Self {
        let directory = PACKAGE.linked(&format!("{name}-{compiler}"), &[]);
        let libraries = ["-Wl,--as-needed", "-lgdrapi", "-ldl"];
        let compiler = PACKAGE.compiler(compiler, flags);
        PACKAGE.compile(compiler, &[&format!("tests/c/{name}.c")], &directory, &libraries);
        Self(directory)
    }

    /// Runs on the host backend, with nothing of GDRCopy's in the environment besides `environment`.
    pub(crate) fn run<A: AsRef<OsStr>>(&self, arguments: &[A], environment: &[(&str, &str)]) -> Output {
        let mut command = Command::new(self.0.join("program"));
        for variable in
            ["GDRCOPY_ENABLE_LOGGING", "GDRCOPY_LOG_LEVEL", "GDRCOPY_USE_DMABUF_MMAP", "GDRCOPY_BACKEND"]
        {
            command.env_remove(variable);
        }
        command.env("LD_LIBRARY_PATH", &self.0).args(arguments);
        PACKAGE.finish(command.envs(environment.iter().copied()))
    }

    /// Runs a program that checks itself.
    pub(crate) fn passes(&self) {
        let output = self.run::<&str>(&[], &[("GDRCOPY_BACKEND", "host"), ("GDRCOPY_ENABLE_LOGGING", "")]);
        assert!(output.status.success(), "{}: {}", output.status, printed(&output));
    }
}

#[test]
fn layouts_and_numbers_agree() {
    let in_v1 = |offset: usize| offset_of!(gdr_info_v2_t, v1) + offset;
    let here = [
        ("sizeof gdr_t", size_of::<gdr_t>()),
        ("sizeof gdr_mh_t", size_of::<gdr_mh_t>()),
        ("sizeof gdr_info_v2_t", size_of::<gdr_info_v2_t>()),
        ("sizeof gdr_mapping_type_t", 4),
        ("sizeof gdr_attr_t", 4),
        ("offsetof gdr_mh_t h", offset_of!(gdr_mh_t, h)),
        ("offsetof gdr_info_v2_t va", in_v1(offset_of!(gdr_info_v1_t, va))),
        ("offsetof gdr_info_v2_t mapped_size", in_v1(offset_of!(gdr_info_v1_t, mapped_size))),
        ("offsetof gdr_info_v2_t page_size", in_v1(offset_of!(gdr_info_v1_t, page_size))),
        ("offsetof gdr_info_v2_t tm_cycles", in_v1(offset_of!(gdr_info_v1_t, tm_cycles))),
        ("offsetof gdr_info_v2_t cycles_per_ms", in_v1(offset_of!(gdr_info_v1_t, cycles_per_ms))),
        ("offsetof gdr_info_v2_t mapping_type", offset_of!(gdr_info_v2_t, mapping_type)),
        ("GDR_API_MAJOR_VERSION", VERSION.0.into()),
        ("GDR_API_MINOR_VERSION", VERSION.1.into()),
        ("GPU_PAGE_SIZE", GPU_PAGE_SIZE),
        ("GDR_MAPPING_TYPE_NONE", GDR_MAPPING_TYPE_NONE as usize),
        ("GDR_MAPPING_TYPE_WC", MappingType::WriteCombining as usize),
        ("GDR_MAPPING_TYPE_CACHING", MappingType::Cached as usize),
        ("GDR_MAPPING_TYPE_DEVICE", MappingType::Device as usize),
        ("GDR_PIN_FLAG_FORCE_PCIE", PinFlags::FORCE_PCIE.bits() as usize),
        ("GDR_ATTR_USE_PERSISTENT_MAPPING", Attribute::UsePersistentMapping as usize),
        ("GDR_ATTR_SUPPORT_PIN_FLAG_FORCE_PCIE", Attribute::SupportPinFlagForcePcie as usize),
        ("GDR_ATTR_USING_DMA_BUF_MMAP", Attribute::UsingDmaBufMmap as usize),
        ("mapped", INFO_MAPPED as usize),
        ("wc_mapping", INFO_WC_MAPPING as usize),
    ];
    PACKAGE.check_layout(&["-std=gnu99", "-pedantic"], &here);
    // As in GDRCopy 2.6 on 64-bit platforms.
    assert_eq!((size_of::<gdr_info_v1_t>(), size_of::<gdr_info_v2_t>()), (40, 48));
    assert_eq!(offset_of!(gdr_info_v1_t, bits), 36);
}

#[test]
fn only_the_functions_of_the_header_are_exported() {
    // `gdr_get_info` is in the macro.
    PACKAGE.check_exports(&["gdrapi.h"], &["gdr_get_info"]);
}

#[test]
fn programs_that_check_themselves_pass() {
    for name in ["life", "errors", "fork", "threads"] {
        Program::compile(name).passes();
    }
}

#[test]
fn access_to_an_unmapped_mapping_faults() {
    let program = Program::compile("fault");
    // What the program unmapped is a hole; what was taken from it raises the signal of GDRCopy.
    for (way, signal) in [("unmap", libc::SIGSEGV), ("unpin", libc::SIGBUS), ("close", libc::SIGBUS)] {
        let output = program.run(&[way], &[("GDRCOPY_BACKEND", "host")]);
        assert_eq!(output.status.signal(), Some(signal), "{way}: {output:?}");
    }
}

#[test]
fn revoked_mappings_merge_in_the_kernel() {
    let program = Program::compile("left");
    for way in ["unpin", "close"] {
        let output = program.run(&[way], &[("GDRCOPY_BACKEND", "host")]);
        assert!(output.status.success(), "{way}: {output:?}");
    }
}

#[test]
fn the_library_can_be_loaded_and_stays() {
    let program = Program::compile("loaded");
    program.passes();
    // Without messages too.
    let output = program.run::<&str>(&[], &[("GDRCOPY_BACKEND", "host")]);
    assert!(output.status.success(), "{output:?}");
    assert_eq!(String::from_utf8_lossy(&output.stderr), "");
}

#[test]
fn an_opened_library_needs_a_gpu_unless_told_otherwise() {
    let program = Program::compile("refused");
    let refuse = |errno: i32, environment: &[(&str, &str)]| {
        let environment = [environment, &[("GDRCOPY_ENABLE_LOGGING", "1")]].concat();
        let output = program.run(&[errno.to_string()], &environment);
        assert!(output.status.success(), "{output:?}");
        if output.stdout == b"skip\n" {
            println!("skipped for {environment:?}: it works on this machine");
            return None;
        }
        Some(String::from_utf8(output.stderr).unwrap())
    };
    if let Some(log) = refuse(libc::ENODEV, &[]) {
        assert!(log.starts_with("ERR:  gdr_open: GPU memory cannot be mapped here: gdrdrv: "), "{log}");
        assert!(log.contains(" | dmabuf: ") && log.contains(" | rm: ") && !log.contains("host: "), "{log}");
    }
    if let Some(log) = refuse(libc::ENODEV, &[("GDRCOPY_USE_DMABUF_MMAP", "1")]) {
        assert!(log.contains("dmabuf: ") && !log.contains("gdrdrv: "), "{log}");
    }
    let log = refuse(libc::EINVAL, &[("GDRCOPY_BACKEND", "gpu")]).expect("there is no such backend");
    assert!(log.starts_with("ERR:  gdr_open: backend (GDRCOPY_BACKEND) is gpu: "), "{log}");
}

#[test]
fn messages_are_those_of_the_level_and_tell_the_reason() {
    let program = Program::compile("messages");
    let lines = |environment: &[(&str, &str)]| {
        let environment = [environment, &[("GDRCOPY_BACKEND", "host")]].concat();
        let output = program.run::<&str>(&[], &environment);
        assert!(output.status.success(), "{output:?}");
        let log = String::from_utf8(output.stderr).unwrap();
        log.lines().map(|line| line[..6].to_owned()).collect::<Vec<_>>()
    };
    let error = || ["ERR:  "; 3].map(String::from).to_vec();
    assert_eq!(lines(&[]), Vec::<String>::new());
    assert_eq!(lines(&[("GDRCOPY_LOG_LEVEL", "1")]), Vec::<String>::new());
    assert_eq!(lines(&[("GDRCOPY_ENABLE_LOGGING", "0")]), error());
    assert_eq!(lines(&[("GDRCOPY_ENABLE_LOGGING", "1"), ("GDRCOPY_LOG_LEVEL", "4")]), error());
    assert_eq!(lines(&[("GDRCOPY_ENABLE_LOGGING", "1"), ("GDRCOPY_LOG_LEVEL", "5")]), Vec::<String>::new());
    // The host backend warns that it maps no GPU; what is likely to serve, and tokens, are worth a word.
    for (level, word) in [("3", None), ("2", Some("INFO: ")), ("1", Some("INFO: ")), ("0", Some("INFO: "))] {
        let all = lines(&[("GDRCOPY_ENABLE_LOGGING", "1"), ("GDRCOPY_LOG_LEVEL", level)]);
        let expected = word.into_iter().chain(["WARN: ", "ERR:  "]).chain(word).chain(["ERR:  "; 2]);
        assert_eq!(all, expected.collect::<Vec<_>>(), "{level}");
    }
    // They tell the reason.
    let output = program.run::<&str>(&[], &[("GDRCOPY_BACKEND", "host"), ("GDRCOPY_ENABLE_LOGGING", "1")]);
    let log = String::from_utf8(output.stderr).unwrap();
    let [pin, copy, unpin] = log.lines().collect::<Vec<_>>()[..] else { panic!("{log}") };
    assert!(pin.starts_with("ERR:  gdr_pin_buffer_v2: ") && pin.contains("pin flags is 8: "), "{log}");
    assert!(copy.starts_with("ERR:  gdr_copy_to_mapping: mapping is none: "), "{log}");
    assert!(unpin.starts_with("ERR:  gdr_unpin_buffer: handle is 0x"), "{log}");
}

#[test]
fn the_header_is_cplusplus_too() {
    if std::process::Command::new("g++").arg("--version").output().is_err() {
        println!("skipped: no g++ here");
        return;
    }
    // The programs are C; what matters is that they link by the same names.
    Program::compile_with("refused", "g++", &["-x", "c++", "-std=c++11"]);
    Program::compile_with("fault", "g++", &["-x", "c++", "-std=c++11"]);
}
