//! The backend against every version and mode of the simulated module, and our module in a real kernel.

mod errors;
mod kmod;
mod open;
mod requests;
mod types;
mod versions;
mod volatile;
