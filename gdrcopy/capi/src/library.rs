//! One opened library: what `gdr_close` gives back.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Deref;
use std::sync::Arc;

use gdrcopy::{GpuBuffer, MappingType, PinFlags, Survey};
use parking_lot::{MappedMutexGuard, Mutex, MutexGuard};

use crate::error::{Error, Result, invalid};
use crate::handle::Handle;
use crate::slot::{Held, Slot};
use crate::table::{Table, no_pin};

/// An opened library and what belongs to it.
#[derive(Debug)]
pub(crate) struct Library {
    id: u64,
    /// Opened by the first call that pins or allocates: programs open early, and then fork or never pin.
    pub(crate) survey: Survey,
    table: &'static Table,
    /// `None` once closed: what a late call makes is given back at once.
    owned: Mutex<Option<Owned>>,
}

#[derive(Debug, Default)]
struct Owned {
    pins: BTreeSet<Handle>,
    buffers: BTreeMap<u64, Arc<GpuBuffer>>,
}

impl Library {
    pub(crate) fn new(id: u64, survey: Survey, table: &'static Table) -> Self {
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

    /// The pin of a handle, for calls that only look.
    pub(crate) fn held(&self, handle: Handle) -> Result<impl Deref<Target = Held>> {
        self.slot(handle)?.pin(handle, self.id).ok_or_else(|| no_pin(handle))
    }

    /// Maps and gives the address of `gdr_info_t::va`; `request` is looked at only if the pin is not mapped yet.
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

    /// Gives everything back, even if a part fails; the first error.
    pub(crate) fn close(&self) -> Result<()> {
        let Some(owned) = self.owned.lock().take() else { return Ok(()) };
        let mut result = Ok(());
        for handle in owned.pins {
            // A call that runs meanwhile may have unpinned it.
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
