//! Failures of calls.

use std::ffi::c_int;
use std::fmt;

use gdsync_capi_support::guard::{self, Library};
use gdsync_capi_support::handles::Refusal;

use crate::abi::FAILURE;

pub(crate) const LIBRARY: Library = Library { name: "mp", debug: "MP_ENABLE_DEBUG" };

/// Why a call fails, and what it returns.
#[derive(Clone, Debug)]
pub(crate) struct Failure {
    errno: c_int,
    reason: String,
}

pub(crate) type Result<T> = std::result::Result<T, Failure>;

impl Failure {
    /// `MP_FAILURE`
    pub(crate) fn new(reason: impl Into<String>) -> Self {
        Self { errno: FAILURE, reason: reason.into() }
    }

    /// `EINVAL`
    pub(crate) fn invalid(what: &'static str, value: impl ToString, expected: &'static str) -> Self {
        gdsync::Error::invalid(what, value, expected).into()
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.reason)
    }
}

impl guard::Failure for Failure {
    fn errno(&self) -> c_int {
        self.errno
    }

    fn is_retried(&self) -> bool {
        false
    }
}

impl From<gdsync::Error> for Failure {
    fn from(error: gdsync::Error) -> Self {
        Self { errno: error.errno(), reason: error.to_string() }
    }
}

impl From<Refusal> for Failure {
    fn from(Refusal { errno, text }: Refusal) -> Self {
        Self { errno, reason: text }
    }
}

impl From<mp::Error> for Failure {
    fn from(error: mp::Error) -> Self {
        Self::new(error.to_string())
    }
}
