//! One end of a queue pair, send or receive: what completions and stream waits hold on to.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use super::cq::CqInner;
use super::qp::QpCore;
use super::track::Tracker;
use crate::error::Error;
use crate::stream::Source;

/// While it is alive, so are the queue pair and its completion queue.
pub(crate) struct QueueEnd {
    pub(crate) qp: Arc<QpCore>,
    pub(crate) cq: Arc<CqInner>,
    pub(crate) tracker: Arc<Tracker>,
}

impl fmt::Debug for QueueEnd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} queue of {:?}", self.tracker.name(), self.qp)
    }
}

impl Source for QueueEnd {
    fn progress(&self) -> bool {
        self.qp.provider.progress()
    }

    fn signal(&self) {
        self.qp.provider.ring(self.qp.qpn);
    }

    fn finish(&self) {
        self.qp.provider.progress();
    }

    fn park(&self, ready: &dyn Fn() -> bool, timeout: Duration) {
        self.cq.park(ready, timeout);
    }

    fn fail(&self, reason: &Error) {
        self.qp.stop(reason);
        self.cq.abandon();
    }

    fn describe(&self) -> String {
        format!("a {} completion of {:?}", self.tracker.name(), self.qp)
    }
}
