//! The submit lock of a stream, spin locks, resets of a queue pair, and what is read without a lock: seqlocks, and what is known of
//! a queue.

use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use gdsync::shm::{Atom32, Atom64, pending_flag, producer_index, reset, seqlock, spin_lock};
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
fn what_is_wanted_while_others_submit_is_done() {
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

/// What one holder of a spin lock wrote the next one reads, and there is one at a time. Nobody waits: who does looks again until he
/// has it, which has no end here.
#[test]
fn spin_locks_have_one_holder() {
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

#[derive(Default)]
struct Qp {
    /// Whether the state is RTS, and the requests outstanding.
    queue: Mutex<(bool, u64)>,
    /// Of a stream, and of who hands something to one.
    holds: L32,
    /// Lives of the device's queue pair: read when a stream rings, and written by a reset.
    life: Plain,
}

/// As the count of an [`Arc`].
struct Hold<'a>(&'a L32);

impl<'a> Hold<'a> {
    fn new(holds: &'a L32) -> Self {
        holds.fetch_add(1, Relaxed);
        Self(holds)
    }
}

impl Drop for Hold<'_> {
    fn drop(&mut self) {
        self.0.fetch_add(u32::MAX, Release);
    }
}

impl Qp {
    /// The stream's hold on a request that was handed to it, and the life it is of.
    fn send(&self) -> Option<(Hold<'_>, u64)> {
        reset::hand_over(Hold::new(&self.holds), || {
            let mut queue = self.queue.lock().unwrap();
            let life = queue.0.then(|| self.life.get())?;
            queue.1 += 1;
            drop(queue);
            Some((Hold::new(&self.holds), life))
        })
    }

    /// The stream runs a request.
    fn run(&self, (hold, life): (Hold<'_>, u64)) {
        assert_eq!(self.life.get(), life, "a request of a former life");
        self.queue.lock().unwrap().1 -= 1;
        drop(hold);
    }

    /// Returns whether it was reset.
    fn reset(&self) -> bool {
        let closed = reset::close(
            self.queue.lock().unwrap(),
            |queue| (queue.1 > 0 && self.holds.load(Relaxed) > 0).then_some(()),
            |queue| queue.0 = false,
        );
        if closed.is_err() {
            return false;
        }
        self.life.set(self.life.get() + 1);
        // Connected again, which begins with a lock of the queue.
        *self.queue.lock().unwrap() = (true, 0);
        true
    }
}

/// What a stream took it runs in the same life; loom also fails this if the stream rings while the device is reset.
#[test]
fn no_request_outlives_a_reset() {
    explore(3, || {
        let qp = Arc::new(Qp::default());
        qp.queue.lock().unwrap().0 = true;
        let sender = {
            let qp = qp.clone();
            thread::spawn(move || {
                let sent = qp.send();
                let is_sent = sent.is_some();
                sent.into_iter().for_each(|sent| qp.run(sent));
                is_sent
            })
        };
        let was_reset = qp.reset();
        assert!(sender.join().unwrap() || was_reset, "each refused the other");
        assert!(qp.reset(), "nothing is under way");
    });
}

/// A stream that gave a request up does not keep the queue pair from being reset.
#[test]
fn what_a_stream_gave_up_is_forgotten() {
    explore(3, || {
        let qp = Qp::default();
        qp.queue.lock().unwrap().0 = true;
        drop(qp.send());
        assert!(qp.reset());
    });
}

/// What a reader of a file does: one copy after the other, each from the first word to the check.
fn copy(words: &[L64; 3]) -> [u64; 3] {
    let data = [words[0].load(Relaxed), words[1].load(Relaxed)];
    L64::fence(Acquire);
    let check = words[2].load(Acquire);
    [data[0], data[1], check]
}

#[test]
fn a_record_that_is_accepted_is_whole() {
    explore(3, || {
        let words = Arc::new([L64::default(), L64::default(), L64::default()]);
        let writer = words.clone();
        let writer = thread::spawn(move || {
            seqlock::write(&writer, [10, 100, 1]);
            seqlock::write(&writer, [20, 200, 2]);
        });
        let (first, second) = (copy(&words), copy(&words));
        if let Some(record) = seqlock::accept(first, second) {
            assert!([[10, 100, 1], [20, 200, 2]].contains(&record), "{record:?}");
        }
        writer.join().unwrap();
        let last = copy(&words);
        assert_eq!(seqlock::accept(last, copy(&words)), Some([20, 200, 2]));
    });
}
