//! Compiles C programs against the header and the library of this build, and runs them.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

/// The longest that a program may run; it is ended then and the test fails.
const DEADLINE: Duration = Duration::from_secs(120);

pub(crate) fn package(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

/// The `libgdrapi.so` that Cargo built along with this test.
pub(crate) fn library() -> PathBuf {
    let test = std::env::current_exe().expect("this test has a file");
    let library = test.parent().expect("in a directory").join("libgdrapi.so");
    assert!(library.is_file(), "{} is not there; Cargo builds it beside its tests", library.display());
    library
}

/// An empty directory of one test alone.
pub(crate) fn fresh_directory(name: &str) -> PathBuf {
    let directory = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    // It is there if the test ran before.
    let _ = std::fs::remove_dir_all(&directory);
    std::fs::create_dir_all(&directory).expect("a directory for a test");
    directory
}

/// A compiled program of `tests/c`, in a directory with links to the library.
#[derive(Debug)]
pub(crate) struct Program(PathBuf);

/// Runs a command to its end.
pub(crate) fn finish(command: &mut Command) -> Output {
    let child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let pid = i32::try_from(child.id()).expect("a process id");
    let output = std::thread::spawn(move || child.wait_with_output());
    let start = Instant::now();
    while !output.is_finished() {
        if start.elapsed() > DEADLINE {
            // SAFETY: the child is not waited for yet, so the number is still its own.
            unsafe { libc::kill(pid, libc::SIGKILL) };
            panic!("{command:?} did not end");
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    output.join().expect("waiting does not panic").expect("the output can be read")
}

fn said(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

impl Program {
    /// Compiles with every warning an error. A test uses a program that no other uses.
    pub(crate) fn compile(name: &str) -> Self {
        Self::compile_with(name, "gcc", &["-std=gnu99", "-pedantic"])
    }

    pub(crate) fn compile_with(name: &str, compiler: &str, flags: &[&str]) -> Self {
        let directory = fresh_directory(&format!("{name}-{compiler}"));
        for link in ["libgdrapi.so", "libgdrapi.so.2"] {
            std::os::unix::fs::symlink(library(), directory.join(link)).expect("a link to the library");
        }
        let output = finish(
            Command::new(compiler)
                .args(flags)
                .args(["-Wall", "-Wextra", "-Werror", "-g", "-pthread", "-I"])
                .arg(package("include"))
                .arg(package(&format!("tests/c/{name}.c")))
                .arg("-o")
                .arg(directory.join("program"))
                .arg("-L")
                .arg(&directory)
                .args(["-Wl,--as-needed", "-lgdrapi", "-ldl"]),
        );
        assert!(output.status.success(), "{name}.c: {}", said(&output));
        Self(directory)
    }

    /// Runs on the host backend, with nothing of GDRCopy's in the environment besides `environment`.
    pub(crate) fn run<A: AsRef<OsStr>>(&self, arguments: &[A], environment: &[(&str, &str)]) -> Output {
        let mut command = Command::new(self.0.join("program"));
        for variable in
            ["GDRCOPY_ENABLE_LOGGING", "GDRCOPY_LOG_LEVEL", "GDRCOPY_USE_DMABUF_MMAP", "GDRCOPY_BACKEND"]
        {
            command.env_remove(variable);
        }
        command.env("LD_LIBRARY_PATH", &self.0).args(arguments);
        finish(command.envs(environment.iter().copied()))
    }

    /// Runs a program that checks itself.
    pub(crate) fn passes(&self) {
        let output = self.run::<&str>(&[], &[("GDRCOPY_BACKEND", "host"), ("GDRCOPY_ENABLE_LOGGING", "")]);
        assert!(output.status.success(), "{}: {}", output.status, said(&output));
    }
}
