/* GPUDirect Async for programs and libraries in C: messages, one-sided operations and collectives that the CPU or a stream starts and
 * awaits, over RDMA devices. Made to be embedded, as in an MPI-like runtime.
 *
 * - Calls return GDA_OK (0), GDA_IN_PROGRESS (1) or a negative error number of errno.h, whose name strerror(-number) has.
 *   gda_last_error() has the reason, in words, of the last failure of the calling thread. Nothing exits, aborts or prints.
 * - Calls start something and return. Only those with `timeout_ns` wait: 0 looks once, -1 waits for ever, other negative values are
 *   -EINVAL. A call that finds no room in a queue or a stream, or a queue with work of another stream, returns -EAGAIN: call
 *   gda_progress, and try again.
 * - Handles are numbers. One that is NULL, ended or of another type is -EINVAL; one that another thread waits with is -EBUSY.
 * - Any thread may make any call. A process that was forked after the first call gets -EACCES.
 * - Structures begin with `struct_size`, which the caller sets to sizeof: later versions may append fields.
 * - The library calls the caller's functions without a lock held. They may make any call, except those of gda_stream_call and
 *   gda_set_logger. They must return, not longjmp or throw.
 */

#ifndef GDASYNC_H
#define GDASYNC_H

#include <stddef.h>
#include <stdint.h>

#define GDA_VERSION_MAJOR 0
#define GDA_VERSION_MINOR 1
#define GDA_VERSION (((uint32_t)GDA_VERSION_MAJOR << 16) | (uint32_t)GDA_VERSION_MINOR)

#define GDA_OK 0
#define GDA_IN_PROGRESS 1

#ifdef __cplusplus
extern "C" {
#endif

typedef struct gda_ctx *gda_ctx_t;       /* a device, and what is opened with it */
typedef struct gda_comm *gda_comm_t;     /* ranks */
typedef struct gda_listen *gda_listen_t; /* a place that others connect to */
typedef struct gda_mem *gda_mem_t;       /* registered memory */
typedef struct gda_peer_mem *gda_peer_mem_t; /* GPU memory of another process */
typedef struct gda_req *gda_req_t;       /* an operation under way */
typedef struct gda_win *gda_win_t;       /* memory that other ranks access */
typedef struct gda_chan *gda_chan_t;     /* messages that are repeated */
typedef struct gda_stream *gda_stream_t; /* work in order: of the CPU, of CUDA, or recorded in a batch */
typedef struct gda_graph *gda_graph_t;   /* recorded work to launch again */

/* The version of the library: GDA_VERSION of its header. */
uint32_t gda_version(void);

/* The reason of the last failure of the calling thread. Valid until its next failure; never NULL. */
const char *gda_last_error(void);

enum { GDA_LOG_ERROR = 1, GDA_LOG_WARN, GDA_LOG_INFO, GDA_LOG_DEBUG };

/* Sets the function that gets the library's messages up to `level`, one line each, for the whole process; NULL: none. It is called on
 * the thread that has the message, and must not make calls. One that was set before may still be in a message of another thread. */
int gda_set_logger(void (*log)(void *self, int level, const char *text), void *self, int level);

/* ---- Contexts ---- */

struct gda_config {
    uint32_t struct_size;
    int32_t gpu;         /* the CUDA device whose streams are used, -1 for none */
    const char *device;  /* a name such as mlx5_0, or soft0 for a software device; NULL: the best one */
    uint32_t depth;      /* messages under way to each rank, and from it: at most 32768; 0: 512 */
    uint32_t max_pieces; /* pieces of a message: at most 30; 0: 2 */
};

struct gda_info {
    uint32_t struct_size;
    uint32_t is_software; /* the device is a software one */
    uint32_t is_direct;   /* GPUs and CPUs ring the card itself, no thread between */
    uint32_t max_inline;  /* bytes of gda_put_bytes */
    char device[128];
};

/* Environment variables give the rest: GDSYNC_DEVICE the device if `device` is NULL; GDSYNC_PATH, MP_LOCAL, MP_GPU_PATH and others the
 * settings that have no field. `gpu` 0 is the first GPU. */
int gda_open(const struct gda_config *config, gda_ctx_t *ctx);
int gda_info(gda_ctx_t ctx, struct gda_info *info);
/* The device stays open until its last communicator is destroyed. Functions of gda_req_on_done that were not called are not called any
 * more. */
int gda_close(gda_ctx_t ctx);

/* Moves the messages of all communicators along, and calls the functions of gda_req_on_done whose requests are complete. */
int gda_progress(gda_ctx_t ctx);
/* A descriptor for poll and epoll, or an error. The caller must not read or close it. */
int gda_event_fd(gda_ctx_t ctx);
/* Makes the descriptor readable when the next request of gda_req_on_done is complete. GDA_IN_PROGRESS: one is complete already;
 * call gda_progress, and do not sleep. */
int gda_arm(gda_ctx_t ctx);

/* ---- Communicators ---- */

/* The caller's way to exchange addresses between ranks. All ranks make the same calls in the same order. Its functions are called on
 * the thread that makes a call of all ranks, or, where that gets a request, on a thread of the library. */
struct gda_exchange {
    uint32_t struct_size;
    int32_t rank, size;
    int32_t reserved; /* 0 */
    void *self;
    /* Gives every rank the `len` bytes of each rank, in rank order; `len` is the same at all. Returns 0 or a negative error number. */
    int (*allgather)(void *self, const void *mine, size_t len, void *all, int64_t timeout_ns);
    /* Called when the communicator no longer needs the exchange, also if it cannot be made; may be NULL. */
    void (*release)(void *self);
};

enum {
    GDA_TAGGED = 1,     /* gda_tsend and gda_trecv */
    GDA_COLLECTIVES = 2 /* gda_barrier and the other collectives */
};

/* gda_comm_create, gda_accept and gda_connect wait if `req` is NULL. Else they return at once, and `comm`, which must stay valid, is set
 * before the request is complete. */

/* Called by all ranks. `exchange` NULL: the ranks find each other by the variables of a launcher (mpirun, srun, torchrun, or RANK and
 * WORLD_SIZE). */
int gda_comm_create(gda_ctx_t ctx, const struct gda_exchange *exchange, uint32_t flags, int64_t timeout_ns, gda_comm_t *comm,
                    gda_req_t *req);
/* The rank and the number of ranks, or an error. */
int gda_comm_rank(gda_comm_t comm);
int gda_comm_size(gda_comm_t comm);
/* Called by all ranks. Ranks of one color get a communicator, in the order of their keys; a rank with a negative color gets NULL. */
int gda_comm_split(gda_comm_t comm, int color, int key, int64_t timeout_ns, gda_comm_t *part);
/* Called by all ranks that live, which get a communicator in the same order. `former` (may be NULL) gets their ranks in `comm`, and needs
 * room for its size. Only for communicators of a launcher and their parts. */
int gda_comm_shrink(gda_comm_t comm, int64_t timeout_ns, gda_comm_t *survivors, int *former);
/* The ranks that can no longer be reached: their number, or an error. `ranks` (may be NULL) gets the first `room`. */
int gda_comm_lost(gda_comm_t comm, int *ranks, int room);
/* Ends the connection to a rank, or to all (-1): operations under way fail, here and there. */
int gda_comm_abort(gda_comm_t comm, int rank);
/* Called by all ranks, after all messages are received. Waits for sends and one-sided operations. What is not complete then, such as a
 * receive without a message, ends: its request is -ECANCELED, and so is a collective or another call of all ranks in another
 * thread; one over a gda_exchange ends with its allgather. The handle ends also if the call fails. */
int gda_comm_destroy(gda_comm_t comm, int64_t timeout_ns);

/* Processes that connect in pairs, at any time. Each pair is a communicator: the listener is rank 0, the other one rank 1. `address` has
 * room for `*len` bytes (GDA_ADDRESS_MAX are enough) and `*len` gets their number; the caller brings them to the other process. */
#define GDA_ADDRESS_MAX 64
int gda_listen(gda_ctx_t ctx, void *address, size_t *len, gda_listen_t *listener);
/* A gda_accept that waits, for a connection or for what the other process says, ends with -ECANCELED, as a request or in another thread. */
int gda_listen_close(gda_listen_t listener);
int gda_accept(gda_listen_t listener, uint32_t flags, int64_t timeout_ns, gda_comm_t *comm, gda_req_t *req);
int gda_connect(gda_ctx_t ctx, const void *address, size_t len, uint32_t flags, int64_t timeout_ns, gda_comm_t *comm, gda_req_t *req);

/* ---- Memory ---- */

enum {
    GDA_CACHED = 1 /* kept registered after gda_mem_dereg; not for windows. See gda_mem_invalidate. */
};

/* Registers host or GPU memory; CUDA is asked which it is. It must stay allocated until it is deregistered and all its messages are
 * complete. GPU memory of a window must stay until gda_win_destroy has succeeded, and places of a channel until gda_comm_destroy has:
 * streams of other ranks of the host write there. Memory that is not mapped is -EFAULT; a software device looks at the first and last
 * byte only. */
int gda_mem_reg(gda_comm_t comm, void *addr, size_t len, uint32_t flags, gda_mem_t *mem);
/* Registers bytes of a dma-buf of another driver than CUDA. The descriptor may be closed afterwards. */
int gda_mem_reg_dmabuf(gda_comm_t comm, int fd, uint64_t offset, size_t len, gda_mem_t *mem);
/* Tells that cached host memory is about to be unmapped or freed. */
int gda_mem_invalidate(gda_comm_t comm, void *addr, size_t len);
int gda_mem_dereg(gda_mem_t mem);

/* GPU memory for kernels and copies of other processes of the host, by CUDA IPC. `blob` gets or has GDA_EXPORT_BYTES bytes; the caller
 * brings them to the other process. Memory that has no IPC handle (of the host, of a pool, of cuMemCreate) is -EOPNOTSUPP. */
#define GDA_EXPORT_BYTES 136
int gda_mem_export(gda_mem_t mem, void *blob);
/* Opens exported memory for the context's GPU; `addr` gets its first byte. The owner must not free it while it is open. -EOPNOTSUPP where the
 * GPUs have no peer access. */
int gda_mem_import(gda_ctx_t ctx, const void *blob, gda_peer_mem_t *peer, void **addr);
int gda_peer_mem_close(gda_peer_mem_t peer);

/* A range of registered memory. */
struct gda_buf {
    gda_mem_t mem;
    uint64_t offset, len;
};

/* ---- Messages ----
 *
 * `stream` NULL: the CPU starts the message now. Else the stream starts it when it gets there: a send waits there for its receive to be
 * posted. Neither holds the stream until the message has gone or come: gda_req_on_stream does. `req` NULL: the caller does not ask for
 * the outcome. A send that is complete at once sets `*req` to NULL.
 */

/* Without tags: receives from a rank get its messages in the order of the sends. A message longer than its receive ends the connection. */
int gda_send(gda_comm_t comm, int rank, const struct gda_buf *bufs, int n, gda_stream_t stream, gda_req_t *req);
int gda_recv(gda_comm_t comm, int rank, const struct gda_buf *bufs, int n, gda_stream_t stream, gda_req_t *req);

#define GDA_ANY_RANK (-1)

/* With tags, by the CPU, on communicators with GDA_TAGGED. A receive takes a message whose tag equals `tag` in the bits of `mask`. Only
 * gda_trecv takes GDA_ANY_RANK. */
int gda_tsend(gda_comm_t comm, int rank, uint64_t tag, const struct gda_buf *buf, gda_req_t *req);
int gda_trecv(gda_comm_t comm, int rank, uint64_t tag, uint64_t mask, const struct gda_buf *buf, gda_req_t *req);

/* ---- Requests ----
 *
 * The call that tells the outcome of a request ends it. A NULL request is complete.
 */

struct gda_status {
    uint32_t struct_size;
    int32_t rank; /* the one at the other end */
    uint64_t len; /* bytes sent or received */
    uint64_t tag;
};

/* GDA_OK: complete, and the request has ended. GDA_IN_PROGRESS: not yet. A failure ends the request. `status` may be NULL. */
int gda_req_wait(gda_req_t req, int64_t timeout_ns, struct gda_status *status);
/* As gda_req_wait, for the first that is complete: `which` gets its index in `reqs`, and that entry becomes NULL. `which` is -1 if none is
 * complete, and where all are NULL. */
int gda_req_wait_any(gda_req_t *reqs, int n, int64_t timeout_ns, int *which, struct gda_status *status);
/* Hands the request over: gda_progress calls `done` once, with GDA_OK or the error; of NULL, this call does. `status` is valid during the
 * call of `done`. */
int gda_req_on_done(gda_ctx_t ctx, gda_req_t req, void (*done)(void *self, int result, const struct gda_status *status), void *self);
/* The stream goes on when the message is complete. Not for tagged ones. The request stays. */
int gda_req_on_stream(gda_req_t req, gda_stream_t stream);
/* Cancels a tagged receive that no message has matched: its outcome is -ECANCELED. GDA_IN_PROGRESS: it goes on. */
int gda_req_cancel(gda_req_t req);
/* Ends the request without its outcome; the operation goes on. */
int gda_req_free(gda_req_t req);

/* ---- One-sided operations ---- */

/* A 64-bit word of the target's window, which changes after the operation. */
struct gda_signal {
    uint64_t offset, value;
    int32_t add;      /* 0: set to the value, 1: add the value */
    int32_t reserved; /* 0 */
};

/* Called by all ranks; sizes may differ. Puts and signals to one rank take effect in order. */
int gda_win_create(gda_comm_t comm, gda_mem_t mem, uint64_t offset, uint64_t len, int64_t timeout_ns, gda_win_t *win);
int gda_put(gda_win_t win, int rank, uint64_t offset, const struct gda_buf *bufs, int n, const struct gda_signal *signal,
            gda_stream_t stream, gda_req_t *req);
/* Puts at most 64 bytes, which are copied before it returns. With `len` 0 it only signals. */
int gda_put_bytes(gda_win_t win, int rank, uint64_t offset, const void *bytes, size_t len, const struct gda_signal *signal,
                  gda_stream_t stream, gda_req_t *req);
int gda_get(gda_win_t win, int rank, uint64_t offset, const struct gda_buf *bufs, int n, gda_stream_t stream, gda_req_t *req);

enum { GDA_ADD = 1, GDA_COMPARE_SWAP };

/* Changes the 64-bit word at `offset`: GDA_ADD adds `value`, GDA_COMPARE_SWAP sets it to `value` if it is `compare`. `result` gets the old
 * value; with GDA_ADD it may be NULL. */
int gda_atomic(gda_win_t win, int rank, uint64_t offset, int op, uint64_t value, uint64_t compare, const struct gda_buf *result,
               gda_stream_t stream, gda_req_t *req);

enum { GDA_GEQ, GDA_EQ, GDA_AND, GDA_NOR };

/* Waits until the 64-bit word at `offset` of the own window meets the condition (GDA_GEQ is cyclic); -ECANCELED if another thread destroys
 * the window or its communicator. A stream waits as long as its `wait_limit_ns`, and `timeout_ns` is not used. */
int gda_wait_signal(gda_win_t win, uint64_t offset, uint64_t value, int cond, gda_stream_t stream, int64_t timeout_ns);
/* Waits until all operations to a rank, or to all (-1), are complete. With a stream, the stream waits. Not for batches. */
int gda_win_flush(gda_win_t win, int rank, gda_stream_t stream, int64_t timeout_ns);
/* Called by all ranks. */
int gda_win_destroy(gda_win_t win, int64_t timeout_ns);

/* ---- Streams, batches, graphs ---- */

enum {
    GDA_STREAM_HOST = 1,  /* a thread of the library; no CUDA stream */
    GDA_STREAM_KERNEL = 2 /* waits and writes by kernels: streams that launch gda_graph_t of steps */
};

/* Opens a CUstream of the context's GPU, which must live until gda_stream_close; NULL is the default stream of CUDA. With GDA_STREAM_HOST
 * `cuda_stream` is NULL. A wait of the stream that takes longer than `wait_limit_ns` fails (0: 30 s, -1: no limit). */
int gda_stream_open(gda_ctx_t ctx, void *cuda_stream, uint32_t flags, int64_t wait_limit_ns, gda_stream_t *stream);
/* Waits for the work that this library has enqueued, and returns its first failure. A stream that has failed stays so. */
int gda_stream_sync(gda_stream_t stream, int64_t timeout_ns);
/* As gda_stream_sync, but does not wait: GDA_IN_PROGRESS if there is work left. `rank` (may be NULL) gets the rank whose message has
 * failed, or -1. */
int gda_stream_status(gda_stream_t stream, int *rank);
/* Calls `fn` when the stream gets there, on a thread of the library. `fn` must not call this library. Not for captures. */
int gda_stream_call(gda_stream_t stream, void (*fn)(void *self), void *self);
int gda_stream_close(gda_stream_t stream);

/* Makes a batch, which records what is enqueued on it, for one submission. gda_stream_close ends it, and takes back what was not
 * submitted. */
int gda_batch_begin(gda_ctx_t ctx, gda_stream_t *batch);
/* The batch is empty afterwards. If it fails with -EAGAIN it may be submitted again. */
int gda_batch_submit(gda_stream_t batch, gda_stream_t stream);

/* Between these two calls the stream records its work, also kernels of the caller, and runs none. Only messages of channels and one-sided
 * operations can be recorded. */
int gda_capture_begin(gda_stream_t stream);
int gda_capture_end(gda_stream_t stream, gda_graph_t *graph);
int gda_graph_launch(gda_graph_t graph, gda_stream_t stream);
/* Makes each batch a step that a kernel runs by itself: see gdsync.cuh. */
int gda_steps_record(gda_stream_t stream, const gda_stream_t *batches, int n, gda_graph_t *steps);
/* Calls `launch`, which launches the kernel with the address of the steps on the stream, and returns 0 or a negative error number. */
int gda_steps_launch(gda_graph_t steps, gda_stream_t stream, int (*launch)(void *self, uint64_t program), void *self);
int gda_graph_destroy(gda_graph_t graph);

/* ---- Channels: messages on streams, between the same memory again and again; in graphs, too ---- */

/* Called by all ranks; those that want no channel pass rank -1 and get NULL. `places` get the messages of the other rank, in turn. */
int gda_chan_create(gda_comm_t comm, int rank, const struct gda_buf *places, int n, int64_t timeout_ns, gda_chan_t *chan);
/* Frees the next place for a message, when the stream gets there. */
int gda_chan_post(gda_chan_t chan, gda_stream_t stream);
/* Sends when the other rank has a free place. */
int gda_chan_send(gda_chan_t chan, const struct gda_buf *buf, gda_stream_t stream);
/* Makes the stream wait: with GDA_CHAN_SENT until the buffer of the last send may be changed, with GDA_CHAN_RECV until the next message is
 * in its place. */
enum { GDA_CHAN_SENT, GDA_CHAN_RECV };
int gda_chan_wait(gda_chan_t chan, int what, gda_stream_t stream);
int gda_chan_destroy(gda_chan_t chan);

/* ---- Collectives: communicators with GDA_COLLECTIVES, by all ranks in the same order ----
 *
 * With a stream they are enqueued; the call waits only for room there. Without, the call waits until the collective is complete. Both wait
 * for those of other threads, at most `timeout_ns`. Not in batches or captures.
 */

enum { GDA_INT32 = 1, GDA_INT64, GDA_UINT64, GDA_FLOAT, GDA_DOUBLE };
enum { GDA_SUM = 1, GDA_MIN, GDA_MAX };

int gda_barrier(gda_comm_t comm, gda_stream_t stream, int64_t timeout_ns);
int gda_broadcast(gda_comm_t comm, const struct gda_buf *buf, int root, gda_stream_t stream, int64_t timeout_ns);
int gda_allreduce(gda_comm_t comm, const struct gda_buf *buf, int type, int op, gda_stream_t stream, int64_t timeout_ns);
/* One part of the buffer is from each rank, in rank order. */
int gda_allgather(gda_comm_t comm, const struct gda_buf *buf, gda_stream_t stream, int64_t timeout_ns);
int gda_alltoall(gda_comm_t comm, const struct gda_buf *from, const struct gda_buf *to, gda_stream_t stream, int64_t timeout_ns);

#ifdef __cplusplus
}
#endif

#endif
