//! A note to whoever holds the lock: there is work. Nobody waits for the lock, and no work is forgotten.
//!
//! ```text
//! leaves a note                         holds the lock
//!   put the work down                     take the note: if it is there, do the work
//!   note = 1                              unlock
//!   fence(SeqCst)                         fence(SeqCst)
//!   try to lock: done if that fails       is there a note? then try to lock, and from the start
//! ```
//!
//! *No note is lost.* The fences are totally ordered. If the holder's comes second, it sees the note, or the 0 of
//! somebody who took it. If it comes first, the other side sees the lock free, or held by somebody who has a
//! fence still to come; so does a holder who finds a note and cannot lock again. The last of those fences has
//! nobody after it to leave the note to.
//!
//! *The note only changes by read-modify-write*, so whoever takes it has synchronized with everybody who left it,
//! not only with the last one, and finds the work of all.

use std::sync::atomic::Ordering::{AcqRel, Relaxed, SeqCst};

use super::Atom32;

/// Leaves a note for work that was put down before. The caller must then try to lock, and if that works
/// [`settle`].
pub fn leave<W: Atom32>(note: &W) {
    note.swap(1, AcqRel);
    W::fence(SeqCst);
}

/// Whether there is a note. Asked after unlocking.
pub fn is_left<W: Atom32>(note: &W) -> bool {
    W::fence(SeqCst);
    note.load(Relaxed) != 0
}

/// Takes the note, if there is one: the caller, who holds the lock, now does all the work put down before.
#[must_use = "a note that was taken is work to be done"]
pub fn take(note: &impl Atom32) -> bool {
    note.load(Relaxed) != 0 && note.swap(0, AcqRel) != 0
}

/// Lets the lock go, and takes it again as often as a note was left meanwhile and nobody else has it.
/// `work` must [`take`] the note.
pub fn settle<G>(
    note: &impl Atom32,
    held: G,
    try_lock: impl Fn() -> Option<G>,
    mut work: impl FnMut(&mut G),
) {
    drop(held);
    while is_left(note) {
        let Some(mut again) = try_lock() else { return };
        work(&mut again);
    }
}
