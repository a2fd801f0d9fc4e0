//! What benchmarks and examples measure with: payload that proves itself, clocks, summaries, the machine's description.

mod clock;
mod json;
mod machine;
mod pattern;
pub mod series;
pub mod shared_page;
mod summary;

pub use clock::{SERVICES, process_cpu, thread_cpu, threads_cpu};
pub use json::{create_json, write_json};
pub use machine::Machine;
pub use pattern::Pattern;
pub use summary::{Micros, Samples, size};
