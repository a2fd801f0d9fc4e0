//! Verbs on mlx5 rings: devices, protection domains, memory regions, completion queues and queue pairs.

mod completion;
mod context;
pub(crate) mod cq;
mod descriptor;
pub(crate) mod end;
mod mr;
pub(crate) mod old_keys;
pub(crate) mod qp;
pub(crate) mod room;
pub(crate) mod rq;
pub(crate) mod source;
pub(crate) mod sq;
pub(crate) mod stream_name;
pub(crate) mod track;
mod wr;
pub(crate) mod writers;

pub use completion::Completion;
pub use context::{Context, Pd};
pub use cq::Cq;
pub use descriptor::{DeviceCq, DeviceQp};
pub use gdsync_device::{
    Access, CompletionError, OnGpu, QpAddress, QpAttr, QpState, Staging, TransferPath, Transport,
};
pub use mr::{Mr, MrGuard};
pub use qp::{Qp, QpBuilder};
pub use wr::{RecvWr, RemoteAddr, SendWr, Sender, Sge, Wc};
