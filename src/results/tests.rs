//! Results of all kinds, whole and damaged.

use gdasync::measure::Machine;
use gdasync::measure::series;
use serde_json::{Value as Json, json};

use super::*;

fn parse(json: &Json) -> Result<Results, Shape> {
    Results::parse(&Node::root(json))
}

/// The results that are kept.
fn kept() -> Vec<(PathBuf, Json)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("benchmarks");
    let entries = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let files = entries.filter(|path| path.extension().is_some_and(|end| end == "json"));
    files.map(|path| (path.clone(), serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap())).collect()
}

/// Draws results: that may fail, but not panic.
fn draw(results: &Results) {
    for log in [None, Some(true)] {
        for group in &results.groups {
            let picture = crate::plot::Picture {
                title: "t".into(),
                group: group.clone(),
                log,
                foot: vec![results.origin()],
                size: None,
            };
            drop(picture.svg());
        }
    }
    if !results.messages.is_empty() {
        drop(crate::plot::timeline("t", &results.messages, &[]));
    }
}

/// The paths of everything in a value.
fn paths(json: &Json, path: &str, all: &mut Vec<String>) {
    let mut add = |key: &str, value: &Json| {
        let path = format!("{path}/{key}");
        all.push(path.clone());
        paths(value, &path, all);
    };
    match json {
        Json::Object(fields) => fields.iter().for_each(|(key, value)| add(key, value)),
        Json::Array(values) => {
            values.iter().enumerate().for_each(|(index, value)| add(&index.to_string(), value));
        }
        _ => {}
    }
}

#[test]
fn kinds_are_told_apart() {
    let kinds: Vec<_> = kept().iter().map(|(_, json)| parse(json).unwrap().kind).collect();
    for kind in ["bench bandwidth", "bench copy", "bench mp", "bench stream", "bench trigger", "pingpong"] {
        assert!(kinds.iter().any(|kept| kept == kind), "{kind} is not among {kinds:?}");
    }
    let test = |name: &str| json!({"name": name, "us": {"min": 1, "p50": 2, "p99": 3}, "baseline": name, "ratio": 1});
    for (name, kind) in [("floor: two threads", "bench hca"), ("ibv_post_send, ibv_poll_cq", "bench proxy")] {
        let results = parse(&json!({"device": "d", "results": [test(name)]})).unwrap();
        assert_eq!(results.kind, kind);
        assert_eq!(results.groups[0].series[0].points[0].at, At::Name(name.into()));
    }
}

#[test]
fn the_common_shape_is_read_as_it_is_written() {
    let mut report = series::Report {
        benchmark: "rate".into(),
        device: "software HCA".into(),
        wire: "shared memory".into(),
        machine: Machine::here(),
        options: json!({"sizes": [8, 64]}),
        series: Vec::new(),
        skipped: vec![series::Skipped { name: "GPU".into(), reason: "there is none".into() }],
    };
    for (name, x, unit) in [
        ("a", "bytes", Unit::Micros),
        ("b", "bytes", Unit::Micros),
        ("c", "queue pairs", Unit::PerSecond),
        ("d", "bytes", Unit::GigabytesPerSecond),
        ("e", "us of work", Unit::Ratio),
    ] {
        let mut series = series::Series::new(name, x, unit);
        series.points =
            [1, 1024].map(|x| series::Point { x, p50: 2.0, p99: 3.0, min: 1.0, ratio: None }).to_vec();
        report.series.push(series);
    }
    let results = parse(&serde_json::to_value(&report).unwrap()).unwrap();
    assert_eq!(results.kind, "bench rate");
    let groups: Vec<_> =
        results.groups.iter().map(|group| (group.name.as_str(), group.series.len())).collect();
    assert_eq!(
        groups,
        [
            ("time by bytes", 2),
            ("rate by queue pairs", 1),
            ("bandwidth by bytes", 1),
            ("ratio by us of work", 1)
        ]
    );
    let value = results.groups[0].series[1].at(&At::Number(1024));
    assert_eq!(value, Some(Value { min: Some(1.0), p50: 2.0, p99: Some(3.0) }));
    assert_eq!(results.missing, ["GPU: there is none"]);
    assert_eq!(results.fact("commit"), Some(report.machine.commit.as_str()));
    assert_eq!(results.fact("command"), Some(report.machine.command.as_str()));
    draw(&results);
}

#[test]
fn damaged_results_are_refused_or_drawn() {
    let timeline =
        json!({"unit": "us", "messages": [{"rank": 0, "seq": 1, "enqueue": 1.0, "released": 2.0}]});
    // One of each kind.
    let mut all = kept();
    all.sort_by_key(|(_, json)| parse(json).unwrap().kind);
    all.dedup_by_key(|(_, json)| parse(json).unwrap().kind);
    all.push(("timeline".into(), timeline));
    let damages = [
        Json::Null,
        json!("text"),
        json!([]),
        json!(0),
        json!(-1),
        json!(1e308),
        json!(1e-308),
        json!(u64::MAX),
    ];
    for (file, mut json) in all {
        // A few rows of each list are enough.
        for (_, value) in json.as_object_mut().unwrap().iter_mut() {
            if let Json::Array(rows) = value {
                rows.truncate(2);
            }
        }
        let mut places = Vec::new();
        paths(&json, "", &mut places);
        assert!(places.len() > 3, "{file:?}");
        let (mut read, mut refused) = (0, 0);
        for place in places {
            for damage in &damages {
                let mut damaged = json.clone();
                *damaged.pointer_mut(&place).unwrap() = damage.clone();
                match parse(&damaged) {
                    Ok(results) => {
                        if !place.starts_with("/machine") {
                            draw(&results);
                        }
                        read += 1;
                    }
                    Err(shape) => {
                        assert!(shape.to_string().len() > 10);
                        refused += 1;
                    }
                }
            }
        }
        assert!(read > 0 && refused > 0, "{file:?}: {read} {refused}");
    }
}
