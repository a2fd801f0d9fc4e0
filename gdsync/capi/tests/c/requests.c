/* Each way of posting, within a process: prepared, in lists, by the CPU, without completions, and what is held back when. */

#include <endian.h>

#include "check.h"

static struct side s;
static gds_qp_t *a, *b;

/* A send from a to b of one word. */
static struct ibv_send_wr word_send(struct ibv_sge *sge, uint64_t id, unsigned value)
{
    ((unsigned *)s.bytes)[512 + id % 64] = value;
    return send_of(&s, sge, id, 2048 + 4 * (id % 64), 4);
}

static void expect(struct gds_cq *cq, uint64_t id, int status)
{
    struct ibv_wc wc = poll_one(cq);
    CHECK(wc.wr_id, id);
    CHECK(wc.status, status);
}

static void none(struct gds_cq *cq)
{
    struct ibv_wc wc;
    OK(gds_poll_cq(cq, 1, &wc));
}

static void finish(void)
{
    OK(cuStreamSynchronize(s.stream));
}

static void by_cpu(void)
{
    struct ibv_sge sge, more;
    struct ibv_send_wr wr = word_send(&sge, 1, 77), next = word_send(&more, 2, 78), *bad = NULL;
    OK(post_receive(&s, b, 1, 0, 4));
    OK(post_receive(&s, b, 2, 4, 4));
    wr.next = &next;
    next.opcode = IBV_WR_SEND_WITH_IMM;
    next.imm_data = htobe32(0x01020304);
    next.send_flags |= IBV_SEND_INLINE;
    OK(gds_post_send(a, &wr, &bad));
    expect(a->send_cq, 1, IBV_WC_SUCCESS);
    expect(a->send_cq, 2, IBV_WC_SUCCESS);
    expect(b->recv_cq, 1, IBV_WC_SUCCESS);
    struct ibv_wc wc = poll_one(b->recv_cq);
    CHECK(wc.wc_flags, IBV_WC_WITH_IMM);
    CHECK(be32toh(wc.imm_data), 0x01020304);
    CHECK(((unsigned *)s.bytes)[0], 77);
    CHECK(((unsigned *)s.bytes)[1], 78);
}

/* A stream waits for a word, and then sends; the receiver's completion is held back until its own wait has passed. */
static void held_back(void)
{
    static uint32_t gate, passed, other;
    struct ibv_sge sge;
    struct ibv_send_wr wr = word_send(&sge, 3, 79), *bad = NULL;
    gds_send_request_t send, copy;
    gds_wait_request_t sent, received;
    gds_descriptor_t list[6];
    OK(post_receive(&s, b, 3, 0, 4));
    OK(gds_prepare_send(a, &wr, &bad, &send));
    OK(gds_prepare_wait_cq(a->send_cq, &sent, 0));
    OK(gds_prepare_wait_cq(b->recv_cq, &received, 0));
    memcpy(&copy, &send, sizeof copy);
    uint8_t bytes[8] = {1, 0, 0, 0, 2, 0, 0, 0};
    static uint32_t target[2];
    list[0].tag = GDS_TAG_WAIT_VALUE32;
    OK(gds_prepare_wait_value32(&list[0].wait32, &gate, 5, GDS_WAIT_COND_EQ, GDS_MEMORY_HOST));
    list[1].tag = GDS_TAG_SEND;
    list[1].send = &copy;
    list[2].tag = GDS_TAG_WAIT;
    list[2].wait = &sent;
    list[3].tag = GDS_TAG_WAIT;
    list[3].wait = &received;
    list[4].tag = GDS_TAG_WRITE_VALUE32;
    OK(gds_prepare_write_value32(&list[4].write32, &passed, 9, GDS_MEMORY_HOST | GDS_WRITE_PRE_BARRIER));
    list[5].tag = GDS_TAG_WRITE_MEMORY;
    OK(gds_prepare_write_memory(&list[5].writemem, (uint8_t *)target, bytes, 8, GDS_MEMORY_HOST));
    OK(gds_stream_post_descriptors(s.stream, 6, list, 0));
    memset(bytes, 0xff, sizeof bytes);
    CHECK(gds_stream_post_send(s.stream, &send), EINVAL);
    CHECK(cuStreamQuery(s.stream), CUDA_ERROR_NOT_READY);
    none(a->send_cq);
    none(b->recv_cq);
    __atomic_store_n(&gate, 5, __ATOMIC_RELEASE);
    finish();
    CHECK(passed, 9);
    CHECK(target[0] == 1 && target[1] == 2, 1);
    expect(a->send_cq, 3, IBV_WC_SUCCESS);
    expect(b->recv_cq, 3, IBV_WC_SUCCESS);
    CHECK(((unsigned *)s.bytes)[0], 79);
    (void)other;
}

/* What arrives while a prepared wait holds it is polled once the claim is given back. */
static void given_back(void)
{
    struct ibv_sge sge;
    struct ibv_send_wr wr = word_send(&sge, 4, 80), *bad = NULL;
    gds_wait_request_t wait, again;
    OK(post_receive(&s, b, 4, 0, 4));
    OK(gds_prepare_wait_cq(b->recv_cq, &wait, 0));
    again = wait;
    OK(gds_post_send(a, &wr, &bad));
    expect(a->send_cq, 4, IBV_WC_SUCCESS);
    none(b->recv_cq);
    CHECK(gds_post_wait_cq(a->recv_cq, &wait, 0), EINVAL);
    OK(gds_post_wait_cq(b->recv_cq, &wait, 0));
    CHECK(gds_post_wait_cq(b->recv_cq, &again, 0), EINVAL);
    expect(b->recv_cq, 4, IBV_WC_SUCCESS);
}

/* Sends without a completion are not polled, and waits do not count them. */
static void unsignalled(void)
{
    struct ibv_sge sge[3];
    struct ibv_send_wr wr[3], *bad = NULL;
    for (int i = 0; i < 3; i++) {
        wr[i] = word_send(&sge[i], 10 + i, 90 + i);
        wr[i].send_flags = i == 2 ? IBV_SEND_SIGNALED : 0;
        wr[i].next = i == 2 ? NULL : &wr[i + 1];
        OK(post_receive(&s, b, 10 + i, 4 * i, 4));
    }
    unsigned before = a->send_cq->curr_offset;
    OK(gds_stream_queue_send(s.stream, a, wr, &bad));
    OK(gds_stream_wait_cq(s.stream, a->send_cq, 0));
    CHECK(a->send_cq->curr_offset, before + 1);
    CHECK(gds_stream_wait_cq(s.stream, a->send_cq, 0), EINVAL);
    finish();
    expect(a->send_cq, 12, IBV_WC_SUCCESS);
    none(a->send_cq);
    for (int i = 0; i < 3; i++)
        expect(b->recv_cq, 10 + i, IBV_WC_SUCCESS);
}

/* The queue has so much room, and polling makes room. */
static void full(void)
{
    struct ibv_sge sge;
    struct ibv_send_wr wr = word_send(&sge, 20, 1), *bad = NULL;
    int count = 0, error;
    while ((error = post_receive(&s, b, 20 + count, 0, 4)) == 0)
        count++;
    CHECK(error, ENOMEM);
    CHECK(count, 16);
    for (int i = 0; i < count; i++, wr.wr_id++)
        OK(gds_post_send(a, &wr, &bad));
    CHECK(gds_post_send(a, &wr, &bad), ENOMEM);
    TRUE(bad == &wr && strstr(gdsx_last_error(), "full"));
    for (int i = 0; i < count; i++) {
        expect(a->send_cq, 20 + i, IBV_WC_SUCCESS);
        expect(b->recv_cq, 20 + i, IBV_WC_SUCCESS);
    }
    none(a->send_cq);
}

/* The CPU posts a list, also in a callback of the stream. */
static gds_descriptor_t in_callback[3];
static int of_callback = -1;

static void callback(void *data)
{
    (void)data;
    of_callback = gds_post_descriptors(3, in_callback, 0);
}

static void posted_by_cpu(void)
{
    static uint32_t word;
    struct ibv_sge sge;
    struct ibv_send_wr wr = word_send(&sge, 40, 123), *bad = NULL;
    gds_send_request_t send;
    gds_wait_request_t wait;
    OK(post_receive(&s, b, 40, 0, 4));
    OK(gds_prepare_send(a, &wr, &bad, &send));
    OK(gds_prepare_wait_cq(a->send_cq, &wait, 0));
    in_callback[0].tag = GDS_TAG_SEND;
    in_callback[0].send = &send;
    in_callback[1].tag = GDS_TAG_WAIT;
    in_callback[1].wait = &wait;
    in_callback[2].tag = GDS_TAG_WRITE_VALUE32;
    OK(gds_prepare_write_value32(&in_callback[2].write32, &word, 3, GDS_MEMORY_HOST));
    OK(cuLaunchHostFunc(s.stream, callback, NULL));
    finish();
    OK(of_callback);
    CHECK(word, 3);
    expect(a->send_cq, 40, IBV_WC_SUCCESS);
    expect(b->recv_cq, 40, IBV_WC_SUCCESS);
}

/* What a kernel would do with the words. */
static void by_words(void)
{
    struct ibv_sge sge;
    struct ibv_send_wr wr = word_send(&sge, 50, 321), *bad = NULL;
    gds_send_request_t send;
    gds_wait_request_t wait;
    gds_mlx5_send_info_t out;
    gds_mlx5_wait_info_t in;
    OK(post_receive(&s, b, 50, 0, 4));
    OK(gds_prepare_send(a, &wr, &bad, &send));
    OK(gds_prepare_wait_cq(b->recv_cq, &wait, 0));
    OK(gds_mlx5_get_send_info(1, &send, &out));
    OK(gds_mlx5_get_wait_info(1, &wait, &in));
    CHECK(gds_mlx5_get_send_info(1, &send, &out), EINVAL);
    __atomic_store_n(out.dbrec_ptr, out.dbrec_value, __ATOMIC_RELEASE);
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    __atomic_store_n(out.db_ptr, out.db_value, __ATOMIC_RELEASE);
    TRUE(in.cond == GDS_WAIT_COND_AND || in.cond == GDS_WAIT_COND_NOR);
    time_t end = time(NULL) + PATIENCE;
    for (;;) {
        uint32_t word = __atomic_load_n(in.cqe_ptr, __ATOMIC_ACQUIRE);
        if (in.cond == GDS_WAIT_COND_AND ? word & in.cqe_value : ~(word | in.cqe_value))
            break;
        TRUE(time(NULL) < end);
    }
    none(b->recv_cq);
    __atomic_store_n(in.flag_ptr, in.flag_value, __ATOMIC_RELEASE);
    expect(b->recv_cq, 50, IBV_WC_SUCCESS);
    expect(a->send_cq, 50, IBV_WC_SUCCESS);
    uint32_t value = 4;
    gds_mlx5_dword_wait_info_t info;
    OK(gds_mlx5_get_dword_wait_info(&value, 4, GDS_MEMORY_HOST, &info));
    TRUE(info.ptr && info.value == 4);
}

static void mapped_memory(void)
{
    gds_mem_desc_t desc, copy;
    gds_wait_value32_t wait;
    memset(&desc, 0, sizeof desc);
    OK(gds_alloc_mapped_memory(&desc, 0, GDS_MEMORY_HOST));
    TRUE(desc.d_ptr == 0);
    OK(gds_alloc_mapped_memory(&desc, 10000, GDS_MEMORY_HOST));
    TRUE(desc.d_ptr && desc.h_ptr && desc.alloc_size == 10000 && ((uintptr_t)desc.h_ptr & 4095) == 0);
    uint32_t *word = (uint32_t *)desc.h_ptr;
    gds_descriptor_t list[2];
    list[0].tag = GDS_TAG_WAIT_VALUE32;
    OK(gds_prepare_wait_value32(&wait, (uint32_t *)desc.d_ptr, 1, GDS_WAIT_COND_GEQ, GDS_MEMORY_HOST));
    list[0].wait32 = wait;
    list[1].tag = GDS_TAG_WRITE_VALUE32;
    OK(gds_prepare_write_value32(&list[1].write32, (uint32_t *)desc.d_ptr + 1, 6, GDS_MEMORY_HOST));
    OK(gds_stream_post_descriptors(s.stream, 2, list, 0));
    __atomic_store_n(word, 1, __ATOMIC_RELEASE);
    finish();
    CHECK(word[1], 6);
    copy = desc;
    OK(gds_free_mapped_memory(&desc));
    CHECK(gds_free_mapped_memory(&desc), EINVAL);
    CHECK(gds_free_mapped_memory(&copy), EINVAL);
    CHECK(gds_alloc_mapped_memory(&desc, 64, GDS_MEMORY_IO), EINVAL);
}

/* What a stream or a kernel refuses is taken back: sends are as if never posted, and completions can be claimed again. */
static void refused(void)
{
    static uint32_t gate;
    struct ibv_sge sge[2];
    struct ibv_send_wr wr[2] = {word_send(&sge[0], 51, 1), word_send(&sge[1], 52, 2)}, *bad = NULL;
    gds_send_request_t send;
    gds_wait_request_t wait, next;
    gds_mlx5_send_info_t out;
    gds_mlx5_wait_info_t in;
    CUstream other;
    gds_descriptor_t list[3];
    list[0].tag = GDS_TAG_WAIT_VALUE32;
    OK(gds_prepare_wait_value32(&list[0].wait32, &gate, 1, GDS_WAIT_COND_EQ, GDS_MEMORY_HOST));
    list[1].tag = GDS_TAG_SEND;
    list[1].send = &send;
    list[2].tag = GDS_TAG_WAIT;
    list[2].wait = &wait;
    OK(cuStreamCreateWithPriority(&other, CU_STREAM_NON_BLOCKING, 0));
    for (int i = 0; i < 3; i++)
        OK(post_receive(&s, b, 51 + i, 4 * i, 4));
    OK(gds_prepare_send(a, wr, &bad, &send));
    OK(gds_prepare_wait_cq(a->send_cq, &wait, 0));
    OK(gds_stream_post_descriptors(s.stream, 3, list, 0));
    /* The stream has the send queue now. */
    unsigned claims = a->send_cq->curr_offset;
    OK(gds_prepare_send(a, &wr[1], &bad, &send));
    OK(gds_prepare_wait_cq(a->send_cq, &wait, 0));
    CHECK(gds_stream_post_descriptors(other, 2, list + 1, 0), EBUSY);
    CHECK(a->send_cq->curr_offset, claims);
    wr[0].next = &wr[1];
    OK(gds_prepare_send(a, wr, &bad, &send));
    CHECK(gds_mlx5_get_send_info(1, &send, &out), EBUSY);
    CHECK(gds_stream_post_send(s.stream, &send), EINVAL);
    __atomic_store_n(&gate, 1, __ATOMIC_RELEASE);
    finish();
    OK(cuStreamDestroy(other));
    expect(a->send_cq, 51, IBV_WC_SUCCESS);
    wr[0].wr_id = 53;
    OK(gds_post_send(a, wr, &bad));
    expect(a->send_cq, 53, IBV_WC_SUCCESS);
    expect(a->send_cq, 52, IBV_WC_SUCCESS);
    none(a->send_cq);
    for (int i = 0; i < 3; i++)
        expect(b->recv_cq, 51 + i, IBV_WC_SUCCESS);
    /* Waits behind a prepared one that is not posted yet. */
    for (int i = 0; i < 2; i++)
        OK(post_receive(&s, b, 54 + i, 4 * i, 4));
    claims = b->recv_cq->curr_offset;
    OK(gds_prepare_wait_cq(b->recv_cq, &wait, 0));
    OK(gds_prepare_wait_cq(b->recv_cq, &next, 0));
    CHECK(gds_stream_post_wait_cq(s.stream, &next), EINVAL);
    CHECK(gds_stream_wait_cq(s.stream, b->recv_cq, 0), EINVAL);
    OK(gds_prepare_wait_cq(b->recv_cq, &next, 0));
    CHECK(gds_mlx5_get_wait_info(1, &next, &in), EINVAL);
    CHECK(b->recv_cq->curr_offset, claims + 1);
    OK(gds_stream_post_wait_cq(s.stream, &wait));
    OK(gds_stream_wait_cq(s.stream, b->recv_cq, 0));
    CHECK(b->recv_cq->curr_offset, claims + 2);
    OK(gds_post_send(a, wr, &bad));
    finish();
    for (int i = 0; i < 2; i++) {
        expect(a->send_cq, 53 - i, IBV_WC_SUCCESS);
        expect(b->recv_cq, 54 + i, IBV_WC_SUCCESS);
    }
}

/* A failed send ends the wait of the stream, and the next poll tells. */
static void failed(void)
{
    struct ibv_sge sge;
    struct ibv_send_wr wr = word_send(&sge, 60, 1), *bad = NULL;
    gds_send_request_t send;
    gds_wait_request_t wait;
    gds_descriptor_t list[2];
    sge.lkey ^= 0xffffff00;
    OK(gds_prepare_send(a, &wr, &bad, &send));
    OK(gds_prepare_wait_cq(a->send_cq, &wait, 0));
    list[0].tag = GDS_TAG_SEND;
    list[0].send = &send;
    list[1].tag = GDS_TAG_WAIT;
    list[1].wait = &wait;
    /* At once: a wait that is posted after the failure is refused. */
    OK(gds_stream_post_descriptors(s.stream, 2, list, 0));
    finish();
    struct ibv_wc wc = poll_one(a->send_cq);
    CHECK(wc.wr_id, 60);
    CHECK(wc.status, IBV_WC_LOC_PROT_ERR);
    TRUE(strstr(gdsx_last_error(), "gds_poll_cq") && strstr(gdsx_last_error(), "protection"));
    CHECK(gds_post_send(a, &wr, &bad), EIO);
    struct ibv_qp_attr reset;
    memset(&reset, 0, sizeof reset);
    reset.qp_state = IBV_QPS_RESET;
    OK(gds_modify_qp(a, &reset, IBV_QP_STATE));
    none(a->send_cq);
}

int main(void)
{
    s = open_side();
    a = make_qp(&s, 16);
    b = make_qp(&s, 16);
    connect_qp(a, place_of(&s, b));
    connect_qp(b, place_of(&s, a));
    by_cpu();
    held_back();
    given_back();
    unsignalled();
    full();
    posted_by_cpu();
    by_words();
    mapped_memory();
    refused();
    failed();
    OK(gds_destroy_qp(a));
    OK(gds_destroy_qp(b));
    close_side(&s);
    return 0;
}
