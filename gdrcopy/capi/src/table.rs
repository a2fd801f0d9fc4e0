//! All that is open in this process: libraries, their buffers, and the slots of their pins.
//!
//! A forked child starts with an empty table. It cannot use its parent's, whose locks may be held by threads that the child does
//! not have.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Deref;
use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering};
use std::sync::{Arc, Once};

use gdrcopy::{GpuBuffer, MappingType, PinFlags, Survey};
use parking_lot::{MappedMutexGuard, Mutex, MutexGuard};

use crate::guard::{Error, Result, invalid};
use crate::slot::{Handle, Kinds, MAX_PINS, PinEntry, Slot, new_serial, next_serial};

/// The table of this process, once it has one.
static TABLE: AtomicPtr<Table> = AtomicPtr::new(std::ptr::null_mut());
/// The process that last made a table: in a child without a table, its parent or an earlier ancestor.
static LAST_OWNER: AtomicU32 = AtomicU32::new(0);

/// The table of one process. Never freed: copies read it without a lock.
#[derive(Debug)]
pub(crate) struct Table {
    owner: u32,
    /// Smaller numbers are from `ancestor`.
    first_serial: u64,
    ancestor: u32,
    slots: boxcar::Vec<Slot>,
    /// Slots without a pin.
    free: Mutex<Vec<u32>>,
    libraries: Mutex<BTreeMap<u64, Arc<Library>>>,
    pub(crate) kinds: Kinds,
}

/// Runs in a forked child.
extern "C" fn forget_the_parents() {
    TABLE.store(std::ptr::null_mut(), Ordering::Relaxed);
}

impl Table {
    fn new() -> Self {
        Self {
            owner: std::process::id(),
            first_serial: next_serial(),
            ancestor: LAST_OWNER.load(Ordering::Relaxed),
            slots: boxcar::Vec::new(),
            free: Mutex::default(),
            libraries: Mutex::default(),
            kinds: Kinds::default(),
        }
    }

    /// The table, if there is one. Does not check the calling process, for copies.
    #[inline]
    pub(crate) fn current() -> Option<&'static Self> {
        // SAFETY: null, or what `or_new` leaked.
        unsafe { TABLE.load(Ordering::Acquire).as_ref() }
    }

    /// The table, if it belongs to the calling process: `clone` runs no handlers of `fork`.
    fn own() -> Option<&'static Self> {
        Self::current().filter(|table| table.owner == std::process::id())
    }

    /// The table of this process; the first call makes it.
    pub(crate) fn or_new() -> Result<&'static Self> {
        static HANDLER: Once = Once::new();
        let mut result = 0;
        HANDLER.call_once(|| {
            // SAFETY: the handler stores to an atomic, which is allowed in any child.
            result = unsafe { libc::pthread_atfork(None, None, Some(forget_the_parents)) };
        });
        if result != 0 {
            tracing::warn!(
                "pthread_atfork: errno {result}; a forked child must not copy with its parent's handles"
            );
        }
        if let Some(table) = Self::own() {
            return Ok(table);
        }
        let seen = TABLE.load(Ordering::Acquire);
        let new = Box::into_raw(Box::new(Self::new()));
        if TABLE.compare_exchange(seen, new, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
            LAST_OWNER.store(std::process::id(), Ordering::Relaxed);
        } else {
            // SAFETY: nothing else knows it.
            drop(unsafe { Box::from_raw(new) });
        }
        Self::own().ok_or_else(|| invalid("table", "replaced", "no fork while the library is opened"))
    }

    #[inline]
    pub(crate) fn slot(&self, index: u32) -> Option<&Slot> {
        self.slots.get(index as usize)
    }

    pub(crate) fn add_library(&'static self, survey: gdrcopy::Survey) -> Result<u64> {
        let id = new_serial().ok_or_else(|| used_up("numbers for handles", 0))?;
        self.libraries.lock().insert(id, Arc::new(Library::new(id, survey, self)));
        Ok(id)
    }

    /// Removes a library: one of several callers gets it.
    pub(crate) fn remove_library(id: u64) -> Result<Arc<Library>> {
        let table = Self::own();
        table.and_then(|table| table.libraries.lock().remove(&id)).ok_or_else(|| no_library(table, id))
    }

    pub(crate) fn library(id: u64) -> Result<Arc<Library>> {
        let table = Self::own();
        table.and_then(|table| table.libraries.lock().get(&id).cloned()).ok_or_else(|| no_library(table, id))
    }

    fn add_pin(&self, library: u64, pin: gdrcopy::Pin) -> Result<Handle> {
        let index = self.free_slot().ok_or_else(|| used_up("room for pins", pin.len()))?;
        let Some((slot, serial)) = self.slot(index).zip(new_serial()) else {
            self.return_slot(index);
            return Err(used_up("numbers for handles", pin.len()));
        };
        let handle = Handle::new(serial, index);
        slot.fill(handle, library, pin);
        Ok(handle)
    }

    fn free_slot(&self) -> Option<u32> {
        let mut free = self.free.lock();
        if let Some(index) = free.pop() {
            return Some(index);
        }
        // Under the lock, so that the limit holds.
        if self.slots.count() >= MAX_PINS as usize {
            return None;
        }
        u32::try_from(self.slots.push(Slot::new())).ok()
    }

    /// Returns an empty slot to the free list.
    fn return_slot(&self, index: u32) {
        self.free.lock().push(index);
    }
}

fn used_up(what: &'static str, len: usize) -> Error {
    Error::Exhausted { what, len, fix: "unpin what is no longer used, or restart the process" }
}

/// The error of a number that names no library.
fn no_library(table: Option<&Table>, id: u64) -> Error {
    inherited(table, id).unwrap_or_else(|| {
        invalid("gdr_t", format_args!("{id:#x}"), "what gdr_open returned and gdr_close has not closed")
    })
}

/// The error of a handle that names no pin.
pub(crate) fn no_pin(handle: Handle) -> Error {
    inherited(Table::own(), handle.serial()).unwrap_or_else(|| {
        let value = format_args!("{:#x}", handle.number());
        invalid("handle", value, "one that was pinned with this gdr_t and is not unpinned yet")
    })
}

/// The error of a number that comes from an ancestor of this process.
fn inherited(own: Option<&Table>, serial: u64) -> Option<Error> {
    let (first, owner) = match own {
        Some(table) => (table.first_serial, table.ancestor),
        None => (next_serial(), LAST_OWNER.load(Ordering::Relaxed)),
    };
    (1..first).contains(&serial).then(|| Error::OtherProcess { owner, caller: std::process::id() })
}

/// An opened library with its pins and buffers.
#[derive(Debug)]
pub(crate) struct Library {
    id: u64,
    /// Opened by the first call that pins or allocates, since programs open early and then fork or never pin.
    pub(crate) survey: Survey,
    table: &'static Table,
    /// `None` after the close: a late call releases what it made.
    owned: Mutex<Option<Owned>>,
}

#[derive(Debug, Default)]
struct Owned {
    pins: BTreeSet<Handle>,
    buffers: BTreeMap<u64, Arc<GpuBuffer>>,
}

impl Library {
    fn new(id: u64, survey: Survey, table: &'static Table) -> Self {
        Self { id, survey, table, owned: Mutex::new(Some(Owned::default())) }
    }

    fn owned(&self) -> Result<MappedMutexGuard<'_, Owned>> {
        MutexGuard::try_map(self.owned.lock(), Option::as_mut)
            .map_err(|_| invalid("gdr_t", "being closed", "an open library"))
    }

    pub(crate) fn pin(&self, addr: u64, len: usize, flags: PinFlags) -> Result<Handle> {
        let pin = self.survey.open()?.pin_with(addr, len, flags)?;
        let handle = self.table.add_pin(self.id, pin)?;
        let entered = self.owned().map(|mut owned| owned.pins.insert(handle));
        if entered.is_err() {
            self.release(handle)?;
        }
        entered.map(|_| handle)
    }

    pub(crate) fn unpin(&self, handle: Handle) -> Result<()> {
        let result = self.release(handle);
        if let Ok(mut owned) = self.owned() {
            owned.pins.remove(&handle);
        }
        result
    }

    fn release(&self, handle: Handle) -> Result<()> {
        let held = self.slot(handle)?.take(handle, self.id).ok_or_else(|| no_pin(handle))?;
        self.table.return_slot(handle.index());
        held.release()
    }

    fn slot(&self, handle: Handle) -> Result<&'static Slot> {
        self.table.slot(handle.index()).ok_or_else(|| no_pin(handle))
    }

    pub(crate) fn held(&self, handle: Handle) -> Result<impl Deref<Target = PinEntry>> {
        self.slot(handle)?.pin(handle, self.id).ok_or_else(|| no_pin(handle))
    }

    /// Maps and returns the address of `gdr_info_t::va`; `request` is evaluated only if the pin is not mapped yet.
    pub(crate) fn map(
        &self,
        handle: Handle,
        size: usize,
        request: impl FnOnce() -> Result<Option<MappingType>>,
    ) -> Result<*mut u8> {
        let slot = self.slot(handle)?;
        let mut held = slot.pin(handle, self.id).ok_or_else(|| no_pin(handle))?;
        if held.is_mapped() {
            return Err(Error::AlreadyMapped);
        }
        held.map(&slot.window, &self.table.kinds, size, request()?)
    }

    pub(crate) fn unmap(&self, handle: Handle, address: usize, size: usize) -> Result<()> {
        let slot = self.slot(handle)?;
        let mut held = slot.pin(handle, self.id).ok_or_else(|| no_pin(handle))?;
        held.unmap(&slot.window, address, size)
    }

    /// Releases everything, even if a part fails, and returns the first error.
    pub(crate) fn close(&self) -> Result<()> {
        let Some(owned) = self.owned.lock().take() else { return Ok(()) };
        let mut result = Ok(());
        for handle in owned.pins {
            // A concurrent call may have unpinned it.
            if let Ok(Some(held)) = self.slot(handle).map(|slot| slot.take(handle, self.id)) {
                self.table.return_slot(handle.index());
                result = result.and(held.release());
            }
        }
        result
    }

    pub(crate) fn allocate(&self, device: i32, len: usize) -> Result<u64> {
        let buffer = self.survey.open()?.alloc(device, len)?;
        let addr = buffer.addr();
        self.owned()?.buffers.insert(addr, Arc::new(buffer));
        Ok(addr)
    }

    pub(crate) fn free(&self, addr: u64) -> Result<()> {
        let removed = self.owned()?.buffers.remove(&addr);
        removed.map(drop).ok_or_else(|| no_buffer(addr))
    }

    /// The buffer that holds an address, and how far in.
    pub(crate) fn buffer(&self, addr: u64) -> Result<(Arc<GpuBuffer>, usize)> {
        let owned = self.owned()?;
        let (base, buffer) = owned.buffers.range(..=addr).next_back().ok_or_else(|| no_buffer(addr))?;
        let offset = usize::try_from(addr - base).ok().filter(|&offset| offset < buffer.len());
        Ok((buffer.clone(), offset.ok_or_else(|| no_buffer(addr))?))
    }
}

fn no_buffer(addr: u64) -> Error {
    invalid("GPU address", format_args!("{addr:#x}"), "memory of gdrx_alloc with this gdr_t, not yet freed")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_are_used_again() {
        let table = Table::new();
        let take = || (0..200).map(|_| table.free_slot().unwrap()).collect::<std::collections::BTreeSet<_>>();
        let taken = take();
        assert_eq!(taken.len(), 200);
        assert!(taken.iter().all(|&index| table.slot(index).is_some()));
        taken.iter().for_each(|&index| table.return_slot(index));
        assert_eq!(take(), taken);
        assert!(!taken.contains(&table.free_slot().unwrap()));
        assert!(table.slot(MAX_PINS - 1).is_none());
    }
}
