//! libibverbs: `infiniband/verbs.h`.

mod attr;
mod context;
mod enums;
mod flags;
mod init;
mod inline;
mod object;
mod table;
mod work;

pub use attr::*;
pub use context::*;
pub use enums::*;
pub use flags::*;
pub use init::*;
pub use inline::*;
pub use object::*;
pub use table::Verbs;
pub use work::*;

use crate::abi::{Constant, Layout};

pub(crate) const LAYOUTS: &[&[Layout]] =
    &[attr::RECORDS, context::RECORDS, init::RECORDS, object::RECORDS, work::RECORDS];

pub(crate) const CONSTANTS: &[&[Constant]] = &[enums::ENUMERATIONS, enums::CONSTANTS, flags::FLAGS];
