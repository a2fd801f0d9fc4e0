/* What goes wrong in a program is an error, as under a kernel, and no end of the program. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <infiniband/verbs.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define CHECK(what) do { if (!(what)) { fprintf(stderr, "%d: %s: %s\n", __LINE__, #what, strerror(errno)); exit(1); } } while (0)

static struct ibv_context *context;
static struct ibv_pd *pd;

/* A queue pair that is connected to one of this number at this address; 0 is its own number. */
static struct ibv_qp *connected(union ibv_gid to, uint32_t qpn)
{
    struct ibv_cq *cq = ibv_create_cq(context, 16, NULL, NULL, 0);
    CHECK(cq);
    struct ibv_qp_init_attr how = { .send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC,
        .cap = { .max_send_wr = 4, .max_recv_wr = 4, .max_send_sge = 1, .max_recv_sge = 1 } };
    struct ibv_qp *qp = ibv_create_qp(pd, &how);
    CHECK(qp);
    struct ibv_qp_attr init = { .qp_state = IBV_QPS_INIT, .port_num = 1 };
    struct ibv_qp_attr rtr = { .qp_state = IBV_QPS_RTR, .path_mtu = IBV_MTU_1024, .dest_qp_num = qpn ? qpn : qp->qp_num,
        .max_dest_rd_atomic = 1, .min_rnr_timer = 12,
        .ah_attr = { .is_global = 1, .port_num = 1, .grh = { .dgid = to, .sgid_index = 1, .hop_limit = 1 } } };
    struct ibv_qp_attr rts = { .qp_state = IBV_QPS_RTS, .timeout = 10, .retry_cnt = 3, .rnr_retry = 7, .max_rd_atomic = 1 };
    CHECK(ibv_modify_qp(qp, &init, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS) == 0);
    CHECK(ibv_modify_qp(qp, &rtr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
        IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER) == 0);
    CHECK(ibv_modify_qp(qp, &rts, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN |
        IBV_QP_MAX_QP_RD_ATOMIC) == 0);
    return qp;
}

static enum ibv_wc_status sends(struct ibv_qp *qp, struct ibv_mr *mr, void *from)
{
    struct ibv_sge out = { .addr = (uintptr_t)from, .length = 64, .lkey = mr->lkey };
    struct ibv_send_wr send = { .sg_list = &out, .num_sge = 1, .opcode = IBV_WR_SEND, .send_flags = IBV_SEND_SIGNALED }, *bad;
    CHECK(ibv_post_send(qp, &send, &bad) == 0);
    struct ibv_wc wc;
    while (ibv_poll_cq(qp->send_cq, 1, &wc) == 0)
        ;
    return wc.status;
}

int main(void)
{
    struct ibv_device **list = ibv_get_device_list(NULL);
    CHECK(list && list[0]);
    /* A card that does not start is tried again by the next call. */
    setenv("GDSYNC_FAULTS", "nonsense", 1);
    CHECK(!ibv_open_device(list[0]));
    unsetenv("GDSYNC_FAULTS");
    context = ibv_open_device(list[0]);
    CHECK(context);
    /* Too small for an event. */
    char small[8];
    CHECK(fcntl(context->async_fd, F_SETFL, O_NONBLOCK) == 0);
    CHECK(read(context->async_fd, small, sizeof small) == -1 && errno == EINVAL);
    pd = ibv_alloc_pd(context);
    CHECK(pd);
    union ibv_gid own, nobody;
    CHECK(ibv_query_gid(context, 1, 1, &own) == 0);
    CHECK(inet_pton(AF_INET6, "fe80::0202:c9ff:fe00:0000", &nobody) == 1);
    char *memory = mmap(NULL, 8192, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(memory != MAP_FAILED);
    struct ibv_mr *mr = ibv_reg_mr(pd, memory, 8192, IBV_ACCESS_LOCAL_WRITE);
    CHECK(mr);
    CHECK(sends(connected(nobody, 7), mr, memory) == IBV_WC_RETRY_EXC_ERR);
    CHECK(munmap(memory, 8192) == 0);
    CHECK(sends(connected(own, 0), mr, memory) == IBV_WC_LOC_PROT_ERR);
    /* A file in place of a dma-buf, which shrinks. */
    int file = memfd_create("shrinks", 0);
    CHECK(file >= 0 && ftruncate(file, 4096) == 0);
    mr = ibv_reg_dmabuf_mr(pd, 0, 4096, 0x10000, file, IBV_ACCESS_LOCAL_WRITE);
    CHECK(mr && ftruncate(file, 0) == 0);
    CHECK(sends(connected(own, 0), mr, (void *)0x10000) == IBV_WC_LOC_PROT_ERR);
    puts("errors");
    return 0;
}
