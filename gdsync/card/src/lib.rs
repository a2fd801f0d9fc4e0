//! An emulated mlx5 card for any program: this library is preloaded and plays the kernel.
//!
//! `gdasync card PROGRAM` preloads it. The program's unmodified libibverbs and libmlx5 then find the device `mlx5_0`: its
//! files under `/sys` and `/dev/infiniband` are in memory (`sysfs`), its descriptor is a file in memory whose pages are
//! doorbell pages (`process`), and the commands that they write to it are carried out here (`context`) by a software
//! HCA ([`gdsync_soft::Card`]), which reads the rings that libmlx5 writes. Each process has an HCA and an address of its
//! own; those of one host reach each other.
//!
//! Calls that do not concern the card go to the C library after one comparison. Nothing happens before the first use:
//! the library is in every process of a tree, also in shells.

mod abi;
mod address;
mod command;
mod context;
mod events;
mod hca;
#[cfg_attr(test, allow(dead_code, reason = "tests call only some of what the linker calls"))]
mod hooks;
mod log;
mod modes;
mod process;
mod sysfs;
mod user;
