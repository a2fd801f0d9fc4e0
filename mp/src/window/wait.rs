//! Waiting for operations on windows, and for signals.

use std::time::Duration;

use gdsync::stream::{Batch, Cond, Stream};

use super::Window;
use crate::deadline::Deadline;
#[cfg(doc)]
use crate::error::Error;
use crate::error::Result;
use crate::word::wait_helping;

impl Window {
    /// Blocks until all operations on a rank are complete that were started, or that streams were given: at the target too.
    ///
    /// # Errors
    /// [`Error::NoSuchRank`](crate::Error::NoSuchRank); [`Error::Message`](crate::Error::Message) for the first that
    /// failed, also if its request was dropped, and after
    /// `timeout`: they go on then.
    pub fn flush(&self, rank: usize, timeout: Duration) -> Result<()> {
        self.part(rank)?;
        self.0.lanes.lanes[rank].flush(timeout)
    }

    /// As [`Window::flush`] for all ranks, one after the other, also after one has failed.
    ///
    /// # Errors
    /// As [`Window::flush`], for the first rank that failed.
    pub fn flush_all(&self, timeout: Duration) -> Result<()> {
        self.0.lanes.flush(&Deadline::after(timeout))
    }

    /// Holds a stream until all operations on a rank are complete that were started so far, or prepared in a batch that is
    /// there.
    ///
    /// # Errors
    /// [`Error::NoSuchRank`](crate::Error::NoSuchRank); [`Error::Message`](crate::Error::Message): the connection is broken,
    /// the stream is full or failed, or another stream waits for operations on this rank.
    pub fn flush_on_stream(&self, stream: &Stream, rank: usize) -> Result<()> {
        self.part(rank)?;
        self.0.lanes.lanes[rank].flush_on_stream(stream)
    }

    /// Blocks until the 64-bit word at `offset` of the own part satisfies a condition, and returns it. What was put before
    /// the [signal](super::Signal) is there then. A counter is best awaited with [`Cond::Geq`], which is cyclic. It says
    /// nothing of who signals: where that rank has died the wait goes on to its timeout, and
    /// [`Communicator::lost`](crate::Communicator::lost) tells.
    ///
    /// # Errors
    /// As [`Window::word64`] and [`wait_value64`](crate::wait_value64).
    pub fn wait_signal(&self, offset: usize, value: u64, cond: Cond, timeout: Duration) -> Result<u64> {
        let context = &self.0.comm.0.plane(self.0.lanes.near).0;
        wait_helping(&self.word64(offset)?, value, cond, timeout, || context.progress())
    }

    /// As [`Window::wait_signal`], and the stream waits: where the rank that was to signal has died, as long as the
    /// stream's limit for waits. A graph waits for the same value in each launch.
    ///
    /// # Errors
    /// As [`Window::word64`]; [`Error::Device`](crate::Error::Device) with the stream's refusals.
    pub fn wait_signal_on_stream(
        &self,
        stream: &Stream,
        offset: usize,
        value: u64,
        cond: Cond,
    ) -> Result<()> {
        let mut batch = Batch::new();
        self.wait_signal_in_batch(&mut batch, offset, value, cond)?;
        Ok(stream.submit(&mut batch)?)
    }

    /// As [`Window::wait_signal`], and the stream that the batch is submitted to waits.
    ///
    /// # Errors
    /// As [`Window::word64`].
    pub fn wait_signal_in_batch(
        &self,
        batch: &mut Batch,
        offset: usize,
        value: u64,
        cond: Cond,
    ) -> Result<()> {
        batch.wait_value64(&self.word64(offset)?, value, cond);
        // No completion is seen here, behind which the data would be visible by itself.
        if self.0.lanes.flushes() {
            batch.flush();
        }
        Ok(())
    }
}
