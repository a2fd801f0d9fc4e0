/*
 * Messages that kernels send and wait for. The CPU prepares a send, or posts a receive, and get_descriptors turns the request into
 * words, which it hands to the kernel. C++, by nvcc or the host's compiler.
 */

#ifndef MP_DEVICE_CUH
#define MP_DEVICE_CUH

#include <assert.h>

#include <gdsync/device.cuh>
#include <mp.h>

namespace mp {

namespace mlx5 {

typedef gdsync::isem32_t isem32_t;

typedef struct send_desc {
    gdsync::isem32_t dbrec;
    gdsync::isem64_t db;
} send_desc_t;

typedef struct wait_desc {
    gdsync::wait_cond_t sema_cond;
    gdsync::isem32_t sema;
    gdsync::isem32_t flag;
} wait_desc_t;

/* A word of host memory. */
static inline int get_descriptors(isem32_t *psem, uint32_t *ptr, uint32_t value)
{
    struct mp_word_words words;
    int error = mpx_get_word(ptr, value, &words);
    if (error)
        return error;
    psem->ptr = words.ptr;
    psem->value = words.value;
    return MP_SUCCESS;
}

/*
 * A prepared send or put, which counts as posted. Sends to one peer share a word: kernels start them one after the other, in the
 * order of their preparation; lanes of a warp do by themselves.
 */
static inline int get_descriptors(send_desc_t *sinfo, mp_request_t *req)
{
    struct mp_send_words words;
    int error = mpx_get_send(req, &words);
    if (error)
        return error;
    sinfo->dbrec.ptr = words.dbrec_ptr;
    sinfo->dbrec.value = words.dbrec_value;
    sinfo->db.ptr = words.db_ptr;
    sinfo->db.value = words.db_value;
    return MP_SUCCESS;
}

/*
 * The completion of a request. The kernel must signal after its wait: only then can the CPU mp_wait for the request. Requests of one
 * peer and direction share a word, which the last one's signal moves past those before it: blocks and kernels signal one after the
 * other, in order, lanes of a warp as they come.
 */
static inline int get_descriptors(wait_desc_t *winfo, mp_request_t *req)
{
    struct mp_wait_words words;
    int error = mpx_get_wait(req, &words);
    if (error)
        return error;
    winfo->sema_cond = (gdsync::wait_cond_t)words.cond;
    winfo->sema.ptr = words.sema_ptr;
    winfo->sema.value = words.sema_value;
    winfo->flag.ptr = words.flag_ptr;
    winfo->flag.value = words.flag_value;
    return MP_SUCCESS;
}

} /* namespace mlx5 */

#ifdef __CUDACC__

namespace device {

namespace mlx5 {

using namespace gdsync::device;

/* Has the lanes that are here act one after the other: their descriptors may share a word, whose last value must be the last one's. */
template <typename Act> __device__ inline void in_lane_order(Act act)
{
    unsigned lane, here = __activemask();
    asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
    for (unsigned left = here; left; left &= left - 1) {
        if (lane == (unsigned)__ffs((int)left) - 1)
            act();
        __syncwarp(here);
    }
}

__device__ inline void send(mp::mlx5::send_desc_t &info)
{
    in_lane_order([&info] {
        release(info.dbrec);
        __threadfence_system();
        release(info.db);
    });
}

/* 0, or gdsync::ERROR_TIMEOUT. Lanes that begin to wait together all have their completions when one of them returns. */
__device__ inline int wait(mp::mlx5::wait_desc_t &info)
{
    unsigned here = __activemask();
    int error = gdsync::device::wait(info.sema, info.sema_cond);
    __syncwarp(here);
    return error;
}

/*
 * Moves a consumer index, which is big-endian and has 24 bits, forward and never back: lanes that have waited apart come here in any
 * order, and the index of the last completion stands for those before it.
 */
__device__ inline void signal(mp::mlx5::wait_desc_t &info)
{
    const unsigned value = info.flag.value;
    unsigned seen = *info.flag.access_once(), before, ahead;
    for (;; seen = before) {
        ahead = (__byte_perm(value, 0, 0x0123) - __byte_perm(seen, 0, 0x0123)) & 0xffffff;
        if (ahead == 0 || ahead >= 1u << 23)
            return;
        before = atomicCAS(info.flag.ptr, seen, value);
        if (before == seen)
            return;
    }
}

} /* namespace mlx5 */

} /* namespace device */

#endif

} /* namespace mp */

#endif
