//! The headers and the symbols.

use std::collections::BTreeMap;
use std::fs;
use std::mem::offset_of;
use std::process::Command;

use gdsync_c::{
    VERSION, gds_cq, gds_descriptor, gds_mem_desc, gds_mlx5_dword_wait_info, gds_mlx5_send_info,
    gds_mlx5_wait_info, gds_operand, gds_qp, gds_request, gds_wait_value32, gds_write_memory,
    gds_write_value32,
};

use gdsync_testkit::process::{built, printed};

use crate::{compiler, finish, fresh_directory, has_rdma_core, package};

const HEADERS: [&str; 5] =
    ["gdsync.h", "gdsync/core.h", "gdsync/tools.h", "gdsync/mlx5.h", "gdsync/device.cuh"];

#[test]
fn the_headers_compile_as_c_and_cplusplus() {
    if !has_rdma_core() {
        return;
    }
    let directory = fresh_directory("headers");
    for header in HEADERS {
        let source = directory.join("header.c");
        let include = |header| format!("#include <{header}>\n");
        let first = if header == "gdsync.h" { String::new() } else { include("gdsync.h") };
        fs::write(&source, format!("{first}{}int main(void) {{ return 0; }}\n", include(header))).unwrap();
        for (program, language, standards) in
            [("gcc", "c", &["c99", "c11", "gnu17"][..]), ("g++", "c++", &["c++11", "c++17", "c++20"])]
        {
            if language == "c" && header.ends_with(".cuh") {
                continue;
            }
            for standard in standards {
                // Anonymous unions are in C99 by an extension, which rdma-core uses as well.
                let standard = format!("-std={standard}");
                let mut command = compiler(program, &["-x", language, &standard, "-fsyntax-only"]);
                let output = finish(command.arg(&source));
                assert!(output.status.success(), "{header} {standard}: {}", printed(&output));
            }
        }
    }
}

#[test]
fn layouts_and_numbers_agree() {
    if !has_rdma_core() {
        return;
    }
    let program = fresh_directory("layout").join("program");
    let mut command = compiler("gcc", &["-std=c11"]);
    let output = finish(command.arg(package("tests/c/layout.c")).arg("-o").arg(&program));
    assert!(output.status.success(), "{}", printed(&output));
    let text = String::from_utf8(finish(&mut Command::new(program)).stdout).unwrap();
    let mut in_c: BTreeMap<&str, usize> = text
        .lines()
        .map(|line| line.rsplit_once(' ').expect("a name and a number"))
        .map(|(name, number)| (name, number.parse().expect("a number")))
        .collect();
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
    for (name, number) in here {
        assert_eq!(in_c.remove(name), Some(number), "{name}");
    }
    assert!(in_c.is_empty(), "printed by layout.c only: {in_c:?}");
    // As in libgdsync 2.2 on 64-bit platforms.
    assert_eq!([size_of::<gds_cq>(), size_of::<gds_qp>(), size_of::<gds_descriptor>()], [16, 32, 40]);
    assert_eq!([size_of::<gds_mem_desc>(), size_of::<gds_request>()], [48, 1856]);
}

/// What a program of binutils, which gcc needs too, prints of the library.
fn binutils(program: &str, flags: &[&str]) -> String {
    let output = finish(Command::new(program).args(flags).arg(built("libgdsync_c.so")));
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn only_the_functions_of_the_headers_are_exported() {
    let symbols = binutils("nm", &["--dynamic", "--defined-only", "--format=posix"]);
    let mut exported: Vec<&str> = symbols.lines().filter_map(|line| line.split(' ').next()).collect();
    exported.sort_unstable();
    let list = fs::read_to_string(package("exports.txt")).unwrap();
    assert_eq!(exported, list.lines().collect::<Vec<_>>());
    let headers: String =
        HEADERS.iter().map(|header| fs::read_to_string(package("include").join(header)).unwrap()).collect();
    for function in exported {
        assert!(headers.contains(&format!("{function}(")), "{function}");
    }
    assert!(binutils("readelf", &["--dynamic"]).contains("soname: [libgdsync.so.2]"));
}
