//! The device interface of gdsync: memory, GPUs, errors, addresses, the flight recorder, and the interface between queues and the devices
//! that consume them.
//!
//! To run the verbs and streams of `gdsync` on a device of your own, implement [`Provider`]. A device that consumes the rings on a CPU can
//! use [`engine`], as the software HCA and the CPU proxy do.

mod address;
mod attr;
mod condvar;
pub mod copy_engine;
mod cq_event;
pub mod cuda;
mod doorbell_set;
pub mod engine;
pub mod env;
pub mod error;
mod fault;
pub mod fork_guard;
pub mod memory;
pub mod own_rank;
mod provider;
mod qp_state;
pub mod recorder;

pub use address::{Gid, QpAddress, Shuffle, mtu_bytes, mtu_code, random, random_psn};
pub use attr::{Access, MAX_RD_ATOMIC, QpAttr};
pub use condvar::Condvar;
pub use cq_event::{CqEvent, GpuNudge};
pub use doorbell_set::{DoorbellSet, DoorbellWatch, MAX_QPS};
pub use error::{CompletionError, Error, Result};
pub use fault::{Fate, FaultPlan, Faults};
pub use memory::{check_memfd, clear_eventfd, eventfd, memfd, signal_eventfd};
pub use provider::{
    CqParts, HcaStats, Health, MrKeys, NO_DATAGRAMS, OnGpu, PLACED, Places, Provider, QpParts, QpRequest,
    Staging, TransferPath, Transport,
};
pub use qp_state::QpState;
