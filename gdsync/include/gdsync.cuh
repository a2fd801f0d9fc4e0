// Sends and waits from within a kernel: device code for nvcc and NVRTC, without any dependency.
//
// The CPU records steps once and arms them for each launch of the kernel: work requests are written, and what a step does
// is in memory of the GPU. See `gdsync::stream::KernelSteps`. The kernel runs them, in order:
//
//     extern "C" __global__ void relax(gds::Program *program, ...)   // one block
//     {
//         gds::Steps steps(program);
//         for (gds::u32 i = 0; i < steps.count(); ++i) {
//             ... all threads fill what step i sends ...
//             if (gds::block_step(steps, i) != gds::OK)               // sends, waits
//                 return;
//             ... all threads use what has arrived ...
//         }
//     }
//
// A kernel that is launched before the one ahead has ended (programmatic stream serialization) calls `cudaGridDependencySynchronize`
// before it makes `gds::Steps`, or uses what the stream has received.
//
// What it needs at least: `compute_70`, for loads and stores with a scope.

#pragma once

namespace gds {

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

// What an operation is. INDEX is a 32-bit write of a consumer index, which nothing has to be ordered before; MARK a 64-bit
// write that goes to the next word when the stream has failed. ADD_64 adds to a word; LENGTH is the length of the next COPY,
// PACK or TAKE, which is from `value` to `addr`. PACK stores a message into the lines of a slot if the word of its wait says so, else into
// its place, where the LENGTH says; the write of its word follows. TAKE moves a message from its slot to its place. Their waits are in
// front of the LENGTH. FIND looks for receive `value` at `addr`; no step of an application has it.
enum Kind : u32 { WRITE_32, WRITE_64, WAIT_32, WAIT_64, WAIT_CQE, BARRIER, INDEX, MARK, ADD_64, LENGTH, COPY, FIND = 12, PACK, TAKE };
enum Cond : u32 { GEQ, EQ, AND, NOR };
// NEAR: the word of a wait is in memory of this GPU. LAST: no operation of the step is behind this one. PEER: a copy between GPUs, or a
// signal behind it, which must not follow a wait that the CPU ends because the stream has failed. FOUND: only if the last FIND has found
// a receive; a COPY is into it then, and `addr` is the table of what is open; a wait, only if nothing was copied. DIRECT: only if the
// last PACK was into the place. BY_MOVE: a wait that the PACK or TAKE behind it does, in each thread. EITHER: a wait that is over, too,
// when the word of the WAIT_64 behind it has the upper half of its value; no step of an application has it. CREDIT: a wait for a word
// that only grows. NUMBERED: the value announces a message, and has its number from bit 33 on.
enum Flag : u32 { NEAR = 1, LAST = 2, PEER = 4, FOUND = 8, DIRECT = 16, BY_MOVE = 32, EITHER = 64, CREDIT = 128, NUMBERED = 256 };

struct Op {
    u32 kind;
    // Of a wait.
    u16 cond;
    u16 flags;
    u64 addr;
    u64 value;
};

// Kept by the stream, in memory of the GPU where that can be mapped.
struct Status {
    // 1: a wait was not satisfied in time, and nothing is written any more.
    u32 failed;
    // Completions with errors that waits have met.
    u32 errors;
    // The wait that failed: its submission as the head has it, and its word.
    u64 submission;
    u64 word;
};

struct Head {
    Status *status;
    u64 limit_ns;
    // Its number, or that of a graph whose launches have the same operations.
    u64 submission;
    // Operations that follow, and in the upper half the index of the first FIND; of a program of steps, steps.
    u64 count;
};

// Where a program of steps is: the one that is next, and the place of its first operation.
struct Cursor {
    u32 next;
    u32 place;
};

// The steps of a launch, in memory. Their operations follow.
struct Program {
    Head head;
    Cursor cursor;
    u64 reserved;
};

// The layout of `lane.rs`.
static_assert(sizeof(Op) == 24, "Op");
static_assert(sizeof(Status) == 24, "Status");
static_assert(sizeof(Head) == 32, "Head");
static_assert(sizeof(Program) == 48, "Program");

// What became of a step.
enum Result : int {
    // It was run.
    OK = 0,
    // A wait was not satisfied in time, or the stream has failed otherwise: nothing was written since, and nothing will be.
    FAILED = 1,
    // It was run, but what it waited for has completed with an error: data may be missing. `Stream::synchronize` tells.
    COMPLETION_ERROR = 2,
    // It has been run, it is not the next one, or there is no such step: nothing was done.
    OUT_OF_ORDER = 3,
};

namespace detail {

static __device__ __forceinline__ u64 now_ns()
{
    u64 time;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(time));
    return time;
}

// Looks only: they order nothing.
static __device__ __forceinline__ u32 load_32(u64 addr)
{
    u32 value;
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(addr) : "memory");
    return value;
}

static __device__ __forceinline__ u64 load_64(u64 addr)
{
    u64 value;
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(addr) : "memory");
    return value;
}

// What is read behind these came after what the writer of the word wrote before it.
static __device__ __forceinline__ u32 acquire_32(u64 addr)
{
    u32 value;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(addr) : "memory");
    return value;
}

static __device__ __forceinline__ u64 acquire_64(u64 addr)
{
    u64 value;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(addr) : "memory");
    return value;
}

static __device__ __forceinline__ void store_32(u64 addr, u32 value)
{
    asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(addr), "r"(value) : "memory");
}

static __device__ __forceinline__ void store_64(u64 addr, u64 value)
{
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(addr), "l"(value) : "memory");
}

static __device__ __forceinline__ void add_64(u64 addr, u64 value)
{
    asm volatile("red.relaxed.sys.global.add.u64 [%0], %1;" ::"l"(addr), "l"(value) : "memory");
}

// What was written before is seen by all who see what is written behind it, and what was seen before came before what is
// read behind it. A barrier of the application, `__threadfence_system`, orders all.
static __device__ __forceinline__ void fence()
{
    asm volatile("fence.acq_rel.sys;" ::: "memory");
}

// `Cond` of the host, all of them in one form, which takes no branch at each look.
template <typename Word> struct Test {
    Word minus, flip, mask;
    // It holds when all bits of the mask are zero, not when any is set.
    bool zero;

    __device__ __forceinline__ Test(u32 cond, Word value)
        : minus(cond == GEQ || cond == EQ ? value : 0), flip(cond == NOR ? ~(Word)0 : 0),
          mask(cond == GEQ ? (Word)1 << (8 * sizeof(Word) - 1) : cond == EQ ? ~(Word)0 : cond == NOR ? ~value : value),
          zero(cond == GEQ || cond == EQ)
    {
    }

    __device__ __forceinline__ bool holds(Word word) const { return ((((word - minus) ^ flip) & mask) == 0) == zero; }
};

// A look that is one of several under way, or the only one, which may as well acquire.
template <int AHEAD> static __device__ __forceinline__ u32 look(u64 addr, u32)
{
    return AHEAD > 1 ? load_32(addr) : acquire_32(addr);
}
template <int AHEAD> static __device__ __forceinline__ u64 look(u64 addr, u64)
{
    return AHEAD > 1 ? load_64(addr) : acquire_64(addr);
}

// Waits until the word satisfies the operation, and gives it; false when the time is over. `AHEAD` looks are under way at
// a time; the clock is read only now and then.
template <int AHEAD, typename Word>
static __device__ bool await(const Op &op, u64 limit_ns, bool failed, Word *word)
{
    const Test<Word> test(op.cond, (Word)op.value);
    Word looks[AHEAD];
    u64 start = 0;
#pragma unroll
    for (int i = 0; i < AHEAD; ++i)
        looks[i] = look<AHEAD>(op.addr, Word());
    for (u32 rounds = 1;; ++rounds) {
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            *word = looks[i];
            if (test.holds(*word))
                return true;
            looks[i] = look<AHEAD>(op.addr, Word());
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
template <typename Word> static __device__ bool await(const Op &op, u64 limit_ns, bool failed, Word *word)
{
    return op.flags & NEAR ? await<4, Word>(op, limit_ns, failed, word) : await<1, Word>(op, limit_ns, failed, word);
}

static __device__ bool await(const Op &op, u64 limit_ns, bool failed, u32 *errors)
{
    if (op.kind == WAIT_64) {
        u64 word;
        return await<u64>(op, limit_ns, failed, &word);
    }
    u32 word;
    const bool met = await<u32>(op, limit_ns, failed, &word);
    // The opcode of a CQE: 13 and 14 are errors.
    *errors += met && op.kind == WAIT_CQE && (word >> 28) >= 13;
    return met;
}

// Tells how many completions with errors were met since the last time.
static __device__ __forceinline__ void tell(const Head &head, u32 *errors)
{
    if (*errors)
        atomicAdd_system(&head.status->errors, *errors);
    *errors = 0;
}

// Whether the stream has failed. The answer arrives while the first operation waits, or while its fence does, or the work
// between two steps.
static __device__ __forceinline__ u32 has_failed(const Head &head)
{
    return load_32((u64)&head.status->failed);
}

static __device__ __forceinline__ bool is_wait(const Op &op)
{
    return op.kind == WAIT_32 || op.kind == WAIT_64 || op.kind == WAIT_CQE;
}

static __device__ __forceinline__ bool has_fence(u32 kind)
{
    return kind == WRITE_32 || kind == WRITE_64 || kind == BARRIER || kind == MARK || kind == ADD_64;
}

// What a wait has seen comes before what is done behind it: by another look, which is quicker than a fence. A word in memory
// of the host was read in this way already.
static __device__ __forceinline__ void order(const Op &wait)
{
    if (!(wait.flags & NEAR))
        return;
    if (wait.kind == WAIT_64)
        acquire_64(wait.addr);
    else
        acquire_32(wait.addr);
}

// Fails the stream: what it waited for at `word` has not come in time.
static __device__ __forceinline__ void fail(const Head &head, u64 word)
{
    store_64((u64)&head.status->submission, head.submission);
    store_64((u64)&head.status->word, word);
    fence();
    store_32((u64)&head.status->failed, 1);
}

static __device__ __forceinline__ void wait(const Head &head, const Op &op, u32 *failed, u32 *errors)
{
    if (await(op, head.limit_ns, *failed != 0, errors) || *failed)
        return;
    *failed = 1;
    fail(head, op.addr);
}

// Any operation but a wait; `fenced` if there was a fence just before.
static __device__ __forceinline__ void act(const Head &head, const Op &op, bool fenced, u32 failed, u32 *errors)
{
    switch (op.kind) {
    case WRITE_32:
    case WRITE_64:
    case ADD_64:
        if (!fenced)
            fence();
        if (failed)
            break;
        if (op.kind == WRITE_32)
            store_32(op.addr, (u32)op.value);
        else if (op.kind == WRITE_64)
            store_64(op.addr, op.value);
        else
            add_64(op.addr, op.value);
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
        tell(head, errors);
        fence();
        store_64(failed ? op.addr + 8 : op.addr, op.value);
        break;
    }
}

// The share of a copy that thread `thread` of `threads` does. Both ends may begin at any byte.
static __device__ void copy_share(u64 to, u64 from, u64 len, u64 thread, u64 threads)
{
    // Up to the first 16 bytes of the destination, and behind the last.
    const u64 before = min((u64)(0 - to) & 15, len), behind = (len - before) & 15;
    for (u64 i = thread; i < before + behind; i += threads) {
        const u64 at = i < before ? i : len - behind + i - before;
        ((char *)to)[at] = ((const char *)from)[at];
    }
    uint4 *const out = (uint4 *)(to + before);
    from += before;
    const u64 count = (len - before) / 16;
    u64 i = thread;
    if (from % 16 == 0) {
        const uint4 *const in = (const uint4 *)from;
        // Four loads are under way at a time.
        for (; i + 3 * threads < count; i += 4 * threads) {
            const uint4 a = in[i], b = in[i + threads], c = in[i + 2 * threads], d = in[i + 3 * threads];
            out[i] = a, out[i + threads] = b, out[i + 2 * threads] = c, out[i + 3 * threads] = d;
        }
        for (; i < count; i += threads)
            out[i] = in[i];
        return;
    }
    // Words that have a byte of the source, which is to be found at a bit of each.
    const u32 *const in = (const u32 *)(from & ~(u64)3);
    const u32 bit = 8 * (u32)(from & 3);
    for (; i < count; i += threads) {
        const u32 *const at = in + 4 * i;
        const u32 a = at[0], b = at[1], c = at[2], d = at[3], e = bit ? at[4] : 0;
        out[i] = make_uint4(__funnelshift_r(a, b, bit), __funnelshift_r(b, c, bit), __funnelshift_r(c, d, bit),
                            __funnelshift_r(d, e, bit));
    }
}

// A slot for messages, in memory of the receiver: a word, and from LINES on 16 bytes for each 8 of a message: twice 4 of them with a
// flag behind. Who sees the flag sees the data: no fence is needed, which takes 1 us over NVLink. The word has the number of the
// message, its length in 32 bits, and IN_LINES; without that bit the data are in the place, and came before the word.
enum : u64 { LINES = 16, IN_LINES = 1 };

// By the number; not 0, as lines are that were taken.
static __device__ __forceinline__ u32 flag_of(u64 word)
{
    return (u32)(word >> 32) | 1;
}

// What is rare is called, and numbers have 32 bits, so that the rest is short: instructions come late in a kernel that has just begun.
static __device__ __noinline__ u64 load_bytes(u64 from, u32 len)
{
    u64 data = 0;
    for (u32 i = 0; i < 8 && i < len; ++i)
        data |= (u64)((const unsigned char *)from)[i] << 8 * i;
    return data;
}

static __device__ __noinline__ void store_bytes(u64 to, u32 len, u64 data)
{
    for (u32 i = 0; i < 8 && i < len; ++i)
        ((unsigned char *)to)[i] = (unsigned char)(data >> 8 * i);
}

static __device__ __forceinline__ u64 load_line(u64 from, u32 len)
{
    return len >= 8 && from % 8 == 0 ? *(const u64 *)from : load_bytes(from, len);
}

static __device__ __forceinline__ void store_line(u64 to, u32 len, u64 data)
{
    if (len >= 8 && to % 8 == 0)
        *(u64 *)to = data;
    else
        store_bytes(to, len, data);
}

// A PACK or TAKE with its wait, its length, and of a PACK the word, which is what the operation behind it writes; or a COPY.
struct Move {
    u32 kind;
    u64 awaited, least, place, len, to, from, word;
    // To be added to the word that announces the message. It may still be on its way.
    u64 ahead;
};

static __device__ __forceinline__ bool is_move(u32 kind)
{
    return kind == COPY || kind == PACK || kind == TAKE;
}

// What became of a share. MISSED: what it waited for has not come in time, or the stream has failed. DIRECT: the message goes, or came,
// into its place.
enum Outcome : u32 { DONE, MISSED, DIRECT };

// Whether to go on with a wait, which looks at the clock and at the stream now and then.
static __device__ __forceinline__ bool goes_on(const Head &head, u32 *rounds, u64 *start)
{
    if (++*rounds % 64 != 0)
        return true;
    const u64 time = now_ns();
    if (*start == 0)
        *start = time;
    return time - *start <= head.limit_ns && !has_failed(head);
}

// Behind a word without IN_LINES. The CPU fails a stream before it ends its waits, by such words.
static __device__ __noinline__ Outcome direct(const Head head, u64 word)
{
    acquire_64(word);
    return has_failed(head) ? MISSED : DIRECT;
}

static __device__ __noinline__ void copy_direct(u64 to, u64 from, u64 len, u64 thread, u64 threads)
{
    copy_share(to, from, len, thread, threads);
}

// The share of a message that thread `thread` of `threads` stores; nothing if the stream has failed, which is looked at last: that is
// on its way until then.
static __device__ __forceinline__ Outcome pack_share(const Head &head, u32 failed, const Move &move, u32 thread, u32 threads)
{
    const u32 len = (u32)move.len, count = (len + 7) / 8;
    u32 i = thread;
    u64 start = 0;
    // The first data come while it waits.
    u64 data = i < count ? load_line(move.from + 8ull * i, len - 8 * i) : 0;
    // The peer has zeroed the lines before it wrote the word.
    u64 word = acquire_64(move.awaited);
    const u64 least = move.least + move.ahead, told = move.word + move.ahead;
#pragma unroll 1
    for (u32 rounds = 0; (long long)(word - least) < 0 && !failed; word = acquire_64(move.awaited))
        if (!goes_on(head, &rounds, &start))
            return MISSED;
    if (failed)
        return MISSED;
    if (!(word & IN_LINES)) {
        const Outcome outcome = direct(head, move.awaited);
        if (outcome == DIRECT)
            copy_direct(move.place, move.from, move.len, thread, threads);
        return outcome;
    }
    if (thread == 0)
        store_64(move.to, told | IN_LINES);
    const u64 flag = (u64)flag_of(told) << 32;
#pragma unroll 1
    while (i < count) {
        asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" ::"l"(move.to + LINES + 16ull * i), "l"(data & 0xffffffff | flag),
                     "l"(data >> 32 | flag)
                     : "memory");
        i += threads;
        if (i < count)
            data = load_line(move.from + 8ull * i, len - 8 * i);
    }
    return DONE;
}

// The share of a message that thread `thread` of `threads` moves from its lines, as they come, to its place of `len` bytes.
static __device__ __forceinline__ Outcome take_share(const Head &head, u32 failed, const Move &move, u32 thread, u32 threads)
{
    u32 i = thread, count = ((u32)move.len + 7) / 8, len = 0, flag = 0, rounds = 0;
    u64 start = 0, low = 0, high = 0;
#pragma unroll 1
    do {
        // The word, too, until it is there.
        const u64 word = flag ? 0 : load_64(move.from);
        if (i < count)
            asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];"
                         : "=l"(low), "=l"(high)
                         : "l"(move.from + LINES + 16ull * i)
                         : "memory");
        if (failed)
            return MISSED;
        if (!flag && (long long)(word - (move.least + move.ahead)) >= 0) {
            if (!(word & IN_LINES))
                return direct(head, move.from);
            // The peer wrote it.
            len = min((u32)(word >> 1), (u32)move.len);
            count = (len + 7) / 8;
            flag = flag_of(word);
        }
        if (flag && i < count && (u32)(low >> 32) == flag && (u32)(high >> 32) == flag) {
            store_line(move.to + 8ull * i, len - 8 * i, low & 0xffffffff | high << 32);
            // Flags repeat after 2^31 messages.
            asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %1};" ::"l"(move.from + LINES + 16ull * i), "l"((u64)0) : "memory");
            i += threads;
        } else if (!(flag && i >= count) && !goes_on(head, &rounds, &start)) {
            return MISSED;
        }
    } while (!flag || i < count);
    return DONE;
}

// What has not come in time fails the stream, unless that has failed.
static __device__ __noinline__ void miss(const Head head, u64 awaited)
{
    if (!has_failed(head))
        fail(head, awaited);
}

// The share of a move of thread `thread` of `threads`. Called, as steps of an application do it in several places; by value, as what a
// reference is to would be in memory.
static __device__ __noinline__ Outcome move_share(const Head head, const Move move, u64 thread, u64 threads)
{
    if (move.kind == PACK)
        return pack_share(head, 0, move, (u32)thread, (u32)threads);
    if (move.kind == TAKE)
        return take_share(head, 0, move, (u32)thread, (u32)threads);
    copy_share(move.to, move.from, move.len, thread, threads);
    return DONE;
}

// An operation on its way from memory. What takes it apart waits for it.
struct Coming {
    u64 what;
    u64 addr;
    u64 value;

    __device__ __forceinline__ Op op() const
    {
        return Op{(u32)what, (u16)(what >> 32), (u16)(what >> 48), addr, value};
    }
};

static __device__ __forceinline__ Coming fetch(const Op *at)
{
    const u64 from = (u64)at;
    return Coming{load_64(from), load_64(from + 8), load_64(from + 16)};
}

// A move that a block makes within a step is left; in place of a `Result`.
enum : int { MOVING = -1 };

} // namespace detail

class Steps;
static __device__ int block_step(Steps &steps, u32 i);

// A thread's view of the steps of a launch. One thread of the kernel runs them, or one after the other, each with a view of
// its own that it made behind the last step of the one before. A kernel need not run all: those that it leaves are run
// behind it by the stream.
class Steps {
public:
    // `program` is what the CPU gave for this launch.
    __device__ explicit Steps(const Program *program)
    {
        const u64 at = (u64)program;
        head.status = (Status *)detail::load_64(at);
        head.limit_ns = detail::load_64(at + 8);
        head.submission = detail::load_64(at + 16);
        head.count = detail::load_64(at + 24);
        cursor = at + sizeof(Head);
        ops = (const Op *)(program + 1);
        const u64 where = detail::load_64(cursor);
        next = (u32)where;
        place = (u32)(where >> 32);
        dead = false;
        published = false;
        is_within = false;
        is_direct = false;
        has_met_errors = false;
        length = wait = Op{};
        look_ahead();
    }

    // How many steps there are.
    __device__ u32 count() const { return (u32)head.count; }

    // The step that `run` takes; of `block_step`, in the first thread.
    __device__ u32 upcoming() const { return next; }

    // What this thread and those that it has met at a barrier have written so far is seen by all from here on, and the next send
    // does not wait for that: it carries what was written before this call, and may miss what is written after it. For messages that
    // are ready before something else is waited for, or worked at. Called by the thread that runs the steps. Whether
    // the stream has failed since the step before, that send does not look.
    __device__ void publish()
    {
        detail::fence();
        published = true;
    }

    // Runs step `i`: its sends leave, with what this thread and those that it has met at a barrier have written, and its
    // waits are over when this returns. A wait takes as long as a wait of the stream may. This thread alone makes the copies between
    // GPUs that are in it; `block_step` has the block make them. Returns a `Result`.
    __device__ int run(u32 i) { return run(i, nullptr, false); }

    // Runs what is left, and what comes behind the last step: for the library.
    __device__ void finish()
    {
        while (next < count() && step(nullptr, false) != FAILED)
            ;
        // Behind a failure only the mark is left to do.
        Op op = coming.op();
        while (op.kind != MARK)
            op = detail::fetch(ops + ++place).op();
        // Behind the mark the memory may be another launch's.
        u32 errors = 0;
        detail::act(head, op, false, detail::has_failed(head), &errors);
    }

private:
    friend __device__ int block_step(Steps &steps, u32 i);

    __device__ __forceinline__ int run(u32 i, detail::Move *move, bool missed)
    {
        if (dead)
            return FAILED;
        if (i != next || i >= count())
            return detail::has_failed(head) ? FAILED : OUT_OF_ORDER;
        return step(move, missed);
    }

    // Up to the next move, which it leaves to the caller if there is a place for it. `missed`: the last one did not come in time.
    __device__ __forceinline__ int step(detail::Move *move, bool missed)
    {
        u32 failed = has_failed, errors = 0;
        bool waited = false;
        // Behind a move of the block, only its writes are left to order.
        const bool begins = !is_within;
        is_within = false;
        if (missed)
            miss(*move, &failed);
        if (begins && !published) {
            failed = detail::has_failed(head);
            // While that is on its way: what the block has written is seen by all before what the first operation writes. If that
            // is a wait, the fence of a later step has less to do.
            detail::fence();
        }
        for (bool fenced = begins;; fenced = published) {
            const Op op = coming.op();
            const bool last = op.flags & LAST;
            ++place;
            if (op.flags & PEER && waited) {
                failed |= detail::has_failed(head);
                waited = false;
            }
            if (op.kind == LENGTH) {
                length = op;
                coming = detail::fetch(ops + place);
            } else if (detail::is_move(op.kind)) {
                // An operation of the step is behind it.
                coming = detail::fetch(ops + place);
                published = false;
                if (failed)
                    continue;
                const detail::Move next{op.kind, wait.addr, wait.value, length.addr, length.value, op.addr, op.value, coming.value, 0};
                if (move) {
                    *move = next;
                    is_within = true;
                    has_failed = 0;
                    has_met_errors |= errors != 0;
                    detail::tell(head, &errors);
                    return detail::MOVING;
                }
                const detail::Outcome outcome = detail::move_share(head, next, 0, 1);
                is_direct = outcome == detail::DIRECT;
                if (outcome == detail::MISSED)
                    miss(next, &failed);
            } else if (op.flags & DIRECT && !is_direct || op.flags & BY_MOVE) {
                if (op.flags & BY_MOVE)
                    wait = op;
                if (!last)
                    coming = detail::fetch(ops + place);
            } else if (detail::is_wait(op)) {
                waited = true;
                // The next one is on its way meanwhile. It would hold up a write.
                if (!last)
                    coming = detail::fetch(ops + place);
                detail::wait(head, op, &failed, &errors);
                // What it has seen, all see who meet this thread later.
                if (last || published || !detail::has_fence(coming.op().kind))
                    detail::order(op);
            } else {
                detail::act(head, op, fenced, failed, &errors);
                if (published && detail::has_fence(op.kind)) {
                    published = false;
                    failed = detail::has_failed(head);
                }
                if (!last)
                    coming = detail::fetch(ops + place);
            }
            if (last)
                break;
        }
        // A stream that fails has its queues complete with errors.
        has_met_errors |= errors != 0;
        if (has_met_errors)
            failed |= detail::has_failed(head);
        const int result = failed ? FAILED : has_met_errors ? COMPLETION_ERROR : OK;
        has_met_errors = false;
        detail::tell(head, &errors);
        dead = failed != 0;
        ++next;
        if (!dead)
            detail::store_64(cursor, (u64)place << 32 | next);
        look_ahead();
        return result;
    }

    // What has not come in time fails the stream.
    __device__ void miss(const detail::Move &move, u32 *failed)
    {
        detail::miss(head, move.awaited);
        *failed = 1;
    }

    // What the next step needs from memory comes while the kernel does something else.
    __device__ __forceinline__ void look_ahead()
    {
        has_failed = detail::has_failed(head);
        coming = detail::fetch(ops + place);
    }

    Head head;
    u64 cursor;
    const Op *ops;
    u32 next;
    u32 place;
    // The operation at that place, and whether the stream had failed, as looked at behind the last step.
    detail::Coming coming;
    u32 has_failed;
    bool dead;
    // What the next send carries is seen by all.
    bool published;
    // The step has been left for a move of the block; the last move was into the place; completions with errors were met.
    bool is_within;
    bool is_direct;
    bool has_met_errors;
    // Of the next move.
    Op length, wait;
};

// The same for all threads of a block: step `i` is run when all have come, what they wrote before is sent, and what has
// arrived all may read. All make the copies between GPUs. Every thread gets the result. All call it, with views made of the same
// program.
static __device__ inline int block_step(Steps &steps, u32 i)
{
    __shared__ int result;
    __shared__ detail::Move move;
    const u32 thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
    for (detail::Outcome outcome = detail::DONE;;) {
        const bool missed = __syncthreads_or(outcome == detail::MISSED);
        if (thread == 0) {
            steps.is_direct = outcome == detail::DIRECT;
            result = steps.run(i, &move, missed);
        }
        __syncthreads();
        if (result != detail::MOVING)
            return result;
        outcome = detail::move_share(steps.head, move, thread, (u64)blockDim.x * blockDim.y * blockDim.z);
    }
}

} // namespace gds
