/* A forked child has nothing of its parent's, takes nothing from it, and can have its own. */

#include "check.h"

#include <pthread.h>
#include <sys/syscall.h>

static volatile int stop;

static void child_of(struct mapped m) {
    struct mapped own;
    gdr_info_t info;
    gdr_mh_t mh;
    void *base;
    char word[4];
    unsigned long d;
    int flag, i;
    for (i = 0; i < 2; i++) {
        GIVES(EACCES, gdr_copy_to_mapping(m.mh, m.p, "abc", 4));
        GIVES(EACCES, gdr_copy_from_mapping(m.mh, word, m.p, 4));
        GIVES(EACCES, gdr_pin_buffer(m.g, m.d, SIZE, 0, 0, &mh));
        GIVES(EACCES, gdr_get_info(m.g, m.mh, &info));
        GIVES(EACCES, gdr_get_callback_flag(m.g, m.mh, &flag));
        GIVES(EACCES, gdr_map(m.g, m.mh, &base, SIZE));
        GIVES(EACCES, gdr_unmap(m.g, m.mh, m.base, SIZE));
        GIVES(EACCES, gdr_unpin_buffer(m.g, m.mh));
        GIVES(EACCES, gdrx_alloc(m.g, 0, SIZE, &d));
        GIVES(EACCES, gdr_close(m.g));
        CHECK(gdrx_backend(m.g) == NULL);
        GIVES(EINVAL, gdr_close((gdr_t)&m));
        /* The second time beside a library of its own. */
        if (i == 0)
            own = open_and_map();
    }
    CHECK(own.g != m.g && own.mh.h != m.mh.h);
    GIVES(EINVAL, gdr_unpin_buffer(own.g, (gdr_mh_t){own.mh.h + 1}));
    GIVES(EACCES, gdr_unpin_buffer(own.g, m.mh));
    GIVES(0, gdr_copy_to_mapping(own.mh, own.p, "own", 4));
    GIVES(0, gdr_copy_from_mapping(own.mh, word, own.p, 4));
    CHECK(memcmp(word, "own", 4) == 0);
    GIVES(0, gdr_close(own.g));
}

/* A library that was opened and not used yet. */
static void opened_before(void) {
    gdr_t g = gdr_open();
    unsigned long d;
    gdr_mh_t mh;
    pid_t child;
    CHECK(g != NULL);
    child = fork();
    if (child == 0) {
        struct mapped own;
        char word[4];
        GIVES(EACCES, gdrx_alloc(g, 0, SIZE, &d));
        GIVES(EACCES, gdr_pin_buffer(g, GPU_PAGE_SIZE, SIZE, 0, 0, &mh));
        CHECK(gdrx_backend(g) == NULL);
        own = open_and_map();
        GIVES(0, gdr_copy_to_mapping(own.mh, own.p, "own", 4));
        GIVES(0, gdrx_copy_out(own.g, word, own.d, 4));
        CHECK(memcmp(word, "own", 4) == 0);
        GIVES(EACCES, gdr_close(g));
        GIVES(0, gdr_close(own.g));
        exit(0);
    }
    CHECK(ended(child) == 0);
    GIVES(0, gdrx_alloc(g, 0, SIZE, &d));
    GIVES(0, gdr_pin_buffer(g, d, SIZE, 0, 0, &mh));
    GIVES(0, gdr_close(g));
}

/* Keeps the locks of the library busy. */
static void *worker(void *argument) {
    struct mapped *m = argument;
    while (!stop) {
        gdr_mh_t mh;
        GIVES(0, gdr_pin_buffer(m->g, m->d, SIZE, 0, 0, &mh));
        GIVES(0, gdr_unpin_buffer(m->g, mh));
    }
    return NULL;
}

int main(void) {
    struct mapped m;
    char word[4];
    pthread_t thread[2];
    pid_t child;
    int i;
    opened_before();
    m = open_and_map();
    GIVES(0, gdr_copy_to_mapping(m.mh, m.p, "par", 4));

    child = fork();
    if (child == 0) {
        child_of(m);
        exit(0);
    }
    CHECK(ended(child) == 0);

    /* Where the parent has the mapping the child has a hole. */
    child = fork();
    if (child == 0) {
        *(volatile char *)m.p = 'c';
        _exit(0);
    }
    CHECK(ended(child) == 128 + SIGSEGV);

    /* A grandchild has nothing of either. */
    child = fork();
    if (child == 0) {
        struct mapped own = open_and_map();
        child = fork();
        if (child == 0) {
            child_of(m);
            GIVES(EACCES, gdr_unpin_buffer(own.g, own.mh));
            GIVES(EACCES, gdr_close(own.g));
            exit(0);
        }
        CHECK(ended(child) == 0);
        GIVES(0, gdr_copy_to_mapping(own.mh, own.p, "chi", 4));
        GIVES(0, gdr_close(own.g));
        exit(0);
    }
    CHECK(ended(child) == 0);

    /* A child that the C library does not know of: no handlers have run in it. */
    child = (pid_t)syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0);
    if (child == 0) {
        struct mapped own;
        GIVES(EACCES, gdr_unmap(m.g, m.mh, m.base, SIZE));
        GIVES(EACCES, gdr_unpin_buffer(m.g, m.mh));
        GIVES(EACCES, gdr_close(m.g));
        own = open_and_map();
        GIVES(EACCES, gdr_copy_to_mapping(m.mh, m.p, "abc", 4));
        GIVES(EACCES, gdr_unpin_buffer(own.g, m.mh));
        GIVES(0, gdr_copy_to_mapping(own.mh, own.p, "own", 4));
        GIVES(0, gdr_close(own.g));
        _exit(0);
    }
    CHECK(ended(child) == 0);

    /* Nothing of it happened here. */
    GIVES(0, gdr_copy_from_mapping(m.mh, word, m.p, 4));
    CHECK(memcmp(word, "par", 4) == 0);

    /* Threads that the child does not have hold no lock that it needs. */
    for (i = 0; i < 2; i++)
        CHECK(pthread_create(&thread[i], NULL, worker, &m) == 0);
    for (i = 0; i < 50; i++) {
        child = fork();
        if (child == 0) {
            child_of(m);
            _exit(0);
        }
        CHECK(ended(child) == 0);
    }
    stop = 1;
    for (i = 0; i < 2; i++)
        CHECK(pthread_join(thread[i], NULL) == 0);
    GIVES(0, gdr_unmap(m.g, m.mh, m.base, SIZE));
    GIVES(0, gdr_close(m.g));
    return 0;
}
