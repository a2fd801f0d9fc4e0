//! What can be done to the window of another rank.

use std::ops::Range;

use gdsync::verbs::{Mr, Sge};

use crate::communicator::{Registration, ends_early};
use crate::error::Result;
use crate::few::Few;
use crate::peer::Piece;
use crate::window::Window;

/// The most bytes [`Rma::put_bytes`] takes.
pub const MAX_INLINE: usize = 64;

/// An operation on the window of a rank, to be given to [`Window::start`], [`Window::start_on_stream`] or
/// [`Window::start_in_batch`]. Nothing of the target's takes part in it, not even its CPU.
///
/// Offsets are in bytes from the start of the target's window. Words are 64 bits wide, their offsets multiples of 8 if
/// the window begins at one.
#[derive(Clone, Debug)]
#[must_use = "it does nothing until it is started"]
pub struct Rma<'a> {
    pub(super) rank: usize,
    pub(super) offset: usize,
    pub(super) what: What<'a>,
    pub(super) signal: Option<Signal<'a>>,
    pub(super) fence: bool,
}

#[derive(Clone, Debug)]
pub(super) enum What<'a> {
    Put(Pieces<'a>),
    PutBytes(&'a [u8]),
    Get(Pieces<'a>),
    Add { add: u64, result: Option<Piece<'a>> },
    CompareSwap { compare: u64, swap: u64, result: Piece<'a> },
    Signal,
}

/// A word in a registration.
fn word(into: &Registration, at: usize) -> Piece<'_> {
    (into, at..at.saturating_add(8))
}

/// Local bytes, in order.
#[derive(Clone, Debug)]
pub(super) enum Pieces<'a> {
    One(Piece<'a>),
    Many(&'a [Piece<'a>]),
}

impl<'a> Pieces<'a> {
    #[inline]
    pub(super) fn list(&self) -> &[Piece<'a>] {
        match self {
            Self::One(piece) => std::slice::from_ref(piece),
            Self::Many(pieces) => pieces,
        }
    }
}

impl<'a> Rma<'a> {
    #[inline]
    fn new(rank: usize, offset: usize, what: What<'a>) -> Self {
        Self { rank, offset, what, signal: None, fence: false }
    }

    /// Writes the bytes `range` of `from` to `offset`.
    pub fn put(from: &'a Registration, range: Range<usize>, rank: usize, offset: usize) -> Self {
        Self::new(rank, offset, What::Put(Pieces::One((from, range))))
    }

    /// Writes pieces of local memory, one behind the other, to `offset`.
    pub fn putv(pieces: &'a [Piece<'a>], rank: usize, offset: usize) -> Self {
        Self::new(rank, offset, What::Put(Pieces::Many(pieces)))
    }

    /// Writes bytes, at most [`MAX_INLINE`], to `offset`. They are copied when the operation is started or added to a
    /// batch, and need no registration.
    pub fn put_bytes(bytes: &'a [u8], rank: usize, offset: usize) -> Self {
        Self::new(rank, offset, What::PutBytes(bytes))
    }

    /// Reads as many bytes from `offset` as `range` has, into those bytes of `into`.
    pub fn get(into: &'a Registration, range: Range<usize>, rank: usize, offset: usize) -> Self {
        Self::new(rank, offset, What::Get(Pieces::One((into, range))))
    }

    /// Reads bytes from `offset` into pieces of local memory, one behind the other.
    pub fn getv(pieces: &'a [Piece<'a>], rank: usize, offset: usize) -> Self {
        Self::new(rank, offset, What::Get(Pieces::Many(pieces)))
    }

    /// Adds to the word at `offset`, in one step for all who do so through windows, and wraps.
    pub fn accumulate(add: u64, rank: usize, offset: usize) -> Self {
        Self::new(rank, offset, What::Add { add, result: None })
    }

    /// As [`Rma::accumulate`], and the old value of the word goes to the 8 bytes at `at` of `into`.
    pub fn fetch_add(add: u64, rank: usize, offset: usize, into: &'a Registration, at: usize) -> Self {
        Self::new(rank, offset, What::Add { add, result: Some(word(into, at)) })
    }

    /// Writes `swap` to the word at `offset` if that is `compare`. Its old value goes to the 8 bytes at `at` of `into`.
    pub fn compare_swap(
        compare: u64,
        swap: u64,
        rank: usize,
        offset: usize,
        into: &'a Registration,
        at: usize,
    ) -> Self {
        Self::new(rank, offset, What::CompareSwap { compare, swap, result: word(into, at) })
    }

    /// A signal alone. It arrives after all puts to the rank that were started before it.
    pub fn signal(rank: usize, signal: Signal<'a>) -> Self {
        Self::new(rank, signal.offset, What::Signal).with_signal(signal)
    }

    /// Signals the target behind the operation: who sees the word changed finds the data of a put there, and may overwrite
    /// the source of a get.
    pub fn with_signal(mut self, signal: Signal<'a>) -> Self {
        self.signal = Some(signal);
        self
    }

    /// Starts only when all gets and word operations to the rank that were started before are complete. Puts among
    /// themselves are in order without it.
    pub fn fence(mut self) -> Self {
        self.fence = true;
        self
    }

    /// Its name in errors.
    #[inline]
    pub(super) fn name(&self) -> &'static str {
        match &self.what {
            What::Put(_) | What::PutBytes(_) if self.signal.is_some() => "put with signal",
            What::Put(_) | What::PutBytes(_) => "put",
            What::Get(_) => "get",
            What::Add { result: None, .. } => "accumulate",
            What::Add { .. } => "fetch and add",
            What::CompareSwap { .. } => "compare and swap",
            What::Signal => "signal",
        }
    }

    /// The local bytes it moves, in the order of the target's.
    #[inline]
    pub(super) fn pieces(&self) -> &[Piece<'a>] {
        match &self.what {
            What::Put(pieces) | What::Get(pieces) => pieces.list(),
            What::Add { result, .. } => result.as_slice(),
            What::CompareSwap { result, .. } => std::slice::from_ref(result),
            What::PutBytes(_) | What::Signal => &[],
        }
    }

    /// The same, as the device for ranks of the same host names them or the other one.
    #[inline(always)]
    pub(super) fn sges(&self, near: bool) -> Result<Few<Sge>> {
        let mut sges = Few::None;
        for (buffer, range) in self.pieces() {
            add_sges(&mut sges, buffer.on(near), range)?;
        }
        Ok(sges)
    }
}

/// Bytes that one SGE may have. A message may have no more either.
const MAX_SGE: usize = gdsync::mlx5::MAX_MESSAGE as usize;

/// Adds the bytes `range` of a buffer: nothing if there are none, several elements if they are many.
#[inline(always)]
fn add_sges(sges: &mut Few<Sge>, buffer: &Mr, range: &Range<usize>) -> Result<()> {
    let len = range.end.checked_sub(range.start).ok_or_else(|| ends_early(range))?;
    // The whole range, also where it is empty.
    let size = buffer.memory().len();
    if range.end > size {
        return Err(gdsync::Error::OutOfBounds { offset: range.start, len, size }.into());
    }
    let mut start = range.start;
    while start < range.end {
        let len = (range.end - start).min(MAX_SGE);
        sges.push(buffer.sge(start, len)?);
        start += len;
    }
    Ok(())
}

/// A change of a 64-bit word of the target, behind an operation: see [`Rma::with_signal`]. The target waits for it with
/// [`Window::wait_signal`] or [`Window::wait_signal_on_stream`].
#[derive(Clone, Debug)]
pub struct Signal<'a> {
    pub(super) window: Option<&'a Window>,
    pub(super) offset: usize,
    pub(super) value: u64,
    pub(super) add: bool,
}

impl<'a> Signal<'a> {
    /// Sets the word at `offset` of the target's window.
    pub fn set(offset: usize, value: u64) -> Self {
        Self { window: None, offset, value, add: false }
    }

    /// Adds to the word at `offset` of the target's window: for words that several ranks signal. The device must have
    /// atomics.
    pub fn add(offset: usize, value: u64) -> Self {
        Self { window: None, offset, value, add: true }
    }

    /// Takes the word of another window instead, which must be [beside](Window::beside) the one of the operation.
    #[must_use]
    pub fn of(mut self, window: &'a Window) -> Self {
        self.window = Some(window);
        self
    }
}
