//! What a card tells its driver besides completions.

use std::fmt;
use std::sync::Arc;

use gdsync_device::GpuNudge;
use mlx5_ring::Syndrome;

/// An asynchronous event (`enum ibv_event_type`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AsyncEvent {
    /// This completion queue was full when a completion was to be written: it is dead.
    CqError(u32),
    /// This queue pair cannot report its completions.
    QpFatal(u32),
    /// A peer asked this queue pair for something it does not do.
    QpRequestError(u32),
    /// A peer named memory that it may not touch through this queue pair.
    QpAccessError(u32),
}

impl AsyncEvent {
    /// What a request of a peer raises that is refused so.
    pub(super) fn of_refusal(qpn: u32, syndrome: Syndrome) -> Self {
        if syndrome == Syndrome::REM_ACCESS_ERR {
            Self::QpAccessError(qpn)
        } else {
            Self::QpRequestError(qpn)
        }
    }
}

/// Who is told.
pub trait AsyncEvents: Send + Sync + fmt::Debug {
    /// Called after the step that it happened in, without locks.
    fn raise(&self, async_event: AsyncEvent);
}

/// Collects alarms until the HCA is let go, if anybody listens.
#[derive(Debug, Default)]
pub(crate) struct AsyncEventQueue {
    listener: Option<Arc<dyn AsyncEvents>>,
    raised: Vec<AsyncEvent>,
}

impl AsyncEventQueue {
    pub(super) fn new(listener: Option<Arc<dyn AsyncEvents>>) -> Self {
        Self { listener, raised: Vec::new() }
    }

    /// Whether a driver listens: the HCA stands for a card.
    pub(super) fn is_heard(&self) -> bool {
        self.listener.is_some()
    }

    pub(super) fn raise(&mut self, async_event: AsyncEvent) {
        if self.is_heard() {
            self.raised.push(async_event);
        }
    }

    /// What tells the listener, if there is anything to tell.
    pub(super) fn take(&mut self) -> Option<Arc<dyn GpuNudge>> {
        let listener = self.listener.clone().filter(|_| !self.raised.is_empty())?;
        Some(Arc::new(Told { listener, raised: std::mem::take(&mut self.raised) }))
    }
}

#[derive(Debug)]
struct Told {
    listener: Arc<dyn AsyncEvents>,
    raised: Vec<AsyncEvent>,
}

impl GpuNudge for Told {
    fn nudge(&self) {
        self.raised.iter().for_each(|&async_event| self.listener.raise(async_event));
    }
}
