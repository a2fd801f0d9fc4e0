//! Messages through slots and the other way: both sides agree which message takes which.

use std::sync::atomic::Ordering::{Acquire, Release};

use gdsync::shm::shm_fifo::{Next, Receiver, Sender, Slots};
use gdsync_testkit::tier;
use loom::sync::Arc;
use loom::sync::atomic::AtomicU32;
use loom::thread;

use super::common::{L32, L64, Plain, explore};

const SLOTS: usize = 2;
const MOST: usize = 5;

#[derive(Default)]
struct Shared {
    word: L64,
    begun: L32,
    resumed: L32,
    taken: L64,
    slots: [(L64, Plain); SLOTS],
    /// The other way: messages in the order of their receives.
    others: [Plain; MOST],
    sent: AtomicU32,
}

impl Slots for Shared {
    type W32 = L32;
    type W64 = L64;
    fn count(&self) -> u64 {
        SLOTS as u64
    }
    fn word(&self) -> &L64 {
        &self.word
    }
    fn begun(&self) -> &L32 {
        &self.begun
    }
    fn resumed(&self) -> &L32 {
        &self.resumed
    }
    fn taken(&self) -> &L64 {
        &self.taken
    }
    fn header(&self, slot: u64) -> &L64 {
        &self.slots[usize::try_from(slot).unwrap()].0
    }
}

/// How a message is to be sent, or received.
#[derive(Clone, Copy, PartialEq)]
enum Kind {
    /// By a slot if it can; what is received so lets the receiver open before it.
    Small,
    /// The other way.
    Other,
}
use Kind::{Other, Small};

fn index(number: u64) -> usize {
    usize::try_from(number).unwrap() % SLOTS
}

fn send(shared: &Shared, side: &mut Sender, sent: &mut u32, message: u64, kind: Kind) {
    let claimed = (kind == Small).then(|| side.claim(shared, SLOTS as u64, 1)).flatten();
    if let Some(number) = claimed {
        shared.slots[index(number)].1.set(message);
        side.publish(shared, number, 8);
        return;
    }
    side.begin(shared);
    shared.others[*sent as usize].set(message);
    *sent += 1;
    shared.sent.store(*sent, Release);
    // What a stream sends has no certain number.
    if kind == Small {
        side.count(shared, *sent);
    }
}

fn receive(shared: &Shared, side: &mut Receiver, posted: &mut u32, message: u64, kind: Kind) {
    match kind {
        Small => side.open(shared, *posted),
        Other => {
            side.close(shared);
        }
    }
    loop {
        if side.end() == Some(side.next()) {
            *posted += 1;
            while shared.sent.load(Acquire) < *posted {
                thread::yield_now();
            }
            assert_eq!(shared.others[*posted as usize - 1].get(), message, "the other way");
            return;
        }
        match side.peek(shared) {
            Next::Message(len) => {
                assert_eq!((len, shared.slots[index(side.next())].1.get()), (8, message), "a slot");
                return side.take(shared);
            }
            Next::Closed | Next::Nothing => side.check_closed(shared),
        }
        if side.end() != Some(side.next()) {
            thread::yield_now();
        }
    }
}

/// Posts `ahead` receives the other way and opens behind them, before any of them is complete; then receives so many messages.
fn receive_behind(
    shared: &Shared,
    side: &mut Receiver,
    posted: &mut u32,
    first: u64,
    ahead: u32,
    count: u64,
) {
    let before = *posted;
    *posted += ahead;
    side.open(shared, *posted);
    for place in 0..ahead {
        while shared.sent.load(Acquire) <= before + place {
            thread::yield_now();
        }
        let message = shared.others[(before + place) as usize].get();
        assert_eq!(message, first + u64::from(place), "a receive that was posted before slots opened");
    }
    for message in first + u64::from(ahead)..first + count {
        receive(shared, side, posted, message, Small);
    }
}

/// The receiver always has receives under way.
fn transfer_behind(preemptions: usize, ahead: u32, sends: &'static [Kind]) {
    explore(preemptions, move || {
        let shared = Arc::new(Shared::default());
        let ours = shared.clone();
        let thread = thread::spawn(move || {
            let (mut sender, mut sent) = (Sender::default(), 0);
            for (message, &kind) in sends.iter().enumerate() {
                send(&ours, &mut sender, &mut sent, message as u64, kind);
            }
        });
        let (mut receiver, mut posted) = (Receiver::default(), 0);
        receive_behind(&shared, &mut receiver, &mut posted, 0, ahead, sends.len() as u64);
        thread.join().unwrap();
    });
}

/// Sends and receives the messages in these ways, the first `before` of them one after the other.
fn transfer(preemptions: usize, before: usize, sends: &'static [Kind], receives: &'static [Kind]) {
    explore(preemptions, move || {
        let shared = Arc::new(Shared::default());
        let (mut sender, mut receiver) = (Sender::default(), Receiver::default());
        let (mut sent, mut posted) = (0, 0);
        for message in 0..before {
            send(&shared, &mut sender, &mut sent, message as u64, sends[message]);
            receive(&shared, &mut receiver, &mut posted, message as u64, receives[message]);
        }
        let ours = shared.clone();
        let thread = thread::spawn(move || {
            for (message, &kind) in sends.iter().enumerate().skip(before) {
                send(&ours, &mut sender, &mut sent, message as u64, kind);
            }
        });
        for (message, &kind) in receives.iter().enumerate().skip(before) {
            receive(&shared, &mut receiver, &mut posted, message as u64, kind);
        }
        thread.join().unwrap();
    });
}

#[test]
fn slots_open_and_are_used_again() {
    transfer(3, 1, &[Small; 4], &[Small; 4]);
}

#[test]
fn the_receiver_opens_while_another_message_begins() {
    transfer(3, 1, &[Small, Other, Small, Small], &[Small; 4]);
}

#[test]
fn both_close() {
    transfer(3, 2, &[Small, Small, Other, Small], &[Small, Small, Other, Small]);
}

#[test]
fn the_receiver_closes_between_messages() {
    transfer(3, 2, &[Small; 5], &[Small, Small, Small, Other, Small]);
}

#[test]
fn what_has_no_certain_number_keeps_the_slots_closed() {
    transfer(3, 1, &[Other, Small, Small, Small], &[Small; 4]);
}

/// More messages than slots.
#[test]
fn a_sender_that_is_ahead_closes() {
    let messages = &[Small; MOST][..tier(4, MOST, MOST)];
    transfer(2, 1, messages, messages);
}

#[test]
fn slots_open_behind_receives_that_are_posted() {
    transfer_behind(3, 1, &[Small; 3]);
    transfer_behind(2, 2, &[Small; 4]);
}

#[test]
fn what_is_sent_the_other_way_behind_them_closes() {
    transfer_behind(3, 1, &[Small, Other, Small]);
    transfer_behind(3, 2, &[Other, Small, Small]);
}
