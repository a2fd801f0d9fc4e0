/* What libnccl-rma-gda.so, the RMA plug-in for NCCL, tells a program.
 *
 * When a rank is lost, every stream that waits for the network goes on, in all ranks of the communicator: puts count as complete, and
 * signals as arrived. So after a stream was synchronized the program looks here before it trusts the data; on a failure it calls
 * ncclCommAbort. NCCL does not pass such failures on.
 */
#ifndef GDA_NCCL_H
#define GDA_NCCL_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define GDA_NCCL_CAUSE_BYTES 240

/* A communicator that has failed. */
typedef struct {
    uint64_t comm;     /* NCCL's hash of it, as in its log ("commHash") */
    uint64_t time;     /* nanoseconds since 1970 */
    int32_t rank;      /* the rank that is lost */
    int32_t own_rank;  /* this process's rank there */
    char cause[GDA_NCCL_CAUSE_BYTES];
} gda_nccl_failure;

/* The number of communicators of this process that have failed so far: compare it with that of the last look. Copies the first of them,
 * at most n, in the order of their failures. */
int gda_nccl_status(gda_nccl_failure *failures, int n);

/* An eventfd that becomes readable with each failure, after the streams were released, until it is read. Do not close it. -1 and errno if
 * there is none. */
int gda_nccl_eventfd(void);

#ifdef __cplusplus
}
#endif
#endif
