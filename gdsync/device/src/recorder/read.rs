//! Reading a recording, also that of another process, also while it is written.

use std::fs::{File, Metadata};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use super::clock::{Clock, Moment, Scale};
use super::event::{Awaited, By, Event, Queue, Stage, WORDS};
use super::file::{self, Liveness};
use super::layout::{self, LANE_BYTES, LANES, QUEUE_PAIRS, ROW_WORDS, WAIT_WORDS, header};
use super::rows::Peer;
use crate::error::{Error, Result, printable};
use gdsync_shm::seqlock;

/// What a process has recorded, copied at one time.
#[derive(Clone, Debug)]
pub struct Recording {
    /// The file.
    pub path: PathBuf,
    /// The process.
    pub pid: u32,
    /// The name of its program, at most 15 bytes.
    pub command: String,
    /// Its rank, where it has one.
    pub rank: Option<u32>,
    /// Whether it still runs.
    pub liveness: Liveness,
    /// The clock of its stamps.
    pub clock: Clock,
    /// When the recording was begun, in nanoseconds of the system's monotonic clock. All times below are of this clock, which
    /// is the same for all processes of a machine.
    pub begun: u64,
    /// The same moment, in nanoseconds since 1970.
    pub time_of_day: u64,
    /// When it was read, or, of a machine that is not this one, the last event.
    pub now: u64,
    /// Its queue pairs, destroyed ones too as long as there is room.
    pub peers: Vec<Peer>,
    /// Waits that go on, and the last one of each thread that is in none.
    pub waits: Vec<Wait>,
    /// What the rings still hold, in the order of time.
    pub records: Vec<Record>,
    /// The threads that recorded.
    pub threads: Vec<Thread>,
    /// Records that each thread's ring has.
    pub capacity: u64,
    /// Records that were being written.
    pub torn: u64,
    /// Events that were not recorded, of threads beyond the 256th.
    pub lost: u64,
}

/// An event with its time and thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Record {
    /// Nanoseconds of the monotonic clock.
    pub at: u64,
    /// Index in [`Recording::threads`].
    pub thread: usize,
    /// What happened.
    pub event: Event,
}

/// A wait of a thread, or of the stream that the thread runs or watches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wait {
    /// What it waits for, and how far its queue was when it began.
    pub awaited: Awaited,
    /// Who waits.
    pub by: By,
    /// [`Stage::WaitBegun`] while it lasts.
    pub stage: Stage,
    /// When it began, in nanoseconds of the monotonic clock.
    pub since: u64,
    /// When it came to `stage`.
    pub changed: u64,
    /// Index in [`Recording::threads`].
    pub thread: usize,
}

/// A thread that recorded. Where one has ended and another one has its place, only the newer one is known.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Thread {
    /// As the kernel counts them.
    pub tid: u64,
    /// Its name, at most 15 bytes.
    pub name: String,
}

/// Most requests that are read out of records that stand for several.
const MOST_IN_RUNS: u32 = 1 << 20;

/// A part of the file that was copied out twice.
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

    /// All records of `N` words: `None` for those that are not whole or not there, and whether one was being written.
    fn records<const N: usize>(&self) -> impl Iterator<Item = (Option<[u64; N]>, bool)> {
        let words = |bytes: &[u8]| -> [u64; N] {
            std::array::from_fn(|i| u64::from_ne_bytes(*bytes[i * 8..].first_chunk().expect("N words")))
        };
        self.first.chunks_exact(N * 8).zip(self.second.chunks_exact(N * 8)).map(move |(first, second)| {
            let (first, second) = (words(first), words(second));
            let whole = seqlock::settled(first, second);
            (whole, whole.is_none() && second != [0; N])
        })
    }
}

impl Recording {
    /// Reads a file, whoever it belongs to. Symbolic links are not followed.
    ///
    /// # Errors
    /// [`Error::Sys`] where it cannot be read, [`Error::InvalidArgument`] where it is not a recording of this release.
    pub fn read(path: &Path) -> Result<Self> {
        Self::read_if(path, |_| true)
    }

    /// Reads a file that a process of this number may have made, by its owner and its header.
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
        let head = file::header_of(&file).ok_or_else(|| not_one("(no header)"))?;
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

        let threads = read(layout::LANE_TABLE, LANES * LANE_BYTES)?;
        let threads: Vec<_> = threads.second.chunks_exact(LANE_BYTES).map(thread).collect();
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
            waits: Vec::new(),
            records: Vec::new(),
            threads,
            capacity: records,
            torn: 0,
            lost: head[header::LOST],
        };
        for (row, _) in read(layout::ROWS, QUEUE_PAIRS * ROW_WORDS * 8)?.records::<ROW_WORDS>() {
            let peer = row.and_then(|row| Peer::unpack(*row.first_chunk().expect("a row has 8 words")));
            this.peers.extend(peer);
        }
        let waits = read(layout::WAITS, LANES * WAIT_WORDS * 8)?;
        for (thread, (row, _)) in waits.records::<WAIT_WORDS>().enumerate() {
            this.waits.extend(row.and_then(|row| wait(row, thread, &scale)));
        }
        // A damaged file may claim any number of requests in each record.
        let mut room = MOST_IN_RUNS;
        for thread_slot in (0..LANES).filter(|&thread_slot| this.threads[thread_slot].tid != 0) {
            let ring = read(layout::ring(thread_slot, capacity), capacity * layout::RECORD_BYTES)?;
            for (slot, (record, torn)) in ring.records::<WORDS>().enumerate() {
                this.torn += u64::from(torn);
                let record = record.and_then(|record| whole(record, (thread_slot, slot), records, &scale));
                this.records.extend(record.into_iter().flat_map(|record| told(record, &mut room)));
            }
        }
        this.records.sort_by_key(|record| record.at);
        this.now = if is_here { super::clock::monotonic() } else { this.last() };
        Ok(this)
    }

    /// Reads the recordings of a process, the newest first; there is more than one where it has several copies of the library.
    /// Files of other users and files that cannot be read are left out: `left_out` is told of each.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] where it has none that can be read, [`Error::Sys`] where no descriptor is left to look.
    pub fn of_process(pid: u32, mut left_out: impl FnMut(&Path, Error)) -> Result<Vec<Self>> {
        let all =
            file::list(usize::MAX).map_err(|error| Error::os("listing recordings", error, file::RAISE))?;
        let files = all.into_iter().filter(|path| file::pid_of(path) == Some(pid));
        let read = |path: PathBuf| Self::read_of(&path, pid).map_err(|error| left_out(&path, error)).ok();
        let mut all: Vec<_> = files.filter_map(read).collect();
        if all.is_empty() {
            let expected = "a process with a recording: `gdasync trace --list` lists them; it has none if it has ended in \
                            order, or runs with GDSYNC_RECORDER=off";
            return Err(Error::invalid("process", pid, expected));
        }
        all.sort_by_key(|recording| std::cmp::Reverse(recording.begun));
        Ok(all)
    }

    /// Reads the recordings of all processes here, in the order of their files. Files of other users (root is shown them) and files
    /// that cannot be read are left out: `left_out` is told of each.
    pub fn all(mut left_out: impl FnMut(&Path, Error)) -> Vec<Self> {
        let read = |path: PathBuf| {
            let pid = file::pid_of(&path)?;
            Self::read_of(&path, pid).map_err(|error| left_out(&path, error)).ok()
        };
        Self::list().into_iter().filter_map(read).collect()
    }

    /// The files that are called as recordings are, in the folders where they are made. None, and a warning in the log, where no file
    /// descriptor is left to look.
    pub fn list() -> Vec<PathBuf> {
        file::list(usize::MAX).unwrap_or_else(|error| {
            tracing::warn!(%error, fix = file::RAISE, "recordings cannot be listed");
            Vec::new()
        })
    }

    /// Removes the recordings of this user's processes that are dead. Returns the files.
    pub fn clean() -> Vec<PathBuf> {
        file::clean(0, usize::MAX)
    }

    /// When the last event was.
    pub fn last(&self) -> u64 {
        let waits = self.waits.iter().map(|wait| wait.changed);
        self.records.last().map(|record| record.at).into_iter().chain(waits).max().unwrap_or(self.begun)
    }

    /// The queue pair of this number on this device, the living one where there were several.
    pub fn peer(&self, device: u8, qpn: u32) -> Option<&Peer> {
        let all = || self.peers.iter().filter(|peer| (peer.device, peer.qpn) == (device, qpn));
        all().find(|peer| !peer.is_gone).or_else(|| all().next_back())
    }

    /// The waits that go on.
    pub fn open_waits(&self) -> impl Iterator<Item = &Wait> {
        self.waits.iter().filter(|wait| wait.stage == Stage::WaitBegun)
    }

    /// What is known of the last event of a queue, and of the last one of a certain stage.
    pub fn last_of(&self, peer: &Peer, queue: Queue, stage: Option<Stage>) -> Option<&Record> {
        self.records.iter().rev().find(|record| {
            let event = &record.event;
            let is_its = (event.device, event.qpn, event.queue) == (peer.device, peer.qpn, queue);
            is_its && stage.is_none_or(|stage| stage == event.stage)
        })
    }
}

/// How stamps become times: by what this machine says now, or, elsewhere, by what the process has noted last.
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

/// The bytes before the first zero, safe to print: a process chooses its names.
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

/// What a record tells: it may stand for a send that was written and handed to a stream at once, or for requests in a row that
/// were handed to one.
fn told(record: Record, room: &mut u32) -> impl Iterator<Item = Record> + use<> {
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

/// A record that is in its place.
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
