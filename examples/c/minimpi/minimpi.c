/* A small MPI-like library over libgdasync. */

#include "minimpi.h"

#include <errno.h>
#include <gdasync.h>
#include <stdlib.h>

/* A runtime would take this from its settings. */
static const int64_t TIMEOUT = (int64_t)60 * 1000000000;

struct mm_comm {
    gda_ctx_t ctx; /* of the world */
    gda_comm_t comm;
    int rank, size, is_world;
    mm_allgather allgather;
    void *self;
};

/* Each message registers its memory: with GDA_CACHED that is a look-up but the first time. */
struct mm_request {
    gda_req_t req;
    gda_mem_t mem;
};

struct mm_stream {
    gda_stream_t stream;
};

const char *mm_error(void)
{
    return gda_last_error();
}

static int exchange(void *self, const void *mine, size_t len, void *all, int64_t timeout_ns)
{
    mm_comm *world = self;
    (void)timeout_ns; /* the runtime has its own */
    return world->allgather(world->self, mine, len, all);
}

/* Finishes a communicator that is made. */
static int made(mm_comm *comm, int result, mm_comm **to)
{
    if (result < 0) {
        free(comm);
        return result;
    }
    comm->rank = gda_comm_rank(comm->comm);
    comm->size = gda_comm_size(comm->comm);
    *to = comm;
    return 0;
}

int mm_init(int rank, int size, mm_allgather allgather, void *self, mm_comm **to)
{
    const char *gpu = getenv("MINIMPI_GPU");
    struct gda_config config = {0};
    struct gda_exchange own = {0};
    mm_comm *world = calloc(1, sizeof *world);
    if (!world)
        return -ENOMEM;
    config.struct_size = sizeof config;
    config.gpu = gpu ? atoi(gpu) : -1;
    world->is_world = 1;
    world->allgather = allgather;
    world->self = self;
    own.struct_size = sizeof own;
    own.rank = rank;
    own.size = size;
    own.self = world;
    own.allgather = exchange;
    int result = gda_open(&config, &world->ctx);
    if (result == 0) {
        result = gda_comm_create(world->ctx, allgather ? &own : NULL, GDA_TAGGED | GDA_COLLECTIVES, TIMEOUT, &world->comm, NULL);
        if (result < 0)
            gda_close(world->ctx);
    }
    return made(world, result, to);
}

int mm_split(mm_comm *comm, int color, int key, mm_comm **to)
{
    mm_comm *part = calloc(1, sizeof *part);
    if (!part)
        return -ENOMEM;
    part->ctx = comm->ctx;
    int result = gda_comm_split(comm->comm, color, key, TIMEOUT, &part->comm);
    if (result == 0 && !part->comm) {
        free(part);
        *to = NULL;
        return 0;
    }
    return made(part, result, to);
}

int mm_free(mm_comm *comm)
{
    int result = gda_comm_destroy(comm->comm, TIMEOUT);
    if (comm->is_world)
        gda_close(comm->ctx);
    free(comm);
    return result;
}

int mm_finalize(mm_comm *world)
{
    return mm_free(world);
}

int mm_rank(const mm_comm *comm)
{
    return comm->rank;
}

int mm_size(const mm_comm *comm)
{
    return comm->size;
}

/* Registers the memory of a message. A message of no bytes is of a byte that is not sent. */
static int buffer(mm_comm *comm, const void *bytes, size_t len, struct gda_buf *buf)
{
    static char none;
    void *at = len ? (void *)(uintptr_t)bytes : &none;
    buf->offset = 0;
    buf->len = len;
    return gda_mem_reg(comm->comm, at, len ? len : 1, GDA_CACHED, &buf->mem);
}

static int start(mm_comm *comm, const void *bytes, size_t len, int peer, int tag, int is_send, mm_request **to)
{
    mm_request *request = calloc(1, sizeof *request);
    struct gda_buf buf;
    if (!request)
        return -ENOMEM;
    int result = buffer(comm, bytes, len, &buf);
    if (result < 0) {
        free(request);
        return result;
    }
    /* A queue that is full empties when messages are moved along. */
    do {
        if (is_send)
            result = gda_tsend(comm->comm, peer, (uint32_t)tag, &buf, &request->req);
        else
            result = gda_trecv(comm->comm, peer, tag == MM_ANY_TAG ? 0 : (uint32_t)tag, tag == MM_ANY_TAG ? 0 : UINT64_MAX,
                               &buf, &request->req);
    } while (result == -EAGAIN && gda_progress(comm->ctx) == 0);
    request->mem = buf.mem;
    if (result < 0) {
        gda_mem_dereg(buf.mem);
        free(request);
        return result;
    }
    *to = request;
    return 0;
}

int mm_isend(mm_comm *comm, const void *bytes, size_t len, int dest, int tag, mm_request **request)
{
    return start(comm, bytes, len, dest, tag, 1, request);
}

int mm_irecv(mm_comm *comm, void *bytes, size_t len, int source, int tag, mm_request **request)
{
    return start(comm, bytes, len, source == MM_ANY_SOURCE ? GDA_ANY_RANK : source, tag, 0, request);
}

int mm_waitall(mm_request **requests, int n)
{
    int first = 0;
    for (int i = 0; i < n; i++) {
        mm_request *request = requests[i];
        requests[i] = NULL;
        if (!request)
            continue;
        int result = gda_req_wait(request->req, TIMEOUT, NULL);
        if (result == GDA_IN_PROGRESS) {
            gda_req_free(request->req);
            result = -ETIMEDOUT;
        }
        gda_mem_dereg(request->mem);
        free(request);
        if (first == 0)
            first = result;
    }
    return first;
}

int mm_barrier(mm_comm *comm)
{
    return gda_barrier(comm->comm, NULL, TIMEOUT);
}

int mm_forget(mm_comm *comm, const void *bytes, size_t len)
{
    return gda_mem_invalidate(comm->comm, (void *)(uintptr_t)bytes, len);
}

int mm_stream_open(mm_comm *comm, void *cuda_stream, mm_stream **to)
{
    mm_stream *stream = calloc(1, sizeof *stream);
    if (!stream)
        return -ENOMEM;
    int result = gda_stream_open(comm->ctx, cuda_stream, cuda_stream ? 0 : GDA_STREAM_HOST, TIMEOUT, &stream->stream);
    if (result < 0) {
        free(stream);
        return result;
    }
    *to = stream;
    return 0;
}

int mm_stream_sync(mm_stream *stream)
{
    return gda_stream_sync(stream->stream, TIMEOUT);
}

int mm_stream_close(mm_stream *stream)
{
    int result = gda_stream_close(stream->stream);
    free(stream);
    return result;
}

/* Enqueues up to two messages and the waits for them, in one batch: the stream gets all of them or none. */
static int enqueue(mm_comm *comm, const struct gda_buf *out, int dest, const struct gda_buf *in, int source, mm_stream *stream)
{
    gda_stream_t batch;
    gda_req_t received = NULL, sent = NULL;
    int result = gda_batch_begin(comm->ctx, &batch);
    if (result < 0)
        return result;
    do {
        /* The receive comes first: a send of the peer waits for it. */
        result = in ? gda_recv(comm->comm, source, in, 1, batch, &received) : 0;
        if (result == 0 && out)
            result = gda_send(comm->comm, dest, out, 1, batch, &sent);
        if (result == 0)
            result = gda_req_on_stream(sent, batch);
        if (result == 0)
            result = gda_req_on_stream(received, batch);
        if (result == 0)
            result = gda_batch_submit(batch, stream->stream);
        gda_req_free(received);
        gda_req_free(sent);
        received = sent = NULL;
        if (result == -EAGAIN) {
            /* What is in the batch is taken back. */
            gda_stream_close(batch);
            gda_progress(comm->ctx);
            int again = gda_batch_begin(comm->ctx, &batch);
            if (again < 0)
                return again;
        }
    } while (result == -EAGAIN);
    gda_stream_close(batch);
    return result;
}

int mm_sendrecv_enqueue(mm_comm *comm, const void *out, size_t out_len, int dest, void *in, size_t in_len, int source,
                        mm_stream *stream)
{
    struct gda_buf from = {0}, to = {0};
    int result = out ? buffer(comm, out, out_len, &from) : 0;
    if (result == 0 && in)
        result = buffer(comm, in, in_len, &to);
    if (result == 0)
        result = enqueue(comm, out ? &from : NULL, dest, in ? &to : NULL, source, stream);
    /* Messages keep their memory registered. */
    if (from.mem)
        gda_mem_dereg(from.mem);
    if (to.mem)
        gda_mem_dereg(to.mem);
    return result;
}

int mm_send_enqueue(mm_comm *comm, const void *bytes, size_t len, int dest, mm_stream *stream)
{
    return mm_sendrecv_enqueue(comm, bytes, len, dest, NULL, 0, 0, stream);
}

int mm_recv_enqueue(mm_comm *comm, void *bytes, size_t len, int source, mm_stream *stream)
{
    return mm_sendrecv_enqueue(comm, NULL, 0, 0, bytes, len, source, stream);
}

int mm_barrier_enqueue(mm_comm *comm, mm_stream *stream)
{
    return gda_barrier(comm->comm, stream->stream, TIMEOUT);
}
