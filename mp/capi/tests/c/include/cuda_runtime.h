/* What mp.h and comm.h use of NVIDIA's cuda_runtime.h. */

#ifndef CUDA_RUNTIME_H
#define CUDA_RUNTIME_H

#include <cuda.h>

typedef CUstream cudaStream_t;
typedef int cudaError_t; /* an enumeration there */

#define cudaSuccess 0
#define cudaHostAllocPortable 1
#define cudaHostAllocMapped 2

#ifdef __cplusplus
extern "C" {
#endif

cudaError_t cudaGetDeviceCount(int *count);
cudaError_t cudaHostAlloc(void **memory, size_t size, unsigned flags);

#ifdef __cplusplus
}
#endif

#endif
