/*
 * What programs use of CUDA's runtime, without kernels, over the simulated driver (testkit/cuda). NVIDIA's own runtime asks
 * the driver for tables that it does not document.
 */

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CU(call)                                                                                                       \
    do {                                                                                                               \
        CUresult result_ = (call);                                                                                     \
        if (result_ != CUDA_SUCCESS)                                                                                   \
            return (cudaError_t)result_;                                                                               \
    } while (0)

enum { MAX_STREAMS = 64 };
static cudaStream_t streams[MAX_STREAMS];

/* The primary context of the GPU, current on the calling thread. */
static cudaError_t enter(int device)
{
    CUcontext current = NULL, context;
    CU(cuInit(0));
    CU(cuCtxGetCurrent(&current));
    if (current)
        return cudaSuccess;
    CU(cuDevicePrimaryCtxRetain(&context, device));
    CU(cuCtxPushCurrent(context));
    return cudaSuccess;
}

#define ENTER()                                                                                                        \
    do {                                                                                                               \
        cudaError_t error_ = enter(0);                                                                                 \
        if (error_ != cudaSuccess)                                                                                     \
            return error_;                                                                                             \
    } while (0)

cudaError_t cudaGetDeviceCount(int *count)
{
    CU(cuInit(0));
    CU(cuDeviceGetCount(count));
    return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) { return enter(device); }

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *properties, int device)
{
    memset(properties, 0, sizeof *properties);
    properties->multiProcessorCount = 1;
    CU(cuDeviceGetName(properties->name, sizeof properties->name, device));
    return cudaSuccess;
}

const char *cudaGetErrorString(cudaError_t error)
{
    static char text[32];
    snprintf(text, sizeof text, "error %d", error);
    return text;
}

cudaError_t cudaMalloc(void **memory, size_t size)
{
    CUdeviceptr address;
    ENTER();
    CU(cuMemAlloc(&address, size));
    *memory = (void *)address;
    return cudaSuccess;
}

cudaError_t cudaFree(void *memory)
{
    ENTER();
    CU(memory ? cuMemFree((CUdeviceptr)memory) : CUDA_SUCCESS);
    return cudaSuccess;
}

cudaError_t cudaHostAlloc(void **memory, size_t size, unsigned flags)
{
    ENTER();
    CU(cuMemHostAlloc(memory, size, flags));
    return cudaSuccess;
}

cudaError_t cudaMallocHost(void **memory, size_t size) { return cudaHostAlloc(memory, size, 0); }

cudaError_t cudaFreeHost(void *memory)
{
    CU(cuMemFreeHost(memory));
    return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags)
{
    ENTER();
    CU(cuStreamCreateWithPriority(stream, flags, 0));
    for (int i = 0; i < MAX_STREAMS; i++) {
        if (!streams[i]) {
            streams[i] = *stream;
            return cudaSuccess;
        }
    }
    return cudaErrorMemoryAllocation;
}

cudaError_t cudaStreamCreate(cudaStream_t *stream) { return cudaStreamCreateWithFlags(stream, 0); }

cudaError_t cudaStreamDestroy(cudaStream_t stream)
{
    for (int i = 0; i < MAX_STREAMS; i++)
        if (streams[i] == stream)
            streams[i] = NULL;
    CU(cuStreamDestroy(stream));
    return cudaSuccess;
}

cudaError_t cudaStreamQuery(cudaStream_t stream)
{
    CU(cuStreamQuery(stream));
    return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream)
{
    CU(cuStreamSynchronize(stream));
    return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize(void)
{
    ENTER();
    CU(cuStreamSynchronize(NULL));
    for (int i = 0; i < MAX_STREAMS; i++)
        if (streams[i])
            CU(cuStreamSynchronize(streams[i]));
    return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t size, enum cudaMemcpyKind kind, cudaStream_t stream)
{
    (void)kind;
    ENTER();
    CU(cuMemcpyAsync((CUdeviceptr)to, (CUdeviceptr)from, size, stream));
    return cudaSuccess;
}

cudaError_t cudaMemcpy(void *to, const void *from, size_t size, enum cudaMemcpyKind kind)
{
    cudaError_t error = cudaMemcpyAsync(to, from, size, kind, NULL);
    return error ? error : cudaStreamSynchronize(NULL);
}

/* The driver has no call for bytes: copies as many. */
cudaError_t cudaMemsetAsync(void *memory, int value, size_t size, cudaStream_t stream)
{
    void *bytes = malloc(size);
    if (!bytes)
        return cudaErrorMemoryAllocation;
    memset(bytes, value, size);
    cudaError_t error = cudaMemcpyAsync(memory, bytes, size, cudaMemcpyDefault, stream);
    if (error)
        return error;
    CU(cuLaunchHostFunc(stream, free, bytes));
    return cudaSuccess;
}

/* Of registered memory it is synchronous. */
cudaError_t cudaMemset(void *memory, int value, size_t size)
{
    cudaError_t error = cudaMemsetAsync(memory, value, size, NULL);
    return error ? error : cudaStreamSynchronize(NULL);
}

cudaError_t cudaGetLastError(void)
{
    return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t *event)
{
    return (cudaError_t)cuEventCreate(event, 0);
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream)
{
    return (cudaError_t)cuEventRecord(event, stream);
}

cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t start, cudaEvent_t stop)
{
    *milliseconds = 0;
    return start && stop ? cudaSuccess : cudaErrorInvalidValue;
}

cudaError_t cudaEventDestroy(cudaEvent_t event)
{
    return (cudaError_t)cuEventDestroy(event);
}
