// Kernels of the ping-pong on a GPU's stream. The example loads `pingpong.ptx`, made from this file by NVRTC 12.0 for its
// oldest architecture with memory-model instructions (PTX 8.0, which every CUDA 12 and newer driver compiles):
//
//     nvrtcCompileProgram(..., {"--gpu-architecture=compute_70", "--std=c++17"})
//
// or, with a CUDA 12.0 toolkit: nvcc -ptx -arch=compute_70 pingpong.cu
//
// The layout of the structures is that of `src/pingpong/kernels.rs`.

typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;

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

// The arguments of `turn`.
struct Turn {
    Score *score;
    // Where the time of this iteration goes, nanoseconds.
    u64 *time;
    // What has arrived, and what leaves next: `bytes` bytes each, on 8-byte boundaries.
    volatile u64 *received;
    volatile u64 *sent;
    u64 bytes;
    // Seeds of the patterns: of what should have arrived, of what arrives there next, of what leaves next.
    u64 arrived;
    u64 spoilt;
    u64 next;
};

static __device__ u64 now_ns()
{
    u64 time;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(time)::"memory");
    return time;
}

// Word `index` of a message: `Pattern` of the host.
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

// Work that takes so long.
extern "C" __global__ void work(u64 ns)
{
    const u64 start = now_ns();
    while (now_ns() - start < ns) {
    }
}

// Between two iterations: stops the clock, checks what arrived, makes sure that what arrives there next is not there
// yet, writes what leaves next, starts the clock.
extern "C" __global__ void turn(Turn t)
{
    const u64 threads = (u64)gridDim.x * blockDim.x;
    const u64 first = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    const u64 words = t.bytes / 8;
    const u64 end = now_ns();
    bool wrong = false;

    if (first == 0)
        *t.time = end - t.score->start;
    for (u64 i = first; i < words; i += threads) {
        wrong |= t.received[i] != word(t.arrived, i);
        t.received[i] = ~word(t.spoilt, i);
        t.sent[i] = word(t.next, i);
    }
    if (first < t.bytes % 8) {
        volatile u8 *received = (volatile u8 *)(t.received + words) + first;
        const u32 shift = 8 * (u32)first;
        wrong |= *received != (u8)(word(t.arrived, words) >> shift);
        *received = (u8)(~word(t.spoilt, words) >> shift);
        ((volatile u8 *)(t.sent + words))[first] = (u8)(word(t.next, words) >> shift);
    }
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
