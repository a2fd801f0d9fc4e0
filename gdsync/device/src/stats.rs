//! What the software HCA counts.

/// Counters of a software HCA since it was opened.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct HcaStats {
    /// Doorbells taken.
    pub doorbells: u64,
    /// Send WQEs fetched.
    pub wqes: u64,
    /// Packets sent, among them those that a fault plan dropped or holds back.
    pub packets_sent: u64,
    /// Packets received.
    pub packets_received: u64,
    /// Packets that a fault plan dropped, duplicated, reordered or delayed.
    pub packets_faulted: u64,
    /// Packets that arrived again, or out of order.
    pub packets_discarded: u64,
    /// Times a sender went back to an earlier packet.
    pub retransmissions: u64,
    /// Messages received by reference: a copy engine moved their payload.
    pub by_reference: u64,
    /// Messages received by cross-memory attach: the CPU read their payload in the sender's process.
    pub by_cma: u64,
    /// References that could not be followed, so that the payload was sent after all.
    pub references_refused: u64,
    /// Messages that found no receive.
    pub rnr_naks: u64,
    /// Completion queues that overran.
    pub cq_overruns: u64,
    /// Things a card would punish.
    pub violations: u64,
    /// The last of them.
    pub last_violation: Option<&'static str>,
}

impl HcaStats {
    /// Counts and reports something a card would punish.
    pub fn violation(&mut self, what: &'static str) {
        self.violations += 1;
        self.last_violation = Some(what);
        tracing::warn!(what, "violation of the ring formats");
    }
}
