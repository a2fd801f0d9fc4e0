//! The flight recorder sees what happens to requests, under the numbers that the library gives them.

use std::fmt;
use std::fs::File;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use crate::child::{own_process, rerun};
use crate::common::{
    PATIENCE, Side, is_device_named, loopback, pair, received, reconnect, sent, stream, until,
};
use gdsync::recorder::{By, Event, Marks, Peer, Queue, Recording, Stage, Wait};
use gdsync::stream::Cond;
use gdsync::verbs::{RecvWr, SendWr};
use tracing::field::Field;
use tracing::{Metadata, span};

fn recording() -> Recording {
    Recording::read(&Marks::open().unwrap().path().unwrap()).unwrap()
}

/// What the recording tells of a queue pair: those of other devices may have the same number.
fn peer<'r>(recording: &'r Recording, side: &Side) -> &'r Peer {
    let is_it = |peer: &&Peer| (peer.gid, peer.qpn) == (side.context.gid(), side.qp.qpn());
    recording.peers.iter().find(is_it).unwrap()
}

/// What happened to a queue, in the order of time.
fn events<'r>(recording: &'r Recording, side: &Side, queue: Queue) -> impl Iterator<Item = Event> + 'r {
    let peer = peer(recording, side);
    let is_it = move |event: &Event| (event.device, event.qpn, event.queue) == (peer.device, peer.qpn, queue);
    recording.records.iter().map(|record| record.event).filter(is_it)
}

/// The stages of a request, in the order of time; not of waits, which may be made when it is complete or before.
fn stages(recording: &Recording, side: &Side, queue: Queue, number: u64) -> Vec<(Stage, By)> {
    let waits = [Stage::WaitSubmitted, Stage::WaitBegun, Stage::WaitEnded];
    let all = events(recording, side, queue).filter(|event| event.number == number);
    all.map(|event| (event.stage, event.by)).filter(|(stage, _)| !waits.contains(stage)).collect()
}

fn receive(side: &Side, n: u64) {
    side.qp.post_recv(&[RecvWr::new(&[side.mr.sge(0, 64).unwrap()]).id(n)]).unwrap();
}

#[test]
fn send_of_a_stream_has_all_stages() {
    own_process!();
    if is_device_named() {
        println!("skipped: a device tells nothing of doorbells");
        return;
    }
    let (a, b) = pair(64, |q| q);
    let s = stream("all-stages");
    for n in 0..3 {
        receive(&b, n);
        s.send(&a.qp, &SendWr::send_inline(&[7; 24])).unwrap();
        s.wait_send(&a.qp).unwrap();
        s.synchronize(PATIENCE).unwrap();
        received(&b).ok().unwrap();
    }
    let recording = recording();
    for n in 0..3 {
        let expected = [
            (Stage::Prepared, By::Cpu),
            (Stage::Submitted, By::Cpu),
            (Stage::Triggered, By::Hca),
            (Stage::Fetched, By::Hca),
            (Stage::Completed, By::Hca),
            (Stage::Released, By::HostStream),
        ];
        assert_eq!(stages(&recording, &a, Queue::Send, n), expected, "send {n}");
        let expected = [(Stage::Prepared, By::Cpu), (Stage::Completed, By::Hca), (Stage::Released, By::Cpu)];
        assert_eq!(stages(&recording, &b, Queue::Receive, n), expected, "receive {n}");
    }
    let of_stage = |event: &Event| matches!(event.stage, Stage::Prepared | Stage::Fetched);
    assert!(events(&recording, &a, Queue::Send).filter(of_stage).all(|event| event.len == 24));
    let peer = peer(&recording, &a);
    assert_eq!((peer.remote, peer.rank), (Some((b.context.gid(), b.qp.qpn())), None));
    assert_eq!(recording.peer(peer.device, peer.qpn), Some(peer));
}

#[test]
fn numbers_go_on_after_a_reset_that_sweeps_requests_away() {
    own_process!();
    if is_device_named() {
        println!("skipped: a device tells nothing of doorbells");
        return;
    }
    let (a, b) = loopback(64, |q| q.rnr_retry(7));
    receive(&b, 0);
    a.qp.post_send(&[SendWr::send_inline(&[1])]).unwrap();
    sent(&a).ok().unwrap();
    received(&b).ok().unwrap();
    // These two are under way, and a third one is prepared and taken back: nobody receives them.
    a.qp.post_send(&[SendWr::send_inline(&[2]), SendWr::send_inline(&[3])]).unwrap();
    drop(a.qp.prepare_send(&[SendWr::nop()]).unwrap());
    reconnect(&a.qp, &b.qp);
    receive(&b, 1);
    let again = a.qp.post_send(&[SendWr::send_inline(&[4])]).unwrap();
    assert_eq!(again.index(), 1, "the numbers of those that were swept away are given again");
    again.wait(PATIENCE).unwrap();
    received(&b).ok().unwrap();
    let recording = recording();
    let numbers = |side: &Side, queue, stage| -> Vec<_> {
        let of_stage = events(&recording, side, queue).filter(|event| event.stage == stage);
        of_stage.map(|event| event.number).collect()
    };
    assert_eq!(numbers(&a, Queue::Send, Stage::Completed), [0, 1]);
    assert_eq!(numbers(&b, Queue::Receive, Stage::Completed), [0, 1]);
    assert_eq!(numbers(&a, Queue::Send, Stage::Fetched).last(), Some(&1));
    assert_eq!(numbers(&a, Queue::Send, Stage::Prepared), [0, 1, 2, 3, 1]);
}

#[test]
fn waits_are_told_while_they_last() {
    own_process!();
    let (a, b) = pair(64, |q| q);
    receive(&a, 0);
    receive(&a, 1);
    let word = a.memory().word64(32).unwrap();
    let (queue, words) = (stream("waits-queue"), stream("waits-word"));
    queue.wait_recv(&a.qp).unwrap();
    words.wait_value64(&word, 0x1_0000_0005, Cond::Eq).unwrap();
    let mut waits = Vec::new();
    until(|| {
        let recording = recording();
        let peer = peer(&recording, &a);
        let ours = |wait: &&Wait| {
            let awaited = &wait.awaited;
            (awaited.device, awaited.qpn) == (peer.device, peer.qpn) || awaited.number == word.addr()
        };
        waits = recording.open_waits().filter(ours).copied().collect();
        waits.len() == 2
    });
    for wait in &waits {
        assert_eq!(wait.by, By::HostStream);
        let awaited = &wait.awaited;
        match awaited.queue {
            Queue::Receive => assert_eq!((awaited.number, awaited.posted, awaited.completed), (0, 2, 0)),
            other => assert_eq!((other, awaited.number, awaited.value), (Queue::None, word.addr(), 5)),
        }
    }
    b.qp.post_send(&[SendWr::send_inline(&[1])]).unwrap();
    word.store(0x1_0000_0005);
    queue.synchronize(PATIENCE).unwrap();
    words.synchronize(PATIENCE).unwrap();
    let recording = recording();
    let device = peer(&recording, &a).device;
    assert!(recording.open_waits().all(|wait| wait.awaited.device != device), "{:?}", recording.waits);
    let released = stages(&recording, &a, Queue::Receive, 0).into_iter().next_back();
    assert_eq!(released, Some((Stage::Released, By::HostStream)));
    assert!(a.qp.recv_cq().wait(std::time::Duration::from_millis(1)).is_err());
}

#[test]
fn failures_have_their_syndrome() {
    own_process!();
    if is_device_named() {
        println!("skipped: how a device fails is its own");
        return;
    }
    let (a, b) = pair(64, |q| q);
    receive(&a, 0);
    // A key that nobody has.
    let remote = gdsync::verbs::RemoteAddr { rkey: 1, ..b.mr.remote(0).unwrap() };
    a.qp.post_send(&[SendWr::write_inline(remote, &[1; 8])]).unwrap();
    let error = sent(&a).ok().unwrap_err();
    received(&a).ok().unwrap_err();
    let recording = recording();
    let failed = recording.last_of(peer(&recording, &a), Queue::Send, Some(Stage::Completed)).unwrap();
    assert_eq!(failed.event.status, error.syndrome.0);
    let flushed = recording.last_of(peer(&recording, &a), Queue::Receive, Some(Stage::Completed)).unwrap();
    assert_eq!(flushed.event.status, gdsync::mlx5::Syndrome::WR_FLUSH_ERR.0);
}

/// Not a test of its own: a process that says where its recording is, and ends in order, unless the variable is wrong
/// or its role is to exit.
#[test]
fn child() {
    let Some(role) = std::env::var_os("GDSYNC_TEST_ROLE") else { return };
    match gdsync::verbs::Context::soft(&gdsync::hca::SoftHcaConfig::default()) {
        Ok(context) => {
            let marks = Marks::open().unwrap();
            marks.mark(1, 2);
            println!("file {:?} {}", marks.path(), marks.path().is_some_and(|path| path.exists()));
            if role == "exit" {
                std::process::exit(0);
            }
            drop((context, marks));
            println!("after {:?}", Marks::open().unwrap().path());
        }
        Err(error) => println!("error {error}"),
    }
}

fn run_child(variables: &[(&str, &str)]) -> String {
    let output = rerun("recorder::child")
        .env("GDSYNC_TEST_ROLE", "child")
        .envs(variables.iter().copied())
        .output()
        .unwrap();
    assert!(output.status.success());
    String::from_utf8(output.stdout).unwrap()
}

/// An empty folder for recordings.
fn folder(name: &str) -> PathBuf {
    let folder = std::env::temp_dir().join(format!("gdsync-{name}-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    folder
}

#[test]
fn process_that_ends_in_order_leaves_nothing() {
    let folder = folder("orderly");
    let out = run_child(&[("GDSYNC_RECORDER_DIR", folder.to_str().unwrap())]);
    assert!(out.contains("gdsync-") && out.contains("\") true"), "there was one: {out}");
    let left: Vec<PathBuf> = std::fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    std::fs::remove_dir_all(&folder).unwrap();
    assert!(left.is_empty(), "{left:?}");
}

#[test]
fn variable_switches_it_off_or_is_refused() {
    assert!(run_child(&[("GDSYNC_RECORDER", "off")]).contains("file None false"));
    let out = run_child(&[("GDSYNC_RECORDER", "many")]);
    assert!(out.contains("error GDSYNC_RECORDER is 'many'"), "{out}");
    // It was asked for, and cannot be had; by default it is done without.
    let nowhere = ("GDSYNC_RECORDER_DIR", "/proc/no/such/folder");
    let out = run_child(&[("GDSYNC_RECORDER", "1024"), nowhere]);
    assert!(out.contains("error creating the file of the flight recorder"), "{out}");
    assert!(run_child(&[nowhere]).contains("file None false"));
}

/// What the recorder logs.
#[derive(Clone, Default)]
struct Logged(Arc<Mutex<Vec<String>>>);

impl Logged {
    fn count(&self, text: &str) -> usize {
        self.0.lock().unwrap().iter().filter(|line| line.contains(text)).count()
    }
}

impl tracing::Subscriber for Logged {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.target().starts_with("gdsync_device::recorder")
    }

    fn event(&self, event: &tracing::Event<'_>) {
        let mut line = String::new();
        event.record(&mut |field: &Field, value: &dyn fmt::Debug| line += &format!("{field}={value:?} "));
        self.0.lock().unwrap().push(line);
    }

    fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
        span::Id::from_u64(1)
    }

    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}
    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}
    fn enter(&self, _: &span::Id) {}
    fn exit(&self, _: &span::Id) {}
}

/// All descriptors that this process may still open.
fn hoard() -> Vec<File> {
    std::iter::from_fn(|| File::open("/dev/null").ok()).collect()
}

/// At most so much of a resource from now on, for this process.
fn limit(resource: libc::__rlimit_resource_t, most: libc::rlim_t) {
    let limit = libc::rlimit { rlim_cur: most, rlim_max: most };
    // SAFETY: the structure is valid for reading.
    assert_eq!(unsafe { libc::setrlimit(resource, &raw const limit) }, 0);
}

/// It took what it could not look at for dead, and removed what living processes record; and recorded nothing from then on. It runs
/// beside the recording of a dead process, in a folder that nobody else uses.
#[test]
fn process_without_descriptors_leaves_recordings_and_tries_again_later() {
    own_process!();
    let folder = folder("short");
    // SAFETY: this process has one thread that reads variables, this one.
    unsafe { std::env::set_var("GDSYNC_RECORDER_DIR", &folder) };
    run_child(&[("GDSYNC_TEST_ROLE", "exit")]);
    assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 1, "it ended without order");
    limit(libc::RLIMIT_NOFILE, 48);
    let logged = Logged::default();
    tracing::subscriber::set_global_default(logged.clone()).unwrap();
    let marks = Marks::open().unwrap();
    let own = marks.path().unwrap();
    let (mut taken, mut removed) = (hoard(), Vec::new());
    assert_eq!(Recording::list(), [] as [PathBuf; 0], "nobody can look");
    // With none, one, two ... of them: each may be the one that is missing where something is looked at.
    for left in 0..8 {
        removed.extend(Recording::clean());
        assert!(own.exists(), "{left} descriptors are left, and that of a living process is removed");
        drop(taken.pop());
    }
    assert_eq!((removed.len(), logged.count("may be left")), (1, 1), "{removed:?}");
    drop(marks);
    assert!(!own.exists());
    taken.extend(hoard());
    for _ in 0..3 {
        assert!(!Marks::open().unwrap().is_recording());
    }
    assert_eq!(logged.count("nothing is recorded"), 1);
    // As many as there may be, where one of them is missing in the middle of it.
    while !Marks::open().unwrap().is_recording() {
        assert_eq!(Recording::list().len(), 0, "what was begun is removed");
        drop(taken.pop().expect("with all of them it records"));
    }
    assert_eq!(logged.count("nothing is recorded"), 1);
    drop(taken);
    std::fs::remove_dir_all(&folder).unwrap();
}

/// A folder in which another user has left files that are called as recordings are: a FIFO and a link to it.
fn trapped_folder(name: &str) -> PathBuf {
    let folder = PathBuf::from(format!("/dev/shm/gdsync-{name}-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let fifo = folder.join("gdsync-1-1.rec");
    let path = std::ffi::CString::new(fifo.to_str().unwrap()).unwrap();
    // SAFETY: the path is a C string.
    assert_eq!(unsafe { libc::mkfifo(path.as_ptr(), 0o666) }, 0);
    std::os::unix::fs::symlink(&fifo, folder.join("gdsync-2-2.rec")).unwrap();
    std::fs::create_dir(folder.join("gdsync-3-3.rec")).unwrap();
    folder
}

#[test]
fn fifo_with_the_name_of_a_recording_holds_up_no_start() {
    let folder = trapped_folder("fifo");
    let mut command = rerun("recorder::child");
    let mut child =
        command.env("GDSYNC_TEST_ROLE", "child").env("GDSYNC_RECORDER_DIR", &folder).spawn().unwrap();
    let mut status = None;
    let start = std::time::Instant::now();
    while status.is_none() && start.elapsed() < PATIENCE {
        status = child.try_wait().unwrap();
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    let _ = child.kill();
    child.wait().unwrap();
    let read = Recording::read(&folder.join("gdsync-1-1.rec")).unwrap_err().to_string();
    let linked = Recording::read(&folder.join("gdsync-2-2.rec")).unwrap_err().to_string();
    std::fs::remove_dir_all(&folder).unwrap();
    assert!(status.expect("it starts and ends").success());
    assert!(read.contains("regular file") && linked.contains("regular file"), "{read}; {linked}");
}

/// An open would break the lease: that is seen here, and would wait for who holds it.
#[test]
fn files_of_other_users_are_not_even_opened() {
    use std::os::fd::AsRawFd as _;
    /// Of fcntl.h.
    const F_SETSIG: libc::c_int = 10;
    let folder = trapped_folder("lease");
    let path = folder.join("gdsync-4-4.rec");
    let file = File::create(&path).unwrap();
    let fd = file.as_raw_fd();
    // SAFETY: a plain call on a live descriptor: the signal of a broken lease is one that is ignored.
    assert_eq!(unsafe { libc::fcntl(fd, F_SETSIG, libc::SIGURG) }, 0);
    // SAFETY: a plain call on a live descriptor.
    let leased = unsafe { libc::fcntl(fd, libc::F_SETLEASE, libc::F_WRLCK) } == 0;
    if let (true, Ok(())) = (leased, std::os::unix::fs::chown(&path, Some(65_533), None)) {
        run_child(&[("GDSYNC_RECORDER_DIR", folder.to_str().unwrap())]);
        // SAFETY: a plain call on a live descriptor.
        let lease = unsafe { libc::fcntl(fd, libc::F_GETLEASE) };
        assert_eq!(lease, libc::F_WRLCK, "somebody has opened it");
    } else {
        eprintln!("SKIPPED: only root can give a file to another user, on a file system that has leases");
    }
    std::fs::remove_dir_all(&folder).unwrap();
}

#[test]
fn limit_of_the_size_of_files_leaves_the_recorder_out() {
    own_process!();
    limit(libc::RLIMIT_FSIZE, 1 << 20);
    assert!(!Marks::open().unwrap().is_recording());
    // SAFETY: this process has one thread that reads variables, this one.
    unsafe { std::env::set_var("GDSYNC_RECORDER", "1024") };
    let error = Marks::open().unwrap_err().to_string();
    assert!(error.contains("ulimit -f"), "{error}");
}
