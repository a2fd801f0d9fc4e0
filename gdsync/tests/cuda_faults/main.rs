//! What fails while streams of a GPU wait for it, eagerly and in graphs, by memory operations and by kernels, with rings
//! in host and in GPU memory: each fault many times. Streams drain in time, errors tell the root cause, queue pairs can be
//! used again, and nothing is left.
//!
//! `GDSYNC_TEST_REPEATS`: how often. With `--nocapture` the times of release are told.

mod bed;
#[path = "../common/mod.rs"]
mod common;
mod endings;
mod matrix;
#[path = "../common/peer.rs"]
mod peer;
#[path = "../cuda/place.rs"]
mod place;
mod processes;
mod refusals;
#[path = "../common/repeat.rs"]
mod repeat;
mod sharing;
#[path = "../cuda/simulated.rs"]
mod simulated;
mod waits;
