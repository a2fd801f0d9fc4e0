//! Starting operations on windows: from the CPU, from a stream, or in a batch.

use std::ops::Range;

use gdsync::mlx5::RemoteAddr;
use gdsync::stream::{Batch, Stream};
use gdsync::verbs::{Qp, SendWr, Sge};

use super::rma::{MAX_INLINE, Rma, Signal, What};
use super::{MAX_SGES, Window};
use crate::communicator::Registration;
use crate::error::{Error, Result};
use crate::few::Few;
use crate::request::Request;

impl Window {
    /// Starts an operation. The request is complete when it is done at the target too, and local buffers may be used
    /// again; a request that is dropped goes on, and its failure comes out of the next call for the same rank.
    ///
    /// # Errors
    /// [`Error::NoSuchRank`]; [`Error::OutsideWindow`]; [`Error::Device`] for a range outside a buffer;
    /// [`Error::Message`] with the reason: a word that is not aligned, too many inline bytes, a connection that broke, or
    /// that a stream uses now, or too many operations under way.
    pub fn start(&self, rma: &Rma<'_>) -> Result<Request> {
        self.begin(rma, Qp::post_send_index)
    }

    /// Queues an operation on a stream: it starts when the stream gets there, with what local buffers hold then. In a graph each
    /// launch does it again; its buffers must stay registered as long as the graph.
    ///
    /// # Errors
    /// As [`Window::start`], and inside [`Error::Message`] the stream's refusals.
    pub fn start_on_stream(&self, stream: &Stream, rma: &Rma<'_>) -> Result<Request> {
        self.begin(rma, |qp, wrs| match wrs {
            [wr] => Ok(stream.send(qp, wr)?.index()),
            _ => {
                let mut batch = Batch::new();
                let completion = batch.sends(qp, wrs)?;
                stream.submit(&mut batch)?;
                Ok(completion.index())
            }
        })
    }

    /// Prepares an operation in a batch: it starts when a stream that the batch is submitted to gets there.
    ///
    /// A batch that is dropped instead takes it back; the request means nothing then.
    ///
    /// # Errors
    /// As [`Window::start`].
    pub fn start_in_batch(&self, batch: &mut Batch, rma: &Rma<'_>) -> Result<Request> {
        self.begin(rma, |qp, wrs| Ok(batch.sends(qp, wrs)?.index()))
    }

    /// Starts to write the bytes `range` of `from` to `offset` of the window of a rank: see [`Rma::put`].
    ///
    /// # Errors
    /// As [`Window::start`].
    pub fn iput(
        &self,
        from: &Registration,
        range: Range<usize>,
        rank: usize,
        offset: usize,
    ) -> Result<Request> {
        self.begin(&Rma::put(from, range, rank, offset), Qp::post_send_index)
    }

    /// As [`Window::iput`] for those who do not wait: [`Window::flush`] does, for all of a rank.
    ///
    /// # Errors
    /// As [`Window::start`], also for earlier operations.
    pub fn put(&self, from: &Registration, range: Range<usize>, rank: usize, offset: usize) -> Result<()> {
        self.iput(from, range, rank, offset).map(drop)
    }

    /// Starts to read from `offset` of the window of a rank into the bytes `range` of `into`: see [`Rma::get`].
    ///
    /// # Errors
    /// As [`Window::start`].
    pub fn iget(
        &self,
        into: &Registration,
        range: Range<usize>,
        rank: usize,
        offset: usize,
    ) -> Result<Request> {
        self.begin(&Rma::get(into, range, rank, offset), Qp::post_send_index)
    }

    /// [`Window::iput`] in stream order.
    ///
    /// # Errors
    /// As [`Window::start_on_stream`].
    pub fn iput_on_stream(
        &self,
        stream: &Stream,
        from: &Registration,
        range: Range<usize>,
        rank: usize,
        offset: usize,
    ) -> Result<Request> {
        self.start_on_stream(stream, &Rma::put(from, range, rank, offset))
    }

    /// [`Window::iget`] in stream order.
    ///
    /// # Errors
    /// As [`Window::start_on_stream`].
    pub fn iget_on_stream(
        &self,
        stream: &Stream,
        into: &Registration,
        range: Range<usize>,
        rank: usize,
        offset: usize,
    ) -> Result<Request> {
        self.start_on_stream(stream, &Rma::get(into, range, rank, offset))
    }

    /// Checks an operation, and has its work requests posted.
    // Always inline, and all of what it calls that a put does: where the kind is known, little is left of it.
    #[inline(always)]
    fn begin(
        &self,
        rma: &Rma<'_>,
        mut post: impl FnMut(&Qp, &[SendWr<'_>]) -> gdsync::Result<u64>,
    ) -> Result<Request> {
        let near = self.0.lanes.near;
        let sges = rma.sges(near)?;
        let len = match rma.what {
            What::Put(_) | What::Get(_) => {
                // Ranges of memory that exists: only a list of many could pass the end of the numbers.
                sges.as_slice().iter().fold(0_usize, |len, sge| len.saturating_add(sge.len as usize))
            }
            What::PutBytes(bytes) => bytes.len(),
            What::Add { .. } | What::CompareSwap { .. } | What::Signal => 8,
        };
        let name = rma.name();
        let target = rma.signal.as_ref().filter(|_| matches!(rma.what, What::Signal));
        let at = match target.and_then(|signal| signal.window) {
            // Looked up with the signal.
            Some(window) => window.remote(name, rma.rank, rma.offset, len)?,
            None => self.remote(name, rma.rank, rma.offset, len)?,
        };
        let mut wrs = Few::None;
        self.data(rma, at, sges.as_slice(), &mut wrs)?;
        let value = rma.signal.as_ref().map_or([0; 8], |signal| signal.value.to_ne_bytes());
        if let Some(signal) = &rma.signal {
            wrs.push(self.signal(rma, signal, &value)?);
        }
        if rma.fence
            && let Some(first) = wrs.first_mut()
        {
            *first = first.fence();
        }
        let lane = &self.0.lanes.lanes[rma.rank];
        let wrs = wrs.as_slice();
        lane.start(name, len, (rma.pieces(), near), wrs.len(), |qp| post(qp, wrs))
    }

    /// The work requests that move data.
    #[inline(always)]
    fn data<'a>(
        &self,
        rma: &Rma<'a>,
        at: RemoteAddr,
        sges: &'a [Sge],
        wrs: &mut Few<SendWr<'a>>,
    ) -> Result<()> {
        match rma.what {
            What::Put(_) => chunks(at, sges, |at, sges| wrs.push(SendWr::write(at, sges))),
            What::Get(_) => chunks(at, sges, |at, sges| wrs.push(SendWr::read(at, sges))),
            What::PutBytes(bytes) if bytes.len() > MAX_INLINE => return Err(too_long(rma, bytes)),
            What::PutBytes(bytes) if !bytes.is_empty() => wrs.push(SendWr::write_inline(at, bytes)),
            What::PutBytes(_) | What::Signal => {}
            What::Add { add, .. } => {
                let result = match sges {
                    [result] => *result,
                    _ => self.0.lanes.scratch(rma.rank)?,
                };
                wrs.push(SendWr::fetch_add(aligned(rma, at)?, add, result));
            }
            What::CompareSwap { compare, swap, .. } => {
                for &result in sges {
                    wrs.push(SendWr::compare_swap(aligned(rma, at)?, compare, swap, result));
                }
            }
        }
        // Nothing to move, but to be complete in its turn.
        if wrs.as_slice().is_empty() && rma.signal.is_none() {
            wrs.push(SendWr::nop());
        }
        Ok(())
    }

    /// The work request that signals with a `value`.
    fn signal<'a>(&self, rma: &Rma<'_>, signal: &Signal<'_>, value: &'a [u8; 8]) -> Result<SendWr<'a>> {
        let window = signal.window.unwrap_or(self);
        if !std::sync::Arc::ptr_eq(&window.0.lanes, &self.0.lanes) {
            let source = gdsync::Error::InvalidArgument {
                what: "the window of the signal",
                value: format!("{window:?}"),
                expected: "one that was made with Window::beside of the window of the operation",
            };
            return Err(Error::Message { rank: rma.rank, operation: rma.name(), source });
        }
        let at = aligned(rma, window.remote("signal", rma.rank, signal.offset, 8)?)?;
        let wr = match signal.add {
            true => SendWr::fetch_add(at, signal.value, self.0.lanes.scratch(rma.rank)?),
            false => SendWr::write_inline(at, value),
        };
        // Writes are in order by themselves.
        let is_overtaken = matches!(rma.what, What::Get(_) | What::Add { .. } | What::CompareSwap { .. });
        Ok(if is_overtaken { wr.fence() } else { wr })
    }
}

#[cold]
fn too_long(rma: &Rma<'_>, bytes: &[u8]) -> Error {
    let (value, expected) = (bytes.len().to_string(), "at most mp::MAX_INLINE, or a registration");
    let source = gdsync::Error::InvalidArgument { what: "bytes to put", value, expected };
    Error::Message { rank: rma.rank, operation: rma.name(), source }
}

/// Calls `one` for as many elements at a time as a work request takes, and where they go.
#[inline(always)]
fn chunks<'a>(mut at: RemoteAddr, sges: &'a [Sge], mut one: impl FnMut(RemoteAddr, &'a [Sge])) {
    // As nearly all.
    if let [_] = sges {
        return one(at, sges);
    }
    let mut rest = sges;
    while !rest.is_empty() {
        let mut len = 0;
        let fits = |sge: &&Sge| {
            len += u64::from(sge.len);
            len <= u64::from(gdsync::mlx5::MAX_MESSAGE)
        };
        let count = rest.iter().take(MAX_SGES).take_while(fits).count();
        let (chunk, behind) = rest.split_at(count.max(1));
        one(at, chunk);
        at.addr += chunk.iter().map(|sge| u64::from(sge.len)).sum::<u64>();
        rest = behind;
    }
}

/// Refuses a word where the device could not change it in one step.
fn aligned(rma: &Rma<'_>, at: RemoteAddr) -> Result<RemoteAddr> {
    if at.addr.is_multiple_of(8) {
        return Ok(at);
    }
    let (what, value) = ("the address of the word at the target", format!("{:#x}", at.addr));
    let source = gdsync::Error::InvalidArgument { what, value, expected: "a multiple of 8" };
    Err(Error::Message { rank: rma.rank, operation: rma.name(), source })
}

#[cfg(test)]
mod tests {
    use super::*;

    const LARGEST: u32 = gdsync::mlx5::MAX_MESSAGE;

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
    fn work_requests_take_a_few_elements_and_a_gibibyte() {
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
