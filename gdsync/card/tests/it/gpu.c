/* Memory of a GPU in a queue pair that is connected to itself, and doorbell pages for a GPU. The driver is the first argument. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <infiniband/mlx5dv.h>
#include <infiniband/verbs.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define LEN (1 << 20)
#define CHECK(what) do { if (!(what)) { fprintf(stderr, "%s: %s\n", #what, strerror(errno)); exit(1); } } while (0)

static struct ibv_context *context;
static struct ibv_pd *pd;
static struct ibv_cq *cq;
static struct ibv_qp *qp;
static const int ALL = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ
    | IBV_ACCESS_REMOTE_ATOMIC;

static void connect_to_itself(void)
{
    struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = 1, .qp_access_flags = ALL };
    CHECK(!ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS));
    attr = (struct ibv_qp_attr){ .qp_state = IBV_QPS_RTR, .path_mtu = IBV_MTU_1024, .dest_qp_num = qp->qp_num,
        .max_dest_rd_atomic = 1, .min_rnr_timer = 12,
        .ah_attr = { .port_num = 1, .is_global = 1, .grh = { .sgid_index = 1, .hop_limit = 1 } } };
    CHECK(!ibv_query_gid(context, 1, 1, &attr.ah_attr.grh.dgid));
    CHECK(!ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN
        | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER));
    attr.qp_state = IBV_QPS_RTS;
    attr.timeout = 18, attr.retry_cnt = attr.rnr_retry = 7, attr.max_rd_atomic = 1;
    CHECK(!ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN
        | IBV_QP_MAX_QP_RD_ATOMIC));
}

static void complete(int wanted)
{
    time_t end = time(NULL) + 60;
    while (wanted > 0) {
        struct ibv_wc wc;
        int n = ibv_poll_cq(cq, 1, &wc);
        CHECK(n >= 0 && time(NULL) < end);
        if (n && wc.status) {
            fprintf(stderr, "a completion: %s\n", ibv_wc_status_str(wc.status));
            exit(1);
        }
        wanted -= n;
    }
}

/* An atomic operation on the first word of a region, whose old value it returns. */
static uint64_t atomic(enum ibv_wr_opcode opcode, struct ibv_mr *here, struct ibv_mr *there, uint64_t remote, uint64_t add, uint64_t swap)
{
    struct ibv_sge sge = { (uint64_t)here->addr, 8, here->lkey };
    struct ibv_send_wr wr = { .sg_list = &sge, .num_sge = 1, .opcode = opcode, .send_flags = IBV_SEND_SIGNALED }, *bad;
    wr.wr.atomic.remote_addr = remote, wr.wr.atomic.rkey = there->rkey;
    wr.wr.atomic.compare_add = add, wr.wr.atomic.swap = swap;
    CHECK(!ibv_post_send(qp, &wr, &bad));
    complete(1);
    return *(uint64_t *)here->addr;
}

static void request(enum ibv_wr_opcode opcode, struct ibv_mr *here, uint64_t at, struct ibv_mr *there, uint64_t remote, int len)
{
    struct ibv_sge sge = { at, len, here->lkey };
    struct ibv_send_wr wr = { .sg_list = &sge, .num_sge = 1, .opcode = opcode, .send_flags = IBV_SEND_SIGNALED }, *bad;
    if (there)
        wr.wr.rdma.remote_addr = remote, wr.wr.rdma.rkey = there->rkey;
    CHECK(!ibv_post_send(qp, &wr, &bad));
}

int main(int argc, char **argv)
{
    struct ibv_device **devices = ibv_get_device_list(NULL);
    CHECK(argc == 2 && devices && devices[0] && (context = ibv_open_device(devices[0])) && (pd = ibv_alloc_pd(context)));

    /* Without a driver, addresses without rights are nobody's, and dma-bufs are looked at. */
    void *none = mmap(NULL, 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(!ibv_reg_mr(pd, none, 4096, ALL) && errno == EFAULT);
    CHECK(!ibv_reg_dmabuf_mr(pd, 0, 0, 0, -1, 0) && errno == EBADF);

    void *cuda = dlopen(argv[1], RTLD_NOW);
    CHECK(cuda);
    int (*alloc)(uint64_t *, size_t) = dlsym(cuda, "cuMemAlloc_v2");
    int (*copy)(uint64_t, uint64_t, size_t, void *) = dlsym(cuda, "cuMemcpyAsync");
    int (*export)(int *, uint64_t, size_t, int, uint64_t) = dlsym(cuda, "cuMemGetHandleForAddressRange");
    CHECK(alloc && copy && export);
    CHECK(!ibv_reg_mr(pd, none, 4096, ALL) && errno == EFAULT);

    uint64_t gpu[2];
    CHECK(!alloc(&gpu[0], LEN) && !alloc(&gpu[1], LEN - 100));
    unsigned char *host = malloc(LEN), *back = malloc(LEN);
    for (int i = 0; i < LEN; i++)
        host[i] = i / 7 + i / 1000;
    struct ibv_mr *from = ibv_reg_mr(pd, host, LEN, ALL), *to = ibv_reg_mr(pd, back, LEN, ALL);
    /* The second one ends in the middle of a page of the GPU. */
    struct ibv_mr *by_address = ibv_reg_mr(pd, (void *)gpu[1], LEN, ALL);
    CHECK(from && to && by_address);
    CHECK(!ibv_reg_mr(pd, (void *)gpu[1], LEN + (1 << 16), ALL) && errno == EFAULT);
    int fd;
    CHECK(!export(&fd, gpu[0], LEN, 1, 0));
    CHECK(!ibv_reg_dmabuf_mr(pd, 0, LEN + 4096, gpu[0], fd, ALL) && errno == EINVAL);
    struct ibv_mr *by_dmabuf = ibv_reg_dmabuf_mr(pd, 0, LEN, 0, fd, ALL);
    CHECK(by_dmabuf && !close(fd));
    /* Another one of this size, which is not the driver's, and cannot be mapped. */
    CHECK((fd = memfd_create("other", MFD_ALLOW_SEALING)) >= 0 && !ftruncate(fd, LEN));
    CHECK(!fcntl(fd, F_ADD_SEALS, F_SEAL_WRITE));
    CHECK(!ibv_reg_dmabuf_mr(pd, 0, LEN, (uint64_t)none, fd, ALL) && errno == EOPNOTSUPP && !close(fd));

    /* Queues are read by the CPU, which needs a mapping. */
    CHECK(!mlx5dv_devx_umem_reg(context, (void *)gpu[0], 4096, IBV_ACCESS_LOCAL_WRITE) && errno == EOPNOTSUPP);

    CHECK(cq = ibv_create_cq(context, 16, NULL, NULL, 0));
    struct ibv_qp_init_attr init = { .send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC,
        .cap = { .max_send_wr = 8, .max_recv_wr = 8, .max_send_sge = 1, .max_recv_sge = 1 } };
    CHECK(qp = ibv_create_qp(pd, &init));
    connect_to_itself();

    int len = LEN - 100;
    /* Its addresses begin at 0, as the program said. */
    request(IBV_WR_RDMA_WRITE, from, (uint64_t)host, by_dmabuf, 0, len);
    complete(1);
    struct ibv_sge sge = { gpu[1], len, by_address->lkey };
    struct ibv_recv_wr receive = { .sg_list = &sge, .num_sge = 1 }, *bad;
    CHECK(!ibv_post_recv(qp, &receive, &bad));
    request(IBV_WR_SEND, by_dmabuf, 0, NULL, 0, len);
    complete(2);
    CHECK(!copy((uint64_t)back, gpu[1], len, NULL) && !memcmp(host, back, len));
    memset(back, 0, LEN);
    request(IBV_WR_RDMA_READ, to, (uint64_t)back, by_address, gpu[1], len);
    complete(1);
    CHECK(!memcmp(host, back, len));
    uint64_t first, old;
    memcpy(&first, host, 8);
    old = atomic(IBV_WR_ATOMIC_FETCH_AND_ADD, to, by_address, gpu[1], 5, 0);
    CHECK(old == first);
    old = atomic(IBV_WR_ATOMIC_CMP_AND_SWP, to, by_address, gpu[1], first, 9);
    CHECK(old == first + 5);
    old = atomic(IBV_WR_ATOMIC_CMP_AND_SWP, to, by_address, gpu[1], first + 5, 9);
    CHECK(old == first + 5);
    CHECK(!copy((uint64_t)&old, gpu[1], 8, NULL) && old == 9);
    printf("payload\n");

    /* A doorbell page is registered as registers; other memory is not. */
    int (*address)(const char *, void **, int, uint64_t, int *) = dlsym(cuda, "cuGetProcAddress_v2");
    /* The first one is of a library before the driver, if there is one. */
    int (*enter[2])(void *, size_t, unsigned) = { dlsym(RTLD_DEFAULT, "cuMemHostRegister_v2") };
    if (!enter[0])
        enter[0] = dlsym(cuda, "cuMemHostRegister_v2");
    CHECK(!address("cuGetProcAddress", (void **)&address, 12000, 0, NULL));
    CHECK(!address("cuMemHostRegister", (void **)&enter[1], 12000, 0, NULL));
    struct mlx5dv_qp dv = { 0 };
    struct mlx5dv_obj object = { .qp = { qp, &dv } };
    CHECK(!mlx5dv_init_obj(&object, MLX5DV_OBJ_QP));
    for (int i = 0; i < 2; i++) {
        CHECK(!enter[i]((void *)((uintptr_t)dv.bf.reg & -4096), 4096, 7));
        CHECK(enter[i](host, 4096, 7) == 1 && !enter[i](host, 4096, 3));
    }
    printf("doorbell\n");

    CHECK(!ibv_destroy_qp(qp) && !ibv_destroy_cq(cq));
    CHECK(!ibv_dereg_mr(by_dmabuf) && !ibv_dereg_mr(by_address) && !ibv_dereg_mr(from) && !ibv_dereg_mr(to));
    CHECK(!ibv_dealloc_pd(pd) && !ibv_close_device(context));
    printf("done\n");
    return 0;
}
