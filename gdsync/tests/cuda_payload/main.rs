//! Payload in every kind of memory: on GPUs where there are any, on the simulated driver within one process otherwise.

#[path = "../common/mod.rs"]
mod common;
mod hang;
mod kinds;
mod pairs;
mod processes;
mod wrap;
