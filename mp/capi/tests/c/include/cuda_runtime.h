/* What mp.h uses of NVIDIA's cuda_runtime.h. */

#ifndef CUDA_RUNTIME_H
#define CUDA_RUNTIME_H

#include <cuda.h>

typedef CUstream cudaStream_t;

#endif
