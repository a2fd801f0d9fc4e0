/* Provokes one message of each kind that can be had without a GPU. */

#include "check.h"

int main(void) {
    gdr_t g = gdr_open();
    gdr_mh_t mh;
    unsigned long d;
    char byte = 0;
    CHECK(g != NULL);
    GIVES(0, gdrx_alloc(g, 0, SIZE, &d));
    GIVES(EINVAL, gdr_pin_buffer_v2(g, d, SIZE, 8, &mh));
    GIVES(0, gdr_pin_buffer(g, d, SIZE, 7, 0, &mh));
    GIVES(EINVAL, gdr_copy_to_mapping(mh, &byte, &byte, 1));
    GIVES(0, gdr_unpin_buffer(g, mh));
    GIVES(EINVAL, gdr_unpin_buffer(g, mh));
    GIVES(0, gdr_close(g));
    return 0;
}
