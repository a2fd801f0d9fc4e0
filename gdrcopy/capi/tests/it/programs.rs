//! C programs on the host backend, each in a process of its own.

use std::os::unix::process::ExitStatusExt;

use crate::common::Program;

#[test]
fn a_mapping_lives() {
    Program::compile("life").passes();
}

#[test]
fn mistakes_have_their_error_numbers() {
    Program::compile("errors").passes();
}

#[test]
fn a_mapping_that_is_gone_faults() {
    let program = Program::compile("fault");
    // What the program unmapped is a hole; what was taken from it raises the signal of GDRCopy.
    for (way, signal) in [("unmap", libc::SIGSEGV), ("unpin", libc::SIGBUS), ("close", libc::SIGBUS)] {
        let output = program.run(&[way], &[("GDRCOPY_BACKEND", "host")]);
        assert_eq!(output.status.signal(), Some(signal), "{way}: {output:?}");
    }
}

#[test]
fn mappings_that_are_left_are_few_for_the_kernel() {
    let program = Program::compile("left");
    for way in ["unpin", "close"] {
        let output = program.run(&[way], &[("GDRCOPY_BACKEND", "host")]);
        assert!(output.status.success(), "{way}: {output:?}");
    }
}

#[test]
fn a_child_has_nothing_of_its_parents() {
    Program::compile("fork").passes();
}

#[test]
fn threads_share_everything() {
    Program::compile("threads").passes();
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
