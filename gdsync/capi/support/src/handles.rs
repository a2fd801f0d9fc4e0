//! Handles: numbers for what the program has opened.
//!
//! A number has the place in a table, the kind of the table, and how often the place was used before. So an ended handle, one of
//! another kind and a random number are recognised. Places are not freed. Each place has one word, which tells whose turn it is and
//! who uses it: a message takes few of these steps, as it should cost little more than in Rust. `tests/it/loom.rs` explores the code of
//! this file.

use std::cell::UnsafeCell;
use std::fmt;
use std::mem::ManuallyDrop;
use std::ops::Deref;
use std::sync::OnceLock;

use crate::atomic::{AtomicU32, AtomicU64, Ordering, spin_loop, yield_now};
use crate::process;

pub use crate::process::Refusal;

/// A handle: a number in place of a pointer, 0 for NULL.
pub type Handle = usize;

/// A bit that no handle of a table has: for the caller.
pub const MARK: Handle = 1 << 23;

/// Bits of a place in its table, and [`MARK`].
const PLACE_BITS: u32 = 24;
/// Bits of the kind.
const KIND_BITS: u32 = 8;
const MAX_PLACES: usize = MARK;

/// In the word of a place: there is an object.
const LIVE: u64 = 1;
/// One call has the object for itself.
const TAKEN: u64 = 2;
/// One more call reads the object.
const READER: u64 = 4;
const READERS: u64 = (1 << 32) - READER;

fn kind_of(raw: Handle) -> usize {
    raw >> PLACE_BITS & ((1 << KIND_BITS) - 1)
}

fn turn_of(word: u64) -> u32 {
    (word >> 32) as u32
}

/// The objects of one kind.
pub struct Table<T: 'static> {
    kind: u8,
    /// What the kinds of the library are called, by number; that of 0 is not used.
    names: &'static [&'static str],
    places: OnceLock<Places<T>>,
}

struct Places<T> {
    slots: boxcar::Vec<Slot<T>>,
    /// The first free place and one more, or 0; above it a count of additions, so that `pop` notices each.
    free: AtomicU64,
}

struct Slot<T> {
    word: AtomicU64,
    /// The next free place and one more, or 0.
    next: AtomicU32,
    object: UnsafeCell<Option<T>>,
}

// SAFETY: readers share the object, as `T: Sync` allows; who sets `TAKEN`, or adds one to a place of its own, has it alone, and may be
// another thread than the one that made it, as `T: Send` allows.
unsafe impl<T: Send + Sync> Sync for Slot<T> {}

/// An object that cannot end meanwhile. Drop it before anything waits.
#[derive(Debug)]
pub struct Guard<T: 'static> {
    slot: &'static Slot<T>,
    object: &'static T,
}

impl<T> Deref for Guard<T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.object
    }
}

impl<T> Drop for Guard<T> {
    fn drop(&mut self) {
        self.slot.word.fetch_sub(READER, Ordering::Release);
    }
}

impl<T> fmt::Debug for Table<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl<T> fmt::Debug for Slot<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.word.load(Ordering::Relaxed))
    }
}

impl<T: 'static> Table<T> {
    /// For objects of this kind, one of `names`.
    pub const fn new(kind: u8, names: &'static [&'static str]) -> Self {
        Self { kind, names, places: OnceLock::new() }
    }

    fn name(&self) -> &'static str {
        self.names[usize::from(self.kind)]
    }

    fn places(&'static self) -> &'static Places<T> {
        self.places.get_or_init(|| Places { slots: boxcar::Vec::new(), free: AtomicU64::new(0) })
    }

    /// The slot of a handle of this kind.
    #[inline]
    fn find(&'static self, raw: Handle) -> Result<&'static Slot<T>, Refusal> {
        let place = raw & ((1 << PLACE_BITS) - 1);
        let slot = self.places().slots.get(place).filter(|_| kind_of(raw) == usize::from(self.kind));
        slot.ok_or_else(|| self.unknown(raw))
    }

    #[cold]
    fn unknown(&self, raw: Handle) -> Refusal {
        let value = match self.names.get(kind_of(raw)).filter(|_| raw >> (PLACE_BITS + KIND_BITS) < 1 << 12) {
            _ if raw == 0 => "NULL".into(),
            // Numbers with more turns may be addresses.
            Some(other) if !other.is_empty() && *other != self.name() => {
                format!("{raw:#x}, which is a {other}")
            }
            _ => format!("{raw:#x}"),
        };
        let text = format!("{} is {value}: expected a handle that has not ended", self.name());
        Refusal { errno: libc::EINVAL, text }
    }

    /// Why a place with this word has no object for the handle.
    #[cold]
    fn refusal(&self, raw: Handle, word: u64) -> Refusal {
        if is_of(raw, word) && word & TAKEN != 0 {
            return Refusal {
                errno: libc::EBUSY,
                text: format!("another call waits with this {}", self.name()),
            };
        }
        self.unknown(raw)
    }

    /// Whether there was an object with this handle, which has ended.
    ///
    /// # Errors
    /// Where it is no handle of this kind.
    pub fn has_ended(&'static self, raw: Handle) -> Result<bool, Refusal> {
        let word = self.find(raw)?.word.load(Ordering::Relaxed);
        let turn = raw >> (PLACE_BITS + KIND_BITS);
        match turn_of(word) as usize {
            now if turn < now => Ok(true),
            now if turn == now && word & LIVE != 0 => Ok(false),
            _ => Err(self.unknown(raw)),
        }
    }

    /// Adds an object under a new handle.
    ///
    /// # Errors
    /// `ENOMEM` with eight million objects.
    #[inline]
    pub fn insert(&'static self, object: T) -> Result<Handle, Refusal> {
        let (place, slot) = match self.places().pop() {
            Some(free) => free,
            None => self.grow()?,
        };
        // SAFETY: a place that is not `LIVE` is only of who has got it from the free list, or has just made it.
        unsafe { *slot.object.get() = Some(object) };
        let turn = turn_of(slot.word.load(Ordering::Relaxed));
        // Nobody else changes the word of a place that is not `LIVE`.
        slot.word.store(u64::from(turn) << 32 | LIVE, Ordering::Release);
        // The kind is never 0, and neither is the number.
        let above = (turn as usize) << KIND_BITS | usize::from(self.kind);
        Ok(above << PLACE_BITS | place)
    }

    #[cold]
    fn grow(&'static self) -> Result<(usize, &'static Slot<T>), Refusal> {
        // At the first object of each kind.
        process::claim();
        let (word, next, object) = (AtomicU64::new(0), AtomicU32::new(0), UnsafeCell::new(None));
        let slots = &self.places().slots;
        let place = slots.push(Slot { word, next, object });
        if place < MAX_PLACES {
            return Ok((place, &slots[place]));
        }
        let text = format!("{MAX_PLACES} of {}: end some", self.name());
        Err(Refusal { errno: libc::ENOMEM, text })
    }

    /// The object of a handle.
    ///
    /// # Errors
    /// `EINVAL` for what is no handle of a live object of this kind; `EBUSY` while a call has it for itself.
    #[inline]
    pub fn get(&'static self, raw: Handle) -> Result<Guard<T>, Refusal> {
        let slot = self.find(raw)?;
        self.change(slot, raw, |word| word + READER)?;
        // SAFETY: the object is there. The reader counted above keeps it: a thread that takes it waits for all readers.
        let object = unsafe { (*slot.object.get()).as_ref() }.expect("it is live");
        Ok(Guard { slot, object })
    }

    /// Changes the word of a place that has the object of this handle, which no call has for itself.
    #[inline]
    fn change(&self, slot: &Slot<T>, raw: Handle, new: impl Fn(u64) -> u64) -> Result<(), Refusal> {
        let mut word = slot.word.load(Ordering::Relaxed);
        loop {
            if !is_of(raw, word) || word & (LIVE | TAKEN) != LIVE {
                return Err(self.refusal(raw, word));
            }
            match slot.word.compare_exchange_weak(word, new(word), Ordering::Acquire, Ordering::Relaxed) {
                Ok(_) => return Ok(()),
                Err(now) => word = now,
            }
        }
    }

    /// Takes an object out for a while: others are refused.
    ///
    /// # Errors
    /// Those of [`Table::get`].
    #[inline]
    pub fn borrow(&'static self, raw: Handle) -> Result<Borrowed<T>, Refusal> {
        let slot = self.find(raw)?;
        self.change(slot, raw, |word| word | TAKEN)?;
        // Readers do not wait, so they are soon gone.
        for turn in 0_u32.. {
            if slot.word.load(Ordering::Acquire) & READERS == 0 {
                break;
            }
            if turn < 100 { spin_loop() } else { yield_now() }
        }
        Ok(Borrowed { table: self, slot, place: raw & (MAX_PLACES - 1) })
    }

    /// Ends a handle: of several callers one gets its object.
    ///
    /// # Errors
    /// Those of [`Table::get`].
    pub fn take(&'static self, raw: Handle) -> Result<T, Refusal> {
        Ok(self.borrow(raw)?.end())
    }

    /// Ends all handles, but those that calls have for themselves.
    pub fn clear(&'static self) {
        for (place, slot) in &self.places().slots {
            let turn = turn_of(slot.word.load(Ordering::Relaxed)) as usize;
            let raw = (turn << KIND_BITS | usize::from(self.kind)) << PLACE_BITS | place;
            drop(self.take(raw));
        }
    }
}

impl<T> Places<T> {
    #[inline]
    fn pop(&self) -> Option<(usize, &Slot<T>)> {
        let mut head = self.free.load(Ordering::Acquire);
        loop {
            let place = usize::try_from(head & u64::from(u32::MAX)).ok()?.checked_sub(1)?;
            let slot = &self.slots[place];
            let next = u64::from(slot.next.load(Ordering::Relaxed));
            let new = head & !u64::from(u32::MAX) | next;
            match self.free.compare_exchange_weak(head, new, Ordering::Acquire, Ordering::Acquire) {
                Ok(_) => return Some((place, slot)),
                Err(now) => head = now,
            }
        }
    }

    #[inline]
    fn push(&self, place: usize, slot: &Slot<T>) {
        let mut head = self.free.load(Ordering::Relaxed);
        loop {
            // The lower half.
            #[expect(clippy::cast_possible_truncation)]
            slot.next.store(head as u32, Ordering::Relaxed);
            let new = (head >> 32).wrapping_add(1) << 32 | (place as u64 + 1);
            match self.free.compare_exchange_weak(head, new, Ordering::Release, Ordering::Relaxed) {
                Ok(_) => return,
                Err(now) => head = now,
            }
        }
    }
}

/// Whether a handle is of the present turn of a place.
fn is_of(raw: Handle, word: u64) -> bool {
    (raw as u64) >> (PLACE_BITS + KIND_BITS) == u64::from(turn_of(word))
}

/// An object that one call has alone. It is put back unless it is ended.
#[derive(Debug)]
pub struct Borrowed<T: 'static> {
    table: &'static Table<T>,
    slot: &'static Slot<T>,
    place: usize,
}

impl<T> Deref for Borrowed<T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: this call has set `TAKEN`, and there were no readers left.
        unsafe { (*self.slot.object.get()).as_ref() }.expect("it is live")
    }
}

impl<T> Borrowed<T> {
    /// Ends the handle, and hands over its object.
    #[inline]
    pub fn end(self) -> T {
        // SAFETY: this call has set `TAKEN`, and there were no readers left.
        let object = unsafe { (*self.slot.object.get()).take() }.expect("it is live");
        self.free();
        object
    }

    /// Ends the handle and its object, where it lies.
    #[inline]
    pub fn discard(self) {
        // SAFETY: this call has set `TAKEN`, and there were no readers left.
        unsafe { *self.slot.object.get() = None };
        self.free();
    }

    #[inline]
    fn free(self) {
        let Self { table, slot, place } = *ManuallyDrop::new(self);
        let turn = turn_of(slot.word.load(Ordering::Relaxed)).wrapping_add(1);
        // Nobody else changes the word of a place that is taken and has no readers.
        slot.word.store(u64::from(turn) << 32, Ordering::Release);
        table.places().push(place, slot);
    }
}

impl<T> Drop for Borrowed<T> {
    fn drop(&mut self) {
        self.slot.word.fetch_and(!TAKEN, Ordering::Release);
    }
}
