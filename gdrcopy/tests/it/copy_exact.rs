//! Copies write exactly the bytes asked for, and read nothing of another page: on ordinary memory, for every routine
//! that this CPU has.

use gdrcopy::MappingType;
use gdrcopy::copy::{Copier, Routine};
use proptest::prelude::*;

use crate::copy_guarded::Guarded;

const KINDS: [MappingType; 3] = [MappingType::WriteCombining, MappingType::Cached, MappingType::Device];

/// What the bytes around a copy hold.
const AROUND: u8 = 0xEE;

/// To the device or from it, with a copier whose other routine is not used.
#[derive(Clone, Copy, Debug)]
enum Direction {
    To(Copier),
    From(Copier),
}

impl Direction {
    /// Every routine of this CPU in every direction; the others are named as skipped.
    fn all() -> Vec<Self> {
        let mut all = Vec::new();
        for routine in Routine::ALL {
            if !routine.supported() {
                eprintln!("skipped: this CPU has no {routine}");
            }
            all.extend(Copier::new(routine, Routine::Scalar).map(Self::To));
            all.extend(Copier::new(Routine::Scalar, routine).map(Self::From));
        }
        all
    }

    /// Copies `len` bytes between `device` and `host`, which have at least `margin` writable bytes on both sides,
    /// and checks them and the margins of the destination.
    fn check(self, kind: MappingType, device: *mut u8, host: *mut u8, len: usize, margin: usize) {
        let (dst, src) = match self {
            Self::To(_) => (device, host),
            Self::From(_) => (host, device),
        };
        let expected: Vec<u8> = (0..len).map(|i| (i * 7 + i / 256 + len).to_le_bytes()[0] | 1).collect();
        let around = vec![AROUND; margin];
        // SAFETY: the range and its margins are writable, as the caller of this helper makes sure.
        unsafe { dst.wrapping_sub(margin).write_bytes(AROUND, len + 2 * margin) };
        // SAFETY: as above.
        unsafe { src.copy_from_nonoverlapping(expected.as_ptr(), len) };
        match self {
            // SAFETY: both ranges are valid and apart, and nothing else uses them.
            Self::To(copier) => unsafe { copier.to_device(kind, dst, src, len) },
            // SAFETY: as above.
            Self::From(copier) => unsafe { copier.from_device(kind, dst, src, len) },
        }
        // SAFETY: as above; it was initialised.
        let got = unsafe { std::slice::from_raw_parts(dst.wrapping_sub(margin), len + 2 * margin) };
        let place = || format!("{self:?} {kind:?}: {len} bytes, device {device:p}, host {host:p}");
        assert!(got[margin..][..len] == expected[..], "{}: wrong bytes {:?}", place(), &got[margin..][..len]);
        assert!(got[..margin] == around[..], "{}: wrote before the range {:?}", place(), &got[..margin]);
        assert!(got[margin + len..] == around[..], "{}: wrote after it {:?}", place(), &got[margin + len..]);
    }
}

#[test]
fn every_alignment_and_length() {
    const MARGIN: usize = 64;
    let (device, host) = (Guarded::new(4096), Guarded::new(4096));
    for direction in Direction::all() {
        for kind in KINDS {
            for align in 0..64 {
                for len in 0..=300 {
                    let host_align = (align * 5 + len) % 64;
                    let (device, host) = (device.at(MARGIN + align), host.at(MARGIN + host_align));
                    direction.check(kind, device, host, len, MARGIN);
                }
            }
        }
    }
}

#[test]
fn nothing_is_accessed_beyond_a_page_that_ends_or_begins_there() {
    const SIZE: usize = 4096;
    let (device, host) = (Guarded::new(SIZE), Guarded::new(SIZE));
    for direction in Direction::all() {
        for kind in KINDS {
            for len in 0..=1100 {
                direction.check(kind, device.at(0), host.at(0), len, 0);
                direction.check(kind, device.at(SIZE - len), host.at(SIZE - len), len, 0);
                direction.check(kind, device.at(SIZE - len), host.at(0), len, 0);
                direction.check(kind, device.at(0), host.at(SIZE - len), len, 0);
            }
        }
    }
}

#[test]
fn large_copies() {
    const MARGIN: usize = 64;
    const LARGE: usize = (2 << 20) + 3;
    let (device, host) = (Guarded::new(LARGE + 4 * MARGIN), Guarded::new(LARGE + 4 * MARGIN));
    for direction in Direction::all() {
        for (align, host_align, len) in [(0, 0, 1 << 20), (1, 63, LARGE), (48, 16, LARGE), (63, 0, 65_536)] {
            for kind in KINDS {
                direction.check(kind, device.at(MARGIN + align), host.at(MARGIN + host_align), len, MARGIN);
            }
        }
    }
}

proptest! {
    #[test]
    fn any_place_and_size(at in 0usize..4096, host_at in 0usize..4096, len in 0usize..20_000) {
        const MARGIN: usize = 64;
        let (device, host) = (Guarded::new(24_576), Guarded::new(24_576));
        for direction in Direction::all() {
            for kind in KINDS {
                direction.check(kind, device.at(MARGIN + at), host.at(MARGIN + host_at), len, MARGIN);
            }
        }
    }
}
