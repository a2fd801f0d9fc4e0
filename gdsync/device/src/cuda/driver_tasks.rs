//! A thread that calls the driver for watchdogs, which must not block.
//!
//! While a thread frees memory or loads kernels, the driver blocks all others until every stream of the process is idle. The watchdog
//! that ends the waits of those streams must not block. So it leaves calls to a thread of the GPU, started on demand.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Weak};
use std::time::Duration;

use crate::Condvar;
use parking_lot::Mutex;

/// How long the thread stays without tasks.
const LINGER: Duration = Duration::from_millis(200);

/// Calls of the driver.
pub trait DriverTask: Send + Sync {
    /// Makes the calls.
    fn run(&self);
    /// [`DriverTask::run`] panicked.
    fn panicked(&self);
}

/// The driver tasks of a GPU.
#[derive(Default)]
pub(super) struct DriverTasks(Arc<Shared>);

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    more: Condvar,
    done: Condvar,
}

#[derive(Default)]
struct State {
    queue: VecDeque<Weak<dyn DriverTask>>,
    /// The task being run.
    current: Option<Weak<dyn DriverTask>>,
    running: bool,
}

impl DriverTasks {
    /// Queues a task.
    pub(super) fn take(&self, task: Weak<dyn DriverTask>) {
        let mut state = self.0.state.lock();
        state.queue.push_back(task);
        if std::mem::replace(&mut state.running, true) {
            self.0.more.notify_one();
            return;
        }
        let shared = self.0.clone();
        let started = std::thread::Builder::new().name("gdsync-driver".into()).spawn(move || shared.run());
        if let Err(error) = started {
            // The next one tries again.
            tracing::warn!(%error, "streams are not looked after: no thread");
            state.running = false;
        }
    }

    /// Removes a task; waits if it is being run.
    pub(super) fn end(&self, task: &Weak<dyn DriverTask>) {
        let mut state = self.0.state.lock();
        state.queue.retain(|other| !other.ptr_eq(task));
        while state.current.as_ref().is_some_and(|current| current.ptr_eq(task)) {
            self.0.done.wait(&mut state);
        }
    }
}

impl Shared {
    fn run(&self) {
        let mut state = self.state.lock();
        loop {
            let Some(task) = state.queue.pop_front() else {
                let timed_out = self.more.wait_for(&mut state, LINGER);
                if timed_out && state.queue.is_empty() {
                    state.running = false;
                    return;
                }
                continue;
            };
            state.current = Some(task.clone());
            drop(state);
            if let Some(task) = task.upgrade()
                && catch_unwind(AssertUnwindSafe(|| task.run())).is_err()
            {
                task.panicked();
            }
            state = self.state.lock();
            state.current = None;
            self.done.notify_all();
        }
    }
}
