//! Pins and their handles belong to the process that made them.

use std::ffi::c_void;
use std::io;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, Ordering};

use crate::error::{Error, Result};
use crate::system::check;

/// The process that owns something.
///
/// A number of the process is not enough: in a new PID namespace a child of process 1 is process 1 too. So this is a
/// token of which a child finds nothing. A child that shares its parent's memory (`vfork`, `CLONE_VM`) counts as
/// another thread of it.
#[derive(Clone, Copy, Debug)]
pub struct Owner {
    /// Where its processes keep their tokens, so that a look takes one load.
    page: &'static AtomicU64,
    token: Token,
}

/// The PID in the low half; above it a number that none of the process's ancestors had.
type Token = u64;

impl Owner {
    /// The process that calls.
    #[inline]
    pub fn this_process() -> Self {
        let page = page();
        Self { page, token: token(page) }
    }

    /// Whether the caller is the owner, and not a child forked since. One load, where the kernel has pages that children find
    /// empty.
    #[inline(always)]
    pub fn is_caller(self) -> bool {
        self.page.load(Ordering::Relaxed) == self.token || self.is_drawn()
    }

    /// As [`Owner::is_caller`], where no token is kept yet, or none is ever.
    #[cold]
    fn is_drawn(self) -> bool {
        token(self.page) == self.token
    }

    /// Refuses a child forked since.
    ///
    /// # Errors
    /// [`Error::OtherProcess`].
    pub fn check(self) -> Result<()> {
        if self.is_caller() {
            return Ok(());
        }
        Err(Error::OtherProcess { owner: pid(self.token), caller: pid(token(self.page)) })
    }
}

/// The process of a token.
fn pid(token: Token) -> u32 {
    let [_, _, _, _, pid @ ..] = token.to_be_bytes();
    u32::from_be_bytes(pid)
}

/// Stands for a page that could not be had. Children find what is here, so nothing is kept here.
static NO_PAGE: AtomicU64 = AtomicU64::new(0);

/// Where this process keeps its token: zero at first, and in every child that is forked.
///
/// Not behind a lock or a `OnceLock`: a child would wait for ever for a thread of its parent that was at it.
fn page() -> &'static AtomicU64 {
    static PAGE: AtomicPtr<AtomicU64> = AtomicPtr::new(ptr::null_mut());
    let mut page = PAGE.load(Ordering::Acquire);
    if page.is_null() {
        let made = wiped_page().unwrap_or_else(|error| {
            tracing::debug!(%error, "children are told from their parents by PID alone");
            ptr::from_ref(&NO_PAGE).cast_mut()
        });
        // Of several threads the first decides. The page of another stays, unused.
        page = match PAGE.compare_exchange(ptr::null_mut(), made, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => made,
            Err(first) => first,
        };
    }
    // SAFETY: not null: a static, or a page that is never unmapped, here and in children; only used as an atomic.
    unsafe { &*page }
}

/// A new page of zeros, which children get as zeros again (Linux 4.14).
fn wiped_page() -> io::Result<*mut AtomicU64> {
    let (len, prot) = (size_of::<AtomicU64>(), libc::PROT_READ | libc::PROT_WRITE);
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    // SAFETY: a new anonymous mapping touches none that exists.
    let raw = unsafe { libc::mmap(ptr::null_mut(), len, prot, flags, -1, 0) };
    let page = NonNull::new(raw).filter(|_| raw != libc::MAP_FAILED).ok_or_else(io::Error::last_os_error)?;
    if let Err(error) = wipe_on_fork(page, len) {
        // SAFETY: the page above, which nobody else knows.
        check(unsafe { libc::munmap(page.as_ptr(), len) })?;
        return Err(error);
    }
    Ok(page.as_ptr().cast())
}

fn wipe_on_fork(page: NonNull<c_void>, len: usize) -> io::Result<()> {
    // SAFETY: no such advice; nothing happens to the page.
    if unsafe { libc::madvise(page.as_ptr(), len, -1) } == 0 {
        // As qemu's user mode does for advice that it does not know.
        return Err(io::Error::new(io::ErrorKind::Unsupported, "this kernel ignores advice"));
    }
    // SAFETY: the caller's page; the advice only concerns fork.
    check(unsafe { libc::madvise(page.as_ptr(), len, libc::MADV_WIPEONFORK) }).map(drop)
}

/// The token that is kept in a page; a new one where there is none.
fn token(page: &AtomicU64) -> Token {
    match page.load(Ordering::Acquire) {
        0 if ptr::eq(page, &NO_PAGE) => std::process::id().into(),
        0 => draw(page),
        token => token,
    }
}

/// Draws a token; of several threads the first decides.
fn draw(page: &AtomicU64) -> Token {
    /// Children go on from here, so none has the number of an ancestor. 0 is for tokens that are only a PID.
    static NEXT: AtomicU32 = AtomicU32::new(1);
    let number = NEXT.fetch_add(1, Ordering::AcqRel);
    let drawn = (u64::from(number) << 32) | u64::from(std::process::id());
    page.compare_exchange(0, drawn, Ordering::AcqRel, Ordering::Acquire).err().unwrap_or(drawn)
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;

    use gdsync_testkit::process::{End, in_child};

    use super::*;

    /// What a child forked by this process finds, whatever its PID is.
    fn is_other_process_at_any_pid(owner: Owner) -> bool {
        let here = Owner::this_process();
        !owner.is_caller() && here.is_caller() && here.token >> 32 > owner.token >> 32
    }

    fn is_pid_alone() -> bool {
        let alone = ptr::eq(page(), &NO_PAGE);
        if alone {
            println!("skipped: this kernel has no pages that children find empty");
        }
        alone
    }

    #[test]
    fn a_child_is_another_process_and_so_is_its_child() {
        if is_pid_alone() {
            return;
        }
        let owner = Owner::this_process();
        assert!(owner.is_caller() && pid(owner.token) == std::process::id());
        let end = in_child(|| {
            let child = Owner::this_process();
            let grandchild = || is_other_process_at_any_pid(child) && is_other_process_at_any_pid(owner);
            is_other_process_at_any_pid(owner) && in_child(grandchild) == End::Said(true)
        });
        assert_eq!(end, End::Said(true));
        assert!(owner.is_caller());
    }

    #[test]
    fn the_error_names_both_processes() {
        let (owner, parent) = (Owner::this_process(), std::process::id());
        let end = in_child(|| match owner.check() {
            Err(Error::OtherProcess { owner, caller }) => owner == parent && caller == std::process::id(),
            _ => false,
        });
        assert_eq!(end, End::Said(true));
        owner.check().unwrap();
    }

    /// In a container: the parent is process 1, and so is its child in a PID namespace of its own.
    #[test]
    fn process_1_is_not_its_child_process_1() {
        if is_pid_alone() {
            return;
        }
        let new_namespace = |more| {
            // SAFETY: flags only; this child has one thread.
            unsafe { libc::unshare(libc::CLONE_NEWPID | more) == 0 }
        };
        let more = [0, libc::CLONE_NEWUSER].into_iter().find(|&more| {
            in_child(|| new_namespace(more) && in_child(|| new_namespace(0)) == End::Said(true))
                == End::Said(true)
        });
        let Some(more) = more else {
            println!("skipped: no PID namespaces can be made here");
            return;
        };
        let is_one = || std::process::id() == 1;
        let parent = || {
            let owner = Owner::this_process();
            let child = || is_one() && !owner.is_caller() && owner.check().is_err();
            is_one() && new_namespace(0) && in_child(child) == End::Said(true) && owner.is_caller()
        };
        assert_eq!(in_child(|| new_namespace(more) && in_child(parent) == End::Said(true)), End::Said(true));
    }

    #[test]
    fn threads_that_draw_at_once_have_one_token() {
        for _ in 0..200 {
            let (page, start) = (AtomicU64::new(0), Barrier::new(4));
            let draw = || {
                start.wait();
                token(&page)
            };
            let tokens = std::thread::scope(|scope| {
                let threads = [(); 4].map(|()| scope.spawn(draw));
                threads.map(|thread| thread.join().unwrap())
            });
            assert_eq!(tokens, [page.into_inner(); 4]);
        }
    }

    #[test]
    fn without_a_page_the_pid_tells() {
        let own = || u64::from(std::process::id());
        let parent = Owner { page: &NO_PAGE, token: own() };
        assert!(token(&NO_PAGE) == own() && parent.is_caller() && pid(parent.token) == std::process::id());
        assert_eq!(in_child(|| token(&NO_PAGE) == own() && !parent.is_caller()), End::Said(true));
    }
}
