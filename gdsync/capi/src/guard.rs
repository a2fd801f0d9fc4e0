//! What surrounds every call from C, under the name of this library.

use std::ffi::c_int;

pub(crate) use gdsync::{Error, Result};
use gdsync_capi_support::guard::Library;
pub(crate) use gdsync_capi_support::guard::{last_error, no_flags, non_null, set_wait_limit, wait_limit};

pub(crate) const LIBRARY: Library = Library { name: "gdsync", debug: "GDS_ENABLE_DEBUG" };

pub(crate) fn run<T>(name: &'static str, call: impl FnOnce() -> Result<T>) -> std::result::Result<T, c_int> {
    LIBRARY.run(name, call)
}

pub(crate) fn status(name: &'static str, call: impl FnOnce() -> Result<()>) -> c_int {
    LIBRARY.status(name, call)
}
