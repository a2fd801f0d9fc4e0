//! Doorbells: WQE, doorbell record and doorbell register, each visible before the next (mlx5: `udma_to_device_barrier`
//! before the record, `mmio_wc_start` before the register).

use std::sync::atomic::Ordering;

use super::{Atom32, Atom64};
use mlx5_ring::EMPTY;

/// Publishes the producer index, then writes the doorbell. The WQEs must be written. `fence` orders a record in GPU
/// memory before the doorbell.
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

/// Producer index in a queue pair's doorbell record. WQEs before it may be read, rung or not.
pub fn recorded(record: &impl Atom32) -> u16 {
    mlx5_ring::record_to_u16(record.load(Ordering::Acquire))
}

/// Whether a doorbell is set. A hint: earlier writes are not visible yet.
pub fn is_rung(doorbell: &impl Atom64) -> bool {
    doorbell.load(Ordering::Relaxed) != EMPTY
}

/// HCA: takes the doorbell rung since the last call, if any.
///
/// An exchange, because two equal doorbells in a row must both be seen. Doorbells are cumulative, so overwriting one
/// loses nothing.
pub fn take_doorbell(doorbell: &impl Atom64) -> Option<u64> {
    if !is_rung(doorbell) {
        return None;
    }
    let value = doorbell.swap(EMPTY, Ordering::Acquire);
    (value != EMPTY).then_some(value)
}
