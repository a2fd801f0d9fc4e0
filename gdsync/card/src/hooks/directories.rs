//! Functions that list directories. A directory of the card is a `DIR` of our own.

use std::ffi::{c_char, c_int, c_long, c_void};

use libc::{AT_FDCWD, DIR, dirent};
use rustix::io::Errno;

use super::{Failure as _, Target, descriptor, finish, inside, next, target};
use crate::process::{Open, Process};
use crate::sysfs::{Node, inode};
use crate::user::set_errno;

/// First 8 bytes of a `DIR` of ours. That of the C library begins with a descriptor and a lock, which are small.
const MAGIC: u64 = 0xcafe_d14a_cafe_d14a;

/// A directory that is being listed.
#[repr(C)]
struct Listing {
    magic: u64,
    fd: c_int,
    at: usize,
    entries: Vec<dirent>,
}

impl Listing {
    /// The next entry, or null.
    fn next(&mut self) -> *mut dirent {
        let entry = self.entries.get_mut(self.at);
        self.at += usize::from(entry.is_some());
        entry.map_or(std::ptr::null_mut(), std::ptr::from_mut)
    }
}

/// The entries of a directory.
fn entries(path: &str) -> Vec<dirent> {
    let inside = Process::this().tree().list(path).map(|(name, node)| {
        let kind = match node {
            Node::Dir => libc::DT_DIR,
            Node::File(_) => libc::DT_REG,
            Node::Link(_) => libc::DT_LNK,
            Node::Device(_) => libc::DT_CHR,
        };
        (name.to_owned(), kind)
    });
    let all = [(".".to_owned(), libc::DT_DIR), ("..".to_owned(), libc::DT_DIR)].into_iter().chain(inside);
    let number = |name: &str| match name {
        "." => inode(path),
        ".." => inode(path.rsplit_once('/').map_or("", |(above, _)| above)),
        _ => inode(&format!("{path}/{name}")),
    };
    all.zip(1..).map(|((name, kind), next)| entry(&name, number(&name), kind, next)).collect()
}

/// An entry; `next` is the position behind it.
fn entry(name: &str, number: u64, kind: u8, next: i64) -> dirent {
    // SAFETY: any bytes are a value of this structure.
    let mut entry: dirent = unsafe { std::mem::zeroed() };
    (entry.d_ino, entry.d_off) = (number, next);
    entry.d_reclen = u16::try_from(size_of::<dirent>()).unwrap_or_default();
    entry.d_type = kind;
    for (to, from) in entry.d_name.iter_mut().zip(name.bytes()) {
        *to = from.cast_signed();
    }
    entry
}

fn list(path: &str, fd: c_int) -> *mut DIR {
    Box::into_raw(Box::new(Listing { magic: MAGIC, fd, at: 0, entries: entries(path) })).cast()
}

/// Whether a directory is ours.
fn is_ours(dir: *mut DIR) -> bool {
    // SAFETY: the program has it from `opendir`; either kind is longer than 8 bytes and aligned.
    !dir.is_null() && unsafe { dir.cast::<u64>().read() } == MAGIC
}

fn listing<'a>(dir: *mut DIR) -> &'a mut Listing {
    // SAFETY: the caller has checked it, and a program uses a directory from one thread at a time.
    unsafe { &mut *dir.cast() }
}

#[cfg_attr(not(test), unsafe(no_mangle))]
pub(crate) extern "C" fn opendir(path: *const c_char) -> *mut DIR {
    match target(AT_FDCWD, path, true) {
        Some(Target::Node(path, Node::Dir)) => finish(|| {
            let fd = Process::this().open_dir(&path)?;
            Ok(list(&path, fd))
        }),
        Some(Target::Node(..)) => finish(|| Err(Errno::NOTDIR)),
        Some(Target::Nothing) => finish(|| Err(Errno::NOENT)),
        None => next!(opendir(path => *const c_char) -> *mut DIR, else std::ptr::null_mut()),
    }
}

#[cfg_attr(not(test), unsafe(no_mangle))]
pub(crate) extern "C" fn fdopendir(fd: c_int) -> *mut DIR {
    match descriptor(fd) {
        Some(Open::Dir(path)) => finish(|| Ok(list(&path, fd))),
        _ => next!(fdopendir(fd => c_int) -> *mut DIR, else std::ptr::null_mut()),
    }
}

/// On 64-bit Linux both forms return the same structure.
macro_rules! readdirs {
    ($($name:ident)*) => {$(
        #[cfg_attr(not(test), unsafe(no_mangle))]
        pub(crate) extern "C" fn $name(dir: *mut DIR) -> *mut dirent {
            if !is_ours(dir) {
                return next!($name(dir => *mut DIR) -> *mut dirent, else std::ptr::null_mut());
            }
            listing(dir).next()
        }
    )*};
}

readdirs! { readdir readdir64 }

macro_rules! reentrant_readdirs {
    ($($name:ident)*) => {$(
        #[cfg_attr(not(test), unsafe(no_mangle))]
        pub(crate) extern "C" fn $name(dir: *mut DIR, entry: *mut dirent, result: *mut *mut dirent) -> c_int {
            if !is_ours(dir) {
                return next!($name(
                    dir => *mut DIR, entry => *mut dirent, result => *mut *mut dirent
                ) -> c_int, else libc::ENOSYS);
            }
            // SAFETY: null, or an entry of the directory.
            let found = unsafe { listing(dir).next().as_ref() };
            // SAFETY: the program gives a place for an entry.
            let given = found.map(|found| unsafe { entry.write(*found) });
            // SAFETY: the program gives a place for the result.
            unsafe { result.write(if given.is_some() { entry } else { std::ptr::null_mut() }) };
            0
        }
    )*};
}

reentrant_readdirs! { readdir_r readdir64_r }

#[cfg_attr(not(test), unsafe(no_mangle))]
pub(crate) extern "C" fn telldir(dir: *mut DIR) -> c_long {
    if is_ours(dir) {
        c_long::try_from(listing(dir).at).unwrap_or_default()
    } else {
        next!(telldir(dir => *mut DIR) -> c_long, else -1)
    }
}

#[cfg_attr(not(test), unsafe(no_mangle))]
pub(crate) extern "C" fn seekdir(dir: *mut DIR, position: c_long) {
    if is_ours(dir) {
        listing(dir).at = usize::try_from(position).unwrap_or_default();
    } else {
        next!(seekdir(dir => *mut DIR, position => c_long) -> (), else ());
    }
}

#[cfg_attr(not(test), unsafe(no_mangle))]
pub(crate) extern "C" fn rewinddir(dir: *mut DIR) {
    if is_ours(dir) {
        listing(dir).at = 0;
    } else {
        next!(rewinddir(dir => *mut DIR) -> (), else ());
    }
}

#[cfg_attr(not(test), unsafe(no_mangle))]
pub(crate) extern "C" fn dirfd(dir: *mut DIR) -> c_int {
    if is_ours(dir) { listing(dir).fd } else { next!(dirfd(dir => *mut DIR) -> c_int, else -1) }
}

#[cfg_attr(not(test), unsafe(no_mangle))]
pub(crate) extern "C" fn closedir(dir: *mut DIR) -> c_int {
    if !is_ours(dir) {
        return next!(closedir(dir => *mut DIR) -> c_int, else -1);
    }
    listing(dir).magic = 0;
    // SAFETY: it comes from `list`, and the program gives it up.
    let listing = unsafe { Box::from_raw(dir.cast::<Listing>()) };
    super::descriptors::close(listing.fd)
}

type Filter = Option<unsafe extern "C" fn(*const dirent) -> c_int>;
type Compare = Option<unsafe extern "C" fn(*mut *const dirent, *mut *const dirent) -> c_int>;

/// The entries that the program wants, in memory of `malloc`. The program's functions run outside: they may ask for files.
fn scan(path: &str, out: *mut *mut *mut dirent, filter: Filter, compare: Compare) -> Result<c_int, Errno> {
    let mut chosen = Vec::new();
    for entry in inside(|| entries(path)).ok_or(Errno::IO)? {
        // SAFETY: it is a function for an entry.
        if filter.is_some_and(|filter| unsafe { filter(&raw const entry) } == 0) {
            continue;
        }
        chosen.push(entry);
    }
    let pointers = allocate::<*mut dirent>(chosen.len().max(1))?;
    // SAFETY: there are as many places as entries, zeroed by `calloc`.
    let places = unsafe { std::slice::from_raw_parts_mut(pointers, chosen.len()) };
    for (place, entry) in places.iter_mut().zip(&chosen) {
        *place = allocate::<dirent>(1)?;
        // SAFETY: it was just allocated for an entry.
        unsafe { place.write(*entry) };
    }
    if let Some(compare) = compare {
        type Untyped = unsafe extern "C" fn(*const c_void, *const c_void) -> c_int;
        // SAFETY: it takes pointers to elements of the array, as `qsort` gives it.
        let compare: Untyped = unsafe { std::mem::transmute(compare) };
        // SAFETY: the array has this many elements of this size.
        unsafe { libc::qsort(pointers.cast(), chosen.len(), size_of::<*mut dirent>(), Some(compare)) };
    }
    // SAFETY: the program gives a place for the array.
    unsafe { out.write(pointers) };
    c_int::try_from(chosen.len()).map_err(|_| Errno::NOMEM)
}

fn allocate<T>(count: usize) -> Result<*mut T, Errno> {
    // SAFETY: any size may be asked for.
    let memory = unsafe { libc::calloc(count, size_of::<T>()) };
    if memory.is_null() { Err(Errno::NOMEM) } else { Ok(memory.cast()) }
}

macro_rules! scandirs {
    ($($name:ident)*) => {$(
        #[cfg_attr(not(test), unsafe(no_mangle))]
        pub(crate) extern "C" fn $name(
            path: *const c_char,
            out: *mut *mut *mut dirent,
            filter: Filter,
            compare: Compare,
        ) -> c_int {
            match target(AT_FDCWD, path, true) {
                Some(Target::Node(path, Node::Dir)) => scan(&path, out, filter, compare).unwrap_or_else(|error| {
                    set_errno(error.raw_os_error());
                    c_int::FAILED
                }),
                Some(Target::Node(..)) => finish(|| Err(Errno::NOTDIR)),
                Some(Target::Nothing) => finish(|| Err(Errno::NOENT)),
                None => next!($name(
                    path => *const c_char, out => *mut *mut *mut dirent, filter => Filter, compare => Compare
                ) -> c_int, else -1),
            }
        }
    )*};
}

scandirs! { scandir scandir64 }

#[cfg(test)]
mod tests {
    use std::ffi::CStr;

    use super::*;

    fn name(entry: &dirent) -> String {
        // SAFETY: names end with 0.
        unsafe { CStr::from_ptr(entry.d_name.as_ptr()) }.to_str().unwrap().to_owned()
    }

    #[test]
    fn a_directory_is_listed() {
        let dir = opendir(c"/sys/class/infiniband_verbs".as_ptr());
        let mut names = Vec::new();
        loop {
            let entry = readdir64(dir);
            // SAFETY: null, or an entry of the open directory.
            let Some(entry) = (unsafe { entry.as_ref() }) else { break };
            names.push(name(entry));
        }
        assert_eq!(names, [".", "..", "abi_version", "uverbs0"]);
        rewinddir(dir);
        assert!(!readdir(dir).is_null());
        assert!(dirfd(dir) >= 0);
        // SAFETY: any bytes are a value of this structure.
        let (mut place, mut result) = (unsafe { std::mem::zeroed() }, std::ptr::null_mut());
        for (at, expected) in [(1, ".."), (3, "uverbs0"), (0, ".")] {
            seekdir(dir, at);
            assert_eq!(telldir(dir), at);
            assert_eq!(readdir64_r(dir, &raw mut place, &raw mut result), 0);
            assert_eq!((result, name(&place).as_str()), (&raw mut place, expected));
            assert_eq!(place.d_off, telldir(dir));
        }
        seekdir(dir, 4);
        assert_eq!(readdir_r(dir, &raw mut place, &raw mut result), 0);
        assert!(result.is_null() && readdir(dir).is_null(), "the end");
        assert_eq!(closedir(dir), 0);
    }

    #[test]
    fn other_directories_are_those_of_the_system() {
        let dir = opendir(c"/proc/self".as_ptr());
        assert!(!dir.is_null() && !is_ours(dir));
        assert!(!readdir(dir).is_null());
        assert_eq!(closedir(dir), 0);
        assert!(opendir(c"/sys/class/infiniband/nothing".as_ptr()).is_null());
    }

    #[test]
    fn a_scan_filters_and_sorts() {
        unsafe extern "C" fn visible(entry: *const dirent) -> c_int {
            // SAFETY: the caller gives an entry.
            let name = name(unsafe { &*entry });
            // As a program does that looks at what it finds.
            let dir = opendir(c"/sys/class/infiniband_verbs".as_ptr());
            assert!(is_ours(dir));
            closedir(dir);
            c_int::from(!name.starts_with('.'))
        }
        let mut found = std::ptr::null_mut();
        let path = c"/sys/class/infiniband_verbs";
        let count = scandir(path.as_ptr(), &raw mut found, Some(visible), None);
        assert_eq!(count, 2);
        // SAFETY: there are two.
        for &entry in unsafe { std::slice::from_raw_parts(found, 2) } {
            // SAFETY: it is an entry of `malloc`.
            unsafe { libc::free(entry.cast()) };
        }
        // SAFETY: it is an array of `malloc`.
        unsafe { libc::free(found.cast()) };
    }
}
