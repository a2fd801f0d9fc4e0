//! The backends on simulated machines, on our kernel module and on a real GPU, and the copy routines.

mod abi;
mod contract;
mod copies;
mod cuda_driver;
mod cuda_gpu;
mod dmabuf;
mod gdrdrv;
mod kmod;
mod located;
mod objects;
mod pin_stress;
mod rig;
mod rm;
mod survey;
mod whole_pages;

// The library keeps these descriptions of kernel interfaces private.
#[allow(dead_code, reason = "what the library needs of it")]
#[path = "../../src/backend/gdrdrv/abi.rs"]
mod gdrdrv_abi;
#[allow(dead_code, reason = "what the library needs of it")]
#[path = "../../src/backend/rm/abi.rs"]
mod rm_abi;
