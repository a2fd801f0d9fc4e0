//! CPU mappings of GPU memory on stock drivers, with fast copies.
//!
//! The CPU stores four bytes into GPU memory in some ten nanoseconds, where a `cuMemcpy` takes six microseconds. What it needs is a mapping of
//! the memory through PCIe BAR1 (or a coherent link), and there are several ways to one. [`Gdr::open`] takes the first
//! that works, and says why not an earlier one:
//!
//! | backend | needs | freeing the memory under a mapping |
//! |---|---|---|
//! | `gdrdrv` | the kernel module of GDRCopy 2.0 to 2.6, or ours | the old bytes stay until unpin; a module that cannot do that is refused unless [`GdrBuilder::allow_volatile`] |
//! | `dmabuf` | CUDA 13.3 | the old bytes stay until unpin |
//! | `rm` | a stock driver, no module, no privilege | the old bytes stay until unpin |
//! | `host` | nothing: plain memory, where there is no GPU | the old bytes stay until unpin |
//!
//! The old bytes: [`Pin`] has the exception.
//!
//! ```
//! # fn main() -> gdrcopy::Result<()> {
//! # let builder = gdrcopy::Gdr::builder().backend(gdrcopy::BackendKind::Host);
//! # let gdr = builder.open()?;
//! # let _ = r#"
//! let gdr = gdrcopy::Gdr::open()?;
//! # "#;
//! let buffer = gdr.alloc(0, 4096)?; // or any memory of yours: gdr.map(device_pointer, length)
//! let mapping = buffer.map()?;
//! mapping.write(16, b"data")?;
//! assert_eq!(mapping.load::<u32>(16)?, u32::from_le_bytes(*b"data"));
//! # Ok(())
//! # }
//! ```
//!
//! # Rules
//!
//! - Any address and length of one CUDA allocation can be pinned and mapped; alignment is this library's business. A
//!   mapping begins at the byte that was asked for.
//! - [`Mapping`] keeps its [`Pin`], a pin its [`Gdr`]; they may be dropped in any order, on any thread.
//! - [`Gdr::open`] initialises CUDA, except with `gdrdrv` and `host`; children that are forked afterwards cannot use it.
//!   [`GdrBuilder::survey`] puts it off until the first need.
//! - A forked child has a hole where the mapping was. Pins do not work there, and dropping them does nothing.
//! - What a running kernel sees, and when: [`Mapping`].
//! - No size is best copied in one way: [`Planner`].
//!
//! What has run on which driver and GPU is in the repository's `TESTING.md`.

mod backend;
mod buffer;
mod builder;
pub mod copy;
mod cpu_range;
pub mod cuda;
mod error;
pub mod fork;
mod gdr;
mod mapping;
mod memory_file;
mod pin;
pub mod planner;
mod survey;
pub mod system;

pub use backend::{Attribute, BackendKind, MappingType, PinFlags, host_page};
pub use buffer::GpuBuffer;
pub use builder::GdrBuilder;
pub use error::{Error, Refusal, Result};
pub use gdr::Gdr;
pub use mapping::{Mapping, Word};
pub use pin::{Pin, PinInfo};
pub use planner::Planner;
pub use survey::Survey;
