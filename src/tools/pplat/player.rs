//! Threads that play the blocks of a kernel, where there is no GPU. They do what `pplat.cu` does.

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Instant;

use super::rounds::await_flag;
use super::{Board, Game, Gpu, Mode, Verdict, expected};
use super::super::tools_shared::{Failure, Result};

/// The threads.
pub(super) struct Players(Vec<JoinHandle<Result<Verdict>>>);

impl Players {
    /// A thread for each block.
    pub(super) fn start(game: Game, board: &Arc<Board>) -> Self {
        let epoch = Instant::now();
        let start = |block| {
            let board = board.clone();
            std::thread::spawn(move || play(game, &board, block, epoch))
        };
        Self((0..game.blocks as usize).map(start).collect())
    }
}

impl Gpu for Players {
    fn end(self) -> Result<Verdict> {
        let mut all = Verdict::default();
        for player in self.0 {
            let one =
                player.join().map_err(|_| Failure::failed("a thread that plays a block panicked"))??;
            all.wrong_words += one.wrong_words;
            all.blocks_gave_up += one.blocks_gave_up;
            all.times.extend(one.times);
        }
        Ok(all)
    }
}

fn play(game: Game, board: &Board, block: usize, epoch: Instant) -> Result<Verdict> {
    let mut verdict = Verdict::default();
    let mine = (block..game.words).step_by(game.blocks as usize);
    let flag = |value| await_flag(game.limit, || Ok(board.gpu_flag.load(0)? == value));
    let now = || u64::try_from(epoch.elapsed().as_nanos()).unwrap_or(u64::MAX);
    board.cpu_flags.store(block, 1)?;
    if game.mode == Mode::GpuProduces {
        verdict.blocks_gave_up += u32::from(!flag(1)?);
        verdict.times.push(now());
    }
    for round in 1..=game.rounds {
        if game.mode == Mode::CpuProduces {
            if !flag(round)? {
                verdict.blocks_gave_up += 1;
                break;
            }
            for (place, i) in board.data.iter().flat_map(|place| mine.clone().map(move |i| (place, i))) {
                verdict.wrong_words += u32::from(place.load(i)? != expected(round, i));
            }
            board.cpu_flags.store(block, round + 1)?;
        } else if verdict.blocks_gave_up == 0 {
            for (place, i) in board.data.iter().flat_map(|place| mine.clone().map(move |i| (place, i))) {
                place.store(i, expected(round, i))?;
            }
            board.cpu_flags.store(block, round + 1)?;
            verdict.blocks_gave_up += u32::from(!flag(round + 1)?);
            verdict.times.push(now());
        }
    }
    if block > 0 {
        verdict.times.clear();
    }
    Ok(verdict)
}
