/* What the test programs share: they end with status 1 and a line on standard error at the first wrong answer. */

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

#include <gdrapi.h>

#define CHECK(condition)                                                                                               \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition);                                    \
            exit(1);                                                                                                   \
        }                                                                                                              \
    } while (0)

#define GIVES(code, call)                                                                                              \
    do {                                                                                                               \
        int got_ = (call);                                                                                             \
        if (got_ != (code)) {                                                                                          \
            fprintf(stderr, "%s:%d: %s gives %d (%s), not %s\n", __FILE__, __LINE__, #call, got_, strerror(got_),      \
                    #code);                                                                                            \
            exit(1);                                                                                                   \
        }                                                                                                              \
    } while (0)

#define SIZE (3 * GPU_PAGE_SIZE)

/* One buffer, pinned and mapped. */
struct mapped {
    gdr_t g;
    unsigned long d;
    gdr_mh_t mh;
    void *base;
    char *p;
};

static inline struct mapped open_and_map(void) {
    struct mapped m;
    gdr_info_t info;
    m.g = gdr_open();
    CHECK(m.g != NULL);
    GIVES(0, gdrx_alloc(m.g, 0, SIZE, &m.d));
    GIVES(0, gdr_pin_buffer(m.g, m.d, SIZE, 0, 0, &m.mh));
    GIVES(0, gdr_map(m.g, m.mh, &m.base, SIZE));
    GIVES(0, gdr_get_info(m.g, m.mh, &info));
    m.p = (char *)m.base + (m.d - info.va);
    return m;
}

/* Waits for a child: its exit status, or 128 and the signal that ended it, as in the shell. */
static inline int ended(pid_t child) {
    int status;
    CHECK(child > 0);
    CHECK(waitpid(child, &status, 0) == child);
    return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
}
