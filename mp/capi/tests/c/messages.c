/* Every way to send, receive, put and get between two ranks. */

#include "check.h"

enum { COUNT = 64, LEN = 48, BYTES = COUNT * LEN };

static CUstream stream;
static char in[BYTES], out[BYTES];
static mp_reg_t in_reg, out_reg;
static mp_request_t receives[COUNT], sends[COUNT];

/* Byte `i` of what a rank sends in a round. */
static char byte_of(int of, int round, int i)
{
    return (char)(17 * of + 5 * round + i);
}

static void fill(int round)
{
    memset(in, 0, BYTES);
    for (int i = 0; i < BYTES; i++)
        out[i] = byte_of(rank, round, i);
}

static void check_in(int round, int len)
{
    for (int i = 0; i < BYTES; i++)
        CHECK(in[i], i < len ? byte_of(peer, round, i) : 0);
}

static void receive_all(void)
{
    for (int i = 0; i < COUNT; i++)
        OK(mp_irecv(in + LEN * i, LEN, peer, &in_reg, &receives[i]));
}

static void wait_all(void)
{
    OK(mp_wait_all(COUNT, receives));
    OK(mp_wait_all(COUNT, sends));
}

static void by_cpu(void)
{
    fill(1);
    /* Sends come before receives: the device repeats them. */
    for (int i = 0; i < COUNT; i++)
        OK(mp_isend(out + LEN * i, LEN, peer, &out_reg, &sends[i]));
    CHECK(mp_progress_all(COUNT, sends) <= COUNT, 1);
    meet();
    receive_all();
    OK(mp_wait_all(COUNT, receives));
    while (mp_progress_all(COUNT, sends) < COUNT)
        ;
    OK(mp_wait(&sends[0]));
    /* Ended requests are complete. */
    CHECK(mp_progress_all(COUNT, sends), COUNT);
    OK(mp_wait_all(COUNT, sends));
    OK(mp_wait_all(COUNT, receives));
    check_in(1, BYTES);
}

static void vectors(void)
{
    struct iovec from[3] = {{out, 5}, {out + 5, 100}, {out + 105, 7}}, to[2] = {{in, 60}, {in + 60, 60}};
    fill(2);
    meet();
    OK(mp_irecvv(to, 2, peer, &in_reg, &receives[0]));
    OK(mp_isendv(from, 3, peer, &out_reg, &sends[0]));
    OK(mp_wait(&sends[0]));
    OK(mp_wait(&receives[0]));
    check_in(2, 112);
    fill(3);
    meet();
    OK(mp_irecvv(to, 2, peer, &in_reg, &receives[0]));
    OK(mp_irecv(in + 120, 8, peer, &in_reg, &receives[1]));
    OK(mp_irecv(in, 0, peer, &in_reg, &receives[2]));
    OK(mp_isendv_on_stream(from, 3, peer, &out_reg, &sends[0], stream));
    from[0].iov_base = out + 120;
    from[0].iov_len = 8;
    OK(mp_sendv_prepare(from, 1, peer, &out_reg, &sends[1]));
    OK(mp_isend_post_on_stream(&sends[1], stream));
    OK(mp_isend_on_stream(out, 0, peer, &out_reg, &sends[2], stream));
    OK(mp_wait_all(3, sends));
    OK(mp_wait_all(3, receives));
    memset(in + 112, 0, 8);
    for (int i = 120; i < 128; i++) {
        CHECK(in[i], byte_of(peer, 3, i));
        in[i] = 0;
    }
    check_in(3, 112);
}

/* Each message is sent when the one before has come: the stream runs ahead of the CPU. */
static void in_stream_order(void)
{
    fill(4);
    receive_all();
    meet();
    for (int i = 0; i < COUNT; i++) {
        if (rank == 1)
            OK(mp_wait_on_stream(&receives[i], stream));
        if (i % 2)
            OK(mp_send_on_stream(out + LEN * i, LEN, peer, &out_reg, &sends[i], stream));
        else
            OK(mp_isend_on_stream(out + LEN * i, LEN, peer, &out_reg, &sends[i], stream));
        if (rank == 0)
            OK(mp_wait_on_stream(&receives[i], stream));
    }
    OK(mp_wait_all_on_stream(COUNT, sends, stream));
    OK(cuStreamSynchronize(stream));
    check_in(4, BYTES);
    wait_all();
}

static void prepared(void)
{
    fill(5);
    receive_all();
    meet();
    for (int i = 0; i < COUNT; i++)
        OK(mp_send_prepare(out + LEN * i, LEN, peer, &out_reg, &sends[i]));
    OK(mp_send_post_on_stream(&sends[0], stream));
    OK(mp_isend_post_on_stream(&sends[1], stream));
    OK(mp_send_post_all_on_stream(10, sends + 2, stream));
    OK(mp_isend_post_all_on_stream(COUNT - 12, sends + 12, stream));
    wait_all();
    check_in(5, BYTES);
}

static void puts_and_gets(void)
{
    mp_window_t window;
    mp_request_t put;
    uint32_t flag = 7;
    mp_reg_t flag_reg;
    OK(mp_register(&flag, sizeof flag, &flag_reg));
    OK(mp_window_create(in, BYTES, &window));
    /* Data, and then a word that tells of it. */
    fill(6);
    in[BYTES - 4] = 0;
    meet();
    OK(mp_iput(out, BYTES - 4, &out_reg, peer, 0, &window, &put, 0));
    OK(mp_iput(&flag, 4, &flag_reg, peer, BYTES - 4, &window, &sends[0], MP_PUT_INLINE | MP_PUT_NOWAIT));
    flag++;
    OK(mp_wait32((uint32_t *)(in + BYTES - 4), 7, MP_WAIT_EQ));
    OK(mp_wait(&put));
    memset(in + BYTES - 4, 0, 4);
    check_in(6, BYTES - 4);
    /* The same in stream order; the peer's stream waits for the word. */
    fill(7);
    meet();
    OK(mp_put_prepare(out, 100, &out_reg, peer, 0, &window, &sends[0], 0));
    OK(mp_put_prepare(out + 100, 100, &out_reg, peer, 100, &window, &sends[1], MP_PUT_NOWAIT));
    OK(mp_put_prepare(out + 200, 100, &out_reg, peer, 200, &window, &sends[2], MP_PUT_NOWAIT));
    OK(mp_iput_post_on_stream(&sends[0], stream));
    OK(mp_iput_post_all_on_stream(2, sends + 1, stream));
    OK(mp_iput_on_stream(&flag, 4, &flag_reg, peer, BYTES - 4, &window, &put, MP_PUT_INLINE, stream));
    flag++;
    OK(mp_wait_dword_geq_on_stream((uint32_t *)(in + BYTES - 4), 8, stream));
    OK(cuStreamSynchronize(stream));
    OK(mp_wait(&sends[0]));
    CHECK(mp_progress_all(2, sends + 1), 2);
    OK(mp_wait(&put));
    memset(in + BYTES - 4, 0, 4);
    check_in(7, 300);
    /* The peer's memory, both ways. */
    fill(8);
    memcpy(in, out, BYTES);
    meet();
    memset(out, 0, BYTES);
    OK(mp_iget(out, 1000, &out_reg, peer, 0, &window, &sends[0]));
    OK(mp_wait(&sends[0]));
    OK(mp_iget_on_stream(out + 1000, BYTES - 1000, &out_reg, peer, 1000, &window, &sends[0], stream));
    OK(mp_wait_on_stream(&sends[0], stream));
    OK(cuStreamSynchronize(stream));
    OK(mp_wait(&sends[0]));
    for (int i = 0; i < BYTES; i++)
        CHECK(out[i], byte_of(peer, 8, i));
    meet();
    OK(mp_window_destroy(&window));
    OK(mp_deregister(&flag_reg));
}

static void lists(void)
{
    static uint32_t words[3];
    mp_desc_queue_t list;
    OK(mp_desc_queue_alloc(&list));
    for (int round = 0; round < 3; round++) {
        fill(9 + round);
        memset(words, 0, sizeof words);
        receive_all();
        meet();
        OK(mp_desc_queue_add_wait_value32(&list, &words[0], 1, 0));
        for (int i = 0; i < COUNT; i++) {
            OK(mp_send_prepare(out + LEN * i, LEN, peer, &out_reg, &sends[i]));
            OK(mp_desc_queue_add_send(&list, &sends[i]));
        }
        OK(mp_desc_queue_add_write_value32(&list, &words[1], 2));
        OK(mp_desc_queue_add_wait_send(&list, &sends[COUNT - 1]));
        OK(mp_desc_queue_add_wait_recv(&list, &receives[COUNT - 1]));
        OK(mp_desc_queue_add_write_value32(&list, &words[2], 3));
        OK(mp_desc_queue_post_on_stream(stream, &list, 0));
        OK(__atomic_load_n(&words[1], __ATOMIC_ACQUIRE));
        __atomic_store_n(&words[0], 1, __ATOMIC_RELEASE);
        OK(mp_wait32(&words[2], 3, MP_WAIT_GEQ));
        CHECK(words[1], 2);
        check_in(9 + round, BYTES);
        wait_all();
    }
    /* An empty list. */
    OK(mp_desc_queue_post_on_stream(stream, &list, 0));
    OK(mp_desc_queue_free(&list));
    TRUE(list == NULL);
}

/* What a kernel does with words. */
static void run_send(struct mp_send_words *send)
{
    __atomic_store_n(send->dbrec_ptr, send->dbrec_value, __ATOMIC_RELEASE);
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    __atomic_store_n(send->db_ptr, send->db_value, __ATOMIC_RELEASE);
}

static int holds(uint32_t word, struct mp_wait_words *wait)
{
    switch (wait->cond) {
    case 1:
        return word == wait->sema_value;
    case 2:
        return (word & wait->sema_value) != 0;
    default:
        CHECK(wait->cond, 3);
        return ~(word | wait->sema_value) != 0;
    }
}

static void run_wait(struct mp_wait_words *wait)
{
    while (!holds(__atomic_load_n(wait->sema_ptr, __ATOMIC_ACQUIRE), wait))
        ;
    __atomic_store_n(wait->flag_ptr, wait->flag_value, __ATOMIC_RELEASE);
}

static void by_words(void)
{
    static uint32_t word = 5;
    struct mp_word_words of_word;
    struct mp_send_words send;
    struct mp_wait_words wait[2];
    fill(12);
    OK(mpx_get_word(&word, 5, &of_word));
    CHECK(*of_word.ptr, of_word.value);
    for (int i = 0; i < 20; i++) {
        OK(mp_irecv(in + LEN * i, LEN, peer, &in_reg, &receives[i]));
        meet();
        OK(mp_send_prepare(out + LEN * i, LEN, peer, &out_reg, &sends[i]));
        OK(mpx_get_send(&sends[i], &send));
        OK(mpx_get_wait(&sends[i], &wait[0]));
        OK(mpx_get_wait(&receives[i], &wait[1]));
        run_send(&send);
        for (int w = 0; w < 2; w++)
            run_wait(&wait[w]);
        OK(mp_wait(&sends[i]));
        OK(mp_wait(&receives[i]));
    }
    check_in(12, 20 * LEN);
    /* The CPU has seen the completion before: the words say so. */
    meet();
    OK(mp_irecv(in, LEN, peer, &in_reg, &receives[0]));
    OK(mp_isend(out, LEN, peer, &out_reg, &sends[0]));
    while (mp_progress_all(1, receives) < 1)
        ;
    OK(mpx_get_wait(&receives[0], &wait[0]));
    run_wait(&wait[0]);
    OK(mp_wait(&sends[0]));
    OK(mp_wait(&receives[0]));
}

/* Each rank is a peer of its own, too. */
static void to_oneself(void)
{
    mp_window_t window;
    OK(mp_window_create(in, BYTES, &window));
    fill(14);
    OK(mp_irecv(in, LEN, rank, &in_reg, &receives[0]));
    OK(mp_isend(out, LEN, rank, &out_reg, &sends[0]));
    OK(mp_irecv(in + LEN, LEN, rank, &in_reg, &receives[1]));
    OK(mp_isend_on_stream(out + LEN, LEN, rank, &out_reg, &sends[1], stream));
    OK(mp_wait_on_stream(&receives[1], stream));
    OK(mp_iput(out + 2 * LEN, LEN, &out_reg, rank, 2 * LEN, &window, &sends[2], 0));
    OK(mp_wait_all(3, sends));
    OK(mp_wait_all(2, receives));
    for (int i = 0; i < BYTES; i++)
        CHECK(in[i], i < 3 * LEN ? byte_of(rank, 14, i) : 0);
    OK(mp_window_destroy(&window));
}

/* More than the queues hold. */
static void floods(void)
{
    enum { MANY = 3000 };
    static mp_request_t all[MANY];
    fill(13);
    meet();
    if (rank == 0) {
        for (int i = 0; i < MANY; i++)
            OK(mp_isend_on_stream(out, 4, peer, &out_reg, &all[i], stream));
    } else {
        for (int i = 0; i < MANY; i++)
            OK(mp_irecv(in, 4, peer, &in_reg, &all[i]));
    }
    OK(mp_wait_all(MANY, all));
}

static void test(void)
{
    int peers[2] = {peer, rank}, flags = getenv("INIT_FLAGS") ? atoi(getenv("INIT_FLAGS")) : MP_INIT_DEFAULT;
    struct mp_exchange e = exchange();
    stream = make_stream();
    /* As a launcher tells it. */
    setenv("RANK", rank ? "1" : "0", 1);
    for (int round = 0; round < 2; round++) {
        if (getenv("MASTER_ADDR"))
            OK(mp_init_env(peers, 2, flags, 0));
        else
            OK(mp_init_with(&e, peers, 2, flags, 0));
        OK(mp_register(in, BYTES, &in_reg));
        OK(mp_register(out, BYTES, &out_reg));
        by_cpu();
        vectors();
        in_stream_order();
        prepared();
        puts_and_gets();
        lists();
        /* Here the CPU plays the kernel, and reads the queues. */
        if (flags == MP_INIT_DEFAULT)
            by_words();
        floods();
        to_oneself();
        /* Registrations may outlive the job. */
        if (round == 1) {
            OK(mp_deregister(&in_reg));
            OK(mp_deregister(&out_reg));
        }
        mp_finalize();
        OK(*mpx_last_error());
        if (round == 0) {
            OK(mp_deregister(&in_reg));
            OK(mp_deregister(&out_reg));
        }
    }
    CHECK(released, getenv("MASTER_ADDR") ? 0 : 2);
    OK(cuStreamDestroy(stream));
}

int main(void)
{
    return two_ranks(test);
}
