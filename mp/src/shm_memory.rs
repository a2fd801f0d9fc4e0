//! The shared memory of the FIFOs between ranks of a host: its layout; and how processes map each other's memory.

use std::ffi::CString;
use std::fs;
use std::os::fd::{AsRawFd, OwnedFd};
use std::process;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use gdsync::memory::Memory;
use gdsync::shm::shm_fifo::{Sender, Slots, close};

use crate::error::Result;
use crate::exchange::{Exchange, take};
use crate::wait::Deadline;

/// Cells of a FIFO, and pages: a message that does not fit into its cell is in the page that follows from its number.
const CELLS: usize = 256;
const PAGES: usize = 64;
/// Bytes of a cell: its header, and a short message in the same cache line.
const CELL: usize = 64;
const HEADER: usize = 8;
/// Bytes of the longest message: a page.
pub(crate) const LONGEST: usize = 4096;

// Each on a cache line of its own: what both sides write, what the sender writes, what the receiver writes.
const WORD: usize = 0;
const BEGUN: usize = 64;
const RUN: usize = 68;
const RESUMED: usize = 128;
const TAKEN: usize = 136;
const FIRST: usize = 256;
const FIRST_PAGE: usize = 20480;

/// Bytes of a FIFO: whole pages.
pub(crate) const BYTES: usize = FIRST_PAGE + PAGES * LONGEST;

const _: () =
    assert!(FIRST + CELLS * CELL <= FIRST_PAGE && CELLS.is_power_of_two() && FIRST_PAGE.is_multiple_of(4096));

/// The memory of the FIFO from one rank to another.
#[derive(Clone, Debug)]
pub(crate) struct FifoMemory(pub(crate) Memory);

impl FifoMemory {
    /// The offset of a message of this length.
    #[inline]
    #[expect(clippy::cast_possible_truncation, reason = "below the number of cells")]
    pub(crate) fn body(number: u64, len: usize) -> usize {
        match len <= CELL - HEADER {
            true => FIRST + (number % CELLS as u64) as usize * CELL + HEADER,
            false => FIRST_PAGE + (number % PAGES as u64) as usize * LONGEST,
        }
    }

    /// How many messages can be in the FIFO with one of this length.
    #[inline]
    pub(crate) fn capacity(len: usize) -> u64 {
        (if len <= CELL - HEADER { CELLS } else { PAGES }) as u64
    }

    /// How many messages in a row the sender could have sent through the FIFO.
    pub(crate) fn run(&self) -> u32 {
        self.word32(RUN).load(Ordering::Relaxed)
    }

    pub(crate) fn set_run(&self, run: u32) {
        self.word32(RUN).store(run, Ordering::Relaxed);
    }

    #[inline]
    fn word32(&self, offset: usize) -> &AtomicU32 {
        self.0.atomic32(offset).expect("the words are aligned and inside")
    }

    #[inline]
    fn word64(&self, offset: usize) -> &AtomicU64 {
        self.0.atomic64(offset).expect("the words are aligned and inside")
    }
}

impl Slots for FifoMemory {
    type W32 = AtomicU32;
    type W64 = AtomicU64;

    fn count(&self) -> u64 {
        CELLS as u64
    }

    #[inline]
    fn word(&self) -> &AtomicU64 {
        self.word64(WORD)
    }

    #[inline]
    fn begun(&self) -> &AtomicU32 {
        self.word32(BEGUN)
    }

    #[inline]
    fn resumed(&self) -> &AtomicU32 {
        self.word32(RESUMED)
    }

    #[inline]
    fn taken(&self) -> &AtomicU64 {
        self.word64(TAKEN)
    }

    #[inline]
    #[expect(clippy::cast_possible_truncation, reason = "below the number of cells")]
    fn header(&self, cell: u64) -> &AtomicU64 {
        self.word64(FIRST + cell as usize * CELL)
    }
}

/// The memory of both FIFOs between this rank and another one.
#[derive(Clone, Debug)]
pub(crate) struct FifoPair {
    pub(crate) tx: FifoMemory,
    pub(crate) rx: FifoMemory,
}

impl From<[Memory; 2]> for FifoPair {
    fn from([tx, rx]: [Memory; 2]) -> Self {
        Self { tx: FifoMemory(tx), rx: FifoMemory(rx) }
    }
}

impl FifoPair {
    /// Closes the FIFO that the other rank sends through: its next message takes the queue pair, which says what ended the
    /// connection. Whoever opens the FIFO checks afterwards whether the connection has ended.
    pub(crate) fn shut(&self) {
        close(&self.rx);
    }

    /// Whether the receiver has refused a message.
    pub(crate) fn is_refused(&self) -> bool {
        Sender::is_broken(&self.tx)
    }
}

/// The file of a rank. Its name distinguishes it from files of other processes.
#[derive(Clone, Copy, Debug, PartialEq)]
struct SharedFile {
    process: u32,
    fd: i32,
    token: u64,
}

impl SharedFile {
    const BYTES: usize = 16;

    fn to_bytes(self) -> Vec<u8> {
        let Self { process, fd, token } = self;
        [&process.to_be_bytes()[..], &fd.to_be_bytes(), &token.to_be_bytes()].concat()
    }

    fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let bytes: &[u8; Self::BYTES] = bytes.try_into().ok()?;
        let rest = &mut &bytes[..];
        let (process, fd) = (u32::from_be_bytes(take(rest)), i32::from_be_bytes(take(rest)));
        Some(Self { process, fd, token: u64::from_be_bytes(take(rest)) })
    }

    fn name(token: u64) -> String {
        format!("gdsync-mp-{token:016x}")
    }

    /// Opens the file by the process's entry in `/proc`, unless that is another file: in another PID namespace the number means
    /// another process.
    fn open(self) -> Option<OwnedFd> {
        let path = format!("/proc/{}/fd/{}", self.process, self.fd);
        let target = fs::read_link(&path).ok()?;
        // Checked before the open, which may have effects for other kinds of files.
        if !target.to_str()?.starts_with(&format!("/memfd:{} ", Self::name(self.token))) {
            return None;
        }
        fs::OpenOptions::new().read(true).write(true).open(path).ok().map(OwnedFd::from)
    }
}

/// Creates the memory that this rank receives through, of so many bytes.
fn create(len: usize) -> gdsync::Result<(Memory, OwnedFd, SharedFile)> {
    // Zeros still name a file of this process.
    let token = getrandom::u64().unwrap_or_default();
    let name = CString::new(SharedFile::name(token)).expect("no zeros in it");
    let (memory, file) = Memory::shared(&name, len)?;
    let shared = SharedFile { process: process::id(), fd: file.as_raw_fd(), token };
    Ok((memory, file, shared))
}

/// Maps `len` bytes for each direction, to a rank and from it, with the ranks of `wanted`, except with those where that is not possible.
/// All ranks must call it. Each rank creates a file in memory for those that it receives through, which goes with the last process that
/// maps it.
///
/// # Errors
/// Of the exchange.
pub(crate) fn share(
    wanted: &[bool],
    len: usize,
    exchange: &mut dyn Exchange,
    timeout: Duration,
) -> Result<Vec<Option<[Memory; 2]>>> {
    let deadline = Deadline::after(timeout);
    let (rank, size) = (exchange.rank(), wanted.len());
    let own = wanted.contains(&true).then(|| create(size * len));
    let own = own.and_then(|own| own.inspect_err(|error| tracing::info!(%error, "no shared memory")).ok());
    let file = own.as_ref().map(|(_, _, file)| file.to_bytes()).unwrap_or_default();
    let files = exchange.allgather(&file, deadline.remaining())?;
    let open = |(peer, bytes): (usize, &Vec<u8>)| {
        let file = SharedFile::from_bytes(bytes).filter(|_| own.is_some() && wanted[peer])?.open()?;
        // The whole file is mapped; only what is used has pages.
        let memory = Memory::of_shared(&file, size * len).and_then(|all| all.slice(rank * len, len));
        memory.inspect_err(|error| tracing::info!(%error, peer, "no shared memory")).ok()
    };
    let theirs: Vec<_> = files.iter().enumerate().take(size).map(open).collect();
    // Both directions, or none. After this the file is not opened any more.
    let mapped: Vec<u8> = theirs.iter().map(|memory| u8::from(memory.is_some())).collect();
    let reached = exchange.allgather(&mapped, deadline.remaining())?;
    let pair = |(peer, theirs): (usize, Option<Memory>)| {
        let reaches_us = reached.get(peer).is_some_and(|reached| reached.get(rank) == Some(&1));
        let (memory, ..) = own.as_ref().filter(|_| reaches_us)?;
        Some([theirs?, memory.slice(peer * len, len).ok()?])
    };
    let mut all: Vec<_> = theirs.into_iter().enumerate().map(pair).collect();
    all.resize_with(size, || None);
    Ok(all)
}

#[cfg(test)]
mod tests {
    use gdsync::shm::shm_fifo::Receiver;

    use super::*;

    #[test]
    fn senders_survive_counts_that_no_receiver_writes() {
        for taken in [2, u64::MAX / 2, u64::MAX - 300] {
            let memory = FifoMemory(Memory::alloc(BYTES).unwrap());
            let (mut sender, mut receiver) = (Sender::default(), Receiver::default());
            sender.count(&memory, 0);
            receiver.open(&memory, 0);
            assert_eq!(sender.claim(&memory, 1, 1), Some(0));
            memory.taken().store(taken, Ordering::Relaxed);
            assert_eq!(sender.claim(&memory, 1, 1), None, "{taken}");
            assert_eq!(receiver.close(&memory), 1);
        }
    }

    #[test]
    fn shared_files_are_opened_by_name() {
        let (memory, _file, shared) = create(2 * BYTES).unwrap();
        assert_eq!(SharedFile::from_bytes(&shared.to_bytes()), Some(shared));
        assert_eq!(SharedFile::from_bytes(&shared.to_bytes()[1..]), None);
        let file = shared.open().unwrap();
        memory.write(BYTES + 3, b"here").unwrap();
        let other = Memory::of_shared(&file, 2 * BYTES).unwrap();
        assert_eq!(other.to_vec()[BYTES + 3..BYTES + 7], *b"here");
        assert!(SharedFile { token: shared.token ^ 1, ..shared }.open().is_none(), "another file");
        assert!(SharedFile { fd: 1 << 20, ..shared }.open().is_none());
    }
}
