/* Each misuse is an error number and a line of the log, and leaves the library usable. */

#include "check.h"

#include <limits.h>
#include <pthread.h>

/* Fails with this number, and says why. */
#define REFUSED(call, error)                                                                                           \
    do {                                                                                                               \
        CHECK(call, error);                                                                                            \
        TRUE(strncmp(mpx_last_error(), "mp", 2) == 0);                                                                 \
    } while (0)

/* A page of its own: a card has the kernel keep registered pages from forked children. */
static char bytes[4096] __attribute__((aligned(4096)));
static mp_reg_t reg;
static CUstream stream;

static void without_a_job(void)
{
    int version = 0;
    mp_reg_t none = NULL;
    mp_request_t request = NULL;
    OK(mp_query_param(MP_PARAM_VERSION, &version));
    CHECK(version, MP_API_VERSION);
    TRUE(MP_API_VERSION_COMPATIBLE(version));
    REFUSED(mp_query_param(MP_NUM_PARAMS, &version), EINVAL);
    REFUSED(mp_query_param(MP_PARAM_VERSION, NULL), EINVAL);
    REFUSED(mp_register(bytes, 10, &none), MP_FAILURE);
    REFUSED(mp_isend(bytes, 1, peer, &none, &request), MP_FAILURE);
    REFUSED(mp_window_create(bytes, 1, (mp_window_t *)&none), MP_FAILURE);
    mp_finalize();
    TRUE(strstr(mpx_last_error(), "mp_finalize: this process has no job"));
    REFUSED(mp_init_env(&peer, 1, 0, 0), MP_FAILURE);
}

static void refused_jobs(void)
{
    struct mp_exchange good = exchange(), e = good;
    int twice[2] = {peer, peer}, others[1] = {2};
    REFUSED(mp_init_with(NULL, &peer, 1, 0, 0), EINVAL);
    e.struct_size--;
    REFUSED(mp_init_with(&e, &peer, 1, 0, 0), EINVAL);
    OK(released);
    e = good;
    e.barrier = NULL;
    REFUSED(mp_init_with(&e, &peer, 1, 0, 0), EINVAL);
    CHECK(released, 1);
    e = good;
    e.rank = 2;
    REFUSED(mp_init_with(&e, &peer, 1, 0, 0), EINVAL);
    e = good;
    e.size = INT_MAX;
    REFUSED(mp_init_with(&e, &peer, 1, 0, 0), EINVAL);
    /* From here on the ranks exchange. */
    REFUSED(mp_init_with(&good, twice, 2, 0, 0), EINVAL);
    REFUSED(mp_init_with(&good, others, 1, 0, 0), EINVAL);
    REFUSED(mp_init_with(&good, NULL, 1, 0, 0), EINVAL);
    REFUSED(mp_init_with(&good, &peer, -1, 0, 0), EINVAL);
    REFUSED(mp_init_with(&good, &peer, 1, 5, 0), EINVAL);
    TRUE(mp_init_with(&good, &peer, 1, 0, -1));
    TRUE(mp_init_with(&good, &peer, 1, 0, 99));
    /* One rank fails: the other is told. */
    if (rank == 0)
        REFUSED(mp_init_with(&good, &peer, 1, 0, 0), MP_FAILURE);
    else
        REFUSED(mp_init_with(&good, twice, 2, 0, 0), EINVAL);
    CHECK(released, 11);
    setenv("MP_USE_IB_HCA", "no such device", 1);
    REFUSED(mp_init_with(&good, &peer, 1, 0, 0), MP_FAILURE);
    unsetenv("MP_USE_IB_HCA");
    OK(mp_init_with(&good, &peer, 1, 0, 0));
    REFUSED(mp_init_with(&good, &peer, 1, 0, 0), MP_FAILURE);
    CHECK(released, 13);
}

static void handles(void)
{
    mp_reg_t other, none = NULL, foreign = (mp_reg_t)bytes;
    mp_request_t request = NULL, unknown = (mp_request_t)bytes, ended;
    mp_window_t window;
    mp_desc_queue_t list;
    REFUSED(mp_register(NULL, 10, &other), EINVAL);
    REFUSED(mp_register(bytes, 0, &other), EINVAL);
    REFUSED(mp_register(bytes, 10, NULL), EINVAL);
    OK(mp_register(bytes, 100, &other));
    OK(mp_deregister(&other));
    REFUSED(mp_deregister(&other), EINVAL);
    REFUSED(mp_deregister(&none), EINVAL);
    REFUSED(mp_deregister(&foreign), EINVAL);
    REFUSED(mp_deregister(NULL), EINVAL);
    REFUSED(mp_irecv(bytes, 10, peer, &other, &request), EINVAL);
    REFUSED(mp_irecv(bytes, 10, peer, NULL, &request), EINVAL);
    REFUSED(mp_isend(bytes, 10, peer, &foreign, &request), EINVAL);
    REFUSED(mp_isend(bytes, 10, peer, (mp_reg_t *)&request, &request), EINVAL);
    REFUSED(mp_isend(bytes, 10, peer, &reg, NULL), EINVAL);
    REFUSED(mp_isend(bytes, 10, rank, &reg, &request), EINVAL);
    REFUSED(mp_isend(bytes, 10, -1, &reg, &request), EINVAL);
    REFUSED(mp_isend(bytes, 10, 2, &reg, &request), EINVAL);
    REFUSED(mp_isend(bytes, -1, peer, &reg, &request), EINVAL);
    REFUSED(mp_isend(bytes, sizeof bytes + 1, peer, &reg, &request), EINVAL);
    REFUSED(mp_isend(bytes - 1, 2, peer, &reg, &request), EINVAL);
    REFUSED(mp_isend_on_stream(bytes + 4000, 97, peer, &reg, &request, stream), EINVAL);
    struct iovec v[2] = {{bytes, 10}, {bytes + 4090, 7}};
    REFUSED(mp_isendv(v, 2, peer, &reg, &request), EINVAL);
    REFUSED(mp_isendv(v, 0, peer, &reg, &request), EINVAL);
    REFUSED(mp_irecvv(v, 31, peer, &reg, &request), EINVAL);
    REFUSED(mp_irecvv(NULL, 2, peer, &reg, &request), EINVAL);
    TRUE(request == NULL);

    REFUSED(mp_wait(&request), EINVAL);
    REFUSED(mp_wait(&unknown), EINVAL);
    REFUSED(mp_wait(NULL), EINVAL);
    REFUSED(mp_wait_all(2, NULL), EINVAL);
    REFUSED(mp_wait_on_stream(&unknown, stream), EINVAL);
    OK(mp_wait_all(0, NULL));
    OK(mp_wait_all_on_stream(0, NULL, stream));
    OK(mp_progress_all(1, &unknown));
    OK(mp_irecv(bytes, 10, peer, &reg, &request));
    OK(mp_isend(bytes, 10, peer, &reg, &ended));
    OK(mp_wait(&ended));
    OK(mp_wait(&request));
    OK(mp_wait(&ended));
    REFUSED(mp_isend_post_on_stream(&ended, stream), EINVAL);

    OK(mp_window_create(bytes, 100, &window));
    REFUSED(mp_iput(bytes, 10, &reg, peer, 91, &window, &request, 0), EINVAL);
    REFUSED(mp_iput(bytes, 10, &reg, peer, (size_t)-5, &window, &request, 0), EINVAL);
    REFUSED(mp_iput(bytes, 10, &reg, peer, 0, &window, &request, 4), EINVAL);
    REFUSED(mp_iput(bytes, 10, &reg, peer, 0, NULL, &request, 0), EINVAL);
    REFUSED(mp_iput(bytes, 90, &reg, peer, 0, &window, &request, MP_PUT_INLINE), EINVAL);
    REFUSED(mp_iget(bytes, 101, &reg, peer, 0, &window, &request), EINVAL);
    OK(mp_iput(bytes, 10, &reg, peer, 0, &window, &request, MP_PUT_NOWAIT));
    REFUSED(mp_wait(&request), EINVAL);
    REFUSED(mp_wait_on_stream(&request, stream), EINVAL);
    CHECK(mp_progress_all(1, &request), 1);
    /* The next one is complete after it. */
    OK(mp_iget(bytes + 100, 10, &reg, peer, 0, &window, &request));
    OK(mp_wait(&request));
    meet();
    OK(mp_window_destroy(&window));
    REFUSED(mp_window_destroy(&window), EINVAL);
    REFUSED(mp_iput(bytes, 10, &reg, peer, 0, &window, &request, 0), EINVAL);

    OK(mp_desc_queue_alloc(&list));
    mp_desc_queue_t copy = list;
    REFUSED(mp_desc_queue_alloc(NULL), EINVAL);
    REFUSED(mp_desc_queue_add_send(&list, &ended), EINVAL);
    REFUSED(mp_desc_queue_add_send(NULL, &ended), EINVAL);
    REFUSED(mp_desc_queue_add_wait_value32(&list, NULL, 1, 0), EINVAL);
    REFUSED(mp_desc_queue_add_wait_value32(&list, (uint32_t *)bytes, 1, 4), EINVAL);
    REFUSED(mp_desc_queue_add_write_value32(&list, (uint32_t *)(bytes + 2), 1), EINVAL);
    REFUSED(mp_desc_queue_post_on_stream(stream, &list, 1), EINVAL);
    OK(mp_desc_queue_free(&list));
    REFUSED(mp_desc_queue_free(&copy), EINVAL);
    REFUSED(mp_desc_queue_free(&list), EINVAL);
    REFUSED(mp_wait32(NULL, 1, MP_WAIT_EQ), EINVAL);
    REFUSED(mp_wait32((uint32_t *)(bytes + 1), 1, MP_WAIT_EQ), EINVAL);
    REFUSED(mp_wait32((uint32_t *)bytes, 1, 3), EINVAL);
    REFUSED(mp_wait32_on_stream(NULL, 1, MP_WAIT_EQ, stream), EINVAL);
}

static void prepared(void)
{
    struct mp_send_words send;
    struct mp_wait_words wait;
    mp_request_t first, second, third, receives[4];
    mp_desc_queue_t list;
    for (int i = 0; i < 4; i++)
        OK(mp_irecv(bytes + 10 * i, 10, peer, &reg, &receives[i]));
    meet();
    OK(mp_send_prepare(bytes, 10, peer, &reg, &first));
    OK(mp_send_prepare(bytes, 10, peer, &reg, &second));
    REFUSED(mp_wait(&first), EINVAL);
    REFUSED(mp_wait_on_stream(&first, stream), EINVAL);
    REFUSED(mpx_get_wait(&first, &wait), EINVAL);
    REFUSED(mpx_get_send(&first, NULL), EINVAL);
    REFUSED(mpx_get_send(NULL, &send), EINVAL);
    REFUSED(mpx_get_send(&receives[0], &send), EINVAL);
    REFUSED(mp_isend(bytes, 10, peer, &reg, &third), EINVAL);
    OK(mp_isend_post_on_stream(&first, stream));
    REFUSED(mp_isend_post_on_stream(&first, stream), EINVAL);
    OK(mp_wait(&first));
    /* Out of order: it is taken back, and has failed. */
    OK(mp_send_prepare(bytes, 10, peer, &reg, &third));
    REFUSED(mp_isend_post_on_stream(&third, stream), EINVAL);
    REFUSED(mp_wait(&third), EINVAL);
    OK(mp_isend_post_on_stream(&second, stream));
    OK(mp_wait(&second));
    /* A list that ends before it is posted takes its sends back. */
    OK(mp_desc_queue_alloc(&list));
    OK(mp_send_prepare(bytes, 10, peer, &reg, &first));
    OK(mp_desc_queue_add_send(&list, &first));
    REFUSED(mp_desc_queue_add_send(&list, &first), EINVAL);
    REFUSED(mp_desc_queue_add_wait_recv(&list, &first), EINVAL);
    REFUSED(mp_desc_queue_add_wait_send(&list, &receives[0]), EINVAL);
    OK(mp_desc_queue_add_wait_send(&list, &first));
    REFUSED(mp_wait(&first), EINVAL);
    OK(mp_desc_queue_free(&list));
    REFUSED(mp_wait(&first), MP_FAILURE);
    for (int i = 0; i < 2; i++) {
        OK(mp_isend(bytes, 10, peer, &reg, &first));
        OK(mp_wait(&first));
    }
    OK(mp_wait_all(4, receives));
    OK(cuStreamSynchronize(stream));
}

static void *wait_on(void *request)
{
    return (void *)(intptr_t)mp_wait((mp_request_t *)request);
}

static void *deregister(void *other)
{
    return (void *)(intptr_t)mp_deregister((mp_reg_t *)other);
}

static void two_threads(void)
{
    pthread_t threads[4];
    void *results[4];
    mp_reg_t other;
    mp_request_t receive, send;
    OK(mp_register(bytes, 10, &other));
    OK(mp_irecv(bytes, 10, peer, &reg, &receive));
    for (int i = 0; i < 4; i++)
        OK(pthread_create(&threads[i], NULL, i < 2 ? wait_on : deregister, i < 2 ? (void *)&receive : (void *)&other));
    OK(mp_isend(bytes, 10, peer, &reg, &send));
    for (int i = 0; i < 4; i++)
        OK(pthread_join(threads[i], &results[i]));
    TRUE(!results[0] && !results[1]);
    /* EBUSY while the other one ends it. */
    long refused = (intptr_t)results[2] + (intptr_t)results[3];
    TRUE(refused == EINVAL || refused == EBUSY);
    OK(mp_wait(&send));
}

enum { RACES = 200 };

static void *send_by_cpu(void *unused)
{
    mp_request_t send;
    for (int i = 0; i < RACES; i++) {
        OK(mp_isend(bytes, 10, peer, &reg, &send));
        OK(mp_wait(&send));
    }
    return unused;
}

static void *receive_all(void *unused)
{
    static mp_request_t receives[2 * RACES];
    for (int i = 0; i < 2 * RACES; i++)
        OK(mp_irecv(bytes + 10, 10, peer, &reg, &receives[i]));
    OK(mp_wait_all(2 * RACES, receives));
    return unused;
}

/* A thread sends by the CPU while another one sends by a stream. */
static void racing_sends(void)
{
    pthread_t threads[2];
    mp_request_t send;
    OK(pthread_create(&threads[0], NULL, send_by_cpu, NULL));
    OK(pthread_create(&threads[1], NULL, receive_all, NULL));
    for (int i = 0; i < RACES; i++) {
        OK(mp_isend_on_stream(bytes, 10, peer, &reg, &send, stream));
        OK(mp_wait(&send));
    }
    for (int i = 0; i < 2; i++)
        OK(pthread_join(threads[i], NULL));
}

/* A send that waits for room could wait for ever: nobody posts the sends that fill the queue. */
static void behind_prepared_sends(void)
{
    mp_request_t request;
    mp_desc_queue_t list;
    OK(mp_desc_queue_alloc(&list));
    OK(mpx_set_wait_limit(100));
    while (mp_send_prepare(bytes, 10, peer, &reg, &request) == 0)
        OK(mp_desc_queue_add_send(&list, &request));
    OK(mpx_set_wait_limit(0));
    REFUSED(mp_isend_on_stream(bytes, 10, peer, &reg, &request, stream), EINVAL);
    REFUSED(mp_isend(bytes, 10, peer, &reg, &request), EINVAL);
    OK(mp_desc_queue_free(&list));
}

static int is_about_to_wait;

static void *wait_for_the_end(void *request)
{
    __atomic_store_n(&is_about_to_wait, 1, __ATOMIC_RELAXED);
    REFUSED(mp_wait((mp_request_t *)request), MP_FAILURE);
    return request;
}

/* A thread waits for a message while another one ends the job. */
static void finalized(void)
{
    pthread_t thread;
    mp_request_t receive;
    OK(mp_irecv(bytes, 10, peer, &reg, &receive));
    OK(pthread_create(&thread, NULL, wait_for_the_end, &receive));
    while (!__atomic_load_n(&is_about_to_wait, __ATOMIC_RELAXED))
        OK(usleep(1000));
    OK(usleep(20000));
    mp_finalize();
    OK(pthread_join(thread, NULL));
}

static void forked(void)
{
    int status;
    pid_t child = fork();
    TRUE(child >= 0);
    if (child == 0) {
        mp_request_t request;
        REFUSED(mp_isend(bytes, 10, peer, &reg, &request), EACCES);
        REFUSED(mp_register(bytes, 10, &reg), EACCES);
        mp_finalize();
        TRUE(strstr(mpx_last_error(), "mp_finalize: "));
        _exit(0);
    }
    CHECK(waitpid(child, &status, 0), child);
    OK(status);
}

/* With a limit, what never comes is a failure. */
static void limited(void)
{
    mp_request_t receive, send;
    CUstream other;
    static uint32_t word;
    OK(mp_irecv(bytes, 10, peer, &reg, &receive));
    OK(mpx_set_wait_limit(200));
    REFUSED(mp_wait(&receive), ETIMEDOUT);
    REFUSED(mp_wait32(&word, 1, MP_WAIT_EQ), ETIMEDOUT);
    OK(cuStreamCreateWithPriority(&other, CU_STREAM_NON_BLOCKING, 0));
    OK(mp_wait32_on_stream(&word, 1, MP_WAIT_AND, other));
    OK(cuStreamSynchronize(other));
    REFUSED(mp_wait32_on_stream(&word, 1, MP_WAIT_AND, other), ETIMEDOUT);
    OK(cuStreamDestroy(other));
    /* More prepared sends than a queue holds, which nobody posts. */
    static mp_request_t many[10000];
    mp_desc_queue_t list;
    int count = 0, error;
    OK(mp_desc_queue_alloc(&list));
    while (!(error = mp_send_prepare(bytes, 10, peer, &reg, &many[count])))
        OK(mp_desc_queue_add_send(&list, &many[count++]));
    CHECK(error, ENOMEM);
    TRUE(count >= 512);
    OK(mp_desc_queue_free(&list));
    REFUSED(mp_wait(&many[0]), MP_FAILURE);
    OK(mpx_set_wait_limit(0));
    meet();
    OK(mp_isend(bytes, 10, peer, &reg, &send));
    OK(mp_wait(&receive));
    OK(mp_wait(&send));
}

/* A message that does not fit fails on both sides, and with it the connection; so does a rank that is gone. */
static void lost(int dies)
{
    mp_request_t receives[2], send = NULL;
    for (int i = 0; i < 2; i++)
        OK(mp_irecv(bytes, 10, peer, &reg, &receives[i]));
    if (rank == 0)
        OK(mp_wait_all_on_stream(2, receives, stream));
    meet();
    if (rank == 1 && dies)
        _exit(0);
    if (rank == 1)
        OK(mp_isend(bytes, 11, peer, &reg, &send));
    if (rank == 1)
        TRUE(mp_wait(&send) != 0);
    for (int i = 0; i < 2; i++)
        TRUE(mp_wait(&receives[i]) != 0);
    TRUE(mp_irecv(bytes, 10, peer, &reg, &receives[0]) != 0);
}

static int calls_back(void *self, const void *mine, size_t len, void *all)
{
    struct mp_exchange e = exchange();
    mp_window_t window;
    REFUSED(mp_init_with(&e, &peer, 1, 0, 0), MP_FAILURE);
    REFUSED(mp_window_create(bytes, sizeof bytes, &window), MP_FAILURE);
    return allgather(self, mine, len, all);
}

/* The exchange makes calls that need it. */
static void called_back(void)
{
    struct mp_exchange e = exchange();
    mp_window_t window;
    e.allgather = calls_back;
    OK(mp_init_with(&e, &peer, 1, MP_INIT_DEFAULT, 0));
    OK(mpx_set_wait_limit(100));
    OK(mp_window_create(bytes, sizeof bytes, &window));
    OK(mpx_set_wait_limit(0));
    OK(mp_window_destroy(&window));
    mp_finalize();
}

static void test(void)
{
    struct mp_exchange e = exchange();
    stream = make_stream();
    without_a_job();
    refused_jobs();
    OK(mp_register(bytes, sizeof bytes, &reg));
    handles();
    prepared();
    two_threads();
    racing_sends();
    behind_prepared_sends();
    forked();
    limited();
    lost(0);
    mp_finalize();
    called_back();
    OK(mp_init_with(&e, &peer, 1, MP_INIT_DEFAULT, 0));
    mp_request_t request;
    struct iovec block = {bytes, 10};
    REFUSED(mp_isend(bytes, 10, peer, &reg, &request), EINVAL);
    REFUSED(mp_irecvv(&block, 1, peer, &reg, &request), EINVAL);
    OK(mp_deregister(&reg));
    OK(mp_register(bytes, sizeof bytes, &reg));
    finalized();
    OK(mp_deregister(&reg));
    REFUSED(mp_deregister(&reg), EINVAL);
    OK(cuStreamDestroy(stream));
    /* A card learns of a dead peer only when it sends. */
    const char *preloaded = getenv("LD_PRELOAD");
    if (preloaded && strstr(preloaded, "libgdasync_card"))
        return;
    stream = make_stream();
    OK(mp_init_with(&e, &peer, 1, MP_INIT_DEFAULT, 0));
    OK(mp_register(bytes, sizeof bytes, &reg));
    lost(1);
}

int main(void)
{
    return two_ranks(test);
}
