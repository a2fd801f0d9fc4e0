//! Where datagrams go.

use std::fmt;

use gdsync_device::Gid;
use mlx5_ring::AddressVector;

/// The addresses of the network that a card is on: where its datagrams go.
pub trait Network: Send + Sync + fmt::Debug {
    /// The GID by which the card at an address is named ([`SoftHcaConfig::gid`](crate::SoftHcaConfig::gid)); `None` drops the datagram.
    fn destination(&self, to: &AddressVector) -> Option<Gid>;
    /// The own GID of an index.
    fn source(&self, index: u8) -> Gid;
    /// The own LID, on InfiniBand. 0 is RoCE, where every datagram has a GRH.
    fn lid(&self) -> u16;
}
