//! The CPU proxy.

mod outcome;
mod translate;
