//! The thread of a host engine: runs what is submitted, until the engine fails.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use super::shared::Shared;
use crate::stream::execute::{Runner, execute, message_of};
use crate::stream::op::{Op, Ops, Source};
use gdsync_device::error::Error;
use gdsync_device::recorder::{By, Log};

impl Shared {
    /// The life of the thread: until the engine failed and all that was pending is dropped.
    pub(super) fn work(&self) {
        let mut helped = None;
        while let Some(ops) = self.next() {
            self.run(ops, &mut helped);
            if self.completed() + 1 == self.submitted() {
                self.finish(&mut helped);
            }
            self.retire();
        }
    }

    /// A doorbell after a wait does what the device put off; where none comes soon, this does.
    fn finish(&self, helped: &mut Option<Arc<dyn Source>>) {
        if let Some(source) = helped.take() {
            self.guarded(|| source.finish());
        }
    }

    /// Runs a submission, and drops what is left of it when the engine fails.
    fn run(&self, ops: Ops, helped: &mut Option<Arc<dyn Source>>) {
        let mut ops = ops.into_iter().enumerate();
        while !self.failed()
            && let Some((position, op)) = ops.next()
        {
            self.advance(position);
            let source = match &op {
                Op::Await(source, _) => Some(source.clone()),
                Op::HostFn(_) | Op::Wait32 { .. } | Op::Wait64 { .. } => {
                    self.finish(helped);
                    None
                }
                Op::Trigger(..) => {
                    *helped = None;
                    None
                }
                _ => None,
            };
            self.guarded(|| self.step(op));
            *helped = source.or(helped.take());
        }
        // In this order: a failure that found these sources is seen, and one that comes later finds none.
        let sources = self.take_running();
        if self.failed() {
            self.await_release();
        }
        self.guarded(|| drop(ops));
        self.guarded(|| drop(sources));
    }

    /// Calls foreign code. A panic in it fails the engine, but does not end the thread, which others wait for.
    fn guarded(&self, f: impl FnOnce()) {
        if let Err(panic) = catch_unwind(AssertUnwindSafe(f)) {
            let message = message_of(panic.as_ref());
            self.fail(Error::HostFnPanicked { stream: self.config.name.clone(), message });
        }
    }

    fn step(&self, op: Op) {
        if let Err(unsatisfied) = execute(op, self) {
            self.fail(unsatisfied.error(&self.config.name, self.config.wait_limit));
        }
    }
}

impl Runner for Shared {
    fn failed(&self) -> bool {
        self.failed()
    }

    fn released(&self) -> bool {
        self.released()
    }

    fn left(&self, waited: Duration) -> Duration {
        self.config.wait_limit.saturating_sub(waited)
    }

    fn log(&self) -> (&Log, By) {
        (&self.log, By::HostStream)
    }

    fn spin(&self) -> Duration {
        self.config.spin
    }

    fn nap(&self, nap: Duration) {
        self.nap(nap);
    }
}
