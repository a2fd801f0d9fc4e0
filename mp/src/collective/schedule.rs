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
mod tests;
