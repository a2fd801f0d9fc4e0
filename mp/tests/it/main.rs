//! The tests of communicators. Most run in several processes: the test starts this program again with the name of the test.

mod cache;
mod card;
mod channels;
mod collective;
mod common;
mod credits;
mod failures;
mod hostile;
mod launch;
mod launchers;
mod lifetimes;
mod messages;
mod nvtx;
mod on_stream;
mod overlap;
mod pairwise;
mod paths;
mod peer_copies;
mod placed;
mod request_set;
mod shm_fifo;
mod stream_receives;
mod tagged;
mod traffic;
mod windows;
mod windows_on_stream;
