//! What becomes of addresses whose memory is taken away.

use std::ptr::NonNull;

use gdrcopy::{BackendKind, PinFlags, host_page};

use crate::rig::{Backend, End, Rig, address, each, in_child, peek, poke};

const NONE: PinFlags = PinFlags::empty();
const SIZE: usize = 200_000;

/// Whether something is mapped in each page of the range.
fn is_taken(ptr: NonNull<u8>, len: usize) -> bool {
    let mut resident = vec![0; len.div_ceil(host_page())];
    // SAFETY: a byte for each page; the range itself is only asked about.
    unsafe { libc::mincore(ptr.as_ptr().cast(), len, resident.as_mut_ptr()) == 0 }
}

#[test]
fn the_addresses_stay_taken_and_the_memory_is_given_back() {
    each(|rig, backend| {
        let memory = backend.allocate(0, SIZE).unwrap();
        let pin = backend.pin(memory.addr(), SIZE, NONE).unwrap();
        let range = pin.map(SIZE, None).unwrap();
        let (ptr, len) = (address(&range), range.len());
        poke(&range, 5, b"kept");
        range.revoke().unwrap();
        assert!(is_taken(ptr, len), "{}", backend.kind());
        // SAFETY: what is there belongs to nobody; that the access ends the child is what is expected.
        let touch = || unsafe { ptr.as_ptr().read_volatile() == 0 };
        assert_eq!(in_child(touch), End::Killed(libc::SIGSEGV), "no hole in a child of {}", backend.kind());

        // Only the mapping is gone.
        let range = pin.map(SIZE, None).unwrap();
        assert_ne!(address(&range), ptr);
        assert_eq!(peek(&range, 5, 4), b"kept");
        drop(range);
        pin.unpin().unwrap();
        assert_eq!(rig.device.live_pins(), 0);
        assert!(is_taken(ptr, len), "{}", backend.kind());
    });
}

#[test]
fn a_child_revokes_nothing_of_its_parents() {
    each(|_, backend| {
        let memory = backend.allocate(0, SIZE).unwrap();
        let pin = backend.pin(memory.addr(), SIZE, NONE).unwrap();
        let range = std::cell::Cell::new(Some(pin.map(SIZE, None).unwrap()));
        let end = in_child(|| {
            let Some(range) = range.take() else { return false };
            let (ptr, len) = (address(&range), range.len());
            range.revoke().is_ok() && !is_taken(ptr, len)
        });
        assert_eq!(end, End::Said(true), "{}", backend.kind());
        assert_eq!(peek(&range.take().unwrap(), 0, 1), [0]);
    });
}

#[test]
fn addresses_that_cannot_be_kept_are_unmapped() {
    let end = in_child(|| {
        // An earlier revocation may have opened the file that this one wants. The parent keeps its own.
        // SAFETY: numbers; the child drops nothing that the parent opened.
        unsafe { libc::close_range(3, u32::MAX, 0) };
        let rig = Rig::new(Default::default());
        let Ok(host) = Backend::open(&rig.without_cuda(), BackendKind::Host) else { return false };
        let Ok(memory) = host.allocate(0, SIZE) else { return false };
        let Ok(pin) = host.pin(memory.addr(), SIZE, NONE) else { return false };
        let Ok(range) = pin.map(SIZE, None) else { return false };
        let (ptr, len) = (address(&range), range.len());
        let no_files = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
        // SAFETY: a valid structure.
        unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const no_files) };
        is_taken(ptr, len) && range.revoke().is_ok() && !is_taken(ptr, len)
    });
    assert_eq!(end, End::Said(true));
}
