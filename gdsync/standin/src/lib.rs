//! A stand-in for libibverbs and libmlx5: an mlx5 card where there is none.
//!
//! It is one library that has the functions of both, for `GDSYNC_LIBIBVERBS` and `GDSYNC_LIBMLX5`. Behind it is the software
//! HCA of `gdsync`, strict: queues are made as rdma-core makes them, in memory of the caller's allocator; the caller writes
//! WQEs, doorbell records and doorbells there, and the HCA takes them as a card would. Or it leaves that to `ibv_post_send`,
//! `ibv_poll_cq` and completion channels. All processes of a user on a host can
//! be connected.
//!
//! It checks its caller as kernel, provider and card would, and answers with their `errno`. Where they would take what is
//! wrong and misbehave later, it refuses too, and says so on the standard error output and through
//! `gdsync_standin_complaints`.
//!
//! Functions of rdma-core ask of their callers what their manual pages say.
//!
//! What differs from rdma-core and a card:
//! - Every queue pair has a doorbell of its own, also those of one thread domain: memory keeps only the last of two doorbells
//!   that are written to one register.
//! - A doorbell is found within 5 ms, not at once: the HCA has to look.
//! - DevX makes completion queues and queue pairs and changes them, and nothing else; a doorbell page is for one queue pair, and
//!   a DMA-BUF must be one that can be mapped. `gdsync_standin_devx` takes DevX away, or DMA-BUFs from it;
//!   `gdsync_standin_atomics` takes atomics away, `gdsync_standin_gid_kinds`
//!   what kinds GIDs are of.
//! - Events of objects of DevX come without their bytes; no shared receive queues, no events of solicited completions alone.
//! - It has the faults of some cards and libraries if a test says so: `gdsync_standin_quirks`, with the bits of `Quirk`.
//! - Scatter to CQE does not happen; a queue pair whose rings are asked for (`mlx5dv_init_obj`) must be created without it.
//! - The port is one of RoCE: GID 0 is RoCE v1 and leads nowhere, GID 1 is RoCE v2 and that of the HCA.

#![allow(non_camel_case_types, reason = "the names of rdma-core")]

mod context;
mod cq;
mod devx;
mod domain;
mod dv;
mod errno;
mod events;
mod hca;
mod modify;
mod qp;
mod region;
mod work;
