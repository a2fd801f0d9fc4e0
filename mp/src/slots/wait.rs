//! Waiting for a message that comes through a slot.

use std::hint::spin_loop;
use std::sync::atomic::Ordering;
use std::thread::{sleep, yield_now};
use std::time::{Duration, Instant};

use gdsync::protocol::shm_fifo::{Next, peek};

use super::{Receive, Slots};
use crate::link::{Link, SILENCE};

/// Looks at the slot before a look at anything else: about a microsecond. To read the word would take its line from the sender,
/// and the clock takes as long as a message.
const FIRST: u32 = 256;

/// The same, between looks at other things.
const ROUNDS: u32 = 64;

/// How long a wait is busy before it lets others run, and before it moves to the queue pair, where it can sleep.
const SPIN: Duration = Duration::from_micros(5);
const PATIENCE: Duration = Duration::from_millis(10);

/// How long a wait sleeps that cannot move there, as its sender was stopped while it copied.
const NAP: Duration = Duration::from_micros(50);

impl Slots {
    /// Waits for about a microsecond; the bytes that came, if that was enough.
    #[inline]
    pub(crate) fn wait_shortly(&self, link: &Link, receive: &Receive) -> Option<usize> {
        for _ in 0..FIRST {
            if !receive.is_kept() {
                return receive.known();
            }
            self.take_next(link);
        }
        None
    }

    /// Takes what is in the next slot, if anything is.
    #[inline]
    pub(crate) fn take_next(&self, link: &Link) {
        if peek(&self.rx, self.next.load(Ordering::Relaxed)) != Next::Nothing {
            self.take(link, false);
        }
    }

    /// Blocks until a receive is complete, or bound to the queue pair, to be waited for there, or the connection has ended. Calls
    /// `meanwhile` once. Returns how long it took.
    ///
    /// # Errors
    /// [`gdsync::Error::Deadline`] after `timeout`.
    #[cold]
    pub(crate) fn wait(
        &self,
        link: &Link,
        receive: &Receive,
        timeout: Duration,
        meanwhile: impl FnOnce(),
    ) -> gdsync::Result<Duration> {
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
                if !receive.is_kept() {
                    return Ok(waited);
                }
                self.take_next(link);
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
}
