/* Every rank exchanges messages with every other, by messages of all sizes, and windows; all data is compared. */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>

static int rank, ranks;
static long wrong;

static unsigned char byte(int from, int to, size_t size, size_t at)
{
    return (unsigned char)(from * 31 + to * 7 + size * 3 + at * 5 + at / 251);
}

static void exchange(size_t size)
{
    unsigned char *out = malloc(size * ranks + 1), *in = calloc(1, size * ranks + 1);
    MPI_Request *requests = malloc(2 * ranks * sizeof *requests);
    for (int peer = 0; peer < ranks; peer++) {
        for (size_t i = 0; i < size; i++)
            out[peer * size + i] = byte(rank, peer, size, i);
        MPI_Irecv(in + peer * size, size, MPI_BYTE, peer, 5, MPI_COMM_WORLD, &requests[2 * peer]);
        MPI_Isend(out + peer * size, size, MPI_BYTE, peer, 5, MPI_COMM_WORLD, &requests[2 * peer + 1]);
    }
    MPI_Waitall(2 * ranks, requests, MPI_STATUSES_IGNORE);
    for (int peer = 0; peer < ranks; peer++)
        for (size_t i = 0; i < size; i++)
            wrong += in[peer * size + i] != byte(peer, rank, size, i);
    free(requests);
    free(in);
    free(out);
}

/* Puts, atomics and gets by windows. */
static void window(void)
{
    enum { COUNT = 1000 };
    static long base[COUNT + 1];
    long out[COUNT], in[COUNT], one = 1;
    int next = (rank + 1) % ranks, before = (rank + ranks - 1) % ranks;
    MPI_Win win;
    for (int i = 0; i < COUNT; i++)
        out[i] = rank * 10000L + i;
    MPI_Win_create(base, sizeof base, sizeof *base, MPI_INFO_NULL, MPI_COMM_WORLD, &win);
    MPI_Win_fence(0, win);
    MPI_Put(out, COUNT, MPI_LONG, next, 0, COUNT, MPI_LONG, win);
    MPI_Accumulate(&one, 1, MPI_LONG, 0, COUNT, 1, MPI_LONG, MPI_SUM, win);
    MPI_Win_fence(0, win);
    MPI_Get(in, COUNT, MPI_LONG, next, 0, COUNT, MPI_LONG, win);
    MPI_Win_fence(0, win);
    for (int i = 0; i < COUNT; i++)
        wrong += (in[i] != out[i]) + (base[i] != before * 10000L + i);
    wrong += base[COUNT] != (rank == 0 ? ranks : 0);
    MPI_Win_free(&win);
}

int main(int argc, char **argv)
{
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    for (int round = 0; round < 20; round++)
        exchange(round);
    for (size_t size = 256; size <= 1 << 20; size *= 8)
        exchange(size + 1);
    for (int round = 0; round < 20; round++) {
        long mine = rank + round, sum, expected = (long)ranks * (ranks - 1) / 2 + (long)ranks * round;
        MPI_Allreduce(&mine, &sum, 1, MPI_LONG, MPI_SUM, MPI_COMM_WORLD);
        wrong += sum != expected;
    }
    window();
    long all;
    MPI_Reduce(&wrong, &all, 1, MPI_LONG, MPI_SUM, 0, MPI_COMM_WORLD);
    if (rank == 0) {
        if (all)
            printf("exchange: %ld values are wrong\n", all);
        else
            printf("exchange: %d ranks, all data right\n", ranks);
    }
    MPI_Finalize();
    return rank == 0 && all != 0;
}
