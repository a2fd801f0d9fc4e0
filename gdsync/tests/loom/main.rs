//! Every interleaving, up to a bound of preemptions, and every reordering that the memory model allows, of the
//! hand-overs in `gdsync::shm`: what runs here is the code that the library runs.

mod common;
mod locks;
mod queue;
mod shm_fifo;
mod wire;
