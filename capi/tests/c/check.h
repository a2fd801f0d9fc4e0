/* A rank of a launcher's job, for checks of the library. */

#ifndef CHECK_H
#define CHECK_H

#include <errno.h>
#include <gdasync.h>
#include <string.h>
#include <unistd.h>

#define REASON gda_last_error()
#include <checks.h>

/* What anything may take. */
#define PATIENCE ((int64_t)60 * 1000000000)

/* As OK, where the last work of another stream with the peer may have to complete first. */
#define SOON(s, call)                                                                                                  \
    do {                                                                                                               \
        int soon_;                                                                                                     \
        do                                                                                                             \
            OK(gda_progress((s)->ctx));                                                                                \
        while ((soon_ = (call)) == -EAGAIN);                                                                           \
        OK(soon_);                                                                                                     \
    } while (0)

static inline gda_ctx_t open_ctx(int gpu)
{
    struct gda_config config = {.struct_size = sizeof config, .gpu = gpu};
    gda_ctx_t ctx;
    OK(gda_open(&config, &ctx));
    return ctx;
}

enum { BYTES = 65536 };

/* A rank of a launcher's job, with registered memory. */
struct side {
    gda_ctx_t ctx;
    gda_comm_t comm;
    int rank, size, peer;
    char *bytes;
    gda_mem_t mem;
};

static inline struct side open_side(int gpu, uint32_t flags)
{
    struct side s;
    s.ctx = open_ctx(gpu);
    OK(gda_comm_create(s.ctx, NULL, flags, PATIENCE, &s.comm, NULL));
    s.rank = gda_comm_rank(s.comm);
    s.size = gda_comm_size(s.comm);
    s.peer = s.size - 1 - s.rank;
    OK(posix_memalign((void **)&s.bytes, 4096, BYTES));
    memset(s.bytes, 0, BYTES);
    OK(gda_mem_reg(s.comm, s.bytes, BYTES, 0, &s.mem));
    return s;
}

static inline void close_side(struct side *s)
{
    OK(gda_mem_dereg(s->mem));
    OK(gda_comm_destroy(s->comm, PATIENCE));
    OK(gda_close(s->ctx));
    free(s->bytes);
}

static inline struct gda_buf range(struct side *s, uint64_t offset, uint64_t len)
{
    struct gda_buf buf = {s->mem, offset, len};
    return buf;
}

static inline struct gda_status status_of(gda_req_t req)
{
    struct gda_status status = {.struct_size = sizeof status};
    OK(gda_req_wait(req, PATIENCE, &status));
    return status;
}

static inline gda_stream_t host_stream(gda_ctx_t ctx)
{
    gda_stream_t stream;
    OK(gda_stream_open(ctx, NULL, GDA_STREAM_HOST, PATIENCE, &stream));
    return stream;
}

#endif
