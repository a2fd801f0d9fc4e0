/* Entry points of the driver that the simulated one (testkit/cuda) lacks, by others that it has. Profiles are nothing. */

#include <cuda.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { STREAMS = 64 };
static CUstream streams[STREAMS];

CUresult cuStreamCreate(CUstream *stream, unsigned flags)
{
    CUresult result = cuStreamCreateWithPriority(stream, flags, 0);
    for (int i = 0; result == CUDA_SUCCESS && i < STREAMS; i++) {
        if (!streams[i]) {
            streams[i] = *stream;
            return CUDA_SUCCESS;
        }
    }
    return result == CUDA_SUCCESS ? CUDA_ERROR_OUT_OF_MEMORY : result;
}

CUresult cuCtxSynchronize(void)
{
    CUresult result = CUDA_SUCCESS;
    /* A stream that was destroyed is no error. */
    for (int i = 0; i < STREAMS; i++) {
        if (streams[i] && cuStreamQuery(streams[i]) == CUDA_ERROR_NOT_READY && result == CUDA_SUCCESS)
            result = cuStreamSynchronize(streams[i]);
    }
    return result;
}

CUresult cuCtxSetCurrent(CUcontext context)
{
    return cuCtxPushCurrent(context);
}

CUresult cuEventSynchronize(CUevent event)
{
    CUresult result;
    while ((result = cuEventQuery(event)) == CUDA_ERROR_NOT_READY)
        usleep(20);
    return result;
}

/* The caller waits in place of the stream. */
CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned flags)
{
    (void)stream;
    return flags ? CUDA_ERROR_INVALID_VALUE : cuEventSynchronize(event);
}

/* The simulated GPU's memory is the program's. */
CUresult cuMemsetD8(CUdeviceptr to, unsigned char value, size_t count)
{
    memset((void *)to, value, count);
    return CUDA_SUCCESS;
}

struct callback {
    CUstream stream;
    CUstreamCallback call;
    void *data;
};

static void run(void *data)
{
    struct callback *callback = data;
    callback->call(callback->stream, CUDA_SUCCESS, callback->data);
    free(callback);
}

CUresult cuStreamAddCallback(CUstream stream, CUstreamCallback call, void *data, unsigned flags)
{
    struct callback *callback = malloc(sizeof *callback);
    if (flags || !callback)
        return CUDA_ERROR_INVALID_VALUE;
    *callback = (struct callback){stream, call, data};
    return cuLaunchHostFunc(stream, run, callback);
}

CUresult cuGetErrorString(CUresult result, const char **text)
{
    *text = result == CUDA_SUCCESS ? "no error" : "an error of the simulated driver";
    return CUDA_SUCCESS;
}

CUresult cuProfilerStart(void)
{
    return CUDA_SUCCESS;
}

CUresult cuProfilerStop(void)
{
    return CUDA_SUCCESS;
}
