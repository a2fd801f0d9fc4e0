//! Shared by the libraries for C: guards around calls, the streams of a program, and the pages of its words.

pub mod guard;
pub mod pages;
pub mod streams;
