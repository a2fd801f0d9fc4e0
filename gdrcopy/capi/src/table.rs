//! All that is open in this process.
//!
//! A forked child starts with an empty table: its parent's is of no use there, and a thread that does not exist in
//! the child may have held its locks.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering};
use std::sync::{Arc, Once, OnceLock};

use parking_lot::Mutex;

use crate::error::{Error, Result, invalid};
use crate::handle::{Handle, MAX_PINS, new_serial, next_serial};
use crate::library::Library;
use crate::slot::{Kinds, Slot};

/// Slots in the first chunk; each further chunk is twice as long.
const FIRST_CHUNK: u32 = 64;
const CHUNKS: usize = (MAX_PINS / FIRST_CHUNK).ilog2() as usize + 1;

/// The table of this process, once it has one.
static TABLE: AtomicPtr<Table> = AtomicPtr::new(std::ptr::null_mut());
/// The process that last made a table: in a child without one, its parent or an earlier one.
static LAST_OWNER: AtomicU32 = AtomicU32::new(0);

/// What one process has open. Never freed: copies look into it without a lock.
#[derive(Debug)]
pub(crate) struct Table {
    owner: u32,
    /// Smaller numbers were given out by `ancestor`.
    first_serial: u64,
    ancestor: u32,
    chunks: [OnceLock<Box<[Slot]>>; CHUNKS],
    free: Mutex<Free>,
    libraries: Mutex<BTreeMap<u64, Arc<Library>>>,
    pub(crate) kinds: Kinds,
}

#[derive(Debug, Default)]
struct Free {
    returned: Vec<u32>,
    /// Slots from here on were never used.
    fresh: u32,
}

/// In which chunk a slot is, and where.
#[inline]
fn place(index: u32) -> (usize, usize) {
    let n = index + FIRST_CHUNK;
    let log = n.ilog2();
    ((log - FIRST_CHUNK.ilog2()) as usize, (n - (1 << log)) as usize)
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
            chunks: [const { OnceLock::new() }; CHUNKS],
            free: Mutex::default(),
            libraries: Mutex::default(),
            kinds: Kinds::default(),
        }
    }

    /// The table, if there is one. For copies: does not look which process calls.
    #[inline]
    pub(crate) fn current() -> Option<&'static Self> {
        // SAFETY: null, or what `or_new` leaked.
        unsafe { TABLE.load(Ordering::Acquire).as_ref() }
    }

    /// The table, if it is of the process that calls: a `clone` of a process runs no handlers of `fork`.
    fn own() -> Option<&'static Self> {
        Self::current().filter(|table| table.owner == std::process::id())
    }

    /// The table of this process, made if need be.
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
            // SAFETY: it has not been shown to anybody.
            drop(unsafe { Box::from_raw(new) });
        }
        Self::own().ok_or_else(|| invalid("table", "replaced", "no fork while the library is opened"))
    }

    #[inline]
    pub(crate) fn slot(&self, index: u32) -> Option<&Slot> {
        let (chunk, offset) = place(index);
        self.chunks.get(chunk)?.get()?.get(offset)
    }

    /// Opens: keeps the library under a new number.
    pub(crate) fn add_library(&'static self, survey: gdrcopy::Survey) -> Result<u64> {
        let id = new_serial().ok_or_else(|| used_up("numbers for handles", 0))?;
        self.libraries.lock().insert(id, Arc::new(Library::new(id, survey, self)));
        Ok(id)
    }

    /// Closes: of several callers one gets the library.
    pub(crate) fn remove_library(id: u64) -> Result<Arc<Library>> {
        let table = Self::own();
        table.and_then(|table| table.libraries.lock().remove(&id)).ok_or_else(|| no_library(table, id))
    }

    pub(crate) fn library(id: u64) -> Result<Arc<Library>> {
        let table = Self::own();
        table.and_then(|table| table.libraries.lock().get(&id).cloned()).ok_or_else(|| no_library(table, id))
    }

    /// Keeps a pin under a new handle.
    pub(crate) fn add_pin(&self, library: u64, pin: gdrcopy::Pin) -> Result<Handle> {
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
        if let Some(index) = free.returned.pop() {
            return Some(index);
        }
        let index = free.fresh;
        if index == MAX_PINS {
            return None;
        }
        let (chunk, _) = place(index);
        self.chunks[chunk].get_or_init(|| (0..FIRST_CHUNK << chunk).map(|_| Slot::new()).collect());
        free.fresh += 1;
        Some(index)
    }

    /// Gives an emptied slot back.
    pub(crate) fn return_slot(&self, index: u32) {
        self.free.lock().returned.push(index);
    }
}

fn used_up(what: &'static str, len: usize) -> Error {
    Error::Exhausted { what, len, fix: "unpin what is no longer used, or restart the process" }
}

/// Why a number names no library here.
fn no_library(table: Option<&Table>, id: u64) -> Error {
    inherited(table, id).unwrap_or_else(|| {
        invalid("gdr_t", format_args!("{id:#x}"), "what gdr_open returned and gdr_close has not closed")
    })
}

/// Why a handle names no pin here.
pub(crate) fn no_pin(handle: Handle) -> Error {
    inherited(Table::own(), handle.serial()).unwrap_or_else(|| {
        let value = format_args!("{:#x}", handle.number());
        invalid("handle", value, "one that was pinned with this gdr_t and is not unpinned yet")
    })
}

/// The refusal of what this process has from the one that forked it.
fn inherited(own: Option<&Table>, serial: u64) -> Option<Error> {
    let (first, owner) = match own {
        Some(table) => (table.first_serial, table.ancestor),
        None => (next_serial(), LAST_OWNER.load(Ordering::Relaxed)),
    };
    (1..first).contains(&serial).then(|| Error::OtherProcess { owner, caller: std::process::id() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_slot_has_a_place_of_its_own() {
        let (mut chunk, mut offset) = (0, 0);
        for index in (0..MAX_PINS).take(100_000) {
            assert_eq!(place(index), (chunk, offset));
            offset += 1;
            if offset == (FIRST_CHUNK as usize) << chunk {
                (chunk, offset) = (chunk + 1, 0);
            }
        }
        assert!(place(MAX_PINS - 1).0 < CHUNKS);
    }

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
