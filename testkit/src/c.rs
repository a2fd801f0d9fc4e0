//! Libraries for C: their headers, layouts and symbols, and programs that use them.

use std::collections::BTreeMap;
use std::net::TcpListener;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::thread::scope;
use std::time::Duration;
use std::{fs, iter};

use crate::process::{built, printed, run_within};

/// The package of a library, as its tests see it.
#[derive(Clone, Copy, Debug)]
pub struct Package {
    /// `CARGO_MANIFEST_DIR`.
    pub root: &'static str,
    /// `CARGO_TARGET_TMPDIR`.
    pub scratch: &'static str,
    /// Folders of headers, relative to the package.
    pub includes: &'static [&'static str],
    /// The library's file as cargo builds it.
    pub file: &'static str,
    /// Its name for programs, without `.so` and the version.
    pub name: &'static str,
    /// The version in its soname.
    pub version: u32,
    /// The longest that a program may run; it is killed then and the test fails.
    pub limit: Duration,
}

/// What checks the memory of programs: "valgrind", or "address", gcc's sanitizer. `.ci/long c_memory` sets it.
fn checker() -> Option<String> {
    std::env::var("C_CHECK").ok()
}

impl Package {
    /// Runs a command, which must end within the limit.
    pub fn finish(&self, command: &mut Command) -> Output {
        run_within(command, self.limit)
    }

    /// Runs a program as all ranks of a job, and returns what they print, by rank.
    ///
    /// # Panics
    /// If one fails.
    pub fn job(&self, size: usize, program: impl Fn() -> Command + Sync) -> Vec<String> {
        let free = TcpListener::bind("127.0.0.1:0").expect("a free port").local_addr().expect("its number");
        let one = |rank: usize| {
            let mut command = program();
            command.env("RANK", rank.to_string()).env("WORLD_SIZE", size.to_string());
            command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", free.port().to_string());
            self.finish(&mut command)
        };
        let outputs: Vec<_> = scope(|scope| {
            let ranks: Vec<_> = (0..size).map(|rank| scope.spawn(move || one(rank))).collect();
            ranks.into_iter().map(|rank| rank.join().expect("it ended in time")).collect()
        });
        let said: Vec<_> = outputs.iter().map(printed).collect();
        assert!(outputs.iter().all(|output| output.status.success()), "{}", said.join("\n"));
        said
    }

    /// A file of the package.
    #[must_use]
    pub fn path(&self, path: &str) -> PathBuf {
        Path::new(self.root).join(path)
    }

    /// An empty directory of one test alone.
    ///
    /// # Panics
    /// If it cannot be made.
    #[must_use]
    pub fn fresh_directory(&self, name: &str) -> PathBuf {
        let directory = Path::new(self.scratch).join(self.name).join(name);
        // It is there if the test ran before.
        let _ = fs::remove_dir_all(&directory);
        fs::create_dir_all(&directory).expect("a directory for a test");
        directory
    }

    /// A compiler with every warning an error, and the headers.
    #[must_use]
    pub fn compiler(&self, compiler: &str, flags: &[&str]) -> Command {
        let mut command = Command::new(compiler);
        command.args(flags).args(["-Wall", "-Wextra", "-Werror", "-g", "-pthread"]);
        if checker().as_deref() == Some("address") {
            command.args(["-fsanitize=address", "-fno-omit-frame-pointer"]);
        }
        for headers in self.includes {
            command.arg("-I").arg(self.path(headers));
        }
        command
    }

    /// A directory with links to the library under the names that programs look for; also to others, given as (file, names).
    ///
    /// # Panics
    /// If the links cannot be made.
    #[must_use]
    pub fn linked(&self, directory: &str, others: &[(&str, &[&str])]) -> PathBuf {
        let directory = self.fresh_directory(directory);
        let (plain, soname) = (format!("{}.so", self.name), self.soname());
        let own: (&str, &[&str]) = (self.file, &[&plain, &soname]);
        for (file, names) in iter::once(own).chain(others.iter().copied()) {
            for name in names {
                symlink(built(file), directory.join(name)).expect("a link");
            }
        }
        directory
    }

    /// [`Package::linked`] with the simulated CUDA driver.
    #[must_use]
    pub fn linked_with_cuda(&self, directory: &str) -> PathBuf {
        self.linked(directory, &[("libsimulated_cuda.so", &["libcuda.so", "libcuda.so.1"])])
    }

    /// Compiles sources of the package to `program` in a directory of [`Package::linked`].
    ///
    /// # Panics
    /// If it does not compile.
    pub fn compile(&self, mut compiler: Command, sources: &[&str], directory: &Path, libraries: &[&str]) {
        compiler.args(sources.iter().map(|source| self.path(source)));
        compiler.arg("-o").arg(directory.join("program")).arg("-L").arg(directory).args(libraries);
        let output = self.finish(&mut compiler);
        assert!(output.status.success(), "{sources:?}: {}", printed(&output));
    }

    /// The program of a directory, with these libraries preloaded, under what checks memory if that is asked for.
    #[must_use]
    pub fn program(&self, directory: &Path, preloaded: &[PathBuf]) -> Command {
        let mut command = Command::new(directory.join("program"));
        let mut preloaded = preloaded.to_vec();
        match checker().as_deref() {
            Some("valgrind") => {
                command = Command::new("valgrind");
                let known = concat!("--suppressions=", env!("CARGO_MANIFEST_DIR"), "/valgrind.supp");
                command.args(["--quiet", "--error-exitcode=99", known]).arg(directory.join("program"));
            }
            Some("address") => {
                let found = self.finish(Command::new("gcc").arg("-print-file-name=libasan.so"));
                preloaded.insert(0, printed(&found).trim().into());
                // Handles are never freed, so that no address is that of two.
                command.env("ASAN_OPTIONS", "detect_leaks=0");
            }
            _ => {}
        }
        let preloaded: Vec<_> = preloaded.iter().map(|library| library.display().to_string()).collect();
        command.env("LD_LIBRARY_PATH", directory).env("LD_PRELOAD", preloaded.join(" "));
        command
    }

    /// Compiles a text in all standards of C (`gcc`) or C++ (`g++`), without a program.
    ///
    /// # Panics
    /// If it does not compile.
    pub fn check_standards(&self, compiler: &str, text: &str, flags: &[&str]) {
        let (language, standards) = match compiler {
            "gcc" => ("c", ["c99", "c11", "gnu17"]),
            _ => ("c++", ["c++11", "c++17", "c++20"]),
        };
        let source = self.fresh_directory("standards").join("header.c");
        fs::write(&source, text).expect("a source");
        for standard in standards {
            let standard = format!("-std={standard}");
            let mut command = self.compiler(compiler, &["-x", language, &standard, "-fsyntax-only"]);
            let output = self.finish(command.args(flags).arg(&source));
            assert!(output.status.success(), "{text} {standard}: {}", printed(&output));
        }
    }

    /// Checks that `tests/c/layout.c` prints these numbers, by name, and no others.
    ///
    /// # Panics
    /// If it does not.
    pub fn check_layout(&self, flags: &[&str], here: &[(&str, usize)]) {
        let directory = self.fresh_directory("layout");
        self.compile(self.compiler("gcc", flags), &["tests/c/layout.c"], &directory, &[]);
        let output = self.finish(&mut Command::new(directory.join("program")));
        assert!(output.status.success(), "{output:?}");
        let text = String::from_utf8(output.stdout).expect("text");
        let mut in_c: BTreeMap<&str, usize> = text
            .lines()
            .map(|line| line.rsplit_once(' ').expect("a name and a number"))
            .map(|(name, number)| (name, number.parse().expect("a number")))
            .collect();
        for &(name, number) in here {
            assert_eq!(in_c.remove(name), Some(number), "{name}");
        }
        assert!(in_c.is_empty(), "printed by layout.c only: {in_c:?}");
    }

    fn soname(&self) -> String {
        format!("{}.so.{}", self.name, self.version)
    }

    /// What a program of binutils, which gcc needs too, prints of the library.
    fn binutils(&self, program: &str, flags: &[&str]) -> String {
        let output = self.finish(Command::new(program).args(flags).arg(built(self.file)));
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).expect("text")
    }

    /// Checks that the library exports what `exports.txt` lists under its soname, and that each function is in one of the headers,
    /// but for those that only macros use. Returns its dynamic section.
    ///
    /// # Panics
    /// If it does not.
    pub fn check_exports(&self, headers: &[&str], by_macros: &[&str]) -> String {
        let symbols = self.binutils("nm", &["--dynamic", "--defined-only", "--format=posix"]);
        let mut exported: Vec<&str> = symbols.lines().filter_map(|line| line.split(' ').next()).collect();
        exported.sort_unstable();
        let list = fs::read_to_string(self.path("exports.txt")).expect("a list");
        assert_eq!(exported, list.lines().collect::<Vec<_>>());
        let read = |header: &&str| fs::read_to_string(self.path("include").join(header)).expect("a header");
        let headers: String = headers.iter().map(read).collect();
        for function in exported.into_iter().filter(|name| !by_macros.contains(name)) {
            assert!(headers.contains(&format!("{function}(")), "{function}");
        }
        let dynamic = self.binutils("readelf", &["--dynamic"]);
        assert!(dynamic.contains(&format!("soname: [{}]", self.soname())), "{dynamic}");
        dynamic
    }
}
