//! Environment variables that change how the library behaves.

/// The value of a variable; an empty one counts as unset.
pub fn variable(name: &str) -> Option<String> {
    // Lossy, so that a value that is not UTF-8 is reported as wrong and not overlooked.
    let value = std::env::var_os(name)?.to_string_lossy().trim().to_owned();
    (!value.is_empty()).then_some(value)
}
