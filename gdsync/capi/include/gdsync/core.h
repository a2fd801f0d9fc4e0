/* Queue pairs, prepared sends and waits, and words: see gdsync.h. */

#ifndef GDSYNC_CORE_H
#define GDSYNC_CORE_H

#ifndef __GDSYNC_H__
#error "include gdsync.h"
#endif

#include <stddef.h>
#include <stdint.h>

GDS_BEGIN_DECLS

/* ---- Version ---------------------------------------------------------------------------------------------------- */

#define GDS_API_MAJOR_VERSION 2
#define GDS_API_MINOR_VERSION 2
#define GDS_API_VERSION (((unsigned)GDS_API_MAJOR_VERSION << 16) | (unsigned)GDS_API_MINOR_VERSION)
#define GDS_API_VERSION_COMPATIBLE(v)                                                                                  \
    (((((v) & 0xffff0000U) >> 16) == (unsigned)GDS_API_MAJOR_VERSION) &&                                               \
     (((v) & 0x0000ffffU) >= (unsigned)GDS_API_MINOR_VERSION))

typedef enum gds_param {
    GDS_PARAM_VERSION,
    GDS_NUM_PARAMS
} gds_param_t;

/* Needs neither CUDA nor a device. */
int gds_query_param(gds_param_t param, int *value);

/* ---- Queue pairs ------------------------------------------------------------------------------------------------ */

enum gds_create_qp_flags {
    GDS_CREATE_QP_DEFAULT = 0,
    GDS_CREATE_QP_WQ_ON_GPU = 1 << 0, /* refused, as in libgdsync */
    GDS_CREATE_QP_TX_CQ_ON_GPU = 1 << 1, /* the next three: accepted; one line on standard error, see gds_create_qp */
    GDS_CREATE_QP_RX_CQ_ON_GPU = 1 << 2,
    GDS_CREATE_QP_WQ_DBREC_ON_GPU = 1 << 5
};

typedef struct ibv_qp_init_attr gds_qp_init_attr_t;
typedef struct ibv_send_wr gds_send_wr;

/* Completions of one queue of a queue pair. */
typedef struct gds_cq {
    struct ibv_cq *cq; /* do not poll it */
    uint32_t curr_offset; /* number of signalled completions that waits have claimed; read only */
} gds_cq_t;

typedef struct gds_qp {
    struct ibv_qp *qp; /* do not post to it, modify or destroy it */
    struct gds_cq *send_cq;
    struct gds_cq *recv_cq;
    struct ibv_context *dev_context;
} gds_qp_t;

/*
 * Creates a queue pair of type RC or UD with completion queues of its own, for streams of the GPU with this CUDA ordinal, in its
 * primary context. Reads cap, qp_type and sq_sig_all; sets send_cq and recv_cq. NULL on failure, with errno. Destroy it
 * before its domain and context. With GDS_CREATE_QP_*_ON_GPU the queues are in host memory too: the caller gets an ibv_qp, which only
 * libmlx5 can make, and it allocates queues in host memory.
 */
struct gds_qp *gds_create_qp(struct ibv_pd *pd, struct ibv_context *context, gds_qp_init_attr_t *qp_init_attr,
                             int gpu_id, int flags);

/*
 * Also ends what streams have of it, and waits of other threads. EBUSY if another thread is still in a call with it after ten
 * seconds (or the limit of waits): it lives, stopped; call again. ETIMEDOUT if a stream, held by other work, still has some after ten
 * seconds: the handle is gone nevertheless, but keep domain and context open. NULL is 0.
 */
int gds_destroy_qp(struct gds_qp *qp);

/* As ibv_modify_qp. To RESET: EBUSY while a stream or a prepared request holds it. */
int gds_modify_qp(gds_qp_t *gqp, struct ibv_qp_attr *attr, int attr_mask);

/* By the CPU, now. ENOMEM if the queue is full: poll first. EBUSY while a stream has sends of the queue pair. */
int gds_post_send(struct gds_qp *qp, gds_send_wr *wr, gds_send_wr **bad_wr);
int gds_post_recv(struct gds_qp *qp, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad_wr);

/*
 * The number of completions, or a negative error number. In order, each once: also those that a stream has waited for,
 * which are held back until the stream has passed its wait. Successful sends without IBV_SEND_SIGNALED have none. pkey_index and
 * dlid_path_bits are 0.
 */
int gds_poll_cq(struct gds_cq *cq, int num_entries, struct ibv_wc *wc);

/*
 * In stream order: a send, all of the list or none; a wait for the next signalled completion that no wait has claimed.
 * EINVAL while an earlier completion of the queue is claimed by a prepared wait that is not posted.
 */
int gds_stream_queue_send(CUstream stream, struct gds_qp *qp, gds_send_wr *wr, gds_send_wr **bad_wr);
int gds_stream_wait_cq(CUstream stream, struct gds_cq *cq, int flags);

/* ---- Prepared sends and waits ----------------------------------------------------------------------------------- */

enum {
    GDS_SEND_INFO_MAX_OPS = 32,
    GDS_WAIT_INFO_MAX_OPS = 32
};

/* Names what is prepared. May be copied; of all copies one can be posted. */
typedef struct gds_send_request {
    uint8_t reserved0[32];
    uint8_t reserved1[56 * GDS_SEND_INFO_MAX_OPS];
    uint8_t pad0[32];
} gds_send_request_t;

typedef struct gds_wait_request {
    uint8_t reserved0[40];
    uint8_t reserved1[56 * GDS_WAIT_INFO_MAX_OPS];
    uint8_t pad0[24];
} gds_wait_request_t;

/* Writes sends without ringing the doorbell. Post the requests of a queue pair in this order. */
int gds_prepare_send(struct gds_qp *qp, gds_send_wr *wr, gds_send_wr **bad_wr, gds_send_request_t *request);
int gds_stream_post_send(CUstream stream, gds_send_request_t *request);
int gds_stream_post_send_all(CUstream stream, int count, gds_send_request_t *request);

/* Claims the next signalled completion, of a request that is posted or prepared. flags must be 0. */
int gds_prepare_wait_cq(struct gds_cq *cq, gds_wait_request_t *request, int flags);
int gds_stream_post_wait_cq(CUstream stream, gds_wait_request_t *request);
int gds_stream_post_wait_cq_all(CUstream stream, int count, gds_wait_request_t *request);

/* Gives a claim back: gds_poll_cq may return the completion. */
int gds_post_wait_cq(struct gds_cq *cq, gds_wait_request_t *request, int flags);

/* ---- Words ------------------------------------------------------------------------------------------------------ */

typedef enum gds_memory_type {
    GDS_MEMORY_GPU = 1, /* of cudaMalloc, and of cudaMallocHost */
    GDS_MEMORY_HOST = 2, /* other host memory: registered with CUDA at first use, and from then on; do not unmap it */
    GDS_MEMORY_IO = 4, /* refused when it is posted */
    GDS_MEMORY_MASK = 0x7
} gds_memory_type_t;

typedef enum gds_wait_flags {
    GDS_WAIT_POST_FLUSH_REMOTE = 1 << 3,
    GDS_WAIT_POST_FLUSH = GDS_WAIT_POST_FLUSH_REMOTE
} gds_wait_flags_t;

typedef enum gds_write_flags {
    GDS_WRITE_PRE_BARRIER_SYS = 1 << 4,
    GDS_WRITE_PRE_BARRIER = GDS_WRITE_PRE_BARRIER_SYS
} gds_write_flags_t;

typedef enum gds_write_memory_flags {
    GDS_WRITE_MEMORY_POST_BARRIER_SYS = 1 << 4,
    GDS_WRITE_MEMORY_PRE_BARRIER_SYS = 1 << 5
} gds_write_memory_flags_t;

typedef enum gds_membar_flags {
    GDS_MEMBAR_FLUSH_REMOTE = 1 << 4,
    GDS_MEMBAR_DEFAULT = 1 << 5,
    GDS_MEMBAR_SYS = 1 << 6,
    GDS_MEMBAR_MLX5 = 1 << 7
} gds_membar_flags_t;

typedef enum gds_wait_cond_flag {
    GDS_WAIT_COND_GEQ = 0, /* (int32_t)(word - value) >= 0 */
    GDS_WAIT_COND_EQ, /* word == value */
    GDS_WAIT_COND_AND, /* (word & value) != 0 */
    GDS_WAIT_COND_NOR /* ~(word | value) != 0 */
} gds_wait_cond_flag_t;

typedef struct gds_wait_value32 {
    uint32_t *ptr;
    uint32_t value;
    gds_wait_cond_flag_t cond_flags;
    int flags; /* gds_memory_type_t | gds_wait_flags_t */
} gds_wait_value32_t;

typedef struct gds_write_value32 {
    uint32_t *ptr;
    uint32_t value;
    int flags; /* gds_memory_type_t | gds_write_flags_t */
} gds_write_value32_t;

/* The bytes are read when it is posted: a multiple of 4, to an address that is one. */
typedef struct gds_write_memory {
    uint8_t *dest;
    const uint8_t *src;
    size_t count;
    int flags; /* gds_memory_type_t | gds_write_memory_flags_t */
} gds_write_memory_t;

/* These check and fill; nothing else. */
int gds_prepare_wait_value32(gds_wait_value32_t *desc, uint32_t *ptr, uint32_t value, gds_wait_cond_flag_t cond_flags,
                             int flags);
int gds_prepare_write_value32(gds_write_value32_t *desc, uint32_t *ptr, uint32_t value, int flags);
int gds_prepare_write_memory(gds_write_memory_t *desc, uint8_t *dest, const uint8_t *src, size_t count, int flags);

/* ---- Lists ------------------------------------------------------------------------------------------------------ */

typedef enum gds_tag {
    GDS_TAG_SEND,
    GDS_TAG_WAIT,
    GDS_TAG_WAIT_VALUE32,
    GDS_TAG_WRITE_VALUE32,
    GDS_TAG_WRITE_MEMORY
} gds_tag_t;

typedef struct gds_descriptor {
    gds_tag_t tag; /* which of these it is */
    union {
        gds_send_request_t *send;
        gds_wait_request_t *wait;
        gds_wait_value32_t wait32;
        gds_write_value32_t write32;
        gds_write_memory_t writemem;
    };
} gds_descriptor_t;

/*
 * In order, all or nothing: if the stream refuses the list, its sends are taken back and its claims given back. What is
 * pointed to is not used after the call, but for the words. flags must be 0.
 */
int gds_stream_post_descriptors(CUstream stream, size_t n_descs, gds_descriptor_t *descs, int flags);

/* The same by the calling thread, which does not call CUDA: allowed in a callback of a stream. Words are of the CPU. */
int gds_post_descriptors(size_t n_descs, gds_descriptor_t *descs, int flags);

/* ---- Ours ------------------------------------------------------------------------------------------------------- */

/* The reason of the last failed call of this thread, or of the last failed completion that it polled; "" at first. */
const char *gdsx_last_error(void);

/*
 * The time after which a wait fails, in milliseconds; 0, the default, is for ever. For gds_post_descriptors, and for
 * streams that are used for the first time afterwards. A failed stream runs to its end without sending, and its queue
 * pairs are in the error state.
 */
int gdsx_set_wait_limit(uint64_t milliseconds);

#ifdef __cplusplus
static_assert(sizeof(gds_send_request_t) == 1856 && sizeof(gds_wait_request_t) == 1856, "as in libgdsync");
#elif defined(__STDC_VERSION__) && __STDC_VERSION__ >= 201112L
_Static_assert(sizeof(gds_send_request_t) == 1856 && sizeof(gds_wait_request_t) == 1856, "as in libgdsync");
#endif

GDS_END_DECLS

#endif
