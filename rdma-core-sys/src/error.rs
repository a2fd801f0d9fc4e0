//! What is missing, and which package brings it.

/// Why an entry point of rdma-core cannot be called.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LoadError {
    /// The library is not there, or cannot be loaded.
    #[error("loading {library}: {cause}; {fix}")]
    Library {
        /// The name or path that was tried.
        library: String,
        /// What the dynamic linker says.
        cause: String,
        /// What the user can do.
        fix: String,
    },
    /// The library is older than this function.
    #[error("{library} has no {symbol}; {fix}")]
    Symbol {
        /// The name or path of the library.
        library: String,
        /// The function.
        symbol: &'static str,
        /// What the user can do.
        fix: String,
    },
}
