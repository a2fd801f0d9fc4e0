//! A queue pair that one thread resets while others hand its requests to a stream.

use std::sync::atomic::Ordering::{Relaxed, Release};

use gdsync::shm::{Atom32, reset};
use loom::sync::{Arc, Mutex};
use loom::thread;

use super::common::{L32, Plain, explore};

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
