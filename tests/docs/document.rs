//! A document: its text, and the blocks of commands in it.

use std::fs;
use std::path::{Path, PathBuf};

/// Commands, as a document shows them.
pub(crate) struct Block {
    /// The line of the first one.
    pub(crate) line: usize,
    pub(crate) text: String,
    /// What a plain machine may lack.
    pub(crate) needs: Vec<String>,
    /// Options that a test adds to our programs.
    pub(crate) shorter: String,
    /// It may end with status 1: what it says depends on the machine.
    pub(crate) may_fail: bool,
    /// The test that runs it in place of this one.
    pub(crate) run_by: Option<String>,
}

pub(crate) struct Document {
    /// From the root of the repository.
    pub(crate) path: String,
    pub(crate) text: String,
    pub(crate) blocks: Vec<Block>,
}

pub(crate) fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// All documents of the repository.
pub(crate) fn documents() -> Vec<Document> {
    let named = [
        "README.md",
        "CONTRIBUTING.md",
        "BENCHMARKS.md",
        "TESTING.md",
        "kmod/README.md",
        "docs/pictures/README.md",
    ];
    let mut paths: Vec<_> = named.map(str::to_owned).into();
    let docs = fs::read_dir(root().join("docs")).unwrap();
    let names = docs.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut listed: Vec<_> =
        names.filter(|name| name.ends_with(".md")).map(|name| format!("docs/{name}")).collect();
    listed.sort();
    paths.append(&mut listed);
    paths.iter().map(|path| Document::read(path)).collect()
}

impl Document {
    pub(crate) fn read(path: &str) -> Self {
        let at = root().join(path);
        let text = fs::read_to_string(&at).unwrap_or_else(|e| panic!("{}: {e}", at.display()));
        Self::parse(path, &text)
    }

    pub(crate) fn parse(path: &str, text: &str) -> Self {
        let (mut blocks, mut open, mut notes) = (Vec::new(), None::<(bool, Block)>, Vec::new());
        let mut above = "";
        for (number, line) in text.lines().enumerate() {
            let is_fence = line.trim_start().starts_with("```");
            if let Some((is_sh, mut block)) = open.take() {
                if !is_fence {
                    block.add(line);
                    open = Some((is_sh, block));
                } else if is_sh {
                    blocks.push(block);
                }
            } else if is_fence {
                open = Some((line.trim() == "```sh", Block::below(&notes, number + 2)));
            } else if line.starts_with("    ") && (above.is_empty() || above.starts_with("    ")) {
                // Commands are also shown indented, below an empty line.
                if above.is_empty() {
                    blocks.push(Block::below(&notes, number + 1));
                }
                blocks.last_mut().expect("pushed with its first line").add(line.trim_start());
            }
            if line.starts_with("<!--") {
                notes.push(line);
            } else if !line.is_empty() {
                notes.clear();
            }
            above = line;
        }
        assert!(open.is_none(), "{path}: a block has no end");
        Self { path: path.to_owned(), text: text.to_owned(), blocks }
    }

    /// Whether its commands run: those of the others are what was measured, for long, elsewhere.
    pub(crate) fn runs(&self) -> bool {
        let in_docs = self.path.strip_prefix("docs/").is_some_and(|name| !name.contains('/'));
        in_docs || ["README.md", "CONTRIBUTING.md"].contains(&self.path.as_str())
    }

    /// The text without blocks of any kind.
    pub(crate) fn prose(&self) -> String {
        let mut is_inside = false;
        let mut keep = |line: &&str| {
            let is_fence = line.trim_start().starts_with("```");
            is_inside ^= is_fence;
            !is_inside && !is_fence
        };
        self.text.lines().filter(|line| keep(line)).map(|line| format!("{line}\n")).collect()
    }

    /// The folder that its links start from.
    pub(crate) fn folder(&self) -> PathBuf {
        root().join(&self.path).parent().expect("a file has a folder").to_owned()
    }
}

impl Block {
    /// An empty one below these comments.
    fn below(notes: &[&str], line: usize) -> Self {
        let mut block = Self {
            line,
            text: String::new(),
            needs: Vec::new(),
            shorter: String::new(),
            may_fail: false,
            run_by: None,
        };
        for note in notes {
            let note = note.trim_start_matches("<!--").trim_end_matches("-->").trim();
            match note.split_once(':') {
                Some(("needs", what)) => {
                    block.needs.extend(what.split(',').map(|need| need.trim().to_owned()));
                }
                Some(("run by", test)) => block.run_by = Some(test.trim().to_owned()),
                Some(("shorter", options)) => block.shorter = options.trim().to_owned(),
                _ => block.may_fail |= note == "may fail",
            }
        }
        block
    }

    fn add(&mut self, line: &str) {
        self.text.push_str(line);
        self.text.push('\n');
    }
}
