//! Messages that streams send, receive and wait for.

use std::ops::Range;

use gdsync::memory::Word64;
use gdsync::stream::{Batch, Cond, Stream};
use gdsync::verbs::{Completion, Sge};

use crate::communicator::Communicator;
use crate::error::{Error, Result};
use crate::peer::Peer;
use crate::registration::{Piece, Registration};
use crate::request::{Awaited, DOMAIN, Request};
use crate::transport::{at_once, mark_only_once, refuse_in_capture};

impl Communicator {
    /// Queues a send on a stream: the stream sends it when the rank has posted a receive for it, with what the buffer holds then.
    /// Between GPUs of a host a kernel of the stream puts the payload into the receive, and tells a stream that waits for it: see
    /// [`Communicator::path_of`]. Graphs refuse it: see [`Channel`](crate::Channel).
    ///
    /// Until it is complete, do not write what it sends, and the CPU and other streams cannot send to the same rank. The stream does
    /// not wait for that, so work queued behind it may change the bytes: wait for the request, or use
    /// [`Communicator::send_on_stream`].
    ///
    /// # Errors
    /// [`Error::NoSuchRank`](crate::Error::NoSuchRank); [`Error::Device`](crate::Error::Device) for a range outside the buffer;
    /// [`Error::Message`](crate::Error::Message) with the reason, also [`Busy`](gdsync::Error::Busy) for a send of the CPU or of
    /// another stream; and inside [`Error::Message`](crate::Error::Message) the stream's refusals.
    pub fn isend_on_stream(
        &self,
        stream: &Stream,
        buffer: &Registration,
        range: Range<usize>,
        rank: usize,
    ) -> Result<Request> {
        let _range = DOMAIN.range(c"isend_on_stream");
        self.send_by_stream(stream, &[(buffer, range)], rank, false)
    }

    /// As [`Communicator::isend_on_stream`], and the stream goes on when the buffer may be written again: there is no request to wait
    /// for, and [`Stream::synchronize`] reports a failure.
    ///
    /// # Errors
    /// [`Error::NoSuchRank`](crate::Error::NoSuchRank), [`Error::Device`](crate::Error::Device) and
    /// [`Error::Message`](crate::Error::Message), as [`Communicator::isend_on_stream`].
    pub fn send_on_stream(
        &self,
        stream: &Stream,
        buffer: &Registration,
        range: Range<usize>,
        rank: usize,
    ) -> Result<()> {
        self.send_by_stream(stream, &[(buffer, range)], rank, true).map(drop)
    }

    fn send_by_stream(
        &self,
        stream: &Stream,
        pieces: &[Piece<'_>],
        rank: usize,
        waits: bool,
    ) -> Result<Request> {
        let stream = at_once(stream);
        let post = |peer: &Peer, sges: &[Sge]| {
            let mut batch = Batch::new();
            let completion = peer.send_in_batch(&mut batch, pieces, sges)?;
            if waits {
                batch.wait_unless_placed(&completion)?;
            }
            stream.submit(&mut batch)?;
            Ok((completion, ()))
        };
        let operation = "send on stream";
        let peer = self.open_peer(rank, operation)?;
        let sges = peer.sges(operation, pieces)?;
        self.while_full(|| Ok(Request::queued(peer, peer.send_with(operation, (pieces, &sges), post)?.0)))
    }

    /// Adds a send to a batch: the stream that the batch is submitted to sends it.
    ///
    /// A batch that is dropped instead takes the send back; the request is void then. Drop the newest first: a message to
    /// the same rank in a later batch would wait for one receive more than it needs.
    ///
    /// # Errors
    /// [`Error::NoSuchRank`](crate::Error::NoSuchRank), [`Error::Device`](crate::Error::Device) and
    /// [`Error::Message`](crate::Error::Message), as [`Communicator::isend`].
    pub fn isend_in_batch(
        &self,
        batch: &mut Batch,
        buffer: &Registration,
        range: Range<usize>,
        rank: usize,
    ) -> Result<Request> {
        self.isend_vectored_in_batch(batch, &[(buffer, range)], rank)
    }

    /// As [`Communicator::isend_in_batch`], of several pieces.
    ///
    /// # Errors
    /// [`Error::NoSuchRank`](crate::Error::NoSuchRank), [`Error::Device`](crate::Error::Device) and
    /// [`Error::Message`](crate::Error::Message), as [`Communicator::isend`].
    pub fn isend_vectored_in_batch(
        &self,
        batch: &mut Batch,
        pieces: &[Piece<'_>],
        rank: usize,
    ) -> Result<Request> {
        let mut post = |peer: &Peer, sges: &[Sge]| Ok((peer.send_in_batch(batch, pieces, sges)?, ()));
        let operation = "send in a batch";
        let peer = self.open_peer(rank, operation)?;
        let sges = peer.sges(operation, pieces)?;
        self.while_full(|| {
            Ok(Request::queued(peer, peer.send_with(operation, (pieces, &sges), &mut post)?.0))
        })
    }

    /// Queues a receive on a stream: it is posted when the stream gets there, and not before. So a loop may receive into one
    /// buffer, and the work between one message and the next is done with what came. The stream does not wait for the message: see
    /// [`Communicator::wait_on_stream`], or use [`Communicator::recv_on_stream`].
    ///
    /// Where ranks exchange messages, queue this before the send: a send waits for the receive of its peer. Messages match receives in
    /// the order of the calls, whoever posts them. Until the stream has got there, receives from the same rank by the CPU and by other
    /// streams are refused (`Busy`), also while a batch with receives is not submitted. Graphs refuse it: see
    /// [`Channel`](crate::Channel).
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use gdsync::memory::Memory;
    /// # use gdsync::stream::{HostStreamConfig, Stream};
    /// # use mp::Communicator;
    /// # fn main() -> mp::Result<()> {
    /// # let ten = Duration::from_secs(10);
    /// # let comm = Communicator::builder().spawn(1).init()?; // one rank is enough to try it
    /// # let (left, right) = (comm.rank(), comm.rank());
    /// # let buffer = comm.register(&Memory::alloc(128)?)?;
    /// let stream = Stream::host(HostStreamConfig::default())?;
    /// for round in 0..100 {
    ///     let memory = buffer.memory().clone();
    ///     stream.host_fn(move || memory.write(0, &[round; 64]).expect("it fits"))?; // compute
    ///     let received = comm.irecv_on_stream(&stream, &buffer, 64..128, left)?;
    ///     comm.send_on_stream(&stream, &buffer, 0..64, right)?;
    ///     comm.wait_on_stream(&stream, &received)?;
    ///     let memory = buffer.memory().clone();
    ///     stream.host_fn(move || assert_eq!(memory.to_vec()[64..], [round; 64]))?; // use it
    ///     # if round % 50 == 49 { stream.synchronize(ten)?; }
    /// }
    /// stream.synchronize(ten)?;
    /// # comm.finalize(ten)
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`Error::NoSuchRank`](crate::Error::NoSuchRank); [`Error::Device`](crate::Error::Device) for a range outside the buffer;
    /// [`Error::Message`](crate::Error::Message) with the reason, also [`Busy`](gdsync::Error::Busy) for receives of another
    /// stream, and the stream's refusals.
    pub fn irecv_on_stream(
        &self,
        stream: &Stream,
        buffer: &Registration,
        range: Range<usize>,
        rank: usize,
    ) -> Result<Request> {
        self.receive_by_stream(stream, &[(buffer, range)], rank, false)
    }

    /// As [`Communicator::irecv_on_stream`], and the stream goes on when the message is there; [`Stream::synchronize`] reports a
    /// failure. If two ranks both do this before they send to each other, both streams wait until their limit.
    ///
    /// # Errors
    /// [`Error::NoSuchRank`](crate::Error::NoSuchRank), [`Error::Device`](crate::Error::Device) and
    /// [`Error::Message`](crate::Error::Message), as [`Communicator::irecv_on_stream`].
    pub fn recv_on_stream(
        &self,
        stream: &Stream,
        buffer: &Registration,
        range: Range<usize>,
        rank: usize,
    ) -> Result<()> {
        self.receive_by_stream(stream, &[(buffer, range)], rank, true).map(drop)
    }

    /// Queues a send and a receive on a stream, which goes on when both are complete, in any order: as `MPI_Sendrecv`. So ranks that
    /// exchange messages do not wait for each other for ever.
    ///
    /// # Errors
    /// [`Error::NoSuchRank`](crate::Error::NoSuchRank), [`Error::Device`](crate::Error::Device) and
    /// [`Error::Message`](crate::Error::Message), as [`Communicator::irecv_on_stream`] and [`Communicator::isend_on_stream`]. The
    /// receive may be queued then.
    pub fn sendrecv_on_stream(
        &self,
        stream: &Stream,
        send: Piece<'_>,
        to: usize,
        receive: Piece<'_>,
        from: usize,
    ) -> Result<()> {
        self.check_sendrecv(&send, to, &receive)?;
        let received = self.receive_by_stream(stream, &[receive], from, false)?;
        _ = self.send_by_stream(stream, &[send], to, true)?;
        self.wait_on_stream(stream, &received)
    }

    fn receive_by_stream(
        &self,
        stream: &Stream,
        pieces: &[Piece<'_>],
        rank: usize,
        waits: bool,
    ) -> Result<Request> {
        let _range = DOMAIN.range(c"irecv_on_stream");
        let peer = self.open_peer(rank, "receive on stream")?;
        let failed = |cause| Error::message(rank, "receive on stream", cause);
        refuse_in_capture(stream).map_err(failed)?;
        let mut batch = Batch::new();
        let request =
            self.while_full(|| Ok(Request::received(peer, peer.receive_in_batch(&mut batch, pieces)?)))?;
        if waits {
            self.wait_in_batch(&mut batch, &request)?;
        }
        // `Busy`: the last announcement of another stream is still under way.
        let is_busy = |error: &Error| {
            matches!(error, Error::Message { cause: gdsync::Error::Busy { queue: "send", .. }, .. })
        };
        let stream = at_once(stream);
        let submit = || stream.submit(&mut batch).map_err(failed);
        self.retry_while(|error| error.is_full() || is_busy(error), submit)?;
        Ok(request)
    }

    /// Adds a receive to a batch: the stream that the batch is submitted to posts it, see [`Communicator::irecv_on_stream`].
    /// [`Communicator::wait_in_batch`] adds a wait for it.
    ///
    /// A batch that is dropped instead takes the receive back; the request is void then. Drop the newest first.
    ///
    /// # Errors
    /// [`Error::NoSuchRank`](crate::Error::NoSuchRank), [`Error::Device`](crate::Error::Device) and
    /// [`Error::Message`](crate::Error::Message), as [`Communicator::irecv`].
    pub fn irecv_in_batch(
        &self,
        batch: &mut Batch,
        buffer: &Registration,
        range: Range<usize>,
        rank: usize,
    ) -> Result<Request> {
        self.irecv_vectored_in_batch(batch, &[(buffer, range)], rank)
    }

    /// As [`Communicator::irecv_in_batch`], into several pieces.
    ///
    /// # Errors
    /// [`Error::NoSuchRank`](crate::Error::NoSuchRank), [`Error::Device`](crate::Error::Device) and
    /// [`Error::Message`](crate::Error::Message), as [`Communicator::irecv`].
    pub fn irecv_vectored_in_batch(
        &self,
        batch: &mut Batch,
        pieces: &[Piece<'_>],
        rank: usize,
    ) -> Result<Request> {
        let peer = self.open_peer(rank, "receive in a batch")?;
        self.while_full(|| Ok(Request::received(peer, peer.receive_in_batch(batch, pieces)?)))
    }

    /// Adds a wait for a message to a batch: the stream that it is submitted to is held until the message is complete.
    ///
    /// # Errors
    /// [`Error::Message`](crate::Error::Message): the connection is broken. Refusals of the stream come when the batch is submitted.
    pub fn wait_in_batch(&self, batch: &mut Batch, request: &Request) -> Result<()> {
        if request.is_message() {
            mark_only_once(batch);
        }
        // The sender may wait for it, and no call of this rank may follow.
        request.catch_up();
        match request.for_stream()? {
            Awaited::Completion(completion, word) => {
                wait_for(batch, completion, word).map_err(|cause| request.failed(cause))
            }
            Awaited::Stream(ticket) => ticket.wait_in_batch(batch).map_err(|cause| request.failed(cause)),
            Awaited::Word(word, value) => {
                batch.wait_value32(&word, value, Cond::Geq);
                Ok(())
            }
            Awaited::Nothing => Ok(()),
        }
    }

    /// Holds a stream until a message is complete. A stream that is released by a failure goes on too: look at
    /// [`Stream::synchronize`] or the request.
    ///
    /// # Errors
    /// [`Error::Message`](crate::Error::Message): the connection is broken, the stream is full or failed, or another
    /// stream waits for the messages of this rank.
    pub fn wait_on_stream(&self, stream: &Stream, request: &Request) -> Result<()> {
        if request.is_message() {
            refuse_in_capture(stream).map_err(|cause| request.failed(cause))?;
        }
        request.catch_up();
        let stream = &at_once(stream);
        self.while_full(|| {
            let waits = match request.for_stream()? {
                Awaited::Completion(completion, word) => {
                    let mut batch = Batch::new();
                    wait_for(&mut batch, completion, word).and_then(|()| stream.submit(&mut batch))
                }
                Awaited::Stream(ticket) => ticket.wait_on_stream(stream),
                Awaited::Word(word, value) => stream.wait_value32(&word, value, Cond::Geq),
                Awaited::Nothing => Ok(()),
            };
            waits.map_err(|cause| request.failed(cause))
        })
    }

    /// As [`Communicator::wait_on_stream`] for several messages, in one submission.
    ///
    /// # Errors
    /// [`Error::Message`](crate::Error::Message) for the first message that fails, as [`Communicator::wait_on_stream`].
    pub fn wait_all_on_stream<'a>(
        &self,
        stream: &Stream,
        requests: impl IntoIterator<Item = &'a Request>,
    ) -> Result<()> {
        let (mut batch, stream) = (Batch::new(), at_once(stream));
        let mut last = None;
        for request in requests {
            self.wait_in_batch(&mut batch, request)?;
            last = Some(request);
        }
        match last {
            Some(request) => {
                self.while_full(|| stream.submit(&mut batch).map_err(|cause| request.failed(cause)))
            }
            None => Ok(()),
        }
    }
}

fn wait_for(batch: &mut Batch, completion: &Completion, word: Option<(Word64, u32)>) -> gdsync::Result<()> {
    match word {
        Some((word, number)) => batch.wait_or_arrival(completion, &word, number),
        None => batch.wait(completion),
    }
}
