/*
 * Words that kernels write and wait for: see mlx5.h, whose structures say which. C++, by nvcc or the host's compiler.
 */

#ifndef GDSYNC_DEVICE_CUH
#define GDSYNC_DEVICE_CUH

#include <gdsync.h>

#include <assert.h>
#include <stddef.h>
#include <stdint.h>
#include <time.h>

#ifdef __CUDACC__
#define GDSYNC_BOTH __host__ __device__
#else
#define GDSYNC_BOTH
#endif

namespace gdsync {

/* Clock cycles after which a wait of a kernel gives up. */
static const clock_t large_timeout = (clock_t)1 << 32;

enum { ERROR_TIMEOUT = 11, ERROR_INVALID = 22 };

typedef gds_wait_cond_flag_t wait_cond_t;

/* A word in the structure itself. */
struct sem32 {
    typedef uint32_t T;
    typedef int32_t Tsigned;
    T sem;
    T value;
    GDSYNC_BOTH volatile T *access_once() { return (volatile T *)&sem; }
};
typedef struct sem32 sem32_t;

/* A word elsewhere. */
struct isem32 {
    typedef uint32_t T;
    typedef int32_t Tsigned;
    T *ptr;
    T value;
    GDSYNC_BOTH volatile T *access_once() { return (volatile T *)ptr; }
    GDSYNC_BOTH isem32() : ptr(NULL), value(0) {}
};
typedef struct isem32 isem32_t;

struct isem64 {
    typedef uint64_t T;
    typedef int64_t Tsigned;
    T *ptr;
    T value;
    GDSYNC_BOTH volatile T *access_once() { return (volatile T *)ptr; }
    GDSYNC_BOTH isem64() : ptr(NULL), value(0) {}
};
typedef struct isem64 isem64_t;

#ifdef __CUDACC__

namespace device {

/* Writes the value. */
template <typename S> __device__ inline void release(S &sem) { *sem.access_once() = sem.value; }

/* Each waits until the word satisfies the condition: 0, or ERROR_TIMEOUT. */

template <typename S> __device__ inline int wait_eq(S &sem)
{
    for (long long start = clock64(); *sem.access_once() != sem.value;)
        if (clock64() - start > (long long)large_timeout)
            return ERROR_TIMEOUT;
    return 0;
}

template <typename S> __device__ inline int wait_geq(S &sem)
{
    for (long long start = clock64(); (typename S::Tsigned)(*sem.access_once() - sem.value) < 0;)
        if (clock64() - start > (long long)large_timeout)
            return ERROR_TIMEOUT;
    return 0;
}

template <typename S> __device__ inline int wait_and(S &sem)
{
    for (long long start = clock64(); (*sem.access_once() & sem.value) == 0;)
        if (clock64() - start > (long long)large_timeout)
            return ERROR_TIMEOUT;
    return 0;
}

template <typename S> __device__ inline int wait_nor(S &sem)
{
    for (long long start = clock64(); (typename S::T) ~(*sem.access_once() | sem.value) == 0;)
        if (clock64() - start > (long long)large_timeout)
            return ERROR_TIMEOUT;
    return 0;
}

template <typename S> __device__ inline int wait(S &sem, wait_cond_t cond)
{
    switch (cond) {
    case GDS_WAIT_COND_EQ:
        return wait_eq(sem);
    case GDS_WAIT_COND_GEQ:
        return wait_geq(sem);
    case GDS_WAIT_COND_AND:
        return wait_and(sem);
    case GDS_WAIT_COND_NOR:
        return wait_nor(sem);
    default:
        return ERROR_INVALID;
    }
}

} /* namespace device */

#endif

} /* namespace gdsync */

#undef GDSYNC_BOTH

#endif
