//! What the queues of gdsync and the devices that read them share.

mod address;
mod attr;
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
mod provider;
mod qp_state;
pub mod recorder;

pub use address::{Gid, QpAddress, Shuffle, mtu_bytes, mtu_code, random_psn};
pub use attr::{Access, MAX_RD_ATOMIC, QpAttr};
pub use cq_event::{CqEvent, GpuNudge};
pub use doorbell_set::{DoorbellSet, DoorbellWatch, MAX_QPS};
pub use error::{CompletionError, Error, Result};
pub use fault::{Fate, FaultPlan, Faults};
pub use memory::{check_memfd, memfd};
pub use provider::{
    CqParts, HcaStats, Health, MrKeys, OnGpu, Places, Provider, QpParts, QpRequest, Staging, TransferPath,
    Transport,
};
pub use qp_state::QpState;
