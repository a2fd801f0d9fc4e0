//! The tests of the command line, the examples and the documents: they run the programs as users do.

mod bench;
mod c_libraries;
mod card;
mod common;
mod docs;
mod doctor;
mod examples;
mod on_gpu;
mod plot;
mod tools;
mod trace;
mod usage;
