//! The backend against every version and mode of the simulated module.

mod errors;
mod open;
mod requests;
mod types;
mod versions;
mod volatile;
