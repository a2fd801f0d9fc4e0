//! What the models are made of.

use std::cell::Cell;
use std::sync::atomic::Ordering;
use std::thread;

use gdsync::shm::{Atom32, Atom64, event_count};
use gdsync_testkit::process::is_alone;
use gdsync_testkit::tier;
use loom::cell::UnsafeCell;
use loom::sync::atomic::{AtomicU32, AtomicU64, fence};
use loom::sync::{Condvar, Mutex};

/// A 32-bit atomic word.
#[derive(Default)]
pub(crate) struct L32(pub(crate) AtomicU32);
/// A 64-bit atomic word.
#[derive(Default)]
pub(crate) struct L64(pub(crate) AtomicU64);

/// Methods that are those of the word inside.
macro_rules! forward {
    ($($name:ident($($arg:ident: $ty:ty),*) -> $ret:ty;)*) => {$(
        fn $name(&self, $($arg: $ty),*) -> $ret {
            self.0.$name($($arg),*)
        }
    )*};
}

impl Atom32 for L32 {
    forward! {
        load(order: Ordering) -> u32;
        store(value: u32, order: Ordering) -> ();
        swap(value: u32, order: Ordering) -> u32;
        fetch_add(value: u32, order: Ordering) -> u32;
    }
    fn fence(order: Ordering) {
        fence(order);
    }
}

impl Atom64 for L64 {
    forward! {
        load(order: Ordering) -> u64;
        swap(value: u64, order: Ordering) -> u64;
        fetch_max(value: u64, order: Ordering) -> u64;
        fetch_and(value: u64, order: Ordering) -> u64;
        compare_exchange(current: u64, new: u64, yes: Ordering, no: Ordering) -> Result<u64, u64>;
    }
    fn store(&self, value: u64, order: Ordering) {
        // Loom does not know that nothing comes between what an exchange reads and what it leaves: it would let a plain
        // store by another thread be overwritten unseen. Its exchanges it does order. The one thing here that does not ship.
        self.0.swap(value, order);
    }
    fn fence(order: Ordering) {
        fence(order);
    }
}

/// Bytes that a hand-over must protect: loom fails the test when two threads touch them and at least one writes,
/// unless one access happens before the other.
#[derive(Default)]
pub(crate) struct Plain(UnsafeCell<u64>);

// SAFETY: loom checks every access, as said above.
unsafe impl Sync for Plain {}

impl Plain {
    pub(crate) fn get(&self) -> u64 {
        // SAFETY: the pointer is valid, and loom fails the test before a race is one.
        self.0.with(|p| unsafe { *p })
    }

    pub(crate) fn set(&self, value: u64) {
        // SAFETY: the pointer is valid, and loom fails the test before a race is one.
        self.0.with_mut(|p| unsafe { *p = value });
    }
}

/// A bell on a lock and a condition variable: `hca::event::CqEvent`, and in place of a futex `hca::wire::bell::Bell`.
#[derive(Default)]
pub(crate) struct Event {
    sleepers: L32,
    sequence: L32,
    lock: Mutex<()>,
    raised: Condvar,
}

impl Event {
    /// Returns once `ready`; loom reports a deadlock if the wake-up is lost.
    pub(crate) fn sleep_until(&self, ready: impl Fn() -> bool) {
        while !ready() {
            let ticket = event_count::announce(&self.sleepers, &self.sequence);
            if ready() {
                return;
            }
            let mut guard = self.lock.lock().unwrap();
            while self.sequence.load(Ordering::Relaxed) == ticket {
                guard = self.raised.wait(guard).unwrap();
            }
        }
    }

    pub(crate) fn raise(&self) {
        if event_count::notify(&self.sleepers, &self.sequence) {
            drop(self.lock.lock().unwrap());
            self.raised.notify_all();
        }
    }
}

/// Whether this process runs one test. If not, the calling test runs in a process of its own, and has passed there. Loom maps a stack
/// for each thread of each run, for which the tests of one process wait for each other: 112 s on two cores, where processes take 35.
fn is_own_process() -> bool {
    thread_local! {
        static PASSED: Cell<bool> = const { Cell::new(false) };
    }
    let thread = thread::current();
    // The main thread runs tests only with `--test-threads=1`.
    let test = thread.name().filter(|name| *name != "main");
    let is_own = !PASSED.get() && test.is_none_or(is_alone);
    PASSED.set(!is_own);
    is_own
}

/// Runs `test` in all ways that take at most this many preemptions; in the fast tier at most two.
pub(crate) fn explore(preemptions: usize, test: impl Fn() + Sync + Send + 'static) {
    if !is_own_process() {
        return;
    }
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(tier(preemptions.min(2), preemptions, preemptions + 1));
    model.max_branches = 10_000;
    model.check(test);
}
