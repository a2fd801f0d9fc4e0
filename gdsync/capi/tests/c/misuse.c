/* What a program must not do: each call returns its error number, with a reason, and the program goes on. */

#include <pthread.h>
#include <sys/wait.h>

#include "check.h"

static struct side s;

/* A call fails with this number, and says so. */
#define REFUSED(call, errno_)                                                                                          \
    do {                                                                                                               \
        CHECK(call, errno_);                                                                                           \
        TRUE(strlen(gdsx_last_error()) > 10);                                                                          \
    } while (0)

static void null_pointers(gds_qp_t *qp)
{
    struct ibv_send_wr *bad_send = NULL;
    struct ibv_recv_wr *bad_recv = NULL;
    gds_send_request_t send;
    gds_wait_request_t wait;
    gds_wait_value32_t wait32;
    gds_write_value32_t write32;
    gds_write_memory_t memory;
    gds_mlx5_send_info_t out;
    gds_mlx5_wait_info_t in;
    struct ibv_sge sge;
    struct ibv_send_wr wr = send_of(&s, &sge, 1, 0, 4);
    uint32_t word = 0;
    uint8_t *byte = (uint8_t *)&word;
    memset(&send, 0, sizeof send);
    memset(&wait, 0, sizeof wait);
    REFUSED(gds_query_param(GDS_PARAM_VERSION, NULL), EINVAL);
    OK(gds_destroy_qp(NULL));
    REFUSED(gds_modify_qp(NULL, NULL, 0), EINVAL);
    REFUSED(gds_modify_qp(qp, NULL, 0), EINVAL);
    REFUSED(gds_post_send(NULL, &wr, &bad_send), EINVAL);
    REFUSED(gds_post_send(qp, NULL, &bad_send), EINVAL);
    REFUSED(gds_post_recv(qp, NULL, &bad_recv), EINVAL);
    REFUSED(gds_poll_cq(NULL, 1, NULL), -EINVAL);
    REFUSED(gds_poll_cq(qp->recv_cq, 1, NULL), -EINVAL);
    REFUSED(gds_poll_cq(qp->recv_cq, -1, NULL), -EINVAL);
    OK(gds_poll_cq(qp->recv_cq, 0, NULL));
    REFUSED(gds_stream_wait_cq(s.stream, NULL, 0), EINVAL);
    REFUSED(gds_stream_wait_cq(s.stream, qp->recv_cq, 1), EINVAL);
    REFUSED(gds_stream_queue_send(s.stream, NULL, &wr, &bad_send), EINVAL);
    REFUSED(gds_prepare_send(qp, &wr, &bad_send, NULL), EINVAL);
    REFUSED(gds_prepare_send(qp, NULL, &bad_send, &send), EINVAL);
    REFUSED(gds_stream_post_send(s.stream, NULL), EINVAL);
    REFUSED(gds_stream_post_send(s.stream, &send), EINVAL);
    REFUSED(gds_stream_post_send_all(s.stream, -1, &send), EINVAL);
    OK(gds_stream_post_send_all(s.stream, 0, NULL));
    REFUSED(gds_prepare_wait_cq(qp->recv_cq, NULL, 0), EINVAL);
    REFUSED(gds_prepare_wait_cq(qp->recv_cq, &wait, 0), EINVAL);
    REFUSED(gds_prepare_wait_cq(qp->recv_cq, &wait, 1), EINVAL);
    REFUSED(gds_stream_post_wait_cq(s.stream, &wait), EINVAL);
    REFUSED(gds_stream_post_wait_cq_all(s.stream, 2, NULL), EINVAL);
    REFUSED(gds_post_wait_cq(qp->recv_cq, &wait, 0), EINVAL);
    REFUSED(gds_prepare_wait_value32(NULL, &word, 0, GDS_WAIT_COND_EQ, GDS_MEMORY_HOST), EINVAL);
    REFUSED(gds_prepare_wait_value32(&wait32, NULL, 0, GDS_WAIT_COND_EQ, GDS_MEMORY_HOST), EINVAL);
    REFUSED(gds_prepare_wait_value32(&wait32, &word, 0, (gds_wait_cond_flag_t)4, GDS_MEMORY_HOST), EINVAL);
    REFUSED(gds_prepare_wait_value32(&wait32, &word, 0, GDS_WAIT_COND_EQ, 0), EINVAL);
    REFUSED(gds_prepare_wait_value32(&wait32, &word, 0, GDS_WAIT_COND_EQ, GDS_MEMORY_HOST | GDS_MEMORY_GPU), EINVAL);
    REFUSED(gds_prepare_wait_value32(&wait32, &word, 0, GDS_WAIT_COND_EQ, GDS_MEMORY_HOST | 16), EINVAL);
    REFUSED(gds_prepare_write_value32(NULL, &word, 0, GDS_MEMORY_HOST), EINVAL);
    REFUSED(gds_prepare_write_value32(&write32, &word, 0, GDS_MEMORY_HOST | GDS_WAIT_POST_FLUSH), EINVAL);
    REFUSED(gds_prepare_write_memory(&memory, byte, NULL, 4, GDS_MEMORY_HOST), EINVAL);
    REFUSED(gds_mlx5_get_send_info(1, &send, &out), EINVAL);
    REFUSED(gds_mlx5_get_wait_info(1, &wait, NULL), EINVAL);
    REFUSED(gds_mlx5_get_wait_info(1, &wait, &in), EINVAL);
    REFUSED(gds_mlx5_get_dword_wait_info(NULL, 0, GDS_MEMORY_HOST, NULL), EINVAL);
    REFUSED(gds_alloc_mapped_memory(NULL, 8, GDS_MEMORY_HOST), EINVAL);
    REFUSED(gds_free_mapped_memory(NULL), EINVAL);
}

static void wrong_lists(gds_qp_t *qp)
{
    uint32_t words[4] = {0};
    gds_descriptor_t list[2];
    struct ibv_sge sge;
    struct ibv_send_wr wr = send_of(&s, &sge, 1, 0, 4), *bad = NULL;
    struct ibv_recv_wr receive = {1, NULL, &sge, 33}, *bad_receive = NULL;
    /* Nothing of a list is posted if a part is wrong. */
    list[0].tag = GDS_TAG_WRITE_VALUE32;
    OK(gds_prepare_write_value32(&list[0].write32, words, 1, GDS_MEMORY_HOST));
    list[1].tag = (gds_tag_t)9;
    REFUSED(gds_stream_post_descriptors(s.stream, 2, list, 0), EINVAL);
    REFUSED(gds_post_descriptors(2, list, 0), EINVAL);
    REFUSED(gds_post_descriptors(1, list, 1), EINVAL);
    REFUSED(gds_post_descriptors(2, NULL, 0), EINVAL);
    OK(gds_post_descriptors(0, NULL, 0));
    list[1].tag = GDS_TAG_SEND;
    list[1].send = NULL;
    REFUSED(gds_stream_post_descriptors(s.stream, 2, list, 0), EINVAL);
    list[1].tag = GDS_TAG_WRITE_VALUE32;
    OK(gds_prepare_write_value32(&list[1].write32, (uint32_t *)((char *)words + 2), 1, GDS_MEMORY_HOST));
    REFUSED(gds_stream_post_descriptors(s.stream, 2, list, 0), EINVAL);
    OK(gds_prepare_write_value32(&list[1].write32, words, 1, GDS_MEMORY_IO));
    REFUSED(gds_stream_post_descriptors(s.stream, 2, list, 0), EOPNOTSUPP);
    list[1].tag = GDS_TAG_WRITE_MEMORY;
    OK(gds_prepare_write_memory(&list[1].writemem, (uint8_t *)words, (uint8_t *)words, 3, GDS_MEMORY_HOST));
    REFUSED(gds_stream_post_descriptors(s.stream, 2, list, 0), EINVAL);
    OK(cuStreamSynchronize(s.stream));
    CHECK(words[0], 0);
    /* An impossible wait would hold the stream for ever. */
    list[0].tag = GDS_TAG_WAIT_VALUE32;
    OK(gds_prepare_wait_value32(&list[0].wait32, words, 0, GDS_WAIT_COND_AND, GDS_MEMORY_HOST));
    REFUSED(gds_post_descriptors(1, list, 0), EINVAL);
    /* Requests that no queue takes. */
    REFUSED(gds_post_recv(qp, &receive, &bad_receive), EINVAL);
    TRUE(bad_receive == &receive);
    receive.num_sge = -1;
    REFUSED(gds_post_recv(qp, &receive, NULL), EINVAL);
    wr.opcode = (enum ibv_wr_opcode)77;
    REFUSED(gds_post_send(qp, &wr, &bad), EINVAL);
    TRUE(bad == &wr);
    wr.opcode = IBV_WR_SEND;
    wr.send_flags = IBV_SEND_INLINE;
    sge.length = 65;
    REFUSED(gds_post_send(qp, &wr, &bad), EINVAL);
    wr.next = &wr;
    REFUSED(gds_post_send(qp, &wr, &bad), EINVAL);
}

static void refused_queue_pairs(void)
{
    gds_qp_init_attr_t attr;
    memset(&attr, 0, sizeof attr);
    attr.qp_type = IBV_QPT_RC;
    attr.cap.max_send_wr = attr.cap.max_recv_wr = attr.cap.max_send_sge = attr.cap.max_recv_sge = 1;
#define NONE(pd, context, attr, gpu, flags, number)                                                                    \
    do {                                                                                                               \
        errno = 0;                                                                                                     \
        TRUE(gds_create_qp(pd, context, attr, gpu, flags) == NULL);                                                    \
        REFUSED(errno, number);                                                                                        \
    } while (0)
    NONE(NULL, s.context, &attr, 0, 0, EINVAL);
    NONE(s.pd, NULL, &attr, 0, 0, EINVAL);
    NONE(s.pd, s.context, NULL, 0, 0, EINVAL);
    NONE(s.pd, s.context, &attr, 0, 1 << 3, EINVAL);
    NONE(s.pd, s.context, &attr, 0, GDS_CREATE_QP_WQ_ON_GPU, EINVAL);
    NONE(s.pd, s.context, &attr, -1, 0, EINVAL);
    attr.qp_type = IBV_QPT_UC;
    NONE(s.pd, s.context, &attr, 0, 0, EINVAL);
    attr.qp_type = IBV_QPT_RC;
    attr.cap.max_send_wr = 1 << 20;
    NONE(s.pd, s.context, &attr, 0, 0, EINVAL);
}

static void destroyed(void)
{
    gds_qp_t *qp = make_qp(&s, 4), copy = *qp;
    struct ibv_sge sge;
    struct ibv_send_wr wr = send_of(&s, &sge, 1, 0, 4);
    gds_send_request_t send;
    /* A send in the wrong state. */
    REFUSED(gds_prepare_send(qp, &wr, NULL, &send), EINVAL);
    connect_qp(qp, place_of(&s, qp));
    OK(gds_prepare_send(qp, &wr, NULL, &send));
    /* The handle of the library's copy of it, and a structure of one's own, are none. */
    REFUSED(gds_post_send(&copy, &wr, NULL), EINVAL);
    REFUSED(gds_post_send((gds_qp_t *)(void *)qp->send_cq, &wr, NULL), EINVAL);
    REFUSED(gds_poll_cq((struct gds_cq *)(void *)qp, 0, NULL), -EINVAL);
    OK(gds_destroy_qp(qp));
    REFUSED(gds_destroy_qp(qp), EINVAL);
    REFUSED(gds_post_send(qp, &wr, NULL), EINVAL);
    REFUSED(gds_poll_cq(copy.send_cq, 0, NULL), -EINVAL);
    REFUSED(gds_stream_wait_cq(s.stream, copy.recv_cq, 0), EINVAL);
    REFUSED(gds_stream_post_send(s.stream, &send), EINVAL);
}

/* Two threads: of two that destroy a queue pair one succeeds, and calls meanwhile are refused or work. */
static gds_qp_t *raced;
static struct gds_cq *raced_cq;

static void *poll_on(void *data)
{
    struct ibv_wc wc;
    (void)data;
    while (gds_poll_cq(raced_cq, 1, &wc) == 0)
        ;
    return NULL;
}

static void *destroy(void *data)
{
    *(int *)data = gds_destroy_qp(raced);
    return NULL;
}

static void two_threads(void)
{
    for (int round = 0; round < 10; round++) {
        pthread_t threads[3];
        int results[2];
        raced = make_qp(&s, 4);
        raced_cq = raced->recv_cq;
        OK(pthread_create(&threads[0], NULL, poll_on, NULL));
        for (int i = 0; i < 2; i++)
            OK(pthread_create(&threads[1 + i], NULL, destroy, &results[i]));
        for (int i = 0; i < 3; i++)
            OK(pthread_join(threads[i], NULL));
        TRUE((results[0] == 0 && results[1] == EINVAL) || (results[0] == EINVAL && results[1] == 0));
    }
}

static void forked(gds_qp_t *qp)
{
    int status;
    pid_t child = fork();
    TRUE(child >= 0);
    if (child == 0) {
        struct ibv_sge sge;
        struct ibv_send_wr wr = send_of(&s, &sge, 1, 0, 4);
        REFUSED(gds_post_send(qp, &wr, NULL), EACCES);
        _exit(0);
    }
    CHECK(waitpid(child, &status, 0), child);
    OK(status);
}

/* With a limit, a wait for what never comes ends the stream; without one it would be for ever. */
static void limited(void)
{
    struct side other = s;
    struct ibv_wc wc;
    static uint32_t word;
    gds_descriptor_t list;
    gds_qp_t *qp = make_qp(&s, 4);
    connect_qp(qp, place_of(&s, qp));
    OK(gdsx_set_wait_limit(200));
    list.tag = GDS_TAG_WAIT_VALUE32;
    OK(gds_prepare_wait_value32(&list.wait32, &word, 1, GDS_WAIT_COND_EQ, GDS_MEMORY_HOST));
    REFUSED(gds_post_descriptors(1, &list, 0), ETIMEDOUT);
    OK(cuStreamCreateWithPriority(&other.stream, CU_STREAM_NON_BLOCKING, 0));
    OK(post_receive(&s, qp, 5, 0, 4));
    OK(gds_stream_wait_cq(other.stream, qp->recv_cq, 0));
    OK(cuStreamSynchronize(other.stream));
    wc = poll_one(qp->recv_cq);
    CHECK(wc.status, IBV_WC_WR_FLUSH_ERR);
    REFUSED(gds_stream_post_descriptors(other.stream, 1, &list, 0), ETIMEDOUT);
    OK(cuStreamDestroy(other.stream));
    OK(gds_destroy_qp(qp));
    OK(gdsx_set_wait_limit(0));
}

int main(void)
{
    int version = 0;
    OK(gds_query_param(GDS_PARAM_VERSION, &version));
    CHECK(version, GDS_API_VERSION);
    TRUE(GDS_API_VERSION_COMPATIBLE(version));
    CHECK(gds_query_param(GDS_NUM_PARAMS, &version), EINVAL);
    CHECK(gds_stream_wait_cq(NULL, (struct gds_cq *)&version, 0), EINVAL);
    s = open_side();
    gds_qp_t *qp = make_qp(&s, 4);
    connect_qp(qp, place_of(&s, qp));
    null_pointers(qp);
    wrong_lists(qp);
    refused_queue_pairs();
    destroyed();
    two_threads();
    forked(qp);
    limited();
    OK(gds_destroy_qp(qp));
    close_side(&s);
    return 0;
}
