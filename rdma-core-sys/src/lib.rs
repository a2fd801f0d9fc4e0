//! Published as `gdsync-rdma-core-sys`. The `rdma-core-sys` of the registry is not used: it builds rdma-core 18 with tools
//! that are not there, does not compile on today's Rust, and has no `mlx5dv`. This one declares what it needs by hand.
//!
//! Types, constants and the `static inline` functions of libibverbs (`infiniband/verbs.h`) and libmlx5 (direct verbs and
//! DevX, `infiniband/mlx5dv.h`), under their names in C, as of rdma-core 44, and [those of libfabric](fabric) that carry messages.
//! Nothing is linked and nothing of these is needed to build: [`Verbs`], [`Mlx5`] and [`Fabric`] are tables of entry points, filled at
//! run time. A test compares every declaration with the headers where they are installed.
//!
//! - A type `ibv_x` here is `struct ibv_x` (or `union`, or `enum`) there; all-zero bytes are a value of every structure.
//! - Enumerations are integers with constants, so that a value of a newer library is no undefined behaviour; flags
//!   keep bits without a name.
//! - Structures that a *library* allocates and extends at their end are declared as far as they are known.

#![allow(non_camel_case_types, non_upper_case_globals, reason = "the names of the libraries")]

pub mod abi;
pub mod fabric;
mod load;
pub mod mlx5;
pub mod verbs;

pub use fabric::Fabric;
pub use load::LoadError;
pub use mlx5::Mlx5;
pub use verbs::Verbs;

/// The structures and unions of this crate.
pub fn layouts() -> impl Iterator<Item = &'static abi::Layout> {
    verbs::LAYOUTS.iter().chain(mlx5::LAYOUTS).chain(fabric::LAYOUTS).copied().flatten()
}

/// The constants of this crate.
pub fn constants() -> impl Iterator<Item = &'static abi::Constant> {
    verbs::CONSTANT_LISTS.iter().chain(mlx5::CONSTANT_LISTS).chain(fabric::CONSTANT_LISTS).copied().flatten()
}
