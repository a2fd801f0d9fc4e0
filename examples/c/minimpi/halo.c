/* A program that uses the small MPI-like library: a ring of cells that each rank has a part of, and whose ends it exchanges with its
 * neighbours in each step, by a stream. Rank 0 collects the sums at the end.
 *
 * cc halo.c minimpi.c -o halo $(pkg-config --cflags --libs gdasync), and start it by mpirun or srun, or with RANK, WORLD_SIZE,
 * MASTER_ADDR and MASTER_PORT.
 */

#include "minimpi.h"

#include <stdio.h>
#include <stdlib.h>

enum { CELLS = 1024, STEPS = 100 };

#define TRY(call)                                                                                                      \
    do {                                                                                                               \
        if ((call) < 0) {                                                                                              \
            fprintf(stderr, "%s\n", mm_error());                                                                       \
            exit(1);                                                                                                   \
        }                                                                                                              \
    } while (0)

int main(void)
{
    mm_comm *world, *half;
    mm_stream *stream;
    TRY(mm_init(0, 0, NULL, NULL, &world));
    TRY(mm_stream_open(world, NULL, &stream));
    int rank = mm_rank(world), size = mm_size(world);
    int left = (rank + size - 1) % size, right = (rank + 1) % size;

    /* A cell of each neighbour at the ends. */
    long *cells = calloc(CELLS + 2, sizeof *cells), *next = calloc(CELLS + 2, sizeof *next), sum = 0;
    for (int i = 1; i <= CELLS; i++)
        cells[i] = (long)rank * CELLS + i;
    for (int step = 0; step < STEPS; step++) {
        TRY(mm_sendrecv_enqueue(world, &cells[CELLS], sizeof *cells, right, &cells[0], sizeof *cells, left, stream));
        TRY(mm_sendrecv_enqueue(world, &cells[1], sizeof *cells, left, &cells[CELLS + 1], sizeof *cells, right, stream));
        TRY(mm_stream_sync(stream));
        /* The sum of all cells stays the same. */
        for (int i = 1; i <= CELLS; i++)
            next[i] = cells[i - 1] - cells[i] + cells[i + 1];
        long *old = cells;
        cells = next;
        next = old;
    }
    for (int i = 1; i <= CELLS; i++)
        sum += cells[i];

    /* With tags: rank 0 gets the sums in any order. */
    mm_request *requests[64] = {NULL};
    long *sums = calloc((size_t)size, sizeof *sums), total = sum;
    if (rank == 0) {
        for (int i = 1; i < size && i <= 64; i++)
            TRY(mm_irecv(world, &sums[i], sizeof *sums, MM_ANY_SOURCE, MM_ANY_TAG, &requests[i - 1]));
    } else {
        TRY(mm_isend(world, &sum, sizeof sum, 0, rank, &requests[0]));
    }
    TRY(mm_waitall(requests, 64));
    for (int i = 1; i < size; i++)
        total += sums[i];
    long cells_of_all = (long)size * CELLS, expected = cells_of_all * (cells_of_all + 1) / 2;
    if (rank == 0)
        printf("%d ranks, %d steps: sum %ld, %s\n", size, STEPS, total, total == expected ? "as it began" : "WRONG");

    /* Parts of the world, and a stream that waits for all of a part. */
    TRY(mm_split(world, rank % 2, rank, &half));
    TRY(mm_barrier_enqueue(half, stream));
    TRY(mm_stream_sync(stream));
    TRY(mm_barrier(half));
    TRY(mm_free(half));
    TRY(mm_stream_close(stream));
    TRY(mm_forget(world, cells, (CELLS + 2) * sizeof *cells));
    TRY(mm_forget(world, next, (CELLS + 2) * sizeof *next));
    TRY(mm_forget(world, sums, (size_t)size * sizeof *sums));
    TRY(mm_forget(world, &sum, sizeof sum));
    TRY(mm_finalize(world));
    free(sums);
    free(cells);
    free(next);
    return rank == 0 && total != expected;
}
