//! The one card, and whom its events concern.

use std::collections::HashMap;
use std::ffi::c_int;
use std::sync::{Arc, OnceLock};

use gdsync::hca::{AsyncEvent, AsyncEvents, Card, SoftHcaConfig};
use parking_lot::Mutex;
use rdma_core_sys::verbs::{ibv_cq, ibv_event_type, ibv_qp};

use crate::complaint::complain;
use crate::devx;
use crate::events::Events;

/// The card of this process. It is never given up: its address stays the same, as that of a port does.
pub(crate) struct Hca {
    pub(crate) card: Card,
    pub(crate) roster: Arc<Roster>,
}

static HCA: OnceLock<Option<Hca>> = OnceLock::new();

impl Hca {
    /// The card, if it has been started.
    pub(crate) fn started() -> Option<&'static Self> {
        HCA.get()?.as_ref()
    }

    /// Started by the first call.
    ///
    /// # Errors
    /// `ENODEV`.
    pub(crate) fn get() -> Result<&'static Self, c_int> {
        let started = HCA.get_or_init(|| {
            let roster = Arc::new(Roster::default());
            let config = SoftHcaConfig::from_env().map(|config| SoftHcaConfig { strict: true, ..config });
            match config.and_then(|config| Card::start(&config, roster.clone())) {
                Ok(card) => Some(Self { card, roster }),
                Err(error) => {
                    complain(format!("the software HCA does not start: {error}"));
                    None
                }
            }
        });
        started.as_ref().ok_or(libc::ENODEV)
    }
}

/// An object that events may concern.
#[derive(Clone, Debug)]
pub(crate) struct Concerned {
    /// Where its context gets them.
    pub(crate) events: Arc<Events>,
    /// Its address.
    pub(crate) element: usize,
}

/// The objects by their numbers.
#[derive(Debug, Default)]
pub(crate) struct Roster {
    qps: Mutex<HashMap<u32, Concerned>>,
    cqs: Mutex<HashMap<u32, Concerned>>,
}

impl Roster {
    pub(crate) fn add_qp(&self, qpn: u32, concerned: Concerned) {
        self.qps.lock().insert(qpn, concerned);
    }

    pub(crate) fn add_cq(&self, cqn: u32, concerned: Concerned) {
        self.cqs.lock().insert(cqn, concerned);
    }

    /// Runs `f` on the queue pair of this number, which stays meanwhile.
    pub(crate) fn with_qp<T>(&self, qpn: u32, f: impl FnOnce(*mut ibv_qp) -> Option<T>) -> Option<T> {
        let qps = self.qps.lock();
        f(qps.get(&qpn)?.element as *mut ibv_qp)
    }

    /// As [`Roster::with_qp`], of a completion queue.
    pub(crate) fn with_cq<T>(&self, cqn: u32, f: impl FnOnce(*mut ibv_cq) -> T) -> Option<T> {
        let cqs = self.cqs.lock();
        Some(f(cqs.get(&cqn)?.element as *mut ibv_cq))
    }

    /// Nothing concerns it any more; returns when what was got of it is acknowledged.
    pub(crate) fn remove_qp(&self, qpn: u32) {
        let concerned = self.qps.lock().remove(&qpn);
        concerned.inspect(|concerned| concerned.events.forget(concerned.element));
    }

    /// As [`Roster::remove_qp`].
    pub(crate) fn remove_cq(&self, cqn: u32) {
        let concerned = self.cqs.lock().remove(&cqn);
        concerned.inspect(|concerned| concerned.events.forget(concerned.element));
    }
}

impl AsyncEvents for Roster {
    fn raise(&self, alarm: AsyncEvent) {
        devx::raise(alarm);
        let (objects, number, event) = match alarm {
            AsyncEvent::CqError(cqn) => (&self.cqs, cqn, ibv_event_type::IBV_EVENT_CQ_ERR),
            AsyncEvent::QpFatal(qpn) => (&self.qps, qpn, ibv_event_type::IBV_EVENT_QP_FATAL),
            AsyncEvent::QpRequestError(qpn) => (&self.qps, qpn, ibv_event_type::IBV_EVENT_QP_REQ_ERR),
            AsyncEvent::QpAccessError(qpn) => (&self.qps, qpn, ibv_event_type::IBV_EVENT_QP_ACCESS_ERR),
        };
        // Under the lock, so that the object is not gone meanwhile.
        if let Some(Concerned { events, element }) = objects.lock().get(&number) {
            events.push(*element, event);
        }
    }
}
