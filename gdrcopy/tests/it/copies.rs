//! The copy routines of this CPU: exact ranges, whole words, and fences.

use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::thread;
use std::time::{Duration, Instant};

use gdrcopy::copy::{Copier, Routine, full_fence, load_fence, store_fence};
use gdrcopy::{MappingType, host_page};
use gdsync_testkit::tier;
use rustix::mm::{MapFlags, MprotectFlags, ProtFlags, mmap_anonymous, mprotect, munmap};

/// A mapping that starts and ends on a page boundary, where inaccessible pages follow.
pub(crate) struct Guarded {
    pages: *mut u8,
    page: usize,
    len: usize,
}

impl Guarded {
    /// `len` bytes, rounded up to pages.
    pub(crate) fn new(len: usize) -> Self {
        let page = host_page();
        let len = len.next_multiple_of(page);
        let (none, flags) = (ProtFlags::empty(), MapFlags::PRIVATE);
        // SAFETY: a new mapping at an address of the kernel's choice.
        let pages = unsafe { mmap_anonymous(ptr::null_mut(), len + 2 * page, none, flags) }.unwrap();
        let pages = pages.cast::<u8>();
        let inner = pages.wrapping_add(page).cast();
        // SAFETY: the pages are those mapped above.
        unsafe { mprotect(inner, len, MprotectFlags::READ | MprotectFlags::WRITE) }.unwrap();
        Self { pages, page, len }
    }

    /// The byte at `offset`; the end is a place, too.
    pub(crate) fn at(&self, offset: usize) -> *mut u8 {
        assert!(offset <= self.len);
        self.pages.wrapping_add(self.page + offset)
    }
}

impl Drop for Guarded {
    fn drop(&mut self) {
        // SAFETY: the mapping is this object's own, and nobody uses it any more.
        unsafe { munmap(self.pages.cast(), self.len + 2 * self.page) }.unwrap();
    }
}

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
        // SAFETY: the source has `len` writable bytes, as the caller of this helper makes sure.
        unsafe { src.copy_from_nonoverlapping(expected.as_ptr(), len) };
        match self {
            // SAFETY: both ranges are valid and apart, and nothing else uses them.
            Self::To(copier) => unsafe { copier.to_device(kind, dst, src, len) },
            // SAFETY: both ranges are valid and apart, and nothing else uses them.
            Self::From(copier) => unsafe { copier.from_device(kind, dst, src, len) },
        }
        // SAFETY: the range and its margins were initialised above.
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

/// Rounds of a fence test.
fn fence_rounds() -> u64 {
    tier(500, 5_000, 50_000)
}

/// Not whole lines of 64 bytes: the last one stays in the core until something makes it leave.
const DATA_WORDS: usize = 46;
const DEADLINE: Duration = Duration::from_secs(60);

/// A line of its own.
#[repr(align(64))]
struct Line<T>(T);

/// What the two threads share: the "device".
struct Shared {
    data: Line<[AtomicU64; DATA_WORDS]>,
    flag: Line<AtomicU64>,
    seen: Line<AtomicU64>,
}

/// Waits until `word` holds `value`; false if it did not in time.
fn wait(word: &AtomicU64, value: u64) -> bool {
    // The gap between data and flag is short: look often before letting others run.
    let seen = || (0..1000).any(|_| word.load(Ordering::Relaxed) == value);
    let start = Instant::now();
    while !seen() {
        if start.elapsed() > DEADLINE {
            return false;
        }
        thread::yield_now();
    }
    true
}

fn pass_messages(copier: Copier, kind: MappingType, fences: [fn(MappingType); 2]) {
    let shared = Shared {
        data: Line([const { AtomicU64::new(0) }; DATA_WORDS]),
        flag: Line(AtomicU64::new(0)),
        seen: Line(AtomicU64::new(0)),
    };
    let len = size_of_val(&shared.data.0);
    thread::scope(|scope| {
        let reader = scope.spawn(|| {
            let mut wrong = None;
            for round in 1..=fence_rounds() {
                assert!(wait(&shared.flag.0, round), "round {round} was never announced");
                fences[1](kind);
                let mut got = [0u64; DATA_WORDS];
                let src = shared.data.0.as_ptr().cast::<u8>();
                // SAFETY: the writer leaves the data alone until it is told that they were seen.
                unsafe { copier.from_device(kind, got.as_mut_ptr().cast(), src, len) };
                wrong = wrong.or(Some((round, got)).filter(|_| got != [round; DATA_WORDS]));
                shared.seen.0.store(round, Ordering::Release);
            }
            wrong
        });
        for round in 1..=fence_rounds() {
            let data = [round; DATA_WORDS];
            let dst = shared.data.0.as_ptr().cast_mut().cast::<u8>();
            // SAFETY: the words are atomics, so that they may be written, and the reader waits for the flag.
            unsafe { copier.to_device(kind, dst, data.as_ptr().cast(), len) };
            fences[0](kind);
            let flag = shared.flag.0.as_ptr().cast::<u8>();
            // SAFETY: the word is an atomic that its reader reads whole.
            unsafe { copier.to_device(kind, flag, (&raw const round).cast(), size_of::<u64>()) };
            if !wait(&shared.seen.0, round) {
                break;
            }
            fence(Ordering::Acquire);
        }
        let wrong = reader.join().expect("every round was announced");
        assert_eq!(wrong, None, "{copier:?} {kind:?}: data of another round than announced");
    });
}

fn all(kinds: &[MappingType], fences: [fn(MappingType); 2]) {
    for direction in Direction::all() {
        let (Direction::To(copier) | Direction::From(copier)) = direction;
        for &kind in kinds {
            pass_messages(copier, kind, fences);
        }
    }
}

#[test]
fn a_store_fence_and_a_load_fence_pass_a_message() {
    all(&KINDS, [store_fence, load_fence]);
}

#[test]
fn full_fences_pass_a_message() {
    all(&KINDS[..1], [|_| full_fence(); 2]);
}

/// Words that are stored or loaded beside another thread.
fn rounds() -> u64 {
    tier(20_000, 200_000, 2_000_000)
}

/// Size of a word and its offset in the 8 bytes that the threads share.
const WORDS: [(usize, usize); 5] = [(8, 0), (4, 0), (4, 4), (2, 2), (2, 6)];

/// The bytes of `word` in the shared 8 bytes, in the lowest ones.
fn part(shared: u64, (size, offset): (usize, usize)) -> u64 {
    let bytes = &shared.to_ne_bytes()[offset..][..size];
    bytes.iter().rev().fold(0, |value, &byte| value << 8 | u64::from(byte))
}

/// Runs `act` again and again in another thread while `test` runs.
fn beside(act: impl Fn(u64) + Send, test: impl FnOnce()) {
    thread::scope(|scope| {
        // Dropped at the end of the test, also by a panic.
        let running = Arc::new(());
        let seen = Arc::downgrade(&running);
        let other = scope.spawn(move || (0..).take_while(|_| seen.strong_count() > 0).for_each(act));
        test();
        drop(running);
        other.join().expect("the other thread saw whole words");
    });
}

#[test]
fn words_are_stored_and_loaded_whole() {
    for direction in Direction::all() {
        for (kind, word) in KINDS.into_iter().flat_map(|kind| WORDS.map(|word| (kind, word))) {
            let shared = AtomicU64::new(0);
            let whole = |seen| [0, part(u64::MAX, word)].contains(&seen);
            let place = shared.as_ptr().cast::<u8>().wrapping_add(word.1);
            let torn = |seen: u64| format!("{direction:?} {kind:?} {word:?}: torn {seen:#x}");
            let value = |round: u64| if round.is_multiple_of(2) { 0 } else { u64::MAX };
            match direction {
                Direction::To(copier) => {
                    let look = |_| {
                        let seen = part(shared.load(Ordering::Relaxed), word);
                        assert!(whole(seen), "{}", torn(seen));
                    };
                    beside(look, || {
                        for round in 0..rounds() {
                            let bytes = value(round).to_ne_bytes();
                            // SAFETY: the word lies in the shared ones, whose other user reads it whole.
                            unsafe { copier.to_device(kind, place, bytes.as_ptr(), word.0) };
                        }
                    });
                }
                Direction::From(copier) => beside(
                    |round| shared.store(value(round), Ordering::Relaxed),
                    || {
                        for _ in 0..rounds() {
                            let mut bytes = [0; 8];
                            let dst = bytes.as_mut_ptr().wrapping_add(word.1);
                            // SAFETY: the word lies in the shared ones, whose other user writes it whole.
                            unsafe { copier.from_device(kind, dst, place, word.0) };
                            let seen = part(u64::from_ne_bytes(bytes), word);
                            assert!(whole(seen), "{}", torn(seen));
                        }
                    },
                ),
            }
        }
    }
}
