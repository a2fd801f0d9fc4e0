/*
 * The layer that applications of LibMP use: messages that are sent only when the receiver is ready, by the CPU, streams or kernels.
 * Everything is inline, over mp.h and MPI: link with -lmp and CUDA's runtime. All files of a program share one state.
 *
 * Functions return 0, or what the failed call of mp.h returned. One thread at a time.
 */

#ifndef COMM_H
#define COMM_H

#include <assert.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <mp.h>

#ifdef __cplusplus
#include <mp/device.cuh>

struct comm_dev_descs {
    enum { max_n_descs = 32 };
    int n_ready;
    mp::mlx5::isem32_t ready[max_n_descs];

    int n_tx;
    mp::mlx5::send_desc_t tx[max_n_descs];

    int n_wait;
    mp::mlx5::wait_desc_t wait[max_n_descs];
};
#endif
typedef struct comm_dev_descs *comm_dev_descs_t;

#define __COMM_CHECK(stmt, cond_str)                                                                                   \
    do {                                                                                                               \
        int result = (stmt);                                                                                           \
        if (result) {                                                                                                  \
            fprintf(stderr, "%s failed at %s:%d error=%d\n", cond_str, __FILE__, __LINE__, result);                    \
            exit(EXIT_FAILURE);                                                                                        \
        }                                                                                                              \
    } while (0)

#define COMM_CHECK(stmt) __COMM_CHECK(stmt, #stmt)

#ifndef MP_CHECK
#define MP_CHECK(stmt) __COMM_CHECK(stmt, #stmt)
#endif

#ifndef MAX
#define MAX(A, B) ((A) > (B) ? (A) : (B))
#endif

#define MAX_RANKS 128

#ifdef __cplusplus
extern "C" {
#endif

typedef struct comm_request *comm_request_t; /* an mp_request_t */
typedef struct comm_reg *comm_reg_t; /* an mp_reg_t */
typedef struct CUstream_st *comm_stream_t;

/* ---- State ------------------------------------------------------------------------------------------------------ */

enum { COMM_DESCS_ = 32, COMM_SETS_ = 128 };

/* struct comm_dev_descs, for C. */
struct comm_descs_ {
    int n_ready;
    struct { void *ptr; uint32_t value; } ready[COMM_DESCS_];
    int n_tx;
    struct { void *dbrec; uint32_t dbrec_value; void *db; uint64_t db_value; } tx[COMM_DESCS_];
    int n_wait;
    struct { int cond; void *sema; uint32_t sema_value; void *flag; uint32_t flag_value; } wait[COMM_DESCS_];
};

struct comm_state_ {
    uint32_t ready[4096 / 4]; /* written by each rank */
    uint32_t expected[MAX_RANKS], told[MAX_RANKS]; /* the next value from and for each rank */
    int rank, size;
    mp_reg_t told_reg;
    mp_window_t window;
    mp_request_t *requests; /* not known to be complete */
    size_t n, room;
    struct comm_descs_ *descs; /* COMM_SETS_ of them, in memory that kernels read */
    int set;
};

__attribute__((weak, aligned(4096))) struct comm_state_ comm_state_;

static inline int comm_flag_(const char *name)
{
    const char *value = getenv(name);
    return value && atoi(value);
}

static inline int dbg_enabled(void) { return comm_flag_("COMM_ENABLE_DEBUG"); }

#define comm_err(...)                                                                                                  \
    do {                                                                                                               \
        fprintf(stderr, "ERR [%d] %s() ", comm_state_.rank, __func__);                                                 \
        fprintf(stderr, __VA_ARGS__);                                                                                  \
    } while (0)

#define DBG(...)                                                                                                       \
    do {                                                                                                               \
        if (dbg_enabled()) {                                                                                           \
            fprintf(stderr, "[%d] [%d] COMM DBG %s(): ", (int)getpid(), comm_state_.rank, __func__);                   \
            fprintf(stderr, __VA_ARGS__);                                                                              \
        }                                                                                                              \
    } while (0)

/* Keeps a request for comm_progress and comm_flush. */
static inline int comm_track_(mp_request_t request)
{
    struct comm_state_ *s = &comm_state_;
    if (s->n == s->room) {
        size_t room = s->room ? 2 * s->room : 64;
        mp_request_t *more = (mp_request_t *)realloc(s->requests, room * sizeof *more);
        if (!more)
            return MP_FAILURE;
        s->requests = more;
        s->room = room;
    }
    s->requests[s->n++] = request;
    return MP_SUCCESS;
}

static inline int comm_rank_(int rank)
{
    if (rank >= 0 && rank < comm_state_.size && rank != comm_state_.rank)
        return MP_SUCCESS;
    comm_err("no such peer: %d\n", rank);
    return MP_FAILURE;
}

/* ---- Begin and end ---------------------------------------------------------------------------------------------- */

static inline int comm_use_comm(void) { return comm_flag_("COMM_USE_COMM"); }
static inline int comm_use_model_sa(void) { return comm_flag_("COMM_USE_ASYNC_SA"); }
static inline int comm_use_model_ki(void) { return comm_flag_("COMM_USE_ASYNC_KI"); }

/* The GPU of COMM_USE_GPU_ID, or one by the rank. */
static inline int comm_select_device(int rank)
{
    int count = 0;
    const char *value = getenv("COMM_USE_GPU_ID");
    if (value)
        return atoi(value);
    return cudaGetDeviceCount(&count) == cudaSuccess && count > 0 ? rank % count : 0;
}

/* Collective; at most 127 ranks. */
static inline int comm_init(MPI_Comm comm, int gpu_id)
{
    struct comm_state_ *s = &comm_state_;
    int peers[MAX_RANKS], count = 0, rank, error;
    if (MPI_Comm_rank(comm, &s->rank) != MPI_SUCCESS || MPI_Comm_size(comm, &s->size) != MPI_SUCCESS || s->size >= MAX_RANKS)
        return MP_FAILURE;
    for (rank = 0; rank < s->size; rank++) {
        s->ready[rank] = 0;
        s->expected[rank] = s->told[rank] = 1;
        if (rank != s->rank)
            peers[count++] = rank;
    }
    if ((error = mp_init(comm, peers, count, MP_INIT_DEFAULT, gpu_id)))
        return error;
    if ((error = mp_window_create(s->ready, sizeof s->ready, &s->window))) {
        mp_finalize(); /* all ranks are here */
        return error;
    }
    return mp_register(s->told, sizeof s->told, &s->told_reg);
}

static inline void comm_finalize(void)
{
    mp_finalize();
    mp_deregister(&comm_state_.told_reg);
    comm_state_.n = 0;
}

/* Registers memory, unless *reg is something. */
static inline int comm_register(void *buf, size_t size, comm_reg_t *reg)
{
    return *reg ? MP_SUCCESS : mp_register(buf, size, (mp_reg_t *)reg);
}

static inline int comm_deregister(comm_reg_t *reg)
{
    int error = *reg ? mp_deregister((mp_reg_t *)reg) : MP_SUCCESS;
    *reg = NULL;
    return error;
}

/* ---- Ready to receive ------------------------------------------------------------------------------------------- */

static inline int comm_send_ready_on_stream(int rank, comm_request_t *req, comm_stream_t stream)
{
    struct comm_state_ *s = &comm_state_;
    int error = comm_rank_(rank);
    if (!error)
        error = mp_iput_on_stream(&s->told[rank], 4, &s->told_reg, rank, 4 * (size_t)s->rank, &s->window, (mp_request_t *)req,
                                  MP_PUT_INLINE, stream);
    if (error)
        return error;
    s->told[rank]++;
    return comm_track_((mp_request_t)*req);
}

static inline int comm_send_ready(int rank, comm_request_t *req)
{
    struct comm_state_ *s = &comm_state_;
    int error = comm_rank_(rank);
    if (!error)
        error = mp_iput(&s->told[rank], 4, &s->told_reg, rank, 4 * (size_t)s->rank, &s->window, (mp_request_t *)req,
                        MP_PUT_INLINE | MP_PUT_NOWAIT);
    if (!error)
        s->told[rank]++;
    return error;
}

static inline int comm_wait_ready_on_stream(int rank, comm_stream_t stream)
{
    struct comm_state_ *s = &comm_state_;
    int error = comm_rank_(rank);
    if (!error)
        error = mp_wait_dword_geq_on_stream(&s->ready[rank], s->expected[rank], stream);
    if (!error)
        s->expected[rank]++;
    return error;
}

static inline int comm_wait_ready(int rank)
{
    struct comm_state_ *s = &comm_state_;
    int error = comm_rank_(rank);
    if (!error)
        error = mp_wait32(&s->ready[rank], s->expected[rank], MP_WAIT_GEQ);
    if (!error)
        s->expected[rank]++;
    return error;
}

static inline int comm_test_ready(int rank, int *is_ready)
{
    struct comm_state_ *s = &comm_state_;
    int error = comm_rank_(rank);
    if (error)
        return error;
    *is_ready = (int32_t)(__atomic_load_n(&s->ready[rank], __ATOMIC_ACQUIRE) - s->expected[rank]) >= 0;
    s->expected[rank] += (uint32_t)*is_ready;
    return MP_SUCCESS;
}

/* ---- Messages --------------------------------------------------------------------------------------------------- */

/* Bytes of a message, whose memory is registered if it is not. */
static inline int comm_message_(void *buf, size_t count, MPI_Datatype type, comm_reg_t *reg, int rank, int *bytes)
{
    int size, error = comm_rank_(rank);
    if (error)
        return error;
    if (MPI_Type_size(type, &size) != MPI_SUCCESS || size <= 0 || count > (size_t)(INT_MAX / size))
        return MP_FAILURE;
    *bytes = (int)count * size;
    return comm_register(buf, (size_t)*bytes, reg);
}

static inline int comm_irecv(void *buf, size_t count, MPI_Datatype type, comm_reg_t *reg, int rank, comm_request_t *req)
{
    int bytes, error = comm_message_(buf, count, type, reg, rank, &bytes);
    if (!error)
        error = mp_irecv(buf, bytes, rank, (mp_reg_t *)reg, (mp_request_t *)req);
    return error ? error : comm_track_((mp_request_t)*req);
}

static inline int comm_isend(void *buf, size_t count, MPI_Datatype type, comm_reg_t *reg, int rank, comm_request_t *req)
{
    int bytes, error = comm_message_(buf, count, type, reg, rank, &bytes);
    if (!error)
        error = mp_isend(buf, bytes, rank, (mp_reg_t *)reg, (mp_request_t *)req);
    return error ? error : comm_track_((mp_request_t)*req);
}

static inline int comm_isend_on_stream(void *buf, size_t count, MPI_Datatype type, comm_reg_t *reg, int rank,
                                       comm_request_t *req, comm_stream_t stream)
{
    int bytes, error = comm_message_(buf, count, type, reg, rank, &bytes);
    if (!error)
        error = mp_isend_on_stream(buf, bytes, rank, (mp_reg_t *)reg, (mp_request_t *)req, stream);
    return error ? error : comm_track_((mp_request_t)*req);
}

/* These clear the requests. */
static inline int comm_wait_all(int count, comm_request_t *reqs)
{
    int error = mp_wait_all((uint32_t)count, (mp_request_t *)reqs);
    memset(reqs, 0, (size_t)count * sizeof *reqs);
    return error;
}

static inline int comm_wait(comm_request_t *req) { return comm_wait_all(1, req); }

static inline int comm_wait_all_on_stream(int count, comm_request_t *reqs, comm_stream_t stream)
{
    int error = mp_wait_all_on_stream((uint32_t)count, (mp_request_t *)reqs, stream);
    memset(reqs, 0, (size_t)count * sizeof *reqs);
    return error;
}

/* Ends the requests that are complete. Returns their number. */
static inline int comm_progress(void)
{
    struct comm_state_ *s = &comm_state_;
    size_t left = 0, i, n = s->n;
    for (i = 0; i < n; i++) {
        if (mp_progress_all(1, &s->requests[i]) == 1)
            mp_wait(&s->requests[i]);
        else
            s->requests[left++] = s->requests[i];
    }
    s->n = left;
    return (int)(n - left);
}

/* Waits for all requests. After a failure keeps those that are not complete. */
static inline int comm_flush(void)
{
    int error = mp_wait_all((uint32_t)comm_state_.n, comm_state_.requests);
    comm_progress();
    return error;
}

/* ---- For kernels ------------------------------------------------------------------------------------------------ */

/* The set that the next comm_prepared_requests returns; NULL without memory. */
static inline struct comm_descs_ *comm_descs_(void)
{
    struct comm_state_ *s = &comm_state_;
    size_t size = COMM_SETS_ * sizeof *s->descs;
    if (!s->descs) {
        if (cudaHostAlloc((void **)&s->descs, size, cudaHostAllocPortable | cudaHostAllocMapped) != cudaSuccess)
            return NULL;
        memset((void *)s->descs, 0, size);
    }
    return &s->descs[s->set];
}

static inline int comm_prepare_wait_ready(int rank)
{
    struct comm_descs_ *d = comm_descs_();
    struct mp_word_words words;
    int error = comm_rank_(rank);
    if (error || !d || d->n_ready == COMM_DESCS_)
        return MP_FAILURE;
    if ((error = mpx_get_word(&comm_state_.ready[rank], comm_state_.expected[rank], &words)))
        return error;
    comm_state_.expected[rank]++;
    d->ready[d->n_ready].ptr = words.ptr;
    d->ready[d->n_ready++].value = words.value;
    return MP_SUCCESS;
}

static inline int comm_prepare_isend(void *buf, size_t count, MPI_Datatype type, comm_reg_t *reg, int rank,
                                     comm_request_t *req)
{
    struct comm_descs_ *d = comm_descs_();
    struct mp_send_words words;
    int bytes, error = comm_message_(buf, count, type, reg, rank, &bytes);
    if (error || !d || d->n_tx == COMM_DESCS_)
        return MP_FAILURE;
    if ((error = mp_send_prepare(buf, bytes, rank, (mp_reg_t *)reg, (mp_request_t *)req)))
        return error;
    if ((error = mpx_get_send((mp_request_t *)req, &words))) {
        mp_wait((mp_request_t *)req); /* it was taken back, and ends so */
        return error;
    }
    d->tx[d->n_tx].dbrec = words.dbrec_ptr;
    d->tx[d->n_tx].dbrec_value = words.dbrec_value;
    d->tx[d->n_tx].db = words.db_ptr;
    d->tx[d->n_tx++].db_value = words.db_value;
    return comm_track_((mp_request_t)*req);
}

static inline int comm_prepare_wait_all(int count, comm_request_t *reqs)
{
    struct comm_descs_ *d = comm_descs_();
    struct mp_wait_words words;
    int i, error;
    for (i = 0; i < count; i++) {
        if (!d || d->n_wait == COMM_DESCS_)
            return MP_FAILURE;
        if ((error = mpx_get_wait((mp_request_t *)&reqs[i], &words)))
            return error;
        d->wait[d->n_wait].cond = words.cond;
        d->wait[d->n_wait].sema = words.sema_ptr;
        d->wait[d->n_wait].sema_value = words.sema_value;
        d->wait[d->n_wait].flag = words.flag_ptr;
        d->wait[d->n_wait++].flag_value = words.flag_value;
    }
    return MP_SUCCESS;
}

/* What was prepared since the last call, for one kernel; kept until the 127th next call. NULL without memory. */
static inline comm_dev_descs_t comm_prepared_requests(void)
{
    struct comm_descs_ *set = comm_descs_();
    if (!set)
        return NULL;
    comm_state_.set = (comm_state_.set + 1) % COMM_SETS_;
    memset((void *)comm_descs_(), 0, sizeof *set);
    return (comm_dev_descs_t)(void *)set;
}

#ifdef __cplusplus
}

static_assert(sizeof(struct comm_descs_) == sizeof(struct comm_dev_descs), "the same in C");
#endif

#endif
