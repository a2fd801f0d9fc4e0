//! Waits of the CPU for completions.

use std::time::{Duration, Instant};

use super::CqInner;
use gdsync_device::error::{Error, Result};
use gdsync_device::recorder::{Awaited, By, Hold, NOTED_AFTER, Queue};
use gdsync_shm::Backoff;

/// The longest rest between two looks at the queue; what is waited for wakes the sleeper long before.
const PARK: Duration = Duration::from_millis(5);

impl CqInner {
    /// A wait for the next completion to be polled.
    pub(super) fn awaits_next(&self) -> Awaited {
        let state = self.state.lock();
        match &*state.queues {
            [queue] if state.attached == 1 => queue.awaits(state.poll_next),
            _ => Awaited {
                queue: Queue::Shared,
                device: self.recorder.device(),
                qpn: self.cqn(),
                number: state.poll_next,
                value: 0,
                posted: self.room.in_use() + state.freed,
                completed: state.reaped,
            },
        }
    }

    /// Waits unless `ready`, until something completes or for `timeout`: asleep, or awake where large messages come and go. May
    /// return for no reason.
    pub(crate) fn park(&self, ready: &dyn Fn() -> bool, timeout: Duration) {
        let start = Instant::now();
        while self.provider.has_copied_lately() && start.elapsed() < timeout {
            if ready() {
                return;
            }
            self.provider.progress();
            std::thread::yield_now();
        }
        self.provider.leave();
        self.parts.event.park(ready, timeout);
    }

    /// Calls `done` until it is true: busy at first, then asleep between completions of this queue. `awaited` says what it waits
    /// for, to the flight recorder.
    pub(crate) fn wait_until(
        &self,
        timeout: Duration,
        what: &'static str,
        awaited: impl Fn() -> Awaited,
        mut done: impl FnMut() -> bool,
    ) -> Result<()> {
        const SPIN: Duration = Duration::from_micros(50);
        let backoff = Backoff::new(SPIN);
        let mut rounds = 0u32;
        let since = self.recorder.stamp();
        let mut held = None;
        loop {
            if done() {
                return Ok(());
            }
            rounds = rounds.wrapping_add(1);
            if !rounds.is_multiple_of(64) {
                std::hint::spin_loop();
                continue;
            }
            self.fork_guard.check()?;
            let waited = backoff.waited();
            if waited >= timeout {
                held.into_iter().for_each(Hold::give_up);
                return Err(Error::Deadline { what, after: timeout });
            }
            if waited >= NOTED_AFTER {
                held.get_or_insert_with(|| self.recorder.hold(since, awaited(), By::Cpu));
            }
            if !backoff.spin_after(waited) {
                let next = self.state.lock().reaped;
                let ready = || self.has_arrived(next);
                self.park(&ready, PARK.min(timeout - waited));
            }
        }
    }
}
