//! The software HCA: consumes mlx5 rings as a card would, where there is no card.
//!
//! It takes doorbells, fetches WQEs, checks state and keys, moves the bytes, writes CQEs, and fails as a card fails:
//! RC order, acknowledge timeouts and retries, RNR NAKs, remote errors, flushes up to the doorbell record, completion
//! queue overrun. What it is not: a model of a card's speed, of PCIe ordering, or of firmware. Vendor codes are 0.
//!
//! # Who runs it
//!
//! The HCA is a state behind a lock, and *whoever has time* runs a step of it: the thread that rings a doorbell
//! (so that a small message is on the wire when `post_send` returns), a thread that polls a completion queue, a host
//! stream that waits for a completion, and a service thread when nobody else does. The service thread sleeps while
//! others poll, and sleeps on a bell in shared memory while nothing is to be done.
//!
//! An acknowledgement leaves with the step after the one that received the message, so that an answer goes first. A
//! thread that polled once and never again leaves it to the service thread: at most a millisecond.
//!
//! # What wakes it
//!
//! - a doorbell rung by the CPU or by a host stream: at once, in the ringing thread;
//! - a packet of another process: the sender rings the bell if somebody sleeps on it;
//! - a timer of its own (retry, RNR, delayed packet);
//! - a doorbell written by something that cannot call us, as a GPU: the library announces the send when it is
//!   enqueued, and from then on the service thread looks at that doorbell, busy at first, then less often: never later
//!   than an eighth of the time it has waited, and at most 5 ms;
//! - a doorbell that nobody announced is found within 100 ms.
//!
//! # Payload on GPUs
//!
//! The CPU reads GPU memory slowly and writes it fast, and some of it it does not reach at all. So the HCA takes for each
//! message what is quickest:
//!
//! | payload | how it goes |
//! |---|---|
//! | up to 4 KiB, and what comes from host memory | packets, read and written by the CPU through the mapping |
//! | from host memory to host memory, 64 KiB and more, in one buffer | by cross-memory attach (CMA): the receiver's CPU reads it in the sender's process, see below |
//! | from GPU memory, [`SoftHcaConfig::by_reference`] bytes and more, in one buffer | by reference: one packet says where the payload is, and a copy engine of the receiver's GPU fetches it: over NVLink from another GPU, through CUDA IPC from another process (GPUDirect v2) |
//! | from GPU memory otherwise; where the receiver cannot follow a reference; answers to READs | staged: a copy engine brings it to pinned host memory in chunks, packets are cut from there (GPUDirect v1) |
//! | into GPU memory without a mapping | packets are put down in pinned host memory, and a copy engine brings them on |
//!
//! A receiver that cannot follow a reference (memory of pools and of `cuMemCreate`, containers that do not share IPC, GPUs
//! without peer access, no GPU in use there) says so once for each region, and the sender logs it. CUDA is only called by
//! the thread of a copy engine, never under the lock of the HCA; each GPU has one stream of the highest priority for all
//! copies, which does not wait for streams of the application. Where so many of these wait that nothing moves on the GPU any
//! more (`CUDA_DEVICE_MAX_CONNECTIONS`), a copy is given up after 10 s: the message fails, its error releases the streams.
//!
//! For a millisecond after a copy, or a message of several packets, began, none of the threads that have a part in it sleeps:
//! those of the HCAs and copy engines, and those that wait for completions.
//!
//! A message completes when its payload is in place, and in order. What was stored through a mapping is flushed first, where
//! the GPU needs that: see [`Flush`](gdsync_device::cuda::Flush). A queue pair is reset or destroyed, and a region deregistered,
//! when no copy into its memory is under way any more.
//!
//! # Long messages from host memory
//!
//! They cross in one copy: a packet says where the payload is, and the receiver has the kernel read it there
//! (`process_vm_readv`). Between two cores of an Intel Xeon, 1 MiB takes 60 to 77 us so, and 92 in two copies through the ring of
//! packets. [`CmaPolicy`] sets from which length on.
//!
//! Where the kernel refuses to read (Yama's `ptrace_scope`, seccomp, another user namespace), the sender is told with the first such
//! message, and sends this and all others: nothing fails, and the log says it at level `debug`. Random bytes of a process prove
//! that it is the peer. The receiver checks lengths and keys first, as for packets, reads at most 512 KiB in a step, and completes
//! nothing that the sender has taken back meanwhile.
//!
//! # Peers
//!
//! Queue pairs of one process meet in memory. Other processes of the host are linked through shared memory, handed
//! over an abstract Unix socket whose name is a hash of the [`Gid`]; both must belong to one user and one network namespace.
//! When a process dies, its links report it at once: outstanding sends fail with a retry error, everything else is
//! flushed. (A card would take its timeouts; a peer that only falls silent takes them here too.) The links are let go when no
//! queue pair is connected over them any more.
#![allow(missing_docs, missing_debug_implementations, unreachable_pub)]

mod async_event;
mod card;
mod cma;
mod config;
mod core;
mod keys;
mod links;
mod packet;
mod pending_flush;
mod qp;
mod reference;
mod rx_hints;
mod soft;
mod stuck_copies;
mod wire;

pub use async_event::{AsyncEvent, AsyncEvents};
pub use card::{Card, CardQp};
pub use cma::CmaPolicy;
pub use config::SoftHcaConfig;
pub use soft::SoftHca;
