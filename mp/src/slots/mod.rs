//! Short messages between ranks of a host, by the CPU of one to the CPU of the other: copied into slots of shared memory, and
//! out of them. No queue pair is involved, and none of its costs.
//!
//! Each pair of ranks has slots in each direction beside its queue pair, and both ranks agree which message takes which: see
//! [`gdsync::protocol::shm_fifo`]. The queue pair is where messages start, and where they go whenever one side needs it: a stream
//! sends or waits, a message is long or on a GPU, the slots are full, or a wait gets long: then the receiver sleeps better
//! there. After some messages of CPUs in a row the receiver opens the slots again, behind the receives that it has posted.
//!
//! In the fast path of a message each side takes one lock that nobody else holds, and the sender counts the message in the word
//! that both agree by. Between the cores move the line with the header and 56 bytes, and the pages of what is longer. The
//! receiver says which slots it has taken sixteen at a time, and reads the word only when nothing comes for a while.

mod receive;
mod region;
mod send;
mod share;
mod wait;

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize};

use gdsync::protocol::shm_fifo::close;
use parking_lot::Mutex;

pub(crate) use receive::Receive;
pub(crate) use send::fitting;
pub(crate) use share::share;

use receive::Inbox;
use region::Region;
use send::Outbox;

/// The slots between this rank and another one, in both directions.
#[derive(Debug)]
pub(crate) struct Slots {
    tx: Region,
    rx: Region,
    outbox: Mutex<Outbox>,
    inbox: Mutex<Inbox>,
    /// What is known of the inbox without its lock: the next message, how many receives are kept for it and those behind it, how
    /// many are under way, and whether the message for one more comes through a slot.
    next: AtomicU64,
    kept: AtomicUsize,
    under_way: AtomicUsize,
    is_next_here: AtomicBool,
}

impl Slots {
    fn new(tx: Region, rx: Region) -> Self {
        let (outbox, inbox) = <_>::default();
        let (next, [kept, under_way], is_next_here) = <_>::default();
        Self { tx, rx, outbox, inbox, next, kept, under_way, is_next_here }
    }

    /// Closes what the other rank sends through: it goes to the queue pair, which says what has ended the connection. Whoever
    /// has opened slots looks afterwards whether it has ended.
    pub(crate) fn shut(&self) {
        close(&self.rx);
    }

    /// Messages that were sent through slots.
    pub(crate) fn sent_count(&self) -> u64 {
        self.outbox.lock().count
    }
}
