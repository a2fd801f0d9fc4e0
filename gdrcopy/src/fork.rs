//! The owner of a value: the process that made it. Values of a parent are refused in its forked children.

use std::ffi::c_void;
use std::io;
use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, Ordering};

use rustix::mm::{Advice, MapFlags, ProtFlags};

use crate::error::{Error, Result};

/// The process that owns a value.
///
/// A PID is not enough: in a new PID namespace the child of process 1 is process 1 too. So a process has a token in a page that
/// the kernel clears in forked children. A child that shares its parent's memory (`vfork`, `CLONE_VM`) counts as a thread of it.
#[derive(Clone, Copy, Debug)]
pub struct Owner {
    /// Holds the token of the current process: a check is one load.
    page: &'static AtomicU64,
    token: Token,
}

/// The PID in the low half, and a number above it that no ancestor of the process had.
type Token = u64;

impl Owner {
    /// The calling process.
    #[inline]
    pub fn this_process() -> Self {
        let page = page();
        Self { page, token: token(page) }
    }

    /// Whether the caller is the owner, and not a child forked since. One load on kernels that clear pages in children.
    #[inline]
    pub fn is_caller(self) -> bool {
        self.page.load(Ordering::Relaxed) == self.token || self.is_drawn()
    }

    /// The slow path of [`Owner::is_caller`]: no token is stored yet, or none ever is.
    #[cold]
    fn is_drawn(self) -> bool {
        token(self.page) == self.token
    }

    /// Returns an error in a child forked since.
    ///
    /// # Errors
    /// [`Error::OtherProcess`] if the caller is not the owner.
    pub fn check(self) -> Result<()> {
        if self.is_caller() {
            return Ok(());
        }
        Err(Error::OtherProcess { owner: pid(self.token), caller: pid(token(self.page)) })
    }
}

/// The PID in a token.
fn pid(token: Token) -> u32 {
    let [_, _, _, _, pid @ ..] = token.to_be_bytes();
    u32::from_be_bytes(pid)
}

/// Used if the kernel has no such page. Children inherit its value, so it stays 0.
static NO_PAGE: AtomicU64 = AtomicU64::new(0);

/// The page with the token of this process: zero at first, and in every forked child.
///
/// No lock or `OnceLock` guards it: a child would wait for ever for a thread of its parent that held it.
fn page() -> &'static AtomicU64 {
    static PAGE: AtomicPtr<AtomicU64> = AtomicPtr::new(ptr::null_mut());
    let mut page = PAGE.load(Ordering::Acquire);
    if page.is_null() {
        let made = wiped_page().unwrap_or_else(|error| {
            tracing::debug!(%error, "children are distinguished from their parents by PID alone");
            ptr::from_ref(&NO_PAGE).cast_mut()
        });
        // The first of several threads wins. The page of another stays unused.
        page = match PAGE.compare_exchange(ptr::null_mut(), made, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => made,
            Err(first) => first,
        };
    }
    // SAFETY: not null: a static, or a page that is never unmapped, here and in children; only used as an atomic.
    unsafe { &*page }
}

/// A page of zeros that is zero again in forked children (Linux 4.14).
fn wiped_page() -> io::Result<*mut AtomicU64> {
    let (len, prot) = (size_of::<AtomicU64>(), ProtFlags::READ | ProtFlags::WRITE);
    // SAFETY: a new anonymous mapping touches none that exists.
    let page = unsafe { rustix::mm::mmap_anonymous(ptr::null_mut(), len, prot, MapFlags::PRIVATE) }?;
    if let Err(error) = wipe_on_fork(page, len) {
        // SAFETY: the page above, which nothing else knows.
        unsafe { rustix::mm::munmap(page, len) }?;
        return Err(error);
    }
    Ok(page.cast())
}

fn wipe_on_fork(page: *mut c_void, len: usize) -> io::Result<()> {
    // SAFETY: no such advice exists, so the page does not change.
    if unsafe { libc::madvise(page, len, -1) } == 0 {
        // qemu's user mode accepts advice that it does not know.
        return Err(io::Error::new(io::ErrorKind::Unsupported, "this kernel ignores advice"));
    }
    // SAFETY: the caller's page; the advice only concerns fork.
    Ok(unsafe { rustix::mm::madvise(page, len, Advice::LinuxWipeOnFork) }?)
}

/// The token in a page; the first call stores a new one.
fn token(page: &AtomicU64) -> Token {
    match page.load(Ordering::Acquire) {
        0 if ptr::eq(page, &NO_PAGE) => std::process::id().into(),
        0 => draw(page),
        token => token,
    }
}

/// Stores a new token; the first of several threads wins.
fn draw(page: &AtomicU64) -> Token {
    /// Children continue from here, so none has the number of an ancestor. 0 is for tokens that are only a PID.
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
        let parent = std::process::id();
        let end = in_child(|| {
            match owner.check() {
                Err(Error::OtherProcess { owner, caller })
                    if (owner, caller) == (parent, std::process::id()) => {}
                _ => return false,
            }
            let child = Owner::this_process();
            let grandchild = || is_other_process_at_any_pid(child) && is_other_process_at_any_pid(owner);
            is_other_process_at_any_pid(owner) && in_child(grandchild) == End::Said(true)
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
    fn concurrent_threads_get_one_token() {
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
    fn without_a_page_the_pid_identifies_the_process() {
        let own = || u64::from(std::process::id());
        let parent = Owner { page: &NO_PAGE, token: own() };
        assert!(token(&NO_PAGE) == own() && parent.is_caller() && pid(parent.token) == std::process::id());
        assert_eq!(in_child(|| token(&NO_PAGE) == own() && !parent.is_caller()), End::Said(true));
    }
}
