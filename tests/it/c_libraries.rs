//! The installation of the C libraries.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::Duration;

use gdsync_testkit::process::{built, printed, run_within};

/// Each library, its version, its folder, and what cargo calls it.
const LIBRARIES: [(&str, &str, &str, &str); 5] = [
    ("gdrapi", "2.6", "gdrcopy/capi", "libgdrapi.so"),
    ("gdsync", "2.2", "gdsync/capi", "libgdsync_c.so"),
    ("mp", "2.0", "mp/capi", "libmp_c.so"),
    ("gdasync", "0.1", "capi", "libgdasync_c.so"),
    ("nccl-rma-gda", "0.1", "nccl", "libnccl_rma_gda.so"),
];

fn root(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

fn finish(command: &mut Command) -> Output {
    run_within(command, Duration::from_secs(300))
}

fn install(arguments: &[&str]) -> Output {
    finish(Command::new("sh").arg(root("capi/install")).args(arguments))
}

/// Installs what cargo has built with these tests, below a folder.
fn install_built(stage: &Path, prefix: &str) {
    let directory = built("libgdrapi.so").parent().unwrap().to_owned();
    let (stage, directory) = (stage.to_str().unwrap(), directory.to_str().unwrap());
    let output = install(&["--destdir", stage, "--prefix", prefix, "--built", directory]);
    assert!(output.status.success(), "{}", printed(&output));
}

fn files(directory: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path());
    entries.flat_map(|path| if path.is_dir() { files(&path) } else { vec![path] }).collect()
}

#[test]
fn a_staged_installation_has_all_parts_and_can_be_repeated() {
    let stage = tempfile::tempdir().unwrap();
    let (lib, include) = (stage.path().join("opt/gd/lib"), stage.path().join("opt/gd/include"));
    install_built(stage.path(), "/opt/gd");
    install_built(stage.path(), "/opt/gd");
    let mut headers = 0;
    for (name, version, folder, cargos) in LIBRARIES {
        let so = format!("lib{name}.so");
        let (major, _) = version.split_once('.').unwrap();
        let soname = format!("{so}.{major}");
        let file = format!("{so}.{version}");
        assert_eq!(fs::read(lib.join(&file)).unwrap(), fs::read(built(cargos)).unwrap());
        assert_eq!(fs::read_link(lib.join(&soname)).unwrap(), Path::new(&file));
        assert_eq!(fs::read_link(lib.join(&so)).unwrap(), Path::new(&soname));
        let sources = root(folder).join("include");
        for source in files(&sources) {
            let installed = include.join(source.strip_prefix(&sources).unwrap());
            assert_eq!(fs::read(installed).unwrap(), fs::read(&source).unwrap(), "{source:?}");
            headers += 1;
        }
        let pc = fs::read_to_string(lib.join(format!("pkgconfig/{name}.pc"))).unwrap();
        let is_final = !pc.contains('@') && !pc.contains(stage.path().to_str().unwrap());
        assert!(pc.contains("\nlibdir=/opt/gd/lib\n") && is_final, "{pc}");
    }
    assert_eq!(fs::read_to_string(lib.join("libmpcomm.so")).unwrap(), "INPUT(-lmp)\n");
    assert_eq!(files(&include).len(), headers);
    // Three names, pkg-config's file; libmpcomm.so; two files of CMake.
    assert_eq!(files(&lib).len(), 4 * LIBRARIES.len() + 3, "nothing is left over: {:?}", files(&lib));
}

#[test]
fn packages_have_the_library_under_its_names() {
    let (out, library) = (tempfile::tempdir().unwrap(), built("libgdrapi.so"));
    let run = |program: &str, arguments: &[&dyn AsRef<OsStr>]| {
        let mut command = Command::new(program);
        arguments.iter().for_each(|argument| _ = command.arg(argument));
        let output = finish(command.env("PYTHONPATH", out.path().join("wheel")));
        assert!(output.status.success(), "{}", printed(&output));
        printed(&output)
    };
    let folder = out.path();
    run(
        "sh",
        &[&root("capi/package"), &folder, &"--only", &"gdrapi", &"--built", &library.parent().unwrap()],
    );
    let made = files(folder);
    let package = |kind: &str| made.iter().find(|path| path.extension().is_some_and(|found| found == kind));
    let same = |path: &Path| assert!(fs::read(path).unwrap() == fs::read(&library).unwrap(), "{path:?}");
    if let Some(deb) = package("deb") {
        assert_eq!(run("dpkg-deb", &[&"--field", deb, &"Provides"]), "libgdrapi, gdasync-cmake\n");
        run("dpkg-deb", &[&"--extract", deb, &folder.join("deb")]);
        let installed = files(&folder.join("deb"));
        let links: Vec<_> = installed.iter().filter(|path| path.to_str().unwrap().contains(".so")).collect();
        assert_eq!(links.len(), 3, "{installed:?}");
        links.iter().for_each(|link| same(link));
    }
    if let Some(wheel) = package("whl") {
        run("python3", &[&"-m", &"zipfile", &"-e", wheel, &folder.join("wheel")]);
        let lib = run("python3", &[&"-m", &"gdasync_gdrapi"]);
        same(&Path::new(lib.trim()).join("libgdrapi.so"));
        same(&Path::new(lib.trim()).join("libgdrapi.so.2"));
    }
    assert!(!made.is_empty() || Command::new("dpkg-deb").arg("--version").output().is_err());
}

#[test]
fn help_and_mistakes_change_nothing() {
    let output = install(&["--help"]);
    assert!(output.status.success() && output.stdout.starts_with(b"usage: "), "{output:?}");
    let file = tempfile::NamedTempFile::new().unwrap();
    let file = file.path().to_str().unwrap();
    let directory = tempfile::tempdir().unwrap();
    let stage = directory.path().to_str().unwrap();
    for (arguments, reason) in [
        (&["--destination", "/tmp"][..], "--destination"),
        (&["--prefix"], "needs a value"),
        (&["--prefix="], "is empty"),
        (&["--prefix", "here"], "not an absolute path"),
        (&["--only", "gdrapi,nccl"], "no library nccl"),
        (&["--destdir", stage, "--built", "/nonexistent"], "no such file"),
        (&["--destdir", file, "--built", "/nonexistent"], "cannot make"),
    ] {
        let output = install(arguments);
        assert_eq!(output.status.code(), Some(1), "{output:?}");
        let text = String::from_utf8(output.stderr).unwrap();
        // Other commands may have complained before.
        let last = text.lines().last().unwrap();
        assert!(last.starts_with("install: ") && last.contains(reason), "{text}");
    }
}

#[test]
fn a_cmake_project_finds_the_libraries() {
    if Command::new("cmake").arg("--version").output().is_err() {
        eprintln!("skipped: cmake is not installed");
        return;
    }
    if !Path::new("/usr/include/infiniband/verbs.h").exists() {
        eprintln!("skipped: infiniband/verbs.h is not installed (libibverbs-dev)");
        return;
    }
    let stage = tempfile::tempdir().unwrap();
    install_built(stage.path(), "/opt/gd");
    let prefix = stage.path().join("opt/gd");
    let build = stage.path().join("build");
    let configure = || {
        let mut command = Command::new("cmake");
        command.arg("-S").arg(root("tests/c_project")).arg("-B").arg(&build);
        // In place of CUDA's headers.
        let headers = ["gdsync/capi/tests/c/include", "mp/capi/tests/c/include"].map(root);
        let flags = headers.map(|path| format!("-isystem {}", path.display())).join(" ");
        command.arg(format!("-DCMAKE_C_FLAGS={flags} -Wall -Wextra -Werror"));
        finish(command.arg(format!("-DCMAKE_PREFIX_PATH={}", prefix.display())))
    };
    let output = configure();
    assert!(output.status.success(), "{}", printed(&output));
    let output = finish(Command::new("cmake").arg("--build").arg(&build));
    assert!(output.status.success(), "{}", printed(&output));
    let output = finish(&mut Command::new(build.join("versions")));
    assert_eq!(printed(&output), "gdrapi 2.6 gdsync 2.2 mp 2.0 gdasync 0.1\n");
    // What is not installed is missed with its name.
    fs::remove_file(prefix.join("lib/libmp.so")).unwrap();
    let output = configure();
    let text = printed(&output);
    assert!(!output.status.success() && text.contains("libmp.so is not installed"), "{text}");
}
