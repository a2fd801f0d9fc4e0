//! `gdasync bench --compare`.

use serde_json::{Value, json};

use super::common::{Scratch, run};
use super::{benchmark, path, tool, write};

/// A copy of the results in `name` with the medians of mode `stream` multiplied.
fn scaled(scratch: &str, name: &str, factor: f64) -> Scratch {
    let mut json = benchmark(name);
    for row in json["results"].as_array_mut().unwrap().iter_mut().filter(|row| row["mode"] == "stream") {
        for key in ["min", "p50", "p99"] {
            let value = row["half_rtt_us"][key].as_f64().unwrap();
            row["half_rtt_us"][key] = (value * factor).into();
        }
    }
    let file = Scratch::new(scratch);
    write(&file, &json);
    file
}

/// Exit status and output of a comparison.
fn compare(a: &str, b: &str, args: &[&str]) -> (i32, String, String) {
    let (output, out, err) = run(tool(&[&["bench", "--compare", a, b], args].concat()));
    (output.status.code().unwrap(), out, err)
}

#[test]
fn comparisons_tell_what_is_worse() {
    let name = "pingpong-h200x2-memop.json";
    let original = format!("benchmarks/{name}");
    let [slower, little, faster] =
        [("slower", 1.5), ("little", 1.08), ("faster", 0.6)].map(|(file, factor)| scaled(file, name, factor));
    for (other, args, status, worse, better) in [
        (original.as_str(), &["--fail"][..], 0, 0, 0),
        (path(&slower), &["--fail"], 4, 2, 0),
        (path(&slower), &[], 0, 2, 0),
        (path(&faster), &["--fail"], 0, 0, 2),
        (path(&little), &["--fail"], 0, 0, 0),
        (path(&little), &["--fail", "--threshold", "5"], 4, 1, 0),
        (path(&slower), &["--fail", "--threshold", "60"], 0, 0, 0),
    ] {
        let (code, out, err) = compare(&original, other, args);
        assert_eq!(code, status, "{other} {args:?}: {out}\n{err}");
        assert!(out.contains(&format!("12 figures, {worse} worse, {better} better")), "{args:?}: {out}");
        assert_eq!(out.matches("WORSE").count(), worse, "{out}");
        let (code, out, _) = compare(&original, other, &[args, &["--json"]].concat());
        assert_eq!(code, status);
        let json: Value = serde_json::from_str(&out).unwrap();
        assert_eq!((&json["worse"], &json["better"]), (&worse.into(), &better.into()), "{json}");
        assert_eq!(json["rows"].as_array().unwrap().len(), 12);
    }
    let (_, out, _) = compare(&original, path(&slower), &[]);
    assert!(out.contains("1.50") && out.contains("4 KiB") && out.contains("half round trip, us"), "{out}");
    // The other way round what was slower is faster.
    assert_eq!(compare(path(&slower), &original, &["--fail"]).0, 0);
}

#[test]
fn comparisons_of_what_is_not_alike_are_refused_or_told() {
    let (a, b) = ("benchmarks/mp-2-cores.json", "benchmarks/trigger-h200.json");
    let (code, _, err) = compare(a, b, &[]);
    assert!(code == 1 && err.contains("`bench mp`") && err.contains("`bench trigger`"), "{code} {err}");
    let (code, _, err) = compare(a, "/no/such/file.json", &["--fail"]);
    assert!(code == 1 && err.contains("/no/such/file.json"), "{code} {err}");
    // Nothing in common, and something.
    let file = Scratch::new("compare-modes");
    let mut json = benchmark("mp-2-cores.json");
    json["lines"].as_array_mut().unwrap().retain(|line| line["mode"] == "sync" && line["bytes"] == 8);
    json["calls"] = json!([]);
    write(&file, &json);
    let (code, out, _) = compare(a, path(&file), &["--fail"]);
    assert!(code == 0 && out.contains("1 figures, 0 worse"), "{code} {out}");
    for only in ["half round trip, sync, 1048576", "half round trip, async", "calls with 8 bytes, mp"] {
        assert!(out.contains(&format!("only in A: {only}\n")), "{only}: {out}");
    }
    json["lines"][0]["mode"] = "other".into();
    write(&file, &json);
    let (code, _, err) = compare(a, path(&file), &[]);
    assert!(
        code == 1 && err.contains("no figure in common") && err.contains("half round trip, other"),
        "{code} {err}"
    );
    // Facts that differ are told.
    let mut json = benchmark("mp-2-cores.json");
    json["machine"]["cpus"] = 64.into();
    write(&file, &json);
    let (_, out, _) = compare(a, path(&file), &[]);
    assert!(out.contains("machine: A 2 x AMD EPYC; B 64 x AMD EPYC"), "{out}");
    for args in [
        &["--compare", a][..],
        &["--compare", a, a, a],
        &["--fail"],
        &["--json"],
        &["--compare", a, a, "--threshold", "-1"],
        &["--compare", a, a, "--threshold", "NaN"],
        &["--compare", a, a, "hca"],
    ] {
        let (output, out, err) = run(tool(&[&["bench"], args].concat()));
        assert_eq!(output.status.code(), Some(2), "{args:?}: {out}\n{err}");
    }
    let nowhere = "/proc/no/such/folder/out.json";
    let (code, _, err) = compare(a, a, &["--json", nowhere]);
    assert!(code == 1 && err.contains(nowhere), "{code} {err}");
}
