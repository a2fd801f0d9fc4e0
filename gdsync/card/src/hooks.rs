//! The functions of the C library that this library stands in front of.

#[cfg(target_arch = "x86_64")]
mod cuda;
mod descriptors;
mod directories;
mod files;

use std::cell::Cell;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicPtr, Ordering};

use rustix::io::Errno;

use crate::log::log;
use crate::process::{Open, Process, may_be_ours};
use crate::sysfs::{Found, Node};
use crate::user::{last_errno, set_errno};

/// The function of this name that comes after ours: usually that of the C library.
struct Next {
    name: &'static CStr,
    found: AtomicPtr<c_void>,
}

impl Next {
    const fn new(name: &'static CStr) -> Self {
        Self { name, found: AtomicPtr::new(std::ptr::null_mut()) }
    }

    fn get(&self) -> *mut c_void {
        let known = self.found.load(Ordering::Relaxed);
        if !known.is_null() {
            return known;
        }
        let errno = last_errno();
        // SAFETY: the name ends with 0.
        let found = unsafe { libc::dlsym(libc::RTLD_NEXT, self.name.as_ptr()) };
        self.found.store(found, Ordering::Relaxed);
        set_errno(errno);
        found
    }
}

/// Calls the next function of a name with these arguments. Evaluates to the second expression where the C library has
/// none.
macro_rules! next {
    ($name:ident($($argument:expr => $type:ty),*) -> $result:ty, else $missing:expr) => {{
        static NEXT: $crate::hooks::Next = $crate::hooks::Next::new(
            match std::ffi::CStr::from_bytes_with_nul(concat!(stringify!($name), "\0").as_bytes()) {
                Ok(name) => name,
                Err(_) => c"",
            },
        );
        let found = NEXT.get();
        if found.is_null() {
            $missing
        } else {
            // SAFETY: it is the C library's function of this name, which has this type.
            let function: unsafe extern "C" fn($($type),*) -> $result = unsafe { std::mem::transmute(found) };
            // SAFETY: the arguments are those that the program called this function with, or better ones.
            unsafe { function($($argument),*) }
        }
    }};
}
use next;

thread_local! {
    /// Whether this thread is inside of a call that concerns the card. What it calls meanwhile goes to the C library.
    static INSIDE: Cell<bool> = const { Cell::new(false) };
}

/// Runs `call` inside, leaving `errno` as it was. `None` if this thread is inside already, or after a panic.
fn inside<T>(call: impl FnOnce() -> T) -> Option<T> {
    if INSIDE.replace(true) {
        return None;
    }
    let errno = last_errno();
    let done =
        catch_unwind(AssertUnwindSafe(call)).inspect_err(|_| log!("a defect of the card; please report it"));
    set_errno(errno);
    INSIDE.set(false);
    done.ok()
}

/// What a failed call returns.
trait Failure {
    const FAILED: Self;
}

impl Failure for c_int {
    const FAILED: Self = -1;
}

impl Failure for isize {
    const FAILED: Self = -1;
}

impl<T> Failure for *mut T {
    const FAILED: Self = std::ptr::null_mut();
}

/// Ends a call that concerns the card: its result, or `errno`. A panic becomes `EIO`.
fn finish<T: Failure>(call: impl FnOnce() -> Result<T, Errno>) -> T {
    inside(call).unwrap_or(Err(Errno::IO)).unwrap_or_else(|error| {
        set_errno(error.raw_os_error());
        T::FAILED
    })
}

/// Where a path leads that is of the card.
enum Target {
    Node(String, Node),
    Nothing,
}

/// Whether an absolute path has a name that all emulated files have in theirs. Others are not looked for.
fn may_lead_to_the_card(path: &[u8]) -> bool {
    let has = |word: &[u8]| path.windows(word.len()).any(|part| part == word);
    (path.starts_with(b"/sys/") || path.starts_with(b"/dev/"))
        && (has(b"infiniband") || has(b"cafe:") || has(b"_peer"))
}

/// What a path of the program names, if it is of the card; relative paths are looked at from directories of the card.
fn target(dir: c_int, path: *const c_char, follow: bool) -> Option<Target> {
    if path.is_null() {
        return None;
    }
    // SAFETY: the program gives it to a function that takes a string.
    let path = unsafe { CStr::from_ptr(path) }.to_bytes();
    let absolute = path.first() == Some(&b'/');
    if absolute && !may_lead_to_the_card(path) {
        return None;
    }
    if !absolute && (dir == libc::AT_FDCWD || !may_be_ours(dir)) {
        return None;
    }
    inside(|| {
        let path = str::from_utf8(path).ok()?;
        let process = Process::this();
        let full = if absolute {
            path.to_owned()
        } else {
            let Some(Open::Dir(base)) = Process::find(dir) else { return None };
            format!("{base}/{path}")
        };
        match process.tree().find(&full, follow) {
            Found::Node(path, node) => Some(Target::Node(path, node.clone())),
            Found::Nothing => Some(Target::Nothing),
            Found::Elsewhere => None,
        }
    })?
}

/// What a descriptor is, if it is of the card.
fn descriptor(fd: c_int) -> Option<Open> {
    if may_be_ours(fd) { inside(|| Process::find(fd))? } else { None }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::address::Link;
    use crate::sysfs::Tree;

    #[test]
    fn every_emulated_file_is_found_by_its_path_and_others_are_not_looked_for() {
        for path in Tree::new(2, Link::Ethernet).paths() {
            assert!(may_lead_to_the_card(path.as_bytes()), "{path}");
        }
        for path in
            ["/sys/class/net/lo/mtu", "/sys/devices/system/cpu/online", "/dev/null", "/home/infiniband/x"]
        {
            assert!(!may_lead_to_the_card(path.as_bytes()), "{path}");
        }
    }
}
