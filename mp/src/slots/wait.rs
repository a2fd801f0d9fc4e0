//! Waiting for a message that comes through a slot.

use std::hint::spin_loop;
use std::sync::atomic::Ordering;
use std::thread::{sleep, yield_now};
use std::time::{Duration, Instant};

use gdsync::protocol::slots::{Next, peek};

use super::{Receive, Slots};
use crate::link::{Link, SILENCE};

/// Looks at the slot before a look at anything else.
const ROUNDS: u32 = 64;

/// How long a wait is busy before it lets others run, and before it moves to the queue pair, where it can sleep.
const SPIN: Duration = Duration::from_micros(6);
const PATIENCE: Duration = Duration::from_millis(10);

/// How long a wait sleeps that cannot move there, as its sender was stopped while it copied.
const NAP: Duration = Duration::from_micros(50);

impl Slots {
    /// Blocks until a receive is complete, or bound to the queue pair, to be waited for there, or the connection has ended. Calls
    /// `meanwhile` if that takes a moment. Returns how long it took.
    ///
    /// # Errors
    /// [`gdsync::Error::Deadline`] after `timeout`.
    pub(crate) fn wait(
        &self,
        link: &Link,
        receive: &Receive,
        timeout: Duration,
        meanwhile: impl FnOnce(),
    ) -> gdsync::Result<Duration> {
        for _ in 0..ROUNDS {
            if self.is_over(link, receive) {
                return Ok(Duration::ZERO);
            }
        }
        let start = Instant::now();
        let mut tended = start;
        meanwhile();
        loop {
            self.take(link, true);
            let waited = start.elapsed();
            if waited > PATIENCE {
                self.give_up(link);
            }
            for _ in 0..ROUNDS {
                if self.is_over(link, receive) {
                    return Ok(waited);
                }
                spin_loop();
            }
            if link.check().is_err() {
                // The request says what that means for it.
                return Ok(waited);
            }
            if waited >= timeout {
                return Err(gdsync::Error::Deadline { what: "waiting for a message", after: timeout });
            }
            if tended.elapsed() >= SILENCE {
                // It was claimed, and its sender does not finish it.
                link.tend();
                tended = Instant::now();
            }
            if waited > PATIENCE {
                // It was claimed: only its sender is missing, and has been for long.
                sleep(NAP);
            } else if waited > SPIN {
                yield_now();
            }
        }
    }

    #[inline]
    fn is_over(&self, link: &Link, receive: &Receive) -> bool {
        if peek(&self.rx, self.next.load(Ordering::Relaxed)) != Next::Nothing {
            self.take(link, false);
        }
        receive.is_known() || receive.bound().is_some()
    }
}
