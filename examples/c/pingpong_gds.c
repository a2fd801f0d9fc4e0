/* Ping-pong between two processes of a host on CUDA streams, with libgdsync on a card of libibverbs: sends and waits are queued eight
 * rounds ahead, and the streams run them in order.
 *
 * cc pingpong_gds.c -o pingpong_gds -I/usr/local/cuda/include $(pkg-config --cflags --libs gdsync) -lcuda -libverbs
 * Start one: it forks before it opens anything, and the two exchange their addresses by pipes. Without a card: `gdasync card`.
 */

#include <gdsync.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

enum { ROUNDS = 1000, AHEAD = 8, BYTES = 64 };

#define TRY(call)                                                                                                      \
    do {                                                                                                               \
        if (call) { /* libgdsync has printed why */                                                                    \
            fprintf(stderr, "%s failed\n", #call);                                                                     \
            exit(1);                                                                                                   \
        }                                                                                                              \
    } while (0)

struct address {
    union ibv_gid gid;
    uint32_t qpn;
    uint16_t lid, index;
};

static struct address address_of(struct ibv_context *context, uint32_t qpn)
{
    struct ibv_port_attr port;
    struct address own;
    TRY(ibv_query_port(context, 1, &port));
    memset(&own, 0, sizeof own);
    own.qpn = qpn;
    own.lid = port.lid;
    own.index = port.link_layer == IBV_LINK_LAYER_ETHERNET ? 1 : 0; /* with RoCE mostly the one of version 2 */
    TRY(ibv_query_gid(context, 1, own.index, &own.gid));
    return own;
}

static void connect_to(struct gds_qp *qp, struct address own, struct address peer)
{
    struct ibv_qp_attr init = {.qp_state = IBV_QPS_INIT, .port_num = 1};
    struct ibv_qp_attr rtr = {.qp_state = IBV_QPS_RTR, .path_mtu = IBV_MTU_1024, .dest_qp_num = peer.qpn,
                              .max_dest_rd_atomic = 1, .min_rnr_timer = 12};
    struct ibv_qp_attr rts = {.qp_state = IBV_QPS_RTS, .timeout = 14, .retry_cnt = 7, .rnr_retry = 7, .max_rd_atomic = 1};
    rtr.ah_attr = (struct ibv_ah_attr){.dlid = peer.lid, .port_num = 1, .is_global = peer.lid == 0};
    rtr.ah_attr.grh = (struct ibv_global_route){.dgid = peer.gid, .sgid_index = (uint8_t)own.index, .hop_limit = 1};
    TRY(gds_modify_qp(qp, &init, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS));
    TRY(gds_modify_qp(qp, &rtr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                                    IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER));
    TRY(gds_modify_qp(qp, &rts, IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
                                    IBV_QP_MAX_QP_RD_ATOMIC));
}

/* Completions are counted by polling, also those that a stream has waited for. */
static void poll(struct gds_cq *cq, int count)
{
    struct ibv_wc wc;
    for (int got; count > 0; count -= got) {
        got = gds_poll_cq(cq, 1, &wc);
        TRY(got < 0 || (got > 0 && wc.status != IBV_WC_SUCCESS));
    }
}

static void run(int rank, int from, int to)
{
    static char bytes[2][AHEAD][BYTES]; /* sent, received; memory of cuMemAlloc is registered in the same way where the card can */
    CUdevice gpu;
    CUcontext primary;
    CUstream stream;
    TRY(cuInit(0));
    TRY(cuDeviceGet(&gpu, 0));
    TRY(cuDevicePrimaryCtxRetain(&primary, gpu));
    TRY(cuCtxPushCurrent(primary));
    TRY(cuStreamCreateWithPriority(&stream, CU_STREAM_NON_BLOCKING, 0));

    struct ibv_device **devices = ibv_get_device_list(NULL);
    TRY(!devices || !devices[0]);
    struct ibv_context *context = ibv_open_device(devices[0]);
    TRY(!context);
    struct ibv_pd *pd = ibv_alloc_pd(context);
    struct ibv_mr *mr = pd ? ibv_reg_mr(pd, bytes, sizeof bytes, IBV_ACCESS_LOCAL_WRITE) : NULL;
    TRY(!mr);
    gds_qp_init_attr_t attr = {.qp_type = IBV_QPT_RC};
    attr.cap = (struct ibv_qp_cap){.max_send_wr = 2 * AHEAD, .max_recv_wr = 2 * AHEAD, .max_send_sge = 1, .max_recv_sge = 1};
    struct gds_qp *qp = gds_create_qp(pd, context, &attr, 0, GDS_CREATE_QP_DEFAULT);
    TRY(!qp);
    struct address own = address_of(context, qp->qp->qp_num), peer;
    TRY(write(to, &own, sizeof own) != sizeof own || read(from, &peer, sizeof peer) != sizeof peer);
    connect_to(qp, own, peer);

    for (int first = 0; first < ROUNDS; first += AHEAD) {
        char ready = 'r';
        for (int i = 0; i < AHEAD; i++) {
            struct ibv_sge sge = {(uintptr_t)bytes[1][i], BYTES, mr->lkey};
            struct ibv_recv_wr wr = {.sg_list = &sge, .num_sge = 1}, *bad;
            TRY(gds_post_recv(qp, &wr, &bad));
        }
        /* Both have their receives. */
        TRY(write(to, &ready, 1) != 1 || read(from, &ready, 1) != 1);
        for (int i = 0; i < AHEAD; i++) {
            struct ibv_sge sge = {(uintptr_t)bytes[0][i], BYTES, mr->lkey};
            gds_send_wr wr = {.sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND, .send_flags = IBV_SEND_SIGNALED}, *bad;
            memset(bytes[0][i], first + i + rank, BYTES);
            if (rank == 0)
                TRY(gds_stream_queue_send(stream, qp, &wr, &bad));
            TRY(gds_stream_wait_cq(stream, qp->recv_cq, 0));
            if (rank == 1) /* when the stream has the message */
                TRY(gds_stream_queue_send(stream, qp, &wr, &bad));
            TRY(gds_stream_wait_cq(stream, qp->send_cq, 0));
        }
        TRY(cuStreamSynchronize(stream));
        poll(qp->recv_cq, AHEAD);
        poll(qp->send_cq, AHEAD);
        for (int i = 0; i < AHEAD * BYTES; i++)
            TRY(bytes[1][i / BYTES][i % BYTES] != (char)(first + i / BYTES + 1 - rank));
    }
    char over = 'o'; /* the peer may still be sending */
    TRY(write(to, &over, 1) != 1 || read(from, &over, 1) != 1);
    TRY(gds_destroy_qp(qp));
    TRY(ibv_dereg_mr(mr) || ibv_dealloc_pd(pd) || ibv_close_device(context));
    TRY(cuStreamDestroy(stream));
    ibv_free_device_list(devices);
}

int main(void)
{
    int there[2], back[2], status;
    TRY(pipe(there) || pipe(back));
    pid_t child = fork();
    TRY(child < 0);
    if (child == 0) {
        run(1, there[0], back[1]);
        return 0;
    }
    run(0, back[0], there[1]);
    TRY(waitpid(child, &status, 0) != child || status);
    printf("%d rounds of %d bytes, %d queued ahead: all right\n", ROUNDS, BYTES, AHEAD);
    return 0;
}
