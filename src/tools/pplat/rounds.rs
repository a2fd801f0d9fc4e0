//! The CPU's side of the game.

use std::time::{Duration, Instant};

use super::{Board, Game, Mode, expected};
use crate::measure::Samples;
use super::super::tools_shared::{Failure, Result};

/// What the CPU saw.
#[derive(Debug, Default)]
pub(super) struct Played {
    /// With [`Mode::CpuProduces`]: the times of the rounds.
    pub(super) times: Vec<Duration>,
    pub(super) wrong_words: u64,
}

/// Plays all rounds.
pub(super) fn play(game: Game, board: &Board) -> Result<Played> {
    // Data of odd and of even rounds.
    let data = [0, 1].map(|round| (0..game.words).flat_map(|i| expected(round, i).to_ne_bytes()).collect());
    answered(game, board, 1)?;
    match game.mode {
        Mode::CpuProduces => produce(game, board, &data),
        Mode::GpuProduces => consume(game, board, &data),
    }
}

fn produce(game: Game, board: &Board, data: &[Vec<u8>; 2]) -> Result<Played> {
    let mut times = Vec::with_capacity(game.rounds as usize);
    // The clock is read once in a round: the end of one is the beginning of the next.
    let mut last = Instant::now();
    for round in 1..=game.rounds {
        if let Some(place) = &board.data {
            place.write(&data[round as usize % 2])?;
            if game.flush {
                place.flush()?;
            }
        }
        board.gpu_flag.store(0, round)?;
        answered(game, board, round + 1)?;
        let now = Instant::now();
        times.push(now - last);
        last = now;
    }
    Ok(Played { times, wrong_words: 0 })
}

fn consume(game: Game, board: &Board, data: &[Vec<u8>; 2]) -> Result<Played> {
    let mut found = vec![0; game.words * 4];
    let mut wrong_words = 0;
    board.gpu_flag.store(0, 1)?;
    for round in 1..=game.rounds {
        answered(game, board, round + 1)?;
        if let Some(place) = &board.data {
            place.read(&mut found)?;
            let good = &data[round as usize % 2];
            if found != *good {
                let words = good.as_chunks::<4>().0.iter().zip(found.as_chunks::<4>().0);
                wrong_words += words.filter(|(good, found)| good != found).count() as u64;
            }
        }
        board.gpu_flag.store(0, round + 1)?;
    }
    Ok(Played { times: Vec::new(), wrong_words })
}

/// Waits until the flags of all blocks have a value.
fn answered(game: Game, board: &Board, value: u32) -> Result<()> {
    (0..game.blocks).try_for_each(|block| {
        let seen = await_flag(game.limit, || Ok(board.cpu_flags.load(block as usize)? == value))?;
        let error = || {
            let (round, limit) = (value - 1, game.limit);
            Failure::failed(format_args!("timeout: block {block} did not answer round {round} in {limit:?}"))
        };
        if seen { Ok(()) } else { Err(error()) }
    })
}

/// Polls; false when the time is over.
pub(super) fn await_flag(limit: Duration, mut seen: impl FnMut() -> Result<bool>) -> Result<bool> {
    let mut start = None;
    loop {
        // The clock is read, and the processor offered to others, only now and then.
        for _ in 0..4096 {
            if seen()? {
                return Ok(true);
            }
        }
        if start.get_or_insert_with(Instant::now).elapsed() > limit {
            return Ok(false);
        }
        std::thread::yield_now();
    }
}

/// Samples of averages over so many rounds; rounds that do not fill a sample are left out.
pub(super) fn samples(times: &[Duration], each: usize) -> Samples {
    let mut samples = Samples::default();
    times.chunks_exact(each).for_each(|rounds| samples.add(rounds.iter().sum()));
    samples
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_are_of_whole_groups() {
        let times = [1, 3, 5, 7, 100].map(Duration::from_micros);
        let samples = samples(&times, 2);
        assert_eq!(samples.count(), 2);
        assert!((samples.micros(2).min - 2.0).abs() < 0.01);
    }

    #[test]
    fn waiting_ends() {
        assert!(!await_flag(Duration::ZERO, || Ok(false)).unwrap());
        let mut polls = 0;
        assert!(await_flag(Duration::ZERO, || Ok((polls += 1, polls == 3).1)).unwrap());
        assert!(await_flag(Duration::MAX, || Err(Failure::failed("broken"))).is_err());
    }
}
