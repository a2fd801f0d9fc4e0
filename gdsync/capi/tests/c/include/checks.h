/* For the test programs of all C libraries: checks that end the program with the line that failed and REASON, the library's text, which
 * each program defines; and a CUDA stream. */

#ifndef CHECKS_H
#define CHECKS_H

#include <cuda.h>
#include <stdio.h>
#include <stdlib.h>

/* A call must return this. */
#define CHECK(call, expected)                                                                                          \
    do {                                                                                                               \
        long got_ = (long)(call), expected_ = (long)(expected);                                                        \
        if (got_ != expected_) {                                                                                       \
            fprintf(stderr, "%s:%d: %s is %ld, not %ld (%s)\n", __FILE__, __LINE__, #call, got_, expected_, REASON);   \
            exit(1);                                                                                                   \
        }                                                                                                              \
    } while (0)

#define OK(call) CHECK(call, 0)
#define TRUE(condition) CHECK(!(condition), 0)

/* A stream of GPU 0, whose primary context becomes the current one. */
static inline CUstream make_stream(void)
{
    CUstream stream;
    CUdevice device;
    CUcontext context;
    OK(cuInit(0));
    OK(cuDeviceGet(&device, 0));
    OK(cuDevicePrimaryCtxRetain(&context, device));
    OK(cuCtxPushCurrent(context));
    OK(cuStreamCreateWithPriority(&stream, CU_STREAM_NON_BLOCKING, 0));
    return stream;
}

#endif
