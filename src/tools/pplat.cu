// Kernels of the ping-pong benchmark. The program loads `pplat.ptx`, made from this file by NVRTC 12.0 for its
// oldest architecture with memory-model instructions (PTX 8.0, which every CUDA 12 and newer driver compiles):
//
//     nvrtcCompileProgram(..., {"--gpu-architecture=compute_70", "--std=c++17"})
//
// or, with a CUDA 12.0 toolkit: nvcc -ptx -arch=compute_70 pplat.cu
//
// All blocks poll one GPU flag; each block answers in a CPU flag of its own. Flags count up from 1. Whoever polls gives
// up after `limit_ns`, so a kernel ends even if the CPU is gone.

typedef unsigned int u32;
typedef unsigned long long u64;

// What a run ends with; see `pplat.rs`.
struct Verdict {
    u32 wrong_words;
    u32 blocks_gave_up;
};

struct Arguments {
    // One word, which all blocks poll, and a word for each block, which the CPU polls.
    u32 *gpu_flag;
    u32 *cpu_flags;
    u64 rounds;
    volatile u32 *data;
    u64 words;
    u64 limit_ns;
    Verdict *verdict;
    // By `gpu_produces` the clock of block 0 at the start and after every round, `rounds + 1` values.
    u64 *times;
};

static __device__ u64 now_ns()
{
    u64 time;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(time));
    return time;
}

static __device__ u32 load_acquire(const u32 *flag)
{
    u32 value;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(flag) : "memory");
    return value;
}

static __device__ void store_release(u32 *flag, u32 value)
{
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(flag), "r"(value) : "memory");
}

// Waits until the flag has the value; false when the time is over. The clock is read only now and then.
static __device__ bool await(const u32 *flag, u32 value, u64 limit_ns)
{
    u64 start = 0;
    for (u32 polls = 1; load_acquire(flag) != value; ++polls) {
        if (polls % 1024 != 0)
            continue;
        u64 time = now_ns();
        if (start == 0)
            start = time;
        else if (time - start > limit_ns)
            return false;
    }
    return true;
}

// Word `index` of the data of a round: no two neighbours and no two consecutive rounds have the same.
static __device__ u32 expected(u32 round, u64 index)
{
    return (round % 2 ? 0x5a5a5a5au : 0xa5a5a5a5u) ^ (u32)index;
}

// The CPU writes data and the GPU flag; the blocks check the data and answer.
extern "C" __global__ void cpu_produces(Arguments it)
{
    __shared__ bool go;
    const u64 threads = (u64)gridDim.x * blockDim.x;
    const u64 first = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    u32 wrong = 0;

    if (threadIdx.x == 0)
        store_release(&it.cpu_flags[blockIdx.x], 1);
    for (u32 round = 1; round <= it.rounds; ++round) {
        if (threadIdx.x == 0)
            go = await(it.gpu_flag, round, it.limit_ns);
        __syncthreads();
        if (!go)
            break;
        for (u64 i = first; i < it.words; i += threads)
            wrong += it.data[i] != expected(round, i);
        __syncthreads();
        if (threadIdx.x == 0)
            store_release(&it.cpu_flags[blockIdx.x], round + 1);
    }
    if (wrong)
        atomicAdd(&it.verdict->wrong_words, wrong);
    if (threadIdx.x == 0 && !go)
        atomicAdd(&it.verdict->blocks_gave_up, 1);
}

// The blocks write data and their CPU flags; the CPU checks the data and answers in the GPU flag.
extern "C" __global__ void gpu_produces(Arguments it)
{
    __shared__ bool go;
    const u64 threads = (u64)gridDim.x * blockDim.x;
    const u64 first = (u64)blockIdx.x * blockDim.x + threadIdx.x;

    if (threadIdx.x == 0) {
        store_release(&it.cpu_flags[blockIdx.x], 1);
        go = await(it.gpu_flag, 1, it.limit_ns);
        if (blockIdx.x == 0)
            it.times[0] = now_ns();
    }
    __syncthreads();
    for (u32 round = 1; round <= it.rounds && go; ++round) {
        for (u64 i = first; i < it.words; i += threads)
            it.data[i] = expected(round, i);
        // The barrier and the release after it order the data of all threads before the flag.
        __syncthreads();
        if (threadIdx.x == 0) {
            store_release(&it.cpu_flags[blockIdx.x], round + 1);
            go = await(it.gpu_flag, round + 1, it.limit_ns);
            if (blockIdx.x == 0)
                it.times[round] = now_ns();
        }
        __syncthreads();
    }
    if (threadIdx.x == 0 && !go)
        atomicAdd(&it.verdict->blocks_gave_up, 1);
}
