//! The documents: their commands run, or name programs and options that exist; their links, names and variables exist.
//! Rust programs in documents are doctests, see `src/lib.rs`.
//!
//! Blocks of commands are fenced as `sh`. HTML comments before a block say:
//!
//! - `<!-- needs: gpu, mpirun -->`: what the machine may lack. The block is only checked, unless `DOCS_RUN=gpu,...` says that
//!   the machine has it, or it is `mpirun` and installed;
//! - `<!-- shorter: --rounds 100 -->`: options that the test adds to the programs of this package;
//! - `<!-- run by: tests/it/bench.rs -->`: another test runs it;
//! - `<!-- may fail -->`: exit status 1 is accepted.

use std::collections::{BTreeSet, HashMap};
use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use tempfile::TempDir;

use super::common::{program, run};

const NEEDS: &str = "apptainer card docker gpu hosts kubernetes mpirun network packages root slurm vm";
/// Prefixes of variables of this repository.
const FAMILIES: [&str; 4] = ["GDSYNC_", "GDRCOPY_", "GDASYNC_", "MP_"];

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

struct Document {
    /// From the root of the repository.
    path: String,
    text: String,
}

/// Commands in a document, with the HTML comments before them.
struct Block {
    line: usize,
    text: String,
    notes: String,
}

impl Block {
    fn note(&self, key: &str) -> Option<&str> {
        let start = self.notes.find(&format!("<!-- {key}"))? + 5 + key.len();
        Some(self.notes[start..].split("-->").next()?.trim_start_matches(':').trim())
    }
}

fn documents() -> Vec<Document> {
    let mut paths: Vec<String> = [
        "README",
        "CONTRIBUTING",
        "SECURITY",
        "BENCHMARKS",
        "TESTING",
        "kmod/README",
        "docs/pictures/README",
    ]
    .map(|name| format!("{name}.md"))
    .into();
    let names = fs::read_dir(root().join("docs"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap());
    paths.extend(names.filter(|name| name.ends_with(".md")).map(|name| format!("docs/{name}")));
    paths.sort();
    let read = |path: String| Document { text: fs::read_to_string(root().join(&path)).unwrap(), path };
    paths.into_iter().map(read).collect()
}

impl Document {
    /// Whether its commands run. The others tell what was measured elsewhere.
    fn runs(&self) -> bool {
        ["README.md", "CONTRIBUTING.md"].contains(&&*self.path)
            || self.path.starts_with("docs/") && !self.path.contains("pictures")
    }

    fn blocks(&self) -> Vec<Block> {
        let (mut blocks, mut notes, mut open) = (Vec::new(), String::new(), None);
        for (number, line) in (1..).zip(self.text.lines()) {
            match &mut open {
                Some((is_sh, text, start)) if line.trim_start().starts_with("```") => {
                    if *is_sh {
                        let (text, notes) = (std::mem::take(text), std::mem::take(&mut notes));
                        blocks.push(Block { line: *start, text, notes });
                    }
                    open = None;
                }
                Some((_, text, _)) => text.extend([line, "\n"]),
                None if line.trim_start().starts_with("```") => {
                    open = Some((line.trim() == "```sh", String::new(), number + 1));
                }
                None if line.trim_start().starts_with("<!--") => notes.push_str(line),
                None if line.is_empty() => {}
                None => notes.clear(),
            }
        }
        assert!(open.is_none(), "{}: a block has no end", self.path);
        blocks
    }

    /// The text without blocks.
    fn prose(&self) -> String {
        self.text.split("```").step_by(2).collect()
    }

    fn folder(&self) -> PathBuf {
        root().join(&self.path).parent().unwrap().to_owned()
    }

    fn broken_links(&self) -> Vec<String> {
        let prose = self.prose();
        let targets = prose.split("](").skip(1).filter_map(|rest| rest.split(')').next());
        let is_broken = |target: &&str| {
            let (file, heading) = target.split_once('#').unwrap_or((target, ""));
            let path = self.folder().join(file);
            let anchor = |line: &str| {
                let text = line.trim_start_matches('#').trim().to_lowercase().replace(' ', "-");
                text.chars().filter(|c| c.is_alphanumeric() || "-_".contains(*c)).collect::<String>()
            };
            let has =
                |text: String| text.lines().any(|line| line.starts_with('#') && anchor(line) == heading);
            let text = || if file.is_empty() { Ok(self.text.clone()) } else { fs::read_to_string(&path) };
            !path.exists() || !heading.is_empty() && !text().is_ok_and(has)
        };
        let ours = targets.filter(|target| !target.contains("://")).filter(is_broken);
        ours.map(|target| format!("{}: {target} leads nowhere", self.path)).collect()
    }

    /// What it quotes that the repository does not have: variables, and lines below `<!-- from the code -->`.
    fn unknown_names(&self, sources: &str) -> Vec<String> {
        let prose = self.prose();
        let is_word = |c: char| c.is_ascii_alphanumeric() || c == '_';
        let mut unknown = Vec::new();
        if !["docs/porting.md", "docs/comparison.md"].contains(&&*self.path) {
            let names = prose.split(|c| !is_word(c)).filter(|word| is_users_variable(word));
            unknown.extend(names.filter(|name| !sources.contains(name)));
        }
        let quotes = self.text.split("<!-- from the code -->\n```text\n").skip(1);
        let quotes = quotes
            .flat_map(|rest| rest.split("```").next().unwrap().lines())
            .flat_map(|line| line.split('…'));
        unknown.extend(quotes.map(str::trim).filter(|part| part.len() > 2 && !sources.contains(part)));
        unknown.iter().map(|name| format!("{}: there is no {name}", self.path)).collect()
    }
}

fn is_users_variable(word: &str) -> bool {
    let has_family = FAMILIES.iter().any(|family| word.len() > family.len() && word.starts_with(family));
    has_family
        && !word.contains("_TEST_")
        && !word.starts_with("GDRCOPY_KMOD_")
        && !word.starts_with("GDASYNC_")
}

/// All sources but tests, with messages that span lines joined.
fn sources() -> String {
    fn read(folder: &Path, text: &mut String) {
        for path in fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()) {
            match path.is_dir() {
                _ if path.file_stem().is_some_and(|name| name == "tests" || name == "target") => {}
                true => read(&path, text),
                false if path.extension().is_some_and(|end| end == "rs") => {
                    text.push_str(&fs::read_to_string(&path).unwrap());
                }
                false => {}
            }
        }
    }
    let mut text = String::new();
    for folder in ["gdrcopy", "gdsync", "mp", "rdma-core-sys", "src", "examples"] {
        read(&root().join(folder), &mut text);
    }
    let mut parts = text.split("\\\n");
    let first = parts.next().unwrap().to_owned();
    parts.fold(first, |all, part| all + part.trim_start())
}

/// The tools and examples of this package, and where this build has left them.
fn ours() -> HashMap<String, PathBuf> {
    let profile = std::env::current_exe().unwrap().ancestors().nth(2).unwrap().to_owned();
    let stems = |folder: &str| {
        let paths = fs::read_dir(root().join(folder)).unwrap().map(|entry| entry.unwrap().path());
        let is_program =
            |path: &PathBuf| path.extension().is_some_and(|end| end == "rs") || path.join("main.rs").exists();
        paths
            .filter(is_program)
            .map(|path| path.file_stem().unwrap().to_str().unwrap().to_owned())
            .collect::<Vec<_>>()
    };
    let tools =
        stems("src/bin").into_iter().chain(["gdasync".to_owned()]).map(|name| (profile.join(&name), name));
    let examples = stems("examples").into_iter().map(|name| (profile.join("examples").join(&name), name));
    tools.chain(examples).map(|(path, name)| (name, path)).collect()
}

/// The name of a program of this package, however a command names it.
fn our_name(word: &str) -> Option<String> {
    let name = word.strip_prefix("target/release/examples/").or_else(|| word.strip_prefix("target/release/"));
    let name = name.unwrap_or(word);
    ours().contains_key(name).then(|| name.to_owned())
}

/// The mistakes in commands: programs and packages that are not here, and options that a program does not have.
fn mistakes(text: &str) -> Vec<String> {
    let joined = text.replace("\\\n", " ");
    let lines =
        joined.lines().map(|line| if line.starts_with('#') { "" } else { line.split(" #").next().unwrap() });
    lines.flat_map(|line| line.split(['|', ';', '&'])).filter_map(mistake).collect()
}

fn mistake(command: &str) -> Option<String> {
    let trim = |word| str::trim_matches(word, ['[', ']', '"', '\'', '(', ')', '`', '$']);
    let words: Vec<&str> = command.split_whitespace().map(trim).filter(|word| !word.is_empty()).collect();
    let is_script = |word: &str| {
        let ours = [".ci/", "benchmarks/", "capi/", "gdrcopy/", "kmod/", "packages/", "tests/"];
        ours.iter().any(|folder| word.starts_with(folder)) && !word.contains('=')
    };
    // Also behind `mpirun -n 2`, `sudo` and the like.
    let at = words.iter().position(|word| *word == "cargo" || our_name(word).is_some() || is_script(word))?;
    let (program, arguments) = (words[at], &words[at + 1..]);
    match our_name(program) {
        // A program in Rust has variables of such names.
        Some(_) if arguments.first() == Some(&"=") => None,
        Some(name) => wrong_option(&name, arguments),
        None if program == "cargo" => wrong_cargo(arguments),
        None => {
            // The document of the module starts in its folder.
            let is_there = root().join(program).exists() || root().join("kmod").join(program).exists();
            (!is_there).then(|| format!("there is no {program}"))
        }
    }
}

fn wrong_cargo(arguments: &[&str]) -> Option<String> {
    let split = arguments.iter().position(|word| *word == "--").unwrap_or(arguments.len());
    let (cargos, rest) = arguments.split_at(split);
    let of = |option: &str| cargos.iter().skip_while(|word| **word != option).nth(1).copied();
    let lock = fs::read_to_string(root().join("Cargo.lock")).unwrap();
    match (of("-p"), of("--bin").or_else(|| of("--example"))) {
        (Some(package), _) if !lock.contains(&format!("name = \"{package}\"")) => {
            Some(format!("there is no package {package}"))
        }
        (_, Some(name)) if our_name(name).is_some() => wrong_option(name, rest.get(1..).unwrap_or_default()),
        (_, Some(name)) if !root().join(format!("bootstrap_mpi/examples/{name}.rs")).exists() => {
            Some(format!("there is no program {name}"))
        }
        _ => None,
    }
}

/// The first option that the help of the subcommand does not have.
fn wrong_option(name: &str, arguments: &[&str]) -> Option<String> {
    static HELP: Mutex<Option<HashMap<String, String>>> = Mutex::new(None);
    let subcommands: Vec<_> = arguments.iter().take_while(|word| !word.starts_with('-')).copied().collect();
    let key = format!("{name} {}", subcommands.join(" "));
    let mut known = HELP.lock().unwrap();
    let help = known.get_or_insert_default().entry(key.clone()).or_insert_with(|| {
        let mut command = program(ours()[name].to_str().unwrap());
        command.args(&subcommands).arg("--help");
        let (output, out, err) = run(command);
        if output.status.success() { out } else { format!("no help: {err}") }
    });
    if help.starts_with("no help") {
        return Some(format!("{key}: {help}"));
    }
    let is_part = |c: char| c.is_ascii_alphanumeric() || c == '-';
    let known: BTreeSet<&str> = help.split(|c| !is_part(c)).collect();
    let mut options =
        arguments.iter().take_while(|word| **word != "--").map(|word| word.split('=').next().unwrap());
    let is_option = |word: &str| {
        word.starts_with('-') && word[1..].starts_with(|c: char| c.is_ascii_alphabetic() || c == '-')
    };
    let wrong = options.find(|word| is_option(word) && !known.contains(word));
    wrong.map(|option| format!("{key} has no option {option}"))
}

/// A folder like the repository, where commands run with the programs of this build.
struct Stage(TempDir);

impl Stage {
    fn new() -> Self {
        let stage = Self(TempDir::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap());
        fs::create_dir_all(stage.0.path().join("target/release/examples")).unwrap();
        fs::create_dir_all(stage.0.path().join("bin")).unwrap();
        for entry in
            fs::read_dir(root()).unwrap().map(Result::unwrap).filter(|entry| entry.file_name() != "target")
        {
            symlink(entry.path(), stage.0.path().join(entry.file_name())).unwrap();
        }
        let put = |path: String, text: &str| {
            fs::write(stage.0.path().join(&path), text).unwrap();
            fs::set_permissions(stage.0.path().join(path), fs::Permissions::from_mode(0o755)).unwrap();
        };
        for (name, path) in ours() {
            let text = format!("#!/bin/sh\nexec '{}' \"$@\" $DOCS_SHORTER\n", path.display());
            for folder in ["bin", "target/release", "target/release/examples"] {
                put(format!("{folder}/{name}"), &text);
            }
        }
        // `cargo run` starts programs of this build; other commands of cargo do nothing.
        put(
            "bin/cargo".into(),
            "#!/bin/sh\n[ \"$1\" = run ] || exit 0\nfor name; do case $name in run|-*) shift;; *) shift; break;; esac; done\n[ \"$1\" = -- ] && shift\nexec \"$name\" \"$@\"\n",
        );
        stage
    }

    /// Runs a block; returns its output if it fails.
    fn run(&self, block: &Block) -> Result<(), String> {
        let path = std::env::var("PATH").unwrap_or_default();
        let mut command = program("timeout");
        command.args(["-k", "5", "120", "bash", "-euo", "pipefail", "-c", &block.text]).current_dir(&self.0);
        command.env("PATH", format!("{}:{path}", self.0.path().join("bin").display()));
        command.env("DOCS_SHORTER", block.note("shorter").unwrap_or_default());
        // mpirun as root on few cores.
        for name in
            ["OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "OMPI_MCA_rmaps_base_oversubscribe"]
        {
            command.env(name, "1");
        }
        command.env("PRTE_MCA_rmaps_default_mapping_policy", ":oversubscribe");
        let (output, out, err) = run(command);
        let may_fail = block.note("may fail").is_some() && output.status.code() == Some(1);
        if output.status.success() || may_fail {
            Ok(())
        } else {
            Err(format!("{}\n{out}\n{err}", output.status))
        }
    }
}

/// Whether the machine has what a block needs.
fn has(need: &str) -> bool {
    let is_installed = || {
        std::env::split_paths(&std::env::var_os("PATH").unwrap_or_default())
            .any(|at| at.join("mpirun").exists())
    };
    std::env::var("DOCS_RUN").unwrap_or_default().split(',').any(|word| word == need)
        || need == "mpirun" && is_installed()
}

#[test]
fn commands_name_programs_and_options_that_exist() {
    let mut wrong = Vec::new();
    for document in documents() {
        for block in document.blocks() {
            let place = format!("{}:{}", document.path, block.line);
            wrong.extend(mistakes(&block.text).iter().map(|what| format!("{place}: {what}")));
            let needs = block.note("needs").into_iter().flat_map(|needs| needs.split(',')).map(str::trim);
            wrong.extend(
                needs
                    .filter(|need| !NEEDS.split(' ').any(|known| known == *need))
                    .map(|need| format!("{place}: needs {need}?")),
            );
        }
        let indented = document.text.lines().filter_map(|line| line.strip_prefix("    "));
        let code: Vec<String> = indented.map(str::to_owned).collect();
        wrong.extend(mistakes(&code.join("\n")).iter().map(|what| format!("{}: {what}", document.path)));
        if document.runs() {
            let prose = document.prose();
            let code = prose.split('`').skip(1).step_by(2).flat_map(mistakes);
            wrong.extend(code.map(|what| format!("{}: {what}", document.path)));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn commands_run() {
    let stage = Stage::new();
    let (mut ran, mut wrong) = (0, Vec::new());
    for document in documents().iter().filter(|document| document.runs()) {
        for block in document.blocks() {
            let place = format!("{}:{}", document.path, block.line);
            let needs = block.note("needs").into_iter().flat_map(|needs| needs.split(',')).map(str::trim);
            let lacking: Vec<_> = needs.filter(|need| !has(need)).collect();
            if !lacking.is_empty() {
                println!("{place} skipped: needs {}", lacking.join(", "));
            } else if let Some(test) = block.note("run by") {
                let text = fs::read_to_string(root().join(test)).unwrap_or_default();
                let is_named =
                    block.text.split_whitespace().next_back().is_some_and(|word| text.contains(word));
                wrong.extend((!is_named).then(|| format!("{place}: {test} does not run it")));
            } else {
                wrong.extend(stage.run(&block).err().map(|why| format!("{place}: {why}\n{}", block.text)));
                ran += 1;
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(ran >= 5, "only {ran} blocks were found");
}

#[test]
fn links_names_and_variables_exist() {
    let sources = sources();
    let mut wrong: Vec<_> = documents().iter().flat_map(Document::broken_links).collect();
    wrong.extend(documents().iter().flat_map(|document| document.unknown_names(&sources)));
    let reference = fs::read_to_string(root().join("docs/reference.md")).unwrap();
    let quoted = sources.split('"').filter(|word| is_users_variable(word));
    let is_name =
        |word: &&str| word.bytes().all(|b| b.is_ascii_uppercase() || b.is_ascii_digit() || b == b'_');
    let variables: BTreeSet<_> =
        quoted.filter(is_name).filter(|name| !reference.contains(&format!("`{name}`"))).collect();
    wrong.extend(variables.iter().map(|name| format!("docs/reference.md lacks {name}")));
    let listed = fs::read_to_string(root().join("src/lib.rs")).unwrap();
    let has_programs = |document: &Document| document.runs() && document.text.contains("```rust");
    let all = documents().into_iter().filter(has_programs).map(|document| document.path);
    wrong.extend(
        all.filter(|path| !listed.contains(&format!("\"../{path}\"")))
            .map(|path| format!("src/lib.rs lacks {path}")),
    );
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn mistakes_in_documents_are_found() {
    for (commands, expected) in [
        ("cargo run --release --example pingpang", "pingpang"),
        ("cargo run --release --example pingpong -- --size 8", "--size"),
        ("target/release/gdasync bench latency --sizes 8 --loud", "--loud"),
        ("cargo test -p gdsink", "gdsink"),
        ("tests/vm/walk smoke", "tests/vm/walk"),
        ("docker run image && pingpong \\\n  --sighs 8", "--sighs"),
    ] {
        let found = mistakes(commands);
        assert!(found.len() == 1 && found[0].contains(expected), "{commands}: {found:?}");
    }
    assert_eq!(mistakes("pingpong --sizes=8 # --sighs\n\n# tests/vm/walk"), Vec::<String>::new());
    assert_eq!(mistakes("frobnicate --now"), Vec::<String>::new());
    let text = "# One thing\n[a](guide.md) [b](nowhere.md) [c](#one-thing) [d](#two) [e](https://e.org) [f](guide.md#ring)\n\
        GDSYNC_TURBO\n\n<!-- from the code -->\n```text\nno such words (… in the code)\n```\n";
    let document = Document { path: "docs/guide.md".into(), text: text.into() };
    assert_eq!(document.broken_links().len(), 3, "{:?}", document.broken_links());
    assert!(document.unknown_names(&sources()).len() >= 2, "{:?}", document.unknown_names(&sources()));
    let stage = Stage::new();
    let block = |text: &str, notes: &str| Block { line: 0, text: text.into(), notes: notes.into() };
    assert!(stage.run(&block("true\nfalse\ntrue", "")).is_err());
    assert!(stage.run(&block("gdasync bench gpu", "")).is_err());
    assert!(stage.run(&block("cargo run --release --bin gdasync -- --version", "")).is_ok());
    assert!(
        stage.run(&block("exit 1", "<!-- may fail -->")).is_ok()
            && stage.run(&block("exit 2", "<!-- may fail -->")).is_err()
    );
}
