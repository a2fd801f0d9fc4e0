//! What the queues of gdsync and the devices that read them share.
#![allow(missing_docs, missing_debug_implementations, unreachable_pub)]

mod address;
mod attr;
mod completion_error;
pub mod copy_engine;
pub mod cuda;
pub mod engine;
pub mod env;
pub mod error;
mod fault;
pub mod fork_guard;
mod gid;
mod health;
mod memfd;
pub mod memory;
mod placement;
mod provider;
pub mod recorder;
mod shuffle;
mod stats;
mod transfer_path;

pub use address::{QpAddress, mtu_bytes, mtu_code};
pub use attr::{Access, MAX_RD_ATOMIC, QpAttr, QpState};
pub use completion_error::CompletionError;
pub use error::{Error, Result};
pub use fault::{Fate, FaultPlan, Faults};
pub use gid::{Gid, random_psn};
pub use health::Health;
pub use memfd::{check_memfd, memfd};
pub use placement::{OnGpu, Places};
pub use provider::{CqParts, MrKeys, Provider, QpParts, QpRequest};
pub use shuffle::Shuffle;
pub use stats::HcaStats;
pub use transfer_path::{Staging, TransferPath, Transport};
