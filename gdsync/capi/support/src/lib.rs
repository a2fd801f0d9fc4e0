//! Shared by the libraries for C: guards around calls, handles, the streams of a program, and the pages of its words.

pub mod guard;
pub mod handles;
pub mod pages;
pub mod process;
pub mod streams;
