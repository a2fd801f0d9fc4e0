/* Two processes without a launcher: over an exchange of their own, and in pairs that meet when they like. */

#include "check.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/socket.h>
#include <sys/wait.h>

static int rank, line, released, fails;

static void all_of(void *bytes, size_t len, int is_write)
{
    for (size_t done = 0; done < len;) {
        ssize_t n = is_write ? write(line, (char *)bytes + done, len - done) : read(line, (char *)bytes + done, len - done);
        TRUE(n > 0);
        done += (size_t)n;
    }
}

static int allgather(void *self, const void *mine, size_t len, void *all, int64_t timeout_ns)
{
    TRUE(self == &released && timeout_ns > 0);
    if (fails)
        return -EPIPE;
    memcpy((char *)all + rank * len, mine, len);
    all_of((char *)all + rank * len, len, 1);
    all_of((char *)all + !rank * len, len, 0);
    return 0;
}

static void release(void *self)
{
    TRUE(self == &released);
    released++;
}

static void message(gda_comm_t comm)
{
    static char bytes[256];
    gda_mem_t mem;
    gda_req_t received, sent;
    int me = gda_comm_rank(comm);
    CHECK(gda_comm_size(comm), 2);
    OK(gda_mem_reg(comm, bytes, sizeof bytes, 0, &mem));
    struct gda_buf out = {mem, 0, 16}, in = {mem, 128, 16};
    memset(bytes, 7 + me, 16);
    OK(gda_recv(comm, !me, &in, 1, NULL, &received));
    OK(gda_send(comm, !me, &out, 1, NULL, &sent));
    TRUE(status_of(received).len == 16 && bytes[128] == 7 + !me && bytes[143] == 7 + !me);
    OK(gda_req_wait(sent, PATIENCE, NULL));
    OK(gda_mem_dereg(mem));
}

static void over_an_exchange(gda_ctx_t ctx)
{
    struct gda_exchange exchange = {sizeof exchange, rank, 2, 0, &released, allgather, release};
    gda_comm_t comm, other = NULL;
    OK(gda_comm_create(ctx, &exchange, GDA_TAGGED, PATIENCE, &comm, NULL));
    message(comm);
    TRUE(released == 0);
    OK(gda_comm_destroy(comm, PATIENCE));
    TRUE(released == 1);
    /* On a thread of the library. */
    gda_req_t req;
    OK(gda_comm_create(ctx, &exchange, 0, PATIENCE, &comm, &req));
    OK(gda_req_wait(req, PATIENCE, NULL));
    message(comm);
    OK(gda_comm_destroy(comm, PATIENCE));
    TRUE(released == 2);
    fails = 1;
    CHECK(gda_comm_create(ctx, &exchange, 0, PATIENCE, &other, NULL), -EPIPE);
    TRUE(released == 3 && !other && strstr(gda_last_error(), "gda_comm_create"));
    OK(gda_comm_create(ctx, &exchange, 0, PATIENCE, &other, &req));
    CHECK(gda_req_wait(req, PATIENCE, NULL), -EPIPE);
    TRUE(released == 4 && !other);
    fails = 0;
}

/* Both connect and accept at once, as runtimes do that connect with the first message. */
static void in_pairs(gda_ctx_t ctx)
{
    unsigned char mine[GDA_ADDRESS_MAX + 1] = {0}, theirs[GDA_ADDRESS_MAX + 1];
    size_t len = GDA_ADDRESS_MAX, small = 3;
    gda_listen_t listener;
    gda_comm_t accepted = NULL, connected = NULL, late = NULL;
    gda_req_t reqs[2], req;
    int which;
    CHECK(gda_listen(ctx, mine, &small, &listener), -EINVAL);
    OK(gda_listen(ctx, mine, &len, &listener));
    mine[GDA_ADDRESS_MAX] = (unsigned char)len;
    all_of(mine, sizeof mine, 1);
    all_of(theirs, sizeof theirs, 0);
    OK(gda_accept(listener, 0, PATIENCE, &accepted, &reqs[0]));
    OK(gda_connect(ctx, theirs, theirs[GDA_ADDRESS_MAX], 0, PATIENCE, &connected, &reqs[1]));
    for (int i = 0; i < 2; i++)
        OK(gda_req_wait_any(reqs, 2, PATIENCE, &which, NULL));
    CHECK(gda_comm_rank(accepted), 0);
    CHECK(gda_comm_rank(connected), 1);
    message(rank ? accepted : connected);
    message(rank ? connected : accepted);
    /* One more, with one that waits on this thread. */
    if (rank)
        OK(gda_connect(ctx, theirs, theirs[GDA_ADDRESS_MAX], GDA_TAGGED, PATIENCE, &late, NULL));
    else
        OK(gda_accept(listener, GDA_TAGGED, PATIENCE, &late, NULL));
    message(late);
    OK(gda_comm_destroy(late, PATIENCE));
    /* In the same order at both. */
    OK(gda_comm_destroy(rank ? accepted : connected, PATIENCE));
    OK(gda_comm_destroy(rank ? connected : accepted, PATIENCE));
    /* Nobody comes, and nobody asks. */
    OK(gda_accept(listener, 0, 1000000, &late, &req));
    CHECK(gda_req_wait(req, PATIENCE, NULL), -ETIMEDOUT);
    OK(gda_accept(listener, 0, 1000000, &late, &req));
    OK(gda_req_free(req));
    CHECK(gda_connect(ctx, "nonsense", 8, 0, PATIENCE, &late, NULL), -EINVAL);
    OK(gda_listen_close(listener));
}

static void *accepts(void *listener)
{
    gda_comm_t comm;
    return (void *)(intptr_t)gda_accept(listener, 0, -1, &comm, NULL);
}

static void *meets(void *comm)
{
    return (void *)(intptr_t)gda_barrier(comm, NULL, -1);
}

static int result_of(pthread_t thread)
{
    void *result;
    OK(pthread_join(thread, &result));
    return (int)(intptr_t)result;
}

/* What another thread closes, or ends the connections of, waits no longer, also without a deadline. */
static void closed(gda_ctx_t ctx)
{
    char address[GDA_ADDRESS_MAX];
    size_t len = sizeof address;
    gda_listen_t listener;
    gda_comm_t comm;
    gda_req_t req;
    pthread_t thread;
    OK(gda_listen(ctx, address, &len, &listener));
    OK(gda_accept(listener, 0, -1, &comm, &req));
    OK(pthread_create(&thread, NULL, accepts, listener));
    usleep(20000);
    OK(gda_listen_close(listener));
    CHECK(result_of(thread), -ECANCELED);
    CHECK(gda_req_wait(req, PATIENCE, NULL), -ECANCELED);

    struct gda_exchange exchange = {sizeof exchange, rank, 2, 0, &released, allgather, release};
    OK(gda_comm_create(ctx, &exchange, GDA_COLLECTIVES, PATIENCE, &comm, NULL));
    if (rank) {
        OK(gda_comm_destroy(comm, PATIENCE));
    } else {
        OK(pthread_create(&thread, NULL, meets, comm));
        usleep(20000);
        CHECK(gda_comm_destroy(comm, PATIENCE), -ECANCELED);
        CHECK(result_of(thread), -ECANCELED);
    }
    OK(gda_comm_create(ctx, &exchange, GDA_COLLECTIVES, PATIENCE, &comm, NULL));
    if (!rank) {
        OK(pthread_create(&thread, NULL, meets, comm));
        usleep(20000);
        OK(gda_comm_abort(comm, -1));
        CHECK(result_of(thread), -ECONNRESET);
    }
    TRUE(gda_comm_destroy(comm, PATIENCE) <= 0);
}

int main(void)
{
    int ends[2], status;
    OK(socketpair(AF_UNIX, SOCK_STREAM, 0, ends));
    pid_t child = fork();
    TRUE(child >= 0);
    rank = child == 0;
    line = ends[rank];
    close(ends[!rank]);
    gda_ctx_t ctx = open_ctx(-1);
    over_an_exchange(ctx);
    in_pairs(ctx);
    closed(ctx);
    OK(gda_close(ctx));
    if (rank)
        return 0;
    CHECK(waitpid(child, &status, 0), child);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 1;
}
