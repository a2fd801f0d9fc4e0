/* What test programs of libgdsync share. */

#ifndef CHECK_H
#define CHECK_H

#include <errno.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include <gdsync.h>
#include <gdsync/mlx5.h>
#include <gdsync/tools.h>

#define REASON gdsx_last_error()
#include <checks.h>

/* Seconds that anything may take. */
enum { PATIENCE = 60 };

/* Polls until there is a completion. */
static inline struct ibv_wc poll_one(struct gds_cq *cq)
{
    struct ibv_wc wc;
    time_t end = time(NULL) + PATIENCE;
    int got;
    while ((got = gds_poll_cq(cq, 1, &wc)) == 0) {
        TRUE(time(NULL) < end);
        usleep(50);
    }
    CHECK(got, 1);
    return wc;
}

/* A device, its domain, a page of registered memory, and a stream of GPU 0. */
struct side {
    struct ibv_context *context;
    struct ibv_pd *pd;
    struct ibv_mr *mr;
    char *bytes;
    CUstream stream;
};

enum { BYTES = 8192 };

static inline struct side open_side(void)
{
    struct side s;
    int count;
    struct ibv_device **devices = ibv_get_device_list(&count);
    TRUE(devices && count > 0);
    s.context = ibv_open_device(devices[0]);
    TRUE(s.context);
    ibv_free_device_list(devices);
    s.pd = ibv_alloc_pd(s.context);
    TRUE(s.pd);
    OK(posix_memalign((void **)&s.bytes, 4096, BYTES));
    memset(s.bytes, 0, BYTES);
    s.mr = ibv_reg_mr(s.pd, s.bytes, BYTES, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ);
    TRUE(s.mr);
    s.stream = make_stream();
    return s;
}

/* Everything of the program must be gone by then. */
static inline void close_side(struct side *s)
{
    OK(cuStreamSynchronize(s->stream));
    OK(cuStreamDestroy(s->stream));
    OK(ibv_dereg_mr(s->mr));
    OK(ibv_dealloc_pd(s->pd));
    OK(ibv_close_device(s->context));
    free(s->bytes);
}

static inline gds_qp_t *make_qp(struct side *s, unsigned depth)
{
    gds_qp_init_attr_t attr;
    memset(&attr, 0, sizeof attr);
    attr.cap.max_send_wr = attr.cap.max_recv_wr = depth;
    attr.cap.max_send_sge = attr.cap.max_recv_sge = 1;
    attr.cap.max_inline_data = 64;
    attr.qp_type = IBV_QPT_RC;
    gds_qp_t *qp = gds_create_qp(s->pd, s->context, &attr, 0, GDS_CREATE_QP_DEFAULT);
    TRUE(qp && qp->qp && qp->dev_context == s->context);
    TRUE(attr.send_cq == qp->send_cq->cq && attr.recv_cq == qp->recv_cq->cq);
    return qp;
}

/* Where a queue pair is. */
struct place {
    uint32_t qpn;
    uint16_t lid;
    union ibv_gid gid;
};

static inline struct place place_of(struct side *s, gds_qp_t *qp)
{
    struct place p;
    memset(&p, 0, sizeof p); /* also what lies between its fields: it is written to a pipe */
    struct ibv_port_attr port;
    OK(ibv_query_port(s->context, 1, &port));
    p.qpn = qp->qp->qp_num;
    p.lid = port.lid;
    OK(ibv_query_gid(s->context, 1, port.link_layer == IBV_LINK_LAYER_ETHERNET ? 1 : 0, &p.gid));
    return p;
}

static inline void connect_qp(gds_qp_t *qp, struct place to)
{
    struct ibv_qp_attr a;
    memset(&a, 0, sizeof a);
    a.qp_state = IBV_QPS_INIT;
    a.port_num = 1;
    a.qp_access_flags = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ;
    OK(gds_modify_qp(qp, &a, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS));
    memset(&a, 0, sizeof a);
    a.qp_state = IBV_QPS_RTR;
    a.path_mtu = IBV_MTU_1024;
    a.dest_qp_num = to.qpn;
    a.rq_psn = 7;
    a.max_dest_rd_atomic = 1;
    a.min_rnr_timer = 12;
    a.ah_attr.dlid = to.lid;
    a.ah_attr.port_num = 1;
    a.ah_attr.is_global = to.lid == 0;
    a.ah_attr.grh.dgid = to.gid;
    a.ah_attr.grh.sgid_index = 1;
    a.ah_attr.grh.hop_limit = 1;
    OK(gds_modify_qp(qp, &a, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                                 IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER));
    memset(&a, 0, sizeof a);
    a.qp_state = IBV_QPS_RTS;
    a.sq_psn = 7;
    a.timeout = 14;
    a.retry_cnt = 7;
    a.rnr_retry = 7;
    a.max_rd_atomic = 1;
    OK(gds_modify_qp(qp, &a, IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
                                 IBV_QP_MAX_QP_RD_ATOMIC));
}

static inline int post_receive(struct side *s, gds_qp_t *qp, uint64_t id, unsigned at, unsigned len)
{
    struct ibv_sge sge = {(uintptr_t)s->bytes + at, len, s->mr->lkey};
    struct ibv_recv_wr wr = {id, NULL, &sge, 1}, *bad = NULL;
    int error = gds_post_recv(qp, &wr, &bad);
    TRUE(!error == !bad);
    return error;
}

/* A send of these bytes; `sge` must live as long. */
static inline struct ibv_send_wr send_of(struct side *s, struct ibv_sge *sge, uint64_t id, unsigned at, unsigned len)
{
    struct ibv_send_wr wr;
    memset(&wr, 0, sizeof wr);
    *sge = (struct ibv_sge){(uintptr_t)s->bytes + at, len, s->mr->lkey};
    wr.wr_id = id;
    wr.sg_list = sge;
    wr.num_sge = 1;
    wr.opcode = IBV_WR_SEND;
    wr.send_flags = IBV_SEND_SIGNALED;
    return wr;
}

#endif
