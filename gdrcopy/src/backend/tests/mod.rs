//! What every backend must do, on simulated machines.

mod alike;
mod children;
mod located;
mod pages;
mod proof;
mod revoked;
pub(crate) mod rig;
