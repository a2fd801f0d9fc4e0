/* comm.h, by the CPU, by streams, and as kernels use it. Its MPI is the exchange of check.h. */

#define WITH_MPI
#include <comm.h>

#include "check.h"

int MPI_Comm_rank(MPI_Comm comm, int *to)
{
    (void)comm;
    *to = rank;
    return MPI_SUCCESS;
}

int MPI_Comm_size(MPI_Comm comm, int *to)
{
    (void)comm;
    *to = 2;
    return MPI_SUCCESS;
}

int MPI_Allgather(const void *mine, int len, MPI_Datatype type, void *all, int each, MPI_Datatype of_all, MPI_Comm comm)
{
    CHECK(type == of_all && len == each && !comm, 1);
    return allgather(&pipe_end, mine, (size_t)len, all);
}

int MPI_Barrier(MPI_Comm comm)
{
    CHECK(!comm, 1);
    return barrier(&pipe_end);
}

/* A type of four bytes. */
int MPI_Type_size(MPI_Datatype type, int *size)
{
    CHECK(type, 4);
    *size = 4;
    return MPI_SUCCESS;
}

cudaError_t cudaGetDeviceCount(int *count)
{
    *count = 1;
    return cudaSuccess;
}

cudaError_t cudaHostAlloc(void **memory, size_t size, unsigned flags)
{
    CHECK(flags, cudaHostAllocPortable | cudaHostAllocMapped);
    *memory = malloc(size);
    return *memory ? cudaSuccess : 2;
}

enum { COUNT = 100, ROUNDS = 200 };

static int in[COUNT], out[COUNT];
static comm_reg_t in_reg, out_reg;
static CUstream stream;

static void fill(int round)
{
    for (int i = 0; i < COUNT; i++)
        out[i] = 1000 * round + 10 * i + rank;
}

static void check_in(int round)
{
    for (int i = 0; i < COUNT; i++)
        CHECK(in[i], 1000 * round + 10 * i + peer);
}

static void by_cpu(int round)
{
    comm_request_t ready, receive, send;
    int is_ready = 0;
    fill(round);
    OK(comm_irecv(in, COUNT, 4, &in_reg, peer, &receive));
    OK(comm_send_ready(peer, &ready));
    if (round % 2) {
        OK(comm_wait_ready(peer));
    } else {
        while (!is_ready)
            OK(comm_test_ready(peer, &is_ready));
    }
    OK(comm_isend(out, COUNT, 4, &out_reg, peer, &send));
    OK(comm_wait(&receive));
    TRUE(receive == NULL);
    TRUE(comm_progress() >= 1);
    OK(comm_flush());
    check_in(round);
}

static void by_stream(int round)
{
    comm_request_t ready, receive, send;
    fill(round);
    OK(comm_irecv(in, COUNT, 4, &in_reg, peer, &receive));
    OK(comm_send_ready_on_stream(peer, &ready, stream));
    OK(comm_wait_ready_on_stream(peer, stream));
    OK(comm_isend_on_stream(out, COUNT, 4, &out_reg, peer, &send, stream));
    OK(comm_wait_all_on_stream(1, &receive, stream));
    OK(comm_wait_all_on_stream(1, &send, stream));
    OK(cuStreamSynchronize(stream));
    check_in(round);
    comm_progress();
}

static void by_kernel(int round)
{
    comm_request_t ready, requests[2];
    fill(round);
    OK(comm_irecv(in, COUNT, 4, &in_reg, peer, &requests[0]));
    OK(comm_send_ready(peer, &ready));
    OK(comm_prepare_wait_ready(peer));
    OK(comm_prepare_isend(out, COUNT, 4, &out_reg, peer, &requests[1]));
    OK(comm_prepare_wait_all(2, requests));
    struct comm_descs_ *d = (struct comm_descs_ *)(void *)comm_prepared_requests();
    CHECK(d->n_ready == 1 && d->n_tx == 1 && d->n_wait == 2, 1);
    while ((int32_t)(__atomic_load_n((uint32_t *)d->ready[0].ptr, __ATOMIC_ACQUIRE) - d->ready[0].value) < 0)
        ;
    __atomic_store_n((uint32_t *)d->tx[0].dbrec, d->tx[0].dbrec_value, __ATOMIC_RELEASE);
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    __atomic_store_n((uint64_t *)d->tx[0].db, d->tx[0].db_value, __ATOMIC_RELEASE);
    for (int i = 0; i < 2; i++) {
        uint32_t *word = (uint32_t *)d->wait[i].sema, value = d->wait[i].sema_value;
        /* GDS_WAIT_COND_AND or _NOR */
        while (d->wait[i].cond == 2 ? !(__atomic_load_n(word, __ATOMIC_ACQUIRE) & value)
                                    : !~(__atomic_load_n(word, __ATOMIC_ACQUIRE) | value))
            ;
        __atomic_store_n((uint32_t *)d->wait[i].flag, d->wait[i].flag_value, __ATOMIC_RELEASE);
    }
    OK(comm_flush());
    check_in(round);
}

/* A kernel waits for a message that comm_progress has found. */
static void found(void)
{
    comm_request_t receive, send;
    OK(comm_irecv(in, COUNT, 4, &in_reg, peer, &receive));
    OK(comm_isend(out, COUNT, 4, &out_reg, peer, &send));
    while (comm_state_.n)
        comm_progress();
    OK(comm_prepare_wait_all(1, &receive));
    struct comm_descs_ *d = (struct comm_descs_ *)(void *)comm_prepared_requests();
    CHECK(d->n_wait, 1);
    CHECK(d->wait[0].cond, 1);
    CHECK(*(uint32_t *)d->wait[0].sema, d->wait[0].sema_value);
}

/* A wait that failed is tried again, and then has not counted. */
static void late(void)
{
    comm_request_t ready;
    if (rank == 0) {
        OK(mpx_set_wait_limit(20));
        CHECK(comm_wait_ready(peer), ETIMEDOUT);
        OK(mpx_set_wait_limit(0));
    }
    meet();
    if (rank == 1)
        OK(comm_send_ready(peer, &ready));
    else
        OK(comm_wait_ready(peer));
}

static void test(void)
{
    comm_request_t request;
    stream = make_stream();
    OK(comm_init(NULL, comm_select_device(rank)));
    for (int round = 0; round < ROUNDS; round++) {
        by_cpu(round);
        by_stream(round);
        by_kernel(round);
    }
    found();
    late();
    CHECK(comm_isend(out, COUNT, 4, &out_reg, 2, &request), MP_FAILURE);
    CHECK(comm_isend(out, COUNT, 4, &out_reg, rank, &request), MP_FAILURE);
    OK(comm_deregister(&in_reg));
    OK(comm_deregister(&out_reg));
    comm_finalize();
}

int main(void)
{
    int status = two_ranks(test);
    return status;
}
