//! Cards and libraries that differ from what most do: what the library finds out, and what it does then.

#![allow(clippy::duplicate_mod, reason = "each file of tests brings what it shares with others")]

#[path = "../../../tests/common/mod.rs"]
mod common;
mod library;
#[path = "../setup/mod.rs"]
mod setup;

use std::sync::{Mutex, MutexGuard, PoisonError};

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
