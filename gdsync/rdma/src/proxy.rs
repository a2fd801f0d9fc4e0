//! The CPU proxy: a thread of this process reads the rings and posts to any RDMA device through libibverbs.
//!
//! Everything above it is as with a card: streams, batches and graphs write mlx5 WQEs, doorbell records and doorbells. The proxy
//! takes doorbells, checks WQEs as the software HCA does, and hands each to a queue pair of the device with the operation of the
//! same name; what the device completes becomes an mlx5 CQE, in the order of the ring, with the payload in place before it.
//!
//! - **Numbers and keys are the device's own**: a peer may be any program that speaks RC verbs.
//! - **Who runs it**: as with the software HCA, whoever has time: the thread that rings, one that polls, a host stream that waits,
//!   and the proxy's own thread otherwise. That one looks busily while a GPU is about to ring or waits, and else sleeps until the
//!   device tells of a completion or somebody rings.
//! - **Limits**: where the device takes fewer requests than the ring holds, the rest waits in the ring; where it takes less inline
//!   data, it reads the bytes from the ring. What it does not do at all (atomics on some virtual functions) completes
//!   with a local operation error, and the queue pair's error says what the device said.
//! - **Failures**: a status of the device is the syndrome of the same name, with the vendor's code. The device's queue pair then
//!   goes to ERR as well, gives back what it has, and the rings are flushed; a device that does not give it back is made to
//!   forget it after 2 s. Asynchronous events (queue pair, port, device) break queue pairs with the event as their cause.
//! - **GPU memory**: payload there is read and written by the device; what it wrote is flushed before a CQE is written, where the
//!   GPU needs that. What the device cannot register is staged in pinned host memory by a copy engine. Rings and records may be
//!   there too, with the CPU reading them through the mapping.
//!
//! | file | object |
//! |---|---|
//! | `provider` | the control path |
//! | `shared` | what its threads share, events, sleeping |
//! | `core` | the state, and one step |
//! | `qp` | a queue pair: completions, errors, transitions |
//! | `post` | a queue pair: from the rings to the device |
//! | `translate` | a WQE as a request of the device |
//! | `outcome` | a status of the device as a CQE |
//! | `shadow` | GPU memory that the device cannot register |
//! | `copy` | what is copied from and to it |
//! | `staged` | a queue pair: messages in such memory |
//! | `tag` | how a completion finds its request |
//! | `device` | queues of the device |
//! | `bell` | what the thread sleeps on |

mod bell;
mod copy;
mod core;
mod device;
mod outcome;
mod post;
mod provider;
mod qp;
mod shadow;
mod shared;
mod staged;
mod tag;
#[cfg(test)]
mod tests;
mod translate;

pub use provider::Proxy;
