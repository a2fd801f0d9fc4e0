//! CPU proxy: a thread of this process reads the rings and posts to any RDMA device through libibverbs.
//!
//! Producers work as with a card: streams, batches and graphs write mlx5 WQEs, doorbell records and doorbells. The
//! proxy takes doorbells, checks WQEs as the software HCA does, and posts each to a queue pair of the device as the
//! same operation. Completions of the device become mlx5 CQEs in ring order, with the payload in place first.
//!
//! - **Addressing**: QPNs and keys are the device's own, so a peer may be any program that speaks RC verbs.
//! - **Threads**: as in the software HCA, steps run in the thread that rings, polls, or runs a waiting host stream, and
//!   else in the proxy's own thread. It busy-polls while a GPU waits or is about to ring; otherwise it sleeps until the
//!   device completes something or a thread wakes it.
//! - **Limits**: requests beyond the device's queue size wait in the ring. Inline data beyond the device's limit is
//!   read from the ring by the device. Unsupported operations (atomics on some virtual functions) complete with a local
//!   operation error, and the queue pair's error holds the device's.
//! - **Failures**: a status of the device becomes the syndrome of the same name, with the vendor code. Then the
//!   device's queue pair goes to ERR and returns its requests, and the rings are flushed. A device that does not return
//!   them within 2 s is reset. Asynchronous events (queue pair, port, device) break queue pairs and become their error.
//! - **GPU memory**: the device accesses payload directly; data it wrote is flushed before the CQE where the GPU needs
//!   it. GPU memory that cannot be registered is staged through pinned host memory by a copy engine. Rings and records
//!   may lie in GPU memory; the CPU reads them through the mapping.
//!
//! | file | content |
//! |---|---|
//! | `provider` | control path, shared state, events, sleeping |
//! | `core` | state, and one step |
//! | `qp` | queue pair: posting, completions, errors, transitions |
//! | `translate` | WQEs as device requests, device statuses as CQEs |
//! | `staging` | GPU memory that the device cannot register |
//! | `device` | queues of the device |

mod core;
mod device;
mod provider;
mod qp;
mod staging;
#[cfg(test)]
mod tests;
mod translate;

pub use provider::Proxy;
