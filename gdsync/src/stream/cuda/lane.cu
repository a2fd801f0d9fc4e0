// The kernel lane: stream operations run by one thread of a kernel. The library loads `lane.ptx`, made from this file by
// NVRTC 12.0 for its oldest architecture with memory-model instructions (PTX 8.0, which every CUDA 12 and newer driver
// compiles):
//
//     nvrtcCompileProgram(..., {"--gpu-architecture=compute_70", "--std=c++17"})
//
// or, with a CUDA 12.0 toolkit: nvcc -ptx -arch=compute_70 lane.cu
//
// The layout of the structures is that of `lane.rs`.

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

// As in `lane.rs`. INDEX is a 32-bit write of a consumer index, which nothing has to be ordered before; MARK a 64-bit
// write that goes to the next word when the stream has failed.
enum Kind : u32 { WRITE_32, WRITE_64, WAIT_32, WAIT_64, WAIT_CQE, BARRIER, INDEX, MARK };
enum Cond : u32 { GEQ, EQ, AND, NOR };

struct Op {
    u32 kind;
    // Of a wait: its condition, and whether the word is in memory of this GPU.
    u16 cond;
    u16 near;
    u64 addr;
    u64 value;
};

// Kept by the stream, in memory of the GPU where that can be mapped.
struct Status {
    // 1: a wait was not satisfied in time, and nothing is written any more.
    u32 failed;
    // Completions with errors that waits have met.
    u32 errors;
    // The wait that failed: the number of its submission, and its word.
    u64 submission;
    u64 word;
};

struct Head {
    Status *status;
    u64 limit_ns;
    u64 submission;
    u64 count;
};

template <int N> struct Program {
    Head head;
    Op ops[N];
};

static __device__ u64 now_ns()
{
    u64 time;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(time));
    return time;
}

// Waits only look; what comes after the last of them is ordered by a fence.
static __device__ u32 load_32(u64 addr)
{
    u32 value;
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(addr) : "memory");
    return value;
}

static __device__ u64 load_64(u64 addr)
{
    u64 value;
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(addr) : "memory");
    return value;
}

static __device__ void store_32(u64 addr, u32 value)
{
    asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(addr), "r"(value) : "memory");
}

static __device__ void store_64(u64 addr, u64 value)
{
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(addr), "l"(value) : "memory");
}

// `Cond` of the host; a 32-bit word and its value come sign-extended for GEQ and zero-extended otherwise.
template <typename Word, typename Signed> static __device__ bool holds(u32 cond, Word word, Word value)
{
    switch (cond) {
    case GEQ:
        return (Signed)(word - value) >= 0;
    case EQ:
        return word == value;
    case AND:
        return (word & value) != 0;
    default:
        return (Word)~(word | value) != 0;
    }
}

template <typename Word> static __device__ Word load(u64 addr);
template <> __device__ u32 load<u32>(u64 addr) { return load_32(addr); }
template <> __device__ u64 load<u64>(u64 addr) { return load_64(addr); }

// Waits until the word satisfies the operation, and gives it; false when the time is over. `AHEAD` looks are under way at
// a time; the clock is read only now and then.
template <int AHEAD, typename Word, typename Signed>
static __device__ bool await(const Op &op, u64 limit_ns, bool failed, Word *word)
{
    Word looks[AHEAD];
    u64 start = 0;
#pragma unroll
    for (int i = 0; i < AHEAD; ++i)
        looks[i] = load<Word>(op.addr);
    for (u32 rounds = 1;; ++rounds) {
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            *word = looks[i];
            if (holds<Word, Signed>(op.cond, *word, (Word)op.value))
                return true;
            looks[i] = load<Word>(op.addr);
        }
        if (failed)
            return false;
        if (rounds % 64 != 0)
            continue;
        const u64 time = now_ns();
        if (start == 0)
            start = time;
        else if (time - start > limit_ns)
            return false;
    }
}

// On an H200 several looks under way are quicker in the GPU's own memory (a hop of a ping-pong takes 4.2 us instead of 4.6),
// and slower over the bus (7.2 instead of 4.6).
template <typename Word, typename Signed>
static __device__ bool await(const Op &op, u64 limit_ns, bool failed, Word *word)
{
    return op.near ? await<4, Word, Signed>(op, limit_ns, failed, word)
                   : await<1, Word, Signed>(op, limit_ns, failed, word);
}

static __device__ bool await(const Op &op, u64 limit_ns, bool failed, u32 *errors)
{
    if (op.kind == WAIT_64) {
        u64 word;
        return await<u64, long long>(op, limit_ns, failed, &word);
    }
    u32 word;
    const bool met = await<u32, int>(op, limit_ns, failed, &word);
    // The opcode of a CQE: 13 and 14 are errors.
    *errors += met && op.kind == WAIT_CQE && (word >> 28) >= 13;
    return met;
}

// Tells how many completions with errors were met since the last time.
static __device__ void count(const Head &head, u32 *errors)
{
    if (*errors)
        atomicAdd_system(&head.status->errors, *errors);
    *errors = 0;
}

static __device__ void run(const Head &head, const Op *ops)
{
    u32 failed = 0;
    // Its answer arrives while the first wait looks.
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(failed) : "l"(&head.status->failed));
    u32 errors = 0;
    for (u64 i = 0; i < head.count; ++i) {
        const Op op = ops[i];
        switch (op.kind) {
        case WAIT_32:
        case WAIT_64:
        case WAIT_CQE:
            if (!await(op, head.limit_ns, failed != 0, &errors) && !failed) {
                failed = 1;
                store_64((u64)&head.status->submission, head.submission);
                store_64((u64)&head.status->word, op.addr);
                __threadfence_system();
                store_32((u64)&head.status->failed, 1);
            }
            break;
        case WRITE_32:
        case WRITE_64:
            __threadfence_system();
            if (failed)
                break;
            if (op.kind == WRITE_32)
                store_32(op.addr, (u32)op.value);
            else
                store_64(op.addr, op.value);
            break;
        case INDEX:
            if (!failed)
                store_32(op.addr, (u32)op.value);
            break;
        case BARRIER:
            __threadfence_system();
            break;
        case MARK:
            // Before the mark: behind it the status may be another stream's.
            count(head, &errors);
            __threadfence_system();
            store_64(failed ? op.addr + 8 : op.addr, op.value);
            break;
        }
    }
    // What the waits have seen, the kernels behind this one see too.
    __threadfence_system();
    count(head, &errors);
}

extern "C" __global__ void __launch_bounds__(1) gds_run_12(const __grid_constant__ Program<12> program)
{
    run(program.head, program.ops);
}

extern "C" __global__ void __launch_bounds__(1) gds_run_160(const __grid_constant__ Program<160> program)
{
    run(program.head, program.ops);
}

// 16 bytes of a program in memory.
struct __align__(16) Piece {
    u64 words[2];
};

static __device__ void fetch(Piece *to, u64 from, u32 index)
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
    __shared__ Piece pieces[sizeof(Program<160>) / sizeof(Piece)];
    const Program<160> &program = *(const Program<160> *)pieces;
    fetch(pieces, at, threadIdx.x);
    __syncthreads();
    const u64 used = sizeof(Head) + program.head.count * sizeof(Op);
    for (u32 i = 32 + threadIdx.x; i * sizeof(Piece) < used; i += 32)
        fetch(pieces, at, i);
    __syncthreads();
    if (threadIdx.x == 0)
        run(program.head, program.ops);
}
