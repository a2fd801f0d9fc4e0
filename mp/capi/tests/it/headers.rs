//! The headers and the symbols.

use std::mem::offset_of;

use mp_c::{Handle, VERSION, mp_exchange, mp_send_words, mp_wait_words, mp_word_words};

use crate::{PACKAGE, has_verbs_header};

#[test]
fn the_headers_compile_as_c_and_cplusplus() {
    for (header, mpi) in
        [("mp.h", ""), ("mp.h", "#define MP_NO_MPI\n"), ("mp/device.cuh", ""), ("comm.h", "")]
    {
        let text = format!("{mpi}#include <{header}>\nint main(void) {{ return 0; }}\n");
        for compiler in ["gcc", "g++"] {
            if compiler == "gcc" && header.ends_with(".cuh") {
                continue;
            }
            if compiler == "g++" && header != "mp.h" && !has_verbs_header() {
                continue;
            }
            PACKAGE.check_standards(compiler, &text, &["-Wno-unused-function"]);
        }
    }
}

#[test]
fn layouts_and_numbers_agree() {
    let here = [
        ("sizeof mp_exchange", size_of::<mp_exchange>()),
        ("offsetof mp_exchange rank", offset_of!(mp_exchange, rank)),
        ("offsetof mp_exchange self", offset_of!(mp_exchange, own)),
        ("offsetof mp_exchange allgather", offset_of!(mp_exchange, allgather)),
        ("offsetof mp_exchange release", offset_of!(mp_exchange, release)),
        ("sizeof mp_word_words", size_of::<mp_word_words>()),
        ("offsetof mp_word_words value", offset_of!(mp_word_words, value)),
        ("sizeof mp_send_words", size_of::<mp_send_words>()),
        ("offsetof mp_send_words db_ptr", offset_of!(mp_send_words, db_ptr)),
        ("offsetof mp_send_words dbrec_value", offset_of!(mp_send_words, dbrec_value)),
        ("sizeof mp_wait_words", size_of::<mp_wait_words>()),
        ("offsetof mp_wait_words sema_value", offset_of!(mp_wait_words, sema_value)),
        ("offsetof mp_wait_words cond", offset_of!(mp_wait_words, cond)),
        ("sizeof mp_request_t", size_of::<Handle>()),
        ("MP_API_VERSION", usize::try_from(VERSION).unwrap()),
    ];
    PACKAGE.check_layout(&["-std=c11"], &here);
}

#[test]
fn only_the_functions_of_the_header_are_exported() {
    let dynamic = PACKAGE.check_exports(&["mp.h"], &[]);
    for needed in ["libmpi", "libcuda", "libibverbs"] {
        assert!(!dynamic.contains(needed), "{dynamic}");
    }
}
