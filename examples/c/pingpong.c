/* Ping-pong between two ranks on host streams, with libgdasync: the streams send and wait, the CPU checks each round.
 *
 * cc pingpong.c -o pingpong $(pkg-config --cflags --libs gdasync)
 * Start two by mpirun or srun, or with RANK=0|1 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500.
 */

#include <gdasync.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { BYTES = 4096, ROUNDS = 1000 };
static const int64_t MINUTE = (int64_t)60 * 1000000000;

#define TRY(call)                                                                                                      \
    do {                                                                                                               \
        if ((call) < 0) {                                                                                              \
            fprintf(stderr, "%s\n", gda_last_error());                                                                 \
            exit(1);                                                                                                   \
        }                                                                                                              \
    } while (0)

int main(void)
{
    struct gda_config config = {0};
    gda_ctx_t ctx;
    gda_comm_t comm;
    gda_stream_t stream;
    gda_mem_t mem;
    char *bytes = calloc(2, BYTES);

    config.struct_size = sizeof config;
    config.gpu = -1; /* for a CUDA stream: its device, and gda_stream_open(ctx, stream, 0, 0, ...) */
    TRY(gda_open(&config, &ctx));
    TRY(gda_comm_create(ctx, NULL, 0, MINUTE, &comm, NULL));
    TRY(gda_mem_reg(comm, bytes, 2 * BYTES, 0, &mem));
    TRY(gda_stream_open(ctx, NULL, GDA_STREAM_HOST, 0, &stream));

    int rank = gda_comm_rank(comm), peer = 1 - rank;
    struct gda_buf out = {mem, 0, BYTES}, in = {mem, BYTES, BYTES};
    struct timespec start, end;
    clock_gettime(CLOCK_MONOTONIC, &start);
    for (int round = 0; round < ROUNDS; round++) {
        gda_req_t received, sent;
        memset(bytes, round + rank, BYTES);
        TRY(gda_recv(comm, peer, &in, 1, NULL, &received));
        if (rank == 0)
            TRY(gda_send(comm, peer, &out, 1, stream, &sent));
        TRY(gda_req_on_stream(received, stream));
        if (rank == 1) /* when the stream has the message */
            TRY(gda_send(comm, peer, &out, 1, stream, &sent));
        TRY(gda_req_on_stream(sent, stream)); /* the next round writes what was sent */
        TRY(gda_stream_sync(stream, MINUTE));
        TRY(gda_req_wait(received, 0, NULL));
        TRY(gda_req_free(sent));
        for (int i = 0; i < BYTES; i++) {
            if (bytes[BYTES + i] != (char)(round + peer)) {
                fprintf(stderr, "round %d: wrong bytes\n", round);
                return 1;
            }
        }
    }
    clock_gettime(CLOCK_MONOTONIC, &end);
    double seconds = (double)(end.tv_sec - start.tv_sec) + (double)(end.tv_nsec - start.tv_nsec) / 1e9;
    if (rank == 0)
        printf("%d rounds of %d bytes, %.1f us each way\n", ROUNDS, BYTES, seconds * 1e6 / ROUNDS / 2);

    TRY(gda_stream_close(stream));
    TRY(gda_mem_dereg(mem));
    TRY(gda_comm_destroy(comm, MINUTE));
    TRY(gda_close(ctx));
    free(bytes);
    return 0;
}
