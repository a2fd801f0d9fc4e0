/* Several threads: what one waits for holds up no other, and what they do first, they do at once. */

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
    connect_qp(a, place_of(&s, b));
    connect_qp(b, place_of(&s, a));
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

/* A thread that posts a list by the CPU, while another destroys the queue pair. */
struct poster {
    gds_descriptor_t list[3];
    uint32_t started, gate;
    int result;
};

static void *post(void *data)
{
    struct poster *p = data;
    p->result = gds_post_descriptors(3, p->list, 0);
    return NULL;
}

static pthread_t start(struct poster *p)
{
    pthread_t thread;
    p->list[0].tag = GDS_TAG_WRITE_VALUE32;
    OK(gds_prepare_write_value32(&p->list[0].write32, &p->started, 1, GDS_MEMORY_HOST));
    OK(pthread_create(&thread, NULL, post, p));
    await(&p->started, 1);
    return thread;
}

static void close_pair(void)
{
    OK(gds_destroy_qp(a));
    OK(gds_destroy_qp(b));
    close_side(&s);
}

/* It waits for a completion, which comes when the queue pair is stopped. */
static void destroyed_while_awaited(void)
{
    static struct poster p;
    gds_send_request_t send;
    gds_wait_request_t wait;
    prepare(2, &send);
    OK(gds_prepare_wait_cq(a->send_cq, &wait, 0));
    p.list[1].tag = GDS_TAG_SEND;
    p.list[1].send = &send;
    p.list[2].tag = GDS_TAG_WAIT;
    p.list[2].wait = &wait;
    pthread_t thread = start(&p);
    OK(gds_destroy_qp(a));
    OK(pthread_join(thread, NULL));
    TRUE(p.result != 0);
    a = make_qp(&s, 16);
}

/* It waits for a word, which only the program can end: the queue pair is destroyed after that. */
static void destroyed_too_early(void)
{
    static struct poster p;
    gds_send_request_t send;
    connect_qp(a, place_of(&s, b));
    prepare(3, &send);
    p.list[1].tag = GDS_TAG_WAIT_VALUE32;
    OK(gds_prepare_wait_value32(&p.list[1].wait32, &p.gate, 1, GDS_WAIT_COND_EQ, GDS_MEMORY_HOST));
    p.list[2].tag = GDS_TAG_SEND;
    p.list[2].send = &send;
    pthread_t thread = start(&p);
    OK(gdsx_set_wait_limit(50));
    CHECK(gds_destroy_qp(a), EBUSY);
    CHECK(gds_destroy_qp(a), EBUSY);
    OK(gdsx_set_wait_limit(0));
    set(&p.gate);
    OK(pthread_join(thread, NULL));
    TRUE(p.result != 0);
    OK(gds_destroy_qp(a));
    CHECK(gds_destroy_qp(a), EINVAL);
    a = make_qp(&s, 16);
}

/* The first queue pairs of a domain, and the first uses of a stream, all at once. */
enum { THREADS = 4 };

static struct first {
    gds_qp_t *qp;
    uint32_t word;
} firsts[THREADS];

static pthread_barrier_t together;

static void *begin(void *data)
{
    struct first *first = data;
    gds_descriptor_t list;
    list.tag = GDS_TAG_WRITE_VALUE32;
    OK(gds_prepare_write_value32(&list.write32, &first->word, 1, GDS_MEMORY_HOST));
    pthread_barrier_wait(&together);
    first->qp = make_qp(&s, 16);
    pthread_barrier_wait(&together);
    OK(gds_stream_post_descriptors(s.stream, 1, &list, 0));
    return NULL;
}

static void at_once(void)
{
    pthread_t threads[THREADS];
    struct ibv_sge sge;
    s = open_side();
    OK(pthread_barrier_init(&together, NULL, THREADS));
    memset(firsts, 0, sizeof firsts);
    for (int i = 0; i < THREADS; i++)
        OK(pthread_create(&threads[i], NULL, begin, &firsts[i]));
    for (int i = 0; i < THREADS; i++)
        OK(pthread_join(threads[i], NULL));
    a = firsts[0].qp;
    connect_qp(a, place_of(&s, a));
    struct ibv_send_wr wr = send_of(&s, &sge, 4, 0, 4), *bad = NULL;
    OK(post_receive(&s, a, 4, 4, 4));
    OK(gds_stream_queue_send(s.stream, a, &wr, &bad));
    OK(gds_stream_wait_cq(s.stream, a->recv_cq, 0));
    OK(cuStreamSynchronize(s.stream));
    CHECK(poll_one(a->send_cq).wr_id, 4);
    CHECK(poll_one(a->recv_cq).wr_id, 4);
    for (int i = 0; i < THREADS; i++) {
        CHECK(firsts[i].word, 1);
        OK(gds_destroy_qp(firsts[i].qp));
    }
    OK(pthread_barrier_destroy(&together));
    close_side(&s);
}

int main(void)
{
    alarm(2 * PATIENCE);
    open_pair();
    full_stream();
    destroyed_while_awaited();
    destroyed_too_early();
    close_pair();
    for (int round = 0; round < 3; round++)
        at_once();
    return 0;
}
