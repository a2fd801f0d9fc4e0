//! Nothing may hang: a thread looks after calls into the driver that do not return.

use gdasync::note;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use super::words::Word;

/// When nothing moves for longer than the limit, the watch opens the gates that it knows, so that blocked streams go on.
/// Where even that does not help it ends the process.
pub(super) struct Watch(Arc<Shared>);

struct Shared {
    start: Instant,
    limit: Duration,
    /// Nanoseconds after `start` at which something moved last.
    moved: AtomicU64,
    released: AtomicBool,
    watched: Mutex<Watched>,
}

#[derive(Default)]
struct Watched {
    what: String,
    gates: Vec<Word>,
}

/// How often the watch looks.
const PERIOD: Duration = Duration::from_millis(20);
/// After the gates were opened, the driver gets so much longer.
const GRACE: Duration = Duration::from_secs(60);

#[derive(Debug, PartialEq, Eq)]
enum Verdict {
    Fine,
    Release,
    End,
}

/// What is to be done when nothing has moved for so long. Who waits with a deadline of its own comes first.
fn judge(still: Duration, limit: Duration) -> Verdict {
    match still {
        still if still < limit + limit / 4 => Verdict::Fine,
        still if still < limit + limit / 4 + GRACE => Verdict::Release,
        _ => Verdict::End,
    }
}

impl Watch {
    /// Begins to watch; ends when dropped.
    pub(super) fn start(limit: Duration) -> Self {
        let shared = Arc::new(Shared {
            start: Instant::now(),
            limit,
            moved: AtomicU64::new(0),
            released: AtomicBool::new(false),
            watched: Mutex::default(),
        });
        let weak = Arc::downgrade(&shared);
        thread::spawn(move || {
            while let Some(shared) = weak.upgrade() {
                shared.look();
                drop(shared);
                thread::sleep(PERIOD);
            }
        });
        Self(shared)
    }

    /// From now on `what` is being done, and these gates may block a stream.
    pub(super) fn begin(&self, what: &str, gates: &[Word]) {
        *self.0.watched() = Watched { what: what.to_owned(), gates: gates.to_vec() };
        self.0.released.store(false, Ordering::Release);
        self.moved();
    }

    /// Something moves.
    #[inline]
    pub(super) fn moved(&self) {
        self.0.moved.store(nanos(self.0.start.elapsed()), Ordering::Release);
    }

    /// Whether the gates had to be opened since [`begin`](Watch::begin).
    pub(super) fn released(&self) -> bool {
        self.0.released.load(Ordering::Acquire)
    }

    /// How long anything may take.
    pub(super) fn limit(&self) -> Duration {
        self.0.limit
    }
}

impl Shared {
    fn watched(&self) -> MutexGuard<'_, Watched> {
        self.watched.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn look(&self) {
        let still = nanos(self.start.elapsed()).saturating_sub(self.moved.load(Ordering::Acquire));
        match judge(Duration::from_nanos(still), self.limit) {
            Verdict::Fine => (),
            Verdict::Release => {
                let watched = self.watched();
                self.released.store(true, Ordering::Release);
                watched.gates.iter().for_each(|gate| gate.store(1));
            }
            Verdict::End => {
                note!(
                    "gdasync: {}: a call into the CUDA driver did not return; see the kernel log (dmesg) for Xid lines",
                    self.watched().what
                );
                // SAFETY: ends the process at once, without the driver's own clean-up, which would wait as well.
                unsafe { libc::_exit(1) };
            }
        }
    }
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU32;

    use super::*;

    #[test]
    fn gates_are_opened_late_and_the_process_ends_last() {
        let limit = Duration::from_secs(2);
        assert_eq!(judge(limit, limit), Verdict::Fine, "others have this deadline");
        assert_eq!(judge(limit * 2, limit), Verdict::Release);
        assert_eq!(judge(limit * 2 + GRACE, limit), Verdict::End);
    }

    #[test]
    fn a_gate_is_opened_when_nothing_moves() {
        static GATE: AtomicU32 = AtomicU32::new(0);
        let watch = Watch::start(Duration::from_millis(1));
        watch.begin("test", &[Word::Host(&GATE)]);
        let start = Instant::now();
        while GATE.load(Ordering::Acquire) == 0 {
            assert!(start.elapsed() < Duration::from_secs(30));
            thread::sleep(Duration::from_millis(1));
        }
        assert!(watch.released());
        let slow = Watch::start(Duration::from_secs(3600));
        slow.begin("test", &[]);
        assert!(!slow.released());
    }
}
