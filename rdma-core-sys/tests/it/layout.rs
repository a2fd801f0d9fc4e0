//! Every declaration against the installed headers: a C program says what they are to a C compiler.

use std::collections::{BTreeMap, HashSet};
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use rdma_core_sys::abi::{Constant, Growth, Layout};

/// Declared here, and absent from the headers of rdma-core 44, the oldest that the tests meet.
const NEWER: &[&str] = &[
    "MLX5DV_QP_CREATE_OOO_DP",
    "MLX5DV_UAR_ALLOC_TYPE_NC_DEDICATED",
    "MLX5DV_REG_DMABUF_ACCESS_DATA_DIRECT",
];

const HEADERS: &str = "\
#include <stdio.h>
#include <stddef.h>
#include <stdint.h>
#include <infiniband/verbs.h>
#include <infiniband/mlx5dv.h>
#if __has_include(<rdma/fabric.h>)
#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_eq.h>
#include <rdma/fi_errno.h>
#endif
";

/// Whether a type or constant has a name of libfabric.
fn is_of_libfabric(name: &str) -> bool {
    ["struct fi", "FI_"].iter().any(|prefix| name.starts_with(prefix))
}

fn cc(arguments: &[&str], source: &Path) -> Option<std::process::Output> {
    let compiler = std::env::var("CC").unwrap_or_else(|_| "cc".into());
    Command::new(compiler).args(arguments).arg(source).stdin(Stdio::null()).output().ok()
}

/// The text of the headers as the compiler sees it, with the names of macros.
fn preprocessed(dir: &Path) -> Result<String, String> {
    let source = dir.join("headers.c");
    std::fs::write(&source, HEADERS).expect("a scratch directory");
    let output = cc(&["-E", "-dD"], &source).ok_or("there is no C compiler")?;
    if !output.status.success() {
        return Err(String::from_utf8_lossy(&output.stderr).lines().take(2).collect());
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

fn c_path(path: &str) -> &str {
    path.strip_prefix("r#").unwrap_or(path)
}

/// A program that prints `size align` and the offsets of each type, and each constant.
fn probe(layouts: &[&Layout], constants: &[&Constant]) -> String {
    let mut text = format!("{HEADERS}int main(void) {{\n");
    for (index, layout) in layouts.iter().enumerate() {
        let c = layout.c_type;
        writeln!(text, "printf(\"T {index} %zu %zu\\n\", sizeof({c}), _Alignof({c}));").unwrap();
        for (path, _) in layout.fields.iter().filter(|(path, _)| !path.is_empty()) {
            let path = c_path(path);
            writeln!(text, "printf(\"F {index} {path} %zu\\n\", offsetof({c}, {path}));").unwrap();
        }
    }
    for constant in constants {
        let name = constant.name;
        // A pointer becomes a number; a negative number stays one.
        writeln!(text, "printf(\"C {name} %lld\\n\", (long long)(intptr_t)({name}));").unwrap();
    }
    text.push_str("return 0;\n}\n");
    text
}

/// The lines of the program, by what they are about.
fn run(dir: &Path, text: &str) -> BTreeMap<String, Vec<i128>> {
    let (source, binary) = (dir.join("probe.c"), dir.join("probe"));
    std::fs::write(&source, text).expect("a scratch directory");
    let output = cc(&["-w", "-o", binary.to_str().unwrap()], &source).expect("the compiler that just ran");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let output = Command::new(&binary).output().expect("the program just built");
    assert!(output.status.success());
    let mut lines = BTreeMap::new();
    for line in String::from_utf8(output.stdout).unwrap().lines() {
        let words: Vec<&str> = line.split(' ').collect();
        let numbers = if words[0] == "T" { 2 } else { 1 };
        let (key, values) = words.split_at(words.len() - numbers);
        lines.insert(key.join(" "), values.iter().map(|value| value.parse().unwrap()).collect());
    }
    lines
}

fn check(index: usize, layout: &Layout, c: &BTreeMap<String, Vec<i128>>) -> Vec<String> {
    let mut wrong = Vec::new();
    let [size, align] = c[&format!("T {index}")][..] else { panic!("two numbers") };
    let ours = layout.size as i128;
    let fits = if layout.grows == Growth::Never { size == ours } else { size >= ours };
    if !fits || align != layout.align as i128 {
        wrong.push(format!("{}: {ours}/{} bytes here, {size}/{align} there", layout.c_type, layout.align));
    }
    // What grows in front keeps its distance from the end.
    let shift = if layout.grows == Growth::Front { size - ours } else { 0 };
    for (path, offset) in layout.fields.iter().filter(|(path, _)| !path.is_empty()) {
        let there = c[&format!("F {index} {}", c_path(path))][0] - shift;
        if there != *offset as i128 {
            wrong.push(format!("{}.{path}: at {offset} here, at {there} there", layout.c_type));
        }
    }
    wrong
}

#[test]
fn declarations_are_those_of_the_headers() {
    let dir = scratch("layout");
    let headers = match preprocessed(&dir) {
        Ok(headers) => headers,
        Err(why) => {
            println!("skipped: {why}");
            return;
        }
    };
    let words: HashSet<&str> = headers.split(|c: char| !c.is_ascii_alphanumeric() && c != '_').collect();
    let has_libfabric = words.contains("fi_info");
    if !has_libfabric {
        println!("skipped those of libfabric: its headers are not installed");
    }
    let is_tested = |name: &str| has_libfabric || !is_of_libfabric(name);
    type Constants = Vec<&'static Constant>;
    let (known, unknown): (Constants, Constants) =
        rdma_core_sys::constants().filter(|c| is_tested(c.name)).partition(|c| words.contains(c.name));
    let layouts: Vec<_> = rdma_core_sys::layouts().filter(|layout| is_tested(layout.c_type)).collect();
    let mut wrong: Vec<String> = unknown
        .iter()
        .filter(|c| !NEWER.contains(&c.name))
        .map(|c| format!("{} is in no header", c.name))
        .collect();

    let c = run(&dir, &probe(&layouts, &known));
    let mut fields = 0;
    for (index, layout) in layouts.iter().enumerate() {
        fields += layout.fields.len();
        wrong.extend(check(index, layout, &c));
    }
    for constant in &known {
        let there = c[&format!("C {}", constant.name)][0];
        // The program prints 64 bits with a sign.
        if (there - constant.value) % (1 << 64) != 0 {
            wrong.push(format!("{}: {} here, {there} there", constant.name, constant.value));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    println!("{} types, {fields} fields, {} constants", layouts.len(), known.len());
    assert!(fields > 250 && known.len() > 150, "the lists are whole");
}

fn scratch(name: &str) -> PathBuf {
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}-{}", std::process::id()));
    std::fs::create_dir_all(&dir).expect("a scratch directory");
    dir
}
