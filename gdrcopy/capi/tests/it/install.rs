//! The installation script.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use crate::common::{finish, fresh_directory, library, package};

fn install(arguments: &[&str]) -> Output {
    finish(Command::new("sh").arg(package("install")).args(arguments))
}

fn refused(arguments: &[&str]) -> String {
    let output = install(arguments);
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let text = String::from_utf8(output.stderr).unwrap();
    // Other commands may have complained before.
    let last = text.lines().last().unwrap();
    assert!(last.starts_with("install: "), "{text}");
    last.to_owned()
}

fn link(path: &Path) -> String {
    fs::read_link(path).unwrap().into_os_string().into_string().unwrap()
}

#[test]
fn a_staged_installation_has_all_parts_and_can_be_repeated() {
    let stage = fresh_directory("stage");
    let (library, stage_arg) = (library(), stage.to_str().unwrap());
    let arguments = [
        "--destdir",
        stage_arg,
        "--prefix=/opt/gdr",
        "--libdir",
        "/opt/gdr/lib64",
        "--library",
        library.to_str().unwrap(),
    ];
    for _ in 0..2 {
        let output = install(&arguments);
        assert!(output.status.success(), "{output:?}");
        let lib = stage.join("opt/gdr/lib64");
        assert_eq!(fs::read(lib.join("libgdrapi.so.2.6")).unwrap(), fs::read(&library).unwrap());
        assert_eq!(link(&lib.join("libgdrapi.so.2")), "libgdrapi.so.2.6");
        assert_eq!(link(&lib.join("libgdrapi.so")), "libgdrapi.so.2");
        let header = fs::read(stage.join("opt/gdr/include/gdrapi.h")).unwrap();
        assert_eq!(header, fs::read(package("include/gdrapi.h")).unwrap());
        let pc = fs::read_to_string(lib.join("pkgconfig/gdrapi.pc")).unwrap();
        assert!(pc.contains("\nlibdir=/opt/gdr/lib64\n") && !pc.contains('@'), "{pc}");
        assert!(!pc.contains(stage_arg), "the stage is not where it will be: {pc}");
        let entries = fs::read_dir(&lib).unwrap().count();
        assert_eq!(entries, 4, "nothing is left over");
    }
}

#[test]
fn help_and_mistakes_change_nothing() {
    let output = install(&["--help"]);
    assert!(output.status.success() && output.stdout.starts_with(b"usage: "), "{output:?}");
    assert!(refused(&["--destination", "/tmp"]).contains("--destination"));
    assert!(refused(&["--prefix"]).contains("needs a value"));
    assert!(refused(&["--prefix="]).contains("is empty"));
    assert!(refused(&["--prefix", "here"]).contains("not an absolute path"));
    assert!(refused(&["--library", "/nonexistent/libgdrapi.so"]).contains("no such file"));
    let file = fresh_directory("file").join("file");
    fs::write(&file, "").unwrap();
    let library = library();
    let arguments = ["--destdir", file.to_str().unwrap(), "--library", library.to_str().unwrap()];
    assert!(refused(&arguments).contains("cannot make"));
}
