// A kernel that runs steps, for tests. They load `kernel.ptx`, made from this file as `lane.ptx` is from its own.

#include "gdsync.cuh"

using gds::u32;
using gds::u64;

// The layout of `app.rs`.
struct Call {
    const gds::Program *program;
    // The steps to run, and how many.
    const u32 *order;
    u64 count;
    // Before step `i` is run, `first + i` is put here.
    volatile u64 *sent;
    u64 first;
    // After it is run, what it returned and what was here go to the log.
    volatile u64 *received;
    volatile u64 *log;
};

extern "C" __global__ void app(Call call)
{
    gds::Steps steps(call.program);
    for (u64 i = 0; i < call.count; ++i) {
        if (threadIdx.x == 0) {
            *call.sent = call.first + i;
            // Every other time ahead of the step.
            if (i % 2 == 1)
                steps.publish();
        }
        const int result = gds::block_step(steps, call.order[i]);
        // The last thread looks: what the first has waited for, all see.
        if (threadIdx.x == blockDim.x - 1) {
            call.log[2 * i] = result;
            call.log[2 * i + 1] = *call.received;
        }
        if (result == gds::FAILED)
            return;
    }
}
