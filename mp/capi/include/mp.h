/*
 * Messages between the ranks of a job, by the CPU and in the order of CUDA streams: the C interface of LibMP 2.0. Link with -lmp.
 *
 *     mp_init(MPI_COMM_WORLD, &peer, 1, MP_INIT_DEFAULT, gpu);
 *     mp_register(buffer, size, &reg);
 *     mp_irecv(in, size, peer, &reg, &receive);
 *     mp_isend_on_stream(out, size, peer, &reg, &send, stream);
 *     mp_wait_on_stream(&receive, stream);            kernels that follow see the message
 *     mp_wait(&receive);                              the CPU too; ends the request
 *     mp_finalize();
 *
 * Messages between two ranks match in order. Functions return MP_SUCCESS, or MP_FAILURE or an error number of <errno.h>;
 * mpx_last_error() is the reason, which is also printed. Any thread may call any of them; a forked child gets EACCES.
 *
 * The library does not use MPI. mp_init, below, hands it the few calls of MPI that it needs; -DMP_NO_MPI leaves that and mpi.h
 * out: use mp_init_env or mp_init_with.
 *
 * Environment:
 *     MP_USE_IB_HCA               a device whose name contains this; else the one nearest to the GPU, or without one the software HCA
 *     MP_ENABLE_DEBUG             "1": messages of all levels on standard error; failures of calls are always there
 *     GDSYNC_CAPI_WAIT_LIMIT      seconds after which a wait fails; none by default: see mpx_set_wait_limit
 */

#ifndef MP_H
#define MP_H

#include <stddef.h>
#include <stdint.h>
#include <sys/uio.h>

#include <cuda.h>
#include <cuda_runtime.h>

#ifndef MP_NO_MPI
#include <limits.h>
#include <mpi.h>
#include <stdlib.h>
#endif

#define MP_SUCCESS 0
#define MP_FAILURE 1

#define MP_API_MAJOR_VERSION 2
#define MP_API_MINOR_VERSION 0
#define MP_API_VERSION ((MP_API_MAJOR_VERSION << 16) | MP_API_MINOR_VERSION)
#define MP_API_VERSION_COMPATIBLE(v)                                                                                   \
    (((((v) & 0xffff0000U) >> 16) == MP_API_MAJOR_VERSION) && ((int)((v) & 0x0000ffffU) >= MP_API_MINOR_VERSION))

#ifdef __cplusplus
extern "C" {
#endif

typedef enum mp_param {
    MP_PARAM_VERSION,
    MP_NUM_PARAMS
} mp_param_t;

/* Needs neither CUDA nor a device. */
int mp_query_param(mp_param_t param, int *value);

/* ---- Begin and end ---------------------------------------------------------------------------------------------- */

enum mp_init_flags {
    MP_INIT_DEFAULT = 0,
    MP_INIT_WQ_ON_GPU, /* this and the next three: in host memory, with a line on standard error, where the device refuses */
    MP_INIT_RX_CQ_ON_GPU,
    MP_INIT_TX_CQ_ON_GPU,
    MP_INIT_DBREC_ON_GPU
};

/* How ranks exchange addresses. All ranks make the same calls in the same order; each returns 0, or something else on failure. */
struct mp_exchange {
    uint32_t struct_size; /* sizeof(struct mp_exchange) */
    int rank, size;
    void *self; /* passed to the functions */
    int (*allgather)(void *self, const void *mine, size_t len, void *all); /* len bytes of each rank, in order */
    int (*barrier)(void *self);
    void (*release)(void *self); /* may be NULL; called once, also if mp_init_with fails */
};

/*
 * Connects this rank with `peers`, which does not contain itself. Collective: each of the peers lists this rank, in any order.
 * Once per process until mp_finalize. gpu_id is a CUDA ordinal; its primary context is used.
 */
int mp_init_with(const struct mp_exchange *exchange, const int *peers, int count, int flags, int gpu_id);

/* The same among all ranks that a launcher has started: mpirun, srun, torchrun, or RANK, WORLD_SIZE and MASTER_ADDR. */
int mp_init_env(const int *peers, int count, int flags, int gpu_id);

/*
 * Waits for all ranks, then disconnects. Requests and windows end, and with MP_FAILURE the waits of other threads for them;
 * registrations stay until they are deregistered.
 */
void mp_finalize(void);

/* ---- Messages by the CPU ---------------------------------------------------------------------------------------- */

typedef struct mp_reg *mp_reg_t;
typedef struct mp_request *mp_request_t;
typedef struct mp_window *mp_window_t;

/* Host memory, memory of cudaMallocHost or cudaMalloc. It must stay allocated until it is deregistered. */
int mp_register(void *addr, size_t length, mp_reg_t *reg);
int mp_deregister(mp_reg_t *reg);

/*
 * A receive may be posted after its send: the send waits then. If a queue is full, or a stream has sends to the same peer, they wait
 * for up to ten seconds: ENOMEM, EBUSY, as for a thread that sends to the same peer by a stream. EINVAL to send while a prepared send
 * to this peer is not posted.
 */
int mp_irecv(void *buf, int size, int peer, mp_reg_t *reg, mp_request_t *req);
int mp_isend(void *buf, int size, int peer, mp_reg_t *reg, mp_request_t *req);

/* Several pieces of one registration, at most 30. */
int mp_irecvv(struct iovec *v, int nblocks, int peer, mp_reg_t *reg, mp_request_t *req);
int mp_isendv(struct iovec *v, int nblocks, int peer, mp_reg_t *reg, mp_request_t *req);

/*
 * Return when the requests are complete, and end them. If a stream waits for a request, it is complete when the stream has passed.
 * A request that was ended before counts as complete. EINVAL for a put with MP_PUT_NOWAIT, and for a request that is prepared and
 * not posted; MP_FAILURE if it has failed.
 */
int mp_wait(mp_request_t *req);
int mp_wait_all(uint32_t count, mp_request_t *req);

/* The number of complete requests of these. Ends none. */
int mp_progress_all(uint32_t count, mp_request_t *req);

/* ---- Messages in stream order ----------------------------------------------------------------------------------- */

/* The stream sends; with mp_send_on_stream it also waits until the send is complete. Waits for room in full queues. */
int mp_send_on_stream(void *buf, int size, int peer, mp_reg_t *reg, mp_request_t *req, cudaStream_t stream);
int mp_isend_on_stream(void *buf, int size, int peer, mp_reg_t *reg, mp_request_t *req, cudaStream_t stream);
int mp_isendv_on_stream(struct iovec *v, int nblocks, int peer, mp_reg_t *reg, mp_request_t *req, cudaStream_t stream);

/*
 * The stream waits for a request and for all earlier ones of its direction and peer. The CPU still has to mp_wait for each. Streams
 * that wait for receives of one peer take turns: EBUSY while another one has not passed its waits.
 */
int mp_wait_on_stream(mp_request_t *req, cudaStream_t stream);
int mp_wait_all_on_stream(uint32_t count, mp_request_t *req, cudaStream_t stream);

/* Sends are prepared, and posted to a stream in this order per peer. With mp_send_post the stream waits for completion. */
int mp_send_prepare(void *buf, int size, int peer, mp_reg_t *reg, mp_request_t *req);
int mp_sendv_prepare(struct iovec *v, int nblocks, int peer, mp_reg_t *reg, mp_request_t *req);
int mp_send_post_on_stream(mp_request_t *req, cudaStream_t stream);
int mp_isend_post_on_stream(mp_request_t *req, cudaStream_t stream);
int mp_send_post_all_on_stream(uint32_t count, mp_request_t *req, cudaStream_t stream);
int mp_isend_post_all_on_stream(uint32_t count, mp_request_t *req, cudaStream_t stream);

/* ---- Puts and gets ---------------------------------------------------------------------------------------------- */

/* Memory that peers write and read. Collective. mp_window_destroy is not: no peer may use it any more. */
int mp_window_create(void *addr, size_t size, mp_window_t *window);
int mp_window_destroy(mp_window_t *window);

enum mp_put_flags {
    MP_PUT_INLINE = 1 << 0, /* the bytes, at most 64 of host memory, are copied during the call */
    MP_PUT_NOWAIT = 1 << 1 /* the request cannot be waited for */
};

/* displ: offset in the peer's window. The range must lie inside. */
int mp_iput(void *src, int size, mp_reg_t *src_reg, int peer, size_t displ, mp_window_t *window, mp_request_t *req, int flags);
int mp_iget(void *dst, int size, mp_reg_t *dst_reg, int peer, size_t displ, mp_window_t *window, mp_request_t *req);
int mp_iput_on_stream(void *src, int size, mp_reg_t *src_reg, int peer, size_t displ, mp_window_t *window, mp_request_t *req,
                      int flags, cudaStream_t stream);
int mp_iget_on_stream(void *dst, int size, mp_reg_t *dst_reg, int peer, size_t displ, mp_window_t *window, mp_request_t *req,
                      cudaStream_t stream);
int mp_put_prepare(void *src, int size, mp_reg_t *src_reg, int peer, size_t displ, mp_window_t *window, mp_request_t *req,
                   int flags);
int mp_iput_post_on_stream(mp_request_t *req, cudaStream_t stream);
int mp_iput_post_all_on_stream(uint32_t count, mp_request_t *req, cudaStream_t stream);

/* ---- Words ------------------------------------------------------------------------------------------------------ */

enum mp_wait_flags {
    MP_WAIT_GEQ = 0, /* (int32_t)(*ptr - value) >= 0 */
    MP_WAIT_EQ, /* *ptr == value */
    MP_WAIT_AND /* (*ptr & value) != 0 */
};

/*
 * Words of host memory. On a stream, and in mp_desc_queue_add_*: their page is registered with CUDA at first use and stays so; do not
 * unmap it.
 */
int mp_wait32(uint32_t *ptr, uint32_t value, int flags);
int mp_wait32_on_stream(uint32_t *ptr, uint32_t value, int flags, cudaStream_t stream);

static inline int mp_wait_dword_geq_on_stream(uint32_t *ptr, uint32_t value, cudaStream_t stream)
{
    return mp_wait32_on_stream(ptr, value, MP_WAIT_GEQ, stream);
}

static inline int mp_wait_dword_eq_on_stream(uint32_t *ptr, uint32_t value, cudaStream_t stream)
{
    return mp_wait32_on_stream(ptr, value, MP_WAIT_EQ, stream);
}

/* ---- Lists of operations ---------------------------------------------------------------------------------------- */

typedef struct mp_desc_queue *mp_desc_queue_t;

/*
 * Prepared sends and puts, waits and words, which a stream gets in order, all or none. Posting empties the list, also on failure: then
 * its requests have failed. Flags of a wait: 0 to 3, as gds_wait_cond_flag_t; of mp_desc_queue_post_on_stream: 0.
 */
int mp_desc_queue_alloc(mp_desc_queue_t *dq);
int mp_desc_queue_free(mp_desc_queue_t *dq);
int mp_desc_queue_add_send(mp_desc_queue_t *dq, mp_request_t *req);
int mp_desc_queue_add_wait_send(mp_desc_queue_t *dq, mp_request_t *req);
int mp_desc_queue_add_wait_recv(mp_desc_queue_t *dq, mp_request_t *req);
int mp_desc_queue_add_wait_value32(mp_desc_queue_t *dq, uint32_t *ptr, uint32_t value, int flags);
int mp_desc_queue_add_write_value32(mp_desc_queue_t *dq, uint32_t *ptr, uint32_t value);
int mp_desc_queue_post_on_stream(cudaStream_t stream, mp_desc_queue_t *dq, int flags);

/* ---- Ours ------------------------------------------------------------------------------------------------------- */

/* The reason of the last failed call of this thread; "" at first. */
const char *mpx_last_error(void);

/*
 * The time after which a wait fails, in milliseconds; 0, the default, is for ever. Streams take it when they are used for the
 * first time: a stream that fails runs to its end without sending.
 */
int mpx_set_wait_limit(uint64_t milliseconds);

/* What kernels need: see mp/device.cuh. */
struct mp_word_words {
    uint32_t *ptr; /* on the GPU */
    uint32_t value;
};
struct mp_send_words {
    uint32_t *dbrec_ptr;
    uint64_t *db_ptr;
    uint64_t db_value;
    uint32_t dbrec_value;
};
struct mp_wait_words {
    uint32_t *sema_ptr;
    uint32_t *flag_ptr;
    uint32_t sema_value, flag_value;
    int cond; /* gds_wait_cond_flag_t */
};
int mpx_get_word(uint32_t *ptr, uint32_t value, struct mp_word_words *words);
int mpx_get_send(mp_request_t *req, struct mp_send_words *words);
int mpx_get_wait(mp_request_t *req, struct mp_wait_words *words);

#ifndef MP_NO_MPI

static inline int mp_mpi_allgather_(void *self, const void *mine, size_t len, void *all)
{
    if (len > INT_MAX)
        return MP_FAILURE;
    return MPI_Allgather((void *)mine, (int)len, MPI_BYTE, all, (int)len, MPI_BYTE, *(MPI_Comm *)self) != MPI_SUCCESS;
}

static inline int mp_mpi_barrier_(void *self)
{
    return MPI_Barrier(*(MPI_Comm *)self) != MPI_SUCCESS;
}

/* Peers are ranks of comm, which must stay until mp_finalize. */
static inline int mp_init(MPI_Comm comm, int *peers, int count, int flags, int gpu_id)
{
    struct mp_exchange exchange;
    MPI_Comm *self = (MPI_Comm *)malloc(sizeof *self);
    if (!self)
        return MP_FAILURE;
    *self = comm;
    exchange.struct_size = sizeof exchange;
    exchange.self = self;
    exchange.allgather = mp_mpi_allgather_;
    exchange.barrier = mp_mpi_barrier_;
    exchange.release = free;
    if (MPI_Comm_rank(comm, &exchange.rank) != MPI_SUCCESS || MPI_Comm_size(comm, &exchange.size) != MPI_SUCCESS) {
        free(self);
        return MP_FAILURE;
    }
    return mp_init_with(&exchange, peers, count, flags, gpu_id);
}

#endif

#ifdef __cplusplus
}
#endif

#endif
