//! The functions of the library on simulated machines: every version of the kernel module, drivers without it, and what
//! each of their failures comes to.

mod dmabuf;
mod first_use;
mod gdrdrv;
mod library;
mod pages;
mod rm;
