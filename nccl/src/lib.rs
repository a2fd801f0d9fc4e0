//! `libnccl-rma-gda.so`: a plug-in that carries NCCL's puts, signals and GIN over the RDMA devices of this project, and over its software
//! HCA where there is no card. `NCCL_RMA_PLUGIN=gda` selects it. `docs/nccl.md` says how to use it.
//!
//! NCCL ends no stream that waits for a rank that has died, and ignores errors of a plug-in. So this one returns none once ranks are
//! connected. When a rank is lost it releases the streams: requests count as complete, and 2^62 is added to each word that may be a
//! signal. It tells the program by NCCL's log, by `queryLastError` where GIN asks, and by `include/gda_nccl.h`.
//!
//! | module | |
//! |---|---|
//! | [`abi`] | structures of NCCL and of the header |
//! | `calls` | the functions and the three tables |
//! | `collective` | the ranks of a communicator: connection, loss of a rank, release of streams |
//! | `operation` | contexts, puts, gets and their requests |
//! | `region`, `listen`, `device` | registered memory; the socket of rank 0; what NCCL is told of devices |
//! | `release` | the release of streams, once |
//! | `report` | log, status, eventfd |

pub mod abi;
mod calls;
mod collective;
mod device;
mod listen;
mod operation;
mod region;
mod release;
mod report;

/// What [`release`] is made of; loom's in its models.
mod sync {
    pub(crate) use std::sync::atomic::{AtomicU8, Ordering};

    pub(crate) use parking_lot::Mutex;
}

pub use calls::*;
pub use report::{gda_nccl_eventfd, gda_nccl_status};
