//! The gdrdrv backend against every version and mode of the simulated module.

mod abi;
mod errors;
mod open;
mod requests;
mod types;
mod versions;
mod volatile;
