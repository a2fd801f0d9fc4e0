//! Refusals of this crate, in the error type of `gdrcopy`.

use std::fmt;
use std::ptr::NonNull;

pub(crate) use gdrcopy::{Error, Result};

pub(crate) fn invalid(what: &'static str, value: impl fmt::Display, expected: &'static str) -> Error {
    Error::InvalidArgument { what, value: value.to_string(), expected }
}

/// A pointer of the caller's that is not `NULL`.
pub(crate) fn non_null<T>(what: &'static str, pointer: *mut T) -> Result<NonNull<T>> {
    NonNull::new(pointer).ok_or_else(|| invalid(what, "NULL", "a pointer"))
}
