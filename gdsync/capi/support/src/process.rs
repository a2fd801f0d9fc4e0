//! The process that uses the library: its forked children are refused, whose copies of locks may be held by threads that they do not
//! have.

use std::sync::OnceLock;

use gdsync_device::fork_guard::ForkGuard;

use crate::handles::Refusal;

static OWNER: OnceLock<ForkGuard> = OnceLock::new();

/// From now on forked children of this process are refused.
#[inline]
pub fn claim() {
    let _ = OWNER.get_or_init(ForkGuard::default);
}

/// Refuses forked children of a process that has called [`claim`]. Takes no lock.
///
/// # Errors
/// `EACCES`.
#[inline]
pub fn check() -> Result<(), Refusal> {
    match OWNER.get() {
        // One load; the error is made elsewhere.
        Some(owner) if !owner.is_here() => Err(forked(*owner)),
        _ => Ok(()),
    }
}

#[cold]
fn forked(owner: ForkGuard) -> Refusal {
    let text = match owner.check() {
        Err(gdsync::Error::OtherProcess { owner, .. }) => format!(
            "this process was forked from process {owner}, which uses the library, and cannot use it; start processes before its first \
             call, or have the child call exec"
        ),
        other => format!("{other:?}"),
    };
    Refusal { errno: libc::EACCES, text }
}
