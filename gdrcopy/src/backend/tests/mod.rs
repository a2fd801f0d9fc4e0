//! What every backend must do, on simulated machines.

mod alike;
mod children;
mod proof;
pub(crate) mod rig;
