//! Loom tests of the hand-overs in `gdsync::shm`: every interleaving up to a bound of preemptions, and every reordering that the
//! memory model allows.

mod common;
mod queue;
mod reset;
mod seqlock;
mod shm_fifo;
mod submit_lock;
mod wire;
