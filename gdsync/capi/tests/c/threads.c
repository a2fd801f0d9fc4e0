/* Several threads: what one waits for holds up no other. */

#include <pthread.h>

#include "check.h"

static struct side s;
static gds_qp_t *a, *b;

/* A word becomes this. */
static void await(uint32_t *word, uint32_t value)
{
    time_t end = time(NULL) + PATIENCE;
    while (__atomic_load_n(word, __ATOMIC_ACQUIRE) != value) {
        TRUE(time(NULL) < end);
        usleep(50);
    }
}

static void set(uint32_t *word)
{
    __atomic_store_n(word, 1, __ATOMIC_RELEASE);
}

static void open_pair(void)
{
    s = open_side();
    a = make_qp(&s, 16);
    b = make_qp(&s, 16);
    struct place pa = place_of(&s, a), pb = place_of(&s, b);
    connect_qp(a, pb);
    connect_qp(b, pa);
}

/* A send from a to b. */
static void prepare(uint64_t id, gds_send_request_t *send)
{
    struct ibv_sge sge;
    struct ibv_send_wr wr = send_of(&s, &sge, id, 0, 4), *bad = NULL;
    OK(gds_prepare_send(a, &wr, &bad, send));
}

/* A thread waits for room in a stream, which a callback holds: the callback posts, and others poll, on the same queue. */
static uint32_t go;
static int of_callback = -1, of_wait = -1;

static void callback(void *send)
{
    gds_descriptor_t list;
    list.tag = GDS_TAG_SEND;
    list.send = send;
    await(&go, 1);
    of_callback = gds_post_descriptors(1, &list, 0);
}

static void *wait_on_stream(void *data)
{
    (void)data;
    of_wait = gds_stream_wait_cq(s.stream, a->send_cq, 0);
    return NULL;
}

static void full_stream(void)
{
    static uint32_t word;
    struct ibv_wc wc;
    gds_descriptor_t list;
    gds_send_request_t send;
    pthread_t thread;
    int error;
    list.tag = GDS_TAG_WRITE_VALUE32;
    OK(gds_prepare_write_value32(&list.write32, &word, 1, GDS_MEMORY_HOST));
    OK(post_receive(&s, b, 1, 0, 4));
    prepare(1, &send);
    /* The stream itself has no limit. */
    OK(gds_stream_post_descriptors(s.stream, 1, &list, 0));
    OK(cuLaunchHostFunc(s.stream, callback, &send));
    OK(gdsx_set_wait_limit(1));
    while ((error = gds_stream_post_descriptors(s.stream, 1, &list, 0)) == 0)
        ;
    CHECK(error, ENOMEM);
    OK(gdsx_set_wait_limit(0));
    uint32_t claims = a->send_cq->curr_offset;
    OK(pthread_create(&thread, NULL, wait_on_stream, NULL));
    await(&a->send_cq->curr_offset, claims + 1);
    OK(gds_poll_cq(a->send_cq, 1, &wc));
    set(&go);
    OK(pthread_join(thread, NULL));
    OK(of_wait);
    OK(cuStreamSynchronize(s.stream));
    OK(of_callback);
    CHECK(poll_one(a->send_cq).wr_id, 1);
    CHECK(poll_one(b->recv_cq).wr_id, 1);
}

int main(void)
{
    alarm(2 * PATIENCE);
    open_pair();
    full_stream();
    OK(gds_destroy_qp(a));
    OK(gds_destroy_qp(b));
    close_side(&s);
    return 0;
}
