//! A condition variable on a futex, for locks of `parking_lot`.
//!
//! `parking_lot::Condvar` keeps waiting threads in a table of the process, in memory of their stacks. A forked child
//! inherits the entries of its parent's threads and gives their stacks to its own threads, whose wake-ups then get lost.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use parking_lot::MutexGuard;
use rustix::thread::futex::{self, Timespec};

/// A condition variable. Waits may end spuriously.
#[derive(Debug, Default)]
pub struct Condvar {
    /// Number of notifications.
    notified: AtomicU32,
    /// Number of waiting threads, changed under their mutex.
    waiting: AtomicU32,
}

impl Condvar {
    /// Without waiters.
    pub const fn new() -> Self {
        Self { notified: AtomicU32::new(0), waiting: AtomicU32::new(0) }
    }

    /// Waits for a notification, with the mutex unlocked meanwhile.
    pub fn wait<T>(&self, guard: &mut MutexGuard<'_, T>) {
        self.sleep(guard, None);
    }

    /// As [`Condvar::wait`], for at most `timeout`. Returns whether it has run out.
    pub fn wait_for<T>(&self, guard: &mut MutexGuard<'_, T>, timeout: Duration) -> bool {
        let start = Instant::now();
        self.sleep(guard, Some(timeout));
        start.elapsed() >= timeout
    }

    /// As [`Condvar::wait`], until `deadline`. Returns whether it has passed.
    pub fn wait_until<T>(&self, guard: &mut MutexGuard<'_, T>, deadline: Instant) -> bool {
        self.sleep(guard, Some(deadline.saturating_duration_since(Instant::now())));
        Instant::now() >= deadline
    }

    /// Waits while `condition` holds, for at most `timeout`.
    pub fn wait_while_for<T>(
        &self,
        guard: &mut MutexGuard<'_, T>,
        mut condition: impl FnMut(&mut T) -> bool,
        timeout: Duration,
    ) {
        let deadline = Instant::now() + timeout;
        while condition(guard) && !self.wait_until(guard, deadline) {}
    }

    /// Wakes one waiting thread.
    pub fn notify_one(&self) {
        self.wake(1);
    }

    /// Wakes all waiting threads.
    pub fn notify_all(&self) {
        self.wake(i32::MAX.unsigned_abs());
    }

    fn sleep<T>(&self, guard: &mut MutexGuard<'_, T>, timeout: Option<Duration>) {
        // Under the mutex: a thread that changes the condition afterwards sees the count, and increments the sequence.
        self.waiting.fetch_add(1, Ordering::SeqCst);
        let number = self.notified.load(Ordering::SeqCst);
        // A timeout beyond the clock's range never ends.
        let timeout = timeout.and_then(|timeout| Timespec::try_from(timeout).ok());
        // Errors are ends of the wait: the number has changed, a signal came, or the time is over.
        let wait = || futex::wait(&self.notified, futex::Flags::PRIVATE, number, timeout.as_ref());
        let _ = MutexGuard::unlocked(guard, wait);
        self.waiting.fetch_sub(1, Ordering::SeqCst);
    }

    fn wake(&self, threads: u32) {
        self.notified.fetch_add(1, Ordering::SeqCst);
        if self.waiting.load(Ordering::SeqCst) > 0 {
            // Fails only for words that are not mapped.
            let _ = futex::wake(&self.notified, futex::Flags::PRIVATE, threads);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use parking_lot::Mutex;

    use super::*;

    const TIMEOUT: Duration = Duration::from_secs(20);

    #[test]
    fn no_notification_is_lost() {
        let (turn, changed) = (Mutex::new(0), Condvar::new());
        thread::scope(|scope| {
            for own in 0..3 {
                let (turn, changed) = (&turn, &changed);
                scope.spawn(move || {
                    for _ in 0..2000 {
                        let mut turn = turn.lock();
                        let deadline = Instant::now() + TIMEOUT;
                        while *turn % 3 != own {
                            assert!(!changed.wait_until(&mut turn, deadline), "turn {turn}");
                        }
                        *turn += 1;
                        drop(turn);
                        changed.notify_all();
                    }
                });
            }
        });
        assert_eq!(turn.into_inner(), 6000);
    }

    #[test]
    fn a_wait_ends_by_its_timeout() {
        let (mutex, changed) = (Mutex::new(()), Condvar::new());
        let start = Instant::now();
        while !changed.wait_for(&mut mutex.lock(), Duration::from_millis(5)) {}
        changed.wait_while_for(&mut mutex.lock(), |_| true, Duration::from_millis(5));
        assert!((Duration::from_millis(10)..TIMEOUT).contains(&start.elapsed()));
    }
}
