//! All that this crate declares, for the test that compares it with the headers.

use crate::abi::{Constant, Layout};

/// The structures and unions of this crate.
pub fn layouts() -> impl Iterator<Item = &'static Layout> {
    crate::verbs::LAYOUTS.iter().chain(crate::mlx5::LAYOUTS).copied().flatten()
}

/// The constants of this crate.
pub fn constants() -> impl Iterator<Item = &'static Constant> {
    crate::verbs::CONSTANTS.iter().chain(crate::mlx5::CONSTANTS).copied().flatten()
}
