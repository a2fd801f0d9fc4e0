//! Reads a recording of any process, also while it is written.

use std::fs::{File, Metadata};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use super::clock::{Clock, Moment, Scale};
use super::event::{Awaited, By, Event, Queue, Stage, WORDS};
use super::file::{self, Liveness};
use super::layout::{self, ROW_WORDS, TABLE_ROWS, THREAD_BYTES, THREAD_SLOTS, WAIT_WORDS, header};
use super::rows::Peer;
use super::words::Words;
use crate::error::{Error, Result, printable};
use gdsync_shm::seqlock;

/// A copy of a recording.
#[derive(Clone, Debug)]
pub struct Recording {
    /// The file.
    pub path: PathBuf,
    /// The PID.
    pub pid: u32,
    /// Name of the program, at most 15 bytes.
    pub command: String,
    /// Rank, if it has one.
    pub rank: Option<u32>,
    /// Whether the process runs.
    pub liveness: Liveness,
    /// The clock of its stamps.
    pub clock: Clock,
    /// Start of the recording, in nanoseconds of the system's monotonic clock, as all times below.
    pub begun: u64,
    /// Start of the recording, in nanoseconds since 1970.
    pub time_of_day: u64,
    /// When it was read; for a recording of another machine, the time of the last event.
    pub now: u64,
    /// Queue pairs, including destroyed ones that were not replaced.
    pub peers: Vec<Peer>,
    /// Words that have a purpose, including those that are gone.
    pub words: Vec<Words>,
    /// The current or last wait of each thread.
    pub waits: Vec<Wait>,
    /// All records in the rings, in order of time.
    pub records: Vec<Record>,
    /// The threads that recorded.
    pub threads: Vec<Thread>,
    /// Records per thread.
    pub capacity: u64,
    /// Number of records that were being written.
    pub torn: u64,
    /// Number of events not recorded, of threads without a slot.
    pub lost: u64,
}

/// A recorded event with its time and thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Record {
    /// Nanoseconds of the monotonic clock.
    pub at: u64,
    /// Index in [`Recording::threads`].
    pub thread: usize,
    /// The event.
    pub event: Event,
}

/// A wait of a thread, or of a stream that the thread runs or watches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wait {
    /// What it waits for, and the state of its queue at the start.
    pub awaited: Awaited,
    /// Originator.
    pub by: By,
    /// Stage; [`Stage::WaitBegun`] while it lasts.
    pub stage: Stage,
    /// Start, in nanoseconds of the monotonic clock.
    pub since: u64,
    /// Time of `stage`.
    pub changed: u64,
    /// Index in [`Recording::threads`].
    pub thread: usize,
}

/// A thread that recorded; the last one if several used its slot in turn.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Thread {
    /// Thread ID.
    pub tid: u64,
    /// Name, at most 15 bytes.
    pub name: String,
}

/// Most requests that are read out of records that stand for several.
const MAX_EXPANDED: u32 = 1 << 20;

/// Two copies of a part of the file.
struct Twice {
    first: Vec<u8>,
    second: Vec<u8>,
}

impl Twice {
    fn read(file: &File, offset: usize, bytes: usize) -> std::io::Result<Self> {
        let copy = || {
            let mut bytes = vec![0; bytes];
            file.read_exact_at(&mut bytes, offset as u64).map(|()| bytes)
        };
        Ok(Self { first: copy()?, second: copy()? })
    }

    /// The records of `N` words: each one if it is complete, and whether it was being written.
    fn records<const N: usize>(&self) -> impl Iterator<Item = (Option<[u64; N]>, bool)> {
        let words = |bytes: &[u8]| -> [u64; N] {
            std::array::from_fn(|i| u64::from_ne_bytes(*bytes[i * 8..].first_chunk().expect("N words")))
        };
        self.first.chunks_exact(N * 8).zip(self.second.chunks_exact(N * 8)).map(move |(first, second)| {
            let (first, second) = (words(first), words(second));
            let whole = seqlock::accept(first, second);
            (whole, whole.is_none() && second != [0; N])
        })
    }
}

impl Recording {
    /// Reads a file of any user. Does not follow symbolic links.
    ///
    /// # Errors
    /// [`Error::Sys`] if it cannot be read, [`Error::InvalidArgument`] if it is not a recording of this release.
    pub fn read(path: &Path) -> Result<Self> {
        Self::read_if(path, |_| true)
    }

    /// Reads a file if its owner and header match process `pid`.
    fn read_of(path: &Path, pid: u32) -> Result<Self> {
        let recording = Self::read_if(path, |about| file::may_be_of(about.uid(), pid))?;
        if recording.pid == pid {
            return Ok(recording);
        }
        let value = format!("{} (of process {})", path.display(), recording.pid);
        Err(Error::invalid("recording", value, "the number of its process in its name"))
    }

    fn read_if(path: &Path, is_wanted: impl Fn(&Metadata) -> bool) -> Result<Self> {
        const FIX: &str = "name the file of a recording: `gdasync trace --list` lists them";
        let failed = |error| Error::os("reading a recording", error, FIX);
        let (file, about) = file::open(path, is_wanted).map_err(failed)?;
        let not_one = |what: &str| {
            let value = format!("{} {what}", path.display());
            Error::invalid("recording", value, "a file of this release of the library, whole")
        };
        let head = file::first_words(&file).ok_or_else(|| not_one("(no header)"))?;
        match head[header::MAGIC] {
            layout::MAGIC => {}
            magic if layout::is_of_another_release(magic) => {
                let value = format!("{} (written by another version)", path.display());
                return Err(Error::invalid(
                    "recording",
                    value,
                    "one of this version; the gdasync of the other one reads it",
                ));
            }
            _ => return Err(not_one("(no header)")),
        }
        let records = head[header::RECORDS];
        let is_fine = records.is_power_of_two() && records <= layout::MOST_RECORDS;
        let capacity =
            usize::try_from(records).ok().filter(|_| is_fine).ok_or_else(|| not_one("(odd size)"))?;
        let clock = Clock::from_code(head[header::CLOCK]).ok_or_else(|| not_one("(unknown clock)"))?;
        if about.len() < layout::file_bytes(capacity) as u64 {
            return Err(not_one("(cut short)"));
        }
        let is_here = file::is_of_this_boot(&head).unwrap_or(false);
        let read = |offset, bytes| Twice::read(&file, offset, bytes).map_err(failed);
        let scale = scale(clock, &head, is_here);
        let [zero, monotonic] = [head[header::ZERO], head[header::ZERO + 1]];

        let threads = read(layout::THREADS, THREAD_SLOTS * THREAD_BYTES)?;
        let threads: Vec<_> = threads.second.chunks_exact(THREAD_BYTES).map(thread).collect();
        let mut this = Self {
            path: path.to_owned(),
            pid: u32::try_from(head[header::PID]).map_err(|_| not_one("(odd process)"))?,
            command: command(&head),
            rank: head[header::RANK].checked_sub(1).and_then(|rank| u32::try_from(rank).ok()),
            liveness: file::liveness(&head).unwrap_or(Liveness::Unknown),
            clock,
            begun: scale.at(zero).max(monotonic),
            time_of_day: head[header::TIME_OF_DAY],
            now: monotonic,
            peers: Vec::new(),
            words: Vec::new(),
            waits: Vec::new(),
            records: Vec::new(),
            threads,
            capacity: records,
            torn: 0,
            lost: head[header::LOST],
        };
        for (row, _) in read(layout::ROWS, TABLE_ROWS * ROW_WORDS * 8)?.records::<ROW_WORDS>() {
            let Some(row) = row.as_ref().and_then(|row| row.first_chunk()) else { continue };
            this.peers.extend(Peer::unpack(*row));
            this.words.extend(Words::unpack(*row));
        }
        let waits = read(layout::WAITS, THREAD_SLOTS * WAIT_WORDS * 8)?;
        for (thread, (row, _)) in waits.records::<WAIT_WORDS>().enumerate() {
            this.waits.extend(row.and_then(|row| wait(row, thread, &scale)));
        }
        // A damaged file may claim any number of requests in each record.
        let mut room = MAX_EXPANDED;
        for thread_slot in (0..THREAD_SLOTS).filter(|&thread_slot| this.threads[thread_slot].tid != 0) {
            let ring = read(layout::ring(thread_slot, capacity), capacity * layout::RECORD_BYTES)?;
            for (slot, (record, torn)) in ring.records::<WORDS>().enumerate() {
                this.torn += u64::from(torn);
                let record = record.and_then(|record| whole(record, (thread_slot, slot), records, &scale));
                this.records.extend(record.into_iter().flat_map(|record| expand(record, &mut room)));
            }
        }
        this.records.sort_by_key(|record| record.at);
        this.now = if is_here { super::clock::monotonic() } else { this.last() };
        Ok(this)
    }

    /// Reads the recordings of a process, the newest first; each copy of the library in it has one. Calls `left_out` for files of other
    /// users and files that cannot be read.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if none can be read, [`Error::Sys`] for lack of file descriptors.
    pub fn of_process(pid: u32, mut left_out: impl FnMut(&Path, Error)) -> Result<Vec<Self>> {
        let all =
            file::list(usize::MAX).map_err(|error| Error::os("listing recordings", error, file::RAISE))?;
        let files = all.into_iter().filter(|path| file::pid_of(path) == Some(pid));
        let read = |path: PathBuf| Self::read_of(&path, pid).map_err(|error| left_out(&path, error)).ok();
        let mut all: Vec<_> = files.filter_map(read).collect();
        if all.is_empty() {
            let expected = "one that has a recording: `gdasync trace --list` lists them; a process has none if it has ended in \
                            order, or runs with GDSYNC_RECORDER=off";
            return Err(Error::invalid("the process to trace", pid, expected));
        }
        all.sort_by_key(|recording| std::cmp::Reverse(recording.begun));
        Ok(all)
    }

    /// Reads all recordings, in order of their file names. Calls `left_out` for files of other users and files that cannot be read.
    pub fn all(mut left_out: impl FnMut(&Path, Error)) -> Vec<Self> {
        let read = |path: PathBuf| {
            let pid = file::pid_of(&path)?;
            Self::read_of(&path, pid).map_err(|error| left_out(&path, error)).ok()
        };
        Self::list().into_iter().filter_map(read).collect()
    }

    /// Files named as recordings, in all folders. Empty, with a warning in the log, for lack of file descriptors.
    pub fn list() -> Vec<PathBuf> {
        file::list(usize::MAX).unwrap_or_else(|error| {
            tracing::warn!(%error, fix = file::RAISE, "recordings cannot be listed");
            Vec::new()
        })
    }

    /// Removes all recordings of this user's dead processes. Returns the files removed.
    pub fn clean() -> Vec<PathBuf> {
        file::clean(0, usize::MAX)
    }

    /// Time of the last event.
    pub fn last(&self) -> u64 {
        let waits = self.waits.iter().map(|wait| wait.changed);
        self.records.last().map(|record| record.at).into_iter().chain(waits).max().unwrap_or(self.begun)
    }

    /// The queue pair with this number on this device; if there were several, the one that exists.
    pub fn peer(&self, device: u8, qpn: u32) -> Option<&Peer> {
        let all = || self.peers.iter().filter(|peer| (peer.device, peer.qpn) == (device, qpn));
        all().find(|peer| !peer.is_gone).or_else(|| all().next_back())
    }

    /// The words at an address; if there were several, those that exist.
    pub fn words_at(&self, addr: u64) -> Option<&Words> {
        let all = || self.words.iter().filter(|words| words.range().contains(&addr));
        all().find(|words| !words.is_gone).or_else(|| all().next_back())
    }

    /// Waits that last.
    pub fn open_waits(&self) -> impl Iterator<Item = &Wait> {
        self.waits.iter().filter(|wait| wait.stage == Stage::WaitBegun)
    }

    /// The last record of a queue, or the last one with a given stage.
    pub fn last_of(&self, peer: &Peer, queue: Queue, stage: Option<Stage>) -> Option<&Record> {
        self.records.iter().rev().find(|record| {
            let event = &record.event;
            let is_its = (event.device, event.qpn, event.queue) == (peer.device, peer.qpn, queue);
            is_its && stage.is_none_or(|stage| stage == event.stage)
        })
    }
}

/// The scale of a recording: up to now, or on another machine up to the last moment that the process recorded.
fn scale(clock: Clock, head: &[u64; header::WORDS], is_here: bool) -> Scale {
    let zero = Moment { stamp: head[header::ZERO], monotonic: head[header::ZERO + 1] };
    let [stamp, monotonic, check] = [0, 1, 2].map(|word| head[header::LATER + word]);
    let noted = Some(Moment { stamp, monotonic }).filter(|_| check == stamp ^ monotonic | 1);
    let later = if is_here { Moment::now(clock) } else { noted.unwrap_or(zero) };
    Scale::between(clock, zero, later)
}

fn command(head: &[u64; header::WORDS]) -> String {
    let words = &head[header::COMMAND..header::COMMAND + header::COMMAND_BYTES / 8];
    text(&words.iter().flat_map(|word| word.to_ne_bytes()).collect::<Vec<_>>())
}

/// The bytes before the first zero, escaped, because processes choose their names.
fn text(bytes: &[u8]) -> String {
    let bytes = bytes.split(|&byte| byte == 0).next().unwrap_or_default();
    printable(&String::from_utf8_lossy(bytes))
}

fn thread(row: &[u8]) -> Thread {
    let (tid, name) = row.split_first_chunk().expect("rows have 32 bytes");
    Thread { tid: u64::from_ne_bytes(*tid), name: text(name) }
}

fn wait(row: [u64; WAIT_WORDS], thread: usize, scale: &Scale) -> Option<Wait> {
    let [since, number, middle, rest, posted, completed, changed, _] = row;
    let Event { stage, queue, by, device, qpn, number, len, .. } = Event::unpack([number, middle, rest])?;
    let awaited = Awaited { queue, device, qpn, number, value: len, posted, completed };
    Some(Wait { awaited, by, stage, since: scale.at(since), changed: scale.at(changed), thread })
}

/// Expands a record that stands for a send prepared and submitted at once, or for several consecutive submissions.
fn expand(record: Record, room: &mut u32) -> impl Iterator<Item = Record> + use<> {
    let event = record.event;
    let is_handed = matches!(event.stage, Stage::Submitted | Stage::WaitSubmitted | Stage::Refused);
    let is_both = event.stage == Stage::Prepared && event.stream != 0;
    let more = if is_handed { event.len.min(*room) } else { 0 };
    *room -= more;
    let more = u64::from(more);
    let prepared = is_both.then_some(Event { stream: 0, ..event });
    let each =
        (event.number.saturating_sub(more)..=event.number).map(move |number| match (is_both, is_handed) {
            (true, _) => Event { stage: Stage::Submitted, len: 0, ..event },
            (_, true) => Event { number, len: 0, ..event },
            _ => event,
        });
    prepared.into_iter().chain(each).map(move |event| Record { event, ..record })
}

/// Decodes a record if its check matches its slot.
fn whole(
    record: [u64; WORDS],
    (thread_slot, slot): (usize, usize),
    capacity: u64,
    scale: &Scale,
) -> Option<Record> {
    let [at, number, middle, rest] = record;
    let n = (rest & layout::CHECK).checked_sub(1)?;
    let in_place = n & (capacity - 1) == slot as u64;
    let event = Event::unpack([number, middle, rest]).filter(|_| in_place)?;
    Some(Record { at: scale.at(at), thread: thread_slot, event })
}
