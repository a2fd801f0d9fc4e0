//! The process that uses the library: its forked children are refused, whose copies of locks may be held by threads that they do not
//! have.

use std::ffi::c_int;
use std::sync::OnceLock;

use gdrcopy::fork::Owner;

/// Why a process or a handle is refused.
#[derive(Debug)]
pub struct Refusal {
    /// The number of the error.
    pub errno: c_int,
    /// The reason.
    pub text: String,
}

static OWNER: OnceLock<Owner> = OnceLock::new();

/// From now on forked children of this process are refused.
#[inline]
pub fn claim() {
    let _ = OWNER.get_or_init(Owner::this_process);
}

/// Refuses forked children of a process that has called [`claim`]. Takes no lock.
///
/// # Errors
/// `EACCES`.
#[inline]
pub fn check() -> Result<(), Refusal> {
    match OWNER.get() {
        // One load; the error is made elsewhere.
        Some(owner) if !owner.is_caller() => Err(forked(*owner)),
        _ => Ok(()),
    }
}

#[cold]
fn forked(owner: Owner) -> Refusal {
    let text = match owner.check() {
        Err(gdrcopy::Error::OtherProcess { owner, .. }) => format!(
            "this process was forked from process {owner}, which uses the library, and cannot use it; start processes before its first \
             call, or have the child call exec"
        ),
        other => format!("{other:?}"),
    };
    Refusal { errno: libc::EACCES, text }
}
