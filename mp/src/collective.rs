//! Operations of all ranks together: barrier, broadcast, allgather, alltoall, allreduce.
//!
//! They consist of the messages of [`Communicator`](crate::Communicator), and share its connections: between two ranks, messages
//! and collectives must be started in the same order on both. A receive that is posted before a collective takes the rank's next
//! message, be it one of the collective. All ranks call the same collective with the same sizes, and all of
//! them the blocking form or all the one on streams.
//!
//! The blocking forms relay: dissemination, binomial trees, recursive doubling, rings. On a stream every rank sends directly to
//! every other: a stream goes on after a wait that failed, and a relay would pass on what never came. There, ranks first tell each
//! other that their stream has arrived: a buffer is not written before.

mod blocking;
mod on_stream;
mod reduce;
mod schedule;

pub use blocking::Collectives;
pub use on_stream::Pending;
pub use reduce::{Number, Reduction};
