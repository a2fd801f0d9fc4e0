//! The library as C programs and installers see it: needs gcc, no GPU.

mod common;
mod exports;
mod install;
mod layout;
mod programs;
