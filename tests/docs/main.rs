//! The documents: each command in them runs, or names what exists; links and names lead somewhere. Their Rust programs are
//! doctests, see `src/documents.rs`.
//!
//! A block of commands is fenced as `sh`. Comments before it say
//!
//! - `<!-- needs: gpu, mpirun -->`: what a plain machine may lack. Such a block is only checked for programs and options that
//!   do not exist, unless `DOCS_RUN=gpu,...` says that the machine has it (`mpirun` is looked for);
//! - `<!-- shorter: --rounds 100 -->`: options that a test adds to our programs, so as not to take long;
//! - `<!-- run by: tests/cli.rs -->`: another test runs it, and this one only looks through it;
//! - `<!-- may fail -->`: status 1 is as good as 0, as it depends on the machine.

mod check;
#[path = "../common/mod.rs"]
mod common;
mod document;
mod links;
mod names;
mod run;

use std::time::Instant;

use document::{Block, Document, documents};

/// What a block may need.
const NEEDS: [&str; 11] =
    ["apptainer", "card", "docker", "gpu", "hosts", "kubernetes", "mpirun", "network", "root", "slurm", "vm"];

#[test]
fn every_command_exists() {
    let mut wrong = Vec::new();
    for document in documents() {
        let is_strict = document.runs();
        for block in &document.blocks {
            let told = check::block(&block.text, is_strict).into_iter();
            wrong.extend(told.map(|what| format!("{}:{}: {what}", document.path, block.line)));
            let unknown = block.needs.iter().filter(|need| !NEEDS.contains(&need.as_str()));
            wrong.extend(unknown.map(|need| format!("{}:{}: needs {need}?", document.path, block.line)));
        }
        if is_strict {
            let prose = document.prose();
            let named = prose.split('`').skip(1).step_by(2).flat_map(|code| check::block(code, false));
            wrong.extend(named.map(|what| format!("{}: {what}", document.path)));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn commands_run() {
    let stage = run::Stage::new();
    let (mut ran, mut skipped, mut wrong) = (0, Vec::new(), Vec::new());
    for document in documents().iter().filter(|document| document.runs()) {
        for block in &document.blocks {
            let lacking: Vec<_> = block.needs.iter().filter(|need| !run::has(need)).cloned().collect();
            let place = format!("{}:{}", document.path, block.line);
            if !lacking.is_empty() {
                skipped.push(format!("{place}: needs {}", lacking.join(", ")));
                continue;
            }
            if let Some(test) = &block.run_by {
                let text = std::fs::read_to_string(document::root().join(test)).unwrap_or_default();
                let is_named =
                    block.text.split_whitespace().next_back().is_some_and(|word| text.contains(word));
                wrong.extend((!is_named).then(|| format!("{place}: {test} does not run it")));
                continue;
            }
            let start = Instant::now();
            // Programs give up peers that get no time on a machine that is busy enough: only a third failure counts.
            let again = |why: String| {
                println!("{place} failed, and runs again: {why}");
                stage.run(block)
            };
            let ended = stage.run(block).or_else(again).or_else(again);
            println!("{place}: {:.1} s", start.elapsed().as_secs_f64());
            wrong.extend(ended.err().map(|why| format!("{place}: {why}\n{}", block.text)));
            ran += 1;
        }
    }
    println!("{ran} blocks of commands ran; skipped {}:\n{}", skipped.len(), skipped.join("\n"));
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(ran >= 5, "only {ran} blocks were found");
}

#[test]
fn links_lead_somewhere() {
    let wrong: Vec<_> = documents().iter().flat_map(links::broken).collect();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn programs_are_doctests() {
    let listed = std::fs::read_to_string(document::root().join("src/documents.rs")).unwrap();
    let has_programs = |document: &&Document| document.runs() && document.text.contains("```rust");
    let all = documents();
    let lacking = all.iter().filter(has_programs).map(|document| &document.path);
    let lacking: Vec<_> = lacking.filter(|path| !listed.contains(&format!("\"../{path}\""))).collect();
    assert!(lacking.is_empty(), "src/documents.rs does not name {lacking:?}");
}

#[test]
fn names_are_in_the_code() {
    let sources = names::sources();
    let wrong: Vec<_> = documents().iter().flat_map(|document| names::unknown(document, &sources)).collect();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn the_reference_has_every_variable() {
    let reference = Document::read("docs/reference.md").text;
    let lacking: Vec<_> =
        names::variables().into_iter().filter(|name| !reference.contains(&format!("`{name}`"))).collect();
    assert!(lacking.is_empty(), "docs/reference.md does not tell of {lacking:?}");
}

/// What says that everything is well must be able to say otherwise.
#[test]
fn mistakes_are_found() {
    for (commands, expected) in [
        ("cargo run --release --example pingpang", "pingpang"),
        ("cargo run --release --example pingpong -- --size 8", "--size"),
        ("target/release/gdasync bench hca --rounds 100 --loud", "--loud"),
        ("cargo test -p gdsink", "gdsink"),
        ("cargo test -p gdsync --test flows", "flows"),
        ("tests/vm/walk smoke", "tests/vm/walk"),
        ("gdrcopy/capi/install --suffix /usr", "--suffix"),
        ("GDSYNC_STRICT=1 pingping --sizes 8", "pingping"),
        ("docker run image && pingpong \\\n  --sighs 8", "--sighs"),
    ] {
        let told = check::block(commands, true);
        assert!(told.len() == 1 && told[0].contains(expected), "{commands}: {told:?}");
    }
    assert_eq!(check::block("pingpong --sizes=8 # --sighs\n\n# tests/vm/walk", true), Vec::<String>::new());
    assert_eq!(check::block("frobnicate --now", false), Vec::<String>::new());

    let sources = names::sources();
    let document = Document::parse(
        "docs/made-up.md",
        "# One thing\n[a](guide.md) [b](nowhere.md) [c](#one-thing) [d](#two) [e](https://e.org) \
         [f](guide.md#ring)\n`Stream::fly` `Stream::submit` `GDSYNC_TURBO` `mp/src/lib.rs` `mp/none.rs`\n\n<!-- from the code -->\n```text\n\
         is full (… submissions pending); jump\n```\n",
    );
    assert_eq!(links::broken(&document).len(), 3, "{:?}", links::broken(&document));
    assert_eq!(names::unknown(&document, &sources).len(), 4, "{:?}", names::unknown(&document, &sources));

    let stage = run::Stage::new();
    let block = |text: &str| Document::parse("README.md", &format!("```sh\n{text}\n```\n")).blocks.remove(0);
    assert!(stage.run(&block("true\nfalse\ntrue")).is_err());
    assert!(stage.run(&block("gdasync bench gpu")).is_err());
    assert!(stage.run(&block("cargo run --bin gdasync -- --version")).is_ok());
    let tolerant = |status| Block { may_fail: true, ..block(&format!("exit {status}")) };
    assert!(stage.run(&tolerant(1)).is_ok() && stage.run(&tolerant(2)).is_err());
}
