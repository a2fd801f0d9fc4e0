//! How times are distributed.

use std::time::Duration;

use serde::Serialize;

/// Times from `from_us` on and below `to_us`; the last bin includes its end.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(super) struct Bin {
    pub(super) from_us: f64,
    pub(super) to_us: f64,
    pub(super) count: usize,
}

/// So many bins of one width from the smallest to the largest time. Every time is in exactly one.
pub(super) fn histogram(times: &[Duration], bins: usize) -> Vec<Bin> {
    let (Some(&min), Some(&max)) = (times.iter().min(), times.iter().max()) else { return Vec::new() };
    // In nanoseconds, with integers: edges are computed once, for counting and for printing.
    let span = (max - min).as_nanos();
    let edge = |i: usize| min.as_nanos() + span * i as u128 / bins as u128;
    let mut counts = vec![0; bins];
    for time in times {
        let above = (1..bins).take_while(|&i| time.as_nanos() >= edge(i)).count();
        counts[above] += 1;
    }
    let us = |i| edge(i) as f64 / 1e3;
    let bin = |(i, count)| Bin { from_us: us(i), to_us: us(i + 1), count };
    counts.into_iter().enumerate().map(bin).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(times: &[u64], bins: usize) -> Vec<usize> {
        let times: Vec<_> = times.iter().copied().map(Duration::from_nanos).collect();
        let bins = histogram(&times, bins);
        for pair in bins.windows(2) {
            assert_eq!(pair[0].to_us, pair[1].from_us);
        }
        bins.iter().map(|bin| bin.count).collect()
    }

    #[test]
    fn every_time_is_in_the_bin_whose_edges_hold_it() {
        assert_eq!(counts(&[1000, 1100, 1199, 1200, 1999, 2000], 5), [3, 1, 0, 0, 2]);
        assert_eq!(counts(&[7, 7, 7], 3), [0, 0, 3], "no width: all edges are one");
        assert_eq!(counts(&[5, 6], 10).iter().sum::<usize>(), 2);
        assert!(histogram(&[], 10).is_empty());
        let bins = histogram(&[1000, 3000].map(Duration::from_nanos), 2);
        let expected =
            [Bin { from_us: 1.0, to_us: 2.0, count: 1 }, Bin { from_us: 2.0, to_us: 3.0, count: 1 }];
        assert_eq!(bins, expected);
    }
}
