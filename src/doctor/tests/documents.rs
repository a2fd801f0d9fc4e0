//! What is written elsewhere too.

use std::collections::BTreeSet;
use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};

use super::super::areas::environment::KNOWN;
use super::super::requirements::{CARDS, GENERATIONS, SOFTWARE, TRANSPORTS, card, generation};

fn repository() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

/// The tables as the document has them.
fn tables() -> [String; 4] {
    let mut cards =
        String::from("| card | PCI device (vendor 15b3) | links | use here |\n|---|---|---|---|\n");
    for card in CARDS {
        let numbers =
            card.devices.iter().map(|device| format!("{device:04x}")).collect::<Vec<_>>().join(", ");
        writeln!(cards, "| {} | {numbers} | {} | {} |", card.name, card.links, card.use_here).unwrap();
    }
    let mut gpus = String::from(
        "| generation | compute capability | streams trigger sends here | driven by the open kernel modules |\n|---|---|---|---|\n",
    );
    let word = |yes| if yes { "yes" } else { "no" };
    for one in GENERATIONS {
        let ((major, minor), (last_major, last_minor)) = one.compute;
        let compute = format!("{major}.{minor} to {last_major}.{last_minor}");
        writeln!(gpus, "| {} | {compute} | {} | {} |", one.name, word(one.triggers), word(one.open_modules))
            .unwrap();
    }
    let mut software = String::from("| software | at least | for |\n|---|---|---|\n");
    for one in SOFTWARE {
        writeln!(software, "| {} | {} | {} |", one.name, one.least(), one.for_what).unwrap();
    }
    let mut links = String::from("| link | needs | use here |\n|---|---|---|\n");
    for one in TRANSPORTS {
        writeln!(links, "| {} | {} | {} |", one.name, one.needs, one.use_here).unwrap();
    }
    [cards, gpus, software, links]
}

#[test]
fn the_document_has_the_tables_that_the_checks_judge_by() {
    let text = fs::read_to_string(repository().join("docs/requirements.md")).unwrap();
    for table in tables() {
        assert!(text.contains(&table), "docs/requirements.md lacks this table:\n{table}");
    }
}

#[test]
fn cards_and_generations_are_told_apart() {
    let mut seen = BTreeSet::new();
    assert!(CARDS.iter().flat_map(|card| card.devices).all(|device| seen.insert(device)));
    assert_eq!(card(0x1021).unwrap().name, "ConnectX-7");
    assert!(card(0x1572).is_none());
    assert_eq!(generation((7, 5)).unwrap().name, "Turing");
    assert_eq!(generation((8, 9)).unwrap().name, "Ada");
    assert_eq!(generation((10, 3)).unwrap().name, "Blackwell");
    assert_eq!(generation((10, 7)).unwrap().name, "Rubin");
    assert_eq!(card(0x1025).unwrap().name, "ConnectX-9");
    assert_eq!(generation((8, 6)).unwrap().name, "Ampere");
    assert!(generation((99, 0)).is_none());
}

/// Source files below a directory, without those of tests.
fn sources(directory: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(directory).unwrap().map(Result::unwrap) {
        let (path, name) = (entry.path(), entry.file_name().to_string_lossy().into_owned());
        match path.is_dir() {
            true if name == "tests" || name == "standin" => {}
            true => sources(&path, found),
            false if name.ends_with(".rs") && name != "tests.rs" => found.push(path),
            false => {}
        }
    }
}

/// The variables that a text names in quotes, as code that reads them does.
fn variables(text: &str) -> BTreeSet<String> {
    let is_part = |c: char| c.is_ascii_uppercase() || c.is_ascii_digit() || c == '_';
    let quoted =
        text.split('"').skip(1).step_by(2).filter(|word| !word.is_empty() && word.chars().all(is_part));
    let ours =
        quoted.filter(|word| ["GDSYNC_", "GDRCOPY_", "MP_"].iter().any(|prefix| word.starts_with(prefix)));
    ours.filter(|word| !word.contains("TEST") && !word.contains("_KMOD_")).map(str::to_owned).collect()
}

#[test]
fn the_variables_of_all_crates_are_known() {
    let mut files = Vec::new();
    for source in ["gdsync/src", "gdrcopy/src", "gdrcopy/capi/src", "mp/src", "rdma-core-sys/src"] {
        sources(&repository().join(source), &mut files);
    }
    let read: BTreeSet<_> =
        files.iter().flat_map(|file| variables(&fs::read_to_string(file).unwrap())).collect();
    let known: BTreeSet<_> = KNOWN.iter().map(|&name| name.to_owned()).collect();
    let missing: Vec<_> = read.difference(&known).collect();
    assert!(missing.is_empty(), "add {missing:?} to KNOWN in src/doctor/areas/environment.rs");
    assert!(read.contains("GDSYNC_DEVICE") && read.contains("GDRCOPY_BACKEND"), "{read:?}");
}
