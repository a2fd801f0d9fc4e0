//! `libgdsync.so.2`: the C interface of libgdsync 2.2 on stock drivers and an unpatched rdma-core.
//!
//! Programs written for libgdsync's direct-verbs port compile with `include/gdsync.h`. They keep their libibverbs:
//! `gds_create_qp` takes their `ibv_context` and `ibv_pd`, of a ConnectX card or of the emulated one (`gdasync card`).
//!
//! Functions return 0 or an error number of `errno.h`; a failure is one line on standard error, and its reason the text of
//! `gdsx_last_error`. Full queues (`ENOMEM`) are not printed: callers poll and try again. `GDS_ENABLE_DEBUG=1` prints messages
//! of all levels.
//!
//! # What differs from libgdsync
//!
//! - **Nothing exits or aborts.** Errors of CUDA, of the card and of the program are error numbers.
//! - **A failed request ends the waits for it**, on streams too. `gds_poll_cq` returns the completion with its status.
//! - **Waits may have a limit**: `GDSYNC_CAPI_WAIT_LIMIT` (seconds), or `gdsx_set_wait_limit` (milliseconds). The default is none.
//! - **Handles** are checked: `NULL`, destroyed and foreign ones are `EINVAL`, and no address is used for two. Of a request and its
//!   copies one can be posted, once.
//! - **Any thread** may make any call. A forked child gets `EACCES`.
//! - **A wait** is for a request that is posted or prepared; else it is `EINVAL`. Waits of a queue must be posted in the order of their
//!   claims: behind a prepared wait that is not posted, `gds_stream_wait_cq` is `EINVAL`.
//! - **Prepared sends** of a queue pair must be posted in order (`EINVAL`), and by one stream at a time (`EBUSY`). If a stream refuses
//!   sends, they are taken back, and claims of waits given back.
//! - **Only mlx5 cards that read the rings themselves**: for another `ibv_context`, `gds_create_qp` is `EOPNOTSUPP`.
//! - **`GDS_CREATE_QP_TX_CQ_ON_GPU`, `_RX_CQ_ON_GPU`, `_WQ_DBREC_ON_GPU`** are accepted; the queues are in host memory, which one line on standard error says.
//! - **The per-thread default stream** is `EOPNOTSUPP`. Streams need a driver of CUDA 12.
//! - **Not exported**: `gds_create_cq`, `gds_register_mem`, `gds_unregister_mem`, `gds_map_mem`, `gds_append_wait_cq`,
//!   `gds_post_pokes`, which libgdsync exports without declaring them.

mod abi;
mod batch;
mod calls;
mod guard;
mod pairs;
mod words;
mod work;

pub use abi::*;
pub use calls::*;
