//! Runs commands of documents with what this build has made, in a folder that looks like the repository.

use std::env;
use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use crate::common::{program, run};
use crate::document::{Block, root};

/// How long a block may take. It is there to end what hangs.
const SECONDS: &str = "120";

/// In place of cargo: programs of this build, nothing else.
const CARGO: &str = r#"#!/bin/sh
[ "$1" = run ] || { echo "not run here: cargo $*"; exit 0; }
shift
program=
while [ $# -gt 0 ]; do
    case $1 in
    --release | --bin | --example) ;;
    --) shift && break ;;
    -*) echo "the stand-in for cargo does not know $1" >&2 && exit 2 ;;
    *) program=$1 ;;
    esac
    shift
done
exec "${program:?no program is named}" "$@"
"#;

/// Whether the machine has what a block needs.
pub(crate) fn has(need: &str) -> bool {
    let told = env::var("DOCS_RUN").unwrap_or_default();
    let is_found = || {
        let path = env::var_os("PATH").unwrap_or_default();
        env::split_paths(&path).any(|folder| folder.join("mpirun").exists())
    };
    told.split(',').any(|word| word == need) || (need == "mpirun" && is_found())
}

/// The programs of this package: tools, then examples.
fn ours() -> (Vec<String>, Vec<String>) {
    let names = |folder: &str| {
        let entries = fs::read_dir(root().join(folder)).unwrap().map(|entry| entry.unwrap().path());
        let is_program =
            |path: &PathBuf| path.extension().is_some_and(|end| end == "rs") || path.join("main.rs").exists();
        let stem = |path: PathBuf| path.file_stem().unwrap().to_str().unwrap().to_owned();
        entries.filter(is_program).map(stem).collect::<Vec<_>>()
    };
    let mut tools = names("src/bin");
    tools.push("gdasync".to_owned());
    (tools, names("examples"))
}

/// Whether a word is one of our programs, by its name or as cargo leaves it.
pub(crate) fn is_ours(word: &str) -> bool {
    let (tools, examples) = ours();
    let of = |names: &[String], folder: &str| {
        let name = word.strip_prefix(folder).unwrap_or(word);
        names.iter().any(|known| known == name)
    };
    of(&tools, "target/release/") || of(&examples, "target/release/examples/")
}

/// Where this build has left one of them.
pub(crate) fn built(word: &str) -> PathBuf {
    let name = word.rsplit('/').next().expect("a part at least");
    // target/<profile>/deps/<this test>
    let here = env::current_exe().unwrap();
    let profile = here.ancestors().nth(2).unwrap();
    let (tools, _) = ours();
    let is_tool = tools.iter().any(|tool| tool == name);
    let path = if is_tool { profile.join(name) } else { profile.join("examples").join(name) };
    assert!(path.exists(), "{} is not built: run cargo test, or cargo build --examples", path.display());
    path
}

/// A folder like the repository, with our programs where a release build would leave them.
pub(crate) struct Stage(PathBuf);

impl Stage {
    pub(crate) fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("docs-{}-{number}", std::process::id());
        let stage = Self(Path::new(env!("CARGO_TARGET_TMPDIR")).join(name));
        fs::create_dir_all(stage.0.join("target/release/examples")).unwrap();
        fs::create_dir(stage.0.join("bin")).unwrap();
        for entry in fs::read_dir(root()).unwrap() {
            let entry = entry.unwrap();
            if entry.file_name() != "target" && entry.file_name() != "bin" {
                symlink(entry.path(), stage.0.join(entry.file_name())).unwrap();
            }
        }
        let (tools, examples) = ours();
        let put = |path: &str, text: &str| {
            let path = stage.0.join(path);
            fs::write(&path, text).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        };
        put("bin/cargo", CARGO);
        let folders = tools.iter().map(|name| (name, "target/release"));
        let folders = folders.chain(examples.iter().map(|name| (name, "target/release/examples")));
        for (name, folder) in folders {
            let text = format!("#!/bin/sh\nexec '{}' \"$@\" $DOCS_SHORTER\n", built(name).display());
            put(&format!("bin/{name}"), &text);
            put(&format!("{folder}/{name}"), &text);
        }
        stage
    }

    /// Runs a block; on failure what it said.
    pub(crate) fn run(&self, block: &Block) -> Result<(), String> {
        let path = env::var("PATH").unwrap_or_default();
        let mut command = program("timeout");
        command.args(["-k", "5", SECONDS, "bash", "-euo", "pipefail", "-c", &block.text]);
        command.current_dir(&self.0).env("PATH", format!("{}:{path}", self.0.join("bin").display()));
        command.env("DOCS_SHORTER", &block.shorter);
        // mpirun, where tests run as root on few cores.
        command.envs([("OMPI_ALLOW_RUN_AS_ROOT", "1"), ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")]);
        command.envs([
            ("OMPI_MCA_rmaps_base_oversubscribe", "1"),
            ("PRTE_MCA_rmaps_default_mapping_policy", ":oversubscribe"),
        ]);
        let (output, out, err) = run(command);
        let is_well = output.status.success() || (block.may_fail && output.status.code() == Some(1));
        if is_well { Ok(()) } else { Err(format!("{}\n{out}\n{err}", output.status)) }
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        // Links are removed, not followed.
        let _ = fs::remove_dir_all(&self.0);
    }
}
