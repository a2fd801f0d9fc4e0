//! The arrows between crates, and between the modules of each crate, point down.
//!
//! A module is a concept: `foo.rs` together with `foo/`. Files of one concept may use each other.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// Each crate, its folder, and the crates of this workspace that it may use.
const CRATES: &[(&str, &str, &[&str])] = &[
    ("mlx5-ring", "gdsync/mlx5-ring", &[]),
    ("gdsync-shm", "gdsync/shm", &["mlx5-ring"]),
    ("rdma-core-sys", "rdma-core-sys", &[]),
    ("gdrcopy", "gdrcopy", &[]),
    ("gdrapi", "gdrcopy/capi", &["gdrcopy"]),
    ("gdsync-device", "gdsync/device", &["mlx5-ring", "gdsync-shm", "rdma-core-sys", "gdrcopy"]),
    ("gdsync-soft", "gdsync/soft", &["mlx5-ring", "gdsync-shm", "rdma-core-sys", "gdrcopy", "gdsync-device"]),
    ("gdsync-rdma", "gdsync/rdma", &["mlx5-ring", "gdsync-shm", "rdma-core-sys", "gdrcopy", "gdsync-device"]),
    (
        "gdsync-card",
        "gdsync/card",
        &["mlx5-ring", "gdsync-shm", "rdma-core-sys", "gdrcopy", "gdsync-device", "gdsync-soft"],
    ),
    (
        "gdsync",
        "gdsync",
        &[
            "mlx5-ring",
            "gdsync-shm",
            "rdma-core-sys",
            "gdrcopy",
            "gdsync-device",
            "gdsync-soft",
            "gdsync-rdma",
        ],
    ),
    ("gdsync-capi-support", "gdsync/capi/support", &["gdrcopy", "gdsync"]),
    ("gdsync-capi", "gdsync/capi", &["rdma-core-sys", "gdrcopy", "gdsync", "gdsync-capi-support"]),
    ("gdsync-mp-capi", "mp/capi", &["gdsync-device", "gdsync", "gdsync-capi-support"]),
    ("gdasync-capi", "capi", &["gdsync-device", "gdsync", "gdsync-mp", "gdsync-capi-support"]),
    ("gdasync-nccl", "nccl", &["gdsync", "gdsync-mp", "gdsync-capi-support"]),
    ("gdasync-python", "python", &["gdsync", "gdsync-mp"]),
];

/// Concepts that still use each other. Nothing may be added here.
const KNOWN_CIRCLES: &[(&str, &[&str])] = &[("gdsync-device", &["copy_engine", "cuda", "memory"])];

fn workspace() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

/// The names under `[dependencies]` of a manifest.
fn dependencies(manifest: &str) -> BTreeSet<String> {
    let section = manifest.split("\n[dependencies]\n").nth(1).unwrap_or_default();
    let section = section.split("\n[").next().unwrap_or_default();
    section.lines().filter_map(|line| line.split(['.', ' ', '=']).next()).map(str::to_owned).collect()
}

#[test]
fn crates_use_only_what_is_below_them() {
    let ours: BTreeSet<_> = CRATES.iter().map(|(name, ..)| *name).collect();
    for (name, folder, below) in CRATES {
        let manifest = fs::read_to_string(workspace().join(folder).join("Cargo.toml")).unwrap();
        for used in dependencies(&manifest).iter().filter(|used| ours.contains(used.as_str())) {
            assert!(below.contains(&used.as_str()), "{name} must not use {used}");
        }
    }
}

#[test]
fn modules_of_a_crate_form_no_circle() {
    let mut circles = Vec::new();
    for (name, folder, _) in CRATES {
        let graph = imports(&workspace().join(folder).join("src"));
        let known: &[&str] =
            KNOWN_CIRCLES.iter().find(|(known, _)| known == name).map_or(&[], |(_, circle)| circle);
        for start in graph.keys() {
            if reaches(&graph, start, start) && !known.contains(&start.as_str()) {
                circles.push(format!("{name}: {start} -> {:?}", graph[start]));
            }
        }
    }
    assert!(circles.is_empty(), "modules that use each other, directly or not:\n{}", circles.join("\n"));
}

type Graph = BTreeMap<String, BTreeSet<String>>;

/// Whether a path of at least one arrow leads from `from` to `to`.
fn reaches(graph: &Graph, from: &str, to: &str) -> bool {
    let mut seen = BTreeSet::new();
    let mut next: Vec<_> = graph[from].iter().collect();
    while let Some(module) = next.pop() {
        if module == to {
            return true;
        }
        if seen.insert(module) {
            next.extend(graph.get(module).into_iter().flatten());
        }
    }
    false
}

/// Which top-level module names which others.
fn imports(src: &Path) -> Graph {
    let mut texts: BTreeMap<String, String> = BTreeMap::new();
    collect(src, None, &mut texts);
    let root = fs::read_to_string(src.join("lib.rs")).unwrap();
    let exported = exports(&strip(&root), &texts);
    texts
        .iter()
        .map(|(module, text)| {
            let names = paths(text).filter_map(|head| {
                // `crate::Name` is of the module that the root takes it from.
                if texts.contains_key(head) { Some(head.to_owned()) } else { exported.get(head).cloned() }
                    .filter(|found| found != module)
            });
            (module.clone(), names.collect())
        })
        .collect()
}

/// The text of each top-level module, with that of its submodules and without tests and comments.
fn collect(folder: &Path, module: Option<&str>, texts: &mut BTreeMap<String, String>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let stem = path.file_stem().unwrap().to_str().unwrap().to_owned();
        let own = module.unwrap_or(&stem).to_owned();
        if path.is_dir() {
            collect(&path, Some(&own), texts);
        } else if path.extension().is_some_and(|extension| extension == "rs")
            && !["lib", "main", "tests", "fuzz", "strategies"].contains(&stem.as_str())
        {
            let mut text = strip(&fs::read_to_string(&path).unwrap());
            if module.is_none() {
                // In the module's own file `super` is the root.
                text = text.replace("super::", "crate::");
            } else {
                text = text.replace("super::", "self::");
            }
            texts.entry(own).or_default().push_str(&text);
        }
    }
}

/// Without comments, and without the tests at the end.
fn strip(text: &str) -> String {
    let text = text.split("#[cfg(test)]\nmod tests").next().unwrap_or_default();
    text.lines().map(|line| line.split("//").next().unwrap_or_default().to_owned() + "\n").collect()
}

/// The name that follows each `crate::`; of a list, all names in it.
fn paths(text: &str) -> impl Iterator<Item = &str> {
    text.split("crate::").skip(1).flat_map(|rest| {
        let list = rest.strip_prefix('{').map(|rest| rest.split(';').next().unwrap_or_default());
        let name = |text: &str| text.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(text.len());
        let heads: Vec<_> = match list {
            None => vec![&rest[..name(rest)]],
            Some(list) => {
                list.split([',', '{', '}']).map(|item| item.trim()).map(|item| &item[..name(item)]).collect()
            }
        };
        heads.into_iter().filter(|head| !head.is_empty())
    })
}

/// The names that the root takes from its modules.
fn exports(root: &str, texts: &BTreeMap<String, String>) -> BTreeMap<String, String> {
    let mut found = BTreeMap::new();
    for statement in root.split(';') {
        let Some(path) = statement.trim().rsplit("use ").next().filter(|_| statement.contains("use ")) else {
            continue;
        };
        let Some((module, names)) = path.split_once("::").filter(|(module, _)| texts.contains_key(*module))
        else {
            continue;
        };
        for name in names.split([',', '{', '}', ':']) {
            let name = name.split(" as ").last().unwrap_or(name).trim();
            if !name.is_empty() {
                found.insert(name.to_owned(), module.to_owned());
            }
        }
    }
    found
}
