//! Messages of libfabric, which carry the packets of links in place of TCP.
//!
//! A TCP connection between the two hosts stays the [line](super::tcp) of a link: it greets, proves the job's secret, carries the
//! names of the endpoints, and tells the end of the peer's process. No provider tells that by itself. Of a provider only messages
//! are asked; their order is restored here, and [credits](endpoint) keep a sender from overrunning the receive buffers.

use std::sync::Arc;

pub(crate) use endpoint::Endpoint;
pub(super) use endpoint::Received;
pub use survey::fabric_providers;

mod endpoint;
mod objects;
mod survey;

/// A link of an endpoint. Its two ends share it.
#[derive(Debug)]
pub(super) struct FabricLink {
    pub(super) endpoint: Arc<Endpoint>,
    /// Its number at this side.
    pub(super) id: u64,
}

impl Drop for FabricLink {
    fn drop(&mut self) {
        self.endpoint.disconnect(self.id);
    }
}

#[cfg(test)]
mod tests;
