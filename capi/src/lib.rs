//! `libgdasync.so.0`: a small C interface over crate `mp`, for programs and for runtimes that embed it.
//!
//! `include/gdasync.h` says what each function does. This crate adds three things to `mp`: handles that can be checked, error numbers,
//! and no call that waits without a timeout.
//!
//! - **Handles** are numbers ([`gdsync_capi_support::handles`]); no number is used twice for 2^32 objects of its place.
//! - **Communicators** fail at once where a queue is full ([`Communicator::with_timeout`](mp::Communicator::with_timeout) of zero).
//! - **Errors** are [`mp::Error::errno`], negative; the text is kept for `gda_last_error` and passed to the logger.

mod abi;
mod channel;
mod collective;
mod comm;
mod context;
mod create;
mod guard;
mod memory;
mod message;
mod request;
mod stream;
mod window;
mod words;

pub use abi::*;
pub use channel::*;
pub use collective::*;
pub use comm::*;
pub use context::*;
pub use create::*;
pub use memory::*;
pub use message::*;
pub use request::*;
pub use stream::*;
pub use window::*;
