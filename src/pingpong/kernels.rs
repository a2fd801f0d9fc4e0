//! The kernels of `kernels/pingpong.cu`, and the judge they make; one of them plays by itself.

use std::ffi::CStr;
use std::time::Duration;

use gdsync::memory::Memory;

use super::board::Board;
use super::judge::{Judge, Verdict};
use crate::lane::{Kernel, Kernels, Lane, Result};

/// The compiled kernels.
pub const PTX: &CStr = match CStr::from_bytes_with_nul(
    concat!(include_str!("../../examples/kernels/pingpong.ptx"), "\0").as_bytes(),
) {
    Ok(text) => text,
    Err(_) => panic!("a text without NUL, and one at its end"),
};

/// The arguments of `turn`, as in the source.
#[derive(Clone, Copy)]
#[repr(C)]
struct Turn {
    score: u64,
    times: u64,
    total: u64,
    received: [u64; 2],
    sent: u64,
    bytes: u64,
    rank: u64,
    lies: u64,
}

/// The arguments of `initiate`, as in the source.
#[derive(Clone, Copy)]
#[repr(C)]
struct Initiate {
    turn: Turn,
    program: u64,
    iterations: u64,
    work_ns: u64,
    waits_first: u64,
}

const _: () = assert!(size_of::<Turn>() == 72 && size_of::<Initiate>() == 104, "as in the source");

/// Places in `struct Score` of the source.
mod score {
    pub(super) const START: usize = 0;
    pub(super) const TURNS: usize = 8;
    pub(super) const ERRORS: usize = 16;
    pub(super) const SIZE: usize = 32;
}

/// Threads of a block of `turn`, and the most blocks: enough for the memory's bandwidth, and all run at once.
const THREADS: u32 = 256;
const MOST_BLOCKS: usize = 128;
/// Bytes for each thread before there is another block.
const BYTES_PER_THREAD: usize = 32;
/// Threads that wait and send by themselves: a warp for short messages, a thread for each word of long ones.
const INITIATORS: std::ops::RangeInclusive<usize> = 32..=1024;

/// Kernels on the stream, in every mode.
pub(super) struct KernelJudge<'a> {
    lane: &'a Lane,
    kernels: &'a Kernels,
    board: Board,
    total: u64,
    /// The score, then the times; and their address on the GPU.
    memory: Memory,
    addr: u64,
    /// The addresses of the buffers on the GPU.
    outgoing: u64,
    incoming: u64,
    blocks: u32,
    stamp: Kernel<u64>,
    turn: Kernel<Turn>,
    initiate: Kernel<Initiate>,
}

impl<'a> KernelJudge<'a> {
    pub(super) fn new(kernels: &'a Kernels, lane: &'a Lane, board: &Board, total: u64) -> Result<Self> {
        let gpu = lane.gpu()?;
        let memory = gpu.alloc(score::SIZE + 8 * usize::try_from(total)?)?;
        memory.fill(0, memory.len(), 0)?;
        memory.flush()?;
        let addr = memory.gpu_addr(gpu)?;
        let outgoing = board.outgoing.memory().gpu_addr(gpu)?;
        let incoming = board.incoming.memory().gpu_addr(gpu)?;
        let blocks = board.bytes.div_ceil(THREADS as usize * BYTES_PER_THREAD).min(MOST_BLOCKS);
        let blocks = u32::try_from(blocks)?;
        // SAFETY: the parameter is one address.
        let stamp = unsafe { kernels.find(c"stamp") }?;
        // SAFETY: the parameter has the layout of `Turn`.
        let turn = unsafe { kernels.find(c"turn") }?;
        // SAFETY: the parameter has the layout of `Initiate`.
        let initiate = unsafe { kernels.find(c"initiate") }?;
        let board = board.clone();
        Ok(Self {
            lane,
            kernels,
            board,
            total,
            memory,
            addr,
            outgoing,
            incoming,
            blocks,
            stamp,
            turn,
            initiate,
        })
    }

    fn arguments(&self) -> Turn {
        let board = &self.board;
        Turn {
            score: self.addr,
            times: self.addr + score::SIZE as u64,
            total: self.total,
            received: [0, 1].map(|n| self.incoming + board.receive_slot(n).start as u64),
            sent: self.outgoing + board.send_slot().start as u64,
            bytes: board.bytes as u64,
            rank: board.rank,
            lies: board.lies.into(),
        }
    }

    /// Launches the kernel that plays so many iterations by itself, whose steps are this program; with work before each
    /// send, behind a step of its own or not.
    pub(super) fn initiate(
        &self,
        program: u64,
        iterations: u64,
        work: Duration,
        waits_first: bool,
    ) -> Result<()> {
        let threads = self.board.bytes.div_ceil(8).next_multiple_of(32);
        let threads = u32::try_from(threads.clamp(*INITIATORS.start(), *INITIATORS.end()))?;
        let (turn, work_ns) = (self.arguments(), u64::try_from(work.as_nanos())?);
        let arguments = Initiate { turn, program, iterations, work_ns, waits_first: waits_first.into() };
        // SAFETY: as for `turn`; the stream keeps the program until the kernel has ended.
        unsafe { self.kernels.launch(&self.initiate, 1, threads, arguments) }
    }

    fn word(&self, at: usize) -> Result<u64> {
        let mut bytes = [0; 8];
        self.memory.read(at, &mut bytes)?;
        Ok(u64::from_ne_bytes(bytes))
    }
}

impl Judge for KernelJudge<'_> {
    fn always_on_stream(&self) -> bool {
        true
    }

    fn start(&self) -> Result<()> {
        // SAFETY: a word of the score, which the judge keeps until the stream is idle.
        unsafe { self.kernels.launch(&self.stamp, 1, 1, self.addr + score::START as u64) }
    }

    fn turn(&self) -> Result<()> {
        // SAFETY: the slots have that many bytes, there is a time for each iteration, and the judge keeps both until the
        // stream is idle.
        unsafe { self.kernels.launch(&self.turn, self.blocks, THREADS, self.arguments()) }
    }

    fn turn_by_cpu(&self, _time: Duration) -> Result<Duration> {
        self.turn().map(|()| Duration::ZERO)
    }

    fn verdict(&self) -> Result<Verdict> {
        let turns = self.word(score::TURNS)?;
        if turns != self.total {
            return Err(format!("{turns} of {} kernels checked their message", self.total).into());
        }
        let mut bytes = vec![0; 8 * usize::try_from(self.total)?];
        self.memory.read(score::SIZE, &mut bytes)?;
        let times = bytes.as_chunks::<8>().0.iter().map(|time| u64::from_ne_bytes(*time)).collect();
        Ok(Verdict { times, errors: self.word(score::ERRORS)? })
    }
}

impl Drop for KernelJudge<'_> {
    fn drop(&mut self) {
        self.lane.settle();
    }
}
