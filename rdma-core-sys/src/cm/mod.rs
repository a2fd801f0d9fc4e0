//! librdmacm: `rdma/rdma_cma.h`, as far as connections of queue pairs that somebody else made need it.

mod object;
mod table;

pub use object::*;
pub use table::RdmaCm;

use crate::abi::{Constant, Layout};

pub(crate) const LAYOUTS: &[&[Layout]] = &[object::RECORDS];

pub(crate) const CONSTANTS: &[&[Constant]] = &[object::ENUMERATIONS];
