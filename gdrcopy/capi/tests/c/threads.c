/* All functions from all threads. */

#include "check.h"

#include <dirent.h>
#include <pthread.h>

#define THREADS 6
#define ROUNDS 300

static gdr_t g;
static unsigned long d;
static pthread_barrier_t start;

static void together(void *(*work)(void *), void *argument) {
    pthread_t thread[THREADS];
    int i;
    for (i = 0; i < THREADS; i++)
        CHECK(pthread_create(&thread[i], NULL, work, (char *)argument + i) == 0);
    for (i = 0; i < THREADS; i++)
        CHECK(pthread_join(thread[i], NULL) == 0);
}

static char place[THREADS];

/* Each thread has a part of the memory and pins of its own. */
static void *lives(void *argument) {
    size_t me = (size_t)((char *)argument - place), i;
    for (i = 0; i < ROUNDS; i++) {
        unsigned long at = d + me * 100;
        gdr_mh_t mh;
        gdr_info_t info;
        void *base;
        char out[100], in[100], *p;
        memset(out, (int)(me * 40 + i), sizeof out);
        GIVES(0, gdr_pin_buffer(g, at, sizeof out, 0, 0, &mh));
        GIVES(0, gdr_map(g, mh, &base, sizeof out));
        GIVES(0, gdr_get_info(g, mh, &info));
        p = (char *)base + (at - info.va);
        GIVES(0, gdr_copy_to_mapping(mh, p, out, sizeof out));
        GIVES(0, gdr_copy_from_mapping(mh, in, p, sizeof in));
        CHECK(memcmp(out, in, sizeof in) == 0);
        if (i % 2)
            GIVES(0, gdr_unmap(g, mh, base, sizeof out));
        GIVES(0, gdr_unpin_buffer(g, mh));
    }
    return NULL;
}

static gdr_mh_t shared;
static void *shared_base;
static int unmapped, unpinned;

/* Of several threads that give back the same handle one succeeds. */
static void *races(void *argument) {
    int result;
    (void)argument;
    pthread_barrier_wait(&start);
    result = gdr_unmap(g, shared, shared_base, SIZE);
    CHECK(result == 0 || result == EINVAL);
    __atomic_fetch_add(&unmapped, result == 0, __ATOMIC_RELAXED);
    pthread_barrier_wait(&start);
    result = gdr_unpin_buffer(g, shared);
    CHECK(result == 0 || result == EINVAL);
    __atomic_fetch_add(&unpinned, result == 0, __ATOMIC_RELAXED);
    return NULL;
}

static gdr_t closing;
static unsigned long closing_d;
static int closed;

/* One of them closes while the others pin: nothing stays behind. */
static void *closes(void *argument) {
    int me = (int)((char *)argument - place), i;
    pthread_barrier_wait(&start);
    for (i = 0; i < 10; i++) {
        gdr_mh_t mh;
        void *base;
        if (me < 2 && i == 5) {
            int result = gdr_close(closing);
            CHECK(result == 0 || result == EINVAL);
            __atomic_fetch_add(&closed, result == 0, __ATOMIC_RELAXED);
        } else if (gdr_pin_buffer(closing, closing_d, 64, 0, 0, &mh) == 0) {
            int result = gdr_map(closing, mh, &base, 64);
            CHECK(result == 0 || result == EINVAL);
        }
    }
    return NULL;
}

/* Takes a mapping away, for which the library opens a file once. */
static void leaves_a_mapping(void) {
    GIVES(0, gdr_pin_buffer(g, d, SIZE, 0, 0, &shared));
    GIVES(0, gdr_map(g, shared, &shared_base, SIZE));
    GIVES(0, gdr_unpin_buffer(g, shared));
}

/* How many files this process has open; pins on the host backend hold one each. */
static int files(void) {
    DIR *directory = opendir("/proc/self/fd");
    int count = 0;
    CHECK(directory != NULL);
    while (readdir(directory) != NULL)
        count++;
    closedir(directory);
    return count;
}

int main(void) {
    int i, before;
    g = gdr_open();
    CHECK(g != NULL);
    GIVES(0, gdrx_alloc(g, 0, SIZE, &d));
    CHECK(pthread_barrier_init(&start, NULL, THREADS) == 0);
    together(lives, place);

    for (i = 0; i < 50; i++) {
        GIVES(0, gdr_pin_buffer(g, d, SIZE, 0, 0, &shared));
        GIVES(0, gdr_map(g, shared, &shared_base, SIZE));
        unmapped = unpinned = 0;
        together(races, place);
        CHECK(unmapped == 1 && unpinned == 1);
    }

    leaves_a_mapping();
    before = files();
    for (i = 0; i < 100; i++) {
        closing = gdr_open();
        CHECK(closing != NULL);
        GIVES(0, gdrx_alloc(closing, 0, SIZE, &closing_d));
        closed = 0;
        together(closes, place);
        CHECK(closed == 1);
        GIVES(EINVAL, gdr_close(closing));
    }
    CHECK(files() == before);
    GIVES(0, gdr_close(g));
    return 0;
}
