//! Asynchronous events of a card, and their delivery to its owner.

use std::fmt;
use std::sync::Arc;

use gdsync_device::GpuNudge;
use mlx5_ring::Syndrome;

/// An asynchronous event (`enum ibv_event_type`), with the number of the queue it concerns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AsyncEvent {
    /// The completion queue overran and is dead (`IBV_EVENT_CQ_ERR`).
    CqError(u32),
    /// The queue pair cannot report its completions (`IBV_EVENT_QP_FATAL`).
    QpFatal(u32),
    /// A peer sent an invalid request (`IBV_EVENT_QP_REQ_ERR`).
    QpRequestError(u32),
    /// A peer's request violated access rights (`IBV_EVENT_QP_ACCESS_ERR`).
    QpAccessError(u32),
    /// A queue pair in ERR takes nothing more from its shared receive queue (`IBV_EVENT_QP_LAST_WQE_REACHED`).
    QpLastWqeReached(u32),
    /// A shared receive queue has fewer receives than its limit (`IBV_EVENT_SRQ_LIMIT_REACHED`).
    SrqLimitReached(u32),
}

impl AsyncEvent {
    /// The event for a peer's request refused with `syndrome`.
    pub(crate) fn of_refusal(qpn: u32, syndrome: Syndrome) -> Self {
        if syndrome == Syndrome::REM_ACCESS_ERR {
            Self::QpAccessError(qpn)
        } else {
            Self::QpRequestError(qpn)
        }
    }
}

/// Receives asynchronous events.
pub trait AsyncEvents: Send + Sync + fmt::Debug {
    /// Called after the step in which the event happened, without locks.
    fn raise(&self, async_event: AsyncEvent);
}

/// Events of the current step; dropped if there is no listener.
#[derive(Debug, Default)]
pub(crate) struct AsyncEventQueue {
    listener: Option<Arc<dyn AsyncEvents>>,
    raised: Vec<AsyncEvent>,
}

impl AsyncEventQueue {
    pub(crate) fn new(listener: Option<Arc<dyn AsyncEvents>>) -> Self {
        Self { listener, raised: Vec::new() }
    }

    /// Whether there is a listener, that is, whether the HCA acts as a card.
    pub(crate) fn has_listener(&self) -> bool {
        self.listener.is_some()
    }

    pub(crate) fn raise(&mut self, async_event: AsyncEvent) {
        if self.has_listener() {
            self.raised.push(async_event);
        }
    }

    /// A nudge that delivers the collected events; `None` if there are none.
    pub(crate) fn take(&mut self) -> Option<Arc<dyn GpuNudge>> {
        let listener = self.listener.clone().filter(|_| !self.raised.is_empty())?;
        Some(Arc::new(Delivery { listener, raised: std::mem::take(&mut self.raised) }))
    }
}

#[derive(Debug)]
struct Delivery {
    listener: Arc<dyn AsyncEvents>,
    raised: Vec<AsyncEvent>,
}

impl GpuNudge for Delivery {
    fn nudge(&self) {
        self.raised.iter().for_each(|&async_event| self.listener.raise(async_event));
    }
}
