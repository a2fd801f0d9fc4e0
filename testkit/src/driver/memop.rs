//! Stream memory operations: what is accepted, and what they do.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
use std::time::{Duration, Instant};

use gdrcopy::cuda::CudaStatus;
use gdrcopy::cuda::raw::layout::{MemOp, MemOpNodeParams};
use parking_lot::Mutex;

use super::context::Context;
use super::control::{COUNTERS, SETTINGS, count};
use super::memory::{Region, reachable};
use super::{Outcome, address, control, get, get_all, require};

/// The largest batch.
const BATCH: u32 = 255;
/// `CU_STREAM_WAIT_VALUE_EQ`, `_AND`, `_NOR`; 0 is `_GEQ`.
const EQUAL: u32 = 1;
const AND: u32 = 2;
const NOR: u32 = 3;
/// The bits of the condition.
const CONDITION: u32 = 3;
/// `CU_STREAM_WAIT_VALUE_FLUSH`.
const WAIT_FLUSH: u32 = 1 << 30;
/// `CU_STREAM_MEMORY_BARRIER_TYPE_GPU`.
const GPU_BARRIER: u32 = 1;
/// A wait spins for this long.
const SPIN: Duration = Duration::from_micros(50);
/// Device attributes.
const CAN_FLUSH: u32 = 98;
const CAN_64: u32 = 122;
const CAN_NOR: u32 = 123;

/// A checked operation.
#[derive(Clone)]
pub(super) struct Op {
    raw: MemOp,
    /// The memory of a wait or write.
    region: Option<Arc<Region>>,
}

/// Writes that are not visible yet, in order.
#[derive(Default)]
pub(super) struct Deferred(Mutex<Vec<Op>>);

impl Deferred {
    /// Makes them visible.
    pub(super) fn flush(&self) -> Outcome {
        let mut writes = self.0.lock();
        writes.drain(..).try_for_each(|write| write.store())
    }

    fn holds(&self, wait: &Op) -> bool {
        let word = |op: &Op| op.raw.address / 8;
        self.0.lock().iter().any(|write| word(write) == word(wait))
    }
}

/// Reads and checks a batch for a context.
pub(super) fn batch(context: &Context, count: u32, ops: *const MemOp, flags: u32) -> Outcome<Vec<Op>> {
    require((1..=BATCH).contains(&count) && flags == 0, CudaStatus::INVALID_VALUE)?;
    get_all(ops, count)?.into_iter().map(|raw| Op::new(context, raw)).collect()
}

/// The same for the parameters of a node.
pub(super) fn node_batch(context: &Context, params: *const MemOpNodeParams) -> Outcome<Vec<Op>> {
    let params = get(params)?;
    require([0, context.handle].contains(&params.context), CudaStatus::INVALID_VALUE)?;
    batch(context, params.count, params.ops, params.flags)
}

/// Whether a batch may take the place of another one in an executable graph: addresses, values and the conditions of waits
/// may differ.
pub(super) fn may_replace(old: &[Op], new: &[Op]) -> bool {
    let fixed = |op: &Op| {
        let raw = &op.raw;
        let changeable = if op.is_wait() { CONDITION } else { 0 };
        let barrier = if op.region.is_none() { raw.barrier } else { 0 };
        (raw.operation, raw.flags & !changeable, barrier)
    };
    old.iter().map(fixed).eq(new.iter().map(fixed))
}

impl Op {
    fn new(context: &Context, raw: MemOp) -> Outcome<Self> {
        let can = |attribute| {
            let supported = control::attribute(context.device, attribute)? != 0;
            require(supported, CudaStatus::NOT_SUPPORTED)
        };
        let known_flags = match raw.operation {
            MemOp::WAIT_32 | MemOp::WAIT_64 => CONDITION | WAIT_FLUSH,
            MemOp::WRITE_32 | MemOp::WRITE_64 => MemOp::NO_BARRIER,
            MemOp::BARRIER => {
                require(raw.barrier <= GPU_BARRIER, CudaStatus::INVALID_VALUE)?;
                return Ok(Self { raw, region: None });
            }
            MemOp::FLUSH => {
                require(raw.barrier == 0, CudaStatus::INVALID_VALUE)?;
                can(CAN_FLUSH)?;
                return Ok(Self { raw, region: None });
            }
            _ => return Err(CudaStatus::INVALID_VALUE),
        };
        require(raw.flags & !known_flags == 0, CudaStatus::INVALID_VALUE)?;
        let mut op = Self { raw, region: None };
        if op.is_wide() {
            can(CAN_64)?;
        } else {
            op.raw.value = u64::from(op.low());
        }
        if op.is_wait() && raw.flags & CONDITION == NOR {
            can(CAN_NOR)?;
        }
        if op.is_wait() && raw.flags & WAIT_FLUSH != 0 {
            can(CAN_FLUSH)?;
        }
        let size = if op.is_wide() { 8 } else { 4 };
        let addr = address(raw.address)?;
        require(addr.is_multiple_of(size), CudaStatus::INVALID_VALUE)?;
        op.region = Some(reachable(context, addr, size)?);
        Ok(op)
    }

    fn is_wait(&self) -> bool {
        matches!(self.raw.operation, MemOp::WAIT_32 | MemOp::WAIT_64)
    }

    fn is_wide(&self) -> bool {
        matches!(self.raw.operation, MemOp::WAIT_64 | MemOp::WRITE_64)
    }

    /// The half of the value that 32-bit operations use.
    fn low(&self) -> u32 {
        low(self.raw.value)
    }

    /// Executes it on a stream of a context.
    pub(super) fn run(&self, context: &Context, deferred: &Deferred) -> Outcome {
        match self.raw.operation {
            MemOp::WAIT_32 | MemOp::WAIT_64 => {
                // A stream sees its own writes.
                if deferred.holds(self) {
                    deferred.flush()?;
                }
                self.wait(context)?;
            }
            MemOp::WRITE_32 | MemOp::WRITE_64 if self.raw.flags & MemOp::NO_BARRIER != 0 => {
                deferred.0.lock().push(self.clone());
            }
            MemOp::WRITE_32 | MemOp::WRITE_64 => {
                deferred.flush()?;
                self.store()?;
            }
            // A barrier of GPU scope does not affect the CPU.
            MemOp::BARRIER if self.raw.barrier == GPU_BARRIER => {}
            _ => {
                deferred.flush()?;
                fence(Ordering::SeqCst);
            }
        }
        count(&COUNTERS.memops);
        Ok(())
    }

    fn wait(&self, context: &Context) -> Outcome {
        let start = Instant::now();
        while !self.is_met()? {
            context.check()?;
            let waited = start.elapsed();
            if waited < SPIN {
                std::thread::yield_now();
            } else {
                // Longer and longer sleeps: at most a quarter more than the wait takes.
                std::thread::sleep((waited / 4).clamp(SPIN, Duration::from_millis(1)));
            }
        }
        Ok(())
    }

    /// The word, through the region that holds it.
    fn word<T>(
        &self,
        narrow: impl FnOnce(&AtomicU32) -> T,
        wide: impl FnOnce(&AtomicU64) -> T,
    ) -> Outcome<T> {
        let (Some(region), addr) = (&self.region, address(self.raw.address)?) else {
            return Err(CudaStatus::INVALID_VALUE);
        };
        region.touch(|| {
            if self.is_wide() {
                // SAFETY: aligned and inside the region, which stays for now; others use it as a device does.
                wide(unsafe { AtomicU64::from_ptr(std::ptr::with_exposed_provenance_mut(addr)) })
            } else {
                // SAFETY: aligned and inside the region, which stays for now; others use it as a device does.
                narrow(unsafe { AtomicU32::from_ptr(std::ptr::with_exposed_provenance_mut(addr)) })
            }
        })
    }

    fn store(&self) -> Outcome {
        if self.region.as_ref().is_some_and(|region| region.is_io) && SETTINGS.lock().loses_io {
            return Ok(());
        }
        let (value, order) = (self.raw.value, Ordering::SeqCst);
        self.word(|word| word.store(low(value), order), |word| word.store(value, order))
    }

    fn is_met(&self) -> Outcome<bool> {
        let value = self.raw.value;
        let order = Ordering::SeqCst;
        let found = self.word(|word| u64::from(word.load(order)), |word| word.load(order))?;
        Ok(match self.raw.flags & CONDITION {
            EQUAL => found == value,
            AND => found & value != 0,
            NOR if self.is_wide() => !(found | value) != 0,
            NOR => !(low(found) | low(value)) != 0,
            // A cyclic comparison.
            _ if self.is_wide() => found.wrapping_sub(value).cast_signed() >= 0,
            _ => low(found).wrapping_sub(low(value)).cast_signed() >= 0,
        })
    }
}

fn low(value: u64) -> u32 {
    u32::try_from(value & u64::from(u32::MAX)).expect("masked")
}
