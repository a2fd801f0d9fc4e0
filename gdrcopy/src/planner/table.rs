//! Measured times of the ways to copy in one direction, and the quickest way for each size.

use super::Way;

/// A measured copy.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Point {
    /// Bytes.
    pub len: usize,
    /// Time of one copy, microseconds.
    pub micros: f64,
}

/// The ways of one direction.
#[derive(Clone, Debug)]
pub struct Table {
    curves: Vec<(Way, Vec<Point>)>,
    /// From this length on (bytes), this way; ascending, the first from 0.
    choices: Vec<(usize, Way)>,
    /// Shorter copies are the CPU's, without a look at the choices.
    cpu_below: usize,
}

/// Threads start late now and then: in a calibration, where they are started all the time, they must be so many times as
/// quick to be quicker later.
const THREAD_MARGIN: f64 = 1.4;

/// Lengths at which ways are compared within a doubling.
const STEPS: usize = 16;

impl Table {
    /// From curves, whose points it sorts. A way counts only for sizes up to its last point, except that the way which
    /// is best there goes on for ever. Without any curve everything is copied by the CPU.
    pub fn new(mut curves: Vec<(Way, Vec<Point>)>) -> Self {
        curves.iter_mut().for_each(|(_, points)| points.sort_by_key(|p| p.len));
        let mut lengths: Vec<usize> = curves.iter().flat_map(|(_, points)| points).map(|p| p.len).collect();
        lengths.sort_unstable();
        lengths.dedup();
        let between = |pair: &[usize]| {
            let (from, step) = (pair[0], (pair[1] - pair[0]).div_ceil(STEPS));
            (from..pair[1]).step_by(step).collect::<Vec<_>>()
        };
        let grid = lengths.windows(2).flat_map(between).chain(lengths.last().copied());
        let mut choices = vec![];
        for len in grid {
            let best = curves
                .iter()
                .filter_map(|(way, points)| Some((*way, at(points, len)? * margin(*way))))
                .min_by(|a, b| a.1.total_cmp(&b.1));
            if let Some((way, _)) = best.filter(|(way, _)| choices.last().is_none_or(|(_, last)| last != way))
            {
                choices.push((len, way));
            }
        }
        match choices.first_mut() {
            Some(first) => first.0 = 0,
            None => choices.push((0, Way::Cpu)),
        }
        let cpu_below = match choices[..] {
            [(_, Way::Cpu), (next, _), ..] => next,
            [(_, Way::Cpu)] => usize::MAX,
            _ => 0,
        };
        Self { curves, choices, cpu_below }
    }

    /// The way for a copy of `len` bytes.
    #[inline]
    pub fn way(&self, len: usize) -> Way {
        if len < self.cpu_below {
            return Way::Cpu;
        }
        let after = self.choices.partition_point(|&(from, _)| from <= len);
        self.choices[after - 1].1
    }

    /// The choices: from this length on (bytes), this way; ascending, the first from 0.
    pub fn choices(&self) -> &[(usize, Way)] {
        &self.choices
    }

    /// What was measured.
    pub fn curves(&self) -> &[(Way, Vec<Point>)] {
        &self.curves
    }
}

fn margin(way: Way) -> f64 {
    if matches!(way, Way::Threads(_)) { THREAD_MARGIN } else { 1.0 }
}

/// The time of a copy of `len` bytes, straight between neighbouring points; none beyond the last.
fn at(points: &[Point], len: usize) -> Option<f64> {
    let after = points.partition_point(|p| p.len < len);
    let right = points.get(after)?;
    let Some(left) = after.checked_sub(1).map(|before| points[before]).filter(|_| right.len != len) else {
        return Some(right.micros);
    };
    let share = (len - left.len) as f64 / (right.len - left.len) as f64;
    Some(left.micros + share * (right.micros - left.micros))
}

#[cfg(test)]
mod tests {
    use std::num::NonZero;

    use super::*;

    fn line(fixed: f64, per_byte: f64, sizes: &[usize]) -> Vec<Point> {
        sizes.iter().map(|&len| Point { len, micros: fixed + per_byte * len as f64 }).collect()
    }

    #[test]
    fn the_quickest_way_is_picked_on_both_sides_of_a_crossing() {
        let sizes: Vec<usize> = (0..=20).map(|i| 1 << i).collect();
        // They cross at 4,500 bytes.
        let curves = vec![
            (Way::Cpu, line(1.0, 0.001, &sizes)),
            (Way::CopyEngine, line(5.0, 0.001 - 4.0 / 4500.0, &sizes)),
        ];
        let table = Table::new(curves);
        assert_eq!(table.choices().len(), 2, "{:?}", table.choices());
        let crossing = table.choices()[1].0;
        assert!((4096..=4800).contains(&crossing), "{crossing}");
        assert_eq!(table.way(0), Way::Cpu);
        assert_eq!(table.way(crossing - 1), Way::Cpu);
        assert_eq!(table.way(crossing), Way::CopyEngine);
        assert_eq!(table.way(usize::MAX), Way::CopyEngine);
    }

    #[test]
    fn a_way_given_up_early_does_not_count_beyond() {
        let curves = vec![
            (Way::Cpu, line(0.1, 1.0, &[1, 2, 4])),
            (Way::CopyEngine, line(6.0, 0.001, &[1, 2, 4, 8, 1024])),
        ];
        let table = Table::new(curves);
        assert_eq!(table.way(4), Way::Cpu);
        assert_eq!(table.way(8), Way::CopyEngine);
    }

    #[test]
    fn points_may_come_in_any_order_and_twice() {
        let mut points = line(1.0, 0.5, &[1, 64, 64, 4096]);
        points.reverse();
        let table = Table::new(vec![(Way::CopyEngine, points), (Way::Cpu, line(0.1, 1.0, &[4096, 1]))]);
        assert_eq!((table.way(1), table.way(4096)), (Way::Cpu, Way::CopyEngine));
    }

    #[test]
    fn threads_must_win_clearly() {
        let sizes = [1 << 20, 2 << 20, 4 << 20];
        let two = Way::Threads(NonZero::new(2).unwrap());
        for (speedup, wins) in [(1.3, false), (1.5, true)] {
            let curves = vec![(Way::Cpu, line(0.0, 1.0, &sizes)), (two, line(0.0, 1.0 / speedup, &sizes))];
            assert_eq!(Table::new(curves).way(4 << 20) == two, wins, "{speedup}");
        }
    }

    #[test]
    fn nothing_measured_means_the_cpu() {
        assert_eq!(Table::new(vec![]).way(1 << 30), Way::Cpu);
    }
}
