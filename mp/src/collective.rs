//! Operations of all ranks together: barrier, broadcast, allgather, alltoall, allreduce.
//!
//! They have connections of their own: a receive of the communicator takes no message of a collective. All ranks call the same
//! collectives with the same arguments in the same order, each call in the blocking form at all ranks or on a stream at all. Each
//! message says in a header which call it is of, with its number; another one is [`Error::Collective`](crate::Error::Collective),
//! which names both. Where no message comes, as with different roots, ranks that wait for each other find that within a second, by
//! [the watchdog](crate::CommunicatorBuilder::watch).
//!
//! The blocking forms relay: dissemination, binomial trees, recursive doubling, rings. On a stream every rank sends directly to
//! every other: a stream goes on after a wait that failed, and a relay would pass on what never came. There, ranks first tell each
//! other that their stream has arrived: a buffer is not written before.

mod blocking;
mod call;
mod calls;
mod message;
mod on_stream;
mod reduce;
mod schedule;

pub use blocking::Collectives;
pub use on_stream::Pending;
pub use reduce::{Number, Reduction};
