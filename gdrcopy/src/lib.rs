//! CPU mappings of GPU memory on stock drivers, with fast copies.

mod backend;
pub mod copy;
mod cpu_range;
pub mod cuda;
mod error;
mod fork;
mod kernel;
#[cfg(feature = "standin")]
#[doc(hidden)]
pub mod standin;
mod system;

pub use backend::{Attribute, BackendKind, MappingType, PinFlags};
pub use error::{Error, Refusal, Result};
#[doc(hidden)]
pub use kernel::Kernel;
#[doc(hidden)]
pub use system::System;
