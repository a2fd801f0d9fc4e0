//! Pages, and texts that try to be more.

use std::path::Path;

use super::common::{Scratch, succeeds};
use super::xml::elements;
use super::{FIRST, benchmark, kept, path, plot, read, tool, write};

#[test]
fn the_report_has_everything_and_needs_nothing() {
    let page = Scratch::new("report");
    let files: Vec<_> = kept().into_iter().map(|path| path.to_str().unwrap().to_owned()).collect();
    let args: Vec<_> = files.iter().map(String::as_str).collect();
    succeeds(tool(&[&["report"], &args[..], &["-o", path(&page)]].concat()));
    let text = std::fs::read_to_string(page.path()).unwrap();
    let (html, all) = (elements(&text), text.as_str());
    for element in &html.elements {
        assert!(!["script", "link", "img", "iframe"].contains(&element.name.as_str()), "{element:?}");
        let loads = |(name, _): &(String, String)| name == "src" || name.ends_with("href") || name == "style";
        assert!(!element.attributes.iter().any(loads), "{element:?}");
    }
    assert!(!all.contains("url(") && !all.contains("@import"));
    let texts = html.texts();
    for file in &files {
        let json = read(Path::new(file));
        for fact in ["cpu", "commit", "kernel", "rustc"] {
            let fact = json["machine"][fact].as_str().unwrap();
            assert!(texts.iter().any(|text| text.contains(fact)), "{file}: {fact}");
        }
    }
    let svgs = html.elements.iter().filter(|element| element.name == "svg").count();
    let tables = html.elements.iter().filter(|element| element.get_or("class", "") == "figures").count();
    assert!(svgs == tables && svgs >= files.len(), "{svgs} {tables}");
    // A figure of each kind.
    for figure in
        ["bare word", "cuStreamSynchronize", "wait for a receive", "take a message that is there", "3,559"]
    {
        assert!(texts.contains(&figure), "{figure}");
    }
    assert!(
        all.contains("only the last with a barrier, idle GPU: cuStreamBatchMemOp"),
        "what failed is told"
    );
    // A reader of dark pages gets other colours for all that pictures have in black and white.
    for color in ["#FFFFFF", "#222222", "#5F5F5F", "#D6D6D6", "#EEEEEE"] {
        assert!(all.contains(&format!("=\"{color}\"]")) && all.contains(&format!("=\"{color}\"")), "{color}");
    }
}

#[test]
fn names_cannot_break_a_picture_or_a_page() {
    let nasty = "</text><script>alert(\"1\")</script>&amp;'\u{1}\u{7f} ü";
    let mut json = benchmark("trigger-h200.json");
    for row in json["rows"].as_array_mut().unwrap() {
        let name = format!("{nasty} {}", row["variant"].as_str().unwrap());
        row["variant"] = name.into();
    }
    json["gpu"] = nasty.into();
    json["machine"]["commit"] = "{{body}}".into();
    let file = Scratch::new("plot-nasty");
    write(&file, &json);
    let svg = plot(&[path(&file), "--title", nasty]);
    assert!(svg.elements.iter().all(|element| element.name != "script"));
    assert!(svg.texts().join(" ").contains("<script>alert(\"1\")</script>&amp;'"), "{:?}", svg.texts());
    let page = Scratch::new("plot-nasty-page");
    succeeds(tool(&["report", path(&file), "--title", nasty, "-o", path(&page)]));
    let page = elements(&std::fs::read_to_string(page.path()).unwrap());
    assert!(page.elements.iter().all(|element| element.name != "script"));
    assert_eq!(page.elements.iter().filter(|element| element.name == "h2").count(), 1);
}

#[test]
fn what_benchmarks_write_now_is_drawn_with_its_command() {
    let json = Scratch::new("plot-register");
    succeeds(tool(&["bench", "register", "--calls", "2000", "--bytes", "4096", "--json", path(&json)]));
    let svg = plot(&[path(&json)]);
    let rows = json.json()["results"].as_array().unwrap().len();
    assert!(svg.texts().contains(&"host memory"), "{:?}", svg.texts());
    assert_eq!(svg.count("rect", FIRST), rows + 1);
    let page = Scratch::new("plot-register-page");
    succeeds(tool(&["report", path(&json), "-o", path(&page)]));
    let page = elements(&std::fs::read_to_string(page.path()).unwrap());
    let command = "gdasync bench register --calls 2000 --bytes 4096 --json";
    assert!(page.texts().iter().any(|text| text.starts_with(command)), "{:?}", page.texts());
    let same = ["bench", "--compare", path(&json), path(&json), "--fail"];
    assert!(succeeds(tool(&same)).contains(" 0 worse"));
}

#[test]
fn what_the_benchmarks_of_messages_write_is_drawn() {
    let json = Scratch::new("plot-pingpong");
    let options = ["bench", "pingpong", "--modes", "cpu,stream", "--sizes", "8,64", "--iters", "20"];
    succeeds(tool(&[&options[..], &["--stream", "host", "--json", path(&json)]].concat()));
    let report = json.json();
    let svg = plot(&[path(&json)]);
    let points = |series: &&serde_json::Value| series["points"].as_array().unwrap().len();
    let measured: Vec<_> =
        report["series"].as_array().unwrap().iter().filter(|series| points(series) > 0).collect();
    for series in &measured {
        let name = series["name"].as_str().unwrap();
        assert!(svg.texts().contains(&name), "{name}: {:?}", svg.texts());
    }
    assert_eq!(svg.count("circle", FIRST), points(&measured[0]) + 1);
    let same = ["bench", "--compare", path(&json), path(&json), "--fail"];
    assert!(succeeds(tool(&same)).contains(" 0 worse"));
}
