//! Random traffic: messages of every size by CPU and streams, between two ranks, between eight, and while ranks are killed.
//!
//! `tests/hosts/run` runs some of these on several hosts. `GDSYNC_TEST_MESSAGES=N`: how many messages. `GDSYNC_TEST_KILLS=N`: how many jobs in which ranks are killed.

use std::collections::VecDeque;
use std::env;
use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::ops::Range;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, ChildStdout, Stdio, exit};
use std::thread::sleep;
use std::time::{Duration, Instant};

use crate::common::{
    LONG, buffer, bytes, free_port, is_part_of, job, message, rank_command, stream, syndrome, until,
};
use gdsync::stream::{Batch, Stream};
use mp::{Communicator, Error, Registration, Request, Result, Status};
use rustix::time::{ClockId, clock_gettime};

const RANKS: usize = 8;

/// Messages of a window, at most, and bytes of the largest.
const WINDOW: usize = 48;
const LARGEST: usize = 64 << 10;

/// A number below `of`, the same for all who ask with the same arguments.
pub(crate) fn chance(what: usize, seed: usize, n: usize, of: usize) -> usize {
    let bytes = message(what, seed, n, 8);
    usize::from_le_bytes(*bytes.first_chunk().expect("8 bytes")) % of
}

/// How many messages a test sends in all.
fn wanted(default: usize) -> usize {
    env::var("GDSYNC_TEST_MESSAGES").map_or(default, |n| n.parse().expect("a number"))
}

/// One direction of a window of messages.
#[derive(Clone, Copy)]
struct Plan {
    from: usize,
    to: usize,
    window: usize,
}

impl Plan {
    /// Phases of windows have the same character: in most, CPUs send short messages, and the FIFO opens.
    fn is_plain(self) -> bool {
        chance(1, self.from, self.window / 24, 4) > 0
    }

    fn count(self) -> usize {
        1 + chance(2, self.from, self.window, WINDOW)
    }

    fn number(self, n: usize) -> usize {
        self.window * WINDOW + n
    }

    fn len(self, n: usize) -> usize {
        let most = match self.is_plain() {
            true => [9, 65, 4097][chance(3, self.from, self.window, 3)],
            false => [9, 257, 6000, LARGEST + 1][chance(3, self.from, self.number(n), 4)],
        };
        chance(4, self.from, self.number(n), most)
    }

    fn message(self, n: usize) -> Vec<u8> {
        message(self.from, self.to, self.number(n), self.len(n))
    }

    /// How its messages are sent: see [`send`].
    fn mode(self) -> usize {
        if self.is_plain() { 0 } else { chance(5, self.from, self.window, 8) }
    }

    /// Whether a stream waits for message `n`.
    fn is_awaited_by_stream(self, n: usize) -> bool {
        !self.is_plain() && chance(6, self.from, self.number(n), 8) == 0
    }

    /// Receives posted before anything is sent; the others are posted one by one.
    fn early(self) -> usize {
        chance(7, self.from, self.window, self.count() + 1)
    }
}

/// The memory and streams of a rank. The stream that waits must not hold up what other ranks wait for.
struct Setup {
    outbox: Registration,
    inbox: Registration,
    sends: Stream,
    waits: Stream,
}

impl Setup {
    fn new(comm: &Communicator) -> Self {
        let [outbox, inbox] = [(); 2].map(|()| buffer(comm, WINDOW * LARGEST));
        // All pages are there from now on: the tests look at the memory of the process.
        for buffer in [&outbox, &inbox] {
            buffer.memory().write(0, &vec![0; WINDOW * LARGEST]).unwrap();
        }
        Self { outbox, inbox, sends: stream("sends"), waits: stream("waits") }
    }
}

fn cell(n: usize) -> Range<usize> {
    n * LARGEST..(n + 1) * LARGEST
}

/// Sends message `n`, or all of them where the mode sends them together.
fn send(comm: &Communicator, setup: &Setup, plan: Plan, n: usize) -> Result<Vec<Request>> {
    let Setup { outbox, sends, .. } = setup;
    let write = |n: usize| {
        let bytes = plan.message(n);
        outbox.memory().write(cell(n).start, &bytes).unwrap();
        cell(n).start..cell(n).start + bytes.len()
    };
    let to = plan.to;
    let sent = match plan.mode() {
        0 | 1 => comm.isend(outbox, write(n), to)?,
        2 => {
            let Range { start, end } = write(n);
            let middle = start + (end - start) / 3;
            comm.isend_vectored(&[(outbox, start..middle), (outbox, middle..end)], to)?
        }
        3 => comm.isend_on_stream(sends, outbox, write(n), to)?,
        4 => {
            // A send of a batch that is dropped does not count.
            let [mut dropped, mut batch] = [(); 2].map(|()| Batch::new());
            let _taken_back = comm.isend_in_batch(&mut dropped, outbox, write(n), to)?;
            drop(dropped);
            let sent = comm.isend_in_batch(&mut batch, outbox, write(n), to)?;
            sends.submit(&mut batch)?;
            sent
        }
        5 => {
            let mut batch = Batch::new();
            let sent = comm.isend_in_batch(&mut batch, outbox, write(n), to)?;
            sends.submit(&mut batch)?;
            sent
        }
        _ if n > 0 => return Ok(Vec::new()),
        _ => {
            let mut batch = Batch::new();
            let all = (0..plan.count()).map(|n| comm.isend_in_batch(&mut batch, outbox, write(n), to));
            let all = all.collect::<Result<Vec<_>>>()?;
            sends.submit(&mut batch)?;
            return Ok(all);
        }
    };
    Ok(vec![sent])
}

/// A window of messages to one rank and from one.
fn play(comm: &Communicator, setup: &Setup, window: usize, to: usize, from: usize) -> Result<()> {
    let (ours, theirs) = (Plan { from: comm.rank(), to, window }, Plan { from, to: comm.rank(), window });
    let mut posted = 0;
    let mut receive = || {
        let request = comm.irecv(&setup.inbox, cell(posted), from)?;
        if theirs.is_awaited_by_stream(posted) {
            comm.wait_on_stream(&setup.waits, &request)?;
        }
        posted += 1;
        Result::Ok(request)
    };
    let mut received = (0..theirs.early()).map(|_| receive()).collect::<Result<VecDeque<_>>>()?;
    if !theirs.is_plain() && chance(8, from, window, 3) == 0 {
        comm.wait_all_on_stream(&setup.waits, &received)?;
    }
    let mut sent = Vec::new();
    let mut arrived = 0;
    let mut arrive = |request: &Request| {
        let status = comm.wait(request, LONG)?;
        assert_eq!(
            status,
            Status { rank: from, bytes: theirs.len(arrived), tag: 0 },
            "{arrived} of window {window}"
        );
        let start = cell(arrived).start;
        let is_right = bytes(&setup.inbox, start..start + status.bytes) == theirs.message(arrived);
        assert!(is_right, "{arrived} of window {window} from rank {from}");
        arrived += 1;
        Result::Ok(())
    };
    for n in 0..ours.count().max(theirs.count()) {
        if n < ours.count() {
            sent.extend(send(comm, setup, ours, n)?);
        }
        if theirs.early() + n < theirs.count() {
            received.push_back(receive()?);
        }
        // Only where the message is surely sent: streams of the sender may wait for receives that follow here.
        if ours.is_plain() && theirs.is_plain() && n < theirs.count() {
            received.pop_front().iter().try_for_each(&mut arrive)?;
        }
    }
    received.iter().try_for_each(&mut arrive)?;
    comm.wait_all(&sent, LONG)?;
    setup.sends.synchronize(LONG)?;
    setup.waits.synchronize(LONG)?;
    assert_eq!(arrived, theirs.count());
    Ok(())
}

#[test]
fn two_ranks_mix_all_kinds() {
    let wanted = wanted(15_000);
    job("two_ranks_mix_all_kinds", 2, |comm| {
        let (peer, setup) = (1 - comm.rank(), Setup::new(comm));
        let windows = wanted.div_ceil(WINDOW);
        (0..windows).for_each(|window| play(comm, &setup, window, peer, peer).unwrap());
        let plan = |window| Plan { from: comm.rank(), to: peer, window };
        let all: usize = (0..windows).map(|window| plan(window).count()).sum();
        let (sent, received) = comm.fifo_messages(peer).unwrap();
        println!("{sent} of {all} messages were sent through the FIFO, {received} received");
        assert!(sent < all as u64, "streams sent some");
    });
}

/// Memory of this process in KiB.
fn resident() -> usize {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").parse().unwrap()
}

#[test]
fn eight_ranks_mix_all_kinds_in_constant_memory() {
    let wanted = wanted(8_000);
    job("eight_ranks_mix_all_kinds_in_constant_memory", RANKS, |comm| {
        let setup = Setup::new(comm);
        let windows = wanted.div_ceil(RANKS * WINDOW / 2);
        let mut early = 0;
        for window in 0..windows {
            // Each rank has a partner each time, and each other rank in turn.
            let peer = comm.rank() ^ (1 + window % (RANKS - 1));
            play(comm, &setup, window, peer, peer).unwrap();
            if window == windows / 4 {
                early = resident();
            }
        }
        // Nothing is kept of messages that are over.
        assert!(resident() < early + 8192, "{} KiB after {early}", resident());
    });
}

/// How long ranks are idle.
const IDLE: Duration = Duration::from_secs(2);

/// CPU time of all threads of this process.
fn cpu() -> Duration {
    clock_gettime(ClockId::ProcessCPUTime).try_into().unwrap()
}

#[test]
fn idle_ranks_use_no_cpu() {
    job("idle_ranks_use_no_cpu", RANKS, |comm| {
        let setup = Setup::new(comm);
        (0..RANKS - 1).for_each(|window| {
            let peer = comm.rank() ^ (1 + window);
            play(comm, &setup, window, peer, peer).unwrap();
        });
        comm.exchange(&[], LONG).unwrap();
        let (peer, cell) = (comm.rank() ^ 1, 0..8);
        let received = comm.irecv(&setup.inbox, cell.clone(), peer).unwrap();
        // What lingers after work ends here.
        sleep(IDLE / 10);
        let before = cpu();
        comm.wait(&received, IDLE).expect_err("nothing is sent yet");
        let used = u64::try_from((cpu() - before).as_nanos()).unwrap();
        let all = comm.exchange(&used.to_le_bytes(), LONG).unwrap();
        let all = all.iter().map(|used| u64::from_le_bytes(*used.first_chunk().unwrap())).sum();
        let used = Duration::from_nanos(all);
        comm.isend(&setup.outbox, cell, peer).unwrap().wait(LONG).unwrap();
        received.wait(LONG).unwrap();
        println!("{RANKS} idle ranks used {used:?} of CPU in {IDLE:?}");
        // Of a debug build on a busy machine; a thread that polls would use 100 %.
        assert!(used < IDLE / 10, "{used:?}");
    });
}

/// Windows between two checks whether the job is to end.
const CHECK: usize = 20;

/// How a rank exits that has seen its job through, or whose job ended with a good error.
const DONE: i32 = 45;
const ENDED: i32 = 46;

/// The file that tells the ranks to stop.
const STOP: &str = "GDSYNC_TEST_STOP";

/// Plays until rank 0 sees the file, or something fails.
fn play_until_stopped(comm: &Communicator, stop: &str) -> Result<()> {
    let (me, all, setup) = (comm.rank(), comm.size(), Setup::new(comm));
    for window in 0.. {
        if window % CHECK == 0 {
            let is_over = me == 0 && fs::exists(stop).unwrap();
            if comm.exchange(&[u8::from(is_over)], LONG)?[0] == [1] {
                break;
            }
        }
        let step = 1 + window % (all - 1).max(1);
        play(comm, &setup, window, (me + step) % all, (me + all - step % all) % all)?;
    }
    Ok(())
}

/// Threads and open files of this process. Those of CUDA's driver, which come with the first use of a GPU and stay, do not
/// count.
fn threads_and_files() -> [usize; 2] {
    let entries = |folder| fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let of_cuda =
        |thread: &Path| fs::read_to_string(thread.join("comm")).is_ok_and(|name| name.starts_with("cuda"));
    let of_driver = |file: &Path| {
        fs::read_link(file).is_ok_and(|target| target.to_string_lossy().starts_with("/dev/nvidia"))
    };
    let threads = entries("/proc/self/task").filter(|thread| !of_cuda(thread)).count();
    let files = entries("/proc/self/fd").filter(|file| !of_driver(file)).count();
    [threads, files]
}

/// Whether an error says what happened and with whom.
pub(crate) fn is_good(error: &Error) -> bool {
    let text = error.to_string();
    match error {
        Error::Message { rank, .. } => *rank < RANKS && text.contains("rank"),
        Error::Bootstrap { .. } => text.contains("rank"),
        // A stream names the queue pair; the communicator knows its rank.
        Error::Device(error) => syndrome(error).is_some() || text.contains("QP"),
        _ => false,
    }
}

fn killed_rank(ends: bool) -> ! {
    let stop = env::var(STOP).unwrap();
    let mut comm = Communicator::builder().timeout(LONG).init().unwrap();
    let [threads, _] = threads_and_files();
    println!("ready");
    // The last ranks to be killed may be missed only by finalize.
    while let Err(error) = play_until_stopped(&comm, &stop).and_then(|()| comm.clone().finalize(LONG)) {
        assert!(is_good(&error), "{error:?}");
        if ends {
            exit(ENDED);
        }
        match comm.shrink(LONG) {
            Ok(shrunk) => comm = shrunk.communicator,
            // The rank that led died in the last step.
            Err(error) => {
                let is_named = matches!(error, Error::Deadline { .. }) && error.to_string().contains("rank");
                assert!(is_named, "{error}");
                exit(ENDED);
            }
        }
        // The former communicator is dropped: the files are those of the new one.
        until("threads and files are left", || {
            sleep(Duration::from_millis(1));
            let [now, files] = threads_and_files();
            // With the pipes and sockets of CUDA's driver.
            now <= threads && files <= 35 + 5 * RANKS
        });
    }
    exit(DONE);
}

/// A rank of a job; dropping it kills the process.
struct Rank {
    child: Child,
    output: BufReader<ChildStdout>,
    was_killed: bool,
}

impl Drop for Rank {
    fn drop(&mut self) {
        // It has ended, or the test has failed.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Rank {
    /// Waits until it has joined.
    fn join(&mut self) {
        let mut line = String::new();
        // The name of the test may be before it.
        while !line.ends_with("ready\n") {
            line.clear();
            assert_ne!(self.output.read_line(&mut line).unwrap(), 0, "a rank has ended before it began");
        }
    }

    /// Its exit code: `None` if it was killed.
    fn end(&mut self) -> Option<i32> {
        let start = Instant::now();
        let status = loop {
            match self.child.try_wait().unwrap() {
                Some(status) => break status,
                // Longer than the longest wait of the ranks, which say what they wait for.
                None => assert!(start.elapsed() < 3 * LONG, "a rank hangs"),
            }
            sleep(Duration::from_millis(2));
        };
        if self.was_killed && status.signal() == Some(libc::SIGKILL) {
            return None;
        }
        let mut text = String::new();
        self.child.stderr.take().unwrap().read_to_string(&mut text).unwrap();
        assert!(matches!(status.code(), Some(DONE | ENDED)), "{status}: {text}");
        status.code()
    }
}

/// Runs job number `n`, in which random ranks are killed at random moments.
fn killing_job(name: &str, n: usize, ends: bool) {
    let stop = env::temp_dir().join(format!("gdsync-kills-{}-{name}-{n}", std::process::id()));
    let port = free_port().to_string();
    let start = |rank: usize| {
        let mut command = rank_command(name, rank, RANKS, &port);
        let mut child =
            command.env(STOP, &stop).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        Rank { child, output, was_killed: false }
    };
    let mut ranks: Vec<Rank> = (0..RANKS).map(start).collect();
    ranks.iter_mut().for_each(Rank::join);
    let seed = n * 1000 + usize::try_from(std::process::id()).unwrap() % 1000;
    for kill in 0..1 + chance(9, seed, 0, 3) {
        sleep(Duration::from_millis(chance(10, seed, kill, 150) as u64));
        let rank = &mut ranks[chance(11, seed, kill, RANKS)];
        rank.was_killed = true;
        rank.child.kill().unwrap();
    }
    let killed = ranks.iter().filter(|rank| rank.was_killed).count();
    fs::write(&stop, "").unwrap();
    let left: Vec<i32> = ranks.iter_mut().filter_map(Rank::end).collect();
    fs::remove_file(&stop).unwrap();
    println!("{name} {n}: seed {seed}, {killed} killed, the others exited with {left:?}");
    // One may have ended before it was killed.
    assert!(left.len() >= RANKS - killed);
    let (expected, what) =
        if ends { (ENDED, "nobody has noticed the dead rank") } else { (DONE, "nobody has gone on") };
    assert!(left.contains(&expected), "{what}");
}

fn killing_jobs(name: &str, ends: bool) {
    if is_part_of(name) {
        killed_rank(ends);
    }
    let wanted: usize = env::var("GDSYNC_TEST_KILLS").map_or(2, |n| n.parse().expect("a number"));
    (0..wanted).for_each(|n| killing_job(name, n, ends));
}

#[test]
fn survivors_of_kills_shrink_and_go_on() {
    killing_jobs("survivors_of_kills_shrink_and_go_on", false);
}

#[test]
fn survivors_of_kills_end_with_a_reason() {
    killing_jobs("survivors_of_kills_end_with_a_reason", true);
}
