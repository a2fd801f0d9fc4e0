//! The command-line tool.

mod common;

use common::{Scratch, fails, gdasync, positive, succeeds};

fn tool(args: &[&str]) -> std::process::Command {
    let mut command = gdasync();
    command.args(args);
    command
}

#[test]
fn help_and_version_say_what_there_is() {
    let help = succeeds(tool(&["--help"]));
    assert!(help.contains("bench") && help.contains("gdrcopy") && help.contains("Usage: gdasync"), "{help}");
    assert_eq!(succeeds(tool(&["--version"])), format!("gdasync {}\n", env!("CARGO_PKG_VERSION")));
    let help = succeeds(tool(&["bench", "--help"]));
    assert!(help.contains("hca"), "{help}");
    let help = succeeds(tool(&["bench", "hca", "--help"]));
    for option in ["--rounds", "--timeout", "--json"] {
        assert!(help.contains(option), "{help}");
    }
}

#[test]
fn bad_arguments_are_named() {
    let nowhere = "/proc/no/such/folder/results.json";
    for (args, expected) in [
        (&[][..], "Usage"),
        (&["bench"], "Usage"),
        (&["bench", "gpu"], "gpu"),
        (&["bench", "hca", "--rounds", "99"], "--rounds"),
        (&["bench", "hca", "--timeout", "18446744073709551615"], "--timeout"),
        (&["bench", "hca", "--rounds", "100", "--json", nowhere], nowhere),
    ] {
        let error = fails(tool(args));
        assert!(error.contains(expected), "{args:?}: {error}");
    }
}

#[test]
fn the_benchmark_writes_its_results() {
    let json = Scratch::new("bench-hca");
    let out = succeeds(tool(&["bench", "hca", "--rounds", "200", "--json", json.path().to_str().unwrap()]));
    assert!(out.contains("% of a core"), "{out}");
    let report = json.json();
    assert_eq!((&report["device"], &report["wire"]), (&"software HCA".into(), &"shared memory".into()));
    for fact in ["cpu", "kernel", "version", "commit", "rustc"] {
        assert!(report["machine"][fact].as_str().is_some_and(|fact| !fact.is_empty()), "{fact}: {report}");
    }
    positive(&report["machine"]["cpus"]);
    let rows = report["results"].as_array().unwrap();
    let names: Vec<_> = rows.iter().map(|row| row["name"].as_str().unwrap()).collect();
    assert_eq!(names.len(), 9, "{names:?}");
    for row in rows {
        assert!(names.contains(&row["baseline"].as_str().unwrap()), "{row}");
        positive(&row["ratio"]);
        let [min, p50, p99] = ["min", "p50", "p99"].map(|name| positive(&row["us"][name]));
        assert!(min <= p50 && p50 <= p99, "{row}");
    }
    let floors = rows.iter().filter(|row| row["baseline"] == row["name"]);
    assert!(floors.inspect(|row| assert_eq!(row["ratio"], 1.0)).count() == 2, "{names:?}");
}
