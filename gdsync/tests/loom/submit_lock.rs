//! The submit lock of a stream, spin locks, and the producer index that is read without a lock.

use gdsync::shm::{pending_flag, producer_index, spin_lock};
use loom::sync::{Arc, Mutex, MutexGuard};
use loom::thread;

use super::common::{L32, L64, Plain, explore};

/// A stream: submissions, and the last of them that a mark names.
#[derive(Default)]
struct Stream {
    lock: Mutex<()>,
    requested: L32,
    submitted: Plain,
    marked: Plain,
}

impl Stream {
    fn mark(&self) {
        self.marked.set(self.submitted.get());
    }

    fn try_lock(&self) -> Option<MutexGuard<'_, ()>> {
        self.lock.try_lock().ok()
    }

    fn submit(&self) {
        let guard = self.lock.lock().unwrap();
        self.submitted.set(self.submitted.get() + 1);
        self.unlock(guard);
    }

    /// As the submit lock of `gdsync::Stream` does.
    fn unlock<'a>(&'a self, mut guard: MutexGuard<'a, ()>) {
        let work = |_: &mut MutexGuard<'a, ()>| {
            if pending_flag::take(&self.requested) {
                self.mark();
            }
        };
        work(&mut guard);
        pending_flag::unlock(&self.requested, guard, || self.try_lock(), work);
    }

    /// Requests a mark behind all that was submitted.
    fn request(&self) {
        pending_flag::set(&self.requested);
        if let Some(guard) = self.try_lock() {
            self.unlock(guard);
        }
    }

    /// What was submitted, and up to where it is marked, when nobody has the lock.
    fn ends(&self) -> (u64, u64) {
        let _guard = self.lock.lock().unwrap();
        (self.submitted.get(), self.marked.get())
    }
}

/// Who submits and then wants a mark gets one, by whomever.
#[test]
fn marks_that_are_wanted_are_put() {
    explore(3, || {
        let stream = Arc::new(Stream::default());
        let both = || {
            let stream = stream.clone();
            thread::spawn(move || {
                stream.submit();
                stream.request();
            })
        };
        let threads = [both(), both()];
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        assert_eq!(stream.ends(), (2, 2));
    });
}

/// One wants while two others submit: its own mark stands, or a later one.
#[test]
fn what_is_wanted_in_the_turn_of_others_is_done() {
    explore(3, || {
        let stream = Arc::new(Stream::default());
        stream.submit();
        let submit = || {
            let stream = stream.clone();
            thread::spawn(move || stream.submit())
        };
        let threads = [submit(), submit()];
        stream.request();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        let (submitted, marked) = stream.ends();
        assert!(submitted == 3 && (1..=3).contains(&marked), "{submitted} {marked}");
    });
}

/// A request is taken back behind which there is another one, and a third is posted.
#[test]
fn who_sees_a_request_behind_a_gap_sees_the_gap() {
    explore(3, || {
        let queue = Arc::new((L64::default(), L32::default()));
        let writer = queue.clone();
        let writer = thread::spawn(move || {
            let (posted, gap) = &*writer;
            producer_index::publish(posted, gap, 2, false);
            producer_index::publish(posted, gap, 2, true);
            producer_index::publish(posted, gap, 3, false);
        });
        let (posted, is_gap) = producer_index::read(&queue.0, &queue.1);
        assert!([0, 2, 3].contains(&posted) && (posted < 3 || is_gap), "{posted} {is_gap}");
        writer.join().unwrap();
        assert_eq!(producer_index::read(&queue.0, &queue.1), (3, true));
    });
}

/// What one holder of a brief lock wrote the next one reads, and there is one at a time. Nobody waits: who does looks again until he
/// has it, which has no end here.
#[test]
fn brief_locks_have_one_holder() {
    explore(3, || {
        let shared = Arc::new((L32::default(), Plain::default()));
        let tries = || {
            let shared = shared.clone();
            thread::spawn(move || {
                let (taken, count) = &*shared;
                let mut had = 0;
                for _ in 0..2 {
                    if spin_lock::try_take(taken) {
                        count.set(count.get() + 1);
                        spin_lock::give(taken);
                        had += 1;
                    }
                }
                had
            })
        };
        let threads = [tries(), tries()];
        let had: u64 = threads.into_iter().map(|thread| thread.join().unwrap()).sum();
        assert_eq!(shared.1.get(), had);
    });
}
