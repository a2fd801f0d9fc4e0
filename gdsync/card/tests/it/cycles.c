/* Opens a device, makes one object of each kind, sends a message, ends all, and says what is left after many rounds. */
#include <dirent.h>
#include <errno.h>
#include <infiniband/verbs.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static char page[8192] __attribute__((aligned(4096)));

#define CHECK(what) do { if (!(what)) { fprintf(stderr, "%s: %s\n", #what, strerror(errno)); exit(1); } } while (0)

static union ibv_gid own_gid(struct ibv_context *context)
{
    union ibv_gid gid;
    CHECK(ibv_query_gid(context, 1, 1, &gid) == 0);
    return gid;
}

static void send_to_itself(struct ibv_qp *qp, struct ibv_cq *cq, struct ibv_mr *mr)
{
    struct ibv_qp_attr init = { .qp_state = IBV_QPS_INIT, .port_num = 1 };
    struct ibv_qp_attr rtr = { .qp_state = IBV_QPS_RTR, .path_mtu = IBV_MTU_1024, .dest_qp_num = qp->qp_num,
        .max_dest_rd_atomic = 1, .min_rnr_timer = 12,
        .ah_attr = { .is_global = 1, .port_num = 1, .grh = { .dgid = own_gid(qp->context), .sgid_index = 1, .hop_limit = 1 } } };
    struct ibv_qp_attr rts = { .qp_state = IBV_QPS_RTS, .timeout = 14, .retry_cnt = 7, .rnr_retry = 7, .max_rd_atomic = 1 };
    CHECK(ibv_modify_qp(qp, &init, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS) == 0);
    CHECK(ibv_modify_qp(qp, &rtr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
        IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER) == 0);
    CHECK(ibv_modify_qp(qp, &rts, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN |
        IBV_QP_MAX_QP_RD_ATOMIC) == 0);
    struct ibv_sge in = { .addr = (uintptr_t)page, .length = 64, .lkey = mr->lkey }, out = in;
    out.addr += 4096;
    struct ibv_recv_wr recv = { .sg_list = &in, .num_sge = 1 }, *bad_recv;
    struct ibv_send_wr send = { .sg_list = &out, .num_sge = 1, .opcode = IBV_WR_SEND, .send_flags = IBV_SEND_SIGNALED }, *bad;
    for (int n = 0; n < 10; n++) {
        CHECK(ibv_post_recv(qp, &recv, &bad_recv) == 0);
        CHECK(ibv_post_send(qp, &send, &bad) == 0);
        struct ibv_wc wc;
        for (int done = 0; done < 2;) {
            int count = ibv_poll_cq(cq, 1, &wc);
            CHECK(count >= 0 && (!count || wc.status == IBV_WC_SUCCESS));
            done += count;
        }
    }
}

static void cycle(struct ibv_device *device)
{
    struct ibv_context *context = ibv_open_device(device);
    CHECK(context);
    struct ibv_pd *pd = ibv_alloc_pd(context);
    CHECK(pd);
    struct ibv_mr *mr = ibv_reg_mr(pd, page, sizeof page, IBV_ACCESS_LOCAL_WRITE);
    CHECK(mr);
    struct ibv_comp_channel *channel = ibv_create_comp_channel(context);
    CHECK(channel);
    struct ibv_cq *cq = ibv_create_cq(context, 16, NULL, channel, 0);
    CHECK(cq);
    struct ibv_qp_init_attr init = { .send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC,
        .cap = { .max_send_wr = 4, .max_recv_wr = 4, .max_send_sge = 1, .max_recv_sge = 1 } };
    struct ibv_qp *qp = ibv_create_qp(pd, &init);
    CHECK(qp);
    send_to_itself(qp, cq, mr);
    struct ibv_srq_init_attr srq_init = { .attr = { .max_wr = 4, .max_sge = 1 } };
    struct ibv_srq *srq = ibv_create_srq(pd, &srq_init);
    CHECK(srq);
    init.qp_type = IBV_QPT_UD;
    init.srq = srq;
    struct ibv_qp *ud = ibv_create_qp(pd, &init);
    CHECK(ud);
    struct ibv_ah_attr route = { .is_global = 1, .port_num = 1, .grh = { .dgid = own_gid(context), .sgid_index = 1, .hop_limit = 1 } };
    struct ibv_ah *ah = ibv_create_ah(pd, &route);
    CHECK(ah);
    CHECK(ibv_destroy_ah(ah) == 0);
    CHECK(ibv_destroy_srq(srq) == EBUSY);
    CHECK(ibv_destroy_qp(ud) == 0);
    CHECK(ibv_destroy_srq(srq) == 0);
    /* What is used cannot go. */
    CHECK(ibv_dealloc_pd(pd) == EBUSY);
    CHECK(ibv_destroy_qp(qp) == 0);
    CHECK(ibv_destroy_cq(cq) == 0);
    CHECK(ibv_destroy_comp_channel(channel) == 0);
    CHECK(ibv_dereg_mr(mr) == 0);
    CHECK(ibv_dealloc_pd(pd) == 0);
    CHECK(ibv_close_device(context) == 0);
}

static int descriptors(void)
{
    int count = 0;
    DIR *dir = opendir("/proc/self/fd");
    while (readdir(dir))
        count++;
    closedir(dir);
    return count;
}

static long resident(void)
{
    long pages[2] = { 0, 0 };
    FILE *file = fopen("/proc/self/statm", "r");
    CHECK(file && fscanf(file, "%ld %ld", pages, pages + 1) == 2);
    fclose(file);
    return pages[1];
}

int main(int argc, char **argv)
{
    int rounds = argc > 1 ? atoi(argv[1]) : 1000;
    struct ibv_device **list = ibv_get_device_list(NULL);
    CHECK(list && list[0]);
    /* Until the whole packet ring of the HCA was used once, and freed numbers have rested. */
    for (int n = 0; n < 400; n++)
        cycle(list[0]);
    int fds = descriptors();
    long pages = resident();
    for (int n = 0; n < rounds; n++)
        cycle(list[0]);
    printf("descriptors %d pages %ld\n", descriptors() - fds, resident() - pages);
    /* A child has none of it, and can start anew. */
    struct ibv_context *context = ibv_open_device(list[0]);
    CHECK(context);
    fflush(stdout);
    if (fork() == 0) {
        errno = 0;
        CHECK(!ibv_alloc_pd(context) && errno == EIO);
        cycle(list[0]);
        printf("child\n");
        fflush(stdout);
        _exit(0);
    }
    /* A child of vfork shares the memory, and closes descriptors of its own. */
    if (vfork() == 0) {
        close(context->cmd_fd);
        _exit(0);
    }
    CHECK(ibv_alloc_pd(context));
    return 0;
}
