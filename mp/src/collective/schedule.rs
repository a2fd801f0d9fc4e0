//! The algorithms: which rank exchanges which blocks with which, without memory or messages.

use std::ops::Range;

/// The blocks of data that a rank sends and receives in one round.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Exchange {
    /// Blocks to send, and their receivers.
    pub(super) send: Vec<(usize, Range<usize>)>,
    /// Blocks to receive, and their senders.
    pub(super) recv: Vec<(usize, Range<usize>)>,
}

fn exchange(to: usize, send: Range<usize>, from: usize, recv: Range<usize>) -> Exchange {
    Exchange { send: vec![(to, send)], recv: vec![(from, recv)] }
}

/// Dissemination: after round k, a rank has heard of the 2^(k+1) - 1 before it. The blocks are empty.
pub(super) fn barrier(rank: usize, size: usize) -> Vec<Exchange> {
    let distances = std::iter::successors(Some(1), |d| Some(d * 2)).take_while(|&d| d < size);
    distances.map(|d| exchange((rank + d) % size, 0..0, (rank + size - d) % size, 0..0)).collect()
}

/// A binomial tree: block 0 comes from the parent and goes to the children, the farthest first.
pub(super) fn broadcast(rank: usize, size: usize, root: usize) -> Vec<Exchange> {
    let me = (rank + size - root) % size;
    let real = |relative: usize| (relative + root) % size;
    // The lowest set bit of a rank is its level in the tree; the root is above all.
    let reach = if me == 0 { size.next_power_of_two() } else { me & me.wrapping_neg() };
    let recv = if me == 0 { vec![] } else { vec![(real(me - reach), 0..1)] };
    let children = std::iter::successors(Some(reach / 2), |bit| Some(bit / 2)).take_while(|&bit| bit > 0);
    let send = children.filter(|bit| me + bit < size).map(|bit| (real(me + bit), 0..1)).collect();
    [Exchange { send: vec![], recv }, Exchange { send, recv: vec![] }].into()
}

/// Block r is that of rank r. Recursive doubling for powers of two, else a ring.
pub(super) fn allgather(rank: usize, size: usize) -> Vec<Exchange> {
    if size.is_power_of_two() {
        let steps = std::iter::successors(Some(1), |d| Some(d * 2)).take_while(|&d| d < size);
        return steps
            .map(|step| {
                let (mine, peer) = (rank & !(step - 1), rank ^ step);
                let theirs = mine ^ step;
                exchange(peer, mine..mine + step, peer, theirs..theirs + step)
            })
            .collect();
    }
    let block = |behind: usize| {
        let block = (rank + size - behind) % size;
        block..block + 1
    };
    let (right, left) = ((rank + 1) % size, (rank + size - 1) % size);
    (1..size).map(|step| exchange(right, block(step - 1), left, block(step))).collect()
}

/// Pairwise: block r goes to and comes from rank r, starting with the own rank.
pub(super) fn alltoall(rank: usize, size: usize) -> Vec<Exchange> {
    (0..size)
        .map(|step| {
            let (to, from) = ((rank + step) % size, (rank + size - step) % size);
            exchange(to, to..to + 1, from, from..from + 1)
        })
        .collect()
}

/// One round of an [`allreduce`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fold {
    /// The values go to this rank.
    Give(usize),
    /// Values of this rank are combined with the own ones.
    Take(usize),
    /// Both.
    Swap(usize),
    /// The result comes from this rank.
    Copy(usize),
}

/// Recursive doubling; ranks beyond a power of two give their values to a neighbour and get the result from it.
pub(super) fn allreduce(rank: usize, size: usize) -> Vec<Fold> {
    let within = 1 << size.ilog2();
    let beyond = size - within;
    if rank < 2 * beyond && rank.is_multiple_of(2) {
        return vec![Fold::Give(rank + 1), Fold::Copy(rank + 1)];
    }
    let folded = rank < 2 * beyond;
    let me = if folded { rank / 2 } else { rank - beyond };
    let real = |me: usize| if me < beyond { 2 * me + 1 } else { me + beyond };
    let bits = std::iter::successors(Some(1), |bit| Some(bit * 2)).take_while(|&bit| bit < within);
    let mut folds: Vec<_> = bits.map(|bit| Fold::Swap(real(me ^ bit))).collect();
    if folded {
        folds.insert(0, Fold::Take(rank - 1));
        folds.push(Fold::Give(rank - 1));
    }
    folds
}

#[cfg(test)]
mod tests {
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
                let here = |&(from, _): &(usize, Range<usize>)| {
                    wire.get(&(from, rank)).is_some_and(|q| !q.is_empty())
                };
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
        assert!(
            at.iter().zip(schedules).all(|(at, schedule)| *at == schedule.len()),
            "nobody waits for ever"
        );
        assert!(wire.values().all(VecDeque::is_empty), "every message is received");
        came
    }

    fn set(rank: usize) -> BTreeSet<usize> {
        BTreeSet::from([rank])
    }

    #[test]
    fn barriers_depend_on_all_ranks() {
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
    fn broadcasts_reach_all_ranks() {
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
    fn allgathers_collect_every_block() {
        for size in SIZES {
            let schedules: Vec<_> = (0..size).map(|rank| allgather(rank, size)).collect();
            let own = |rank| {
                (0..size).map(|block| if block == rank { set(rank) } else { BTreeSet::new() }).collect()
            };
            let blocks = play(&schedules, (0..size).map(own).collect(), true);
            let all: Vec<_> = (0..size).map(set).collect();
            assert!(blocks.iter().all(|blocks| *blocks == all), "{size}: {blocks:?}");
        }
    }

    #[test]
    fn alltoalls_deliver_each_block() {
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
    fn allreduces_take_every_rank_once() {
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
}
