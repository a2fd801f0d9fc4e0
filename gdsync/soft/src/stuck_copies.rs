//! Waits for copies that may never end, at most once per stuck copy.

use std::time::{Duration, Instant};

use parking_lot::Mutex;

use gdsync_device::copy_engine::Ticket;

/// Interval at which a wait checks again whether the copy is queued behind a stuck one.
const LOOK: Duration = Duration::from_millis(20);

/// Copies that did not end by their deadline.
#[derive(Debug, Default)]
pub(super) struct StuckCopies(Mutex<Vec<Ticket>>);

impl StuckCopies {
    /// Waits for `copies` until `deadline`. Skips copies that are stuck, or queued behind a stuck one. Returns whether
    /// all are over.
    pub(super) fn wait(&self, copies: &[Ticket], deadline: Instant) -> bool {
        // No short circuit: copies on other GPUs may still end.
        copies.iter().filter(|copy| !self.wait_for(copy, deadline)).count() == 0
    }

    fn wait_for(&self, copy: &Ticket, deadline: Instant) -> bool {
        loop {
            if self.is_stuck(copy) {
                return false;
            }
            // The queue position is known only after the copy starts, and other threads may find stuck copies
            // meanwhile.
            if copy.wait(deadline.min(Instant::now() + LOOK)) {
                return true;
            }
            if Instant::now() >= deadline {
                self.0.lock().push(copy.clone());
                return false;
            }
        }
    }

    /// Whether `copy` is stuck or queued behind a stuck copy.
    fn is_stuck(&self, copy: &Ticket) -> bool {
        let mut stuck = self.0.lock();
        stuck.retain(|copy| !copy.is_over());
        !copy.is_over() && stuck.iter().any(|stuck| copy.is_behind(stuck))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use gdsync_device::memory::{Memory, Word32};

    fn begun(word: &Word32, value: u32) -> Ticket {
        let ticket = Ticket::default();
        assert!(ticket.begin());
        ticket.done_at(word.clone(), value);
        ticket
    }

    /// Reached only when a test fails.
    const LONG: Duration = Duration::from_secs(3600);

    /// Result of [`StuckCopies::wait`], which must return at once.
    fn wait_returns_at_once(stuck_copies: &StuckCopies, copies: &[Ticket]) -> bool {
        let (result, results) = std::sync::mpsc::channel();
        std::thread::scope(|scope| {
            scope.spawn(|| result.send(stuck_copies.wait(copies, Instant::now() + LONG)).unwrap());
            let over = results.recv_timeout(Duration::from_secs(20));
            if over.is_err() {
                // Ends the waiting thread.
                copies.iter().for_each(|copy| copy.fail("the test has failed"));
            }
            over.expect("waited again for a stuck copy")
        })
    }

    #[test]
    fn stuck_copies_are_waited_for_only_once() {
        let memory = Memory::alloc(8).unwrap();
        let [hung, other] = [0, 4].map(|at| memory.word32(at).unwrap());
        let stuck_copies = StuckCopies::default();
        let copies = [u32::MAX, 0, 1].map(|value| begun(&hung, value));
        hung.store(u32::MAX - 1);
        assert!(!stuck_copies.wait(&copies[1..2], Instant::now()));
        assert!(!wait_returns_at_once(&stuck_copies, &copies[1..]), "the same, and one behind it");
        // Copies ahead of it or on another GPU are waited for.
        let works = [copies[0].clone(), begun(&other, 1)];
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| {
                let all = [&copies[1..2], &works].concat();
                stuck_copies.wait(&all, Instant::now() + LONG)
            });
            std::thread::yield_now();
            hung.store(u32::MAX);
            other.store(1);
            assert!(!waiting.join().unwrap());
        });
        assert!(works.iter().all(Ticket::is_over));
        // The stuck copy resumes.
        hung.store(0);
        assert!(!stuck_copies.wait(&copies[2..], Instant::now()));
        hung.store(1);
        assert!(stuck_copies.wait(&copies, Instant::now()));
    }
}
