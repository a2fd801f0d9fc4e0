//! The header, the layouts and the symbols.

use std::mem::offset_of;

use gdasync_c::{VERSION, gda_buf, gda_config, gda_exchange, gda_info_t, gda_signal, gda_status};
use gdsync::memory::ExportedMemory;

use crate::PACKAGE;

#[test]
fn the_header_compiles_as_c_and_cplusplus() {
    for compiler in ["gcc", "g++"] {
        let text = "#include <gdasync.h>\nint main(void) { return 0; }\n";
        PACKAGE.check_standards(compiler, text, &["-pedantic"]);
    }
}

#[test]
fn layouts_and_numbers_agree() {
    let here = [
        ("sizeof gda_config", size_of::<gda_config>()),
        ("offsetof gda_config device", offset_of!(gda_config, device)),
        ("offsetof gda_config max_pieces", offset_of!(gda_config, max_pieces)),
        ("sizeof gda_info", size_of::<gda_info_t>()),
        ("offsetof gda_info device", offset_of!(gda_info_t, device)),
        ("sizeof gda_exchange", size_of::<gda_exchange>()),
        ("offsetof gda_exchange self", offset_of!(gda_exchange, this)),
        ("offsetof gda_exchange release", offset_of!(gda_exchange, release)),
        ("sizeof gda_buf", size_of::<gda_buf>()),
        ("offsetof gda_buf len", offset_of!(gda_buf, len)),
        ("sizeof gda_status", size_of::<gda_status>()),
        ("offsetof gda_status tag", offset_of!(gda_status, tag)),
        ("sizeof gda_signal", size_of::<gda_signal>()),
        ("offsetof gda_signal add", offset_of!(gda_signal, add)),
        ("GDA_VERSION", usize::try_from(VERSION).unwrap()),
        ("GDA_EXPORT_BYTES", ExportedMemory::BYTES),
    ];
    PACKAGE.check_layout(&["-std=c11"], &here);
}

#[test]
fn only_the_functions_of_the_header_are_exported() {
    PACKAGE.check_exports(&["gdasync.h"], &[]);
}
