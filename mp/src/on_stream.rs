//! Messages that a stream starts and awaits.

use std::ops::Range;

use gdsync::stream::{Batch, PreparedSend, Stream};
use gdsync::verbs::Sge;

use crate::communicator::{Communicator, Registration};
use crate::error::Result;
use crate::link::{Link, only_once, refuse_in_capture};
use crate::peer::{Piece, Way};
use crate::request::Request;

const ON_STREAM: &str = "send on stream";

/// A send that is ready, but in no stream yet. Dropping it takes it back.
#[derive(Debug)]
#[must_use = "dropping it takes the message back"]
pub struct PreparedMessage {
    request: Request,
    send: PreparedSend,
}

impl PreparedMessage {
    /// The message, under way from when it is posted.
    pub fn request(&self) -> &Request {
        &self.request
    }

    /// Adds it to a batch, as [`Communicator::isend_in_batch`] does.
    pub fn post_in_batch(self, batch: &mut Batch) -> Request {
        if let Some(link) = self.request.link() {
            link.post_in_batch(batch, self.send);
        }
        self.request
    }

    /// Posts it on a stream.
    ///
    /// # Errors
    /// [`Error::Message`](crate::Error::Message): the connection is broken, or the stream refuses. The message is taken back.
    pub fn post_on_stream(self, stream: &Stream) -> Result<Request> {
        let mut batch = Batch::new();
        let request = self.post_in_batch(&mut batch);
        stream.submit(&mut batch).map_err(|source| request.failed(source))?;
        Ok(request)
    }
}

impl Communicator {
    /// Queues a send on a stream: it leaves when the stream gets there and the rank has posted a receive for it, with what the
    /// buffer holds then. A graph cannot have it: see [`Channel`](crate::Channel).
    ///
    /// Until it is complete, the CPU and other streams cannot send to the same rank. The stream does not wait for that, so
    /// [`Stream::synchronize`] does not tell: wait for the request, or have the stream wait by
    /// [`Communicator::send_on_stream`].
    ///
    /// # Errors
    /// As [`Communicator::isend`], also [`Busy`](gdsync::Error::Busy) for a send of the CPU or of another stream; and inside
    /// [`Error::Message`](crate::Error::Message) the stream's refusals.
    pub fn isend_on_stream(
        &self,
        stream: &Stream,
        buffer: &Registration,
        range: Range<usize>,
        rank: usize,
    ) -> Result<Request> {
        self.isendv_on_stream(stream, &[(buffer, range)], rank)
    }

    /// As [`Communicator::isend_on_stream`], of several pieces.
    ///
    /// # Errors
    /// As [`Communicator::isend_on_stream`].
    pub fn isendv_on_stream(&self, stream: &Stream, pieces: &[Piece<'_>], rank: usize) -> Result<Request> {
        let _range = crate::DOMAIN.range(c"isend_on_stream");
        let post = |link: &Link, sges: &[Sge]| {
            let mut batch = Batch::new();
            let completion = link.send_in_batch(&mut batch, sges)?;
            stream.submit(&mut batch)?;
            Ok((completion.index(), ()))
        };
        Ok(self.peer(rank)?.start(Way::Send, ON_STREAM, pieces, post)?.0)
    }

    /// As [`Communicator::isend_on_stream`], and the stream goes on when the buffer may be written again.
    ///
    /// # Errors
    /// As [`Communicator::isend_on_stream`].
    pub fn send_on_stream(
        &self,
        stream: &Stream,
        buffer: &Registration,
        range: Range<usize>,
        rank: usize,
    ) -> Result<Request> {
        let post = |link: &Link, sges: &[Sge]| {
            let mut batch = Batch::new();
            let completion = link.send_in_batch(&mut batch, sges)?;
            batch.wait(&completion)?;
            stream.submit(&mut batch)?;
            Ok((completion.index(), ()))
        };
        Ok(self.peer(rank)?.start(Way::Send, ON_STREAM, &[(buffer, range)], post)?.0)
    }

    /// Adds a send to a batch: it leaves when a stream that the batch is submitted to gets there.
    ///
    /// A batch that is dropped instead takes the send back; the request means nothing then. Drop the newest first: a message to
    /// the same rank in a later batch would wait for one receive more than it needs.
    ///
    /// # Errors
    /// As [`Communicator::isend`].
    pub fn isend_in_batch(
        &self,
        batch: &mut Batch,
        buffer: &Registration,
        range: Range<usize>,
        rank: usize,
    ) -> Result<Request> {
        let post = |link: &Link, sges: &[Sge]| Ok((link.send_in_batch(batch, sges)?.index(), ()));
        Ok(self.peer(rank)?.start(Way::Send, "send in a batch", &[(buffer, range)], post)?.0)
    }

    /// Prepares a send that a stream will start later. Prepared sends to one rank are posted in the order in which they were
    /// prepared; other sends to it have to wait until all are posted or dropped.
    ///
    /// # Errors
    /// As [`Communicator::isend`].
    pub fn prepare_send(
        &self,
        buffer: &Registration,
        range: Range<usize>,
        rank: usize,
    ) -> Result<PreparedMessage> {
        self.prepare_sendv(&[(buffer, range)], rank)
    }

    /// As [`Communicator::prepare_send`], of several pieces.
    ///
    /// # Errors
    /// As [`Communicator::isend`].
    pub fn prepare_sendv(&self, pieces: &[Piece<'_>], rank: usize) -> Result<PreparedMessage> {
        let post = |link: &Link, sges: &[Sge]| {
            let send = link.prepare_send(sges)?;
            let place = send.completion().index();
            link.credits.prepare(place);
            Ok((place, send))
        };
        let (request, send) = self.peer(rank)?.start(Way::Send, "prepared send", pieces, post)?;
        Ok(PreparedMessage { request, send })
    }

    /// Posts prepared sends on a stream, all in one submission: they leave one after the other when the stream gets there.
    ///
    /// # Errors
    /// [`Error::Message`](crate::Error::Message): the connection to the first of their ranks is broken, or the stream refuses.
    /// Nothing is posted then, and the messages are taken back.
    pub fn post_all_on_stream(
        &self,
        stream: &Stream,
        messages: impl IntoIterator<Item = PreparedMessage>,
    ) -> Result<Vec<Request>> {
        let mut batch = Batch::new();
        let requests: Vec<_> =
            messages.into_iter().map(|message| message.post_in_batch(&mut batch)).collect();
        if let Some(first) = requests.first() {
            stream.submit(&mut batch).map_err(|source| first.failed(source))?;
        }
        Ok(requests)
    }

    /// Adds a wait for a message to a batch: the stream that it is submitted to is held until the message is complete.
    ///
    /// # Errors
    /// As [`Communicator::wait_on_stream`], but for those of the stream, which come when the batch is submitted.
    pub fn wait_in_batch(&self, batch: &mut Batch, request: &Request) -> Result<()> {
        if request.is_message() {
            only_once(batch);
        }
        // Whoever sends it may wait meanwhile, and nobody calls.
        request.catch_up();
        match request.for_stream()? {
            Some(completion) => batch.wait(completion).map_err(|source| request.failed(source)),
            None => Ok(()),
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
            refuse_in_capture(stream).map_err(|source| request.failed(source))?;
        }
        request.catch_up();
        match request.for_stream()? {
            Some(completion) => stream.wait(completion).map_err(|source| request.failed(source)),
            None => Ok(()),
        }
    }

    /// As [`Communicator::wait_on_stream`] for several messages, in one submission.
    ///
    /// # Errors
    /// As [`Communicator::wait_on_stream`].
    pub fn wait_all_on_stream<'a>(
        &self,
        stream: &Stream,
        requests: impl IntoIterator<Item = &'a Request>,
    ) -> Result<()> {
        let mut batch = Batch::new();
        let mut last = None;
        for request in requests {
            self.wait_in_batch(&mut batch, request)?;
            last = Some(request);
        }
        match last {
            Some(request) => stream.submit(&mut batch).map_err(|source| request.failed(source)),
            None => Ok(()),
        }
    }
}
