//! The headers and the symbols.

use std::collections::BTreeMap;
use std::fs;
use std::mem::offset_of;
use std::path::Path;
use std::process::Command;

use gdsync_testkit::process::{built, printed};
use mp_c::{Handle, VERSION, mp_exchange, mp_send_words, mp_wait_words, mp_word_words};

use crate::{compiler, finish, fresh_directory, package};

#[test]
fn the_headers_compile_as_c_and_cplusplus() {
    let has_verbs = Path::new("/usr/include/infiniband/verbs.h").exists();
    let directory = fresh_directory("headers");
    let source = directory.join("header.c");
    for (header, mpi) in
        [("mp.h", ""), ("mp.h", "#define MP_NO_MPI\n"), ("mp/device.cuh", ""), ("comm.h", "")]
    {
        fs::write(&source, format!("{mpi}#include <{header}>\nint main(void) {{ return 0; }}\n")).unwrap();
        for (program, language, standards) in
            [("gcc", "c", &["c99", "c11", "gnu17"][..]), ("g++", "c++", &["c++11", "c++17", "c++20"])]
        {
            if language == "c" && header.ends_with(".cuh") {
                continue;
            }
            if language == "c++" && header != "mp.h" && !has_verbs {
                eprintln!(
                    "skipped: {header} includes infiniband/verbs.h, which is not installed (libibverbs-dev)"
                );
                continue;
            }
            for standard in standards {
                let standard = format!("-std={standard}");
                let flags = ["-x", language, &standard, "-fsyntax-only", "-Wno-unused-function"];
                let output = finish(compiler(program, &flags).arg(&source));
                assert!(output.status.success(), "{header} {standard}: {}", printed(&output));
            }
        }
    }
}

#[test]
fn layouts_and_numbers_agree() {
    let program = fresh_directory("layout").join("program");
    let mut command = compiler("gcc", &["-std=c11"]);
    let output = finish(command.arg(package("tests/c/layout.c")).arg("-o").arg(&program));
    assert!(output.status.success(), "{}", printed(&output));
    let text = String::from_utf8(finish(&mut Command::new(program)).stdout).unwrap();
    let in_c: BTreeMap<&str, usize> = text
        .lines()
        .map(|line| line.rsplit_once(' ').expect("a name and a number"))
        .map(|(name, number)| (name, number.parse().expect("a number")))
        .collect();
    let here = BTreeMap::from([
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
    ]);
    assert_eq!(in_c, here);
}

/// What a program of binutils, which gcc needs too, prints of the library.
fn binutils(program: &str, flags: &[&str]) -> String {
    let output = finish(Command::new(program).args(flags).arg(built("libmp_c.so")));
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn only_the_functions_of_the_header_are_exported() {
    let symbols = binutils("nm", &["--dynamic", "--defined-only", "--format=posix"]);
    let mut exported: Vec<&str> = symbols.lines().filter_map(|line| line.split(' ').next()).collect();
    exported.sort_unstable();
    let list = fs::read_to_string(package("exports.txt")).unwrap();
    assert_eq!(exported, list.lines().collect::<Vec<_>>());
    let header = fs::read_to_string(package("include/mp.h")).unwrap();
    for function in exported {
        assert!(header.contains(&format!("{function}(")), "{function}");
    }
    let dynamic = binutils("readelf", &["--dynamic"]);
    assert!(dynamic.contains("soname: [libmp.so.2]"));
    for needed in ["libmpi", "libcuda", "libibverbs"] {
        assert!(!dynamic.contains(needed), "{dynamic}");
    }
}
