//! A ring of records for one producer and one consumer, who may live in different processes.
//!
//! The ring is a power of two of 64-byte lines. A record starts on a line and occupies whole lines:
//!
//! ```text
//! line 0    [u32 marker][28 bytes header][first 32 bytes of the body]
//! line 1..  [64 bytes of the body] ...
//! ```
//!
//! The consumer polls one word, the marker of the line where the next record will start: 0 until the record
//! is there, then its body length with a flag. So a short record moves one cache line from core to core.
//!
//! *Old bytes are never taken for a marker.* The producer keeps the marker of its next line zero: before it
//! publishes a record it zeroes the first word of the line that follows, which must therefore be free too
//! (the ring never fills up to its last line). It zeroes one more line ahead after publishing, when nobody
//! waits for it, which is the line that matters if the next record is short.
//!
//! *A record never wraps.* What does not fit before the end of the ring starts at its first line, and a pad
//! marker tells the consumer.
//!
//! *Space comes back by the quarter.* The consumer stores its position only when a quarter of the ring has
//! gathered, so a message costs it no store. The producer still cannot get stuck: when all `C` lines are
//! consumed, fewer than `C/4` of them and one pad are unknown to it, and a pad is shorter than the record
//! that needed it. So a record of `N` lines finds its `N + 1` lines if `2 N <= 3/4 C`; see [`carries`].
//!
//! Both sides keep their own position privately and check what they read of the other's: a peer that
//! crashed or lies causes [`Corrupt`], nothing worse.

use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use super::{Atom32, Atom64};

/// Bytes of a line.
pub const LINE: usize = 64;
/// Bytes of the body that lie in the first line of a record.
pub const INLINE: usize = 32;

/// Marker of a record; the other bits are its body length.
const RECORD: u32 = 1 << 31;
/// Marker of a pad: nothing more before the end of the ring.
const PAD: u32 = 1 << 30;

/// The other side wrote what no correct peer writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the peer broke the ring: its {what} is {value:#x}")]
pub struct Corrupt {
    /// The word.
    pub what: &'static str,
    /// Its value.
    pub value: u64,
}

/// The words of a ring that both sides touch.
pub trait Lines {
    /// A marker.
    type Marker: Atom32;
    /// The consumer's position.
    type Position: Atom64;
    /// The number of lines: a power of two, at least 4.
    fn count(&self) -> u64;
    /// The first word of a line, `line < count`.
    fn marker(&self, line: u64) -> &Self::Marker;
    /// How many lines the consumer has given back since the beginning.
    fn consumed(&self) -> &Self::Position;
}

/// The lines of a record with a body of `len` bytes.
pub const fn lines_of(len: u32) -> u64 {
    1 + (len as u64).saturating_sub(INLINE as u64).div_ceil(LINE as u64)
}

/// Whether a ring of `count` lines can carry bodies of up to `len` bytes without ever getting stuck.
pub const fn carries(count: u64, len: u32) -> bool {
    2 * lines_of(len) <= count - count / 4
}

/// The producer's private side. Positions count lines since the beginning.
#[derive(Debug, Default)]
pub struct Producer {
    /// Where the next record starts; the marker there is zero.
    at: u64,
    /// One position past `at` whose marker is zero too, if it is past `at`.
    clean: u64,
    /// The consumer's position, as last seen.
    consumed: u64,
}

impl Producer {
    /// Finds room for a body of `len` bytes and returns its first line, or `None` when there is no room now.
    /// The caller may then write the record, except its marker, and [`publish`](Self::publish) it, or not.
    ///
    /// # Errors
    /// [`Corrupt`] when the consumer claims to be where it cannot be.
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
            // The caller may write over the line kept clean, and then give the record up.
            self.clean = self.at;
        }
        Ok(Some(self.line(ring)))
    }

    /// Publishes the record last reserved, with the same `len`, after everything written to it.
    pub fn publish<R: Lines>(&mut self, ring: &R, len: u32) {
        self.advance(ring, lines_of(len), RECORD | len);
    }

    /// The line where the next record starts, if it fits before the end.
    pub fn line<R: Lines>(&self, ring: &R) -> u64 {
        self.at & (ring.count() - 1)
    }

    /// Whether `lines` lines and the one after them are free.
    fn has_room<R: Lines>(&mut self, ring: &R, lines: u64) -> Result<bool, Corrupt> {
        let need = self.at + lines + 1;
        if need - self.consumed > ring.count() {
            // Acquire: the consumer's last reads of these lines come before our next writes to them.
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

/// The consumer's private side.
#[derive(Debug, Default)]
pub struct Consumer {
    /// Where the next record starts.
    at: u64,
    /// What the producer knows of it.
    published: u64,
}

/// A record that the consumer found.
#[derive(Debug)]
pub struct Found {
    /// Its first line.
    pub line: u64,
    /// The length of its body in bytes. The body lies within the ring; nothing else is known of the length.
    pub len: u32,
    end: u64,
}

impl Consumer {
    /// The next record, if it is there. Looking again finds the same one until it is popped.
    ///
    /// # Errors
    /// [`Corrupt`] for a marker that no correct producer writes there.
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

    /// The line that is looked at next.
    pub fn line<R: Lines>(&self, ring: &R) -> u64 {
        self.at & (ring.count() - 1)
    }

    /// Gives the record's lines back. Returns whether the producer can see that, so that it is worth waking.
    pub fn pop<R: Lines>(&mut self, ring: &R, found: Found) -> bool {
        self.at = found.end;
        let publish = self.at - self.published >= ring.count() / 4;
        if publish {
            // Release: our reads of these lines come before the producer's next writes to them.
            ring.consumed().store(self.at, Release);
            self.published = self.at;
        }
        publish
    }
}
