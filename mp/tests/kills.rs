//! Ranks are killed at random moments of random traffic; the others shrink and go on, or end with an error that names one.
//! `GDSYNC_TEST_KILLS=N`: how many jobs.

mod common;

use std::env;
use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, ChildStdout, Stdio, exit};
use std::thread::sleep;
use std::time::{Duration, Instant};

use common::{LONG, buffer, bytes, free_port, is_part_of, message, myself, stream, until};
use gdsync::stream::Batch;
use mp::{Communicator, Error, Request};

const RANKS: usize = 8;
/// Messages in a row from one rank to another.
const WINDOW: usize = 8;
/// Bytes of the largest.
const LARGEST: usize = 10_000;
/// Windows between two looks whether the job is to end.
const LOOK: usize = 20;

/// How a rank leaves that has seen its job through, or whose job ended with a good reason.
const DONE: i32 = 45;
const ENDED: i32 = 46;

/// The file that tells the ranks to stop.
const STOP: &str = "GDSYNC_TEST_STOP";

/// A number below `of`, the same for whoever asks with the same arguments.
fn chance(seed: usize, n: usize, of: usize) -> usize {
    let bytes = message(seed, seed >> 8, n, 8);
    usize::from_le_bytes(*bytes.first_chunk().expect("8 bytes")) % of
}

/// One window of messages to one rank and from another, in the mode that chance wants.
fn play(comm: &Communicator, window: usize) -> mp::Result<()> {
    let (me, all) = (comm.rank(), comm.size());
    let step = 1 + window % (all - 1).max(1);
    let (to, from) = ((me + step) % all, (me + all - step % all) % all);
    let len = |from: usize, to: usize, n: usize| chance(from * all + to, window * WINDOW + n, LARGEST + 1);
    let (outbox, inbox, s) =
        (buffer(comm, WINDOW * LARGEST), buffer(comm, WINDOW * LARGEST), stream("kills"));
    let slot = |n: usize| n * LARGEST..(n + 1) * LARGEST;
    let received = (0..WINDOW).map(|n| comm.irecv(&inbox, slot(n), from)).collect::<mp::Result<Vec<_>>>()?;
    let messages = (0..WINDOW).map(|n| {
        let bytes = message(me, to, window * WINDOW + n, len(me, to, n));
        outbox.memory().write(n * LARGEST, &bytes).unwrap();
        n * LARGEST..n * LARGEST + bytes.len()
    });
    let sent: Vec<Request> = match chance(me, window, 4) {
        0 => messages.map(|range| comm.isend(&outbox, range, to)).collect::<mp::Result<_>>()?,
        1 => messages.map(|range| comm.isend_on_stream(&s, &outbox, range, to)).collect::<mp::Result<_>>()?,
        2 => {
            let mut batch = Batch::new();
            let sent = messages.map(|range| comm.isend_in_batch(&mut batch, &outbox, range, to));
            let sent = sent.collect::<mp::Result<_>>()?;
            s.submit(&mut batch)?;
            sent
        }
        _ => {
            comm.wait_all_on_stream(&s, &received)?;
            messages.map(|range| comm.isend(&outbox, range, to)).collect::<mp::Result<_>>()?
        }
    };
    comm.wait_all(received.iter().chain(&sent), LONG)?;
    s.synchronize(LONG)?;
    for n in 0..WINDOW {
        let expected = message(from, me, window * WINDOW + n, len(from, me, n));
        assert!(bytes(&inbox, n * LARGEST..n * LARGEST + expected.len()) == expected, "{n} of rank {from}");
    }
    Ok(())
}

/// Plays until rank 0 sees that it is enough, or something fails.
fn game(comm: &Communicator, stop: &str) -> mp::Result<()> {
    for window in 0.. {
        if window % LOOK == 0 {
            let is_over = comm.rank() == 0 && fs::exists(stop).unwrap();
            if comm.exchange(&[u8::from(is_over)], LONG)?[0] == [1] {
                break;
            }
        }
        play(comm, window)?;
    }
    Ok(())
}

/// Threads of this process, and its files, which are for the memory that it shares with others, and sockets.
fn own() -> [usize; 2] {
    ["/proc/self/task", "/proc/self/fd"].map(|folder| fs::read_dir(folder).unwrap().count())
}

/// That an error says what happened and with whom.
fn is_good(error: &Error) -> bool {
    let text = error.to_string();
    match error {
        Error::Message { rank, .. } => *rank < RANKS && text.contains("rank"),
        Error::Bootstrap { .. } => text.contains("rank"),
        // A stream says it, of a queue pair; the communicator knows whose.
        Error::Device(error) => common::syndrome(error).is_some() || text.contains("QP"),
        _ => false,
    }
}

fn rank(ends: bool) -> ! {
    let stop = env::var(STOP).unwrap();
    let mut comm = Communicator::builder().timeout(LONG).init().unwrap();
    let [threads, _] = own();
    println!("ready");
    // Who was killed at last may be missed only then.
    while let Err(error) = game(&comm, &stop).and_then(|()| comm.clone().finalize(LONG)) {
        assert!(is_good(&error), "{error:?}");
        if ends {
            exit(ENDED);
        }
        match comm.shrink(LONG) {
            Ok(shrunk) => comm = shrunk.communicator,
            // The rank that led died in the last step.
            Err(error) => {
                assert!(
                    matches!(error, Error::Deadline { .. }) && error.to_string().contains("rank"),
                    "{error}"
                );
                exit(ENDED);
            }
        }
        // The former communicator is gone, with all that it had: a few files for each rank are those of the new one.
        until("threads and files are left", || {
            sleep(Duration::from_millis(1));
            let [now, files] = own();
            now <= threads && files <= 20 + 5 * RANKS
        });
    }
    exit(DONE);
}

/// A rank of a job, ended with this process's interest in it.
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
        // The test's name is before it.
        while !line.ends_with("ready\n") {
            line.clear();
            assert_ne!(self.output.read_line(&mut line).unwrap(), 0, "a rank has ended before it began");
        }
    }

    /// How it has left: `None` if it was killed.
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

/// Runs a job in which ranks are killed, `n` for chance.
fn job(name: &str, n: usize, ends: bool) {
    let stop = env::temp_dir().join(format!("gdsync-kills-{}-{name}-{n}", std::process::id()));
    let port = free_port();
    let start = |rank: usize| {
        let mut command = myself(name);
        command.env("RANK", rank.to_string()).env("WORLD_SIZE", RANKS.to_string()).env(STOP, &stop);
        command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", port.to_string());
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        Rank { child, output, was_killed: false }
    };
    let mut ranks: Vec<Rank> = (0..RANKS).map(start).collect();
    ranks.iter_mut().for_each(Rank::join);
    let seed = n * 1000 + usize::try_from(std::process::id()).unwrap() % 1000;
    let kills = 1 + chance(seed, 0, 3);
    for kill in 1..=kills {
        sleep(Duration::from_millis(chance(seed, kill, 150) as u64));
        let rank = &mut ranks[chance(seed, kill + 10, RANKS)];
        rank.was_killed = true;
        rank.child.kill().unwrap();
    }
    let killed = ranks.iter().filter(|rank| rank.was_killed).count();
    fs::write(&stop, "").unwrap();
    let left: Vec<i32> = ranks.iter_mut().filter_map(Rank::end).collect();
    fs::remove_file(&stop).unwrap();
    println!("{name} {n}: seed {seed}, {killed} killed, the others left with {left:?}");
    // One may have ended before it was killed.
    assert!(left.len() >= RANKS - killed);
    if ends {
        assert!(left.contains(&ENDED), "somebody was killed, and nobody has noticed");
    } else {
        assert!(left.contains(&DONE), "nobody has gone on");
    }
}

fn jobs(name: &str, ends: bool) {
    if is_part_of(name) {
        rank(ends);
    }
    let wanted: usize = env::var("GDSYNC_TEST_KILLS").map_or(2, |n| n.parse().expect("a number"));
    (0..wanted).for_each(|n| job(name, n, ends));
}

#[test]
fn the_others_go_on() {
    jobs("the_others_go_on", false);
}

#[test]
fn the_others_end_with_a_reason() {
    jobs("the_others_end_with_a_reason", true);
}
