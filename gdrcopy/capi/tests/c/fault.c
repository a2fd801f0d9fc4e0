/* Touches a mapping after what the argument names took it away: must die of it. */

#include "check.h"

int main(int argc, char **argv) {
    struct mapped m = open_and_map();
    CHECK(argc == 2);
    *(volatile char *)m.p = 1;
    if (strcmp(argv[1], "unmap") == 0)
        GIVES(0, gdr_unmap(m.g, m.mh, m.base, SIZE));
    else if (strcmp(argv[1], "unpin") == 0) {
        GIVES(0, gdr_unpin_buffer(m.g, m.mh));
        GIVES(EINVAL, gdr_unmap(m.g, m.mh, m.base, SIZE));
    } else if (strcmp(argv[1], "close") == 0)
        GIVES(0, gdr_close(m.g));
    else
        return 2;
    *(volatile char *)m.p = 2;
    return 0;
}
