//! Copies that do not end: each is waited for once, by whoever first ends something that it uses.

use std::time::{Duration, Instant};

use parking_lot::Mutex;

use gdsync_device::copy_engine::Ticket;

/// How long one is waited for until it is asked again what holds it up.
const LOOK: Duration = Duration::from_millis(20);

/// Those that were waited for in vain.
#[derive(Debug, Default)]
pub(super) struct StuckCopies(Mutex<Vec<Ticket>>);

impl StuckCopies {
    /// Waits until all of `copies` are over, or for the deadline; not for those that are stuck or come behind such a one. Returns
    /// whether all are over.
    pub(super) fn wait(&self, copies: &[Ticket], deadline: Instant) -> bool {
        // All of them: another GPU may work.
        copies.iter().filter(|copy| !self.wait_for(copy, deadline)).count() == 0
    }

    fn wait_for(&self, copy: &Ticket, deadline: Instant) -> bool {
        loop {
            if self.holds_up(copy) {
                return false;
            }
            // What it is behind is known only a moment after it has begun, and others may find out meanwhile.
            if copy.wait(deadline.min(Instant::now() + LOOK)) {
                return true;
            }
            if Instant::now() >= deadline {
                self.0.lock().push(copy.clone());
                return false;
            }
        }
    }

    /// Whether it cannot be over, as far as is known.
    fn holds_up(&self, copy: &Ticket) -> bool {
        let mut stuck_copies = self.0.lock();
        stuck_copies.retain(|stuck_copies| !stuck_copies.is_over());
        !copy.is_over() && stuck_copies.iter().any(|stuck_copies| copy.is_behind(stuck_copies))
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

    /// Generous: reached only by a test that fails.
    const LONG: Duration = Duration::from_secs(3600);

    /// What [`StuckCopies::wait`] says of a copy that need not be waited for.
    fn at_once(stuck_copies: &StuckCopies, copies: &[Ticket]) -> bool {
        let (told, tells) = std::sync::mpsc::channel();
        std::thread::scope(|scope| {
            scope.spawn(|| told.send(stuck_copies.wait(copies, Instant::now() + LONG)).unwrap());
            let over = tells.recv_timeout(Duration::from_secs(20));
            if over.is_err() {
                // Or the thread waits for an hour.
                copies.iter().for_each(|copy| copy.fail("the test has failed"));
            }
            over.expect("it waits again")
        })
    }

    #[test]
    fn what_is_stuck_is_waited_for_once_with_all_behind_it() {
        let memory = Memory::alloc(8).unwrap();
        let [hung, other] = [0, 4].map(|at| memory.word32(at).unwrap());
        let stuck_copies = StuckCopies::default();
        let copies = [u32::MAX, 0, 1].map(|value| begun(&hung, value));
        hung.store(u32::MAX - 1);
        assert!(!stuck_copies.wait(&copies[1..2], Instant::now()));
        assert!(!at_once(&stuck_copies, &copies[1..]), "the same, and one behind it");
        // One before it, or of another GPU, is waited for.
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
        // It goes on after all.
        hung.store(0);
        assert!(!stuck_copies.wait(&copies[2..], Instant::now()));
        hung.store(1);
        assert!(stuck_copies.wait(&copies, Instant::now()));
    }
}
