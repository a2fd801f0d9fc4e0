//! The tools of GDRCopy's users, as programs, where there is no GPU.

use gdasync::results::{At, Report};
use serde_json::Value;

use super::common::{command, results, run, succeeds};

/// Runs a tool; its report and what people read.
#[track_caller]
fn report(line: &str) -> (Report, String) {
    let (json, said) = results(&format!("{line} --backend host"));
    let report: Report = serde_json::from_value(json).unwrap();
    assert_eq!(report.benchmark, line.split(' ').next().unwrap());
    assert!(report.device.contains("no GPU takes part") && said.contains(&report.device), "{said}");
    assert!(report.options["parameters"].is_object(), "{report:?}");
    let points = report.series.iter().flat_map(|series| &series.points);
    points.for_each(|point| assert!(point.p50.is_finite() && point.p50 > 0.0, "{point:?}"));
    (report, said)
}

/// The sizes of a series.
#[track_caller]
fn sizes(report: &Report, group: &str, name: &str) -> Vec<u64> {
    let series = report.find(group, name).unwrap_or_else(|| panic!("{name} in {report:?}"));
    let size = |at: &At| if let At::Number(size) = at { *size } else { panic!("{at}") };
    series.points.iter().map(|point| size(&point.x)).collect()
}

#[test]
fn copybw_sweeps_up_to_and_including_its_size() {
    let (report, said) = report("gdrcopy_copybw -l -s 64K -c 4K -w 300 -r 50");
    let expected: Vec<_> = (0..=12).map(|shift| 1 << shift).collect();
    for direction in ["write", "read"] {
        assert_eq!(sizes(&report, "bandwidth", direction), expected);
    }
    assert!(said.contains("bandwidth") && said.contains("4096 bytes"), "{said}");
}

#[test]
fn copybw_copies_where_it_is_told_to() {
    for (args, bytes) in [("-s 10001 -o 4 -w 20 -r 20", 9997), ("-s 4K -c 100 -o 3 -w 20 -r 20", 100)] {
        let (report, _) = report(&format!("gdrcopy_copybw {args}"));
        assert_eq!(sizes(&report, "bandwidth", "write"), [bytes]);
    }
    let (last, _) = report("gdrcopy_copybw -s 64K -w 10 -r 10 -s 4096");
    assert_eq!(last.options["parameters"]["size"], 4096, "the last of repeated options counts");
}

#[test]
fn copylat_has_a_row_for_every_size() {
    let (report, _) = report("gdrcopy_copylat -s 2K -w 100 -r 10");
    for name in ["gdr_copy_to_mapping", "gdr_copy_from_mapping"] {
        let expected: Vec<_> = (0..12).map(|shift| 1 << shift).collect();
        assert_eq!(sizes(&report, "time of a copy", name), expected);
    }
}

#[test]
fn apiperf_times_each_call() {
    let (report, _) = report("gdrcopy_apiperf -s 256K -n 40 -w 2");
    for call in ["pin", "map", "get_info", "unmap", "unpin"] {
        assert_eq!(sizes(&report, "time of a call", call), [1 << 16, 1 << 17, 1 << 18]);
    }
}

#[test]
fn sanity_passes_where_there_is_no_gpu() {
    let (report, said) = results("gdrcopy_sanity --cycles 10 --threads 2 --backend host");
    let rows = report["results"].as_array().unwrap();
    let count = |status: &str| rows.iter().filter(|row| row["status"] == status).count();
    let (total, passed, waived) = (rows.len(), count("passed"), count("waived"));
    assert!(passed >= 30 && passed + waived == total, "{said}");
    assert!(said.contains("no GPU takes part"), "{said}");
    assert!(
        said.contains(&format!("Total: {total}, Passed: {passed}, Failed: 0, Waived: {waived}")),
        "{said}"
    );
    let mut names: Vec<_> = rows.iter().map(|row: &Value| row["name"].as_str().unwrap()).collect();
    for row in rows {
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
        ("tool_fails", "failed tool_fails: as it shall"),
        ("tool_crashes", "killed by signal 6"),
        ("tool_hangs", "did not end within 1.1s"),
    ] {
        let (output, out, err) = run(command(&format!(
            "gdrcopy_sanity --backend host -t {case} -t tool_passes --timeout 1 --cycles 5"
        )));
        assert_eq!(output.status.code(), Some(1), "{case}: {out}{err}");
        assert!(out.contains("Total: 2, Passed: 1, Failed: 1, Waived: 0"), "{out}");
        assert!(out.contains(expected), "{out}");
        assert!(err.contains("1 cases failed"), "{err}");
    }
    let out = succeeds(command("gdrcopy_sanity --backend host -t tool_waives -v"));
    assert!(
        out.contains("&&&& WAIVED tool_waives") && out.contains("waived tool_waives: as it shall"),
        "{out}"
    );
    assert!(
        !succeeds(command("gdrcopy_sanity --backend host -t tool_passes -s")).contains("Total"),
        "-s leaves the summary out"
    );
}
