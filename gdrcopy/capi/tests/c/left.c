/* Leaves mappings to what the argument names, many times: the kernel must not have one for each. */

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "check.h"

#include <dirent.h>
#include <fcntl.h>
#include <setjmp.h>

#define ROUNDS 1000

static sigjmp_buf after_fault;

static void on_fault(int signal) {
    (void)signal;
    siglongjmp(after_fault, 1);
}

static int lines_of_maps(void) {
    int c, lines = 0;
    FILE *maps = fopen("/proc/self/maps", "r");
    CHECK(maps != NULL);
    while ((c = getc(maps)) != EOF)
        lines += c == '\n';
    fclose(maps);
    return lines;
}

static int descriptors(void) {
    int n = 0;
    DIR *directory = opendir("/proc/self/fd");
    CHECK(directory != NULL);
    while (readdir(directory) != NULL)
        n++;
    closedir(directory);
    return n;
}

/* An address that is left. */
static char *leave(int unpin) {
    struct mapped m = open_and_map();
    *(volatile char *)m.p = 1;
    if (unpin)
        GIVES(0, gdr_unpin_buffer(m.g, m.mh));
    GIVES(0, gdr_close(m.g));
    return m.p;
}

static void is_taken(char *p) {
    if (sigsetjmp(after_fault, 1) == 0) {
        *(volatile char *)p = 2;
        CHECK(!"the access raised no signal");
    }
}

int main(int argc, char **argv) {
    static char *left[ROUNDS];
    int i, unpin, maps, files, fd;
    struct sigaction action;
    CHECK(argc == 2);
    unpin = strcmp(argv[1], "unpin") == 0;
    memset(&action, 0, sizeof action);
    action.sa_handler = on_fault;
    CHECK(sigaction(SIGBUS, &action, NULL) == 0);

    /* What is made once. */
    leave(unpin);
    maps = lines_of_maps();
    files = descriptors();
    for (i = 0; i < ROUNDS; i++)
        left[i] = leave(unpin);
    CHECK(lines_of_maps() < maps + 20);
    CHECK(descriptors() == files);
    for (i = 0; i < ROUNDS; i++)
        is_taken(left[i]);

    /* A daemon closes all descriptors, and opens other files under their numbers. */
    for (fd = 3; fd < 100; fd++) {
        int file = open("/proc/self/exe", O_RDONLY);
        CHECK(file >= 0);
        CHECK(dup2(file, fd) == fd);
        if (file != fd)
            close(file);
    }
    is_taken(leave(unpin));
    return 0;
}
