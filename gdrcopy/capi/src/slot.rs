//! Handles of pins, and the slots that keep a pin with its mapping.
//!
//! No number is used twice in a process and its children, so a stale, doubled or foreign handle is recognised.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use gdrcopy::{Mapping, MappingType, Pin};
use parking_lot::{MappedMutexGuard, Mutex, MutexGuard};

use crate::abi::{GPU_PAGE_SIZE, gdr_info_v2_t};
use crate::guard::{Error, Result, invalid};
use crate::window::{View, Window};

/// Pins at a time: as many as 64 KiB pages in the 256 GiB of an H200's BAR1.
const INDEX_BITS: u32 = 22;
/// Pins at a time.
pub(crate) const MAX_PINS: u32 = 1 << INDEX_BITS;
/// The bits of a handle that count pins: enough for one pin per microsecond for 50 days.
const MAX_SERIAL: u64 = u64::MAX >> INDEX_BITS;

/// The next number. A forked child continues from its parent's.
static NEXT: AtomicU64 = AtomicU64::new(1);

pub(crate) fn new_serial() -> Option<u64> {
    let serial = NEXT.fetch_add(1, Ordering::Relaxed);
    // Far below the wrap of the counter: it stays used up.
    (serial <= MAX_SERIAL).then_some(serial)
}

/// All numbers so far are less.
pub(crate) fn next_serial() -> u64 {
    NEXT.load(Ordering::Relaxed)
}

/// A pin's handle: its slot in the low bits, its serial number above.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Handle(u64);

impl Handle {
    pub(crate) fn new(serial: u64, index: u32) -> Self {
        debug_assert!(serial <= MAX_SERIAL && index < MAX_PINS);
        Self(serial << INDEX_BITS | u64::from(index))
    }

    #[inline]
    pub(crate) fn from_number(number: u64) -> Self {
        Self(number)
    }

    #[inline]
    pub(crate) fn number(self) -> u64 {
        self.0
    }

    #[inline]
    pub(crate) fn index(self) -> u32 {
        // The mask leaves 22 bits.
        #[expect(clippy::cast_possible_truncation)]
        let index = (self.0 & u64::from(MAX_PINS - 1)) as u32;
        index
    }

    pub(crate) fn serial(self) -> u64 {
        self.0 >> INDEX_BITS
    }
}

/// A slot for one pin at a time.
#[derive(Debug)]
#[repr(align(64))]
pub(crate) struct Slot {
    pub(crate) window: Window,
    entry: Mutex<Option<PinEntry>>,
}

/// A pin with its handle and mapping.
#[derive(Debug)]
pub(crate) struct PinEntry {
    pub(crate) handle: Handle,
    /// The library that pinned.
    pub(crate) library: u64,
    // Before the pin: unmapped first.
    mapped: Option<Mapped>,
    pub(crate) pin: Pin,
}

#[derive(Debug)]
struct Mapped {
    mapping: Mapping,
    /// The size that the caller passed to `gdr_map`.
    size: usize,
    _counted: Counted,
}

/// How many mappings of each type live in this process.
#[derive(Debug, Default)]
pub(crate) struct Kinds([AtomicUsize; 3]);

/// One mapping that is counted.
#[derive(Debug)]
struct Counted(&'static AtomicUsize);

impl Kinds {
    fn add(&'static self, kind: MappingType) -> Counted {
        let count = &self.0[kind as usize - 1];
        count.fetch_add(1, Ordering::Relaxed);
        Counted(count)
    }

    /// Whether mappings of several types live. They may show the same memory, and then only a full fence orders accesses.
    #[inline]
    pub(crate) fn are_mixed(&self) -> bool {
        let live = |count: &AtomicUsize| usize::from(count.load(Ordering::Relaxed) != 0);
        self.0.iter().map(live).sum::<usize>() > 1
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Slot {
    pub(crate) fn new() -> Self {
        Self { window: Window::new(), entry: Mutex::new(None) }
    }

    pub(crate) fn fill(&self, handle: Handle, library: u64, pin: Pin) {
        *self.entry.lock() = Some(PinEntry { handle, library, mapped: None, pin });
    }

    /// The pin of this handle, locked against other calls with the same handle.
    pub(crate) fn pin(&self, handle: Handle, library: u64) -> Option<MappedMutexGuard<'_, PinEntry>> {
        MutexGuard::try_map(self.entry.lock(), |entry| {
            entry.as_mut().filter(|h| h.handle == handle && h.library == library)
        })
        .ok()
    }

    pub(crate) fn has(&self, handle: Handle) -> bool {
        self.entry.lock().as_ref().is_some_and(|h| h.handle == handle)
    }

    /// Takes the pin out: of several callers with the same handle, one gets it.
    pub(crate) fn take(&self, handle: Handle, library: u64) -> Option<PinEntry> {
        let mut entry = self.entry.lock();
        let taken = entry.take_if(|h| h.handle == handle && h.library == library)?;
        self.window.close();
        Some(taken)
    }
}

impl PinEntry {
    /// Maps from `gdr_info_t::va` on, and returns the address.
    ///
    /// `size` counts from the address that was pinned, so that all of it can be reached also where `va` is lower.
    pub(crate) fn map(
        &mut self,
        window: &Window,
        kinds: &'static Kinds,
        size: usize,
        request: Option<MappingType>,
    ) -> Result<*mut u8> {
        let info = self.pin.info();
        // An invalid size is passed on unchanged, and `map_pages` refuses it.
        let wanted = if size == 0 || size > info.mapped_size { size } else { self.reach(size) };
        let mapping = self.pin.map_pages(wanted, request)?;
        let view = View { base: mapping.as_ptr().addr(), len: mapping.len(), kind: mapping.kind() as usize };
        let ptr = mapping.as_ptr();
        self.mapped = Some(Mapped { _counted: kinds.add(mapping.kind()), mapping, size });
        window.open(self.handle.number(), view);
        Ok(ptr)
    }

    /// Bytes from `va` on that hold `size` bytes from the address that was pinned, in whole pages, as far as pinned.
    fn reach(&self, size: usize) -> usize {
        let info = self.pin.info();
        let skip = usize::try_from(self.pin.addr() - info.va).unwrap_or(usize::MAX);
        size.saturating_add(skip)
            .checked_next_multiple_of(gdrcopy::host_page())
            .map_or(info.mapped_size, |wanted| wanted.min(info.mapped_size))
    }

    /// Unmaps the mapping that `gdr_map` returned at `address` for `size`.
    pub(crate) fn unmap(&mut self, window: &Window, address: usize, size: usize) -> Result<()> {
        let Some(mapped) = &self.mapped else { return Err(not_mapped()) };
        if address != mapped.mapping.as_ptr().addr() {
            return Err(invalid(
                "address",
                format_args!("{address:#x}"),
                "what gdr_map gave for this handle",
            ));
        }
        // Programs pass a rounded size in one call and the exact one in the other.
        if size.div_ceil(GPU_PAGE_SIZE) != mapped.size.div_ceil(GPU_PAGE_SIZE) {
            return Err(invalid("size", size, "the size that was given to gdr_map"));
        }
        window.close();
        self.mapped.take().map_or(Ok(()), |mapped| mapped.mapping.unmap())
    }

    /// Revokes the mapping and unpins, and returns the first error. A program that has not unmapped may access the mapping again, and
    /// no other memory may be there then.
    pub(crate) fn release(self) -> Result<()> {
        let revoked = self.mapped.map_or(Ok(()), |mapped| mapped.mapping.revoke());
        let unpinned = self.pin.unpin();
        revoked.and(unpinned)
    }

    pub(crate) fn info(&self) -> gdr_info_v2_t {
        gdr_info_v2_t::new(self.pin.info(), self.mapped.as_ref().map(|mapped| mapped.mapping.kind()))
    }

    pub(crate) fn is_mapped(&self) -> bool {
        self.mapped.is_some()
    }
}

/// The refusal of what needs a mapping.
pub(crate) fn not_mapped() -> Error {
    invalid("mapping", "none", "a handle that gdr_map has mapped")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn handles_keep_both_parts() {
        for serial in [1, 2, MAX_SERIAL] {
            for index in [0, 1, MAX_PINS - 1] {
                let handle = Handle::new(serial, index);
                assert_eq!((handle.serial(), handle.index()), (serial, index));
                assert_ne!(handle.number(), 0);
            }
        }
    }

    #[test]
    fn no_serial_comes_twice() {
        let (first, second) = (new_serial().unwrap(), new_serial().unwrap());
        assert!(0 < first && first < second && second < next_serial());
    }

    #[test]
    fn mappings_of_several_types_are_noticed_while_they_live() {
        let kinds: &'static Kinds = Box::leak(Box::default());
        let first = kinds.add(MappingType::WriteCombining);
        let second = kinds.add(MappingType::WriteCombining);
        assert!(!kinds.are_mixed());
        let cached = kinds.add(MappingType::Cached);
        assert!(kinds.are_mixed());
        drop(first);
        assert!(kinds.are_mixed());
        drop(second);
        assert!(!kinds.are_mixed());
        let device = kinds.add(MappingType::Device);
        assert!(kinds.are_mixed());
        drop((cached, device));
        assert!(!kinds.are_mixed());
    }
}
