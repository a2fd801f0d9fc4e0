//! What the next messages will touch, brought into the cache of this core while there is nothing else to do. A line that
//! another core or a GPU has written takes 0.1 to 0.15 us, and a message would wait for several of them.

use super::keys::Keys;
use super::qp::SoftQp;
use crate::mlx5::{self, DecodedOp, DecodedPayload};

impl SoftQp {
    /// Looks at the next request, whether or not it is rung or even written yet, and at what it sends; likewise at the next receive.
    /// Nothing is believed of it: these are hints.
    pub(super) fn look_ahead(&self, keys: &Keys) {
        if self.rings.sq.is_host() {
            self.look_at_send(keys);
        }
        for sge in self.next_receive() {
            if let Ok((memory, at)) = keys.local(sge.lkey, self.rings.request.pdn, sge.addr, 1, true) {
                memory.prefetch_to_write(at);
            }
        }
    }

    fn look_at_send(&self, keys: &Keys) {
        let wqe = self.rings.fetch(self.req.head());
        let sends = match mlx5::decode_body(&wqe.ctrl, wqe.as_bytes()) {
            Ok(DecodedOp::Send { payload, .. } | DecodedOp::Write { payload, .. }) => payload,
            _ => return,
        };
        let DecodedPayload::Sges(list) = sends else { return };
        for sge in list.iter(wqe.as_bytes()) {
            if let Ok((memory, at)) = keys.local(sge.lkey, self.rings.request.pdn, sge.addr, 1, false) {
                memory.prefetch(at);
            }
        }
    }
}
