// Two ranks on two GPUs: puts with signals on streams, eager and in graphs (`put`), or an exchange by a kernel (`gin`). Checks all data.
// `fault kill|stop eager|graph before|in|after` loses rank 1 at a put, and prints how long the stream of rank 0 waits.
#include <cuda_runtime.h>
#include <nccl.h>
#include <nccl_device.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>
#include <vector>

#include <gda_nccl.h>

#define CUDA(call)                                                                                       \
    do {                                                                                                 \
        cudaError_t error = (call);                                                                      \
        if (error != cudaSuccess) stop(#call, cudaGetErrorString(error));                                \
    } while (0)
#define NCCL(call)                                                                                       \
    do {                                                                                                 \
        ncclResult_t result = (call);                                                                    \
        if (result != ncclSuccess) stop(#call, ncclGetLastError(nullptr));                               \
    } while (0)

static int rank;
// What follows the failure of a call where rank 1 may be lost.
static void (*after_loss)();

[[noreturn]] static void stop(const char *what, const char *why) {
    printf("rank %d: %s: %s\n", rank, what, why);
    fflush(stdout);
    if (after_loss) after_loss();
    _exit(1);
}

// The byte at a place of what a rank sends in a round.
__host__ __device__ static unsigned char byte_of(size_t at, unsigned seed) {
    return static_cast<unsigned char>(at * 31 + (at >> 8) * 7 + seed * 113 + 1);
}

__global__ static void fill(unsigned char *bytes, size_t count, unsigned seed) {
    for (size_t at = blockIdx.x * blockDim.x + threadIdx.x; at < count; at += gridDim.x * blockDim.x)
        bytes[at] = byte_of(at, seed);
}

__global__ static void check(const unsigned char *bytes, size_t count, unsigned seed, unsigned long long *wrong) {
    for (size_t at = blockIdx.x * blockDim.x + threadIdx.x; at < count; at += gridDim.x * blockDim.x)
        if (bytes[at] != byte_of(at, seed)) atomicAdd(wrong, 1ULL);
}

static constexpr int RANKS = 2;
static constexpr int BLOCKS = 32, THREADS = 256;
static constexpr size_t LARGEST = size_t(64) << 20;

struct Rank {
    ncclComm_t comm;
    cudaStream_t stream;
    unsigned long long *wrong;
    ncclCommProperties_t properties;
};

// Sends to the other rank, waits for what it sends, checks it, and waits until it has checked, too.
static void round_of_puts(Rank &me, unsigned char *buffer, ncclWindow_t window, size_t count, unsigned round) {
    int peer = 1 - rank;
    unsigned char *received = buffer + LARGEST;
    ncclWaitSignalDesc_t one{1, peer, 0, 0};
    fill<<<BLOCKS, THREADS, 0, me.stream>>>(buffer, count, round * RANKS + rank);
    NCCL(ncclPutSignal(buffer, count, ncclChar, peer, window, LARGEST, 0, 0, 0, me.comm, me.stream));
    NCCL(ncclWaitSignal(1, &one, me.comm, me.stream));
    check<<<BLOCKS, THREADS, 0, me.stream>>>(received, count, round * RANKS + peer, me.wrong);
    CUDA(cudaMemsetAsync(received, 0, count, me.stream));
    NCCL(ncclSignal(peer, 0, 0, 0, me.comm, me.stream));
    NCCL(ncclWaitSignal(1, &one, me.comm, me.stream));
}

static void puts_and_signals(Rank &me) {
    if (!me.properties.hostRmaSupport) stop("ncclPutSignal", "the communicator has no host RMA");
    void *buffer;
    ncclWindow_t window;
    NCCL(ncclMemAlloc(&buffer, 2 * LARGEST));
    NCCL(ncclCommWindowRegister(me.comm, buffer, 2 * LARGEST, &window, NCCL_WIN_COLL_SYMMETRIC));
    auto bytes = static_cast<unsigned char *>(buffer);
    for (size_t count : {size_t(8), size_t(1000), size_t(4) << 10, size_t(64) << 10, size_t(1) << 20, size_t(16) << 20, LARGEST}) {
        unsigned rounds = count > (1 << 20) ? 4 : 20;
        for (bool in_graph : {false, true}) {
            cudaGraphExec_t graph = nullptr;
            if (in_graph) {
                cudaGraph_t captured;
                CUDA(cudaStreamBeginCapture(me.stream, cudaStreamCaptureModeThreadLocal));
                for (unsigned round = 0; round < rounds; round++) round_of_puts(me, bytes, window, count, round);
                CUDA(cudaStreamEndCapture(me.stream, &captured));
                CUDA(cudaGraphInstantiate(&graph, captured, 0));
                CUDA(cudaGraphDestroy(captured));
            }
            std::vector<double> times;
            for (int repeat = 0; repeat < 3; repeat++) {
                auto start = std::chrono::steady_clock::now();
                if (in_graph)
                    CUDA(cudaGraphLaunch(graph, me.stream));
                else
                    for (unsigned round = 0; round < rounds; round++) round_of_puts(me, bytes, window, count, round);
                CUDA(cudaStreamSynchronize(me.stream));
                std::chrono::duration<double, std::micro> took = std::chrono::steady_clock::now() - start;
                times.push_back(took.count() / rounds);
            }
            unsigned long long wrong;
            CUDA(cudaMemcpy(&wrong, me.wrong, sizeof wrong, cudaMemcpyDeviceToHost));
            if (wrong) stop("ncclPutSignal", "wrong data");
            if (rank == 0)
                printf("put, %s: %zu bytes: right, %.0f us a round\n", in_graph ? "graph" : "eager", count,
                       *std::min_element(times.begin(), times.end()));
            if (graph) CUDA(cudaGraphExecDestroy(graph));
        }
    }
    NCCL(ncclCommWindowDeregister(me.comm, window));
    NCCL(ncclMemFree(buffer));
}

// Puts a part of `from` into `to` of every rank, and waits until all have done so.
__global__ static void exchange(ncclWindow_t from, ncclWindow_t to, size_t count, ncclDevComm comm) {
    ncclGin gin{comm, 0};
    uint64_t before = gin.readSignal(0);
    ncclGinBarrierSession<ncclCoopCta> barrier{ncclCoopCta(), gin, ncclTeamTagWorld(), 0};
    barrier.sync(ncclCoopCta(), cuda::memory_order_acquire, ncclGinFenceLevel::None);
    for (int peer = threadIdx.x; peer < comm.nRanks; peer += blockDim.x)
        gin.put(ncclTeamWorld(comm), peer, to, comm.rank * count, from, peer * count, count, ncclGin_WeakSignalInc{0});
    gin.waitSignal(ncclCoopCta(), 0, before + comm.nRanks);
    gin.flush(ncclCoopCta());
    barrier.sync(ncclCoopCta(), cuda::memory_order_release, ncclGinFenceLevel::None);
}

static void kernels(Rank &me) {
    if (me.properties.ginType != NCCL_GIN_TYPE_PROXY) stop("GIN", "the communicator has no GIN by a proxy");
    void *from, *to;
    ncclWindow_t source, target;
    NCCL(ncclMemAlloc(&from, RANKS * LARGEST));
    NCCL(ncclMemAlloc(&to, RANKS * LARGEST));
    NCCL(ncclCommWindowRegister(me.comm, from, RANKS * LARGEST, &source, NCCL_WIN_COLL_SYMMETRIC));
    NCCL(ncclCommWindowRegister(me.comm, to, RANKS * LARGEST, &target, NCCL_WIN_COLL_SYMMETRIC));
    ncclDevComm comm;
    ncclDevCommRequirements wanted = NCCL_DEV_COMM_REQUIREMENTS_INITIALIZER;
    wanted.worldGinBarrierCount = 1;
    wanted.ginSignalCount = 1;
    wanted.ginConnectionType = NCCL_GIN_CONNECTION_FULL;
    NCCL(ncclDevCommCreate(me.comm, &wanted, &comm));
    auto sent = static_cast<unsigned char *>(from), received = static_cast<unsigned char *>(to);
    for (size_t count : {size_t(8), size_t(4) << 10, size_t(64) << 10, size_t(1) << 20, size_t(16) << 20, LARGEST}) {
        unsigned rounds = count > (1 << 20) ? 4 : 20;
        auto start = std::chrono::steady_clock::now();
        for (unsigned round = 0; round < rounds; round++) {
            CUDA(cudaMemsetAsync(received, 0, RANKS * count, me.stream));
            for (int peer = 0; peer < RANKS; peer++)
                fill<<<BLOCKS, THREADS, 0, me.stream>>>(sent + peer * count, count, (round * RANKS + rank) * RANKS + peer);
            exchange<<<1, 128, 0, me.stream>>>(source, target, count, comm);
            for (int peer = 0; peer < RANKS; peer++)
                check<<<BLOCKS, THREADS, 0, me.stream>>>(received + peer * count, count,
                                                         (round * RANKS + peer) * RANKS + rank, me.wrong);
        }
        CUDA(cudaStreamSynchronize(me.stream));
        std::chrono::duration<double, std::micro> took = std::chrono::steady_clock::now() - start;
        unsigned long long wrong;
        CUDA(cudaMemcpy(&wrong, me.wrong, sizeof wrong, cudaMemcpyDeviceToHost));
        if (wrong) stop("GIN", "wrong data");
        if (rank == 0) printf("gin: %zu bytes: right, %.0f us a round\n", count, took.count() / rounds);
    }
    NCCL(ncclDevCommDestroy(me.comm, &comm));
    for (ncclWindow_t window : {source, target}) NCCL(ncclCommWindowDeregister(me.comm, window));
    for (void *memory : {from, to}) NCCL(ncclMemFree(memory));
}

using Clock = std::chrono::system_clock;

static pid_t lost_child;

static double since(Clock::time_point start) {
    return std::chrono::duration<double>(Clock::now() - start).count();
}

// Prints a text unless the program ends before.
static void give_up_after(int seconds, const char *text) {
    std::thread([=] {
        sleep(seconds);
        printf("fault: %s for %d s\n", text, seconds);
        fflush(stdout);
        kill(lost_child, SIGKILL);
        _exit(3);
    }).detach();
}

// What the plug-in says, if it is loaded.
static void print_status(Clock::time_point ended) {
    const char *plugin = getenv("NCCL_RMA_PLUGIN");
    void *library = plugin ? dlopen(plugin, RTLD_NOW | RTLD_NOLOAD) : nullptr;
    if (!library) return;
    auto status = reinterpret_cast<decltype(&gda_nccl_status)>(dlsym(library, "gda_nccl_status"));
    gda_nccl_failure failure{};
    // The report comes behind the release of the streams.
    for (int tries = 0; status(&failure, 1) == 0; tries++) {
        if (tries == 1000) stop("gda_nccl_status", "tells nothing");
        usleep(10000);
    }
    double told = std::chrono::duration<double>(ended.time_since_epoch()).count() - failure.time * 1e-9;
    printf("fault: gda_nccl_status: rank %d: %s; the stream ended %.1f ms after it\n", failure.rank, failure.cause, told * 1e3);
}

// From rank 0 to rank 1: the communicator's id, and when to be lost.
static int pipe_to_1[2];
static ncclComm_t with_loss;
static cudaGraphExec_t loss_graph;

// What a program does after a loss.
static void end_after_loss() {
    after_loss = nullptr;
    // ncclCommAbort waits for graphs that hold the communicator.
    if (loss_graph) CUDA(cudaGraphExecDestroy(loss_graph));
    auto aborted = Clock::now();
    ncclResult_t result = ncclCommAbort(with_loss);
    printf("fault: ncclCommAbort: %s after %.3f s\n", ncclGetErrorString(result), since(aborted));
    void *memory;
    CUDA(cudaMalloc(&memory, 1 << 20));
    CUDA(cudaMemset(memory, 0, 1 << 20));
    CUDA(cudaDeviceSynchronize());
    printf("fault: the GPU is usable\n");
    fflush(stdout);
    kill(lost_child, SIGKILL);
    _exit(0);
}

static void lose_rank_1(Rank &me, pid_t child, char **arguments) {
    bool stops = strcmp(arguments[2], "stop") == 0, in_graph = strcmp(arguments[3], "graph") == 0;
    bool before = strcmp(arguments[4], "before") == 0, inside = strcmp(arguments[4], "in") == 0;
    void *buffer;
    ncclWindow_t window;
    NCCL(ncclMemAlloc(&buffer, 2 * LARGEST));
    NCCL(ncclCommWindowRegister(me.comm, buffer, 2 * LARGEST, &window, NCCL_WIN_COLL_SYMMETRIC));
    auto bytes = static_cast<unsigned char *>(buffer);
    size_t count = inside ? LARGEST : 8;
    auto rounds = [&](unsigned number) {
        for (unsigned round = 0; round < number; round++) round_of_puts(me, bytes, window, count, round);
    };
    rounds(1);
    if (in_graph) {
        cudaGraph_t captured;
        CUDA(cudaStreamBeginCapture(me.stream, cudaStreamCaptureModeThreadLocal));
        rounds(4);
        CUDA(cudaStreamEndCapture(me.stream, &captured));
        CUDA(cudaGraphInstantiate(&loss_graph, captured, 0));
        CUDA(cudaGraphDestroy(captured));
    }
    auto start = [&] {
        if (in_graph)
            CUDA(cudaGraphLaunch(loss_graph, me.stream));
        else
            rounds(4);
    };
    CUDA(cudaStreamSynchronize(me.stream));
    char go = 0;
    if (rank == 0) {
        // A call may find the loss first.
        with_loss = me.comm;
        lost_child = child;
        after_loss = end_after_loss;
        if (write(pipe_to_1[1], &go, 1) != 1) stop("write", strerror(errno));
    } else if (read(pipe_to_1[0], &go, 1) != 1) {
        stop("read", strerror(errno));
    }
    if (!before) start();
    if (!before && !inside) CUDA(cudaStreamSynchronize(me.stream));
    if (rank == 1) {
        if (inside) usleep(2000);
        kill(getpid(), stops ? SIGSTOP : SIGKILL);
        for (;;) pause();
    }
    if (!inside) start();
    siginfo_t info;
    waitid(P_PID, child, &info, WEXITED | WSTOPPED | WNOWAIT);
    auto lost = Clock::now();
    cudaError_t state;
    while ((state = cudaStreamQuery(me.stream)) == cudaErrorNotReady && since(lost) < 25) usleep(200);
    auto ended = Clock::now();
    if (state == cudaErrorNotReady) {
        printf("fault: the stream waits for ever (25 s)\n");
        give_up_after(10, "ncclCommAbort waits");
    } else {
        printf("fault: the stream ended %.3f s after the loss: %s\n", std::chrono::duration<double>(ended - lost).count(),
               cudaGetErrorString(state));
        print_status(ended);
        give_up_after(30, "ncclCommAbort waits");
    }
    end_after_loss();
}

int main(int, char **arguments) {
    if (pipe(pipe_to_1) != 0) return 1;
    pid_t child = fork();
    rank = child == 0;
    Rank me{};
    CUDA(cudaSetDevice(rank));
    ncclUniqueId id;
    if (rank == 0) {
        NCCL(ncclGetUniqueId(&id));
        if (write(pipe_to_1[1], &id, sizeof id) != sizeof id) return 1;
    } else if (read(pipe_to_1[0], &id, sizeof id) != sizeof id) {
        return 1;
    }
    NCCL(ncclCommInitRank(&me.comm, RANKS, id, rank));
    me.properties = NCCL_COMM_PROPERTIES_INITIALIZER;
    NCCL(ncclCommQueryProperties(me.comm, &me.properties));
    CUDA(cudaStreamCreateWithFlags(&me.stream, cudaStreamNonBlocking));
    CUDA(cudaMalloc(&me.wrong, sizeof *me.wrong));
    CUDA(cudaMemset(me.wrong, 0, sizeof *me.wrong));
    if (strcmp(arguments[1], "fault") == 0)
        lose_rank_1(me, child, arguments);
    else if (strcmp(arguments[1], "gin") == 0)
        kernels(me);
    else
        puts_and_signals(me);
    NCCL(ncclCommFinalize(me.comm));
    NCCL(ncclCommDestroy(me.comm));
    if (rank == 1) _exit(0);
    int status = 1;
    waitpid(child, &status, 0);
    if (status == 0) printf("%s: both ranks: all data right\n", arguments[1]);
    return status != 0;
}
