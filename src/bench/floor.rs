//! The floor: two threads, or two processes, that bounce a cache line. No message can be faster.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use gdasync::measure::Samples;

use super::Result;

/// Bounces the line `rounds` times; the side that serves times each round trip.
pub(super) fn bounce(line: &AtomicU64, serves: bool, rounds: u64, timeout: Duration) -> Result<Samples> {
    let deadline = Instant::now() + timeout;
    let mut samples = Samples::default();
    for n in 0..rounds {
        let (mine, theirs) = if serves { (2 * n + 1, 2 * n + 2) } else { (2 * n + 2, 2 * n + 1) };
        let start = Instant::now();
        if start > deadline {
            return Err("the other side of the floor is gone".into());
        }
        if serves {
            line.store(mine, Ordering::Release);
        }
        let mut spins = 0u32;
        while line.load(Ordering::Acquire) != theirs {
            spins += 1;
            if spins.is_multiple_of(1 << 20) && Instant::now() > deadline {
                return Err("the other side of the floor is gone".into());
            }
        }
        if serves {
            samples.add(start.elapsed());
        } else {
            line.store(mine, Ordering::Release);
        }
    }
    Ok(samples)
}
