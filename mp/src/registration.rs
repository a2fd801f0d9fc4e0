//! Registered memory, and ranges of it as pieces of messages.

use std::fmt;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

use gdsync::memory::Memory;
use gdsync::verbs::{Mr, Sge};

use crate::error::Result;

/// A piece of a message: a range of registered memory.
pub type Piece<'a> = (&'a Registration, Range<usize>);

/// Whose protection domains memory is registered with: a communicator has its own, but for those that are built beside another one.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct DomainId(u64);

impl DomainId {
    pub(crate) fn new() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Self(NEXT.fetch_add(1, Ordering::Relaxed))
    }
}

/// Memory that messages can be sent from and received into. Clones share the registration.
#[derive(Clone)]
pub struct Registration {
    mr: Mr,
    /// The registration with the device for ranks of the same host, if the communicator has one.
    intra_host: Option<Mr>,
    domain: DomainId,
}

impl fmt::Debug for Registration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Registration({} bytes at {:#x})", self.memory().len(), self.memory().addr())
    }
}

impl Registration {
    pub(crate) fn new(mr: Mr, intra_host: Option<Mr>, domain: DomainId) -> Self {
        Self { mr, intra_host, domain }
    }

    /// Refuses the registration of another communicator: its keys mean nothing to the queue pairs of this one.
    #[inline]
    pub(crate) fn check_domain(&self, domain: DomainId) -> gdsync::Result<()> {
        if self.domain == domain { Ok(()) } else { Err(of_another()) }
    }

    /// A part of the memory. It keeps the whole registered. Ranges count from the start of the part.
    ///
    /// # Errors
    /// [`Error::Device`](crate::Error::Device) when the part does not lie inside.
    pub fn slice(&self, offset: usize, len: usize) -> Result<Self> {
        Ok(self.part(offset, len)?)
    }

    pub(crate) fn part(&self, offset: usize, len: usize) -> gdsync::Result<Self> {
        let intra_host = self.intra_host.as_ref().map(|mr| mr.slice(offset, len)).transpose()?;
        Ok(Self { mr: self.mr.slice(offset, len)?, intra_host, domain: self.domain })
    }

    /// The memory.
    pub fn memory(&self) -> &Memory {
        self.mr.memory()
    }

    /// Whether this handle alone keeps the memory registered.
    pub(crate) fn is_only(&self) -> bool {
        self.mr.is_only() && self.intra_host.as_ref().is_none_or(Mr::is_only)
    }

    /// The registration with the intra-host device, or with the other one.
    #[inline]
    pub(crate) fn mr(&self, intra_host: bool) -> &Mr {
        self.intra_host.as_ref().filter(|_| intra_host).unwrap_or(&self.mr)
    }

    /// A range as one of the devices addresses it.
    #[inline]
    pub(crate) fn sge(&self, intra_host: bool, range: &Range<usize>) -> gdsync::Result<Sge> {
        let len = range.end.checked_sub(range.start).ok_or_else(|| reversed(range))?;
        self.mr(intra_host).sge(range.start, len)
    }

    /// Refuses a range that does not lie inside.
    pub(crate) fn check_range(&self, range: &Range<usize>) -> gdsync::Result<()> {
        let len = range.end.checked_sub(range.start).ok_or_else(|| reversed(range))?;
        let (offset, size) = (range.start, self.memory().len());
        match size.checked_sub(offset).is_some_and(|rest| len <= rest) {
            true => Ok(()),
            false => Err(gdsync::Error::OutOfBounds { offset, len, size }),
        }
    }
}

#[cold]
fn of_another() -> gdsync::Error {
    gdsync::Error::InvalidArgument {
        what: "the buffer",
        value: "registered with another communicator".into(),
        expected: "one that is registered with this one (Communicator::register; after a shrink, again)",
    }
}

#[cold]
fn reversed(range: &Range<usize>) -> gdsync::Error {
    let (value, expected) = (format!("{range:?}"), "one that does not end before it starts");
    gdsync::Error::InvalidArgument { what: "the range of the buffer", value, expected }
}

/// Bytes of a message that the CPU can copy: the sum of its pieces; `None` if one is in memory of a GPU.
pub(crate) fn host_len(pieces: &[Piece<'_>]) -> Option<usize> {
    pieces.iter().try_fold(0_usize, |len, (buffer, range)| {
        if buffer.memory().is_host() { len.checked_add(range.len()) } else { None }
    })
}
