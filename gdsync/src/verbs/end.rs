//! One end of a queue pair, send or receive: what completions and stream waits hold on to.

use std::fmt;
use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::Mutex;

use super::cq::CqInner;
use super::qp::QpCore;
use super::track::Tracker;
use crate::error::Error;
use crate::hca::Kicks;
use crate::memory::Word32;
use crate::stream::Source;

/// While it is alive, so are the queue pair and its completion queue.
pub(crate) struct QueueEnd {
    pub(crate) qp: Arc<QpCore>,
    pub(crate) cq: Arc<CqInner>,
    pub(crate) tracker: Arc<Tracker>,
    in_stream: Mutex<Weak<StreamUse>>,
}

/// What the operations of streams hold: as long as there is one, a stream may ring or wait here.
#[derive(Debug)]
struct StreamUse(Arc<QueueEnd>);

impl QueueEnd {
    pub(crate) fn new(qp: Arc<QpCore>, cq: Arc<CqInner>, tracker: Arc<Tracker>) -> Arc<Self> {
        Arc::new(Self { qp, cq, tracker, in_stream: Mutex::new(Weak::new()) })
    }

    /// The source that operations of a stream name.
    pub(crate) fn source(self: &Arc<Self>) -> Arc<dyn Source> {
        let mut slot = self.in_stream.lock();
        slot.upgrade().unwrap_or_else(|| {
            let fresh = Arc::new(StreamUse(self.clone()));
            *slot = Arc::downgrade(&fresh);
            fresh
        })
    }

    /// Why the queue cannot be reset now.
    pub(crate) fn owner(&self) -> Option<&'static str> {
        if self.tracker.is_prepared() && self.tracker.is_send {
            return Some("a prepared send that was neither posted nor dropped");
        }
        if self.cq.is_claimed() {
            return Some("a prepared wait that was neither posted nor dropped");
        }
        if self.in_stream.lock().strong_count() == 0 {
            return None;
        }
        if self.cq.is_awaited() {
            return Some("a stream that waits for its completions");
        }
        (self.tracker.is_send && self.tracker.outstanding() > 0).then_some("a stream that sends on it")
    }
}

impl fmt::Debug for QueueEnd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} queue of {:?}", self.tracker.name(), self.qp)
    }
}

impl Source for StreamUse {
    fn progress(&self) -> bool {
        self.0.qp.provider.progress()
    }

    fn signal(&self) {
        self.0.qp.provider.ring(self.0.qp.qpn);
    }

    fn finish(&self) {
        self.0.qp.provider.progress();
    }

    fn park(&self, ready: &dyn Fn() -> bool, timeout: Duration) {
        self.0.cq.park(ready, timeout);
    }

    fn fail(&self, reason: &Error) {
        self.0.qp.stop(reason);
    }

    fn attend(&self, kicker: Option<&Arc<dyn Kicks>>) {
        self.0.cq.attend_claimed(kicker);
    }

    fn release(&self, at: &Word32) {
        let end = &self.0;
        end.cq.poison(at, &end.tracker);
    }

    fn describe(&self) -> String {
        format!("a {} completion of {:?}", self.0.tracker.name(), self.0.qp)
    }
}
