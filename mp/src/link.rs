//! Connecting every rank with every other.

use gdsync::verbs::{Pd, Qp, QpAddress, QpBuilder};

use crate::error::{Error, Result};

/// The queue pair to one rank, or for the own rank two that are connected to each other.
#[derive(Debug)]
pub(crate) struct Link {
    pub(crate) rank: usize,
    pub(crate) send: Qp,
    pub(crate) recv: Qp,
}

impl Link {
    /// Links to all ranks, not yet connected.
    pub(crate) fn all(
        pd: &Pd,
        rank: usize,
        size: usize,
        build: impl Fn(&Pd) -> QpBuilder,
    ) -> Result<Vec<Self>> {
        let link = |peer| {
            let send = build(pd).build()?;
            let recv = if peer == rank { build(pd).build()? } else { send.clone() };
            Ok(Self { rank: peer, send, recv })
        };
        (0..size).map(link).collect()
    }

    /// What the other ranks need of these links: one address for each.
    pub(crate) fn table(links: &[Self]) -> Vec<u8> {
        links.iter().flat_map(|link| link.send.address().to_bytes()).collect()
    }

    /// Connects to the rank whose `table` this is; `rank` is the own one, of `size`.
    pub(crate) fn connect(&self, table: &[u8], rank: usize, size: usize) -> Result<()> {
        let (addresses, rest) = table.as_chunks::<{ QpAddress::BYTES }>();
        let theirs = addresses.get(rank).filter(|_| addresses.len() == size && rest.is_empty());
        let theirs = theirs.ok_or_else(|| {
            let fix = "run the same version and number of ranks everywhere";
            Error::bootstrap(format!("rank {}", self.rank), "its address table has the wrong size", fix)
        })?;
        let failed = |source| Error::Message { rank: self.rank, operation: "connect", source };
        if self.rank == rank {
            self.recv.connect(self.send.address()).map_err(failed)?;
            return self.send.connect(self.recv.address()).map_err(failed);
        }
        let theirs = QpAddress::from_bytes(theirs).map_err(failed)?;
        self.send.connect(theirs).map_err(failed)
    }
}
