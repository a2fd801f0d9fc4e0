//! Cards and libraries that differ from what most do: what the library finds out, and what it does then.

#![allow(clippy::duplicate_mod, reason = "each file of tests brings what it shares with others")]

#[path = "../../../tests/common/mod.rs"]
mod common;
mod flushes;
mod library;
#[path = "../setup/mod.rs"]
mod setup;

use std::sync::{Mutex, MutexGuard, PoisonError};

use gdsync::verbs::{RecvWr, SendWr};

use crate::common::{Side, bytes, received, sent};
use crate::setup::entry;

#[used]
#[unsafe(link_section = ".init_array")]
static BEFORE_MAIN: extern "C" fn() = choose_the_card;

/// Before there are threads. The route is the library's own choice.
extern "C" fn choose_the_card() {
    setup::use_the_stand_in("");
}

/// Doorbells of queues that the application reads itself are lost.
const DEAF: u32 = 1;
/// The library is of rdma-core 28.
const OLD_LIBRARY: u32 = 2;
/// A queue pair in ERR flushes only the sends that a doorbell named.
const FLUSHES_BY_DOORBELL: u32 = 4;
/// A queue pair goes to ERR up to 10 ms after it was told to.
const LATE_FLUSHES: u32 = 8;
/// Completions of flushed requests do not say of which request they are.
const NO_FLUSH_COUNTERS: u32 = 16;

/// The card has these quirks as long as this is there, and no other test runs meanwhile.
struct Quirks(#[expect(dead_code, reason = "held")] MutexGuard<'static, ()>);

impl Quirks {
    fn of(bits: u32) -> Self {
        static TURN: Mutex<()> = Mutex::new(());
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        set(bits);
        Self(turn)
    }
}

impl Drop for Quirks {
    fn drop(&mut self) {
        set(0);
    }
}

fn set(bits: u32) {
    // SAFETY: the type is that of the function.
    let set: extern "C" fn(u32) = unsafe { std::mem::transmute(entry(c"gdsync_standin_quirks")) };
    set(bits);
}

/// One message, with contents.
fn message(a: &Side, b: &Side, seed: u64) {
    let data = seed.to_le_bytes();
    b.qp.post_recv(&[RecvWr { wr_id: seed, sges: &[b.mr.sge(32, 8).unwrap()] }]).unwrap();
    a.qp.post_send(&[SendWr::send_inline(&data)]).unwrap();
    sent(a).ok().unwrap();
    assert_eq!(received(b).ok().unwrap().wr_id, seed);
    assert_eq!(bytes(b, 32, 8), data);
}
