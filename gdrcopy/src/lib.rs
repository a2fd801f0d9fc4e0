//! CPU mappings of GPU memory on stock drivers, with fast copies.
//!
//! A CPU store of four bytes to a mapping of GPU memory takes about ten nanoseconds; a `cuMemcpy` takes six microseconds. A
//! mapping goes through PCIe BAR1 or a coherent link, and there are several ways to make one. [`Gdr::open`] takes the first
//! backend that works, and records why it refused the earlier ones:
//!
//! | backend | needs | after the memory is freed, a mapping shows |
//! |---|---|---|
//! | `gdrdrv` | the kernel module of GDRCopy 2.0 to 2.6, or ours | the old bytes, until unpin. A module that takes mappings away is refused unless [`GdrBuilder::allow_volatile`] |
//! | `dmabuf` | CUDA 13.3 | the old bytes, until unpin |
//! | `rm` | a stock driver with NVIDIA's open kernel modules; no module of its own, no privilege | the old bytes, until unpin |
//! | `host` | nothing: plain memory, for machines without a GPU | the old bytes, until unpin |
//!
//! [`Pin`] describes the exceptions to "the old bytes".
//!
//! ```
//! # fn main() -> gdrcopy::Result<()> {
//! # let builder = gdrcopy::Gdr::builder().backend(gdrcopy::BackendKind::Host);
//! # let gdr = builder.open()?;
//! # let _ = r#"
//! let gdr = gdrcopy::Gdr::open()?;
//! # "#;
//! let buffer = gdr.alloc(0, 4096)?; // or map existing memory: gdr.map(device_pointer, length)
//! let mapping = buffer.map()?;
//! mapping.write(16, b"data")?;
//! assert_eq!(mapping.load::<u32>(16)?, u32::from_le_bytes(*b"data"));
//! # Ok(())
//! # }
//! ```
//!
//! # Rules
//!
//! - Any address and length within one CUDA allocation can be pinned and mapped, whether of `cuMemAlloc`, `cuMemCreate` or a pool
//!   (`cuMemAllocAsync`), and a range of several adjacent `cuMemMap` mappings; the library aligns. A mapping begins at the byte that
//!   was asked for.
//! - `rm` replaces libcuda's import of `ioctl`, for libcuda alone and for the rest of the process, to learn which objects memory
//!   consists of. All calls but its own questions pass through unchanged. The library cannot be unloaded then.
//! - A [`Mapping`] keeps its [`Pin`] alive, and a pin its backend. Drop them in any order, on any thread.
//! - [`Gdr::open`] initialises CUDA, except with `gdrdrv` and `host`; children forked afterwards cannot use CUDA.
//!   [`GdrBuilder::survey`] delays that until the first use.
//! - The best way to copy depends on the size: [`Planner`].
//!
//! # Features
//!
//! | feature | effect |
//! |---|---|
//! | none | The crate has no features. `libcuda` is loaded at run time, so it builds and starts on machines without CUDA |
//!
//! # Memory model and safety
//!
//! - **Device memory is shared.** The GPU, network cards and other threads may access the bytes of a mapping at any time. So the
//!   library never makes a Rust reference to them: it uses volatile accesses and, for longer copies, instructions in assembly.
//!   A race with another writer gives some bytes of each; it is not undefined behaviour.
//! - **Atomicity.** A naturally aligned access of 1, 2, 4 or 8 bytes is one access of the device. Longer ones may be torn.
//! - **Ordering.** A BAR1 mapping is write-combined: stores leave the core late and in any order. [`Mapping::write`] and
//!   [`Mapping::store`] end with a store fence, [`Mapping::read`] and [`Mapping::load`] with a load fence. What a running kernel
//!   sees, and when, is described at [`Mapping`].
//! - **Lifetime.** A pin keeps the physical memory, so a mapping of freed memory shows old bytes instead of faulting. Only a
//!   volatile `gdrdrv`, which [`GdrBuilder::allow_volatile`] must allow, and [`Mapping::revoke`] raise `SIGBUS`.
//! - **Wrong mappings are refused.** `dmabuf` and `rm` prove each kind of mapping with memory of their own, in both directions,
//!   and compare every mapping of the caller's memory with what CUDA shows before they return it.
//! - **Fork.** Values belong to the process that made them. A forked child has a hole where a mapping was; calls there return
//!   [`Error::OtherProcess`], and drops there release nothing of the parent's.
//! - **Trust.** [`Kernel`](system::Kernel) and [`EntryPoints`](cuda::EntryPoints) replace the kernel and the CUDA driver; both
//!   are `unsafe` to provide, since the library relies on what they do.
//!
//! The repository's `TESTING.md` lists the drivers and GPUs that the library has run on.

mod backend;
pub mod copy;
mod cpu_range;
pub mod cuda;
mod error;
pub mod fork;
mod gdr;
mod mapping;
mod pin;
pub mod planner;
pub mod system;
mod types;

pub use error::{Error, Refusal, Result};
pub use gdr::{Gdr, GdrBuilder, Survey};
pub use mapping::{Mapping, Word};
pub use pin::{GpuBuffer, Pin, PinInfo};
pub use planner::Planner;
pub use types::{Attribute, BackendKind, MappingType, PinFlags, host_page};
