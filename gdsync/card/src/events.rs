//! Event descriptors: pipes from which programs read records of completion and asynchronous events.

use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};

use parking_lot::Mutex;
use rustix::fs::OFlags;
use rustix::io::Errno;
use rustix::pipe::{PipeFlags, SpliceFlags};

use crate::log::log;

/// A pipe. The program owns one more descriptor of its reading end; these two keep a write from failing after the
/// program closed that one.
#[derive(Debug)]
pub(crate) struct EventPipe {
    read: OwnedFd,
    write: OwnedFd,
    /// Takes records back: a read of the shared pipe may block, as another thread may have taken the record.
    own: (OwnedFd, OwnedFd),
    /// Bytes of a record.
    record: usize,
    /// Records are written whole, and taken back only by one thread.
    lock: Mutex<()>,
}

impl EventPipe {
    /// A pipe of records of this size, and the descriptor for the program.
    ///
    /// # Errors
    /// `EMFILE` or `ENFILE`.
    pub(crate) fn new(record: usize) -> Result<(Self, OwnedFd), Errno> {
        let (program, write) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC)?;
        // Only of this end: the program chooses whether its reads block.
        rustix::fs::fcntl_setfl(&write, OFlags::NONBLOCK)?;
        let read = rustix::io::fcntl_dupfd_cloexec(&program, 0)?;
        let own = rustix::pipe::pipe_with(PipeFlags::CLOEXEC)?;
        Ok((Self { read, write, own, record, lock: Mutex::new(()) }, program))
    }

    /// Sends a record. Returns whether there was room.
    pub(crate) fn send(&self, record: &[u8]) -> bool {
        debug_assert_eq!(record.len(), self.record);
        let _whole = self.lock.lock();
        let sent = rustix::io::write(&self.write, record).is_ok_and(|count| count == record.len());
        if !sent {
            log!("an event is lost: the program does not read its events, and the pipe is full");
        }
        sent
    }

    /// Takes back the records that the program has not read and `is_stale` holds of. Returns how many.
    pub(crate) fn take_back(&self, is_stale: impl Fn(&[u8]) -> bool) -> u32 {
        let _whole = self.lock.lock();
        let (own_read, own_write) = &self.own;
        let mut kept = Vec::new();
        let mut taken = 0;
        let mut record = vec![0; self.record];
        let flags = SpliceFlags::NONBLOCK;
        while rustix::pipe::splice(&self.read, None, own_write, None, self.record, flags) == Ok(self.record) {
            if rustix::io::read(own_read, &mut record) != Ok(self.record) {
                break;
            }
            if is_stale(&record) {
                taken += 1;
            } else {
                kept.extend_from_slice(&record);
            }
        }
        _ = rustix::io::write(&self.write, &kept);
        taken
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
        let (pipe, program) = EventPipe::new(8).unwrap();
        for n in [1u64, 2, 1, 3] {
            assert!(pipe.send(&n.to_ne_bytes()));
        }
        let mut record = [0; 8];
        rustix::io::read(&program, &mut record).unwrap();
        assert_eq!(u64::from_ne_bytes(record), 1);
        assert_eq!(pipe.take_back(|record| record == 1u64.to_ne_bytes()), 1);
        for n in [2u64, 3] {
            rustix::io::read(&program, &mut record).unwrap();
            assert_eq!(u64::from_ne_bytes(record), n);
        }
        assert_eq!(pipe.take_back(|_| true), 0, "nothing is left, and nothing blocks");
    }

    #[test]
    fn a_closed_descriptor_ends_nothing() {
        let (pipe, program) = EventPipe::new(16).unwrap();
        drop(program);
        assert!(pipe.send(&[0; 16]));
        while pipe.send(&[0; 16]) {}
        assert_eq!(pipe.take_back(|_| false), 0);
    }
}
