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

// What became of a wait for either of two words.
enum Met : u32 { NEITHER, MET, MET_ERROR };

// Waits for a completion, or until the word of `placed`, in memory of this GPU, has the upper half of its value: a kernel of the peer writes
// it behind the message, and the completion follows. What it has seen comes before what is done behind it.
static __device__ __noinline__ Met await_either(const Op completion, const Op placed, u64 limit_ns, u32 failed)
{
    const detail::Test<u32> test(completion.cond, (u32)completion.value);
    u64 start = 0;
#pragma unroll 1
    for (u32 rounds = 1;; ++rounds) {
        // Mostly farther away, so the other word is looked at twice meanwhile.
        const u32 word = detail::load_32(completion.addr);
#pragma unroll
        for (u32 i = 0; i < 2; ++i) {
            if ((detail::load_64(placed.addr) ^ placed.value) >> 32 == 0) {
                detail::acquire_64(placed.addr);
                return MET;
            }
        }
        if (test.holds(word)) {
            detail::acquire_32(completion.addr);
            return word >> 28 >= 13 ? MET_ERROR : MET;
        }
        if (failed)
            return NEITHER;
        if (rounds % 64 != 0)
            continue;
        const u64 time = detail::now_ns();
        if (start == 0)
            start = time;
        else if (time - start > limit_ns)
            return NEITHER;
    }
}

// A wait of a program, and of `EITHER` the one behind it. Orders what it has seen before what is done behind it. Returns the index of the
// last operation that it has done.
static __device__ __forceinline__ u64 wait(const Head &head, const Op *ops, u64 i, u32 *failed, u32 *errors)
{
    const Op op = ops[i];
    if (op.flags & EITHER) {
        const Met met = await_either(op, ops[++i], head.limit_ns, *failed);
        *errors += met == MET_ERROR;
        if (met == NEITHER && !*failed) {
            *failed = 1;
            detail::fail(head, op.addr);
        }
    } else {
        detail::wait(head, op, failed, errors);
    }
    // The CPU fails a stream before it ends its waits: nothing that a peer takes for good comes behind these.
    *failed |= detail::has_failed(head);
    // What it has seen, the kernels behind this one see too.
    if (!(op.flags & EITHER) && (i + 1 == (u32)head.count || !detail::has_fence(ops[i + 1].kind)))
        detail::order(op);
    return i;
}

static __device__ void run(const Head &head, const Op *ops)
{
    u32 failed = detail::has_failed(head), errors = 0;
    for (u64 i = 0; i < head.count; ++i) {
        const Op op = ops[i];
        if (!detail::is_wait(op)) {
            detail::act(head, op, false, failed, &errors);
            continue;
        }
        i = wait(head, ops, i, &failed, &errors);
    }
    detail::tell(head, &errors);
}

// Waits until the kernel ahead has ended, and lets the next one start, which waits here in turn: at most one kernel of the library is
// ahead in a stream. Compute capability 9.0 has the instructions; for others loading leaves them comments.
static __device__ __forceinline__ void follow()
{
    asm volatile("//sm_90 griddepcontrol.wait;" ::: "memory");
    asm volatile("//sm_90 griddepcontrol.launch_dependents;" ::: "memory");
}

extern "C" __global__ void __launch_bounds__(1) gds_run_12(const __grid_constant__ Parameter<12> program)
{
    follow();
    run(program.head, program.ops);
}

extern "C" __global__ void __launch_bounds__(1) gds_run_160(const __grid_constant__ Parameter<160> program)
{
    follow();
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

// The same for a node of a graph, whose program is in memory. The CPU writes it before it launches the graph, so it may be read before
// `follow`. A piece for each thread comes at once, which is all of most programs; that much is always there.
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
    follow();
    if (threadIdx.x == 0)
        run(program.head, program.ops);
}

static __device__ __forceinline__ void load_pair(u64 at, u64 *first, u64 *second)
{
    asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];" : "=l"(*first), "=l"(*second) : "l"(at) : "memory");
}

// The address of a receive that a peer has told of, for `len` bytes; 0 if it is too short, or in memory that is not open. The
// formats are those of `gdsync::stream::place`; the peer wrote the line, and this process the table.
static __device__ u64 find(const Op &line, u64 table, u64 len)
{
    u64 told, where;
    load_pair(line.addr, &told, &where);
    const u64 entry = table + 16 * (where >> 40 & 255), offset = where & (((u64)1 << 40) - 1);
    if (told >> 32 != line.value || (u32)told < len || where >> 48 == 0)
        return 0;
    u64 base, open;
    load_pair(entry, &base, &open);
    return open >> 48 == where >> 48 && offset + len <= (open & (((u64)1 << 48) - 1)) ? base + offset : 0;
}

// What is known of the first receive that a program has to find, before the kernel ahead has ended: a look at memory of the host takes
// 1 us. Once the credit in front of it is there, it stays there, and the line stays as it is.
struct Early {
    // The index of the FIND, which has a LENGTH before it; 0 if there is none.
    u32 at;
    bool has_credit;
    // Its answer.
    u64 found;

    __device__ __forceinline__ Early(const Head &head, const Op *ops) : at(head.count >> 32), has_credit(false), found(0)
    {
        if (at < 2 || gridDim.x > 1 || threadIdx.x > 0 || !(ops[at - 2].flags & CREDIT))
            return;
        has_credit = (int)(detail::acquire_32(ops[at - 2].addr) - (u32)ops[at - 2].value) >= 0;
        if (has_credit)
            found = find(ops[at], ops[at + 1].addr, ops[at - 1].value);
    }
};

// What the blocks of a copy share, behind the status; zero between kernels.
struct Blocks {
    // Where they copy to, as the first one says, once it is not 0.
    u64 to;
    u32 come, done;
};

// In place of an address: there is no receive, the stream has failed.
enum : u64 { NOWHERE = 1, STOPPED = 2 };

// Whether one of several blocks is to do what is before the copy: what must be done once, and reads of host memory, which take 1 us
// each, and those of several blocks one after the other. For words of this GPU that only grow each block waits by itself.
static __device__ bool needs_leader(const Op *op)
{
    for (; op->kind != COPY; ++op)
        if (op->kind != LENGTH && !(op->kind == WAIT_64 && op->flags & NEAR && op->cond == GEQ))
            return true;
    return false;
}

// A program with copies. One thread does the other operations, all of the block copy. With several blocks the one that comes
// first leads if needed, and the last one does all behind the copy.
static __device__ void run_copies(const Head &head, const Op *ops)
{
    const Early early(head, ops);
    follow();
    __shared__ u64 to;
    __shared__ bool is_last;
    Blocks *const blocks = (Blocks *)(head.status + 1);
    const bool first = threadIdx.x == 0;
    const u32 count = (u32)head.count;
    bool alone = gridDim.x == 1, fenced = false;
    const bool is_led = !alone && needs_leader(ops);
    // By arrival, not by its index: it runs, whatever else holds the multiprocessors, and its waits have a limit. So have
    // those of the blocks that wait for it.
    bool leads = first && (!is_led || atomicAdd(&blocks->come, 1) == 0);
    u32 failed = leads ? detail::has_failed(head) : 0, errors = 0;
    u64 len = 0, found = 0;
    for (u64 i = 0; i < count; ++i) {
        const Op op = ops[i];
        if (op.kind == LENGTH) {
            len = op.value;
            continue;
        }
        if (op.kind == FIND) {
            // The copy follows.
            if (leads && !failed)
                found = i == early.at && early.has_credit ? early.found : find(op, ops[i + 1].addr, len);
            continue;
        }
        if (op.kind != COPY) {
            if (!leads || (op.flags & FOUND && detail::is_wait(op) == (found != 0)))
                continue;
            if (!detail::is_wait(op))
                detail::act(head, op, fenced, failed, &errors);
            else if (!early.has_credit || i + 2 != early.at)
                i = wait(head, ops, i, &failed, &errors);
            fenced = false;
            continue;
        }
        if (leads) {
            to = failed ? STOPPED : !(op.flags & FOUND) ? op.addr : found ? found : NOWHERE;
            if (is_led && !alone) {
                // Before the mark, which may be another block's.
                detail::tell(head, &errors);
                asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(&blocks->to), "l"(to) : "memory");
            }
        } else if (first) {
            u64 told;
            do
                asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(told) : "l"(&blocks->to) : "memory");
            while (!told);
            to = told;
        }
        // What the first thread has waited for, all may read; what all have written, it orders before what it does next.
        __syncthreads();
        if (to > STOPPED) {
            const u64 block = alone ? 0 : blockIdx.x;
            detail::copy_share(to, op.value, len, block * blockDim.x + threadIdx.x, (alone ? 1 : gridDim.x) * (u64)blockDim.x);
        }
        __syncthreads();
        fenced = false;
        found = to > STOPPED ? to : 0;
        if (alone)
            continue;
        if (first) {
            // Orders what the block has written before its count, for this GPU. The last block, which sees all counts, orders all of
            // it for the system below: such a fence in each block would take 1.2 us more.
            asm volatile("fence.acq_rel.gpu;" ::: "memory");
            // The upper half counts blocks that have stopped.
            const u32 own = to == STOPPED ? 0x10001 : 1, all = atomicAdd(&blocks->done, own) + own;
            leads = is_last = (all & 0xffff) == gridDim.x;
            failed = all >> 16;
            if (is_last) {
                detail::fence();
                *blocks = Blocks{};
            }
        }
        __syncthreads();
        if (!is_last)
            break;
        alone = fenced = true;
    }
    if (leads)
        detail::tell(head, &errors);
}

extern "C" __global__ void __launch_bounds__(512) gds_copy_12(const __grid_constant__ Parameter<12> program)
{
    run_copies(program.head, program.ops);
}

extern "C" __global__ void __launch_bounds__(512) gds_copy_160(const __grid_constant__ Parameter<160> program)
{
    run_copies(program.head, program.ops);
}

extern "C" __global__ void __launch_bounds__(512) gds_copy_at(u64 at)
{
    __shared__ Piece pieces[sizeof(Parameter<160>) / sizeof(Piece)];
    const Parameter<160> &program = *(const Parameter<160> *)pieces;
    if (threadIdx.x < 32)
        copy(pieces, at, threadIdx.x);
    __syncthreads();
    const u64 used = sizeof(Head) + program.head.count * sizeof(Op);
    for (u32 i = 32 + threadIdx.x; i * sizeof(Piece) < used; i += blockDim.x)
        copy(pieces, at, i);
    __syncthreads();
    run_copies(program.head, program.ops);
}

// The next operations of a program of messages: of a message three or four, else one. All come at once, without a look at the first.
struct Next {
    Op first, length, op;
    u64 word;

    __device__ __forceinline__ Next(const Op *ops, u32 at, u32 last)
        : first(ops[at]), length(ops[min(at + 1, last)]), op(ops[min(at + 2, last)]), word(ops[min(at + 3, last)].value)
    {
    }

    __device__ __forceinline__ bool is_message() const { return first.flags & BY_MOVE; }

    __device__ __forceinline__ u32 count() const { return !is_message() ? 1 : op.kind == PACK ? 4 : 3; }

    __device__ __forceinline__ detail::Move move(u64 ahead) const
    {
        return {op.kind, first.addr, first.value, length.addr, length.value, op.addr, op.value, word, ahead};
    }
};

// A program of messages, and of operations without waits. All threads do a message, and wait for it. Several blocks do one, and the last
// one of them what is behind it. At `where`, unless it is 0, is what this launch of a graph adds to the words that announce them.
static __device__ void run_messages(const Head &at, const Op *ops, u64 where)
{
    // Before the kernel ahead has ended. The CPU writes it before it launches the graph. Predicated: a branch would wait for the load.
    u64 ahead;
    asm volatile("{\n\t.reg .pred p;\n\t.reg .u64 t;\n\tsetp.ne.u64 p, %1, 0;\n\tmov.u64 t, 0;\n\t"
                 "@p ld.relaxed.sys.global.u64 t, [%1];\n\tmov.u64 %0, t;\n\t}"
                 : "=l"(ahead)
                 : "l"(where)
                 : "memory");
    const Head head = at;
    Next next(ops, 0, 3);
    follow();
    u32 failed = detail::has_failed(head), errors = 0;
    const bool first = threadIdx.x == 0;
    bool alone = gridDim.x == 1;
    const u32 count = (u32)head.count, thread = blockIdx.x * blockDim.x + threadIdx.x, threads = gridDim.x * blockDim.x;
#pragma unroll 1
    for (u32 i = 0; i < count;) {
        const Next now = next;
        i += now.count();
        next = Next(ops, min(i, count - 1), count - 1);
        if (!now.is_message()) {
            Op op = now.first;
            op.value += op.flags & NUMBERED ? ahead : 0;
            if (first)
                detail::act(head, op, false, failed, &errors);
            // A message has what was written before it.
            if (i < count && next.is_message())
                __syncthreads();
            continue;
        }
        const detail::Move move = now.move(ahead);
        const detail::Outcome outcome = move.kind == PACK ? detail::pack_share(head, failed, move, thread, threads)
                                                          : detail::take_share(head, failed, move, thread, threads);
        const bool packs_direct = outcome == detail::DIRECT && move.kind == PACK;
        // Nothing is behind.
        if (i == count && (move.kind == TAKE || alone && !packs_direct)) {
            if (outcome == detail::MISSED)
                detail::miss(head, move.awaited);
            return;
        }
        if (__syncthreads_or(outcome == detail::MISSED)) {
            failed = 1;
            if (first)
                detail::miss(head, move.awaited);
        }
        if (!alone) {
            Blocks *const blocks = (Blocks *)(head.status + 1);
            __shared__ bool is_last;
            if (first) {
                // Lines need none: what was read for them is in them.
                if (packs_direct || move.kind == TAKE)
                    asm volatile("fence.acq_rel.gpu;" ::: "memory");
                // The upper half counts blocks that have failed.
                const u32 own = failed ? 0x10001 : 1, all = atomicAdd(&blocks->done, own) + own;
                is_last = (all & 0xffff) == gridDim.x;
                failed = all >> 16;
                if (is_last)
                    *blocks = Blocks{};
            }
            __syncthreads();
            if (!is_last)
                return;
            alone = true;
        }
        if (packs_direct && first)
            detail::act(head, Op{WRITE_64, 0, 0, move.to, move.word + move.ahead}, false, failed, &errors);
    }
}

extern "C" __global__ void __launch_bounds__(512) gds_message_12(const __grid_constant__ Parameter<12> program, u64 where)
{
    run_messages(program.head, program.ops, where);
}

extern "C" __global__ void __launch_bounds__(512) gds_message_160(const __grid_constant__ Parameter<160> program, u64 where)
{
    run_messages(program.head, program.ops, where);
}

extern "C" __global__ void __launch_bounds__(512) gds_message_at(u64 at, u64 where)
{
    const Parameter<160> &program = *(const Parameter<160> *)at;
    run_messages(program.head, program.ops, where);
}

// Behind a kernel of the application that runs steps: runs those that it has left, and marks the stream.
extern "C" __global__ void __launch_bounds__(1) gds_finish(const Program *program)
{
    follow();
    Steps(program).finish();
}
