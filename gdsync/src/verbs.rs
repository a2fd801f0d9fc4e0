//! Devices, protection domains, memory regions, completion queues and queue pairs: RC verbs on mlx5 rings.

mod address;
mod attr;
mod completion;
pub(crate) mod cq;
mod descriptor;
mod device;
pub(crate) mod end;
mod mr;
pub(crate) mod placement;
pub(crate) mod provider;
pub(crate) mod qp;
pub(crate) mod rq;
pub(crate) mod sq;
pub(crate) mod track;
mod transfer_path;
mod visibility;
mod wr;

pub use address::QpAddress;
pub(crate) use address::{mtu_bytes, mtu_code};
pub(crate) use attr::MAX_RD_ATOMIC;
pub use attr::{Access, QpAttr, QpState};
pub use completion::{Completion, Submitted};
pub use cq::Cq;
pub use descriptor::{DeviceCq, DeviceQp};
pub use device::{Context, Device, Pd};
pub use mr::{Mr, MrGuard};
pub use placement::OnGpu;
pub use qp::{Qp, QpBuilder};
pub use transfer_path::{Staging, TransferPath, Transport};
pub use wr::{CompletionError, RecvWr, SendWr, Sge, Wc};
