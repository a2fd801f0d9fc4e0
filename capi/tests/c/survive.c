/* Four ranks: parts of a communicator, a rank that dies, and a smaller communicator afterwards. */

#include "check.h"

static void ring(gda_comm_t comm)
{
    static int values[2];
    gda_mem_t mem;
    gda_req_t received;
    int me = gda_comm_rank(comm), size = gda_comm_size(comm);
    OK(gda_mem_reg(comm, values, sizeof values, 0, &mem));
    struct gda_buf out = {mem, 0, 4}, in = {mem, 4, 4};
    values[0] = me;
    OK(gda_recv(comm, (me + size - 1) % size, &in, 1, NULL, &received));
    OK(gda_send(comm, (me + 1) % size, &out, 1, NULL, NULL));
    OK(gda_req_wait(received, PATIENCE, NULL));
    TRUE(values[1] == (me + size - 1) % size);
    OK(gda_mem_dereg(mem));
}

int main(void)
{
    struct side s = open_side(-1, GDA_TAGGED);
    gda_comm_t part, survivors;
    gda_req_t never, also;
    int former[4], lost[4];
    CHECK(s.size, 4);
    /* Odd and even ones, the last first; rank 2 takes no part. */
    OK(gda_comm_split(s.comm, s.rank == 2 ? -1 : s.rank % 2, -s.rank, PATIENCE, &part));
    if (s.rank == 2) {
        TRUE(!part);
    } else {
        CHECK(gda_comm_size(part), s.rank % 2 ? 2 : 1);
        CHECK(gda_comm_rank(part), s.rank == 1);
        ring(part);
        OK(gda_comm_destroy(part, PATIENCE));
    }
    struct gda_buf in = range(&s, 0, 64), more = range(&s, 64, 64);
    ring(s.comm);
    if (s.rank == 2) {
        /* When the others have all that it sent. */
        for (int i = 0; i < 3; i++) {
            gda_req_t ready;
            OK(gda_trecv(s.comm, GDA_ANY_RANK, 1, UINT64_MAX, &more, &ready));
            OK(gda_req_wait(ready, PATIENCE, NULL));
        }
        _exit(0);
    }
    struct gda_buf none = range(&s, 128, 0);
    OK(gda_recv(s.comm, 2, &in, 1, NULL, &never));
    gda_stream_t stream = host_stream(s.ctx);
    CHECK(gda_stream_status(stream, NULL), GDA_OK);
    OK(gda_req_on_stream(never, stream));
    CHECK(gda_stream_status(stream, NULL), GDA_IN_PROGRESS);
    OK(gda_trecv(s.comm, 2, 0, 0, &more, &also));
    OK(gda_tsend(s.comm, 2, 1, &none, NULL));
    CHECK(gda_req_wait(never, PATIENCE, NULL), -ECONNRESET);
    TRUE(strstr(gda_last_error(), "rank 2"));
    CHECK(gda_req_wait(also, PATIENCE, NULL), -ECONNRESET);
    int lost_rank, now;
    while ((now = gda_stream_status(stream, &lost_rank)) == GDA_IN_PROGRESS)
        usleep(100);
    CHECK(now, -ECONNRESET);
    CHECK(lost_rank, 2);
    OK(gda_stream_close(stream));
    CHECK(gda_comm_lost(s.comm, lost, 4), 1);
    CHECK(lost[0], 2);
    OK(gda_comm_shrink(s.comm, PATIENCE, &survivors, former));
    CHECK(gda_comm_size(survivors), 3);
    TRUE(former[0] == 0 && former[1] == 1 && former[2] == 3);
    ring(survivors);
    OK(gda_mem_dereg(s.mem));
    /* The other ranks have left it. */
    TRUE(gda_comm_destroy(s.comm, 1000000) < 0);
    /* An abort ends it everywhere; by one rank, when the others have all that was sent to them. */
    OK(gda_mem_reg(survivors, s.bytes, BYTES, 0, &s.mem));
    in = range(&s, 0, 64);
    none = range(&s, 128, 0);
    if (gda_comm_rank(survivors) == 0) {
        for (int i = 0; i < 2; i++) {
            gda_req_t ready;
            OK(gda_trecv(survivors, GDA_ANY_RANK, 1, UINT64_MAX, &in, &ready));
            OK(gda_req_wait(ready, PATIENCE, NULL));
        }
        OK(gda_comm_abort(survivors, -1));
        CHECK(gda_comm_lost(survivors, NULL, 0), 3);
    } else {
        OK(gda_recv(survivors, 0, &in, 1, NULL, &never));
        OK(gda_tsend(survivors, 0, 1, &none, NULL));
        CHECK(gda_req_wait(never, PATIENCE, NULL), -ECONNRESET);
    }
    TRUE(gda_comm_destroy(survivors, 1000000) < 0);
    OK(gda_close(s.ctx));
    free(s.bytes);
    return 0;
}
