//! The header, the layouts and the symbols.

use std::collections::BTreeMap;
use std::fs;
use std::mem::offset_of;
use std::process::Command;

use gdasync_c::{VERSION, gda_buf, gda_config, gda_exchange, gda_info_t, gda_signal, gda_status};
use gdsync_testkit::process::{built, printed};

use crate::{compiler, finish, fresh_directory, package};

#[test]
fn the_header_compiles_as_c_and_cplusplus() {
    let source = fresh_directory("header").join("header.c");
    fs::write(&source, "#include <gdasync.h>\nint main(void) { return 0; }\n").unwrap();
    for (program, language, standards) in
        [("gcc", "c", &["c99", "c11", "gnu17"][..]), ("g++", "c++", &["c++11", "c++17", "c++20"])]
    {
        for standard in standards {
            let standard = format!("-std={standard}");
            let mut command = compiler(program, &["-x", language, &standard, "-pedantic", "-fsyntax-only"]);
            let output = finish(command.arg(&source));
            assert!(output.status.success(), "{standard}: {}", printed(&output));
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
    let mut in_c: BTreeMap<&str, usize> = text
        .lines()
        .map(|line| line.rsplit_once(' ').expect("a name and a number"))
        .map(|(name, number)| (name, number.parse().expect("a number")))
        .collect();
    for (name, number) in [
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
    ] {
        assert_eq!(in_c.remove(name), Some(number), "{name}");
    }
    assert!(in_c.is_empty(), "printed by layout.c only: {in_c:?}");
}

/// What a program of binutils, which gcc needs too, prints of the library.
fn binutils(program: &str, flags: &[&str]) -> String {
    let output = finish(Command::new(program).args(flags).arg(built("libgdasync_c.so")));
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
    let header = fs::read_to_string(package("include/gdasync.h")).unwrap();
    for function in exported {
        assert!(header.contains(&format!("{function}(")), "{function}");
    }
    assert!(binutils("readelf", &["--dynamic"]).contains("soname: [libgdasync.so.0]"));
}
