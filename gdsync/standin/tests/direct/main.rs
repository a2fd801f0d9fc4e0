//! Cards that read our rings themselves: the whole library on the route that mlx5 cards take, with the stand-in for a card.

#![allow(clippy::duplicate_mod, reason = "each file of tests brings what it shares with others")]

#[path = "../../../tests/batch_run.rs"]
mod batch_run;
#[path = "../../../tests/common/mod.rs"]
mod common;
mod copies;
mod device;
#[path = "../setup/ends.rs"]
mod ends;
mod events;
mod flush;
mod gpu;
#[path = "../setup/pages.rs"]
mod pages;
#[path = "../../../tests/common/peer.rs"]
mod peer;
mod processes;
mod queues;
#[path = "../setup/mod.rs"]
mod setup;
mod staged;
#[path = "../../../tests/verbs.rs"]
mod verbs;
#[path = "../../../tests/wraps.rs"]
mod wraps;

#[used]
#[unsafe(link_section = ".init_array")]
static BEFORE_MAIN: extern "C" fn() = choose_the_card;

/// Before there are threads. The route is the library's own choice.
extern "C" fn choose_the_card() {
    setup::use_the_stand_in("");
}

#[test]
fn all_works_on_larger_pages() {
    pages::run_again_on_larger(&["gpu::a_stream", "gpu::payload", "flush::payload", "queues::rings"]);
}
