//! libmlx5: direct verbs and DevX, `infiniband/mlx5dv.h`.

mod attr;
mod bits;
mod devx;
mod object;
mod table;

pub use attr::*;
pub use bits::*;
pub use devx::*;
pub use object::*;
pub use table::Mlx5;

use crate::abi::{Constant, Layout};

pub(crate) const LAYOUTS: &[&[Layout]] = &[attr::RECORDS, devx::RECORDS, object::RECORDS];

pub(crate) const CONSTANTS: &[&[Constant]] = &[
    attr::ENUMERATIONS,
    attr::FLAGS,
    attr::CONSTANTS,
    devx::ENUMERATIONS,
    devx::FLAGS,
    object::FLAGS,
    object::CONSTANTS,
];
