/* Two ranks of a job, for checks of the library. */

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

static int rank, peer, released;

/* The library's reason, with the rank. */
static inline const char *reason(void)
{
    static char text[1024];
    snprintf(text, sizeof text, "rank %d: %s", rank, mpx_last_error());
    return text;
}

#define REASON reason()
#include <checks.h>

/* Seconds that the program may take. */
enum { PATIENCE = 120 };

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
