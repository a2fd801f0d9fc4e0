//! GPUDirect Async: RDMA sends triggered, and completions awaited, by GPU streams.
//!
//! This package is the front door: the crates under their usual names, the command-line tool, and what its benchmarks
//! and the examples measure with.
//!
//! - [`gdrcopy`]: CPU mappings of GPU memory;
//! - [`gdsync`]: verbs queues on mlx5 rings, streams that trigger and await them, the software HCA;
//! - [`mp`]: messages between ranks, over it.

#![allow(clippy::missing_errors_doc, reason = "for the programs of this package")]
#![cfg_attr(
    not(test),
    deny(clippy::print_stderr, clippy::print_stdout, reason = "they panic; `out!` and `note!` do not")
)]

pub mod app_stream;
pub mod doctor;
pub mod library;
pub mod measure;
mod nvml;
pub mod pingpong;
pub mod results;
pub mod terminal;
pub mod tools;

pub use gdrcopy;
pub use gdsync;
pub use mp;

/// The documents as doctests: their programs are compiled, and run where they say nothing else.
#[cfg(doctest)]
mod documents {
    #[doc = include_str!("../README.md")]
    mod readme {}
    #[doc = include_str!("../docs/guide.md")]
    mod guide {}
    #[doc = include_str!("../docs/porting.md")]
    mod porting {}
}
