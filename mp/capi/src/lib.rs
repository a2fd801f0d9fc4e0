//! `libmp.so.2`: the C interface of LibMP 2.0 on stock drivers.
//!
//! Programs written for LibMP compile with `include/mp.h`. Each peer has one reliable connection, on the device nearest to the
//! GPU: a card, any other RDMA device by a CPU thread, or without one the software HCA.
//!
//! Functions return 0, `MP_FAILURE` (1) or an error number of `errno.h`; a failure is one line on standard error, and its reason the
//! text of `mpx_last_error`.
//!
//! # What differs from LibMP
//!
//! - **Nothing exits or aborts.** Failed requests are failures of `mp_wait`, and end the waits of streams for them.
//! - **Waits may have a limit**: `GDSYNC_CAPI_WAIT_LIMIT` (seconds), or `mpx_set_wait_limit` (milliseconds). The default is none.
//! - **Handles** are numbers that are never used twice. A request that was ended counts as complete.
//! - **Ranges** of messages, puts and gets must lie in their registration and window.
//! - **Prepared sends** to a peer must be posted in order (`EINVAL`), and by one stream at a time (`EBUSY`, after ten seconds).
//! - **`mp_wait32`** with `MP_WAIT_EQ` waits for equality; `mp_wait32_on_stream` takes the condition that it is given.
//! - **Without effect**: `MP_ENABLE_UD` (connections are reliable, `mp_init` says so), `MP_EVENT_ASYNC` (the CPU takes completions that a
//!   stream waits for after the stream), `MP_ENABLE_IPC` (ranks of one host copy between GPUs anyway).
//! - **Not exported**: `mp_irecv_on_stream`, which LibMP exports without declaring it.
//!
//! The library is built on the crates, not on `libgdsync.so.2`: thus it needs no libibverbs, and registers memory of GPUs in every way
//! that they know. A program may use both libraries.

mod abi;
mod calls;
mod failure;
mod job;
mod memory;
mod request;
mod submission;

pub use abi::*;
pub use calls::*;
