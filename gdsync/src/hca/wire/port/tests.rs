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
    let claim = Greeting { gid: Gid([7; 16]), secret: own_secret().unwrap(), mark: 0 }.to_bytes();
    for bytes in [&b"GET / HTTP/1.1\r\n\r\n"[..], &[0; GREETING], &claim] {
        let mut stranger = call();
        stranger.write_all(bytes).unwrap();
        assert!(closed(stranger), "garbage, or a greeting without files");
    }
    let small = fds::memfd(c"small", 4096).unwrap();
    let stranger = call();
    fds::send(&stranger, &claim, &[small.as_raw_fd(), small.as_raw_fd()]).unwrap();
    assert!(closed(stranger), "rings too small");
    // SAFETY: the name is a C string.
    let raw = unsafe { libc::memfd_create(c"open".as_ptr(), libc::MFD_CLOEXEC) };
    // SAFETY: the descriptor is fresh and nobody else's.
    let unsealed: OwnedFd = unsafe { std::os::fd::FromRawFd::from_raw_fd(raw) };
    std::fs::File::from(unsealed.try_clone().unwrap()).set_len(FILE as u64).unwrap();
    let stranger = call();
    fds::send(&stranger, &claim, &[unsealed.as_raw_fd(), unsealed.as_raw_fd()]).unwrap();
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

/// What a process that only claims a GID can do: it reads the address in `/proc/net/unix`, greets and leaves.
fn impostor(target: Gid, gid: Gid, secret: u64) -> Option<UnixStream> {
    let mut stream = UnixStream::connect_addr(&address(target).unwrap()).unwrap();
    let (file, bell) = (fds::memfd(c"rings", FILE).unwrap(), Bell::create().unwrap());
    let greeting = Greeting { gid, secret, mark: 1 };
    fds::send(&stream, &greeting.to_bytes(), &[file.as_raw_fd(), bell.fd().as_raw_fd()]).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    matches!(stream.read(&mut [0; GREETING]), Ok(GREETING)).then_some(stream)
}

#[test]
fn a_gid_that_is_linked_cannot_be_claimed() {
    let ((a, a_gid), (b, b_gid)) = (port(), port());
    let secret = own_secret().unwrap();
    let mut near = a.connect(b_gid, PATIENCE).unwrap();
    let mut far = accepted(&b);
    assert!(impostor(a_gid, b_gid, secret).is_none(), "of the side that connected");
    assert!(impostor(b_gid, a_gid, secret).is_none(), "of the side that was connected to");
    assert!(impostor(b_gid, b_gid, secret).is_none(), "its own");
    assert!(impostor(b_gid, Gid([8; 16]), secret.wrapping_add(1)).is_none(), "of another job");
    assert!(impostor(b_gid, Gid([9; 16]), secret).is_some(), "anybody else is welcome");
    assert!(near.line.is_alive() && far.line.is_alive());
    exchange(&mut near, &mut far, 6);
    // The HCA itself may make a second link.
    let mut second = b.connect(a_gid, PATIENCE).unwrap();
    exchange(&mut second, &mut accepted(&a), 7);
}

#[test]
fn only_a_number_that_stands_for_one_user_is_trusted() {
    let all = "         0          0 4294967295\n";
    assert!(!is_anybody(1000, "65534\n", "0 1000 1\n") && !is_anybody(65_534, "65534\n", all));
    assert!(!is_anybody(65_534, "1\n", ""));
    for map in ["", "0 1000 1\n", "0 1000 1\n1 100000 65536\n"] {
        assert!(is_anybody(65_534, "65534\n", map), "{map}");
        assert!(is_anybody(65_534, "", map), "{map}: the number that kernels have");
    }
}

#[test]
fn processes_of_another_job_are_refused() {
    let (a, gid) = port();
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "hca::wire::port::tests::child_that_connects_and_waits"])
        .env("GDSYNC_TEST_CONNECT_TO", gid.to_string())
        .env("GDSYNC_JOB_TOKEN", own_secret().unwrap().wrapping_add(1).to_string())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    assert!(!child.wait().unwrap().success());
    assert!(!a.has_accepted());
}

/// A process of another user, where root can make one.
#[test]
fn processes_of_other_users_are_refused_also_by_root() {
    use std::os::unix::process::CommandExt as _;
    if user() != 0 {
        eprintln!("SKIPPED: only root can start a process of another user");
        return;
    }
    let (a, gid) = port();
    // A copy that others can read and run.
    let program = std::env::temp_dir().join(format!("gdsync-port-test-{}", std::process::id()));
    std::fs::copy(std::env::current_exe().unwrap(), &program).unwrap();
    let output = Command::new(&program)
        .args(["--exact", "hca::wire::port::tests::child_that_connects_and_waits"])
        .env("GDSYNC_TEST_CONNECT_TO", gid.to_string())
        .env("RUST_BACKTRACE", "0")
        .uid(65_533)
        .current_dir("/")
        .output();
    std::fs::remove_file(&program).unwrap();
    let output = output.unwrap();
    let out = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(!output.status.success() && out.contains("belongs to user 0"), "{out}");
    assert!(!a.has_accepted());
}

#[test]
fn a_peer_that_takes_no_connections_is_an_error_by_the_deadline() {
    let gid = Gid::random().unwrap();
    let listener = UnixListener::bind_addr(&address(gid).unwrap()).unwrap();
    // SAFETY: a plain call on a live descriptor: from now on one connection may wait.
    assert_eq!(unsafe { libc::listen(listener.as_raw_fd(), 0) }, 0);
    let _waits = UnixStream::connect_addr(&address(gid).unwrap()).unwrap();
    let (tell, told) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let (a, _) = port();
        tell.send(a.connect(gid, Duration::from_millis(50)).unwrap_err().to_string()).unwrap();
    });
    let error = told.recv_timeout(PATIENCE).expect("it ends");
    assert!(error.contains("taken no connection for 50ms"), "{error}");
}

/// Not a test of its own: a process that has no descriptor for a connection, and later has.
#[test]
fn child_without_descriptors() {
    if std::env::var_os("GDSYNC_TEST_FULL").is_none() {
        return;
    }
    let (_port, gid) = port();
    let mut tasks = std::fs::read_dir("/proc/self/task").unwrap().map(|task| task.unwrap().path());
    let is_control =
        |task: &std::path::PathBuf| std::fs::read_to_string(task.join("comm")).unwrap() == "gdsync-port\n";
    let control = tasks.find(is_control).unwrap();
    drop(tasks);
    let usage = std::fs::File::open(control.join("schedstat")).unwrap();
    // Its first number: nanoseconds on a core.
    let on_core = || {
        let mut text = [0; 64];
        let got = std::os::unix::fs::FileExt::read_at(&usage, &mut text, 0).unwrap();
        let text = std::str::from_utf8(&text[..got]).unwrap();
        Duration::from_nanos(text.split(' ').next().unwrap().parse().unwrap())
    };
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the structure is valid for writing.
    assert_eq!(unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) }, 0);
    let next = usage.try_clone().unwrap().as_raw_fd();
    let full = libc::rlimit { rlim_cur: libc::rlim_t::try_from(next).unwrap(), ..limit };
    // SAFETY: the structure is valid for reading.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const full) }, 0);
    println!("\ngid {gid}");
    std::io::stdin().read_line(&mut String::new()).unwrap();
    let (before, start) = (on_core(), Instant::now());
    std::thread::sleep(Duration::from_millis(500));
    let (took, lasted) = (on_core() - before, start.elapsed());
    // SAFETY: as above.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) }, 0);
    println!("\nthread {} {took:?} of {lasted:?}", if took * 4 < lasted { "rests" } else { "spins" });
    std::io::stdin().read_line(&mut String::new()).unwrap();
}

#[test]
fn without_descriptors_the_port_rests_and_accepts_later() {
    use std::io::{BufRead as _, BufReader};
    if !std::path::Path::new("/proc/thread-self/schedstat").exists() {
        eprintln!("SKIPPED: this kernel does not tell how long a thread ran");
        return;
    }
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "hca::wire::port::tests::child_without_descriptors", "--nocapture"])
        .env("GDSYNC_TEST_FULL", "1")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map(|line| line.unwrap());
    let mut told = |what: &str| lines.find_map(|line| Some(line.split_once(what)?.1.to_owned()));
    let gid: Gid = told("gid ").unwrap().parse().unwrap();
    let mut caller = UnixStream::connect_addr(&address(gid).unwrap()).unwrap();
    let mut stdin = child.stdin.take().unwrap();
    stdin.write_all(b"go\n").unwrap();
    let rests = told("thread ").unwrap();
    caller.write_all(b"no greeting").unwrap();
    caller.set_read_timeout(Some(PATIENCE)).unwrap();
    assert!(rests.starts_with("rests"), "{rests}");
    assert!(matches!(caller.read(&mut [0]), Ok(0)), "it is accepted, and turned away for what it says");
    drop(stdin);
    assert!(child.wait().unwrap().success());
}
