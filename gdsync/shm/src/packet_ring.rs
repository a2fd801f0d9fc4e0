//! Ring of records for one producer and one consumer, possibly in different processes.
//!
//! The ring is a power of two of 64-byte lines. A record starts on a line and occupies whole lines:
//!
//! ```text
//! line 0    [u32 marker][28 bytes header][first 32 bytes of the body]
//! line 1..  [64 bytes of the body] ...
//! ```
//!
//! The consumer polls the marker of the line where the next record will start: 0, then the body length with a flag. A
//! short record thus moves one cache line between cores.
//!
//! *Stale bytes are never read as a marker.* The marker of the producer's next line is always zero. Before it publishes
//! a record, the producer zeroes the marker of the following line, which must be free too (one line always stays free).
//! After publishing it zeroes one line further ahead, off the critical path, which helps if the next record is short.
//!
//! *Records do not wrap.* A record that does not fit before the end of the ring starts at line 0, and a pad marker
//! tells the consumer.
//!
//! *Space is returned by quarters.* The consumer stores its position once per quarter of the ring, so most messages
//! cost no store. The producer cannot get stuck: when all `C` lines are consumed, it misses fewer than `C/4` of them
//! and one pad, which is shorter than the record that needed it. A record of `N` lines finds its `N + 1` lines if `2 N
//! <= 3/4 C`; see [`carries`].
//!
//! Both sides keep their own position privately and validate what they read: a crashed or hostile peer causes only
//! [`Corrupt`].

use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use super::{Atom32, Atom64};

/// Bytes per line.
pub const LINE: usize = 64;
/// Bytes of the body in a record's first line.
pub const INLINE: usize = 32;

/// Marker flag of a record; the other bits are its body length.
const RECORD: u32 = 1 << 31;
/// Marker of a pad: the rest of the ring is unused.
const PAD: u32 = 1 << 30;

/// The peer wrote an invalid value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the peer corrupted the ring: {what} is {value:#x}")]
pub struct Corrupt {
    /// Name of the word.
    pub what: &'static str,
    /// Its value.
    pub value: u64,
}

/// The shared words of a ring.
pub trait Lines {
    /// Marker word.
    type Marker: Atom32;
    /// Consumer position word.
    type Position: Atom64;
    /// Number of lines: a power of two, at least 4.
    fn count(&self) -> u64;
    /// Marker of a line below `count`.
    fn marker(&self, line: u64) -> &Self::Marker;
    /// Number of lines the consumer has freed since the beginning.
    fn consumed(&self) -> &Self::Position;
}

/// Number of lines of a record with a body of `len` bytes.
pub const fn lines_of(len: u32) -> u64 {
    1 + (len as u64).saturating_sub(INLINE as u64).div_ceil(LINE as u64)
}

/// Whether a ring of `count` lines carries bodies of up to `len` bytes without getting stuck.
pub const fn carries(count: u64, len: u32) -> bool {
    2 * lines_of(len) <= count - count / 4
}

/// Private state of the producer. Positions count lines since the beginning.
#[derive(Debug, Default)]
pub struct Producer {
    /// Position of the next record; its marker is zero.
    at: u64,
    /// Another position with a zero marker, if beyond `at`.
    clean: u64,
    /// The consumer's position, as last read.
    consumed: u64,
}

impl Producer {
    /// Reserves lines for a body of `len` bytes and returns the first, or `None` if the ring is full. The caller may
    /// then write all but the marker and [`publish`](Self::publish), or not.
    ///
    /// # Errors
    /// [`Corrupt`] for an impossible consumer position.
    pub fn reserve<R: Lines>(&mut self, ring: &R, len: u32) -> Result<Option<u64>, Corrupt> {
        let lines = lines_of(len);
        let left = ring.count() - self.line(ring);
        if lines > left {
            if !self.has_room(ring, left)? {
                return Ok(None);
            }
            self.advance(ring, left, PAD);
        }
        if !self.has_room(ring, lines)? {
            return Ok(None);
        }
        if lines > 1 {
            // The caller may overwrite the zero marker ahead without publishing.
            self.clean = self.at;
        }
        Ok(Some(self.line(ring)))
    }

    /// Publishes the record reserved last, with the same `len`, after it is written.
    pub fn publish<R: Lines>(&mut self, ring: &R, len: u32) {
        self.advance(ring, lines_of(len), RECORD | len);
    }

    /// Whether the consumer has popped all records, and published that.
    pub fn is_drained<R: Lines>(&self, ring: &R) -> bool {
        ring.consumed().load(Relaxed) == self.at
    }

    /// Line of the next record, if it fits before the end.
    pub fn line<R: Lines>(&self, ring: &R) -> u64 {
        self.at & (ring.count() - 1)
    }

    /// Whether `lines` lines and one more are free.
    fn has_room<R: Lines>(&mut self, ring: &R, lines: u64) -> Result<bool, Corrupt> {
        let need = self.at + lines + 1;
        if need - self.consumed > ring.count() {
            // Acquire: the consumer's reads of these lines happen before the next writes to them.
            let consumed = ring.consumed().load(Acquire);
            if consumed < self.consumed || consumed > self.at {
                return Err(Corrupt { what: "position", value: consumed });
            }
            self.consumed = consumed;
        }
        Ok(need - self.consumed <= ring.count())
    }

    fn advance<R: Lines>(&mut self, ring: &R, lines: u64, marker: u32) {
        let mask = ring.count() - 1;
        let next = self.at + lines;
        if next != self.clean {
            ring.marker(next & mask).store(0, Relaxed);
        }
        ring.marker(self.at & mask).store(marker, Release);
        self.at = next;
        if next + 2 - self.consumed <= ring.count() {
            ring.marker((next + 1) & mask).store(0, Relaxed);
            self.clean = next + 1;
        }
    }
}

/// Private state of the consumer.
#[derive(Debug, Default)]
pub struct Consumer {
    /// Position of the next record.
    at: u64,
    /// Position that the producer can see.
    published: u64,
}

/// A record found by the consumer.
#[derive(Debug)]
pub struct Found {
    /// First line.
    pub line: u64,
    /// Bytes of the body. It lies within the ring; the length is otherwise unchecked.
    pub len: u32,
    end: u64,
}

impl Consumer {
    /// Whether the producer has written nothing more: cheaper than [`peek`](Self::peek).
    pub fn is_empty<R: Lines>(&self, ring: &R) -> bool {
        ring.marker(self.line(ring)).load(Acquire) == 0
    }

    /// The next record, if any. Repeated calls return the same one until it is popped.
    ///
    /// # Errors
    /// [`Corrupt`] for an invalid marker.
    pub fn peek<R: Lines>(&mut self, ring: &R) -> Result<Option<Found>, Corrupt> {
        loop {
            let line = self.line(ring);
            let left = ring.count() - line;
            let marker = ring.marker(line).load(Acquire);
            let len = marker & !RECORD;
            if marker == 0 {
                return Ok(None);
            } else if marker == PAD && line != 0 {
                self.at += left;
            } else if marker & RECORD != 0 && lines_of(len) <= left {
                return Ok(Some(Found { line, len, end: self.at + lines_of(len) }));
            } else {
                return Err(Corrupt { what: "marker", value: marker.into() });
            }
        }
    }

    /// The next line to read.
    pub fn line<R: Lines>(&self, ring: &R) -> u64 {
        self.at & (ring.count() - 1)
    }

    /// Frees the record's lines. Returns whether the producer can see it and may need a wake-up.
    pub fn pop<R: Lines>(&mut self, ring: &R, found: Found) -> bool {
        self.at = found.end;
        let publish = self.at - self.published >= ring.count() / 4;
        if publish {
            self.publish(ring);
        }
        publish
    }

    /// Shows the producer all that was popped.
    pub fn publish<R: Lines>(&mut self, ring: &R) {
        if self.published != self.at {
            // Release: the reads of these lines happen before the producer's next writes to them.
            ring.consumed().store(self.at, Release);
            self.published = self.at;
        }
    }
}
