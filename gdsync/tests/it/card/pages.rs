//! A kernel whose pages are larger than 4 KiB, as those of aarch64 may be: a test program runs some of its tests again as if on one.
//! `sysconf` tells the size then, `mmap` and `mincore` keep to it, and the card has several doorbell pages in one page of the host.

use std::ffi::{c_int, c_long, c_void};
use std::process::Command;
use std::ptr;
use std::sync::OnceLock;

use gdsync::memory::{Memory, host_page};

const SIZE: &str = "GDSYNC_TEST_HOST_PAGE";

/// Bytes of a page where this process is to have larger ones.
fn larger() -> Option<usize> {
    static LARGER: OnceLock<Option<usize>> = OnceLock::new();
    *LARGER.get_or_init(|| std::env::var(SIZE).ok()?.parse().ok())
}

/// Takes the place of libc's.
///
/// # Safety
/// As its manual page asks.
#[unsafe(no_mangle)]
unsafe extern "C" fn sysconf(name: c_int) -> c_long {
    type Sysconf = unsafe extern "C" fn(c_int) -> c_long;
    static NEXT: OnceLock<Sysconf> = OnceLock::new();
    let next = NEXT.get_or_init(|| {
        // SAFETY: a name that ends with 0.
        let found = unsafe { libc::dlsym(libc::RTLD_NEXT, c"sysconf".as_ptr()) };
        assert!(!found.is_null());
        // SAFETY: the type is that of the function.
        unsafe { std::mem::transmute::<*mut c_void, Sysconf>(found) }
    });
    match larger().filter(|_| name == libc::_SC_PAGESIZE) {
        Some(page) => c_long::try_from(page).expect("pages are small"),
        // SAFETY: as the caller vouches.
        None => unsafe { next(name) },
    }
}

/// Takes the place of libc's.
///
/// # Safety
/// As its manual page asks.
#[unsafe(no_mangle)]
unsafe extern "C" fn mmap(
    addr: *mut c_void,
    len: usize,
    prot: c_int,
    flags: c_int,
    fd: c_int,
    offset: i64,
) -> *mut c_void {
    let map = |addr: *mut c_void, len: usize, prot, flags, fd, offset: i64| {
        let [prot, flags, fd] = [prot, flags, fd].map(c_long::from);
        // SAFETY: as the caller vouches; a new place is chosen by the kernel.
        unsafe { libc::syscall(libc::SYS_mmap, addr, len, prot, flags, fd, offset) as *mut c_void }
    };
    let Some(page) = larger().filter(|_| addr.is_null()) else {
        return map(addr, len, prot, flags, fd, offset);
    };
    let Some(room) = len.checked_add(page) else { return map(addr, len, prot, flags, fd, offset) };
    let none = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    let place = map(ptr::null_mut(), room, libc::PROT_NONE, none, -1, 0);
    if place == libc::MAP_FAILED {
        return place;
    }
    let at = place.wrapping_byte_add(place.addr().next_multiple_of(page) - place.addr());
    map(at, len, prot, flags | libc::MAP_FIXED, fd, offset)
}

/// Takes the place of libc's, which tells of smaller pages than the caller has room for.
///
/// # Safety
/// As its manual page asks.
#[unsafe(no_mangle)]
unsafe extern "C" fn mincore(addr: *mut c_void, len: usize, resident: *mut u8) -> c_int {
    let Some(page) = larger() else {
        // SAFETY: as the caller vouches.
        return -c_int::from(unsafe { libc::syscall(libc::SYS_mincore, addr, len, resident) } != 0);
    };
    let mut small = vec![0; len.next_multiple_of(page) / 4096];
    // SAFETY: a byte for each page of 4 KiB; the kernel's pages are not smaller.
    let failed = unsafe { libc::syscall(libc::SYS_mincore, addr, len, small.as_mut_ptr()) } != 0;
    // SAFETY: the caller has a byte for each of its pages.
    let resident = unsafe { std::slice::from_raw_parts_mut(resident, len.div_ceil(page)) };
    for (whole, parts) in resident.iter_mut().zip(small.chunks(page / 4096)) {
        *whole = u8::from(parts.iter().all(|part| part & 1 != 0));
    }
    -c_int::from(failed)
}

/// Only asked for in a process with larger pages.
#[test]
#[ignore = "`card` runs it on the card"]
fn pages_are_as_large_as_the_kernel_says() {
    if let Some(page) = larger() {
        assert_eq!(host_page(), page);
        let (one, two) = (Memory::alloc(1).unwrap(), Memory::alloc(page + 1).unwrap());
        assert!([one, two].iter().all(|memory| memory.addr().is_multiple_of(page as u64)));
    }
}

/// Runs tests of this program with these words in their names once more, on larger pages.
pub(crate) fn run_again_on_larger(names: &[&str]) {
    if larger().is_some() {
        return;
    }
    for page in ["16384", "65536"] {
        let mut again = Command::new(std::env::current_exe().unwrap());
        let done = again
            .args(["--include-ignored", "pages::pages_are"])
            .args(names)
            .env(SIZE, page)
            .output()
            .unwrap();
        let [out, err] = [&done.stdout, &done.stderr].map(|text| String::from_utf8_lossy(text));
        assert!(done.status.success(), "with pages of {page} bytes:\n{out}\n{err}");
        assert!(out.contains("pages_are_as_large_as_the_kernel_says ... ok"), "{out}");
    }
}
