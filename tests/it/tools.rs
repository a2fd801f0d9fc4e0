//! The tools of GDRCopy's users, as programs, where there is no GPU.

use serde_json::Value;

use super::common::{command, positive, results, run, succeeds};

/// Runs a tool; its report and what people read.
#[track_caller]
fn report(line: &str) -> (Value, String) {
    let (report, said) = results(&format!("{line} --backend host"));
    let tool = line.split(' ').next().unwrap();
    assert_eq!((&report["tool"], &report["backend"]), (&tool.into(), &"host".into()), "{report}");
    for fact in ["cpu", "kernel", "version", "commit", "rustc"] {
        assert!(report["machine"][fact].as_str().is_some_and(|fact| !fact.is_empty()), "{fact}: {report}");
    }
    assert!(report["gpu"].is_null() && report["parameters"].is_object(), "{report}");
    (report, said)
}

/// Percentiles that can be true.
#[track_caller]
fn micros(us: &Value) -> f64 {
    let [min, p50, p99] = ["min", "p50", "p99"].map(|name| positive(&us[name]));
    assert!(min <= p50 && p50 <= p99, "{us}");
    p50
}

fn rows(report: &Value) -> &[Value] {
    report["results"].as_array().unwrap()
}

#[test]
fn copybw_sweeps_up_to_and_including_its_size() {
    let (report, said) = report("gdrcopy_copybw -l -s 64K -c 4K -w 300 -r 50");
    let sizes = |direction: &str| -> Vec<u64> {
        let of = rows(&report).iter().filter(|row| row["direction"] == direction);
        of.map(|row| row["bytes"].as_u64().unwrap()).collect()
    };
    let expected: Vec<_> = (0..=12).map(|shift| 1 << shift).collect();
    assert_eq!((sizes("write"), sizes("read")), (expected.clone(), expected));
    for row in rows(&report) {
        micros(&row["copy_us"]);
        let calls = row["copy_us"]["calls"].as_u64().unwrap();
        assert_eq!(calls, if row["direction"] == "write" { 300 } else { 50 }, "{row}");
        // The rate is that of the mean.
        let bytes = row["bytes"].as_f64().unwrap();
        let rate = bytes / (1 << 20) as f64 / (positive(&row["copy_us"]["mean"]) / 1e6);
        assert!((positive(&row["mib_per_s"]) / rate - 1.0).abs() < 1e-6, "{row}");
    }
    assert_eq!(said.matches("write BW: ").count(), 13, "{said}");
    for line in
        ["selecting device 0", "info.mapped: 1", "user-space pointer: 0x", "unpinning buffer", "MiB/s ("]
    {
        assert!(said.contains(line), "{line}: {said}");
    }
}

#[test]
fn copybw_copies_where_it_is_told_to() {
    for args in ["-s 10001 -o 4 -w 20 -r 20", "-s 4K -c 100 -o 3 -w 20 -r 20 --store scalar --load scalar"] {
        let (report, _) = report(&format!("gdrcopy_copybw {args}"));
        assert_eq!(rows(&report).len(), 2);
        assert_eq!(rows(&report)[0]["bytes"], if args.contains("-c") { 100 } else { 9997 });
    }
    let (last, _) = report("gdrcopy_copybw -s 64K -w 10 -r 10 -s 4096");
    assert_eq!(last["parameters"]["size"], 4096, "the last of repeated options counts");
    let (report, _) = report("gdrcopy_copybw -s 8K -w 200 -r 200 --threads 3");
    for row in rows(&report) {
        assert_eq!(row["copy_us"]["calls"], 600, "all threads count");
    }
}

#[test]
fn json_on_standard_output_is_alone_there() {
    let (output, out, err) = run(command("gdrcopy_copybw --backend host -s 4K -w 10 -r 10 --json -"));
    assert!(output.status.success(), "{err}");
    let report: Value = serde_json::from_str(&out).unwrap_or_else(|e| panic!("{e}: {out}"));
    assert_eq!(rows(&report).len(), 2);
    assert!(
        err.contains("write BW: ") && !err.contains('\r'),
        "no progress where there is no terminal: {err}"
    );
}

#[test]
fn copylat_has_a_row_for_every_size() {
    let (report, said) = report("gdrcopy_copylat -s 2K -w 100 -r 10");
    for (test, calls) in [("gdr_copy_to_mapping", 100), ("gdr_copy_from_mapping", 10)] {
        let of: Vec<_> = rows(&report).iter().filter(|row| row["test"] == test).collect();
        assert_eq!(of.len(), 12, "{of:?}");
        for (shift, row) in of.iter().enumerate() {
            assert_eq!(
                (row["bytes"].as_u64(), row["us"]["calls"].as_u64()),
                (Some(1 << shift), Some(calls)),
                "{row}"
            );
            micros(&row["us"]);
        }
        assert_eq!(said.lines().filter(|line| line.starts_with(&format!("{test} \t"))).count(), 12, "{said}");
    }
    assert!(said.contains("use cold cache: no"), "{said}");
}

#[test]
fn apiperf_counts_every_pin_in_its_histogram() {
    let (report, said) = report("gdrcopy_apiperf -s 256K -n 40 -w 2");
    assert_eq!(
        rows(&report).iter().map(|row| row["bytes"].as_u64().unwrap() >> 16).collect::<Vec<_>>(),
        [1, 2, 4]
    );
    for row in rows(&report) {
        for step in ["pin", "map", "get_info", "unmap", "unpin"] {
            micros(&row[step]);
            positive(&row[step]["mean"]);
        }
        let bins = row["pin_histogram"].as_array().unwrap();
        assert_eq!(bins.len(), 10);
        assert_eq!(bins.iter().map(|bin| bin["count"].as_u64().unwrap()).sum::<u64>(), 40, "{bins:?}");
        for pair in bins.windows(2) {
            assert_eq!(pair[0]["to_us"], pair[1]["from_us"]);
        }
        // The histogram's edges are exact, the percentiles have three digits.
        let (first, min) = (positive(&bins[0]["from_us"]), positive(&row["pin"]["min"]));
        assert!((first / min - 1.0).abs() < 0.01, "{first} {min}");
    }
    assert_eq!(said.matches("Size(B)\tpin.Time(us)\tmap.Time(us)").count(), 3, "{said}");
}

#[test]
fn pplat_plays_every_mode_with_many_blocks() {
    for args in [
        "-t 30",
        "-t 30 -m 1",
        "-t 30 -s 4096 -B 3",
        "-t 30 -s 4096 -B 3 -m 1",
        "-t 30 -s 100 -B 2 -G hostmem -C gpumem -D hostmem --flush",
        "-t 1 -m 1 -s 8 -B 2 -C gpumem -D hostmem",
    ] {
        let (report, said) = report(&format!("gdrcopy_pplat {args}"));
        let results = &report["results"];
        micros(&results["round_trip_us"]);
        assert_eq!(results["wrong_words"], 0, "{args}: {results}");
        assert_eq!(results["round_trips"], if args.contains("-t 1 ") { 1 } else { 30 });
        assert!(said.contains("Round-trip latency per iteration is (min) "), "{said}");
    }
}

#[test]
fn sanity_passes_where_there_is_no_gpu() {
    let (report, said) = report("gdrcopy_sanity --cycles 10 --threads 2 -e");
    let count = |status: &str| rows(&report).iter().filter(|row| row["status"] == status).count();
    let (total, passed, waived) = (rows(&report).len(), count("passed"), count("waived"));
    assert!(passed >= 30 && passed + waived == total, "{said}");
    assert!(said.contains("NOTE: no GPU takes part"), "{said}");
    assert!(
        said.contains(&format!("Total: {total}, Passed: {passed}, Failed: 0, Waived: {waived}")),
        "{said}"
    );
    let mut names: Vec<_> = rows(&report).iter().map(|row| row["name"].as_str().unwrap()).collect();
    for row in rows(&report) {
        let reason = row["reason"].as_str().unwrap();
        assert_eq!(reason.is_empty(), row["status"] == "passed", "only who passes needs no reason: {row}");
    }
    let listed = succeeds(command("gdrcopy_sanity --backend host -l"));
    assert!(names.iter().all(|name| listed.contains(name)), "{listed}");
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), total, "a name is used twice");
}

#[test]
fn failing_case_fails_the_run() {
    for (case, expected) in [
        ("tool_fails", "tool_fails: as it shall"),
        ("tool_crashes", "killed by signal 6"),
        ("tool_hangs", "did not end within 1s"),
    ] {
        let (output, out, err) =
            run(command(&format!("gdrcopy_sanity --backend host -t {case} -t tool_passes --timeout 1")));
        assert_eq!(output.status.code(), Some(1), "{case}: {out}{err}");
        assert!(out.contains("Total: 2, Passed: 1, Failed: 1, Waived: 0"), "{out}");
        assert!(out.contains("List of failed tests:") && out.contains(expected), "{out}");
        assert!(err.contains("1 cases failed"), "{err}");
    }
    let out = succeeds(command("gdrcopy_sanity --backend host -t tool_waives -v"));
    assert!(out.contains("&&&& WAIVED tool_waives") && out.contains("tool_waives: as it shall"), "{out}");
    assert!(
        !succeeds(command("gdrcopy_sanity --backend host -t tool_passes -s")).contains("Total"),
        "-s leaves the summary out"
    );
}
