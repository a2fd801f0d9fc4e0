//! The C interface: layouts and symbols, headers, and C programs on the emulated card and a simulated GPU.

use std::mem::offset_of;
use std::path::{Path, PathBuf};
use std::process::Output;
use std::time::Duration;

use gdsync_c::{
    VERSION, gds_cq, gds_descriptor, gds_mem_desc, gds_mlx5_dword_wait_info, gds_mlx5_send_info,
    gds_mlx5_wait_info, gds_operand, gds_qp, gds_request, gds_wait_value32, gds_write_memory,
    gds_write_value32,
};
use gdsync_testkit::c::Package;
use gdsync_testkit::card;
use gdsync_testkit::process::printed;

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

const HEADERS: [&str; 5] =
    ["gdsync.h", "gdsync/core.h", "gdsync/tools.h", "gdsync/mlx5.h", "gdsync/device.cuh"];

#[test]
fn the_headers_compile_as_c_and_cplusplus() {
    if !has_rdma_core() {
        return;
    }
    for header in HEADERS {
        let include = |header| format!("#include <{header}>\n");
        let first = if header == "gdsync.h" { String::new() } else { include("gdsync.h") };
        let text = format!("{first}{}int main(void) {{ return 0; }}\n", include(header));
        for compiler in ["gcc", "g++"] {
            if compiler == "gcc" && header.ends_with(".cuh") {
                continue;
            }
            // Anonymous unions are in C99 by an extension, which rdma-core uses as well.
            PACKAGE.check_standards(compiler, &text, &[]);
        }
    }
}

#[test]
fn layouts_and_numbers_agree() {
    if !has_rdma_core() {
        return;
    }
    let operand = offset_of!(gds_descriptor, operand);
    let here = [
        ("sizeof gds_cq_t", size_of::<gds_cq>()),
        ("offsetof gds_cq_t curr_offset", offset_of!(gds_cq, curr_offset)),
        ("sizeof gds_qp_t", size_of::<gds_qp>()),
        ("offsetof gds_qp_t send_cq", offset_of!(gds_qp, send_cq)),
        ("offsetof gds_qp_t recv_cq", offset_of!(gds_qp, recv_cq)),
        ("offsetof gds_qp_t dev_context", offset_of!(gds_qp, dev_context)),
        ("sizeof gds_send_request_t", size_of::<gds_request>()),
        ("sizeof gds_wait_request_t", size_of::<gds_request>()),
        ("sizeof gds_wait_value32_t", size_of::<gds_wait_value32>()),
        ("offsetof gds_wait_value32_t cond_flags", offset_of!(gds_wait_value32, cond_flags)),
        ("offsetof gds_wait_value32_t flags", offset_of!(gds_wait_value32, flags)),
        ("sizeof gds_write_value32_t", size_of::<gds_write_value32>()),
        ("offsetof gds_write_value32_t flags", offset_of!(gds_write_value32, flags)),
        ("sizeof gds_write_memory_t", size_of::<gds_write_memory>()),
        ("offsetof gds_write_memory_t flags", offset_of!(gds_write_memory, flags)),
        ("sizeof gds_descriptor_t", size_of::<gds_descriptor>()),
        ("offsetof gds_descriptor_t send", operand + offset_of!(gds_operand, request)),
        ("offsetof gds_descriptor_t writemem", operand + offset_of!(gds_operand, writemem)),
        ("sizeof gds_mem_desc_t", size_of::<gds_mem_desc>()),
        ("offsetof gds_mem_desc_t alloc_size", offset_of!(gds_mem_desc, alloc_size)),
        ("offsetof gds_mem_desc_t mh", offset_of!(gds_mem_desc, mh)),
        ("sizeof gds_mlx5_dword_wait_info_t", size_of::<gds_mlx5_dword_wait_info>()),
        ("sizeof gds_mlx5_send_info_t", size_of::<gds_mlx5_send_info>()),
        ("offsetof gds_mlx5_send_info_t dbrec_ptr", offset_of!(gds_mlx5_send_info, dbrec_ptr)),
        ("offsetof gds_mlx5_send_info_t db_value", offset_of!(gds_mlx5_send_info, db_value)),
        ("sizeof gds_mlx5_wait_info_t", size_of::<gds_mlx5_wait_info>()),
        ("offsetof gds_mlx5_wait_info_t cqe_ptr", offset_of!(gds_mlx5_wait_info, cqe_ptr)),
        ("offsetof gds_mlx5_wait_info_t flag_value", offset_of!(gds_mlx5_wait_info, flag_value)),
        ("GDS_API_VERSION", usize::try_from(VERSION).unwrap()),
    ];
    PACKAGE.check_layout(&["-std=c11"], &here);
    // As in libgdsync 2.2 on 64-bit platforms.
    assert_eq!([size_of::<gds_cq>(), size_of::<gds_qp>(), size_of::<gds_descriptor>()], [16, 32, 40]);
    assert_eq!([size_of::<gds_mem_desc>(), size_of::<gds_request>()], [48, 1856]);
}

#[test]
fn only_the_functions_of_the_headers_are_exported() {
    PACKAGE.check_exports(&HEADERS, &[]);
}

/// What a program says, which must pass in each environment.
fn passes(name: &str, environments: &[&[(&str, &str)]]) -> Option<String> {
    if !has_rdma_core() {
        return None;
    }
    Some(run(&Program::compile(name), environments))
}

fn run(program: &Program, environments: &[&[(&str, &str)]]) -> String {
    let run = |environment: &&[(&str, &str)]| {
        let output = program.run(environment);
        assert!(output.status.success(), "{environment:?}: {}: {}", output.status, printed(&output));
        printed(&output)
    };
    environments.iter().map(run).collect()
}

#[test]
fn the_example_plays_ping_pong() {
    if !has_rdma_core() {
        return;
    }
    let program = Program::of("pingpong", "../../examples/c/pingpong_gds.c");
    let lossy = [("GDASYNC_CARD_LINK", "ib"), ("GDSYNC_FAULTS", "seed=1,drop=0.02,duplicate=0.02")];
    let said = run(&program, &[&[("GDASYNC_CARD_LINK", "eth")], &lossy]);
    assert_eq!(said, "1000 rounds of 64 bytes, 8 queued ahead: all right\n".repeat(2));
}

#[test]
fn requests_are_posted_waited_for_and_polled_in_every_way() {
    passes("requests", &[&[]]);
}

#[test]
fn datagrams_are_sent_to_an_address_handle() {
    passes("datagrams", &[&[("GDASYNC_CARD_LINK", "ib")], &[("GDASYNC_CARD_LINK", "eth")]]);
}

#[test]
fn threads_do_not_hold_up_each_other() {
    passes("threads", &[&[]]);
}

#[test]
fn misuse_has_an_error_number_and_a_line() {
    let Some(log) = passes("misuse", &[&[]]) else { return };
    let lines: Vec<_> = log.lines().collect();
    assert!(lines.len() > 80, "{log}");
    for line in &lines {
        assert!(line.starts_with("gdsync: gds_") && !line.contains("::"), "{line}");
    }
    assert!(!log.contains("panicked"), "{log}");
}
