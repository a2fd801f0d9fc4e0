//! What an operation on a window does: its local pieces, its target, its signal; and its work requests.

use std::ops::Range;

use gdsync::mlx5::MAX_MESSAGE;
use gdsync::stream::{Batch, StreamOrder};
use gdsync::verbs::{Qp, RemoteAddr, SendWr, Sge};
use smallvec::SmallVec;

use super::Window;
use super::near::PeerCopies;
use crate::in_flight::Done;
use crate::registration::{DomainId, Piece, Registration};

/// SGEs of a work request: as many as need no more room than inline data.
pub(super) const MAX_SGES: usize = 6;

/// Bytes that one SGE may have. A message may have no more either.
const MAX_SGE: usize = MAX_MESSAGE as usize;

/// Lists of one operation: mostly of one element.
pub(super) type Sges = SmallVec<[Sge; 1]>;
pub(super) type SendWrs<'a> = SmallVec<[SendWr<'a>; 2]>;

/// The most bytes [`Rma::put_bytes`] takes.
pub const MAX_INLINE: usize = 64;

/// An operation on the window of a rank, for [`Window::start`], [`Window::start_on_stream`] or [`Window::start_in_batch`]. The
/// target's CPU takes no part in it.
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

/// What an operation does at the target.
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
    pub(super) fn list(&self) -> &[Piece<'a>] {
        match self {
            Self::One(piece) => std::slice::from_ref(piece),
            Self::Many(pieces) => pieces,
        }
    }
}

impl<'a> Rma<'a> {
    fn new(rank: usize, offset: usize, what: What<'a>) -> Self {
        Self { rank, offset, what, signal: None, fence: false }
    }

    /// Writes the bytes `range` of `from` to `offset`.
    pub fn put(from: &'a Registration, range: Range<usize>, rank: usize, offset: usize) -> Self {
        Self::new(rank, offset, What::Put(Pieces::One((from, range))))
    }

    /// Writes pieces of local memory, one after the other, to `offset`.
    pub fn put_vectored(pieces: &'a [Piece<'a>], rank: usize, offset: usize) -> Self {
        Self::new(rank, offset, What::Put(Pieces::Many(pieces)))
    }

    /// Writes bytes, at most [`MAX_INLINE`], to `offset`. They are copied when the operation is started or added to a
    /// batch, and need no registration. No bytes with a signal are a signal alone, as [`Rma::signal`].
    pub fn put_bytes(bytes: &'a [u8], rank: usize, offset: usize) -> Self {
        Self::new(rank, offset, What::PutBytes(bytes))
    }

    /// Reads as many bytes from `offset` as `range` has, into those bytes of `into`.
    pub fn get(into: &'a Registration, range: Range<usize>, rank: usize, offset: usize) -> Self {
        Self::new(rank, offset, What::Get(Pieces::One((into, range))))
    }

    /// Reads bytes from `offset` into pieces of local memory, one after the other.
    pub fn get_vectored(pieces: &'a [Piece<'a>], rank: usize, offset: usize) -> Self {
        Self::new(rank, offset, What::Get(Pieces::Many(pieces)))
    }

    /// Adds to the word at `offset`, atomically to other operations through windows, and wraps.
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

    /// Signals the target after the operation: whoever sees the word changed also sees the data of a put, and may overwrite the source
    /// of a get.
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
    pub(super) fn pieces(&self) -> &[Piece<'a>] {
        match &self.what {
            What::Put(pieces) | What::Get(pieces) => pieces.list(),
            What::Add { result, .. } => result.as_slice(),
            What::CompareSwap { result, .. } => std::slice::from_ref(result),
            What::PutBytes(_) | What::Signal => &[],
        }
    }

    /// The same, as the intra-host device addresses them, or the other one: none for no bytes, several where they are many.
    pub(super) fn sges(&self, (intra_host, domain): (bool, DomainId)) -> gdsync::Result<Sges> {
        let mut sges = Sges::new();
        for (buffer, range) in self.pieces() {
            // Also where the range is empty.
            buffer.check_domain(domain)?;
            buffer.check_range(range)?;
            let mut start = range.start;
            while start < range.end {
                let len = (range.end - start).min(MAX_SGE);
                sges.push(buffer.mr(intra_host).sge(start, len)?);
                start += len;
            }
        }
        Ok(sges)
    }
}

/// A change of a 64-bit word of the target, after an operation: see [`Rma::with_signal`]. The target waits for it with
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

    /// Adds to the word at `offset` of the target's window: for words that several ranks signal.
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

/// How an operation is carried out.
#[derive(Default)]
pub(super) struct Plan<'a> {
    /// By the stream itself, before the work requests.
    pub(super) copies: Option<PeerCopies<'a>>,
    pub(super) wrs: SendWrs<'a>,
    /// The stream waits for the work requests: peer copies may follow.
    pub(super) waits: bool,
}

impl Plan<'_> {
    /// Whether it is nothing but work requests.
    pub(super) fn is_plain(&self) -> bool {
        self.copies.is_none() && !self.waits
    }

    /// Adds it to a batch.
    pub(super) fn add(&self, batch: &mut Batch, qp: &Qp, order: &StreamOrder) -> gdsync::Result<Done> {
        if self.is_plain() {
            return Ok(batch.sends(qp, &self.wrs)?.into());
        }
        let send = if self.wrs.is_empty() { None } else { Some(qp.prepare_send(&self.wrs)?) };
        self.copies.iter().try_for_each(|copies| copies.add(batch))?;
        let ticket = batch.follow(order);
        let Some(send) = send else { return Ok(Done::Stream(ticket)) };
        let completion = batch.post(send);
        if self.waits {
            batch.wait(&completion)?;
        }
        Ok(completion.into())
    }
}

/// Calls `one` for as many SGEs at a time as a work request takes, and the address of their bytes.
pub(super) fn chunks<'a>(mut at: RemoteAddr, sges: &'a [Sge], mut one: impl FnMut(RemoteAddr, &'a [Sge])) {
    let mut rest = sges;
    while !rest.is_empty() {
        let mut len = 0;
        let fits = |sge: &&Sge| {
            len += u64::from(sge.len);
            len <= u64::from(MAX_MESSAGE)
        };
        let count = rest.iter().take(MAX_SGES).take_while(fits).count();
        let (chunk, behind) = rest.split_at(count.max(1));
        one(at, chunk);
        at.addr += chunk.iter().map(|sge| u64::from(sge.len)).sum::<u64>();
        rest = behind;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LARGEST: u32 = MAX_MESSAGE;

    fn split(lengths: &[u32]) -> Vec<(u64, Vec<u32>)> {
        let sges: Vec<_> = lengths.iter().map(|&len| Sge { addr: 0x1000, len, lkey: 1 }).collect();
        let mut parts = Vec::new();
        chunks(RemoteAddr { addr: 5, rkey: 9 }, &sges, |at, sges| {
            assert_eq!(at.rkey, 9);
            parts.push((at.addr, sges.iter().map(|sge| sge.len).collect()));
        });
        parts
    }

    #[test]
    fn work_requests_take_six_sges_and_a_gibibyte() {
        assert_eq!(split(&[]), []);
        assert_eq!(split(&[7]), [(5, vec![7])]);
        assert_eq!(split(&[1; MAX_SGES]), [(5, vec![1; MAX_SGES])]);
        let many = split(&[1; 2 * MAX_SGES + 1]);
        assert_eq!(many, [(5, vec![1; 6]), (11, vec![1; 6]), (17, vec![1])]);
        let gib = u64::from(LARGEST);
        assert_eq!(split(&[LARGEST, LARGEST]), [(5, vec![LARGEST]), (5 + gib, vec![LARGEST])]);
        assert_eq!(split(&[1, LARGEST]), [(5, vec![1]), (6, vec![LARGEST])]);
        assert_eq!(split(&[LARGEST - 1, 1, 1]), [(5, vec![LARGEST - 1, 1]), (5 + gib, vec![1])]);
    }
}
