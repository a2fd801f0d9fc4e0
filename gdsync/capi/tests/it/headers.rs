//! The headers and the symbols.

use std::mem::offset_of;

use gdsync_c::{
    VERSION, gds_cq, gds_descriptor, gds_mem_desc, gds_mlx5_dword_wait_info, gds_mlx5_send_info,
    gds_mlx5_wait_info, gds_operand, gds_qp, gds_request, gds_wait_value32, gds_write_memory,
    gds_write_value32,
};

use crate::{PACKAGE, has_rdma_core};

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
