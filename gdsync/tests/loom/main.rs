//! Every interleaving, up to a bound of preemptions, and every reordering that the memory model allows, of the
//! hand-overs in `gdsync::protocol`: what runs here is the code that the library runs.

mod common;
mod offer;
mod queue;
mod reset;
mod slots;
mod stamp;
#[path = "../it/tier.rs"]
mod tier;
mod turn;
mod wire;
