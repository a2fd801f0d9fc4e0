//! Where things are in the file of a recording. All of it is 64-bit words in the byte order of the machine.
//!
//! | offset | what |
//! |---|---|
//! | 0 | the header |
//! | `LANE_TABLE` | for each lane the thread that writes to it: its number, and 24 bytes of its name |
//! | `WAITS` | for each lane the wait that its thread is in |
//! | `ROWS` | queue pairs and their peers |
//! | `RINGS` | for each lane its ring of records, there once a thread uses it |

use super::event::WORDS;

/// Threads that can record at a time.
pub(super) const LANES: usize = 256;
/// Queue pairs whose peers are remembered.
pub(super) const QUEUE_PAIRS: usize = 1024;

/// "GDSYNCR2" in memory: another layout has another one.
pub(super) const MAGIC: u64 = u64::from_le_bytes(*b"GDSYNCR2");

/// Words of the header.
pub(super) mod header {
    pub(in super::super) const MAGIC: usize = 0;
    pub(in super::super) const PID: usize = 1;
    /// When the process was started, in the kernel's ticks since the machine was.
    pub(in super::super) const STARTED: usize = 2;
    pub(in super::super) const PID_NAMESPACE: usize = 3;
    /// Two words.
    pub(in super::super) const BOOT_ID: usize = 4;
    pub(in super::super) const CLOCK: usize = 6;
    /// A stamp, the monotonic time of it, and the time of day, in nanoseconds.
    pub(in super::super) const ZERO: usize = 7;
    pub(in super::super) const TIME_OF_DAY: usize = 9;
    /// Records of a lane, a power of two.
    pub(in super::super) const RECORDS: usize = 10;
    /// Events of threads that found no lane.
    pub(in super::super) const LOST: usize = 11;
    /// The rank of the process and 1; 0 where it has none.
    pub(in super::super) const RANK: usize = 12;
    /// A later stamp and its monotonic time, with a check.
    pub(in super::super) const LATER: usize = 13;
    /// The name of the program, 64 bytes at most.
    pub(in super::super) const COMMAND: usize = 24;
    pub(in super::super) const COMMAND_BYTES: usize = 64;
    pub(in super::super) const WORDS: usize = 32;
}

pub(super) const LANE_TABLE: usize = 4096;
pub(super) const LANE_BYTES: usize = 32;
pub(super) const WAITS: usize = LANE_TABLE + LANES * LANE_BYTES;
pub(super) const WAIT_WORDS: usize = 8;
pub(super) const ROWS: usize = WAITS + LANES * WAIT_WORDS * 8;
pub(super) const ROW_WORDS: usize = 8;
pub(super) const RINGS: usize = ROWS + QUEUE_PAIRS * ROW_WORDS * 8;
pub(super) const RECORD_BYTES: usize = WORDS * 8;

// The rings begin on a page: room for them is made one by one.
const _: () = assert!(RINGS.is_multiple_of(4096));

/// Records of a lane, unless `GDSYNC_RECORDER` says otherwise, and the bounds of what it may say.
pub(super) const RECORDS: u64 = 2048;
pub(super) const FEWEST_RECORDS: u64 = 128;
pub(super) const MOST_RECORDS: u64 = 1 << 20;

/// Where the ring of a lane begins.
pub(super) const fn ring(thread_slot: usize, records: usize) -> usize {
    RINGS + thread_slot * records * RECORD_BYTES
}

/// Bytes of a file with so many records in a lane.
pub(super) const fn file_bytes(records: usize) -> usize {
    ring(LANES, records)
}

/// The bits of a record's check.
pub(super) const CHECK: u64 = (1 << 24) - 1;

/// What the check of the `n`th record of a lane is, and of a wait or a row that was written so often: never 0, and the number
/// again up to the most records that a lane may have.
#[inline]
pub(super) fn check(n: u64) -> u64 {
    (n & (CHECK >> 1)) + 1
}

const _: () = assert!(MOST_RECORDS < CHECK >> 1);
