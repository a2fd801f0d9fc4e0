//! Why a tool did not succeed.

use std::fmt::Display;

/// Why a tool did not succeed.
#[derive(Debug)]
pub enum Failure {
    /// The options make no sense together.
    Usage(String),
    /// Something went wrong, or was found to be wrong.
    Failed(String),
}

impl Failure {
    pub(super) fn failed(message: impl Display) -> Self {
        Self::Failed(message.to_string())
    }
}

impl<E: std::error::Error> From<E> for Failure {
    fn from(error: E) -> Self {
        Self::Failed(error.to_string())
    }
}

/// What the parts of the tools return.
pub(super) type Result<T> = std::result::Result<T, Failure>;
