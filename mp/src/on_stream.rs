//! Messages that a stream starts and awaits.

use std::ops::Range;

use gdsync::stream::{Batch, Stream};
use gdsync::verbs::SendWr;

use crate::communicator::{Communicator, Registration};
use crate::error::Result;
use crate::peer::Way;
use crate::request::Request;

impl Communicator {
    /// Queues a send on a stream: it leaves when the stream gets there, with what the buffer holds then.
    ///
    /// # Errors
    /// As [`Communicator::isend`], and inside [`Error::Message`](crate::Error::Message) the stream's refusals.
    pub fn isend_on_stream(
        &self,
        stream: &Stream,
        buffer: &Registration,
        range: Range<usize>,
        rank: usize,
    ) -> Result<Request> {
        self.start("send on stream", buffer, range, rank, Way::Send, |peer, sge| {
            stream.send(&peer.send, &SendWr::send(sge))
        })
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
        self.start("send on stream", buffer, range, rank, Way::Send, |peer, sge| {
            let mut batch = Batch::new();
            let completion = batch.send(&peer.send, &SendWr::send(sge))?;
            batch.wait(&completion)?;
            stream.submit(&mut batch)?;
            Ok(completion)
        })
    }

    /// Adds a send to a batch: it leaves when a stream that the batch is submitted to gets there.
    ///
    /// A batch that is dropped instead takes the send back; the request means nothing then.
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
        self.start("send in a batch", buffer, range, rank, Way::Send, |peer, sge| {
            batch.send(&peer.send, &SendWr::send(sge))
        })
    }

    /// Adds a wait for a message to a batch: the stream that it is submitted to is held until the message is complete.
    ///
    /// # Errors
    /// As [`Communicator::wait_on_stream`], but for those of the stream, which come when the batch is submitted.
    pub fn wait_in_batch(&self, batch: &mut Batch, request: &Request) -> Result<()> {
        batch.wait(&request.completion).map_err(|source| request.failed(source))
    }

    /// Holds a stream until a message is complete. A stream that is released by a failure goes on too: look at
    /// [`Stream::synchronize`] or the request.
    ///
    /// # Errors
    /// [`Error::Message`](crate::Error::Message): the connection is broken, the stream is full or failed, or another
    /// stream waits for the messages of this rank.
    pub fn wait_on_stream(&self, stream: &Stream, request: &Request) -> Result<()> {
        stream.wait(&request.completion).map_err(|source| request.failed(source))
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
