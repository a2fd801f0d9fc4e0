/* Touches a mapping after what the argument names took it away: must die of it. */

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "check.h"

#include <sys/mman.h>

/* The addresses are kept from everybody else, and a child has a hole there. */
static void stays_taken(struct mapped m) {
    pid_t child;
    void *other = mmap(m.base, SIZE, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
    CHECK(other == MAP_FAILED && errno == EEXIST);
    child = fork();
    if (child == 0) {
        *(volatile char *)m.p = 3;
        _exit(0);
    }
    CHECK(ended(child) == 128 + SIGSEGV);
}

int main(int argc, char **argv) {
    struct mapped m = open_and_map();
    CHECK(argc == 2);
    *(volatile char *)m.p = 1;
    if (strcmp(argv[1], "unmap") == 0)
        GIVES(0, gdr_unmap(m.g, m.mh, m.base, SIZE));
    else if (strcmp(argv[1], "unpin") == 0) {
        GIVES(0, gdr_unpin_buffer(m.g, m.mh));
        GIVES(EINVAL, gdr_unmap(m.g, m.mh, m.base, SIZE));
        stays_taken(m);
    } else if (strcmp(argv[1], "close") == 0) {
        GIVES(0, gdr_close(m.g));
        GIVES(EINVAL, gdr_unmap(m.g, m.mh, m.base, SIZE));
        stays_taken(m);
    } else
        return 2;
    *(volatile char *)m.p = 2;
    return 0;
}
