//! The test doubles by themselves: each entry point used and misused.

mod cuda;
mod driver;
mod uninitialised_driver;
