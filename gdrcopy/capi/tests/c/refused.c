/* gdr_open where it cannot work; the argument is the expected errno, or "skip" is printed if it does work. */

#include "check.h"

int main(int argc, char **argv) {
    gdr_t g;
    CHECK(argc == 2);
    errno = 0;
    g = gdr_open();
    if (g != NULL) {
        CHECK(strcmp(gdrx_backend(g), "host") != 0);
        puts("skip");
        return gdr_close(g);
    }
    if (errno != atoi(argv[1]))
        fprintf(stderr, "errno is %d\n", errno);
    return errno != atoi(argv[1]);
}
