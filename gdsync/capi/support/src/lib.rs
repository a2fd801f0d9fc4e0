//! What `libgdsync.so.2` and `libmp.so.2` share: what surrounds a call from C, the streams of a program, and the pages of its words.

pub mod guard;
pub mod pages;
pub mod streams;
