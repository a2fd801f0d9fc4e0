/* GPUDirect Async for programs and libraries in C: messages, one-sided operations and collectives that the CPU or a stream starts and
 * awaits, over RDMA devices. Made to be embedded, as in an MPI-like runtime.
 *
 * - Calls return GDA_OK (0), GDA_IN_PROGRESS (1) or a negative error number of errno.h. gda_last_error() has the reason, in words, of
 *   the last failure of the calling thread. Nothing exits, aborts or prints.
 * - Calls start something and return. Only those with `timeout_ns` wait: 0 asks and returns, -1 waits for ever. A queue or stream
 *   without room now is -EAGAIN: call gda_progress, and try again.
 * - Handles are numbers: NULL, ended and foreign ones are -EINVAL. Any thread may make any call. One that another thread waits with is
 *   -EBUSY. A forked child gets -EACCES.
 * - Structures begin with their size, set by the caller: later versions may append to them.
 * - Functions of the caller are called without a lock held, and may make any call. They must return, not longjmp or throw.
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
typedef struct gda_req *gda_req_t;       /* an operation under way */
typedef struct gda_win *gda_win_t;       /* memory that other ranks access */
typedef struct gda_chan *gda_chan_t;     /* messages that are repeated */
typedef struct gda_stream *gda_stream_t; /* work in order: of the CPU, of CUDA, or recorded in a batch */
typedef struct gda_graph *gda_graph_t;   /* recorded work to launch again */

/* The version of the library: GDA_VERSION of its header. */
uint32_t gda_version(void);

/* The reason of the last failure of this thread, until the next one; never NULL. */
const char *gda_last_error(void);

enum { GDA_LOG_ERROR = 1, GDA_LOG_WARN, GDA_LOG_INFO, GDA_LOG_DEBUG };

/* Has messages up to this level passed to `log`, one line each, on the thread that has them; NULL for none. For the whole process. */
int gda_set_logger(void (*log)(void *self, int level, const char *text), void *self, int level);

/* ---- Contexts ---- */

struct gda_config {
    uint32_t struct_size;
    int32_t gpu;         /* the CUDA device whose streams are used, -1 for none */
    const char *device;  /* a name such as mlx5_0, or soft0 for a software device; NULL: the best one */
    uint32_t depth;      /* messages under way to and from each rank, 0: 512 */
    uint32_t max_pieces; /* pieces of a message, 0: 2 */
};

struct gda_info {
    uint32_t struct_size;
    uint32_t is_software; /* the device is a software one */
    uint32_t is_direct;   /* GPUs and CPUs ring the card itself, no thread between */
    uint32_t max_inline;  /* bytes of gda_put_bytes */
    char device[128];
};

/* What it leaves open, variables of the environment say: GDSYNC_DEVICE, MP_LOCAL and others. */
int gda_open(const struct gda_config *config, gda_ctx_t *ctx);
int gda_info(gda_ctx_t ctx, struct gda_info *info);
/* The device is closed with the last communicator. */
int gda_close(gda_ctx_t ctx);

/* Moves messages of all communicators along, and calls the functions of gda_req_on_done. */
int gda_progress(gda_ctx_t ctx);
/* A descriptor for poll and epoll, or an error; not to be read or closed. */
int gda_event_fd(gda_ctx_t ctx);
/* Makes the descriptor readable when the next request of gda_req_on_done is complete. GDA_IN_PROGRESS: one is complete already;
 * call gda_progress, and do not sleep. */
int gda_arm(gda_ctx_t ctx);

/* ---- Communicators ---- */

/* How ranks exchange addresses. All ranks make the same calls in the same order. 0 is success, a negative error number a failure. */
struct gda_exchange {
    uint32_t struct_size;
    int32_t rank, size;
    int32_t reserved; /* 0 */
    void *self;
    /* Gives every rank the `len` bytes of each rank, in rank order. The same `len` everywhere. */
    int (*allgather)(void *self, const void *mine, size_t len, void *all, int64_t timeout_ns);
    /* The communicator is gone; may be NULL. */
    void (*release)(void *self);
};

enum {
    GDA_TAGGED = 1,     /* gda_tsend and gda_trecv */
    GDA_COLLECTIVES = 2 /* gda_barrier and the other collectives */
};

/* By all ranks. Without an exchange by the variables of a launcher (mpirun, srun, torchrun, RANK and WORLD_SIZE). */
int gda_comm_create(gda_ctx_t ctx, const struct gda_exchange *exchange, uint32_t flags, int64_t timeout_ns, gda_comm_t *comm);
/* The rank and the number of ranks, or an error. */
int gda_comm_rank(gda_comm_t comm);
int gda_comm_size(gda_comm_t comm);
/* By all ranks: those of one color get a communicator, in the order of keys. A negative color gets NULL. */
int gda_comm_split(gda_comm_t comm, int color, int key, int64_t timeout_ns, gda_comm_t *part);
/* By all ranks that live: a communicator of them, in their order. `former` (may be NULL) has room for the size of `comm` and gets their
 * ranks there. Only of a launcher's communicators and their parts. */
int gda_comm_shrink(gda_comm_t comm, int64_t timeout_ns, gda_comm_t *survivors, int *former);
/* The ranks that can no longer be reached: their number, or an error. `ranks` (may be NULL) gets the first `room`. */
int gda_comm_lost(gda_comm_t comm, int *ranks, int room);
/* Ends all that is under way with a rank, or with all (-1), which learn that. */
int gda_comm_abort(gda_comm_t comm, int rank);
/* By all ranks, after all messages are received. The handle ends also if it fails. */
int gda_comm_destroy(gda_comm_t comm, int64_t timeout_ns);

/* Pairs of processes that meet when they like: each pair is a communicator, where the listener is rank 0 and the other one rank 1.
 * `address` gets at most GDA_ADDRESS_MAX bytes, which the caller brings to the others. */
#define GDA_ADDRESS_MAX 64
int gda_listen(gda_ctx_t ctx, void *address, size_t *len, gda_listen_t *listener);
int gda_listen_close(gda_listen_t listener);
/* With `req` on a thread of the library, and `comm` is set before the request is complete; with NULL they wait. */
int gda_accept(gda_listen_t listener, uint32_t flags, int64_t timeout_ns, gda_comm_t *comm, gda_req_t *req);
int gda_connect(gda_ctx_t ctx, const void *address, size_t len, uint32_t flags, int64_t timeout_ns, gda_comm_t *comm, gda_req_t *req);

/* ---- Memory ---- */

enum {
    GDA_CACHED = 1 /* kept registered after gda_mem_dereg; not for windows. See gda_mem_invalidate. */
};

/* Host or GPU memory: CUDA is asked which. It must stay allocated until it is deregistered and all messages of it are complete. */
int gda_mem_reg(gda_comm_t comm, void *addr, size_t len, uint32_t flags, gda_mem_t *mem);
/* Bytes of a dma-buf of another driver than CUDA. The descriptor may be closed afterwards. */
int gda_mem_reg_dmabuf(gda_comm_t comm, int fd, uint64_t offset, size_t len, gda_mem_t *mem);
/* Cached host memory is about to be unmapped or freed. */
int gda_mem_invalidate(gda_comm_t comm, void *addr, size_t len);
int gda_mem_dereg(gda_mem_t mem);

/* A range of registered memory. */
struct gda_buf {
    gda_mem_t mem;
    uint64_t offset, len;
};

/* ---- Messages ----
 *
 * `stream` NULL: by the CPU, now. `req` NULL: nobody asks for the request. A send that is complete at once sets `req` to NULL.
 */

/* Without tags: messages between two ranks arrive in the order of the sends. A longer message than its receive ends the connection. */
int gda_send(gda_comm_t comm, int rank, const struct gda_buf *bufs, int n, gda_stream_t stream, gda_req_t *req);
int gda_recv(gda_comm_t comm, int rank, const struct gda_buf *bufs, int n, gda_stream_t stream, gda_req_t *req);

#define GDA_ANY_RANK (-1)

/* With tags, by the CPU; communicators with GDA_TAGGED. A receive takes what has the bits of `tag` where `mask` has ones. */
int gda_tsend(gda_comm_t comm, int rank, uint64_t tag, const struct gda_buf *buf, gda_req_t *req);
int gda_trecv(gda_comm_t comm, int rank, uint64_t tag, uint64_t mask, const struct gda_buf *buf, gda_req_t *req);

/* ---- Requests ----
 *
 * A request ends with the call that tells its outcome. A NULL request is complete.
 */

struct gda_status {
    uint32_t struct_size;
    int32_t rank; /* at the other end */
    uint64_t len; /* bytes sent or received */
    uint64_t tag;
};

/* GDA_OK: complete, and the request has ended. GDA_IN_PROGRESS: not yet. A failure ends the request. `status` may be NULL. */
int gda_req_wait(gda_req_t req, int64_t timeout_ns, struct gda_status *status);
/* As gda_req_wait, for the one that is complete first: `which` gets its place, which is set to NULL. With none, `which` is -1. */
int gda_req_wait_any(gda_req_t *reqs, int n, int64_t timeout_ns, int *which, struct gda_status *status);
/* Hands the request over: gda_progress calls `done` once, with GDA_OK or the error. `status` is valid during the call. */
int gda_req_on_done(gda_ctx_t ctx, gda_req_t req, void (*done)(void *self, int result, const struct gda_status *status), void *self);
/* The stream goes on when the message is complete. Not for tagged ones. The request stays. */
int gda_req_on_stream(gda_req_t req, gda_stream_t stream);
/* Cancels a tagged receive that no message has matched: its outcome is -ECANCELED. GDA_IN_PROGRESS: it goes on. */
int gda_req_cancel(gda_req_t req);
/* Nobody asks for the outcome: the operation goes on. */
int gda_req_free(gda_req_t req);

/* ---- One-sided operations ---- */

/* A change of a 64-bit word of the target's window, after the operation. */
struct gda_signal {
    uint64_t offset, value;
    int32_t add;      /* 0: set to the value, 1: add the value */
    int32_t reserved; /* 0 */
};

/* By all ranks; sizes may differ. Puts and signals to one rank take effect in order. */
int gda_win_create(gda_comm_t comm, gda_mem_t mem, uint64_t offset, uint64_t len, int64_t timeout_ns, gda_win_t *win);
int gda_put(gda_win_t win, int rank, uint64_t offset, const struct gda_buf *bufs, int n, const struct gda_signal *signal,
            gda_stream_t stream, gda_req_t *req);
/* At most 64 bytes, copied now; with none and a signal, the signal alone. */
int gda_put_bytes(gda_win_t win, int rank, uint64_t offset, const void *bytes, size_t len, const struct gda_signal *signal,
                  gda_stream_t stream, gda_req_t *req);
int gda_get(gda_win_t win, int rank, uint64_t offset, const struct gda_buf *bufs, int n, gda_stream_t stream, gda_req_t *req);

enum { GDA_ADD = 1, GDA_COMPARE_SWAP };

/* On the 64-bit word at `offset`: adds `value`, or sets it if the word is `compare`. `result` gets the old value; with GDA_ADD it
 * may be NULL. */
int gda_atomic(gda_win_t win, int rank, uint64_t offset, int op, uint64_t value, uint64_t compare, const struct gda_buf *result,
               gda_stream_t stream, gda_req_t *req);

enum { GDA_GEQ, GDA_EQ, GDA_AND, GDA_NOR };

/* Until the 64-bit word of the own window satisfies the condition (GDA_GEQ is cyclic). Streams have a limit of their own. */
int gda_wait_signal(gda_win_t win, uint64_t offset, uint64_t value, int cond, gda_stream_t stream, int64_t timeout_ns);
/* All operations to a rank, or to all (-1), are complete, on a stream when it goes on (not for batches). */
int gda_win_flush(gda_win_t win, int rank, gda_stream_t stream, int64_t timeout_ns);
/* By all ranks. */
int gda_win_destroy(gda_win_t win, int64_t timeout_ns);

/* ---- Streams, batches, graphs ---- */

enum {
    GDA_STREAM_HOST = 1,  /* a thread of the library; no CUDA stream */
    GDA_STREAM_KERNEL = 2 /* waits and writes by kernels: streams that launch gda_graph_t of steps */
};

/* A CUstream of the context's GPU, which must live until the close. `wait_limit_ns` (0: 30 s, -1: none) ends a wait of the stream. */
int gda_stream_open(gda_ctx_t ctx, void *cuda_stream, uint32_t flags, int64_t wait_limit_ns, gda_stream_t *stream);
/* Waits for what was enqueued by this library. The first failure comes out here; a stream that has failed stays so. */
int gda_stream_sync(gda_stream_t stream, int64_t timeout_ns);
/* Calls `fn` in order, on a thread of the library. It must not call this library. Not for captures. */
int gda_stream_call(gda_stream_t stream, void (*fn)(void *self), void *self);
int gda_stream_close(gda_stream_t stream);

/* Records what is enqueued on `batch`, for one submission. It is closed by gda_stream_close: what was not submitted is taken back. */
int gda_batch_begin(gda_ctx_t ctx, gda_stream_t *batch);
/* The batch is empty afterwards. If it fails with -EAGAIN it may be submitted again. */
int gda_batch_submit(gda_stream_t batch, gda_stream_t stream);

/* Between these calls the work of the stream, also kernels of the caller, is recorded. Of messages only those of channels can be
 * repeated, and one-sided operations. */
int gda_capture_begin(gda_stream_t stream);
int gda_capture_end(gda_stream_t stream, gda_graph_t *graph);
int gda_graph_launch(gda_graph_t graph, gda_stream_t stream);
/* Makes each batch a step that a kernel runs by itself: see gdsync.cuh. */
int gda_steps_record(gda_stream_t stream, const gda_stream_t *batches, int n, gda_graph_t *steps);
/* Calls `launch`, which launches the kernel with the address of the steps on the stream, and returns 0 or a negative error number. */
int gda_steps_launch(gda_graph_t steps, gda_stream_t stream, int (*launch)(void *self, uint64_t program), void *self);
int gda_graph_destroy(gda_graph_t graph);

/* ---- Channels: messages on streams, between the same memory again and again; in graphs, too ---- */

/* By all ranks, those without a channel with rank -1. `places` get the messages of the other rank, in turn. */
int gda_chan_create(gda_comm_t comm, int rank, const struct gda_buf *places, int n, int64_t timeout_ns, gda_chan_t *chan);
/* The next place is free, when the stream gets there. */
int gda_chan_post(gda_chan_t chan, gda_stream_t stream);
/* Sends when the other rank has a free place. */
int gda_chan_send(gda_chan_t chan, const struct gda_buf *buf, gda_stream_t stream);
/* The stream goes on when the last send has left its buffer; with GDA_CHAN_RECV when the next message is in its place. */
enum { GDA_CHAN_SENT, GDA_CHAN_RECV };
int gda_chan_wait(gda_chan_t chan, int what, gda_stream_t stream);
int gda_chan_destroy(gda_chan_t chan);

/* ---- Collectives: communicators with GDA_COLLECTIVES, by all ranks in the same order ----
 *
 * With a stream they are enqueued, and wait for room there; else they wait. Not in batches or captures.
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
