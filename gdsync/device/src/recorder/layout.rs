//! Layout of the file of a recording: 64-bit words in the byte order of the machine.
//!
//! | offset | content |
//! |---|---|
//! | 0 | the header |
//! | `THREADS` | for each thread slot the ID of its thread, and 24 bytes of the name |
//! | `WAITS` | for each thread slot the last wait of its thread |
//! | `ROWS` | queue pairs with their peers, and words that have a purpose |
//! | `RINGS` | for each thread slot its ring of records, allocated when a thread uses it |

use super::event::WORDS;

/// Maximum number of threads that record at a time.
pub(super) const THREAD_SLOTS: usize = 256;
/// Maximum number of queue pairs and of words that have a purpose.
pub(super) const TABLE_ROWS: usize = 1024;

/// "GDSYNCR4" in memory; changes with the layout.
pub(super) const MAGIC: u64 = u64::from_le_bytes(*b"GDSYNCR4");

/// Whether the file of this first word has another layout.
pub(super) fn is_of_another_release(magic: u64) -> bool {
    magic != MAGIC && magic.to_le_bytes()[..7] == MAGIC.to_le_bytes()[..7]
}

/// Words of the header.
pub(super) mod header {
    pub(in super::super) const MAGIC: usize = 0;
    pub(in super::super) const PID: usize = 1;
    /// Start time of the process, in ticks since boot.
    pub(in super::super) const STARTED: usize = 2;
    pub(in super::super) const PID_NAMESPACE: usize = 3;
    /// Two words.
    pub(in super::super) const BOOT_ID: usize = 4;
    pub(in super::super) const CLOCK: usize = 6;
    /// A stamp, its monotonic time, and the time of day, in nanoseconds.
    pub(in super::super) const ZERO: usize = 7;
    pub(in super::super) const TIME_OF_DAY: usize = 9;
    /// Records per thread, a power of two.
    pub(in super::super) const RECORDS: usize = 10;
    /// Number of events of threads without a slot.
    pub(in super::super) const LOST: usize = 11;
    /// Rank of the process plus 1; 0 if it has none.
    pub(in super::super) const RANK: usize = 12;
    /// A later stamp, its monotonic time, and a check.
    pub(in super::super) const LATER: usize = 13;
    /// Name of the program, at most 64 bytes.
    pub(in super::super) const COMMAND: usize = 24;
    pub(in super::super) const COMMAND_BYTES: usize = 64;
    pub(in super::super) const WORDS: usize = 32;
}

pub(super) const THREADS: usize = 4096;
pub(super) const THREAD_BYTES: usize = 32;
pub(super) const WAITS: usize = THREADS + THREAD_SLOTS * THREAD_BYTES;
pub(super) const WAIT_WORDS: usize = 8;
pub(super) const ROWS: usize = WAITS + THREAD_SLOTS * WAIT_WORDS * 8;
pub(super) const ROW_WORDS: usize = 8;
pub(super) const RINGS: usize = ROWS + TABLE_ROWS * ROW_WORDS * 8;
pub(super) const RECORD_BYTES: usize = WORDS * 8;

// The rings begin on a page, because they are allocated one by one.
const _: () = assert!(RINGS.is_multiple_of(4096));

/// Default, minimum and maximum of the records per thread (`GDSYNC_RECORDER`).
pub(super) const RECORDS: u64 = 2048;
pub(super) const FEWEST_RECORDS: u64 = 128;
pub(super) const MOST_RECORDS: u64 = 1 << 20;

/// Offset of the ring of a thread slot.
pub(super) const fn ring(slot: usize, records: usize) -> usize {
    RINGS + slot * records * RECORD_BYTES
}

/// Bytes of a file with this many records per thread.
pub(super) const fn file_bytes(records: usize) -> usize {
    ring(THREAD_SLOTS, records)
}

/// The bits of a record's check.
pub(super) const CHECK: u64 = (1 << 24) - 1;

/// The check of the `n`th record of a thread, or of the `n`th write of a wait or row: never 0, and unique within a ring.
#[inline]
pub(super) fn check(n: u64) -> u64 {
    (n & (CHECK >> 1)) + 1
}

const _: () = assert!(MOST_RECORDS < CHECK >> 1);
