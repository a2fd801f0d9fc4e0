/* Two ranks, and checks that end the program with the line that failed and the library's reason. */

#ifndef CHECK_H
#define CHECK_H

#ifndef WITH_MPI
#define MP_NO_MPI
#endif

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <mp.h>

/* A call must return this. */
#define CHECK(call, expected)                                                                                          \
    do {                                                                                                               \
        long got_ = (long)(call), expected_ = (long)(expected);                                                        \
        if (got_ != expected_) {                                                                                       \
            fprintf(stderr, "%s:%d: rank %d: %s is %ld, not %ld (%s)\n", __FILE__, __LINE__, rank, #call, got_,        \
                    expected_, mpx_last_error());                                                                      \
            exit(1);                                                                                                   \
        }                                                                                                              \
    } while (0)

#define OK(call) CHECK(call, 0)
#define TRUE(condition) CHECK(!(condition), 0)

/* Seconds that the program may take. */
enum { PATIENCE = 120 };

static int rank, peer, released;

/* A connection to the other rank, for the exchange. */
static int pipe_end = -1;

static void move(const char *from, char *to, size_t len)
{
    for (size_t done = 0; done < len;) {
        ssize_t n = from ? write(pipe_end, from + done, len - done) : read(pipe_end, to + done, len - done);
        TRUE(n > 0);
        done += (size_t)n;
    }
}

static int allgather(void *self, const void *mine, size_t len, void *all)
{
    CHECK(self == &pipe_end, 1);
    memcpy((char *)all + rank * len, mine, len);
    move((const char *)mine, NULL, len);
    move(NULL, (char *)all + peer * len, len);
    return 0;
}

static int barrier(void *self)
{
    char mine = 'b', all[2];
    return allgather(self, &mine, 1, all);
}

static void release(void *self)
{
    CHECK(self == &pipe_end, 1);
    released++;
}

static inline struct mp_exchange exchange(void)
{
    struct mp_exchange e;
    memset(&e, 0, sizeof e);
    e.struct_size = sizeof e;
    e.rank = rank;
    e.size = 2;
    e.self = &pipe_end;
    e.allgather = allgather;
    e.barrier = barrier;
    e.release = release;
    return e;
}

/* Waits for the other rank. */
static inline void meet(void)
{
    OK(barrier(&pipe_end));
}

static CUstream make_stream(void)
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

/* Runs `test` as two ranks: forks before anything is opened. */
static inline int two_ranks(void (*test)(void))
{
    int ends[2], status = 0;
    alarm(PATIENCE);
    OK(socketpair(AF_UNIX, SOCK_STREAM, 0, ends));
    pid_t child = fork();
    TRUE(child >= 0);
    rank = child == 0;
    peer = 1 - rank;
    pipe_end = ends[rank];
    close(ends[peer]);
    test();
    if (rank == 0) {
        CHECK(waitpid(child, &status, 0), child);
        OK(status);
    }
    return 0;
}

#endif
