// Kernels of the trigger benchmark, each of one thread. The program loads `trigger.ptx`, made from this file by NVRTC 12.0
// for its oldest architecture with memory-model instructions (PTX 8.0, which every CUDA 12 and newer driver compiles):
//
//     nvrtcCompileProgram(..., {"--gpu-architecture=compute_70", "--std=c++17"})
//
// or, with a CUDA 12.0 toolkit: nvcc -ptx -arch=compute_70 trigger.cu
//
// Words are 0 until something has happened, then 1. Addresses may be of host or GPU memory.

typedef unsigned int u32;
typedef unsigned long long u64;

static __device__ u64 now_ns()
{
    u64 time;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(time));
    return time;
}

static __device__ u32 load_acquire(const u32 *word)
{
    u32 value;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
    return value;
}

static __device__ void store_release(u32 *word, u32 value)
{
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}

struct Gate {
    u32 *ready;
    const u32 *gate;
    u32 *over;
    u64 limit_ns;
};

// Says that it runs, waits for the gate, and says that it is over where an address for that is given. Gives up after `limit_ns`,
// so it ends even if the CPU is gone; the clock is read only now and then.
extern "C" __global__ void await_gate(Gate it)
{
    store_release(it.ready, 1);
    u64 start = 0;
    for (u32 polls = 1; load_acquire(it.gate) == 0; ++polls) {
        if (polls % 1024 != 0)
            continue;
        u64 time = now_ns();
        if (start == 0)
            start = time;
        else if (time - start > it.limit_ns)
            return;
    }
    if (it.over)
        store_release(it.over, 1);
}

extern "C" __global__ void store_word(u32 *word)
{
    store_release(word, 1);
}

// Keeps the GPU busy for so long.
extern "C" __global__ void spin(u64 ns)
{
    for (u64 start = now_ns(); now_ns() - start < ns;) {
    }
}
