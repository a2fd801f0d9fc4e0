//! The documents as doctests: their programs are compiled, and run where they say nothing else.

#[doc = include_str!("../README.md")]
mod readme {}
#[doc = include_str!("../docs/guide.md")]
mod guide {}
#[doc = include_str!("../docs/porting.md")]
mod porting {}
