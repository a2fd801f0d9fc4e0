//! The algorithms played by ranks that are sets in one thread.

use std::collections::{BTreeSet, HashMap, VecDeque};

use super::*;

const SIZES: std::ops::RangeInclusive<usize> = 1..=33;

/// Messages under way, by sender and receiver, in order.
type Wire = HashMap<(usize, usize), VecDeque<Vec<(usize, BTreeSet<usize>)>>>;

/// Plays the schedules; `blocks[rank][block]` are the ranks whose data is there. A block is only sent on as it is.
fn play(
    schedules: &[Vec<Exchange>],
    mut blocks: Vec<Vec<BTreeSet<usize>>>,
    kept: bool,
) -> Vec<Vec<BTreeSet<usize>>> {
    let mut wire = Wire::new();
    let mut came = blocks.clone();
    let (mut at, mut sent) = (vec![0; schedules.len()], vec![false; schedules.len()]);
    loop {
        let mut moved = false;
        for (rank, schedule) in schedules.iter().enumerate() {
            let Some(round) = schedule.get(at[rank]) else { continue };
            if !std::mem::replace(&mut sent[rank], true) {
                for (to, range) in &round.send {
                    let data = range.clone().map(|block| (block, blocks[rank][block].clone())).collect();
                    wire.entry((rank, *to)).or_default().push_back(data);
                }
            }
            let here =
                |&(from, _): &(usize, Range<usize>)| wire.get(&(from, rank)).is_some_and(|q| !q.is_empty());
            if !round.recv.iter().all(here) {
                continue;
            }
            for (from, range) in &round.recv {
                let data = wire.get_mut(&(*from, rank)).unwrap().pop_front().unwrap();
                assert_eq!(data.len(), range.len(), "both sides speak of as many blocks");
                for (block, (_, contents)) in range.clone().zip(data) {
                    came[rank][block] = contents;
                }
            }
            if kept {
                blocks[rank] = came[rank].clone();
            }
            (at[rank], sent[rank], moved) = (at[rank] + 1, false, true);
        }
        if !moved {
            break;
        }
    }
    assert!(at.iter().zip(schedules).all(|(at, schedule)| *at == schedule.len()), "nobody waits for ever");
    assert!(wire.values().all(VecDeque::is_empty), "every message is received");
    came
}

fn set(rank: usize) -> BTreeSet<usize> {
    BTreeSet::from([rank])
}

#[test]
fn a_barrier_hears_of_everybody() {
    for size in SIZES {
        let schedules: Vec<_> = (0..size).map(|rank| barrier(rank, size)).collect();
        let mut heard: Vec<BTreeSet<usize>> = (0..size).map(set).collect();
        for round in 0..schedules[0].len() {
            let before = heard.clone();
            for (rank, schedule) in schedules.iter().enumerate() {
                let (from, _) = schedule[round].recv[0];
                assert_eq!(schedules[from][round].send[0].0, rank);
                heard[rank].extend(&before[from]);
            }
        }
        assert!(heard.iter().all(|heard| heard.len() == size), "{size}: {heard:?}");
    }
}

#[test]
fn a_broadcast_reaches_everybody() {
    for size in SIZES {
        for root in 0..size {
            let schedules: Vec<_> = (0..size).map(|rank| broadcast(rank, size, root)).collect();
            let blocks = (0..size).map(|rank| vec![set(rank)]).collect();
            let blocks = play(&schedules, blocks, true);
            assert!(blocks.iter().all(|blocks| blocks[0] == set(root)), "{size} {root}: {blocks:?}");
        }
    }
}

#[test]
fn an_allgather_collects_every_block() {
    for size in SIZES {
        let schedules: Vec<_> = (0..size).map(|rank| allgather(rank, size)).collect();
        let own =
            |rank| (0..size).map(|block| if block == rank { set(rank) } else { BTreeSet::new() }).collect();
        let blocks = play(&schedules, (0..size).map(own).collect(), true);
        let all: Vec<_> = (0..size).map(set).collect();
        assert!(blocks.iter().all(|blocks| *blocks == all), "{size}: {blocks:?}");
    }
}

#[test]
fn an_alltoall_brings_the_block_meant_for_each() {
    for size in SIZES {
        let schedules: Vec<_> = (0..size).map(|rank| alltoall(rank, size)).collect();
        // What goes from one rank to another is the number of both.
        let own = |rank| (0..size).map(|to| set(rank * size + to)).collect();
        let blocks = play(&schedules, (0..size).map(own).collect(), false);
        for (rank, blocks) in blocks.iter().enumerate() {
            assert!(
                blocks.iter().enumerate().all(|(from, block)| *block == set(from * size + rank)),
                "{size}: {blocks:?}"
            );
        }
    }
}

#[test]
fn an_allreduce_takes_every_rank_once() {
    for size in SIZES {
        let folds: Vec<_> = (0..size).map(|rank| allreduce(rank, size)).collect();
        let mut values: Vec<Vec<usize>> = (0..size).map(|rank| vec![rank]).collect();
        let mut wire: HashMap<(usize, usize), VecDeque<Vec<usize>>> = HashMap::new();
        let (mut at, mut sent) = (vec![0; size], vec![false; size]);
        loop {
            let mut moved = false;
            for rank in 0..size {
                let Some(&fold) = folds[rank].get(at[rank]) else { continue };
                if let (Fold::Give(to) | Fold::Swap(to), false) = (fold, sent[rank]) {
                    wire.entry((rank, to)).or_default().push_back(values[rank].clone());
                    sent[rank] = true;
                }
                if let Fold::Take(from) | Fold::Swap(from) | Fold::Copy(from) = fold {
                    let Some(came) = wire.entry((from, rank)).or_default().pop_front() else { continue };
                    if let Fold::Copy(_) = fold {
                        values[rank].clear();
                    }
                    values[rank].extend(came);
                }
                (at[rank], sent[rank], moved) = (at[rank] + 1, false, true);
            }
            if !moved {
                break;
            }
        }
        assert!(wire.values().all(VecDeque::is_empty));
        for mut values in values {
            values.sort_unstable();
            assert!(values.into_iter().eq(0..size), "{size} ranks");
        }
    }
}
