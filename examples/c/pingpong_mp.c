/* Ping-pong between two ranks on CUDA streams, with libmp: the streams send and wait, the CPU checks each round.
 *
 * cc -DMP_NO_MPI pingpong_mp.c -o pingpong_mp -I/usr/local/cuda/include $(pkg-config --cflags --libs mp) -lcuda
 * Start two by torchrun --no-python, or with RANK=0|1 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500.
 */

#include <mp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { BYTES = 4096, ROUNDS = 1000 };

#define TRY(call)                                                                                                      \
    do {                                                                                                               \
        if (call) { /* libmp has printed why */                                                                        \
            fprintf(stderr, "%s failed\n", #call);                                                                     \
            exit(1);                                                                                                   \
        }                                                                                                              \
    } while (0)

int main(void)
{
    const char *number = getenv("RANK"); /* with MPI: MPI_Comm_rank */
    if (!number) {
        fprintf(stderr, "RANK is not set: start two ranks, as torchrun does\n");
        return 1;
    }
    int rank = atoi(number), peer = 1 - rank;
    char *out = malloc(BYTES), *in = malloc(BYTES); /* memory of cuMemAlloc goes the same way */
    mp_reg_t out_reg, in_reg;
    CUdevice device;
    CUcontext context;
    CUstream stream;

    TRY(cuInit(0));
    TRY(cuDeviceGet(&device, 0));
    TRY(cuDevicePrimaryCtxRetain(&context, device));
    TRY(cuCtxPushCurrent(context));
    TRY(cuStreamCreateWithPriority(&stream, CU_STREAM_NON_BLOCKING, 0));
    TRY(mp_init_env(&peer, 1, MP_INIT_DEFAULT, 0)); /* with MPI: mp_init(MPI_COMM_WORLD, ...) */
    TRY(mp_register(out, BYTES, &out_reg));
    TRY(mp_register(in, BYTES, &in_reg));

    struct timespec start, end;
    clock_gettime(CLOCK_MONOTONIC, &start);
    for (int round = 0; round < ROUNDS; round++) {
        mp_request_t received, sent;
        memset(out, round + rank, BYTES);
        TRY(mp_irecv(in, BYTES, peer, &in_reg, &received));
        if (rank == 0)
            TRY(mp_isend_on_stream(out, BYTES, peer, &out_reg, &sent, stream));
        TRY(mp_wait_on_stream(&received, stream));
        if (rank == 1) /* when the stream has the message */
            TRY(mp_isend_on_stream(out, BYTES, peer, &out_reg, &sent, stream));
        TRY(mp_wait(&received));
        TRY(mp_wait(&sent)); /* the next round writes what was sent */
        for (int i = 0; i < BYTES; i++) {
            if (in[i] != (char)(round + peer)) {
                fprintf(stderr, "round %d: wrong bytes\n", round);
                return 1;
            }
        }
    }
    clock_gettime(CLOCK_MONOTONIC, &end);
    double seconds = (double)(end.tv_sec - start.tv_sec) + (double)(end.tv_nsec - start.tv_nsec) / 1e9;
    if (rank == 0)
        printf("%d rounds of %d bytes, %.1f us each way\n", ROUNDS, BYTES, seconds * 1e6 / ROUNDS / 2);

    TRY(mp_deregister(&out_reg));
    TRY(mp_deregister(&in_reg));
    mp_finalize();
    TRY(cuStreamDestroy(stream));
    free(out);
    free(in);
    return 0;
}
