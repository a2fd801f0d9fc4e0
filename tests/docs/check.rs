//! Whether commands name programs, options, packages and tests that exist.

use std::collections::HashMap;
use std::fs;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Mutex;

use crate::common::{program, run};
use crate::document::root;
use crate::run::{built, is_ours};

/// Programs of others that documents may name.
const FOREIGN: &str = "apptainer docker ibv_devinfo ip kubectl make mpirun nsys nvidia-smi podman rdma srun sudo torchrun ulimit unshare numactl";

/// What is wrong with a block of commands. Programs of others must be known where it is strict.
pub(crate) fn block(text: &str, is_strict: bool) -> Vec<String> {
    let joined = text.replace("\\\n", " ");
    let lines = joined.lines().map(|line| {
        let end = if line.starts_with('#') { 0 } else { line.find(" #").unwrap_or(line.len()) };
        &line[..end]
    });
    let commands = lines.flat_map(|line| line.split("&&")).flat_map(|part| part.split(['|', ';']));
    commands.filter_map(|command| one(command, is_strict).err()).collect()
}

fn one(command: &str, is_strict: bool) -> Result<(), String> {
    let words: Vec<String> = command
        .split_whitespace()
        .map(|word| word.trim_matches(['[', ']', '"', '\'', '(', ')', '`', '$']).to_owned())
        .filter(|word| !word.is_empty())
        .collect();
    let words: Vec<&str> = words.iter().map(String::as_str).skip_while(|word| is_assignment(word)).collect();
    let Some(&first) = words.first() else { return Ok(()) };
    // Also below `mpirun -n 2`, `sudo` and the like.
    if let Some(at) = words.iter().position(|word| *word == "cargo" || is_ours(word) || is_script(word)) {
        let (program, arguments) = (words[at], &words[at + 1..]);
        return match program {
            "cargo" => cargo(arguments),
            _ if is_ours(program) => options(program, arguments),
            _ => script(program, arguments),
        };
    }
    if !is_strict || FOREIGN.split(' ').any(|known| known == first) {
        Ok(())
    } else {
        Err(format!("there is no program {first}"))
    }
}

fn is_assignment(word: &str) -> bool {
    word.split_once('=').is_some_and(|(name, _)| name.bytes().all(|b| b.is_ascii_uppercase() || b == b'_'))
}

/// Whether it is written as the path of a program in the repository.
fn is_script(word: &str) -> bool {
    const FOLDERS: [&str; 6] = [".ci/", "benchmarks/", "gdrcopy/", "kmod/", "packages/", "tests/"];
    FOLDERS.iter().any(|folder| word.starts_with(folder))
        && !root().join(word).is_dir()
        && !word.rsplit('/').next().is_some_and(|name| name.contains('.'))
}

fn script(path: &str, arguments: &[&str]) -> Result<(), String> {
    // The module's own document starts in its folder.
    let places = [root().join(path), root().join("kmod").join(path)];
    let Some(text) = places.iter().find_map(|place| fs::read_to_string(place).ok()) else {
        return Err(format!("there is no {path}"));
    };
    let ours = arguments.iter().take_while(|word| **word != "--").filter(|word| word.starts_with("--"));
    match ours.map(|option| name(option)).find(|option| !text.contains(option)) {
        Some(option) => Err(format!("{path} has no option {option}")),
        None => Ok(()),
    }
}

fn cargo(arguments: &[&str]) -> Result<(), String> {
    let split = arguments.iter().position(|word| *word == "--").unwrap_or(arguments.len());
    let (cargos, programs) = arguments.split_at(split);
    let of = |option: &str| cargos.iter().skip_while(|word| **word != option).nth(1).copied();
    if let Some(package) = of("-p")
        && !manifests().iter().any(|text| text.contains(&format!("name = \"{package}\"")))
    {
        return Err(format!("there is no package {package}"));
    }
    if let Some(test) = of("--test")
        && !folders()
            .iter()
            .any(|at| at.join(format!("tests/{test}.rs")).exists() || at.join("tests").join(test).is_dir())
    {
        return Err(format!("there is no test {test}"));
    }
    match of("--bin").or_else(|| of("--example")) {
        Some(program) if !is_ours(program) => {
            let of_others = root().join("bootstrap_mpi/examples").join(format!("{program}.rs"));
            if of_others.exists() { Ok(()) } else { Err(format!("there is no program {program}")) }
        }
        Some(program) => options(program, programs.get(1..).unwrap_or_default()),
        None => Ok(()),
    }
}

/// The packages of the workspace.
fn folders() -> Vec<PathBuf> {
    let manifest = fs::read_to_string(root().join("Cargo.toml")).unwrap();
    let members = manifest.lines().find(|line| line.starts_with("members")).expect("a workspace has members");
    let members = members.split('"').skip(1).step_by(2).map(|member| root().join(member));
    [root().to_owned()].into_iter().chain(members).collect()
}

fn manifests() -> Vec<String> {
    folders().iter().map(|at| fs::read_to_string(at.join("Cargo.toml")).unwrap()).collect()
}

/// An option without its value.
fn name(option: &str) -> &str {
    option.split_once('=').map_or(option, |(name, _)| name)
}

/// Whether our program tells of all these options, in the help of its subcommand.
fn options(program: &str, arguments: &[&str]) -> Result<(), String> {
    let subcommands: Vec<_> = arguments.iter().take_while(|word| !word.starts_with('-')).copied().collect();
    let help = help(program, &subcommands)?;
    let is_told = |option: &str| {
        help.match_indices(option).any(|(at, _)| {
            let next = help[at + option.len()..].chars().next();
            next.is_none_or(|c| !c.is_ascii_alphanumeric() && c != '-')
        })
    };
    let options = arguments.iter().take_while(|word| **word != "--").filter(|word| {
        word.starts_with('-') && word[1..].starts_with(|c: char| c.is_ascii_alphabetic() || c == '-')
    });
    match options.map(|option| name(option)).find(|option| !is_told(option)) {
        Some(option) => Err(format!("{program} {} has no option {option}", subcommands.join(" "))),
        None => Ok(()),
    }
}

fn help(name: &str, subcommands: &[&str]) -> Result<String, String> {
    static KNOWN: Mutex<Option<HashMap<String, String>>> = Mutex::new(None);
    let key = format!("{name} {}", subcommands.join(" "));
    let mut known = KNOWN.lock().unwrap();
    let known = known.get_or_insert_default();
    if let Some(help) = known.get(&key) {
        return Ok(help.clone());
    }
    let mut command: Command = program(built(name).to_str().expect("our paths are text"));
    command.args(subcommands).arg("--help");
    let (output, out, err) = run(command);
    if !output.status.success() {
        return Err(format!("{key} --help: {err}"));
    }
    known.insert(key, out.clone());
    Ok(out)
}
