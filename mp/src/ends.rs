//! Queue pairs to other ranks: how they are made and find each other.

use gdsync::verbs::{Qp, QpAddress, QpBuilder};

use crate::bootstrap::Exchange;
use crate::deadline::Deadline;
use crate::error::{Error, Result};

/// Acknowledge timeout of all queue pairs: about a second, eight times before a rank is given up. On a busy machine it may have
/// nobody but a thread of the device to answer, and one that is only slow must not be given up.
pub(crate) const ACK_TIMEOUT: u8 = 18;

/// The queue pair to one rank, or for the own rank two that are connected to each other.
#[derive(Debug)]
pub(crate) struct Ends {
    /// Where what this rank sends leaves.
    pub(crate) send: Qp,
    /// Where what is sent to this rank arrives: the same, but for the own rank.
    pub(crate) recv: Qp,
}

impl Ends {
    /// Not yet connected; to the own rank if `is_own`.
    pub(crate) fn build(is_own: bool, build: impl Fn() -> QpBuilder) -> gdsync::Result<Self> {
        let send = build().build()?;
        let recv = if is_own { build().build()? } else { send.clone() };
        Ok(Self { send, recv })
    }

    /// What the other rank needs of it.
    pub(crate) fn address(&self) -> QpAddress {
        self.send.address()
    }

    /// Connects to the other rank, which has this address; those to the own rank to each other.
    pub(crate) fn connect(&self, theirs: QpAddress) -> gdsync::Result<()> {
        if self.send.qpn() == self.recv.qpn() {
            return self.send.connect(theirs);
        }
        self.recv.connect(self.send.address())?;
        self.send.connect(self.recv.address())
    }

    /// Ends what is under way: see [`Qp::stop`].
    pub(crate) fn stop(&self, error: &gdsync::Error) {
        self.send.stop(error);
        self.recv.stop(error);
    }

    /// Whether a stream waits for completions of either.
    pub(crate) fn is_awaited(&self) -> bool {
        self.send.is_awaited() || self.recv.is_awaited()
    }

    /// Has the flight recorder name the own rank and the other one.
    pub(crate) fn name_ranks(&self, own: usize, other: usize) {
        self.send.name_ranks(own, other);
        self.recv.name_ranks(own, other);
    }
}

/// What rank `from` has for this one in its table, which has `N` bytes for each of `size` ranks.
pub(crate) fn row<const N: usize>(table: &[u8], from: usize, rank: usize, size: usize) -> Result<&[u8; N]> {
    let (rows, rest) = table.as_chunks::<N>();
    rows.get(rank).filter(|_| rows.len() == size && rest.is_empty()).ok_or_else(|| {
        let fix = "run the same version and number of ranks everywhere";
        Error::bootstrap(format!("rank {from}"), "its address table has the wrong size", fix)
    })
}

/// What this rank has made and connected, if all ranks have.
pub(crate) fn agree<T>(
    bootstrap: &mut dyn Exchange,
    made: Result<T>,
    what: &str,
    deadline: &Deadline,
) -> Result<T> {
    let answers = bootstrap.allgather(&[u8::from(made.is_ok())], deadline.remaining());
    let made = made?;
    match answers?.iter().position(|answer| answer[..] != [1]) {
        Some(rank) => {
            let (what, fix) = (format!("it could not connect {what}"), "see the error of that rank");
            Err(Error::bootstrap(format!("rank {rank}"), what, fix))
        }
        None => Ok(made),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_have_a_row_for_each_rank() {
        let table = [1, 2, 3, 4, 5, 6];
        assert_eq!(row::<2>(&table, 7, 1, 3).unwrap(), &[3, 4]);
        for (table, size) in [(&table[..], 2), (&table[..], 4), (&table[..5], 3), (&table[..5], 2), (&[], 3)]
        {
            let error = row::<2>(table, 7, 1, size).unwrap_err().to_string();
            assert!(error.contains("rank 7") && error.contains("wrong size"), "{error}");
        }
    }
}
