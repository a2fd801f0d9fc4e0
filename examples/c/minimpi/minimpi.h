/* A small MPI-like library over libgdasync: what an MPI runtime would do with it. Calls return 0 or a negative error number. */

#ifndef MINIMPI_H
#define MINIMPI_H

#include <stddef.h>
#include <stdint.h>

typedef struct mm_comm mm_comm;
typedef struct mm_request mm_request;

enum { MM_ANY_SOURCE = -1, MM_ANY_TAG = -1 };

/* What a runtime has already: ranks that can exchange a few bytes. */
typedef int (*mm_allgather)(void *self, const void *mine, size_t len, void *all);

/* Joins the job. Without `allgather` by the variables of a launcher; `rank` and `size` are not used then. */
int mm_init(int rank, int size, mm_allgather allgather, void *self, mm_comm **world);
int mm_finalize(mm_comm *world);
int mm_rank(const mm_comm *comm);
int mm_size(const mm_comm *comm);
int mm_split(mm_comm *comm, int color, int key, mm_comm **part);
int mm_free(mm_comm *part);

/* Messages with tags, by the CPU; any memory of the program, also of GPUs. The memory is registered once, until mm_forget. */
int mm_isend(mm_comm *comm, const void *bytes, size_t len, int dest, int tag, mm_request **request);
int mm_irecv(mm_comm *comm, void *bytes, size_t len, int source, int tag, mm_request **request);
/* Waits for all, and sets them to NULL; the first error. */
int mm_waitall(mm_request **requests, int n);
int mm_barrier(mm_comm *comm);
/* The program frees memory. */
int mm_forget(mm_comm *comm, const void *bytes, size_t len);

/* In the order of a stream, as MPIX_Send_enqueue and MPIX_Recv_enqueue: in the order of the calls, without tags. */
typedef struct mm_stream mm_stream;
int mm_stream_open(mm_comm *comm, void *cuda_stream, mm_stream **stream); /* NULL: a thread of the library */
int mm_stream_sync(mm_stream *stream);
int mm_stream_close(mm_stream *stream);
int mm_send_enqueue(mm_comm *comm, const void *bytes, size_t len, int dest, mm_stream *stream);
int mm_recv_enqueue(mm_comm *comm, void *bytes, size_t len, int source, mm_stream *stream);
/* Both at once, in any order. */
int mm_sendrecv_enqueue(mm_comm *comm, const void *out, size_t out_len, int dest, void *in, size_t in_len, int source,
                        mm_stream *stream);
int mm_barrier_enqueue(mm_comm *comm, mm_stream *stream);

/* The reason of the last failure of this thread. */
const char *mm_error(void);

#endif
