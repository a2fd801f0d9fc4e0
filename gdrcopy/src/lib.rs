//! CPU mappings of GPU memory on stock drivers, with fast copies.

mod backend;
mod buffer;
pub mod copy;
mod cpu_range;
pub mod cuda;
mod error;
mod fork;
mod gdr;
mod kernel;
mod mapping;
mod pin;
#[cfg(feature = "standin")]
#[doc(hidden)]
pub mod standin;
mod system;

pub use backend::{Attribute, BackendKind, MappingType, PinFlags};
pub use buffer::GpuBuffer;
pub use error::{Error, Refusal, Result};
pub use gdr::{Gdr, GdrBuilder};
#[doc(hidden)]
pub use kernel::Kernel;
pub use mapping::{Mapping, Word};
pub use pin::{Pin, PinInfo};
#[doc(hidden)]
pub use system::System;
