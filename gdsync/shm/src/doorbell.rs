//! Work goes to the HCA: WQE, then doorbell record, then doorbell, each visible before the next
//! (mlx5: `udma_to_device_barrier` between the first two, `mmio_wc_start` before the last).

use std::sync::atomic::Ordering;

use super::{Atom32, Atom64};
use mlx5_ring::EMPTY;

/// Rings: publishes the producer index, then writes the doorbell. The WQEs must have been written before. `fence` is what
/// orders a record in GPU memory before the doorbell.
pub fn ring_doorbell(
    record: &impl Atom32,
    pi: u32,
    fence: impl FnOnce(),
    doorbell: &impl Atom64,
    value: u64,
) {
    record.store(pi, Ordering::Release);
    fence();
    doorbell.store(value, Ordering::Release);
}

/// The 16-bit counter in the doorbell record of a queue pair: the WQEs before it may be read, rung or not.
pub fn recorded(record: &impl Atom32) -> u16 {
    mlx5_ring::record_to_u16(record.load(Ordering::Acquire))
}

/// Whether a doorbell waits to be taken. A look only: nothing that was written before it is visible yet.
pub fn is_rung(doorbell: &impl Atom64) -> bool {
    doorbell.load(Ordering::Relaxed) != EMPTY
}

/// The software HCA takes a doorbell: what was rung since the last time, if anything.
///
/// An exchange, because the register is memory: two equal doorbells in a row must both be seen. Doorbells are
/// cumulative, so one that overwrites another loses nothing.
pub fn take_doorbell(doorbell: &impl Atom64) -> Option<u64> {
    if !is_rung(doorbell) {
        return None;
    }
    let value = doorbell.swap(EMPTY, Ordering::Acquire);
    (value != EMPTY).then_some(value)
}
