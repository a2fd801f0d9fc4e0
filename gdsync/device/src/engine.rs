//! Shared parts of devices that run on a CPU: rings, completions, and steps that any thread can run.

mod cqs;
mod progress;
mod progress_thread;
mod rings;

pub use crate::doorbell_set::WatchedDoorbells;
pub use cqs::{Cqs, Indices, Overrun, parts as cq_parts};
pub use progress::{Progress, ProgressEngine, ProgressState, RecentCopy};
pub use progress_thread::ProgressThread;
pub use rings::{DoorbellSource, QpTrace, Rings, Wqe};
