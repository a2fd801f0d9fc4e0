/* Two ranks: one-sided operations, channels in graphs, collectives, and GPU memory. */

#include "check.h"

#include <pthread.h>

static void one_sided(struct side *s, gda_stream_t stream)
{
    gda_win_t win;
    gda_req_t req;
    struct gda_buf from = range(s, 32768, 100), result = range(s, 40000, 8);
    struct gda_signal set = {1024, 1, 0, 0}, add = {1032, 5, 1, 0};
    uint64_t *words = (uint64_t *)(s->bytes + 1024);
    memset(s->bytes, 0, BYTES);
    OK(gda_win_create(s->comm, s->mem, 0, 16384, PATIENCE, &win));
    memset(s->bytes + 32768, 'a' + s->rank, 100);
    SOON(s, gda_put(win, s->peer, 0, &from, 1, &set, stream, &req));
    OK(gda_wait_signal(win, 1024, 1, GDA_GEQ, NULL, PATIENCE));
    TRUE(s->bytes[0] == 'a' + s->peer && s->bytes[99] == 'a' + s->peer && s->bytes[100] == 0);
    OK(gda_req_wait(req, PATIENCE, NULL));
    SOON(s, gda_put_bytes(win, s->peer, 200, "bytes", 5, &add, stream, NULL));
    OK(gda_wait_signal(win, 1032, 5, GDA_EQ, stream, PATIENCE));
    if (stream)
        OK(gda_stream_sync(stream, PATIENCE));
    TRUE(memcmp(s->bytes + 200, "bytes", 6) == 0 && words[1] == 5);
    OK(gda_barrier(s->comm, NULL, PATIENCE));
    /* Its own bytes come back. */
    memset(s->bytes + 32768, 0, 100);
    OK(gda_get(win, s->peer, 0, &from, 1, stream, &req));
    OK(gda_req_wait(req, PATIENCE, NULL));
    TRUE(s->bytes[32768] == 'a' + s->rank);
    OK(gda_atomic(win, s->peer, 1032, GDA_ADD, 3, 0, &result, stream, &req));
    OK(gda_req_wait(req, PATIENCE, NULL));
    TRUE(*(uint64_t *)(s->bytes + 40000) == 5);
    OK(gda_atomic(win, s->peer, 1032, GDA_COMPARE_SWAP, 70, 8, &result, stream, NULL));
    OK(gda_win_flush(win, s->peer, NULL, PATIENCE));
    OK(gda_win_flush(win, -1, stream, PATIENCE));
    if (stream)
        OK(gda_stream_sync(stream, PATIENCE));
    TRUE(*(uint64_t *)(s->bytes + 40000) == 8);
    OK(gda_barrier(s->comm, NULL, PATIENCE));
    TRUE(words[1] == 70);
    CHECK(gda_put(win, s->peer, 16380, &from, 1, NULL, NULL, NULL), -EINVAL);
    CHECK(gda_atomic(win, s->peer, 3, GDA_ADD, 1, 0, NULL, NULL, NULL), -EINVAL);
    CHECK(gda_wait_signal(win, 1032, 1, GDA_EQ, NULL, 1000000), -ETIMEDOUT);
    OK(gda_win_destroy(win, PATIENCE));
    CHECK(gda_win_destroy(win, PATIENCE), -EINVAL);
}

/* One exchange over a channel. */
static void exchange(struct side *s, gda_chan_t chan, gda_stream_t on)
{
    struct gda_buf out = range(s, 0, 64);
    SOON(s, gda_chan_post(chan, on));
    SOON(s, gda_chan_send(chan, &out, on));
    SOON(s, gda_chan_wait(chan, GDA_CHAN_RECV, on));
    SOON(s, gda_chan_wait(chan, GDA_CHAN_SENT, on));
}

static void in_graphs(struct side *s, gda_stream_t stream)
{
    gda_chan_t chan;
    gda_graph_t graph;
    struct gda_buf place = range(s, 512, 64);
    OK(gda_chan_create(s->comm, s->peer, &place, 1, PATIENCE, &chan));
    s->bytes[0] = (char)(50 + s->rank);
    exchange(s, chan, stream);
    OK(gda_stream_sync(stream, PATIENCE));
    TRUE(s->bytes[512] == 50 + s->peer);
    OK(gda_capture_begin(stream));
    exchange(s, chan, stream);
    OK(gda_capture_end(stream, &graph));
    for (int i = 0; i < 10; i++) {
        s->bytes[0] = (char)(10 * s->rank + i);
        OK(gda_graph_launch(graph, stream));
        OK(gda_stream_sync(stream, PATIENCE));
        TRUE(s->bytes[512] == 10 * s->peer + i);
    }
    OK(gda_graph_destroy(graph));
    OK(gda_chan_destroy(chan));
}

static void collectives(struct side *s, gda_stream_t stream)
{
    double *values = (double *)s->bytes;
    struct gda_buf four = range(s, 0, 32), out = range(s, 1024, 32), one = range(s, 0, 8);
    for (int i = 0; i < 4; i++)
        values[i] = s->rank + i;
    OK(gda_barrier(s->comm, stream, PATIENCE));
    SOON(s, gda_allreduce(s->comm, &four, GDA_DOUBLE, GDA_SUM, stream, PATIENCE));
    if (stream)
        OK(gda_stream_sync(stream, PATIENCE));
    TRUE(values[0] == 1 && values[3] == 7);
    values[s->rank] = 40 + s->rank;
    struct gda_buf both = range(s, 0, 16);
    OK(gda_allgather(s->comm, &both, stream, PATIENCE));
    OK(gda_alltoall(s->comm, &both, &(struct gda_buf){s->mem, 1024, 16}, stream, PATIENCE));
    OK(gda_broadcast(s->comm, &one, 1, stream, PATIENCE));
    if (stream)
        OK(gda_stream_sync(stream, PATIENCE));
    TRUE(values[0] == 40 && values[1] == 41 && ((double *)(s->bytes + 1024))[s->peer] == 40 + s->rank);
    CHECK(gda_allreduce(s->comm, &out, 77, GDA_SUM, NULL, PATIENCE), -EINVAL);
}

static void from_gpus(struct side *s, CUstream stream)
{
    CUdeviceptr data;
    gda_mem_t gpu, cached;
    gda_req_t received;
    char text[16] = "", *host = malloc(8192);
    OK(cuMemAlloc(&data, 65536));
    OK(gda_mem_reg(s->comm, (void *)data, 65536, 0, &gpu));
    OK(cuMemcpyHtoDAsync(data, s->rank ? "from rank 1" : "from rank 0", 12, stream));
    OK(cuStreamSynchronize(stream));
    struct gda_buf out = {gpu, 0, 12}, in = {gpu, 4096, 12};
    OK(gda_recv(s->comm, s->peer, &in, 1, NULL, &received));
    OK(gda_send(s->comm, s->peer, &out, 1, NULL, NULL));
    TRUE(status_of(received).len == 12);
    OK(cuMemcpyDtoHAsync(text, data + 4096, 12, stream));
    OK(cuStreamSynchronize(stream));
    TRUE(strcmp(text, s->peer ? "from rank 1" : "from rank 0") == 0);
    OK(gda_barrier(s->comm, NULL, PATIENCE));
    OK(gda_mem_dereg(gpu));
    OK(cuMemFree(data));
    /* Kept registered, until the memory is freed. */
    OK(gda_mem_reg(s->comm, host, 8192, GDA_CACHED, &cached));
    struct gda_buf from = {cached, 0, 6000}, to = range(s, 0, 6000);
    memset(host, 3 + s->rank, 8192);
    OK(gda_recv(s->comm, s->peer, &to, 1, NULL, &received));
    OK(gda_send(s->comm, s->peer, &from, 1, NULL, NULL));
    TRUE(status_of(received).len == 6000 && s->bytes[5999] == 3 + s->peer);
    OK(gda_barrier(s->comm, NULL, PATIENCE));
    OK(gda_mem_dereg(cached));
    OK(gda_mem_invalidate(s->comm, host, 8192));
    free(host);
}

/* GPU memory that the other rank opens: the bytes from the second page on. */
static void exported(struct side *s, CUstream stream)
{
    char text[16] = "";
    void *of_peer;
    CUdeviceptr data;
    gda_mem_t mem;
    gda_peer_mem_t peer;
    struct gda_buf blobs = range(s, 0, 2 * GDA_EXPORT_BYTES);
    OK(cuMemAlloc(&data, 65536));
    OK(cuMemcpyHtoDAsync(data + 4096, s->rank ? "of rank 1" : "of rank 0", 10, stream));
    OK(cuStreamSynchronize(stream));
    OK(gda_mem_reg(s->comm, (void *)(data + 4096), 4096, 0, &mem));
    OK(gda_mem_export(mem, s->bytes + s->rank * GDA_EXPORT_BYTES));
    OK(gda_allgather(s->comm, &blobs, NULL, PATIENCE));
    OK(gda_mem_import(s->ctx, s->bytes + s->peer * GDA_EXPORT_BYTES, &peer, &of_peer));
    OK(cuMemcpyDtoHAsync(text, (CUdeviceptr)of_peer, 10, stream));
    OK(cuStreamSynchronize(stream));
    TRUE(strcmp(text, s->peer ? "of rank 1" : "of rank 0") == 0);
    OK(gda_peer_mem_close(peer));
    OK(gda_barrier(s->comm, NULL, PATIENCE));
    OK(gda_mem_dereg(mem));
    CHECK(gda_mem_export(mem, s->bytes), -EINVAL);
    OK(cuMemFree(data));
}

/* Ranks that make other calls: the one that waits, and the end, say which. */
static void calls_that_differ(struct side *s)
{
    gda_comm_t comm, part;
    OK(gda_comm_create(s->ctx, NULL, GDA_COLLECTIVES, PATIENCE, &comm, NULL));
    gda_mem_t mem;
    OK(gda_mem_reg(comm, s->bytes, 8, 0, &mem));
    struct gda_buf buf = {mem, 0, 8};
    CHECK(gda_broadcast(comm, &buf, s->rank, NULL, PATIENCE), -EINVAL);
    CHECK(gda_comm_destroy(comm, PATIENCE), -EINVAL);
    TRUE(strstr(gda_last_error(), "an earlier collective has failed"));
    OK(gda_mem_dereg(mem));
    OK(gda_comm_create(s->ctx, NULL, 0, PATIENCE, &comm, NULL));
    if (s->rank == 0) {
        CHECK(gda_comm_split(comm, 0, 0, 100000000, &part), -ETIMEDOUT);
        TRUE(strstr(gda_last_error(), "split: waiting for rank 1"));
    }
    OK(gda_barrier(s->comm, NULL, PATIENCE));
    TRUE(gda_comm_destroy(comm, PATIENCE) < 0);
}

struct reduction {
    gda_comm_t comm;
    struct gda_buf bufs[2];
};

/* With the first buffer, or with the second if the first is not registered any more. */
static void *reduces(void *self)
{
    struct reduction *r = self;
    int got = gda_allreduce(r->comm, &r->bufs[0], GDA_INT64, GDA_SUM, NULL, PATIENCE);
    if (got == -EINVAL)
        got = gda_allreduce(r->comm, &r->bufs[1], GDA_INT64, GDA_SUM, NULL, PATIENCE);
    return (void *)(intptr_t)got;
}

/* Memory ends while a thread waits for the other rank with it. */
static void ended_meanwhile(struct side *s)
{
    gda_mem_t mem;
    pthread_t thread;
    void *result;
    OK(gda_mem_reg(s->comm, s->bytes, 4096, 0, &mem));
    struct reduction r = {s->comm, {{mem, 0, 8}, range(s, 0, 8)}};
    memset(s->bytes, 0, 8);
    *s->bytes = 1;
    if (s->rank == 0) {
        OK(pthread_create(&thread, NULL, reduces, &r));
        usleep(20000);
        OK(gda_mem_dereg(mem));
        /* Only now the other rank takes part. */
        OK(gda_send(s->comm, 1, &r.bufs[1], 1, NULL, NULL));
        OK(pthread_join(thread, &result));
        OK((intptr_t)result);
    } else {
        gda_req_t go;
        struct gda_buf in = range(s, 64, 8);
        OK(gda_recv(s->comm, 0, &in, 1, NULL, &go));
        TRUE(status_of(go).len == 8);
        OK(gda_mem_dereg(mem));
        OK((intptr_t)reduces(&r));
    }
    TRUE(*s->bytes == 2);
}

static void *enters(void *comm)
{
    return (void *)(intptr_t)gda_barrier(comm, NULL, PATIENCE);
}

/* While one thread is in a collective, that of another one waits no longer than it is told. */
static void two_threads(struct side *s)
{
    struct gda_buf eight = range(s, 0, 8);
    if (s->rank == 0) {
        pthread_t thread;
        void *result;
        int got;
        OK(pthread_create(&thread, NULL, enters, s->comm));
        /* Refused for its type as long as the other one is not there. */
        while ((got = gda_allreduce(s->comm, &eight, 77, GDA_SUM, NULL, 0)) == -EINVAL)
            usleep(100);
        CHECK(got, -ETIMEDOUT);
        TRUE(strstr(gda_last_error(), "a collective of another thread goes on"));
        /* Only now the other rank takes part. */
        OK(gda_send(s->comm, 1, &eight, 1, NULL, NULL));
        OK(pthread_join(thread, &result));
        OK((intptr_t)result);
    } else {
        gda_req_t go;
        OK(gda_recv(s->comm, 0, &eight, 1, NULL, &go));
        TRUE(status_of(go).len == 8);
        OK((intptr_t)enters(s->comm));
    }
}

/* Of the simulated driver. */
__attribute__((weak)) void simulated_cuda_kernels(void);

struct launch {
    gda_graph_t steps;
    gda_stream_t stream;
};

/* Launches what is being launched, and then nothing. */
static int launches_again(void *self, uint64_t program)
{
    struct launch *launch = self;
    TRUE(program != 0);
    CHECK(gda_steps_launch(launch->steps, launch->stream, launches_again, self), -EBUSY);
    CHECK(gda_graph_launch(launch->steps, launch->stream), -EINVAL);
    return -ECHILD;
}

static void launch_within_launch(struct side *s)
{
    struct launch launch;
    gda_stream_t batch;
    gda_win_t win;
    CUstream raw = make_stream();
    OK(gda_stream_open(s->ctx, raw, GDA_STREAM_KERNEL, PATIENCE, &launch.stream));
    OK(gda_batch_begin(s->ctx, &batch));
    OK(gda_win_create(s->comm, s->mem, 0, 64, PATIENCE, &win));
    OK(gda_wait_signal(win, 0, 0, GDA_GEQ, batch, PATIENCE));
    OK(gda_steps_record(launch.stream, &batch, 1, &launch.steps));
    CHECK(gda_steps_launch(launch.steps, launch.stream, launches_again, &launch), -ECHILD);
    OK(gda_graph_destroy(launch.steps));
    OK(gda_stream_close(batch));
    OK(gda_stream_close(launch.stream));
    OK(gda_win_destroy(win, PATIENCE));
    OK(cuStreamDestroy(raw));
}

int main(void)
{
    if (simulated_cuda_kernels)
        simulated_cuda_kernels();
    CUstream raw = make_stream();
    struct side s = open_side(0, GDA_COLLECTIVES);
    gda_stream_t host = host_stream(s.ctx), cuda;
    OK(gda_stream_open(s.ctx, raw, 0, PATIENCE, &cuda));
    gda_stream_t all[] = {NULL, host, cuda};
    for (int i = 0; i < 3; i++) {
        one_sided(&s, all[i]);
        collectives(&s, all[i]);
        if (all[i])
            in_graphs(&s, all[i]);
    }
    from_gpus(&s, raw);
    exported(&s, raw);
    ended_meanwhile(&s);
    two_threads(&s);
    launch_within_launch(&s);
    calls_that_differ(&s);
    OK(gda_stream_close(host));
    OK(gda_stream_close(cuda));
    close_side(&s);
    return 0;
}
