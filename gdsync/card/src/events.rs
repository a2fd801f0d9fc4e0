//! Event descriptors: pipes from which programs read records of completion and asynchronous events.

use std::collections::VecDeque;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::sync::{Arc, Weak};

use gdsync_soft::BlockedSignals;
use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::OFlags;
use rustix::io::Errno;
use rustix::pipe::{PipeFlags, SpliceFlags};

use crate::log::log;

/// A pipe; each read takes one record, as from a kernel. The program owns one more descriptor of its reading end; these two
/// keep a write from failing after the program closed that one.
#[derive(Debug)]
pub(crate) struct EventPipe {
    read: OwnedFd,
    write: OwnedFd,
    /// Takes records back: a read of the shared pipe may block, as another thread may have taken the record.
    own: (OwnedFd, OwnedFd),
    /// Bytes of a record.
    record: usize,
    /// Records are written, and taken back, only under this lock.
    waiting: Mutex<Waiting>,
}

/// Records for which the pipe had no room, and the sources of all that the program has not read.
#[derive(Debug, Default)]
struct Waiting {
    bytes: VecDeque<u8>,
    /// Oldest first, possibly some that were read before these.
    sources: VecDeque<usize>,
    /// Whether a thread writes them when there is room.
    has_thread: bool,
}

/// How long the thread that waits for room keeps a pipe that nobody else has.
const LINGER: Timespec = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };

impl EventPipe {
    /// A pipe of records of this size, and the descriptor for the program.
    ///
    /// # Errors
    /// `EMFILE` or `ENFILE`.
    pub(crate) fn new(record: usize) -> Result<(Self, OwnedFd), Errno> {
        let (program, write) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC)?;
        // Only of this end: the program chooses whether its reads block. `O_DIRECT` makes each write a packet.
        rustix::fs::fcntl_setfl(&write, OFlags::NONBLOCK | OFlags::DIRECT)?;
        let read = rustix::io::fcntl_dupfd_cloexec(&program, 0)?;
        let own = rustix::pipe::pipe_with(PipeFlags::CLOEXEC)?;
        Ok((Self { read, write, own, record, waiting: Mutex::default() }, program))
    }

    /// Bytes of a record.
    pub(crate) fn record(&self) -> usize {
        self.record
    }

    /// Sends a record of `source`, at once or when the program has read others.
    pub(crate) fn send(self: &Arc<Self>, source: usize, record: &[u8]) {
        debug_assert_eq!(record.len(), self.record);
        let mut waiting = self.waiting.lock();
        waiting.bytes.extend(record);
        waiting.sources.push_back(source);
        let in_pipe = rustix::io::ioctl_fionread(&self.read).unwrap_or(u64::MAX);
        let unread =
            usize::try_from(in_pipe).unwrap_or(usize::MAX).saturating_add(waiting.bytes.len()) / self.record;
        let read = waiting.sources.len().saturating_sub(unread);
        waiting.sources.drain(..read);
        self.write(&mut waiting);
    }

    /// Writes what waits, at once or when there is room.
    fn write(self: &Arc<Self>, waiting: &mut Waiting) {
        if !self.write_now(waiting) && !waiting.has_thread {
            waiting.has_thread = self.write_later();
        }
    }

    /// Writes what waits, while there is room. Returns whether all is written.
    fn write_now(&self, waiting: &mut Waiting) -> bool {
        while !waiting.bytes.is_empty() {
            let record = &waiting.bytes.make_contiguous()[..self.record];
            if rustix::io::write(&self.write, record) != Ok(self.record) {
                return false;
            }
            waiting.bytes.drain(..self.record);
        }
        true
    }

    /// Starts a thread that writes what waits: the program reads without a call to this library. Returns whether there is one.
    fn write_later(self: &Arc<Self>) -> bool {
        let pipe = Arc::downgrade(self);
        let _signals_are_for_the_program = BlockedSignals::all();
        let thread = std::thread::Builder::new().name("gdasync-events".into());
        let started = thread.spawn(move || while Self::waits_for_room(&pipe) {});
        started.inspect_err(|error| log!("unread events wait for the next one: {error}")).is_ok()
    }

    /// Waits a moment for room, and writes. Returns whether something is left.
    fn waits_for_room(pipe: &Weak<Self>) -> bool {
        let Some(pipe) = pipe.upgrade() else { return false };
        _ = poll(&mut [PollFd::new(&pipe.write, PollFlags::OUT)], Some(&LINGER));
        let mut waiting = pipe.waiting.lock();
        waiting.has_thread = !pipe.write_now(&mut waiting);
        waiting.has_thread
    }

    /// Takes back the records of `source` that the program has not read. Returns how many.
    pub(crate) fn take_back(self: &Arc<Self>, source: usize) -> u32 {
        let mut waiting = self.waiting.lock();
        let (own_read, own_write) = &self.own;
        let mut all = Vec::new();
        let mut record = vec![0; self.record];
        let flags = SpliceFlags::NONBLOCK;
        while rustix::pipe::splice(&self.read, None, own_write, None, self.record, flags) == Ok(self.record) {
            if rustix::io::read(own_read, &mut record) != Ok(self.record) {
                break;
            }
            all.extend_from_slice(&record);
        }
        all.extend(waiting.bytes.drain(..));
        let unread = all.len() / self.record;
        let sources = std::mem::take(&mut waiting.sources);
        let sources = sources.iter().skip(sources.len().saturating_sub(unread));
        for (record, of) in all.chunks(self.record).zip(sources).filter(|(_, of)| **of != source) {
            waiting.bytes.extend(record);
            waiting.sources.push_back(*of);
        }
        let taken = unread - waiting.sources.len();
        self.write(&mut waiting);
        u32::try_from(taken).unwrap_or(u32::MAX)
    }
}

/// The descriptor of a file, which the program owns from now on.
pub(crate) fn into_program(fd: OwnedFd) -> RawFd {
    let number = fd.as_fd().as_raw_fd();
    std::mem::forget(fd);
    number
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unread_records_of_one_source_are_taken_back() {
        let (pipe, program) = EventPipe::new(8).map(|(pipe, program)| (Arc::new(pipe), program)).unwrap();
        // Sources may name their records alike.
        for (source, n) in [(1, 1u64), (2, 2), (1, 2), (3, 3)] {
            pipe.send(source, &n.to_ne_bytes());
        }
        let mut record = [0; 8];
        rustix::io::read(&program, &mut record).unwrap();
        assert_eq!(u64::from_ne_bytes(record), 1);
        assert_eq!(pipe.take_back(1), 1);
        for n in [2u64, 3] {
            rustix::io::read(&program, &mut record).unwrap();
            assert_eq!(u64::from_ne_bytes(record), n);
        }
        assert_eq!(pipe.take_back(2), 0, "nothing is left, and nothing blocks");
    }

    #[test]
    fn a_closed_descriptor_ends_nothing() {
        let (pipe, program) = EventPipe::new(16).map(|(pipe, program)| (Arc::new(pipe), program)).unwrap();
        drop(program);
        for _ in 0..10_000 {
            pipe.send(1, &[0; 16]);
        }
        assert_eq!(pipe.take_back(2), 0);
    }

    #[test]
    fn events_wait_for_a_program_that_does_not_read() {
        const COUNT: u64 = 30_000;
        let (pipe, program) = EventPipe::new(8).map(|(pipe, program)| (Arc::new(pipe), program)).unwrap();
        let (mut bytes, mut next) = ([0; 16], 0);
        for n in 0..COUNT {
            pipe.send(usize::try_from(n % 256).unwrap(), &n.to_ne_bytes());
        }
        assert!(pipe.waiting.lock().has_thread, "a pipe holds less");
        assert_eq!(pipe.take_back(7), u32::try_from(COUNT.div_ceil(256)).unwrap());
        while next < COUNT {
            // Blocks until there is one.
            assert_eq!(rustix::io::read(&program, &mut bytes), Ok(8), "one record for each read");
            next += u64::from(next % 256 == 7);
            assert_eq!(bytes, [next, 0].map(u64::to_ne_bytes).concat()[..]);
            next += 1;
        }
        assert!(pipe.waiting.lock().bytes.is_empty());
    }

    #[test]
    fn events_that_no_thread_could_write_come_before_the_next_one() {
        let (pipe, program) = EventPipe::new(8).map(|(pipe, program)| (Arc::new(pipe), program)).unwrap();
        rustix::io::ioctl_fionbio(&program, true).unwrap();
        pipe.waiting.lock().bytes.extend(1u64.to_ne_bytes());
        pipe.send(1, &2u64.to_ne_bytes());
        let mut record = [0; 8];
        for n in [1u64, 2] {
            assert_eq!(rustix::io::read(&program, &mut record), Ok(8));
            assert_eq!(u64::from_ne_bytes(record), n);
        }
    }
}
