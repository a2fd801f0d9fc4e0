//! The kernel executor: runs stream operations as a program in one thread of a kernel, and copies in all threads of its blocks.
//! The device code is `kernel_exec.cu` and `gdsync.cuh`.

use std::borrow::Cow;
use std::ffi::{CStr, c_void};
use std::mem::MaybeUninit;

use gdrcopy::cuda::raw::Api;
use gdrcopy::cuda::raw::layout::{Handle, KernelNodeParams, LaunchAttribute, LaunchConfig, MemOp};

use crate::cuda::{Capabilities, Gpu, RawStream};
use crate::error::{Error, Result};
use crate::memory::{Memory, Place};
use mlx5_ring::Cond;
use smallvec::SmallVec;

/// Maximum operations of the small program, which launches faster.
pub const SMALL: usize = 12;
/// Maximum operations of the large program: kernel parameters have 4 KiB.
pub const LARGE: usize = 160;

/// Threads of the kernel that reads its program from memory, and the bytes that they read at once, used or not.
const FETCHERS: u32 = 32;
const FETCHED: usize = 32 * 16;

/// Operations of one submission.
pub type Program = SmallVec<[KernelOp; SMALL]>;

/// Bytes of a program of `ops` operations in memory.
pub fn room(ops: usize) -> usize {
    (size_of::<Head>() + ops * size_of::<KernelOp>()).next_multiple_of(16).max(FETCHED)
}

/// Writes a program to the start of `to`, an image of the memory.
pub fn put(to: &mut [u8], head: Head, ops: &[KernelOp]) {
    put_words(to, head_words(head, ops.len()), ops);
}

fn head_words(head: Head, count: usize) -> [u64; 4] {
    [head.status, head.limit_ns, head.submission, count as u64]
}

fn put_words<const N: usize>(to: &mut [u8], before: [u64; N], ops: &[KernelOp]) {
    let (head, to) = to.as_chunks_mut::<8>().0.split_at_mut(N);
    head.copy_from_slice(&before.map(u64::to_ne_bytes));
    for (to, op) in to.as_chunks_mut().0.iter_mut().zip(ops) {
        let what = u64::from(op.kind) | u64::from(op.cond) << 32 | u64::from(op.flags) << 48;
        *to = [what.to_ne_bytes(), op.addr.to_ne_bytes(), op.value.to_ne_bytes()];
    }
}

/// Bytes before the operations of steps in memory: `Program` of `gdsync.cuh`, which is the head and a cursor.
const BEFORE_STEPS: usize = size_of::<Head>() + 16;

/// Bytes of steps with these numbers of operations in memory.
pub fn room_of_steps(steps: impl Iterator<Item = usize>) -> usize {
    // Plus the mark. An empty step has a barrier.
    let ops = steps.map(|ops| ops.max(1)).sum::<usize>() + 1;
    BEFORE_STEPS + ops * size_of::<KernelOp>()
}

/// Writes the steps of a launch, and the mark behind them, to an image of the memory.
pub fn put_steps<'a>(to: &mut [u8], head: Head, steps: impl Iterator<Item = &'a [KernelOp]>, mark: KernelOp) {
    let mut ops = Vec::with_capacity(to.len() / size_of::<KernelOp>());
    let mut count = 0;
    for step in steps {
        count += 1;
        let (last, before) = step.split_last().unwrap_or((&KernelOp::BARRIER, &[]));
        ops.extend_from_slice(before);
        ops.push(KernelOp { flags: last.flags | flag::LAST, ..*last });
    }
    ops.push(mark);
    let [status, limit, submission, count] = head_words(head, count);
    let cursor = 0;
    put_words(to, [status, limit, submission, count, cursor, 0], &ops);
}

/// `Op` of `gdsync.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KernelOp {
    /// Kind, see `kind`.
    pub kind: u32,
    /// Condition of a wait.
    pub cond: u16,
    /// Flags, see `flag`.
    pub flags: u16,
    /// Address of the word.
    pub addr: u64,
    /// Value to write or compare.
    pub value: u64,
}

/// Where a receive of a peer is.
#[derive(Clone, Copy, Debug)]
pub enum Receive {
    /// At this address.
    At(u64),
    /// What the peer tells of it in a line, in memory that is open by a table.
    Find {
        /// The address of the line.
        line: u64,
        /// The number of the receive.
        number: u32,
        /// The address of the table.
        table: u64,
    },
}

/// `Head` of `gdsync.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Head {
    /// Address of the stream's [`StatusBlock`] on the GPU.
    pub status: u64,
    /// Time limit of a wait.
    pub limit_ns: u64,
    /// Number of the submission, or of a graph whose launches have the same operations.
    pub submission: u64,
    /// Number of operations that follow, and in the upper half the index of the first FIND.
    pub count: u64,
}

/// `Parameter` of `kernel_exec.cu`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Parameter<const N: usize> {
    head: Head,
    ops: [MaybeUninit<KernelOp>; N],
}

/// `Kind` of `gdsync.cuh`.
mod kind {
    pub(super) const WRITE_32: u32 = 0;
    pub(super) const WRITE_64: u32 = 1;
    pub(super) const WAIT_32: u32 = 2;
    pub(super) const WAIT_64: u32 = 3;
    pub(super) const WAIT_CQE: u32 = 4;
    pub(super) const BARRIER: u32 = 5;
    pub(super) const INDEX: u32 = 6;
    pub(super) const MARK: u32 = 7;
    pub(super) const ADD_64: u32 = 8;
    pub(super) const LENGTH: u32 = 9;
    pub(super) const COPY: u32 = 10;
    /// Not in the header: no kernel does it.
    pub(super) const FLUSH: u32 = 11;
    pub(super) const FIND: u32 = 12;
    pub(super) const PACK: u32 = 13;
    pub(super) const TAKE: u32 = 14;
}

/// `Flag` of `gdsync.cuh`.
mod flag {
    /// The word is in memory of this GPU.
    pub(super) const NEAR: u16 = 1;
    /// The last operation of a step.
    pub(super) const LAST: u16 = 2;
    /// A copy between GPUs, or its signal: no memory operation does it, as that would also happen when the stream has failed.
    pub(super) const PEER: u16 = 4;
    /// Only if the receive was found; a wait, only if nothing was copied.
    pub(super) const FOUND: u16 = 8;
    /// Only if the message went into its place.
    pub(super) const DIRECT: u16 = 16;
    /// A wait that the message behind it does.
    pub(super) const BY_MOVE: u16 = 32;
    /// A wait that is over, too, when the one behind it is.
    pub(super) const EITHER: u16 = 64;
    /// A wait for a word that only grows.
    pub(super) const CREDIT: u16 = 128;
    /// The value announces a message, and has its number from bit 33 on.
    pub(super) const NUMBERED: u16 = 256;
}

impl KernelOp {
    /// Orders earlier operations before later ones.
    pub const BARRIER: Self = Self::of(kind::BARRIER, 0, 0);
    /// Makes inbound writes visible. Only the front end can do this.
    pub const FLUSH: Self = Self::of(kind::FLUSH, 0, 0);

    #[inline]
    const fn of(kind: u32, addr: u64, value: u64) -> Self {
        Self { kind, cond: 0, flags: 0, addr, value }
    }

    /// Writes a 32-bit word.
    #[inline]
    pub const fn write32(addr: u64, value: u32) -> Self {
        Self::of(kind::WRITE_32, addr, value as u64)
    }

    /// Writes a 64-bit word.
    #[inline]
    pub const fn write64(addr: u64, value: u64) -> Self {
        Self::of(kind::WRITE_64, addr, value)
    }

    /// Writes a 64-bit word in memory of a peer, or adds to it, by a kernel.
    #[inline]
    pub const fn signal64(addr: u64, value: u64, add: bool) -> Self {
        Self::by_kernel(if add { kind::ADD_64 } else { kind::WRITE_64 }, addr, value)
    }

    /// Copies `len` bytes by a kernel, in two operations.
    #[inline]
    pub const fn copy(to: u64, from: u64, len: u64) -> [Self; 2] {
        [Self::by_kernel(kind::LENGTH, 0, len), Self::by_kernel(kind::COPY, to, from)]
    }

    /// Stores a message of `len` bytes into the lines of a slot, if the word of its wait has the lowest bit then, else into its place;
    /// `word` tells of it.
    #[inline]
    pub fn pack(wait: Self, (slot, place): (u64, u64), (from, len): (u64, u64), word: u64) -> [Self; 4] {
        let flags = flag::PEER | flag::DIRECT | flag::NUMBERED;
        let told = Self { flags, ..Self::of(kind::WRITE_64, slot, word) };
        [
            wait.by_move(),
            Self::by_kernel(kind::LENGTH, place, len),
            Self::by_kernel(kind::PACK, slot, from),
            told,
        ]
    }

    /// Waits for the word of a slot, and moves the message from the lines of the slot, if it is there, to its place of `room` bytes.
    #[inline]
    pub fn take(wait: Self, place: u64, room: u64) -> [Self; 3] {
        let slot = wait.addr;
        [wait.by_move(), Self::by_kernel(kind::LENGTH, 0, room), Self::by_kernel(kind::TAKE, place, slot)]
    }

    #[inline]
    fn by_move(self) -> Self {
        Self { flags: self.flags | flag::PEER | flag::BY_MOVE | flag::NUMBERED, ..self }
    }

    /// This signal, which kernels for messages can make. Its value has the number of a message from bit 33 on.
    #[inline]
    #[must_use]
    pub const fn numbered(self) -> Self {
        Self { flags: self.flags | flag::NUMBERED, ..self }
    }

    /// Destination, source and length, if they begin with [`KernelOp::copy`].
    #[inline]
    pub fn as_copy(ops: &[Self]) -> Option<(u64, u64, usize)> {
        match ops {
            [length, copy, ..] if length.kind == kind::LENGTH && copy.kind == kind::COPY => {
                Some((copy.addr, copy.value, usize::try_from(length.value).ok()?))
            }
            _ => None,
        }
    }

    /// Whether a program may have it in place of an operation that it was made for: of the same kind, and a copy by as many blocks.
    #[inline]
    pub fn fits(&self, before: &Self) -> bool {
        let blocks = |op: &Self| Grid::of_copy(op.value).blocks;
        self.kind == before.kind && (self.kind != kind::LENGTH || blocks(self) == blocks(before))
    }

    /// Copies `len` bytes into a receive of a peer, writes `told` behind them, and then `mark` to the word at `at`, without a fence;
    /// nothing where the receive is not reached.
    pub fn place(
        into: Receive,
        (from, len): (u64, u64),
        told: Option<(u64, u64)>,
        (at, mark): (u64, u32),
    ) -> impl Iterator<Item = Self> {
        let (find, flags, to) = match into {
            Receive::At(addr) => (None, flag::PEER, addr),
            Receive::Find { line, number, table } => {
                (Some(Self::by_kernel(kind::FIND, line, number.into())), flag::PEER | flag::FOUND, table)
            }
        };
        let op = move |kind, addr, value| Self { flags, ..Self::of(kind, addr, value) };
        let told = told.map(|(addr, value)| op(kind::WRITE_64, addr, value));
        let before = [Some(Self::by_kernel(kind::LENGTH, 0, len)), find, Some(op(kind::COPY, to, from))];
        before.into_iter().chain([told, Some(op(kind::INDEX, at, mark.into()))]).flatten()
    }

    #[inline]
    const fn by_kernel(kind: u32, addr: u64, value: u64) -> Self {
        Self { flags: flag::PEER, ..Self::of(kind, addr, value) }
    }

    /// Writes a consumer index or a send record, without ordering earlier writes before it.
    #[inline]
    pub const fn index(addr: u64, value: u32) -> Self {
        Self::of(kind::INDEX, addr, value as u64)
    }

    /// This index, behind all that is written before it.
    #[must_use]
    pub const fn fenced(self) -> Self {
        Self { kind: kind::WRITE_32, ..self }
    }

    /// Writes the number of the submission; after a failure of the stream, to the next word instead.
    #[inline]
    pub const fn mark(addr: u64, value: u64) -> Self {
        Self::of(kind::MARK, addr, value)
    }

    /// Waits for a 32-bit word.
    #[inline]
    pub fn wait32(place: Place, value: u32, cond: Cond) -> Self {
        Self::wait(kind::WAIT_32, place, value.into(), cond)
    }

    /// Waits until a 32-bit word that only grows has reached a value.
    #[inline]
    pub fn wait_credit(place: Place, value: u32) -> Self {
        let wait = Self::wait32(place, value, Cond::Geq);
        Self { flags: wait.flags | flag::CREDIT, ..wait }
    }

    /// Waits for a 64-bit word.
    #[inline]
    pub fn wait64(place: Place, value: u64, cond: Cond) -> Self {
        Self::wait(kind::WAIT_64, place, value, cond)
    }

    /// Waits for a completion.
    #[inline]
    pub fn wait_cqe(place: Place, value: u32, cond: Cond) -> Self {
        Self::wait(kind::WAIT_CQE, place, value.into(), cond)
    }

    /// Has this wait be over, too, when `other` is, of a 64-bit word of this GPU that equals a value.
    #[inline]
    pub const fn or(self, other: Self) -> [Self; 2] {
        [Self { flags: self.flags | flag::EITHER, ..self }, other]
    }

    /// Leaves this wait out behind a copy of the same program.
    #[inline]
    #[must_use]
    pub const fn unless_copied(self) -> Self {
        Self { flags: self.flags | flag::PEER | flag::FOUND, ..self }
    }

    #[inline]
    fn wait(kind: u32, Place { addr, is_near }: Place, value: u64, cond: Cond) -> Self {
        let flags = if is_near { flag::NEAR } else { 0 };
        Self { kind, cond: cond.code(), flags, addr, value }
    }

    /// Whether it is a message to or from lines.
    #[inline]
    pub const fn is_message(&self) -> bool {
        matches!(self.kind, kind::PACK | kind::TAKE)
    }

    /// Whether its value announces a message, for a kernel for messages.
    #[inline]
    pub const fn is_numbered(&self) -> bool {
        self.flags & flag::NUMBERED != 0
    }

    /// Whether the kernels for messages do it.
    #[inline]
    pub const fn goes_with_messages(&self) -> bool {
        self.flags & flag::BY_MOVE != 0
            || !self.is_wait() && !matches!(self.kind, kind::COPY | kind::FIND | kind::FLUSH)
    }

    /// Whether a kernel executes a fence before it.
    #[inline]
    pub const fn is_fenced(&self) -> bool {
        matches!(self.kind, kind::WRITE_32 | kind::WRITE_64 | kind::MARK | kind::ADD_64)
    }

    /// Whether it waits for a word.
    #[inline]
    pub const fn is_wait(&self) -> bool {
        matches!(self.kind, kind::WAIT_32 | kind::WAIT_64 | kind::WAIT_CQE)
    }

    /// Whether only a kernel does it.
    #[inline]
    pub const fn needs_kernel(&self) -> bool {
        self.flags & flag::PEER != 0
    }

    /// Whether all of a block do it: a copy, or a message to or from a slot. It is not the last operation of a step.
    #[inline]
    pub const fn is_move(&self) -> bool {
        self.kind == kind::COPY || self.is_message()
    }

    /// Whether it is [`KernelOp::FLUSH`].
    #[inline]
    pub const fn is_flush(&self) -> bool {
        self.kind == kind::FLUSH
    }

    /// The equivalent stream memory operation.
    #[inline]
    pub const fn memop(&self) -> MemOp {
        let operation = match self.kind {
            kind::WRITE_32 | kind::INDEX => MemOp::WRITE_32,
            kind::WRITE_64 | kind::MARK => MemOp::WRITE_64,
            kind::WAIT_32 | kind::WAIT_CQE => MemOp::WAIT_32,
            kind::WAIT_64 => MemOp::WAIT_64,
            kind::FLUSH => MemOp::FLUSH,
            _ => MemOp::BARRIER,
        };
        let (address, value, flags) = (self.addr, self.value, self.cond as u32);
        MemOp { operation, barrier: 0, address, value, flags, pad: 0, alias: 0, end: 0 }
    }
}

/// `Status` of `gdsync.cuh`: whether a kernel of the stream, or the CPU, has failed the stream.
#[derive(Debug)]
pub struct StatusBlock {
    memory: Memory,
    addr: u64,
}

/// A wait that a kernel has given up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GivenUp {
    /// Number of the submission, or of a graph whose launches have the same operations.
    pub submission: u64,
    /// Address of the word on the GPU.
    pub word: u64,
}

const STATUS_BYTES: usize = 24;
/// What the blocks of a copy share, behind it: `Blocks` of `kernel_exec.cu`.
const BLOCKS_BYTES: usize = 16;

impl StatusBlock {
    /// Allocates a status block on the GPU, where kernels read it fast, or in host memory if GPU memory cannot be mapped.
    ///
    /// # Errors
    /// As [`Memory::alloc`] and [`Memory::gpu_addr`].
    pub fn new(gpu: &Gpu) -> Result<Self> {
        let memory = gpu.alloc_piece(STATUS_BYTES + BLOCKS_BYTES).or_else(|error| {
            tracing::info!(%error, "the status of a stream is in host memory");
            Memory::alloc(STATUS_BYTES + BLOCKS_BYTES)
        })?;
        let addr = memory.gpu_addr(gpu)?;
        Ok(Self { memory, addr })
    }

    /// Address of the block on the GPU.
    pub fn addr(&self) -> u64 {
        self.addr
    }

    /// The wait that a kernel has given up, if any.
    pub fn given_up(&self) -> Option<GivenUp> {
        let failed = self.memory.word32(0).expect("the first word of the status block").load();
        // `read` has fences: loads from a mapping are not ordered.
        let word = |offset| {
            let mut bytes = [0; 8];
            self.memory.read(offset, &mut bytes).expect("words of the status block");
            u64::from_ne_bytes(bytes)
        };
        (failed != 0).then(|| GivenUp { submission: word(8), word: word(16) })
    }

    /// Marks the stream as failed, for its kernels.
    pub fn fail(&self) {
        self.memory.word32(0).expect("the first word of the status block").store(1);
    }
}

/// Blocks of a kernel, and the threads of each.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Grid {
    /// Blocks: several for a program of waits and a long copy, with what comes behind it.
    pub blocks: u32,
    /// Threads; 0 for the kernels without copies.
    threads: u32,
    /// Whether it is for the kernels for messages.
    pub messages: bool,
}

impl Grid {
    /// Maximum blocks of a kernel that waits: they hold multiprocessors meanwhile.
    const WAITING_BLOCKS: u32 = 16;

    /// Of a program without copies.
    const SINGLE: Self = Self { blocks: 1, threads: 0, messages: false };

    /// Whether the kernel may wait for something else.
    #[inline]
    pub fn may_wait(self) -> bool {
        self.blocks <= Self::WAITING_BLOCKS
    }

    /// The grid of a program.
    #[inline]
    pub fn of(ops: &[KernelOp]) -> Self {
        let mut len = 0;
        let grids = ops.iter().filter(|op| op.needs_kernel()).map(|op| match op.kind {
            kind::LENGTH => {
                len = op.value;
                Self::of_copy(0)
            }
            kind::COPY => Self::of_copy(len),
            kind::PACK | kind::TAKE => Self::of_lines(len),
            _ => Self::of_copy(0),
        });
        let widest = grids.max().unwrap_or(Self::SINGLE);
        let messages = ops.iter().any(KernelOp::is_numbered) && ops.iter().all(KernelOp::goes_with_messages);
        Self { messages, ..widest }
    }

    /// The grid for a copy of `len` bytes.
    fn of_copy(len: u64) -> Self {
        let (blocks, threads) = match len {
            0..513 => (1, 32),
            // Two H100s, NVLink: a block copies 64 KiB in 1 us, which the count of several blocks takes too. More than 16 are
            // slower up to 4 MiB, and 4 % quicker at 16 MiB.
            513..98_305 => (1, 512),
            98_305..4_194_305 => (16, 512),
            4_194_305.. => (64, 512),
        };
        Self { blocks, threads, messages: false }
    }

    /// The grid for a message of at most `len` bytes in lines.
    fn of_lines(len: u64) -> Self {
        let (blocks, threads) = match len {
            0..257 => (1, 32),
            257..8_193 => (1, 512),
            8_193.. => (16, 512),
        };
        Self { blocks, threads, messages: true }
    }
}

/// Kernels of one kind.
#[derive(Debug)]
struct Kernels {
    small: Handle,
    large: Handle,
    /// Reads its program from memory.
    at: Handle,
}

/// The kernels, loaded in a context.
#[derive(Debug)]
pub struct KernelExecutor {
    module: Handle,
    single: Kernels,
    copying: Kernels,
    messages: Kernels,
    /// Runs behind a kernel that runs steps.
    finish: Handle,
    /// Whether a kernel may start before the one ahead of it has ended (programmatic dependent launch).
    programmatic: bool,
}

/// The kernels, which end in a zero.
const PTX: &str = concat!(include_str!("kernel_exec.ptx"), "\0");

/// The kernels with what only GPUs of compute capability 9.0 have, which is in comments else.
fn programmatic_ptx() -> String {
    PTX.replace(".target sm_70", ".target sm_90").replace("//sm_90 ", "")
}

/// From this CUDA version on, captures take programmatic launches.
const PROGRAMMATIC_VERSION: i32 = 12_030;

impl KernelExecutor {
    /// Loads the kernels into the current context. All at once, because loading later waits for streams.
    ///
    /// # Errors
    /// [`Error::Cuda`].
    pub fn load(api: &Api, capabilities: &Capabilities) -> Result<Self> {
        let programmatic =
            capabilities.compute >= (9, 0) && capabilities.driver_version >= PROGRAMMATIC_VERSION;
        let ptx = if programmatic { Cow::Owned(programmatic_ptx()) } else { Cow::Borrowed(PTX) };
        let mut module = 0;
        // SAFETY: a place for the answer and a text that ends in a zero.
        unsafe { api.module_load_data(&mut module, ptx.as_ptr().cast()) }
            .map_err(Error::cuda("loading the kernels"))?;
        let function = |name| function(api, module, name);
        let kernels = |[small, large, at]: [&'static CStr; 3]| {
            Ok::<_, Error>(Kernels { small: function(small)?, large: function(large)?, at: function(at)? })
        };
        let single = kernels([c"gds_run_12", c"gds_run_160", c"gds_run_at"])?;
        let copying = kernels([c"gds_copy_12", c"gds_copy_160", c"gds_copy_at"])?;
        let messages = kernels([c"gds_message_12", c"gds_message_160", c"gds_message_at"])?;
        Ok(Self { module, single, copying, messages, finish: function(c"gds_finish")?, programmatic })
    }

    /// Unloads the kernels. Their context must be current and about to be released.
    pub fn unload(&self, api: &Api) {
        // SAFETY: the module was loaded by `load`, and no stream uses it any more.
        if let Err(error) = unsafe { api.module_unload(self.module) } {
            tracing::debug!(%error, "the kernels stay loaded");
        }
    }

    /// Launches a kernel that runs `ops`. The context must be current, if the driver requires it. `follows`: the kernel may start before
    /// the one ahead of it has ended, and waits for it; quicker behind a kernel of this library.
    ///
    /// # Errors
    /// Of CUDA.
    pub fn launch(
        &self,
        api: &Api,
        stream: RawStream,
        head: Head,
        ops: &[KernelOp],
        follows: bool,
    ) -> gdrcopy::Result<()> {
        let grid = Grid::of(ops);
        self.with_program(grid, (head, 0), ops, |function, params| {
            // Many blocks do not wait, as they would hold multiprocessors meanwhile.
            let programmatic = follows && self.programmatic && grid.may_wait();
            // SAFETY: the function takes these parameters, or the first one.
            unsafe { launch(api, function, grid, stream, params, programmatic) }
        })
    }

    /// Launches the kernel that runs the remaining steps at this address of the GPU, and their mark. The context must be current.
    ///
    /// # Errors
    /// Of CUDA.
    pub fn finish(&self, api: &Api, stream: RawStream, mut address: u64) -> gdrcopy::Result<()> {
        let mut params = [(&raw mut address).cast::<c_void>()];
        // SAFETY: the function takes an address, of steps that the submission keeps.
        unsafe { launch(api, self.finish, Grid::SINGLE, stream, params.as_mut_ptr(), false) }
    }

    /// Sets the operations of a kernel node of a graph, of this grid, from the next launch on. At `ahead`, unless it is 0, is what the
    /// launch adds to words that announce messages. The context must be current.
    ///
    /// # Errors
    /// Of CUDA.
    pub fn arm(
        &self,
        api: &Api,
        (graph, node): (Handle, Handle),
        grid: Grid,
        (head, ahead): (Head, u64),
        ops: &[KernelOp],
    ) -> gdrcopy::Result<()> {
        self.with_program(grid, (head, ahead), ops, |function, params| {
            // SAFETY: a graph and a node of it, as the caller says, and the parameters of the function, or more, which the
            // driver copies.
            unsafe {
                api.graph_exec_kernel_node_set_params(graph, node, &node_params(function, grid, params))
            }
        })
    }

    /// Sets a kernel node of a graph to run the program at this address of the GPU, of this grid. `ahead` and the context as for
    /// [`KernelExecutor::arm`].
    ///
    /// # Errors
    /// Of CUDA.
    pub fn point(
        &self,
        api: &Api,
        (graph, node): (Handle, Handle),
        grid: Grid,
        (mut address, mut ahead): (u64, u64),
    ) -> gdrcopy::Result<()> {
        let mut params = [(&raw mut address).cast::<c_void>(), (&raw mut ahead).cast()];
        let at = self.of(grid).at;
        let grid = Grid { threads: grid.threads.max(FETCHERS), ..grid };
        let node_params = node_params(at, grid, params.as_mut_ptr());
        // SAFETY: a graph and a node of it, as the caller says; the driver copies the parameters of the function.
        unsafe { api.graph_exec_kernel_node_set_params(graph, node, &node_params) }
    }

    /// The kernels for programs of this grid.
    #[inline]
    fn of(&self, grid: Grid) -> &Kernels {
        match grid {
            Grid { messages: true, .. } => &self.messages,
            Grid::SINGLE => &self.single,
            _ => &self.copying,
        }
    }

    /// Calls `call` with the kernel for `ops`, of this grid, and its parameters.
    fn with_program<T>(
        &self,
        grid: Grid,
        head: (Head, u64),
        ops: &[KernelOp],
        call: impl FnOnce(Handle, *mut *mut c_void) -> T,
    ) -> T {
        fn sized<const N: usize, T>(
            (head, mut ahead): (Head, u64),
            ops: &[KernelOp],
            call: impl FnOnce(*mut *mut c_void) -> T,
        ) -> T {
            // Only messages, which graphs refuse, have one.
            let find = ops.iter().position(|op| op.kind == kind::FIND).unwrap_or(0);
            let head = Head { count: ops.len() as u64 | (find as u64) << 32, ..head };
            let mut program = Parameter { head, ops: [const { MaybeUninit::uninit() }; N] };
            for (slot, op) in program.ops.iter_mut().zip(ops) {
                slot.write(*op);
            }
            let mut params = [std::ptr::from_mut(&mut program).cast::<c_void>(), (&raw mut ahead).cast()];
            call(params.as_mut_ptr())
        }
        let kernels = self.of(grid);
        if ops.len() <= SMALL {
            sized::<SMALL, T>(head, ops, |params| call(kernels.small, params))
        } else {
            sized::<LARGE, T>(head, ops, |params| call(kernels.large, params))
        }
    }
}

/// Launches a kernel; if `programmatic`, before the kernel ahead of it has ended.
///
/// # Safety
/// The function must take these parameters, which the driver copies.
#[inline]
unsafe fn launch(
    api: &Api,
    function: Handle,
    Grid { blocks, threads, .. }: Grid,
    stream: RawStream,
    params: *mut *mut c_void,
    programmatic: bool,
) -> gdrcopy::Result<()> {
    let (grid, block) = ([blocks, 1, 1], [threads.max(1), 1, 1]);
    let (attributes, count) = (&LaunchAttribute::PROGRAMMATIC, u32::from(programmatic));
    let config = LaunchConfig { grid, block, shared: 0, stream, attributes, count };
    // SAFETY: the caller guarantees the parameters; the driver copies the configuration.
    unsafe { api.launch_kernel_ex(&config, function, params, std::ptr::null_mut()) }
}

/// Parameters of a kernel node.
fn node_params(
    function: Handle,
    Grid { blocks, threads, .. }: Grid,
    params: *mut *mut c_void,
) -> KernelNodeParams {
    let (grid, block) = ([blocks, 1, 1], [threads.max(1), 1, 1]);
    let extra = std::ptr::null_mut();
    KernelNodeParams { function, grid, block, shared: 0, params, extra, kernel: 0, context: 0 }
}

fn function(api: &Api, module: Handle, name: &CStr) -> Result<Handle> {
    let mut function = 0;
    // SAFETY: a place for the answer, a module of this context, a name.
    unsafe { api.module_get_function(&mut function, module, name.as_ptr()) }
        .map_err(Error::cuda("finding a kernel"))?;
    // SAFETY: a function of a module that stays loaded.
    match unsafe { api.func_load(function) } {
        // Drivers before CUDA 12.4 load all of a module at once unless told otherwise.
        Ok(()) | Err(gdrcopy::Error::Unsupported { .. }) => Ok(function),
        Err(error) => Err(Error::cuda("loading a kernel")(error)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEADER: &str = include_str!("../../../include/gdsync.cuh");
    /// The names of an enum of the header, in order.
    fn names(of: &str) -> Vec<&'static str> {
        let (_, rest) = HEADER.split_once(&format!("enum {of} : u32 {{")).expect("an enum of the header");
        rest.split_once('}').expect("its end").0.split(',').map(str::trim).collect()
    }

    #[test]
    fn the_header_says_the_same() {
        let kinds = ["WRITE_32", "WRITE_64", "WAIT_32", "WAIT_64", "WAIT_CQE", "BARRIER", "INDEX", "MARK"];
        let of_kernels = ["ADD_64", "LENGTH", "COPY", "FIND = 12", "PACK", "TAKE"];
        assert_eq!(names("Kind"), [&kinds[..], &of_kernels].concat());
        let numbers = [kind::WRITE_32, kind::WRITE_64, kind::WAIT_32, kind::WAIT_64, kind::WAIT_CQE];
        assert_eq!(numbers, [0, 1, 2, 3, 4]);
        assert_eq!([kind::BARRIER, kind::INDEX, kind::MARK], [5, 6, 7]);
        assert_eq!([kind::ADD_64, kind::LENGTH, kind::COPY, kind::FIND], [8, 9, 10, 12]);
        assert_eq!([kind::PACK, kind::TAKE], [13, 14]);
        let [near, last, peer, found] = [flag::NEAR, flag::LAST, flag::PEER, flag::FOUND];
        let [direct, by_move, either, credit] = [flag::DIRECT, flag::BY_MOVE, flag::EITHER, flag::CREDIT];
        let numbered = flag::NUMBERED;
        let more = format!(
            "DIRECT = {direct}, BY_MOVE = {by_move}, EITHER = {either}, CREDIT = {credit}, NUMBERED = {numbered}"
        );
        let flags = format!(
            "enum Flag : u32 {{ NEAR = {near}, LAST = {last}, PEER = {peer}, FOUND = {found}, {more} }};"
        );
        assert!(HEADER.contains(&flags), "{flags}");
        let conds = names("Cond").into_iter().zip([Cond::Geq, Cond::Eq, Cond::And, Cond::Nor]);
        for (at, (name, cond)) in conds.enumerate() {
            assert_eq!((name, usize::from(cond.code())), (format!("{cond:?}").to_uppercase().as_str(), at));
        }
        for (name, size) in [
            ("Op", size_of::<KernelOp>()),
            ("Status", STATUS_BYTES),
            ("Head", size_of::<Head>()),
            ("Program", BEFORE_STEPS),
        ] {
            let checked = format!("static_assert(sizeof({name}) == {size}, \"{name}\");");
            assert!(HEADER.contains(&checked), "{checked}");
        }
    }

    #[test]
    fn grids_are_for_the_longest_copy() {
        let wait = KernelOp::wait64(Place { addr: 8, is_near: true }, 1, Cond::Geq);
        let long = 8 << 20;
        let copy = KernelOp::copy(0, 0, long);
        let message = KernelOp::pack(wait, (16, 32), (64, 100_000), 1 << 33);
        for (ops, blocks, messages) in [
            (&copy[..], 64, false),
            (&KernelOp::place(Receive::At(16), (64, long), None, (128, 1)).collect::<Program>(), 64, false),
            (&[copy, KernelOp::copy(0, 0, 8)].concat(), 64, false),
            (&message, 16, true),
            (&KernelOp::take(wait, 32, 100_000), 16, true),
            (&KernelOp::take(wait, 32, 8), 1, true),
            (&[KernelOp::signal64(8, 1, false)], 1, false),
            (&[wait], 1, false),
        ] {
            let grid = Grid::of(ops);
            assert_eq!((grid.blocks, grid.messages), (blocks, messages), "{ops:?}");
        }
    }

    #[test]
    fn the_kernels_take_what_is_passed() {
        let (small, large) = (size_of::<Parameter<SMALL>>(), size_of::<Parameter<LARGE>>());
        for (kernel, parameters) in [
            ("gds_run_12", format!(".align 8 .b8 gds_run_12_param_0[{small}]")),
            ("gds_run_160", format!(".align 8 .b8 gds_run_160_param_0[{large}]")),
            ("gds_run_at", ".u64 gds_run_at_param_0".to_owned()),
            ("gds_copy_12", format!(".align 8 .b8 gds_copy_12_param_0[{small}]")),
            ("gds_copy_160", format!(".align 8 .b8 gds_copy_160_param_0[{large}]")),
            ("gds_copy_at", ".u64 gds_copy_at_param_0".to_owned()),
            ("gds_message_12", format!(".align 8 .b8 gds_message_12_param_0[{small}]")),
            ("gds_message_160", format!(".align 8 .b8 gds_message_160_param_0[{large}]")),
            ("gds_message_at", ".u64 gds_message_at_param_0".to_owned()),
            ("gds_finish", ".u64 gds_finish_param_0".to_owned()),
        ] {
            let ahead = format!(",\n\t.param .u64 {kernel}_param_1");
            let ahead = if kernel.starts_with("gds_message") { ahead } else { String::new() };
            let entry = format!(".visible .entry {kernel}(\n\t.param {parameters}{ahead}\n)");
            assert!(PTX.contains(&entry), "{entry}");
        }
    }

    /// Each kernel waits for the one ahead of it; without these instructions programmatic launches would run side by side.
    #[test]
    fn programmatic_kernels_wait_for_the_one_ahead() {
        let ptx = programmatic_ptx();
        let kernels: Vec<_> = ptx.split(".entry ").skip(1).collect();
        assert_eq!(kernels.len(), 10);
        for kernel in kernels {
            let wait = kernel.find("\tgriddepcontrol.wait;").expect("a wait");
            assert!(kernel[wait..].contains("\tgriddepcontrol.launch_dependents;"));
            let writes = ["st.global", "st.relaxed", "st.release", "\tred.", "\tatom."];
            assert!(!writes.iter().any(|write| kernel[..wait].contains(write)), "{kernel}");
        }
        assert!(ptx.contains(".target sm_90\n") && !PTX.contains("\tgriddepcontrol"));
    }

    #[test]
    fn steps_lie_in_memory_as_the_header_reads_them() {
        let write = |n| KernelOp { kind: kind::WRITE_64, addr: 8 * n, value: n, ..KernelOp::BARRIER };
        let steps = [&[1, 2][..], &[], &[3]].map(|ops| ops.iter().copied().map(write).collect::<Program>());
        let mut image = vec![0; room_of_steps([2, 0, 1].into_iter())];
        let head = Head { status: 11, limit_ns: 12, submission: 13, count: 0 };
        put_steps(&mut image, head, steps.iter().map(|step| &step[..]), KernelOp::mark(64, 13));
        let words: Vec<u64> = image.as_chunks::<8>().0.iter().map(|word| u64::from_ne_bytes(*word)).collect();
        assert_eq!(words[..6], [11, 12, 13, 3, 0, 0], "head and cursor");
        let ops: Vec<_> =
            words[6..].as_chunks::<3>().0.iter().map(|[what, _, value]| (*what, *value)).collect();
        let [one, none, mark] = [kind::WRITE_64, kind::BARRIER, kind::MARK].map(u64::from);
        let last = u64::from(flag::LAST) << 48;
        assert_eq!(ops, [(one, 1), (one | last, 2), (none | last, 0), (one | last, 3), (mark, 13)]);
    }
}
