//! Programs that are killed leave nothing, and a program without the card is as it was.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use crate::{card, finish, has, start};

/// Abstract sockets of HCAs, shared memory files and temporary files.
fn traces() -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for dir in ["/dev/shm", "/tmp"] {
        let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
        let names = entries.map(|entry| entry.path().display().to_string());
        found.extend(names.filter(|name| name.contains("gdasync") || name.contains("uverbs")));
    }
    found
}

/// Processes that have this word in their environment, which children inherit.
fn processes(word: &str) -> usize {
    let entries = std::fs::read_dir("/proc").expect("there is /proc").flatten();
    let environments = entries.filter_map(|entry| std::fs::read(entry.path().join("environ")).ok());
    environments.filter(|text| text.windows(word.len()).any(|part| part == word.as_bytes())).count()
}

#[test]
fn a_program_killed_at_any_moment_leaves_nothing() {
    if !has("ibv_rc_pingpong") {
        return;
    }
    let before = traces();
    for delay in (0..20).map(|n| Duration::from_millis(n * n / 4)) {
        let word = format!("GDASYNC_TEST_DELAY={}-{delay:?}", std::process::id());
        let (name, value) = word.split_once('=').expect("it has one");
        let mut program = start(card("ibv_devinfo", "eth").arg("-v").env(name, value));
        std::thread::sleep(delay);
        program.kill().expect("it was not waited for");
        finish(program);
        assert_eq!(processes(&word), 0);
    }
    let word = format!("GDASYNC_TEST_MARK={}", std::process::id());
    let (name, value) = word.split_once('=').expect("it has one");
    let mut server = start(card("ibv_rc_pingpong", "eth").args(["-g", "1", "-p", "0"]).env(name, value));
    let maps = format!("/proc/{}/maps", server.id());
    let end = Instant::now() + Duration::from_secs(30);
    // Its doorbell page is mapped.
    while !std::fs::read_to_string(&maps).is_ok_and(|maps| maps.contains("uverbs")) {
        assert!(server.try_wait().expect("it is a child").is_none(), "it has ended by itself");
        assert!(Instant::now() < end, "it does not open the device");
        std::thread::sleep(Duration::from_millis(5));
    }
    server.kill().expect("it runs");
    let output = finish(server);
    assert!(!output.status.success());
    assert_eq!(processes(&word), 0);
    let left: Vec<_> = traces().difference(&before).cloned().collect();
    assert!(left.is_empty(), "{left:?}");
}

/// Builds a program of this folder, with these arguments of the compiler, in a folder of its own. Says so if it cannot.
pub(crate) fn build(name: &str, source: &str, arguments: &[&str]) -> Option<std::path::PathBuf> {
    let dir = std::env::temp_dir().join(format!("card-{name}-{}", std::process::id()));
    std::fs::create_dir_all(&dir).expect("a scratch directory");
    let (file, binary) = (dir.join("program.c"), dir.join("program"));
    std::fs::write(&file, source).expect("a scratch directory");
    let built = std::process::Command::new("cc").arg("-o").arg(&binary).arg(&file).args(arguments).output();
    match built {
        Ok(built) if built.status.success() => Some(binary),
        Ok(built) => {
            let text = String::from_utf8_lossy(&built.stderr).into_owned();
            let is_header = |line: &str| line.contains("infiniband/") && line.contains(".h: No such file");
            let is_missing = text.lines().any(|line| is_header(line) || line.contains("cannot find -l"));
            assert!(is_missing, "{text}");
            eprintln!("skipped: libibverbs-dev is not installed: {text}");
            None
        }
        Err(error) => {
            eprintln!("skipped: there is no C compiler: {error}");
            None
        }
    }
}

#[test]
fn cycles_leave_no_descriptors_and_no_memory() {
    let Some(binary) = build("cycles", include_str!("cycles.c"), &["-libverbs"]) else { return };
    let program = binary.to_str().expect("temporary directories have plain names");
    let text = crate::run(program, "eth", &[if crate::is_long() { "10000" } else { "600" }]);
    std::fs::remove_dir_all(binary.parent().expect("it is in a directory")).expect("it is ours");
    let mut words = text.split_whitespace();
    assert_eq!(words.next(), Some("descriptors"), "{text}");
    assert_eq!(words.next(), Some("0"), "{text}");
    let pages: i64 = words.nth(1).and_then(|pages| pages.parse().ok()).expect("a number");
    // Cycles that each lost 270 bytes would be 40 pages.
    assert!(pages < 40, "{text}");
    assert!(text.contains("child"), "{text}");
}

#[test]
fn mishaps_of_a_program_are_errors() {
    let Some(binary) = build("mishaps", include_str!("mishaps.c"), &["-libverbs"]) else { return };
    let text = crate::run(binary.to_str().expect("temporary directories have plain names"), "eth", &[]);
    std::fs::remove_dir_all(binary.parent().expect("it is in a directory")).expect("it is ours");
    assert_eq!(text, "errors\n");
}

#[test]
fn a_limit_of_file_sizes_is_an_error() {
    if !has("ibv_devinfo") {
        return;
    }
    let mut limited = card("sh", "eth");
    limited.args(["-c", "ulimit -f 100; exec ibv_devinfo"]).env("GDASYNC_CARD_LOG", "-");
    let output = finish(start(&mut limited));
    assert!(output.status.code().is_some_and(|code| code > 0), "{}", output.status);
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(text.contains("ulimit -f"), "{text}");
}

/// What the HCA reports is in the log. The peer is killed while it works.
#[test]
fn the_end_of_a_peer_is_in_the_log() {
    if !has("ibv_rc_pingpong") {
        return;
    }
    let log = std::env::temp_dir().join(format!("card-log-{}", std::process::id()));
    let port = gdsync_testkit::process::free_port().to_string();
    let arguments = ["-g", "1", "-e", "-n", "100000000", "-p", &port];
    let mut server = start(card("ibv_rc_pingpong", "eth").args(arguments).env("GDASYNC_CARD_LOG", &log));
    crate::programs::await_server(&mut server, port.parse().expect("it is a number"));
    let mut client = start(card("ibv_rc_pingpong", "eth").args(arguments).arg("127.0.0.1"));
    let maps = format!("/proc/{}/maps", server.id());
    let end = Instant::now() + Duration::from_secs(60);
    while !std::fs::read_to_string(&maps).is_ok_and(|maps| maps.contains("gdsync-link")) {
        assert!(client.try_wait().expect("it is a child").is_none(), "it has ended by itself");
        assert!(Instant::now() < end, "they are not linked");
        std::thread::sleep(Duration::from_millis(5));
    }
    client.kill().expect("it runs");
    finish(client);
    // The server ends by itself only if it has a send under way.
    let is_told = || std::fs::read_to_string(&log).is_ok_and(|text| text.contains("peer is gone"));
    while !is_told() {
        assert!(Instant::now() < end, "the log has no line of it");
        std::thread::sleep(Duration::from_millis(5));
    }
    _ = server.kill();
    finish(server);
    std::fs::remove_file(&log).expect("it is ours");
}
