//! The structures and numbers against the headers of the kernel, if they are installed.

use std::fmt::Write as _;
use std::process::Command;

use super::{COMMANDS, IOCTL, LAYOUTS};

const HEADERS: &str = "\
#include <stdio.h>
#include <stddef.h>
#include <rdma/ib_user_verbs.h>
#include <rdma/mlx5-abi.h>
#include <rdma/rdma_user_ioctl.h>
#include <rdma/rdma_user_ioctl_cmds.h>
#include <rdma/ib_user_ioctl_cmds.h>
#include <rdma/ib_user_ioctl_verbs.h>
#include <rdma/mlx5_user_ioctl_cmds.h>
";

#[test]
fn declarations_are_those_of_the_headers() {
    let mut program = format!("{HEADERS}int main(void) {{\n");
    let mut expected = String::new();
    for (name, size, fields) in LAYOUTS {
        writeln!(program, "printf(\"{name} %zu\\n\", sizeof(struct {name}));").unwrap();
        writeln!(expected, "{name} {size}").unwrap();
        for (field, offset) in *fields {
            writeln!(program, "printf(\"{name}.{field} %zu\\n\", offsetof(struct {name}, {field}));")
                .unwrap();
            writeln!(expected, "{name}.{field} {offset}").unwrap();
        }
    }
    for (name, value) in COMMANDS.iter().chain(IOCTL) {
        writeln!(program, "printf(\"{name} %llu\\n\", (unsigned long long)({name}));").unwrap();
        writeln!(expected, "{name} {value}").unwrap();
    }
    program.push_str("return 0;\n}\n");

    let dir = std::env::temp_dir().join(format!("card-abi-{}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    let (source, binary) = (dir.join("probe.c"), dir.join("probe"));
    std::fs::write(&source, program).unwrap();
    let built = Command::new("cc").arg("-w").arg("-o").arg(&binary).arg(&source).output();
    let output = match built {
        Ok(built) if built.status.success() => Command::new(&binary).output().unwrap(),
        Ok(built) => {
            let text = String::from_utf8_lossy(&built.stderr).into_owned();
            std::fs::remove_dir_all(&dir).unwrap();
            assert!(text.contains("rdma/"), "{text}");
            eprintln!("skipped: the headers of the kernel are not installed: {text}");
            return;
        }
        Err(error) => {
            std::fs::remove_dir_all(&dir).unwrap();
            eprintln!("skipped: there is no C compiler: {error}");
            return;
        }
    };
    std::fs::remove_dir_all(&dir).unwrap();
    assert_eq!(String::from_utf8(output.stdout).unwrap(), expected);
}
