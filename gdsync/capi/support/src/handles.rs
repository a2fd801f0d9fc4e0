//! Handles: numbers that look like pointers, point to nothing and are never used twice.

use std::collections::BTreeMap;
use std::sync::Arc;

use parking_lot::RwLock;

use gdsync::{Error, Result};

/// What the program gets.
pub type Handle = usize;

/// Bits of the number and of [`MARK`]; above them is the kind, which no address of a program has there.
const BITS: u32 = 56;
/// Marks a handle that cannot be waited for.
pub const MARK: Handle = 1 << (BITS - 1);

/// The handles of one kind.
#[derive(Debug)]
pub struct Table<T> {
    kind: usize,
    what: &'static str,
    rows: RwLock<(usize, BTreeMap<Handle, Arc<T>>)>,
}

impl<T> Table<T> {
    /// An empty table; no other one has this `kind`.
    pub const fn new(kind: u8, what: &'static str) -> Self {
        Self { kind: (kind as usize) << BITS, what, rows: RwLock::new((0, BTreeMap::new())) }
    }

    /// Adds an object, under a new handle.
    pub fn insert(&self, value: Arc<T>, mark: Handle) -> Handle {
        let (last, rows) = &mut *self.rows.write();
        *last += 1;
        let handle = self.kind | mark | *last;
        rows.insert(handle, value);
        handle
    }

    /// A handle of what has ended.
    pub fn ended_handle(&self, mark: Handle) -> Handle {
        let (last, _) = &mut *self.rows.write();
        *last += 1;
        self.kind | mark | *last
    }

    /// What a handle is for; `None` if that was ended.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for what is no handle of this table.
    pub fn find(&self, handle: Handle) -> Result<Option<Arc<T>>> {
        let (last, rows) = &*self.rows.read();
        match rows.get(&handle) {
            Some(found) => Ok(Some(found.clone())),
            None if (self.kind + 1..=self.kind | *last).contains(&(handle & !MARK)) => Ok(None),
            None => {
                let value = if handle == 0 { "NULL".into() } else { format!("{handle:#x}") };
                Err(Error::invalid(self.what, value, "a handle of this library"))
            }
        }
    }

    /// What a handle is for.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`], also if it was ended.
    pub fn get(&self, handle: Handle) -> Result<Arc<T>> {
        self.find(handle)?.ok_or_else(|| self.ended())
    }

    fn ended(&self) -> Error {
        Error::invalid(self.what, "one that was ended", "one that lives")
    }

    /// Ends a handle. Of two threads one succeeds.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`], as [`Table::get`].
    pub fn remove(&self, handle: Handle) -> Result<Arc<T>> {
        self.find(handle)?;
        self.rows.write().1.remove(&handle).ok_or_else(|| self.ended())
    }

    /// Ends all handles.
    pub fn clear(&self) {
        let ended = std::mem::take(&mut self.rows.write().1);
        // Without the lock.
        drop(ended);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_handle_is_of_its_kind_and_ends_once() {
        let (table, other) = (Table::new(1, "number"), Table::new(2, "number"));
        let (first, second) = (table.insert(Arc::new(7), 0), table.insert(Arc::new(8), MARK));
        other.insert(Arc::new(9), 0);
        assert_eq!(*table.get(second).unwrap(), 8);
        assert_eq!(*table.remove(first).unwrap(), 7);
        assert!(table.find(first).unwrap().is_none());
        for ended in [table.get(first), table.remove(first)] {
            assert!(ended.unwrap_err().to_string().contains("was ended"));
        }
        for unknown in [0, 1, second + 1] {
            assert!(table.find(unknown).is_err());
        }
        assert!(other.find(first).is_err());
        table.clear();
        assert!(table.find(second).unwrap().is_none());
    }
}
