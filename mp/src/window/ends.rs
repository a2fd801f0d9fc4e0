//! Connecting the windows of every rank with every other.

use gdsync::verbs::{Qp, QpAddress, QpBuilder};

use crate::error::{Error, Result};

/// The queue pair to one rank, or for the own rank two that are connected to each other.
pub(super) struct Ends {
    pub(super) rank: usize,
    pub(super) qp: Qp,
    pub(super) far: Qp,
}

impl Ends {
    /// Ends to `size` ranks, not yet connected; `rank` is the own one.
    pub(super) fn all(rank: usize, size: usize, build: impl Fn() -> QpBuilder) -> Result<Vec<Self>> {
        let ends = |peer| {
            let qp = build().build()?;
            let far = if peer == rank { build().build()? } else { qp.clone() };
            Ok(Self { rank: peer, qp, far })
        };
        (0..size).map(ends).collect()
    }

    /// What the other ranks need of these: one address for each.
    pub(super) fn table(all: &[Self]) -> Vec<u8> {
        all.iter().flat_map(|ends| ends.qp.address().to_bytes()).collect()
    }

    /// Connects to the rank whose `table` this is; `rank` is the own one, of `size`.
    pub(super) fn connect(&self, table: &[u8], rank: usize, size: usize) -> Result<()> {
        let (addresses, rest) = table.as_chunks::<{ QpAddress::BYTES }>();
        let theirs = addresses.get(rank).filter(|_| addresses.len() == size && rest.is_empty());
        let theirs = theirs.ok_or_else(|| {
            let fix = "run the same version and number of ranks everywhere";
            Error::bootstrap(format!("rank {}", self.rank), "its address table has the wrong size", fix)
        })?;
        let failed = |source| Error::Message { rank: self.rank, operation: "connect a window", source };
        let theirs = QpAddress::from_bytes(theirs).map_err(failed)?;
        if self.rank == rank {
            self.far.connect(self.qp.address()).map_err(failed)?;
            return self.qp.connect(self.far.address()).map_err(failed);
        }
        self.qp.connect(theirs).map_err(failed)
    }
}
