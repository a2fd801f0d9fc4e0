/* Ping-pong between two ranks of MPI, for comparison: BYTES ITERATIONS; prints half a round trip in us, the median of
 * windows of 100. */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define WINDOW 100

static int order(const void *a, const void *b)
{
	double x = *(const double *)a, y = *(const double *)b;
	return (x > y) - (x < y);
}

int main(int argc, char **argv)
{
	MPI_Init(&argc, &argv);
	int rank, bytes = argc > 1 ? atoi(argv[1]) : 8, windows = ((argc > 2 ? atoi(argv[2]) : 20000) + WINDOW - 1) / WINDOW;
	MPI_Comm_rank(MPI_COMM_WORLD, &rank);
	/* Two buffers by turns to receive into, as in `gdasync bench messages`. */
	char *buffer = malloc(3 * (size_t)bytes);
	double *times = calloc((size_t)windows + 1, sizeof *times);
	memset(buffer, rank, 3 * (size_t)bytes);
	/* The first window warms up. */
	for (int w = 0; w <= windows; w++) {
		MPI_Barrier(MPI_COMM_WORLD);
		double start = MPI_Wtime();
		for (int i = 0; i < WINDOW; i++) {
			char *in = buffer + (size_t)bytes * (size_t)(1 + (i & 1));
			if (rank == 0)
				MPI_Send(buffer, bytes, MPI_BYTE, 1, 0, MPI_COMM_WORLD);
			MPI_Recv(in, bytes, MPI_BYTE, 1 - rank, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
			if (rank == 1)
				MPI_Send(buffer, bytes, MPI_BYTE, 0, 0, MPI_COMM_WORLD);
			if (in[0] != 1 - rank || in[bytes - 1] != 1 - rank)
				MPI_Abort(MPI_COMM_WORLD, 1);
		}
		times[w] = (MPI_Wtime() - start) / WINDOW / 2 * 1e6;
	}
	qsort(times + 1, (size_t)windows, sizeof *times, order);
	if (rank == 0)
		printf("%.4f\n", times[1 + windows / 2]);
	free(times);
	free(buffer);
	MPI_Finalize();
	return 0;
}
