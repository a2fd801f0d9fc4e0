//! What the bytes of one buffer take to a rank.

use std::fmt;
use std::ops::Range;

use gdsync::verbs::{Qp, TransferPath};

use super::Path;
use crate::communicator::{Communicator, Registration};
use crate::error::Result;
use crate::slots::fitting;

/// What bytes of a buffer take to a rank, and why: see [`Communicator::path_of`](crate::Communicator::path_of) and
/// [`Window::path_of`](crate::Window::path_of). It is written as `software HCA over shared memory: the rank is on this host;
/// copied by the CPU: it is host memory`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BufferPath {
    path: Path,
    carriage: TransferPath,
}

impl BufferPath {
    /// The device that they go through. [`Path::has_slots`] is whether these bytes go through a slot of shared memory instead
    /// while slots are open: they are short and in memory that the CPU reaches.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What takes them out of the buffer, for the device.
    pub fn transfer_path(&self) -> &TransferPath {
        &self.carriage
    }

    /// Of the bytes `range` of a buffer, which leave by this queue pair of the device of `path`.
    pub(crate) fn new(path: Path, qp: &Qp, buffer: &Registration, range: &Range<usize>) -> Result<Self> {
        let mr = buffer.on(path.is_near);
        let len = range.end.saturating_sub(range.start);
        mr.sge(range.start, len)?;
        Ok(Self { carriage: qp.transfer_path(mr, len)?, path })
    }
}

impl fmt::Display for BufferPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}; {}", self.path, self.carriage)
    }
}

impl Communicator {
    /// What a message of the bytes `range` of `buffer` would take to a rank now, and why: which device
    /// ([`Communicator::path`]), and for the device the card, the CPU or a copy engine, directly or staged. It depends on where
    /// the buffer is and on the length; a message of several pieces is not left to a copy engine of the receiver. A receiver that
    /// cannot fetch a buffer says so at its first message, which is staged then, as later ones.
    ///
    /// # Errors
    /// [`Error::NoSuchRank`](crate::Error::NoSuchRank); [`Error::Device`](crate::Error::Device) for a range outside the buffer.
    pub fn path_of(&self, buffer: &Registration, range: Range<usize>, rank: usize) -> Result<BufferPath> {
        let mut path = self.path(rank)?.clone();
        path.has_slots &= fitting(&[(buffer, range.clone())]).is_some();
        BufferPath::new(path, &self.peer(rank)?.link.ends.send, buffer, &range)
    }
}
