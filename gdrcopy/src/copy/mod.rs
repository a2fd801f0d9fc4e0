//! Copies between host memory and mappings.
