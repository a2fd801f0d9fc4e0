//! Events of objects made by DevX: cookies, written to the channels that the program subscribed.

use std::sync::{Arc, Weak};

use gdsync_device::GpuNudge;
use gdsync_soft::AsyncEvent;
use parking_lot::Mutex;
use rdma_core_sys::mlx5::ifc::event;

use crate::events::EventPipe;
use crate::hca::Listener;

/// What the program is told of an object.
#[derive(Debug)]
struct Subscription {
    /// `MLX5_EVENT_TYPE_*`
    kind: u16,
    cookie: u64,
    pipe: Weak<EventPipe>,
}

/// The subscriptions to an object; none once it has ended: the HCA reports outside its lock, so an event may come later.
#[derive(Debug, Default)]
pub(super) struct Subscriptions(Mutex<Vec<Subscription>>);

impl Subscriptions {
    pub(super) fn add(&self, kinds: &[u16], cookie: u64, pipe: &Arc<EventPipe>) {
        let new = kinds.iter().map(|&kind| Subscription { kind, cookie, pipe: Arc::downgrade(pipe) });
        self.0.lock().extend(new);
    }

    fn send(&self, kind: u16) {
        for subscription in self.0.lock().iter().filter(|subscription| subscription.kind == kind) {
            if let Some(pipe) = subscription.pipe.upgrade() {
                pipe.send(&subscription.cookie.to_ne_bytes());
            }
        }
    }

    /// The object has ended, and with it what the program has not read.
    pub(super) fn finish(&self) {
        for Subscription { cookie, pipe, .. } in std::mem::take(&mut *self.0.lock()) {
            pipe.upgrade().map(|pipe| pipe.take_back(|record| record == cookie.to_ne_bytes()));
        }
    }
}

impl Listener for Subscriptions {
    fn raise(&self, event: AsyncEvent) {
        self.send(match event {
            AsyncEvent::CqError(_) => event::CQ_ERROR,
            AsyncEvent::QpFatal(_) => event::WQ_CATAS_ERROR,
            AsyncEvent::QpRequestError(_) => event::WQ_INVAL_REQ_ERROR,
            AsyncEvent::QpAccessError(_) => event::WQ_ACCESS_ERROR,
            AsyncEvent::QpLastWqeReached(_) => event::SRQ_LAST_WQE,
            AsyncEvent::SrqLimitReached(_) => event::SRQ_RQ_LIMIT,
        });
    }
}

/// Completions of a queue that is armed.
impl GpuNudge for Subscriptions {
    fn nudge(&self) {
        self.send(event::COMP);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_after_the_end_of_their_object_are_not_sent() {
        let (pipe, program) = EventPipe::new(8).map(|(pipe, program)| (Arc::new(pipe), program)).unwrap();
        let [ended, new] = [(); 2].map(|()| Subscriptions::default());
        ended.add(&[event::COMP], 7, &pipe);
        ended.nudge();
        ended.finish();
        ended.nudge();
        // An object at the same address has the same cookie.
        new.add(&[event::COMP], 7, &pipe);
        new.nudge();
        drop(ended);
        let mut records = [0; 16];
        assert_eq!(rustix::io::read(&program, &mut records), Ok(8), "one record, of the new object");
        assert_eq!(pipe.take_back(|_| true), 0);
    }
}
