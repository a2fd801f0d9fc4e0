//! What devices that run on a CPU have in common: they read rings, write completions, and are stepped by whoever has time.

mod cqs;
mod progress;
mod progress_thread;
mod qp_trace;
mod recent_copy;
mod rings;
mod watched_doorbells;

pub use cqs::{Cqs, Overrun, parts as cq_parts};
pub use progress::{Progress, ProgressEngine, ProgressState};
pub use progress_thread::ProgressThread;
pub use qp_trace::QpTrace;
pub use recent_copy::RecentCopy;
pub use rings::{Rings, Wqe};
pub use watched_doorbells::WatchedDoorbells;
