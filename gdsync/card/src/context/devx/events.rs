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

/// The subscriptions to an object.
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
}

/// What the program has not read ends with the object.
impl Drop for Subscriptions {
    fn drop(&mut self) {
        for Subscription { cookie, pipe, .. } in self.0.get_mut() {
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
