//! Links between ports: handshake, hostile connections, death of a peer.

use std::io::{Read, Write};
use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command, Stdio};

use super::*;

const TIMEOUT: Duration = Duration::from_secs(20);

fn port() -> (Port, Gid) {
    let gid = Gid::random().unwrap();
    (Port::open(gid, EventCount::create().unwrap()).unwrap(), gid)
}

fn until(what: &str, mut done: impl FnMut() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < TIMEOUT, "{what} did not happen");
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
fn link_carries_records_both_ways_and_reports_hang_up() {
    let ((a, _), (b, b_gid)) = (port(), port());
    let mut near = a.connect(b_gid, TIMEOUT).unwrap();
    let mut far = accepted(&b);
    assert_eq!((near.peer, far.peer), (b_gid, a.shared.gid));
    exchange(&mut near, &mut far, 1);
    exchange(&mut far, &mut near, 2);
    drop(far);
    until("the end of the link", || !near.socket.is_alive());
    until("the control thread forgets it", || {
        b.shared.watched.lock().is_empty() && a.shared.watched.lock().is_empty()
    });
}

#[test]
fn both_sides_connect_at_once() {
    let ((a, a_gid), (b, b_gid)) = (port(), port());
    let mut near = a.connect(b_gid, TIMEOUT).unwrap();
    let mut other = b.connect(a_gid, TIMEOUT).unwrap();
    exchange(&mut near, &mut accepted(&b), 3);
    exchange(&mut other, &mut accepted(&a), 4);
}

#[test]
fn loopback_link_returns_what_is_sent() {
    let (a, _) = port();
    let mut ends = a.loopback().unwrap();
    assert!(ends.tx.try_push(&[9; 28], &[], &[]).unwrap());
    assert_eq!(ends.rx.peek().unwrap().unwrap().header, [9; 28]);
}

#[test]
fn connect_to_unknown_gid_names_the_reason() {
    let (a, _) = port();
    let error = a.connect(Gid([3; 16]), TIMEOUT).unwrap_err().to_string();
    assert!(error.contains("0303:0303") && error.contains("start it first"), "{error}");
}

#[test]
fn invalid_connections_neither_block_nor_break_the_port() {
    let (a, gid) = port();
    let call = || UnixStream::connect_addr(&SocketAddr::from_abstract_name(name(gid)).unwrap()).unwrap();
    let _silent: Vec<_> = (0..MAX_PENDING_GREETINGS + 8).map(|_| call()).collect();
    let closed = |mut stream: UnixStream| {
        stream.set_read_timeout(Some(TIMEOUT)).unwrap();
        matches!(stream.read(&mut [0; 64]), Ok(0) | Err(_))
    };
    let (b, b_gid) = port();
    for bytes in
        [&b"GET / HTTP/1.1\r\n\r\n"[..], &[0; GREETING], &greeting(b_gid, gid), &greeting(gid, b_gid)]
    {
        let mut stream = call();
        stream.write_all(bytes).unwrap();
        assert!(closed(stream), "garbage, a greeting for another GID, or one without descriptors");
    }
    let small = gdsync_device::memfd(c"small", 4096).unwrap();
    let stream = call();
    send_with_fds(&stream, &greeting(gid, b_gid), &[small.as_raw_fd(), small.as_raw_fd()]).unwrap();
    assert!(closed(stream), "rings too small");
    // SAFETY: the name is a C string.
    let raw = unsafe { libc::memfd_create(c"open".as_ptr(), libc::MFD_CLOEXEC) };
    // SAFETY: `memfd_create` returned this descriptor; nothing else owns it.
    let unsealed: OwnedFd = unsafe { std::os::fd::FromRawFd::from_raw_fd(raw) };
    std::fs::File::from(unsealed.try_clone().unwrap()).set_len(FILE as u64).unwrap();
    let stream = call();
    send_with_fds(&stream, &greeting(gid, b_gid), &[unsealed.as_raw_fd(), unsealed.as_raw_fd()]).unwrap();
    assert!(closed(stream), "a file that could shrink");

    let mut near = b.connect(gid, TIMEOUT).unwrap();
    exchange(&mut near, &mut accepted(&a), 5);
}

/// Whether `gid` responses a connection that claims to come from `claimed`.
fn is_let_in(gid: Gid, claimed: Gid) -> bool {
    let mut stream = try_connect(gid).unwrap();
    stream.set_nonblocking(false).unwrap();
    stream.set_read_timeout(Some(TIMEOUT)).unwrap();
    let (file, event) = (gdsync_device::memfd(c"link", FILE).unwrap(), EventCount::create().unwrap());
    // Fails if the connection was closed at once.
    let _ = send_with_fds(&stream, &greeting(gid, claimed), &[file.as_raw_fd(), event.fd().as_raw_fd()]);
    matches!(stream.read(&mut [0; GREETING]), Ok(GREETING))
}

/// Child process of the next test, run as another user.
#[test]
fn child_of_another_user() {
    let Ok(gid) = std::env::var("GDSYNC_TEST_LINK_AS_ANOTHER_USER") else { return };
    let (_own, own) = port();
    std::process::exit(if is_let_in(gid.parse().unwrap(), own) { 1 } else { 42 });
}

#[test]
fn process_of_another_user_is_refused_even_by_root() {
    let (_a, gid) = port();
    // By file descriptor, because the other user may lack access to the path.
    let mut child = Command::new("/proc/self/exe");
    child.args(["--exact", "wire::port::tests::child_of_another_user"]);
    child.env("GDSYNC_TEST_LINK_AS_ANOTHER_USER", gid.to_string()).stdout(Stdio::null());
    if user() != 0 {
        eprintln!("skipped: only root can start a process of another user");
        return;
    }
    assert_eq!(child.uid(12_345).gid(12_345).status().unwrap().code(), Some(42), "it was let in");
}

/// A process with a false GID would receive the messages of the true owner.
#[test]
fn gid_can_only_be_claimed_by_the_process_that_serves_it() {
    let (a, gid) = port();
    let claim = |claimed| is_let_in(gid, claimed);
    assert!(!claim(Gid::random().unwrap()), "nobody serves it");
    // Another process serves this GID and has linked itself.
    let mut child = child_of(gid);
    let theirs = accepted(&a);
    assert!(!claim(theirs.peer), "the process that serves it is another one");
    assert!(theirs.socket.is_alive(), "its link goes on");
    child.kill().unwrap();
    child.wait().unwrap();
    let (_b, b_gid) = port();
    assert!(claim(b_gid), "this process serves it");
}

#[test]
fn socket_name_does_not_reveal_the_gid() {
    let gid = Gid::random().unwrap();
    assert!(!name(gid).contains(&gid.to_string()));
    assert_ne!(name(gid), name(Gid::random().unwrap()));
    assert_eq!(name(gid), name(gid));
}

#[test]
fn full_backlog_fails_at_the_deadline() {
    let gid = Gid::random().unwrap();
    let listener = UnixListener::bind_addr(&SocketAddr::from_abstract_name(name(gid)).unwrap()).unwrap();
    rustix::net::listen(&listener, 0).unwrap();
    let _queued: Vec<_> = std::iter::from_fn(|| try_connect(gid).ok()).take(1 << 14).collect();
    let (a, _) = port();
    let error = a.connect(gid, Duration::from_millis(50)).unwrap_err().to_string();
    assert!(error.contains("accepts no connections"), "{error}");
}

/// Child process that `killed_process_is_noticed` kills.
#[test]
fn child_that_connects_and_waits() {
    let Ok(gid) = std::env::var("GDSYNC_TEST_CONNECT_TO") else { return };
    let (port, _) = port();
    let mut ends = port.connect(gid.parse().unwrap(), TIMEOUT).unwrap();
    assert!(ends.tx.try_push(&[7; 28], b"hello", &[]).unwrap());
    ends.event.notify();
    std::thread::sleep(TIMEOUT);
}

/// Child process of the next test, with a descriptor limit of 0.
#[test]
fn child_without_descriptors() {
    if std::env::var_os("GDSYNC_TEST_NO_DESCRIPTORS").is_none() {
        return;
    }
    let (port, gid) = port();
    let listener =
        UnixListener::bind_addr(&SocketAddr::from_abstract_name("gdsync-test-spin").unwrap()).unwrap();
    listener.set_nonblocking(true).unwrap();
    let _pending = UnixStream::connect_addr(&listener.local_addr().unwrap()).unwrap();
    let shared = port.shared.clone();
    let mut control = Control { shared, listener, greeting_pending: Vec::new(), paused: None };
    let none = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the pointer is valid for one structure.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const none) }, 0);
    control.accept();
    assert!(control.paused.is_some(), "{gid}: accept would be retried at once");
    std::process::exit(42);
}

#[test]
fn accept_pauses_when_descriptors_run_out() {
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args(["--exact", "wire::port::tests::child_without_descriptors"]);
    child.env("GDSYNC_TEST_NO_DESCRIPTORS", "1").stdout(Stdio::null());
    assert_eq!(child.status().unwrap().code(), Some(42));
}

fn child_of(gid: Gid) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "wire::port::tests::child_that_connects_and_waits"])
        .env("GDSYNC_TEST_CONNECT_TO", gid.to_string())
        .stdout(Stdio::null())
        .spawn()
        .unwrap()
}

#[test]
fn killed_process_is_noticed() {
    let (a, gid) = port();
    let mut child = child_of(gid);
    let mut ends = accepted(&a);
    until("the child's record", || ends.rx.has_record());
    assert!(ends.socket.is_alive());
    child.kill().unwrap();
    child.wait().unwrap();
    until("news of the death", || !ends.socket.is_alive());
    assert_eq!(ends.rx.peek().unwrap().unwrap().header, [7; 28], "what arrived before stays readable");
}

#[test]
fn only_a_greeting_is_taken_for_one() {
    let [own, from] = [Gid([1; 16]), Gid([2; 16])];
    bolero::check!().with_type::<(bool, Vec<u8>)>().for_each(|(changes, bytes)| {
        let mut whole = greeting(own, from).to_vec();
        if *changes {
            whole.truncate(GREETING.min(GREETING - 4 + bytes.len()));
            whole.iter_mut().zip(bytes).for_each(|(byte, change)| *byte ^= change);
        }
        let bytes = if *changes { &whole } else { bytes };
        match read_greeting(bytes, own) {
            Ok(peer) => assert_eq!(bytes[..], greeting(own, peer)),
            Err(error) => assert_eq!(error.kind(), io::ErrorKind::InvalidData),
        }
    });
}
