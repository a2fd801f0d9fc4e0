/* One rank: wrong arguments, ended handles, several threads and a forked child. Each has its error number, and a line of the logger. */

#include "check.h"

#include <pthread.h>
#include <sys/mman.h>
#include <sys/wait.h>

static int lines, failures, calls;

static void logger(void *self, int level, const char *text)
{
    TRUE(self == &lines && text && *text);
    if (level != GDA_LOG_ERROR)
        return;
    lines++;
    printf("%s\n", text);
    /* What it should not do: no line for this one. */
    if (calls)
        CHECK(gda_close(NULL), -EINVAL);
}

/* A call that fails with this number, and is logged. */
#define FAILS(call, number)                                                                                            \
    do {                                                                                                               \
        int before_ = lines;                                                                                           \
        CHECK(call, -(number));                                                                                        \
        CHECK(lines, before_ + 1);                                                                                     \
        failures++;                                                                                                    \
    } while (0)

/* The last failure is told with these words. */
#define SAYS(words)                                                                                                    \
    do {                                                                                                               \
        if (!strstr(gda_last_error(), words)) {                                                                        \
            fprintf(stderr, "%s:%d: no '%s' in: %s\n", __FILE__, __LINE__, words, gda_last_error());                   \
            exit(1);                                                                                                   \
        }                                                                                                              \
    } while (0)

static int nobody(void *self, const void *mine, size_t len, void *all, int64_t timeout_ns)
{
    (void)self;
    (void)timeout_ns;
    memcpy(all, mine, len);
    return 0;
}

static int refuses(void *self, const void *mine, size_t len, void *all, int64_t timeout_ns)
{
    (void)mine, (void)len, (void)all, (void)timeout_ns;
    return *(int *)self;
}

static void release(void *self)
{
    ++*(int *)self;
}

static void done(void *self, int result, const struct gda_status *status)
{
    (void)status;
    *(int *)self = result;
}

static int launched(void *self, uint64_t program)
{
    (void)self;
    return program == 0;
}

static void *wait_long(void *req)
{
    int got;
    /* The other thread may look right now. */
    while ((got = gda_req_wait(req, PATIENCE, NULL)) == -EBUSY)
        usleep(100);
    return (void *)(intptr_t)got;
}

/* Two threads wait for one request: one of them is told. */
static void threads(struct side *s)
{
    pthread_t thread;
    gda_req_t never;
    void *result;
    struct gda_buf in = range(s, 0, 8);
    OK(gda_trecv(s->comm, 0, 77, UINT64_MAX, &in, &never));
    OK(pthread_create(&thread, NULL, wait_long, never));
    int got;
    while ((got = gda_req_wait(never, 0, NULL)) == GDA_IN_PROGRESS)
        usleep(100);
    CHECK(got, -EBUSY);
    FAILS(gda_req_free(never), EBUSY);
    FAILS(gda_req_cancel(never), EBUSY);
    OK(gda_tsend(s->comm, 0, 77, &in, NULL));
    OK(pthread_join(thread, &result));
    CHECK((intptr_t)result, 0);
    FAILS(gda_req_wait(never, 0, NULL), EINVAL);
}

static void in_child(struct side *s, gda_stream_t stream, gda_req_t req)
{
    struct gda_buf out = range(s, 0, 8);
    struct gda_config config = {.struct_size = sizeof config, .gpu = -1};
    gda_ctx_t ctx;
    int status;
    fflush(stdout);
    pid_t child = fork();
    TRUE(child >= 0);
    if (child == 0) {
        CHECK(gda_set_logger(NULL, NULL, 0), -EACCES);
        CHECK(gda_open(&config, &ctx), -EACCES);
        SAYS("before its first call, or have the child call exec");
        CHECK(gda_send(s->comm, 0, &out, 1, NULL, NULL), -EACCES);
        CHECK(gda_req_wait(req, PATIENCE, NULL), -EACCES);
        CHECK(gda_stream_sync(stream, PATIENCE), -EACCES);
        CHECK(gda_comm_destroy(s->comm, PATIENCE), -EACCES);
        CHECK(gda_mem_dereg(s->mem), -EACCES);
        CHECK(gda_close(s->ctx), -EACCES);
        TRUE(strstr(gda_last_error(), "gda_close"));
        _exit(0);
    }
    CHECK(waitpid(child, &status, 0), child);
    CHECK(status, 0);
}

/* Memory that is not there: none of it, or its end. */
static void not_mapped(struct side *s)
{
    gda_mem_t mem;
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    char *two = mmap(NULL, 2 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    TRUE(two != MAP_FAILED);
    CHECK(munmap(two + page, page), 0);
    FAILS(gda_mem_reg(s->comm, (void *)0x1000, 64, 0, &mem), EFAULT);
    SAYS("64 bytes at 0x1000 are not all mapped");
    FAILS(gda_mem_reg(s->comm, two, 2 * page, GDA_CACHED, &mem), EFAULT);
    OK(gda_mem_reg(s->comm, two, page, 0, &mem));
    OK(gda_mem_dereg(mem));
    CHECK(munmap(two, page), 0);
}

/* Receives that a communicator ends with: of one a thread waits. */
static void destroyed(gda_ctx_t ctx)
{
    struct gda_exchange exchange = {sizeof exchange, 0, 1, 0, NULL, nobody, NULL};
    gda_comm_t comm;
    gda_mem_t mem;
    gda_req_t reqs[4];
    pthread_t thread;
    void *result;
    int which, told = 1;
    static char bytes[64];
    OK(gda_comm_create(ctx, &exchange, GDA_TAGGED, PATIENCE, &comm, NULL));
    OK(gda_mem_reg(comm, bytes, sizeof bytes, 0, &mem));
    struct gda_buf bufs[] = {{mem, 0, 8}, {mem, 8, 8}, {mem, 16, 8}, {mem, 24, 8}};
    OK(gda_recv(comm, 0, &bufs[0], 1, NULL, &reqs[0]));
    OK(gda_recv(comm, 0, &bufs[1], 1, NULL, &reqs[1]));
    OK(gda_trecv(comm, 0, 1, UINT64_MAX, &bufs[2], &reqs[2]));
    OK(gda_recv(comm, 0, &bufs[3], 1, NULL, &reqs[3]));
    OK(gda_req_on_done(ctx, reqs[3], done, &told));
    OK(pthread_create(&thread, NULL, wait_long, reqs[0]));
    OK(gda_comm_destroy(comm, PATIENCE));
    OK(pthread_join(thread, &result));
    CHECK((intptr_t)result, -ECANCELED);
    FAILS(gda_req_wait_any(&reqs[1], 1, -1, &which, NULL), ECANCELED);
    SAYS("the communicator was destroyed before");
    FAILS(gda_req_wait(reqs[2], -1, NULL), ECANCELED);
    while (told == 1)
        OK(gda_progress(ctx));
    CHECK(told, -ECANCELED);
    OK(gda_mem_dereg(mem));
}

/* A context ends with its last communicator, also if a function was to be called. */
static void closed(void)
{
    int released = 0, told = 1;
    struct gda_exchange exchange = {sizeof exchange, 0, 1, 0, &released, nobody, release};
    gda_ctx_t ctx = open_ctx(-1);
    gda_comm_t comm;
    gda_mem_t mem;
    gda_req_t req;
    static char bytes[8];
    OK(gda_comm_create(ctx, &exchange, 0, PATIENCE, &comm, NULL));
    OK(gda_mem_reg(comm, bytes, sizeof bytes, 0, &mem));
    struct gda_buf in = {mem, 0, 8};
    OK(gda_recv(comm, 0, &in, 1, NULL, &req));
    OK(gda_req_on_done(ctx, req, done, &told));
    OK(gda_mem_dereg(mem));
    OK(gda_comm_destroy(comm, PATIENCE));
    OK(gda_close(ctx));
    for (int i = 0; i < 10000 && !released; i++)
        usleep(1000);
    CHECK(released, 1);
    CHECK(told, 1);
}

static void *wait_for_signal(void *win)
{
    return (void *)(intptr_t)gda_wait_signal(win, 0, 1, GDA_GEQ, NULL, -1);
}

/* Nobody can signal any more. */
static void unsignalled(gda_ctx_t ctx, int of_comm)
{
    struct gda_exchange exchange = {sizeof exchange, 0, 1, 0, NULL, nobody, NULL};
    gda_comm_t comm;
    gda_mem_t mem;
    gda_win_t win;
    pthread_t thread;
    void *result;
    static uint64_t word;
    OK(gda_comm_create(ctx, &exchange, 0, PATIENCE, &comm, NULL));
    OK(gda_mem_reg(comm, &word, sizeof word, 0, &mem));
    OK(gda_win_create(comm, mem, 0, sizeof word, PATIENCE, &win));
    OK(pthread_create(&thread, NULL, wait_for_signal, win));
    usleep(10000);
    if (!of_comm)
        OK(gda_win_destroy(win, PATIENCE));
    OK(gda_comm_destroy(comm, PATIENCE));
    OK(pthread_join(thread, &result));
    /* EINVAL: the thread was late, and found no window. */
    if ((intptr_t)result != -EINVAL)
        CHECK((intptr_t)result, -ECANCELED);
}

int main(void)
{
    struct gda_config config = {.struct_size = sizeof config, .gpu = -1};
    struct gda_info info = {.struct_size = sizeof info};
    struct gda_status status = {.struct_size = sizeof status};
    gda_ctx_t ctx;
    gda_comm_t comm;
    gda_mem_t mem;
    gda_req_t req;
    gda_stream_t stream, batch;
    gda_graph_t graph;
    gda_win_t win;
    gda_chan_t chan;
    int which, result = 1, released = 0;
    char bytes[64];

    CHECK(gda_version(), GDA_VERSION);
    TRUE(*gda_last_error() == 0);
    OK(gda_set_logger(logger, &lines, GDA_LOG_ERROR));
    FAILS(gda_set_logger(logger, &lines, 9), EINVAL);
    calls = 1;
    FAILS(gda_progress(NULL), EINVAL);
    calls = 0;

    /* Structures and their sizes. */
    FAILS(gda_open(NULL, &ctx), EINVAL);
    FAILS(gda_open(&config, NULL), EINVAL);
    config.struct_size = 4;
    FAILS(gda_open(&config, &ctx), EINVAL);
    config.struct_size = 0x7fffffff;
    FAILS(gda_open(&config, &ctx), EINVAL);
    struct {
        struct gda_config now;
        uint64_t later;
    } newer = {{.struct_size = sizeof newer, .gpu = -1, .device = "soft0"}, 1};
    FAILS(gda_open(&newer.now, &ctx), EINVAL);
    newer.later = 0;
    OK(gda_open(&newer.now, &ctx));
    OK(gda_close(ctx));
    FAILS(gda_close(ctx), EINVAL);
    config.struct_size = sizeof config;
    config.device = "no_such_device";
    FAILS(gda_open(&config, &ctx), ENODEV);
    TRUE(strstr(gda_last_error(), "no_such_device"));
    config.device = NULL;
    config.depth = 1 << 30;
    FAILS(gda_open(&config, &ctx), EINVAL);
    SAYS("depth is 1073741824: expected at most 32768");
    config.depth = 32768;
    config.max_pieces = 31;
    FAILS(gda_open(&config, &ctx), EINVAL);
    config.max_pieces = 30;
    config.gpu = 99;
    TRUE(gda_open(&config, &ctx) < 0);
    SAYS("gpu is 99: ");
    SAYS("-1 for no GPU");

    struct side s = open_side(-1, GDA_TAGGED | GDA_COLLECTIVES);
    struct gda_buf out = range(&s, 0, 8), past = range(&s, BYTES, 8), wraps = range(&s, UINT64_MAX, 8), no = {NULL, 0, 8};
    struct gda_exchange exchange = {sizeof exchange, 0, 1, 0, NULL, nobody, NULL};
    FAILS(gda_info(s.ctx, NULL), EINVAL);
    OK(gda_info(s.ctx, &info));
    TRUE(info.is_software == 1 && !info.is_direct && info.max_inline == 64 && *info.device);
    FAILS(gda_close((gda_ctx_t)(void *)s.comm), EINVAL);
    FAILS(gda_progress(NULL), EINVAL);
    FAILS(gda_event_fd((gda_ctx_t)&info), EINVAL);

    /* Communicators. */
    FAILS(gda_comm_create(s.ctx, &exchange, 64, PATIENCE, &comm, NULL), EINVAL);
    exchange.rank = 1;
    FAILS(gda_comm_create(s.ctx, &exchange, 0, PATIENCE, &comm, NULL), EINVAL);
    exchange.rank = -1;
    FAILS(gda_comm_create(s.ctx, &exchange, 0, PATIENCE, &comm, NULL), EINVAL);
    exchange.rank = 0;
    exchange.size = INT32_MAX;
    FAILS(gda_comm_create(s.ctx, &exchange, 0, PATIENCE, &comm, NULL), EINVAL);
    exchange.size = 1;
    exchange.reserved = 1;
    FAILS(gda_comm_create(s.ctx, &exchange, 0, PATIENCE, &comm, NULL), EINVAL);
    exchange.reserved = 0;
    exchange.allgather = NULL;
    exchange.release = release;
    exchange.self = &released;
    FAILS(gda_comm_create(s.ctx, &exchange, 0, PATIENCE, &comm, NULL), EINVAL);
    FAILS(gda_comm_create(NULL, &exchange, 0, PATIENCE, &comm, NULL), EINVAL);
    CHECK(released, 2);
    exchange.release = NULL;
    exchange.allgather = refuses;
    exchange.self = &which;
    which = 1;
    FAILS(gda_comm_create(s.ctx, &exchange, 0, PATIENCE, &comm, NULL), EINVAL);
    SAYS("allgather returned 1: ");
    which = -EIO;
    FAILS(gda_comm_create(s.ctx, &exchange, 0, PATIENCE, &comm, NULL), EIO);
    exchange.allgather = nobody;
    OK(gda_comm_create(s.ctx, &exchange, 0, PATIENCE, &comm, NULL));
    FAILS(gda_tsend(comm, 0, 1, &out, NULL), EINVAL);
    OK(gda_mem_reg(comm, bytes, sizeof bytes, 0, &mem));
    struct gda_buf other = {mem, 0, 8};
    FAILS(gda_tsend(comm, 0, 1, &other, NULL), EOPNOTSUPP);
    FAILS(gda_barrier(comm, NULL, 0), EOPNOTSUPP);
    FAILS(gda_comm_abort(comm, -2), EINVAL);
    FAILS(gda_comm_shrink(comm, 1000000, &comm, NULL), ECONNRESET);
    TRUE(gda_comm_destroy(comm, PATIENCE) <= 0);
    FAILS(gda_comm_destroy(comm, PATIENCE), EINVAL);
    FAILS(gda_send(comm, 0, &other, 1, NULL, NULL), EINVAL);
    FAILS(gda_comm_rank(comm), EINVAL);
    OK(gda_mem_dereg(mem));
    FAILS(gda_connect(s.ctx, bytes, (size_t)1 << 30, 0, PATIENCE, &comm, &req), EINVAL);

    /* Memory and messages. */
    FAILS(gda_mem_reg(s.comm, NULL, 8, 0, &mem), EINVAL);
    FAILS(gda_mem_reg(s.comm, bytes, 0, 0, &mem), EINVAL);
    FAILS(gda_mem_reg(s.comm, bytes, 8, 2, &mem), EINVAL);
    FAILS(gda_mem_reg_dmabuf(s.comm, -1, 0, 8, &mem), EINVAL);
    void *addr;
    gda_peer_mem_t peer;
    FAILS(gda_mem_export(s.mem, NULL), EINVAL);
    FAILS(gda_mem_export(s.mem, s.bytes), EOPNOTSUPP);
    FAILS(gda_mem_import(s.ctx, NULL, &peer, &addr), EINVAL);
    FAILS(gda_mem_import(s.ctx, s.bytes, &peer, &addr), EINVAL);
    SAYS("gda_config");
    FAILS(gda_peer_mem_close((gda_peer_mem_t)(void *)s.mem), EINVAL);
    FAILS(gda_send(s.comm, 7, &out, 1, NULL, NULL), EINVAL);
    FAILS(gda_send(s.comm, -1, &out, 1, NULL, NULL), EINVAL);
    FAILS(gda_recv(s.comm, GDA_ANY_RANK, &out, 1, NULL, &req), EINVAL);
    SAYS("gda_trecv");
    FAILS(gda_send(s.comm, 0, NULL, 1, NULL, NULL), EINVAL);
    FAILS(gda_send(s.comm, 0, &out, -1, NULL, NULL), EINVAL);
    FAILS(gda_send(s.comm, 0, &past, 1, NULL, NULL), EINVAL);
    FAILS(gda_send(s.comm, 0, &wraps, 1, NULL, NULL), EINVAL);
    FAILS(gda_send(s.comm, 0, &no, 1, NULL, NULL), EINVAL);
    struct gda_buf of_comm = {(gda_mem_t)(void *)s.comm, 0, 8};
    FAILS(gda_send(s.comm, 0, &of_comm, 1, NULL, NULL), EINVAL);
    SAYS(", which is a gda_comm_t");
    FAILS(gda_send(s.comm, 0, &out, 1, (gda_stream_t)(void *)s.comm, NULL), EINVAL);
    FAILS(gda_trecv(s.comm, -2, 0, 0, &out, &req), EINVAL);
    FAILS(gda_trecv(s.comm, 0, 0, 0, NULL, &req), EINVAL);
    SAYS("buf is NULL");
    FAILS(gda_allreduce(s.comm, NULL, GDA_INT32, GDA_SUM, NULL, PATIENCE), EINVAL);
    SAYS("buf is NULL");
    OK(gda_recv(s.comm, 0, &out, 1, NULL, &req));
    FAILS(gda_recv(s.comm, 0, &out, 1, NULL, NULL), EINVAL);
    SAYS("gda_recv, gda_send and gda_req_on_stream");
    FAILS(gda_req_cancel(req), EOPNOTSUPP);
    status.struct_size = 8;
    FAILS(gda_req_wait(req, 0, &status), EINVAL);
    status.struct_size = sizeof status;
    FAILS(gda_req_wait_any(&req, 1, 0, NULL, NULL), EINVAL);
    FAILS(gda_req_wait_any(NULL, 1, 0, &which, NULL), EINVAL);
    FAILS(gda_req_on_done(s.ctx, req, NULL, NULL), EINVAL);
    CHECK(gda_req_wait(req, 0, &status), GDA_IN_PROGRESS);
    FAILS(gda_req_wait(req, -7, &status), EINVAL);
    SAYS("-7 ns: expected -1 (for ever)");
    FAILS(gda_req_wait_any(&req, 1, -2, &which, NULL), EINVAL);
    FAILS(gda_barrier(s.comm, NULL, -2), EINVAL);
    not_mapped(&s);
    destroyed(s.ctx);
    closed();
    unsignalled(s.ctx, 0);
    unsignalled(s.ctx, 1);

    /* Streams, batches and graphs. */
    FAILS(gda_stream_open(s.ctx, &s, GDA_STREAM_HOST, 0, &stream), EINVAL);
    FAILS(gda_stream_open(s.ctx, NULL, 64, 0, &stream), EINVAL);
    FAILS(gda_stream_open(s.ctx, NULL, 0, 0, &stream), EINVAL);
    SAYS("GDA_STREAM_HOST");
    FAILS(gda_stream_open(s.ctx, NULL, GDA_STREAM_HOST, -2, &stream), EINVAL);
    stream = host_stream(s.ctx);
    OK(gda_batch_begin(s.ctx, &batch));
    FAILS(gda_batch_submit(stream, stream), EINVAL);
    FAILS(gda_batch_submit(batch, batch), EINVAL);
    FAILS(gda_stream_sync(batch, 0), EINVAL);
    FAILS(gda_stream_status(batch, &which), EINVAL);
    FAILS(gda_capture_begin(batch), EINVAL);
    FAILS(gda_capture_end(stream, &graph), EINVAL);
    FAILS(gda_graph_launch(NULL, stream), EINVAL);
    FAILS(gda_stream_call(stream, NULL, NULL), EINVAL);
    FAILS(gda_steps_launch(NULL, stream, NULL, NULL), EINVAL);
    /* Only kernels run steps. */
    FAILS(gda_steps_record(stream, &batch, 1, &graph), EOPNOTSUPP);
    FAILS(gda_steps_record(stream, &stream, 1, &graph), EINVAL);
    OK(gda_capture_begin(stream));
    FAILS(gda_send(s.comm, 0, &out, 1, stream, NULL), EOPNOTSUPP);
    SAYS("gda_chan_create");
    OK(gda_capture_end(stream, &graph));
    FAILS(gda_steps_launch(graph, stream, launched, NULL), EINVAL);
    OK(gda_graph_destroy(graph));
    OK(gda_stream_close(batch));

    /* Windows and channels. */
    FAILS(gda_win_create(s.comm, s.mem, 0, BYTES + 8, PATIENCE, &win), EINVAL);
    OK(gda_win_create(s.comm, s.mem, 0, 128, PATIENCE, &win));
    FAILS(gda_put_bytes(win, 0, 0, bytes, 65, NULL, NULL, NULL), EINVAL);
    FAILS(gda_put_bytes(win, 0, 0, NULL, 5, NULL, NULL, NULL), EINVAL);
    FAILS(gda_atomic(win, 0, 0, 9, 0, 0, &out, NULL, NULL), EINVAL);
    FAILS(gda_atomic(win, 0, 0, GDA_COMPARE_SWAP, 0, 0, NULL, NULL, NULL), EINVAL);
    FAILS(gda_win_flush(win, -2, NULL, 0), EINVAL);
    FAILS(gda_wait_signal(win, 0, 0, 9, NULL, 0), EINVAL);
    SAYS("cond is 9");
    FAILS(gda_wait_signal(win, 0, 1, GDA_GEQ, NULL, 0), ETIMEDOUT);
    SAYS("GDA_GEQ 1");
    SAYS("(gda_put or gda_put_bytes with a signal)");
    /* The handle lives on. */
    FAILS(gda_win_destroy(win, -2), EINVAL);
    FAILS(gda_comm_destroy(s.comm, -2), EINVAL);
    OK(gda_win_destroy(win, PATIENCE));
    FAILS(gda_chan_create(s.comm, 5, &out, 1, PATIENCE, &chan), EINVAL);
    OK(gda_chan_create(s.comm, 0, NULL, 0, PATIENCE, &chan));
    FAILS(gda_chan_wait(chan, GDA_CHAN_SENT, stream), EINVAL);
    FAILS(gda_chan_wait(chan, 7, stream), EINVAL);
    FAILS(gda_chan_post(chan, stream), EINVAL);
    OK(gda_chan_destroy(chan));

    threads(&s);
    in_child(&s, stream, req);

    /* What was handed over is told once. */
    OK(gda_req_on_done(s.ctx, req, done, &result));
    FAILS(gda_req_free(req), EINVAL);
    OK(gda_send(s.comm, 0, &out, 1, NULL, NULL));
    while (result == 1)
        OK(gda_progress(s.ctx));
    OK(result);
    OK(gda_stream_close(stream));
    FAILS(gda_stream_close(stream), EINVAL);
    close_side(&s);
    FAILS(gda_mem_dereg(s.mem), EINVAL);
    OK(gda_set_logger(NULL, NULL, 0));
    CHECK(gda_progress(s.ctx), -EINVAL);
    printf("%d failures\n", failures);
    return 0;
}
