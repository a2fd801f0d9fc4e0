//! Looking at messages before they are received.

use std::ops::Range;
use std::sync::{Arc, OnceLock};

use super::engine::{Arrived, status};
use super::matching::{Source, Tag};
use super::request::{Incoming, Request, Status};
use super::{Shared, Tagged};
use crate::collective::check_range;
use crate::communicator::Registration;
use crate::error::Result;

/// A message that is here and is nobody else's: see [`Tagged::improbe`]. Dropped without a receive it goes back to its place
/// among the others.
#[derive(Debug)]
#[must_use = "dropped, the message goes back"]
pub struct Message {
    shared: Arc<Shared>,
    status: Status,
    arrived: Option<Arrived>,
}

impl Message {
    /// Who sent it, its tag, and its length.
    pub fn status(&self) -> Status {
        self.status
    }

    /// Starts to receive it into the bytes `range` of `buffer`.
    ///
    /// # Errors
    /// [`Error::Device`](crate::Error::Device) for a range outside the buffer: the message goes back then.
    pub fn irecv(mut self, buffer: &Registration, range: Range<usize>) -> Result<Request> {
        check_range(buffer, &range)?;
        let (shared, outcome) = (self.shared.clone(), Arc::new(OnceLock::new()));
        let incoming = Incoming { outcome: outcome.clone(), buffer: buffer.clone(), range };
        if let Some(arrived) = self.arrived.take() {
            shared.engine.lock().give(arrived, incoming);
        }
        Ok(Request { shared, outcome, rank: Some(self.status.rank), place: None })
    }
}

impl Drop for Message {
    fn drop(&mut self) {
        if let Some(arrived) = self.arrived.take() {
            self.shared.engine.lock().put_back(arrived);
        }
    }
}

impl Tagged {
    /// The message that a receive would get now, which stays where it is; `None` if there is none.
    ///
    /// # Errors
    /// As [`Tagged::irecv`].
    pub fn iprobe(&self, source: impl Into<Source>, tag: impl Into<Tag>) -> Result<Option<Status>> {
        let key = self.key(source.into(), tag.into())?;
        self.0.engine.lock().find(key)
    }

    /// As [`Tagged::iprobe`], and takes the message: no other receive gets it, so that it can be received into as much memory as
    /// it needs.
    ///
    /// # Errors
    /// As [`Tagged::irecv`].
    pub fn improbe(&self, source: impl Into<Source>, tag: impl Into<Tag>) -> Result<Option<Message>> {
        let key = self.key(source.into(), tag.into())?;
        let arrived = self.0.engine.lock().take_out(key)?;
        let message =
            |arrived| Message { shared: self.0.clone(), status: status(&arrived), arrived: Some(arrived) };
        Ok(arrived.map(message))
    }
}
