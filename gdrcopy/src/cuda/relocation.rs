//! Replaces a function that a loaded library imports, for that library alone: its entries of the global offset table.

use std::ffi::{CStr, c_int, c_void};
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

use rustix::mm::MprotectFlags;

use crate::types::host_page;

/// `R_*_GLOB_DAT`: an entry that is bound when the library is loaded.
const GLOB_DAT: u32 = if cfg!(target_arch = "x86_64") { 6 } else { 1025 };
/// `R_*_JUMP_SLOT`: an entry that may be bound at the first call.
const JUMP_SLOT: u32 = if cfg!(target_arch = "x86_64") { 7 } else { 1026 };

/// Makes the library that contains the address `inside` call the function `new` in place of the one that it imports as `name`. `next`
/// receives that one before the first call of `new`; if it has one already, only entries that still hold it are replaced.
///
/// Other threads may call through the entries meanwhile. Threads that just resolve the lazily bound function overwrite an entry
/// afterwards.
///
/// # Errors
/// Why the entries cannot be replaced.
///
/// # Safety
/// `new` must be a function of the imported one's type that does its work through `next`, and neither may be unloaded.
pub(super) unsafe fn replace_import(
    inside: usize,
    name: &CStr,
    new: usize,
    next: &AtomicUsize,
) -> Result<(), String> {
    // SAFETY: a name.
    let bound = unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) }.expose_provenance();
    if bound == 0 {
        return Err(format!("there is no {name:?}"));
    }
    let replace = |library: &Library<'_>| {
        library.entries(name)?.iter().try_for_each(|&(kind, entry)| {
            let held = entry.load(Ordering::Acquire);
            // An entry that is not bound yet holds an address of the library itself.
            let target = if kind == JUMP_SLOT && library.contains(held) { bound } else { held };
            if held == new {
                return Ok(());
            }
            match next.compare_exchange(0, target, Ordering::AcqRel, Ordering::Acquire) {
                Err(other) if other != target => Err(format!("others have replaced its {name:?}")),
                _ => library.exchange(entry, held, new).map_err(|error| format!("mprotect: {error}")),
            }
        })
    };
    with_library(inside, replace).unwrap_or_else(|| Err("it is no shared library".into()))
}

/// Keeps the dynamic linker from unloading the library that contains an address.
///
/// # Errors
/// Why it cannot be kept.
pub(super) fn keep_loaded(inside: usize) -> Result<(), String> {
    let name = with_library(inside, |library| library.name.to_owned()).unwrap_or_default();
    // The program itself has no name, and stays.
    if name.is_empty() || keep(&name) { Ok(()) } else { Err(format!("{name:?} cannot be kept loaded")) }
}

fn keep(name: &CStr) -> bool {
    let flags = libc::RTLD_LAZY | libc::RTLD_NOLOAD | libc::RTLD_NODELETE;
    // SAFETY: a name, under which nothing is loaded anew.
    !unsafe { libc::dlopen(name.as_ptr(), flags) }.is_null()
}

/// Calls `act` with the loaded library that contains an address, under a lock of the dynamic linker: the library stays loaded, and
/// nobody else is in such a call. `act` must not call the dynamic linker, whose locks have an order.
fn with_library<T>(inside: usize, act: impl Fn(&Library<'_>) -> T) -> Option<T> {
    struct Search<'a> {
        inside: usize,
        act: &'a mut dyn FnMut(&Library<'_>),
    }
    unsafe extern "C" fn visit(info: *mut libc::dl_phdr_info, _: usize, search: *mut c_void) -> c_int {
        // SAFETY: the search below, which nothing else uses meanwhile.
        let search = unsafe { &mut *search.cast::<Search<'_>>() };
        // SAFETY: the dynamic linker's description, valid during this call.
        let info = unsafe { &*info };
        // SAFETY: the same, of a library that stays loaded during this call.
        let library = unsafe { Library::new(info) };
        let is_found = library.contains(search.inside);
        if is_found {
            (search.act)(&library);
        }
        is_found.into()
    }
    let mut found = None;
    let mut act = |library: &Library<'_>| found = Some(act(library));
    let mut search = Search { inside, act: &mut act };
    // SAFETY: the callback gets the search, which outlives the call.
    unsafe { libc::dl_iterate_phdr(Some(visit), (&raw mut search).cast()) };
    found
}

/// A number of this machine's ELF files.
#[expect(clippy::cast_possible_truncation, reason = "addresses have 64 bits here")]
const fn size(number: u64) -> usize {
    number as usize
}

struct Library<'a> {
    base: usize,
    name: &'a CStr,
    headers: &'a [libc::Elf64_Phdr],
}

/// `Elf64_Dyn`.
#[repr(C)]
struct Dynamic {
    tag: u64,
    value: usize,
}

/// `Elf64_Rela`.
#[repr(C)]
struct Relocation {
    offset: usize,
    kind: u32,
    symbol: u32,
    addend: i64,
}

/// Tags of the dynamic section.
mod tag {
    pub(super) const PLT_RELOCATIONS_SIZE: u64 = 2;
    pub(super) const STRINGS: u64 = 5;
    pub(super) const SYMBOLS: u64 = 6;
    pub(super) const RELOCATIONS: u64 = 7;
    pub(super) const RELOCATIONS_SIZE: u64 = 8;
    pub(super) const PLT_RELOCATIONS: u64 = 23;
}

impl<'a> Library<'a> {
    /// # Safety
    /// The description must be the dynamic linker's, of a library that stays loaded.
    unsafe fn new(info: &'a libc::dl_phdr_info) -> Self {
        let count = usize::from(info.dlpi_phnum);
        // SAFETY: the caller guarantees it.
        let headers = unsafe { std::slice::from_raw_parts(info.dlpi_phdr, count) };
        // SAFETY: the caller guarantees it.
        let name = unsafe { CStr::from_ptr(info.dlpi_name) };
        Self { base: size(info.dlpi_addr), name, headers }
    }

    /// The addresses of each header of a kind.
    fn ranges(&self, kind: u32) -> impl Iterator<Item = Range<usize>> {
        self.headers.iter().filter(move |header| header.p_type == kind).map(|header| {
            let start = self.base.wrapping_add(size(header.p_vaddr));
            start..start.saturating_add(size(header.p_memsz))
        })
    }

    fn contains(&self, addr: usize) -> bool {
        self.ranges(libc::PT_LOAD).any(|range| range.contains(&addr))
    }

    /// A table of the library. `None` if it does not lie in it.
    fn table<T>(&self, addr: usize, bytes: usize) -> Option<&'a [T]> {
        let fits = |range: Range<usize>| range.contains(&addr) && bytes <= range.end - addr;
        if !addr.is_multiple_of(align_of::<T>()) || !self.ranges(libc::PT_LOAD).any(fits) {
            return None;
        }
        let first = std::ptr::with_exposed_provenance(addr);
        // SAFETY: aligned, inside a loaded part of the library, and these types have no invalid values.
        Some(unsafe { std::slice::from_raw_parts(first, bytes / size_of::<T>()) })
    }

    /// A value of the dynamic section.
    fn dynamic(&self, tag: u64) -> Option<usize> {
        let range = self.ranges(libc::PT_DYNAMIC).next()?;
        let section: &[Dynamic] = self.table(range.start, range.len())?;
        section
            .iter()
            .take_while(|entry| entry.tag != 0)
            .find(|entry| entry.tag == tag)
            .map(|entry| entry.value)
    }

    /// An address in the dynamic section. glibc adds the base to it.
    fn address(&self, tag: u64) -> Option<usize> {
        let value = self.dynamic(tag)?;
        Some(if self.contains(value) { value } else { self.base.wrapping_add(value) })
    }

    fn relocations(&self, start: u64, size: u64) -> &'a [Relocation] {
        let table = self.address(start).zip(self.dynamic(size));
        table.and_then(|(start, size)| self.table(start, size)).unwrap_or_default()
    }

    /// Whether a symbol is imported under this name.
    fn is_import(&self, index: usize, name: &CStr) -> Option<bool> {
        const SIZE: usize = size_of::<libc::Elf64_Sym>();
        let symbol = self.address(tag::SYMBOLS)?.checked_add(index.checked_mul(SIZE)?)?;
        let symbol = self.table::<libc::Elf64_Sym>(symbol, SIZE)?.first()?;
        let text = self.address(tag::STRINGS)?.checked_add(symbol.st_name as usize)?;
        let name = name.to_bytes_with_nul();
        // Section 0: not defined here.
        Some(symbol.st_shndx == 0 && self.table::<u8>(text, name.len())? == name)
    }

    /// The entries of an imported function with their kind of relocation; at least one.
    fn entries(&self, name: &CStr) -> Result<Vec<(u32, &'a AtomicUsize)>, String> {
        let plt = self.relocations(tag::PLT_RELOCATIONS, tag::PLT_RELOCATIONS_SIZE);
        let others = self.relocations(tag::RELOCATIONS, tag::RELOCATIONS_SIZE);
        let is_wanted = |relocation: &&Relocation| {
            [GLOB_DAT, JUMP_SLOT].contains(&relocation.kind)
                && self.is_import(relocation.symbol as usize, name) == Some(true)
        };
        let entry = |relocation: &Relocation| {
            let place = self.base.wrapping_add(relocation.offset);
            Some((relocation.kind, self.table::<AtomicUsize>(place, size_of::<usize>())?.first()?))
        };
        let entries: Option<Vec<_>> = plt.iter().chain(others).filter(is_wanted).map(entry).collect();
        entries.filter(|entries| !entries.is_empty()).ok_or_else(|| format!("it does not import {name:?}"))
    }

    /// Stores `new` in an entry that still holds `held`. Another value is of a thread that has just bound the function.
    fn exchange(&self, entry: &AtomicUsize, held: usize, new: usize) -> std::io::Result<()> {
        let page = host_page();
        let addr = (&raw const *entry).expose_provenance();
        let start = std::ptr::with_exposed_provenance_mut::<c_void>(addr - addr % page);
        // The dynamic linker rounds so.
        let is_relro = |range: Range<usize>| {
            (range.start - range.start % page..range.end - range.end % page).contains(&addr)
        };
        let is_read_only = self.ranges(libc::PT_GNU_RELRO).any(is_relro);
        if is_read_only {
            // SAFETY: a page of the library's data, in which only more becomes possible.
            unsafe { rustix::mm::mprotect(start, page, MprotectFlags::READ | MprotectFlags::WRITE) }?;
        }
        let _ = entry.compare_exchange(held, new, Ordering::AcqRel, Ordering::Relaxed);
        if is_read_only {
            // SAFETY: the page as the dynamic linker left it; the lock keeps others like this from writing there now.
            unsafe { rustix::mm::mprotect(start, page, MprotectFlags::READ) }?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;

    use super::*;

    type Getppid = extern "C" fn() -> libc::pid_t;

    fn call(next: &AtomicUsize) -> libc::pid_t {
        let next = std::ptr::with_exposed_provenance::<c_void>(next.load(Ordering::Acquire));
        // SAFETY: `getppid`, or a function of this test of its type.
        let next: Getppid = unsafe { std::mem::transmute(next) };
        next()
    }

    /// A function in place of `getppid`, what it calls, and whether it was called.
    macro_rules! replacement {
        ($name:ident, $next:ident, $called:ident) => {
            static $next: AtomicUsize = AtomicUsize::new(0);
            static $called: AtomicBool = AtomicBool::new(false);
            extern "C" fn $name() -> libc::pid_t {
                $called.store(true, Ordering::Relaxed);
                call(&$next)
            }
        };
    }

    fn replace(inside: usize, name: &CStr, new: Getppid, next: &AtomicUsize) -> Result<(), String> {
        // SAFETY: functions of this test call what they replace.
        unsafe { replace_import(inside, name, (new as *const ()).expose_provenance(), next) }
    }

    /// As two copies of the library do it. The test program is linked with full RELRO.
    #[test]
    #[cfg_attr(
        target_arch = "aarch64",
        ignore = "the entry is a JUMP_SLOT, where a function of the test program itself is taken for an unbound entry"
    )]
    fn replacements_are_chained() {
        replacement!(first, FIRST, FIRST_CALLED);
        replacement!(second, SECOND, SECOND_CALLED);
        let inside = (replace as *const ()).expose_provenance();
        // SAFETY: always callable.
        let parent = || unsafe { libc::getppid() };
        let expected = parent();
        for _ in 0..2 {
            replace(inside, c"getppid", first, &FIRST).unwrap();
            assert_eq!(parent(), expected);
            assert!(FIRST_CALLED.swap(false, Ordering::Relaxed));
        }
        replace(inside, c"getppid", second, &SECOND).unwrap();
        assert_eq!(parent(), expected);
        assert!(FIRST_CALLED.swap(false, Ordering::Relaxed) && SECOND_CALLED.swap(false, Ordering::Relaxed));
        // The second one's entry is not taken away.
        let error = replace(inside, c"getppid", first, &FIRST).unwrap_err();
        assert!(error.contains("others have replaced"), "{error}");
        assert_eq!(parent(), expected);
        assert!(SECOND_CALLED.load(Ordering::Relaxed));
    }

    #[test]
    fn what_cannot_be_replaced_is_named() {
        replacement!(unused, UNUSED, UNUSED_CALLED);
        let inside = (replace as *const ()).expose_provenance();
        let refused = |inside, name| replace(inside, name, unused, &UNUSED).unwrap_err();
        assert!(refused(inside, c"no_such_function").contains("no_such_function"));
        assert!(refused(inside, c"acct").contains("does not import"));
        assert!(refused(0x1000, c"getppid").contains("no shared library"));
        assert!(!UNUSED_CALLED.load(Ordering::Relaxed));
    }

    #[test]
    fn a_library_is_kept() {
        // SAFETY: a name.
        let in_libc = unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"getppid".as_ptr()) }.expose_provenance();
        keep_loaded(in_libc).unwrap();
        keep_loaded((replace as *const ()).expose_provenance()).unwrap();
        assert!(!keep(c"libnothing.so"));
    }
}
