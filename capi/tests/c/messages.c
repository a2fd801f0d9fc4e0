/* Two ranks: messages by the CPU and on streams, with tags and without; requests in every way. */

#include "check.h"

#include <poll.h>

static void by_cpu(struct side *s)
{
    struct gda_buf to = range(s, 0, 8), from[2] = {range(s, 1024, 3), range(s, 2048, 61)};
    gda_req_t received, sent;
    for (int i = 0; i < 200; i++) {
        OK(gda_recv(s->comm, s->peer, from, 2, NULL, &received));
        memcpy(s->bytes, &(int64_t){i * 257 + s->rank}, 8);
        OK(gda_send(s->comm, s->peer, &to, 1, NULL, &sent));
        struct gda_status status = status_of(received);
        TRUE(status.rank == s->peer && status.len == 8);
        OK(gda_req_wait(sent, PATIENCE, NULL));
        char got[8];
        memcpy(got, s->bytes + 1024, 3);
        memcpy(got + 3, s->bytes + 2048, 5);
        TRUE(memcmp(got, &(int64_t){i * 257 + s->peer}, 8) == 0);
        CHECK(gda_req_wait(received, 0, NULL), -EINVAL);
    }
}

/* Two ranges that the stream exchanges, and the waits for them. */
static void by_stream(struct side *s, gda_stream_t stream, int is_batch)
{
    struct gda_buf to = range(s, 4096, 512), from = range(s, 8192, 512);
    for (int i = 0; i < 20; i++) {
        gda_req_t received, sent;
        gda_stream_t on = stream;
        if (is_batch)
            OK(gda_batch_begin(s->ctx, &on));
        memset(s->bytes + 4096, i * 2 + s->rank, 512);
        SOON(s, gda_recv(s->comm, s->peer, &from, 1, on, &received));
        SOON(s, gda_send(s->comm, s->peer, &to, 1, on, &sent));
        OK(gda_req_on_stream(received, on));
        OK(gda_req_on_stream(sent, on));
        if (is_batch) {
            SOON(s, gda_batch_submit(on, stream));
            OK(gda_stream_close(on));
        }
        OK(gda_stream_sync(stream, PATIENCE));
        TRUE(s->bytes[8192] == (char)(i * 2 + s->peer) && s->bytes[8703] == s->bytes[8192]);
        CHECK(gda_req_wait(received, 0, NULL), 0);
        OK(gda_req_free(sent));
    }
}

static void with_tags(struct side *s)
{
    struct gda_buf any = range(s, 0, 100), seven = range(s, 100, 100), big = range(s, 16384, 32768);
    struct gda_buf out = range(s, 300, 10), big_out = range(s, 0, 0);
    gda_req_t first, second, sent[3], never;
    OK(gda_trecv(s->comm, GDA_ANY_RANK, 0, 0, &any, &first));
    OK(gda_trecv(s->comm, s->peer, 7, UINT64_MAX, &seven, &second));
    OK(gda_tsend(s->comm, s->peer, 9, &out, &sent[0]));
    OK(gda_tsend(s->comm, s->peer, 7, &out, &sent[1]));
    struct gda_status status = status_of(first);
    TRUE(status.tag == 9 && status.len == 10 && status.rank == s->peer);
    TRUE(status_of(second).tag == 7);
    OK(gda_req_wait(sent[0], PATIENCE, NULL));
    OK(gda_req_wait(sent[1], PATIENCE, NULL));
    /* The high bits are free. */
    OK(gda_trecv(s->comm, s->peer, 0x12, 0xff, &any, &first));
    OK(gda_tsend(s->comm, s->peer, 0x3412, &big_out, &sent[0]));
    TRUE(status_of(first).tag == 0x3412);
    OK(gda_req_wait(sent[0], PATIENCE, NULL));
    OK(gda_trecv(s->comm, s->peer, 99, UINT64_MAX, &big, &never));
    CHECK(gda_req_wait(never, 0, NULL), GDA_IN_PROGRESS);
    CHECK(gda_req_wait(never, 1000000, NULL), GDA_IN_PROGRESS);
    OK(gda_req_cancel(never));
    CHECK(gda_req_wait(never, 0, NULL), -ECANCELED);
    CHECK(gda_req_wait(never, 0, NULL), -EINVAL);
    /* A message that is too long fails its receive only. */
    OK(gda_trecv(s->comm, s->peer, 5, UINT64_MAX, &out, &first));
    OK(gda_tsend(s->comm, s->peer, 5, &any, &sent[0]));
    CHECK(gda_req_wait(first, PATIENCE, NULL), -EMSGSIZE);
    OK(gda_req_wait(sent[0], PATIENCE, NULL));
}

static void any_of_many(struct side *s)
{
    gda_req_t reqs[4] = {NULL};
    struct gda_buf out = range(s, 0, 1);
    int which, seen = 0;
    CHECK(gda_req_wait_any(reqs, 4, 0, &which, NULL), 0);
    TRUE(which == -1);
    for (int i = 1; i < 4; i++) {
        struct gda_buf in = range(s, 64 * i, 64);
        OK(gda_trecv(s->comm, s->peer, i, UINT64_MAX, &in, &reqs[i]));
    }
    CHECK(gda_req_wait_any(reqs, 4, 0, &which, NULL), GDA_IN_PROGRESS);
    OK(gda_barrier(s->comm, NULL, PATIENCE));
    for (int i = 3; i > 0; i--)
        OK(gda_tsend(s->comm, s->peer, i, &out, NULL));
    for (int i = 0; i < 3; i++) {
        struct gda_status status = {.struct_size = sizeof status};
        OK(gda_req_wait_any(reqs, 4, PATIENCE, &which, &status));
        TRUE(status.tag == (uint64_t)which && !reqs[which]);
        seen |= 1 << which;
    }
    TRUE(seen == 14);
    OK(gda_barrier(s->comm, NULL, PATIENCE));
}

/* A chain of messages, each started by the function that the one before calls. */
struct chain {
    struct side *s;
    int left, results;
};

static void next(void *self, int result, const struct gda_status *status)
{
    struct chain *chain = self;
    struct side *s = chain->s;
    struct gda_buf in = range(s, 0, 64), out = range(s, 64, 8);
    gda_req_t received;
    OK(result);
    TRUE(status->struct_size == sizeof *status);
    chain->results++;
    if (chain->left-- > 0) {
        OK(gda_trecv(s->comm, s->peer, 1, UINT64_MAX, &in, &received));
        OK(gda_tsend(s->comm, s->peer, 1, &out, NULL));
        OK(gda_req_on_done(s->ctx, received, next, chain));
        CHECK(gda_req_free(received), -EINVAL);
        OK(gda_progress(s->ctx));
    }
}

static void functions(struct side *s, int sleeps)
{
    enum { LINKS = 50 };
    struct chain chain = {s, LINKS, 0};
    struct pollfd fd = {gda_event_fd(s->ctx), POLLIN, 0};
    TRUE(fd.fd >= 0);
    /* Of a request that is complete the function is called at once. */
    OK(gda_req_on_done(s->ctx, NULL, next, &chain));
    while (chain.results <= LINKS) {
        OK(gda_progress(s->ctx));
        if (sleeps && chain.results <= LINKS) {
            int armed = gda_arm(s->ctx);
            TRUE(armed == GDA_OK || armed == GDA_IN_PROGRESS);
            if (armed == GDA_OK)
                CHECK(poll(&fd, 1, 60000), 1);
        }
    }
    OK(gda_barrier(s->comm, NULL, PATIENCE));
}

static void called(void *self)
{
    ++*(int *)self;
}

int main(void)
{
    int calls = 0;
    CUstream raw = make_stream();
    struct side s = open_side(0, GDA_TAGGED | GDA_COLLECTIVES);
    gda_stream_t host = host_stream(s.ctx), cuda;
    by_cpu(&s);
    by_stream(&s, host, 0);
    by_stream(&s, host, 1);
    OK(gda_stream_call(host, called, &calls));
    OK(gda_stream_sync(host, PATIENCE));
    TRUE(calls == 1);
    OK(gda_stream_open(s.ctx, raw, 0, 0, &cuda));
    by_stream(&s, cuda, 0);
    by_stream(&s, cuda, 1);
    with_tags(&s);
    any_of_many(&s);
    functions(&s, 0);
    functions(&s, 1);
    OK(gda_stream_close(host));
    OK(gda_stream_close(cuda));
    close_side(&s);
    return 0;
}
