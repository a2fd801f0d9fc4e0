/* Sizes and offsets as the C compiler has them. */
#include <gda_nccl.h>
#include <stddef.h>
#include <stdio.h>

#define OFFSET(type, member) printf("offsetof " #type " " #member " %zu\n", offsetof(type, member))

int main(void) {
    printf("sizeof gda_nccl_failure %zu\n", sizeof(gda_nccl_failure));
    OFFSET(gda_nccl_failure, rank);
    OFFSET(gda_nccl_failure, own_rank);
    OFFSET(gda_nccl_failure, cause);
    return 0;
}
