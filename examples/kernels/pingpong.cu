// Kernels of the ping-pong on a GPU's stream. The example loads `pingpong.ptx`, made from this file by NVRTC 12.0 for its
// oldest architecture with memory-model instructions (PTX 8.0, which every CUDA 12 and newer driver compiles):
//
//     nvrtcCompileProgram(..., {"--gpu-architecture=compute_70", "--std=c++17", "--include-path=gdsync/include"})
//
// or, with a CUDA 12.0 toolkit: nvcc -ptx -arch=compute_70 -I gdsync/include pingpong.cu
//
// The layout of the structures is that of `src/pingpong/kernels.rs`.

#include "gdsync.cuh"

typedef unsigned char u8;
using gds::u32;
using gds::u64;

// What the kernels keep from one iteration to the next.
struct Score {
    // When the last turn ended, or the window began.
    u64 start;
    // Turns done.
    u64 turns;
    // Messages with wrong data.
    u64 errors;
    // Blocks of this turn that are done.
    u32 blocks;
    // Whether one of them found wrong data.
    u32 wrong;
};

// The arguments of `turn`: the same in all iterations, so that a graph can repeat it.
struct Turn {
    Score *score;
    // Where the times of the iterations go, nanoseconds, and how many there are.
    u64 *times;
    u64 total;
    // Where messages with even and with odd numbers arrive, and where they leave: `bytes` bytes each, on 8-byte boundaries.
    volatile u64 *received[2];
    volatile u64 *sent;
    u64 bytes;
    // Who sends from here, and whether it is to send what nobody expects.
    u64 rank;
    u64 lies;
};

static __device__ u64 now_ns()
{
    u64 time;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(time)::"memory");
    return time;
}

// The seed of a message: `Pattern` of the host.
static __device__ u64 seed_of(u64 sender, u64 number)
{
    const u64 seed = ((sender << 56 ^ number) + 1) * 0x9e3779b97f4a7c15ull;
    return (seed ^ seed >> 29) * 0xbf58476d1ce4e5b9ull;
}

// Word `index` of a message.
static __device__ u64 word(u64 seed, u64 index)
{
    const u64 word = seed + (index + 1) * 0x9e3779b97f4a7c15ull;
    return word ^ word >> 32;
}

// The clock starts, or is read.
extern "C" __global__ void stamp(u64 *at)
{
    *at = now_ns();
}

static __device__ void spin(u64 ns)
{
    const u64 start = now_ns();
    while (now_ns() - start < ns) {
    }
}

// Work that takes so long.
extern "C" __global__ void work(u64 ns)
{
    spin(ns);
}

// A thread's part of what is between iterations: checks what arrived in iteration `n`, makes sure that what arrives there
// next is not there yet, writes what leaves next. Returns whether it found wrong data.
static __device__ bool check_and_fill(const Turn &t, u64 n, u64 first, u64 threads)
{
    const u64 words = t.bytes / 8;
    volatile u64 *const received = n % 2 ? t.received[1] : t.received[0];
    const u64 arrived = seed_of(1 - t.rank, n);
    const u64 spoilt = seed_of(1 - t.rank, n + 2);
    const u64 next = seed_of(t.rank, t.lies ? ~(n + 1) : n + 1);
    bool wrong = false;

    for (u64 i = first; i < words; i += threads) {
        wrong |= received[i] != word(arrived, i);
        received[i] = ~word(spoilt, i);
        t.sent[i] = word(next, i);
    }
    if (first < t.bytes % 8) {
        volatile u8 *const tail = (volatile u8 *)(received + words) + first;
        const u32 shift = 8 * (u32)first;
        wrong |= *tail != (u8)(word(arrived, words) >> shift);
        *tail = (u8)(~word(spoilt, words) >> shift);
        ((volatile u8 *)(t.sent + words))[first] = (u8)(word(next, words) >> shift);
    }
    return wrong;
}

// Between two iterations: stops the clock, checks and fills, starts the clock.
extern "C" __global__ void turn(Turn t)
{
    const u64 threads = (u64)gridDim.x * blockDim.x;
    const u64 first = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    const u64 end = now_ns();
    // Counted on by the last block, when all have read it.
    const u64 n = ((volatile Score *)t.score)->turns;

    if (first == 0 && n < t.total)
        t.times[n] = end - t.score->start;
    const bool wrong = check_and_fill(t, n, first, threads);
    // What leaves next all see, before the clock starts again.
    __threadfence_system();
    const bool block_wrong = __syncthreads_or(wrong);
    if (threadIdx.x != 0)
        return;
    if (block_wrong)
        atomicOr(&t.score->wrong, 1);
    __threadfence();
    if (atomicAdd(&t.score->blocks, 1) != gridDim.x - 1)
        return;
    // The last block: nobody else touches the score any more.
    __threadfence();
    volatile Score *score = t.score;
    score->errors += score->wrong;
    score->wrong = 0;
    score->blocks = 0;
    score->turns += 1;
    score->start = now_ns();
}

// The arguments of `initiate`.
struct Initiate {
    Turn turn;
    // The steps of these iterations, and how many iterations.
    const gds::Program *program;
    u64 iterations;
    // Nanoseconds of work before each send.
    u64 work_ns;
    // Whether the message is awaited by a step of its own, before the work.
    u64 waits_first;
};

// Several iterations, by one block that waits and sends by itself.
extern "C" __global__ void __launch_bounds__(1024) initiate(Initiate p)
{
    volatile Score *const score = p.turn.score;
    const u64 before = score->turns;
    u64 start = score->start;
    gds::Steps steps(p.program);
    u32 step = 0;

    for (u64 n = before; n < before + p.iterations; ++n) {
        if (p.waits_first && gds::block_step(steps, step++) != gds::OK)
            return;
        // All others are at the barrier of the step meanwhile.
        if (threadIdx.x == 0 && p.work_ns != 0)
            spin(p.work_ns);
        if (gds::block_step(steps, step++) != gds::OK)
            return;
        const u64 end = now_ns();
        const bool wrong = __syncthreads_or(check_and_fill(p.turn, n, threadIdx.x, blockDim.x));
        if (threadIdx.x != 0)
            continue;
        if (n < p.turn.total)
            p.turn.times[n] = end - start;
        score->errors += wrong;
        score->turns = n + 1;
        // What leaves next all see, before the clock starts again.
        steps.publish();
        start = now_ns();
        score->start = start;
    }
}
