/* The device functions of mp/device.cuh by threads of the CPU, each a lane that runs apart from the others. */

#include <mpi.h>

#define __CUDACC__
#define __host__
#define __device__
#define REASON "no library"
#include <checks.h>

#include <atomic>
#include <thread>
#include <vector>

static unsigned __activemask() { return 1; }
static void __syncwarp(unsigned) {}
static int __ffs(int mask) { return __builtin_ffs(mask); }
static void __threadfence_system() { std::atomic_thread_fence(std::memory_order_seq_cst); }
static long long clock64() { return 0; }
static unsigned __byte_perm(unsigned x, unsigned, unsigned selector)
{
    CHECK(selector, 0x0123);
    return __builtin_bswap32(x);
}
static unsigned atomicCAS(unsigned *at, unsigned seen, unsigned value) { return __sync_val_compare_and_swap(at, seen, value); }

#include <mp/device.cuh>

static unsigned record(unsigned index) { return __builtin_bswap32(index & 0xffffff); }

/* Completions 0 to 31 from index `first`, signalled in the order that `order` gives. */
template <typename Order> static void in_order(unsigned first, Order order)
{
    unsigned word = record(first);
    for (unsigned i = 0; i < 32; i++) {
        mp::mlx5::wait_desc_t lane;
        lane.flag.ptr = &word;
        lane.flag.value = record(first + 1 + order(i));
        mp::device::mlx5::signal(lane);
    }
    CHECK(word, record(first + 32));
}

int main()
{
    for (unsigned first : {0u, 5u, 0xfffff0u, 0xffffe0u}) {
        in_order(first, [](unsigned i) { return i; });
        /* The upper half of a warp before the lower one, and each lane after those behind it. */
        in_order(first, [](unsigned i) { return i ^ 16; });
        in_order(first, [](unsigned i) { return 31 - i; });
    }
    /* All at once, behind waits that take different times. */
    for (unsigned round = 0; round < 100; round++) {
        unsigned word = record(0), gate = 0;
        std::vector<std::thread> lanes;
        for (unsigned i = 0; i < 8; i++)
            lanes.emplace_back([&, i] {
                mp::mlx5::wait_desc_t lane;
                lane.sema_cond = GDS_WAIT_COND_GEQ;
                lane.sema.ptr = &gate;
                lane.sema.value = 1;
                lane.flag.ptr = &word;
                lane.flag.value = record(1 + i);
                OK(mp::device::mlx5::wait(lane));
                mp::device::mlx5::signal(lane);
            });
        __atomic_store_n(&gate, 1, __ATOMIC_RELEASE);
        for (std::thread &lane : lanes)
            lane.join();
        CHECK(word, record(8));
    }
    return 0;
}
