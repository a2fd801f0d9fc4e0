/*
 * Ping-pong of two processes in host memory: sends and waits of both are in stream order, queued ahead of time.
 * Arguments: none; it forks before it opens anything, and exchanges places by pipes.
 */

#include <sys/wait.h>

#include "check.h"

enum { ROUNDS = 100, AHEAD = 8, LEN = 64 };

static void run(int rank, int from, int to)
{
    struct side s = open_side();
    gds_qp_t *qp = make_qp(&s, 32);
    struct place own = place_of(&s, qp), peer;
    CHECK(write(to, &own, sizeof own), sizeof own);
    CHECK(read(from, &peer, sizeof peer), sizeof peer);
    connect_qp(qp, peer);

    unsigned *words = (unsigned *)s.bytes;
    unsigned posted = 0, sent = 0, received = 0;
    for (; posted < AHEAD; posted++)
        OK(post_receive(&s, qp, posted, LEN * (posted % AHEAD), LEN));
    /* Both have their receives. */
    CHECK(write(to, "r", 1), 1);
    char ready;
    CHECK(read(from, &ready, 1), 1);
    for (unsigned round = 0; round < ROUNDS; round++) {
        /* Ranks take turns: rank 0 sends first. Receives lie in the first half, sends in the second. */
        struct ibv_sge sge;
        unsigned at = BYTES / 2 + LEN * (round % AHEAD);
        words[at / 4] = 1000 * rank + round;
        struct ibv_send_wr wr = send_of(&s, &sge, round, at, LEN), *bad = NULL;
        if (rank == 0)
            OK(gds_stream_queue_send(s.stream, qp, &wr, &bad));
        OK(gds_stream_wait_cq(s.stream, qp->recv_cq, 0));
        if (rank == 1)
            OK(gds_stream_queue_send(s.stream, qp, &wr, &bad));
        OK(gds_stream_wait_cq(s.stream, qp->send_cq, 0));
        if (round % AHEAD == AHEAD - 1 || round == ROUNDS - 1) {
            OK(cuStreamSynchronize(s.stream));
            while (received <= round) {
                struct ibv_wc wc = poll_one(qp->recv_cq);
                CHECK(wc.status, IBV_WC_SUCCESS);
                CHECK(wc.opcode, IBV_WC_RECV);
                CHECK(wc.wr_id, received);
                CHECK(wc.byte_len, LEN);
                CHECK(wc.qp_num, qp->qp->qp_num);
                CHECK(words[LEN * (received % AHEAD) / 4], 1000 * (1 - rank) + received);
                received++;
            }
            while (sent <= round) {
                struct ibv_wc wc = poll_one(qp->send_cq);
                CHECK(wc.status, IBV_WC_SUCCESS);
                CHECK(wc.opcode, IBV_WC_SEND);
                CHECK(wc.wr_id, sent++);
            }
            for (unsigned i = 0; i < AHEAD && round < ROUNDS - 1; i++, posted++)
                OK(post_receive(&s, qp, posted, LEN * (posted % AHEAD), LEN));
            CHECK(write(to, "r", 1), 1);
            CHECK(read(from, &ready, 1), 1);
        }
    }
    CHECK(qp->send_cq->curr_offset, ROUNDS);
    /* The peer may still be sending. */
    OK(gds_destroy_qp(qp));
    close_side(&s);
}

int main(void)
{
    int ab[2], ba[2], status;
    OK(pipe(ab));
    OK(pipe(ba));
    pid_t child = fork();
    TRUE(child >= 0);
    if (child == 0) {
        run(1, ab[0], ba[1]);
        return 0;
    }
    run(0, ba[0], ab[1]);
    CHECK(waitpid(child, &status, 0), child);
    OK(status);
    return 0;
}
