// The kernel of the Jacobi example. It loads `jacobi2d.ptx`, made from this file by NVRTC 12.0 for its oldest architecture
// with memory-model instructions (PTX 8.0, which every CUDA 12 and newer driver compiles):
//
//     nvrtcCompileProgram(..., {"--gpu-architecture=compute_70", "--std=c++17", "--fmad=false"})
//
// or, with a CUDA 12.0 toolkit: nvcc -ptx -arch=compute_70 -fmad=false jacobi2d.cu
//
// The layout of the structure is that of `jacobi2d/relax.rs`. The order of the operations is that of the CPU's code, so that
// the results are the same to the last bit.

typedef unsigned int u32;
typedef unsigned long long u64;

// Columns that a thread computes in a row.
static const u32 COLUMNS = 4;

// Rows `first`, `first + step`, ... of a block of rows, `count` of them.
struct Rows {
    const double *current;
    double *next;
    // Columns, with the fixed ones at both sides.
    u64 width;
    u64 first;
    u64 step;
    u64 count;
};

extern "C" __global__ void relax(Rows rows)
{
    const u32 columns = (u32)rows.width - 2;
    const u32 tile = blockDim.x * COLUMNS;
    const u32 tiles = (columns + tile - 1) / tile;
    const u32 all = tiles * (u32)rows.count;

    for (u32 i = blockIdx.x; i < all; i += gridDim.x) {
        const u64 row = rows.first + i / tiles * rows.step;
        const double *above = rows.current + (row - 1) * rows.width;
        const double *here = above + rows.width;
        const double *below = here + rows.width;
        double *next = rows.next + row * rows.width;
        const u32 begin = 1 + i % tiles * tile;
        const u32 end = begin + tile < columns + 1 ? begin + tile : columns + 1;
        for (u32 j = begin + threadIdx.x; j < end; j += blockDim.x)
            next[j] = ((above[j] + below[j]) + (here[j - 1] + here[j + 1])) * 0.25;
    }
}
