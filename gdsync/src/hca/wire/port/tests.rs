use std::io::{Read, Write};
use std::process::{Command, Stdio};

use super::*;

const PATIENCE: Duration = Duration::from_secs(20);

fn port() -> (Port, Gid) {
    let gid = Gid::random().unwrap();
    (Port::open(gid, Bell::create().unwrap()).unwrap(), gid)
}

fn until(what: &str, mut done: impl FnMut() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < PATIENCE, "{what} did not happen");
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn accepted(port: &Port) -> LinkEnds {
    let mut found = Vec::new();
    until("a link", || {
        found.extend(port.take_accepted());
        !found.is_empty()
    });
    found.remove(0)
}

fn exchange(from: &mut LinkEnds, to: &mut LinkEnds, tag: u8) {
    assert!(from.tx.try_push(&[tag; 28], b"hello", &[]).unwrap());
    let record = to.rx.peek().unwrap().expect("what was pushed is there");
    let mut body = [0; 5];
    to.rx.read_body(&record, 0, &mut body).unwrap();
    assert_eq!((record.header, &body), ([tag; 28], b"hello"));
    to.rx.pop(record);
}

#[test]
fn a_link_carries_records_both_ways_and_tells_when_it_ends() {
    let ((a, _), (b, b_gid)) = (port(), port());
    let mut near = a.connect(b_gid, PATIENCE).unwrap();
    let mut far = accepted(&b);
    assert_eq!((near.peer, far.peer), (b_gid, a.shared.gid));
    exchange(&mut near, &mut far, 1);
    exchange(&mut far, &mut near, 2);
    drop(far);
    until("the end of the link", || !near.line.is_alive());
    until("the control thread forgets it", || {
        b.shared.watched.lock().is_empty() && a.shared.watched.lock().is_empty()
    });
}

#[test]
fn both_sides_may_connect_at_once() {
    let ((a, a_gid), (b, b_gid)) = (port(), port());
    let mut near = a.connect(b_gid, PATIENCE).unwrap();
    let mut other = b.connect(a_gid, PATIENCE).unwrap();
    exchange(&mut near, &mut accepted(&b), 3);
    exchange(&mut other, &mut accepted(&a), 4);
}

#[test]
fn the_loopback_link_returns_what_is_sent() {
    let (a, _) = port();
    let mut ends = a.loopback().unwrap();
    assert!(ends.tx.try_push(&[9; 28], &[], &[]).unwrap());
    assert_eq!(ends.rx.peek().unwrap().unwrap().header, [9; 28]);
}

#[test]
fn nobody_there_is_an_error_with_a_reason() {
    let (a, _) = port();
    let error = a.connect(Gid([3; 16]), PATIENCE).unwrap_err().to_string();
    assert!(error.contains("0303:0303") && error.contains("start it first"), "{error}");
}

#[test]
fn strangers_neither_block_nor_break_the_port() {
    let (a, gid) = port();
    let call = || UnixStream::connect_addr(&address(gid).unwrap()).unwrap();
    let _silent: Vec<_> = (0..MAX_STRANGERS + 8).map(|_| call()).collect();
    let closed = |mut stream: UnixStream| {
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        matches!(stream.read(&mut [0; 64]), Ok(0) | Err(_))
    };
    for bytes in [&b"GET / HTTP/1.1\r\n\r\n"[..], &[0; GREETING], &greeting(gid)] {
        let mut stranger = call();
        stranger.write_all(bytes).unwrap();
        assert!(closed(stranger), "garbage, or a greeting without files");
    }
    let small = fds::memfd(c"small", 4096).unwrap();
    let stranger = call();
    fds::send(&stranger, &greeting(gid), &[small.as_raw_fd(), small.as_raw_fd()]).unwrap();
    assert!(closed(stranger), "rings too small");
    // SAFETY: the name is a C string.
    let raw = unsafe { libc::memfd_create(c"open".as_ptr(), libc::MFD_CLOEXEC) };
    // SAFETY: the descriptor is fresh and nobody else's.
    let unsealed: OwnedFd = unsafe { std::os::fd::FromRawFd::from_raw_fd(raw) };
    std::fs::File::from(unsealed.try_clone().unwrap()).set_len(FILE as u64).unwrap();
    let stranger = call();
    fds::send(&stranger, &greeting(gid), &[unsealed.as_raw_fd(), unsealed.as_raw_fd()]).unwrap();
    assert!(closed(stranger), "rings that could shrink under us");

    let (b, _) = port();
    let mut near = b.connect(gid, PATIENCE).unwrap();
    exchange(&mut near, &mut accepted(&a), 5);
}

/// Not a test of its own: the child that the next test kills.
#[test]
fn child_that_connects_and_waits() {
    let Ok(gid) = std::env::var("GDSYNC_TEST_CONNECT_TO") else { return };
    let (port, _) = port();
    let mut ends = port.connect(gid.parse().unwrap(), PATIENCE).unwrap();
    assert!(ends.tx.try_push(&[7; 28], b"hello", &[]).unwrap());
    ends.bell.ring();
    std::thread::sleep(PATIENCE);
}

#[test]
fn a_killed_process_is_noticed() {
    let (a, gid) = port();
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "hca::wire::port::tests::child_that_connects_and_waits"])
        .env("GDSYNC_TEST_CONNECT_TO", gid.to_string())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let mut ends = accepted(&a);
    until("the child's record", || ends.rx.has_record());
    assert!(ends.line.is_alive());
    child.kill().unwrap();
    child.wait().unwrap();
    until("news of the death", || !ends.line.is_alive());
    assert_eq!(ends.rx.peek().unwrap().unwrap().header, [7; 28], "what arrived before stays readable");
}
