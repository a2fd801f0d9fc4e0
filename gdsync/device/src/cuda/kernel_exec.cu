// The kernel lane: stream operations run by one thread of a kernel. The library loads `kernel_exec.ptx`, made from this file by
// NVRTC 12.0 for its oldest architecture with memory-model instructions (PTX 8.0, which every CUDA 12 and newer driver
// compiles):
//
//     nvrtcCompileProgram(..., {"--gpu-architecture=compute_70", "--std=c++17", "--include-path=gdsync/include"})
//
// or, with a CUDA 12.0 toolkit: nvcc -ptx -arch=compute_70 -I gdsync/include kernel_exec.cu
//
// What operations are and do is in `gdsync.cuh`, for kernels of applications too.

#include "gdsync.cuh"

using namespace gds;

// As a parameter of a kernel.
template <int N> struct Parameter {
    Head head;
    Op ops[N];
};

static __device__ void run(const Head &head, const Op *ops)
{
    u32 failed = detail::has_failed(head), errors = 0;
    for (u64 i = 0; i < head.count; ++i) {
        const Op op = ops[i];
        if (!detail::is_wait(op)) {
            detail::act(head, op, false, failed, &errors);
            continue;
        }
        detail::wait(head, op, &failed, &errors);
        // What it has seen, the kernels behind this one see too.
        if (i + 1 == head.count || !detail::has_fence(ops[i + 1].kind))
            detail::order(op);
    }
    detail::tell(head, &errors);
}

extern "C" __global__ void __launch_bounds__(1) gds_run_12(const __grid_constant__ Parameter<12> program)
{
    run(program.head, program.ops);
}

extern "C" __global__ void __launch_bounds__(1) gds_run_160(const __grid_constant__ Parameter<160> program)
{
    run(program.head, program.ops);
}

// 16 bytes of a program in memory.
struct __align__(16) Piece {
    u64 words[2];
};

static __device__ void copy(Piece *to, u64 from, u32 index)
{
    u64 low, high;
    asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];" : "=l"(low), "=l"(high) : "l"(from + 16 * index) : "memory");
    to[index].words[0] = low;
    to[index].words[1] = high;
}

// The same for a node of a graph, whose program the CPU puts into memory before each launch. A piece for each thread comes
// at once, which is all of most programs; that much is always there.
extern "C" __global__ void __launch_bounds__(32) gds_run_at(u64 at)
{
    __shared__ Piece pieces[sizeof(Parameter<160>) / sizeof(Piece)];
    const Parameter<160> &program = *(const Parameter<160> *)pieces;
    copy(pieces, at, threadIdx.x);
    __syncthreads();
    const u64 used = sizeof(Head) + program.head.count * sizeof(Op);
    for (u32 i = 32 + threadIdx.x; i * sizeof(Piece) < used; i += 32)
        copy(pieces, at, i);
    __syncthreads();
    if (threadIdx.x == 0)
        run(program.head, program.ops);
}

// Behind a kernel of the application that runs steps: runs those that it has left, and marks the stream.
extern "C" __global__ void __launch_bounds__(1) gds_finish(const Program *program)
{
    Steps(program).finish();
}
