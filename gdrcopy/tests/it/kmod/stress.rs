//! Threads, random requests, and every allocation failing once.

use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

use gdsync_testkit::kmod::{self, Backing, CHUNK, Object, counter};

use super::pins::REQUESTS;
use super::{Machine, Map, Memory, Raw, is_persistent};
use crate::gdrdrv_abi::{self as abi, GetInfo, PinDmaBuf};
use crate::rig::Numbers;

const THREADS: usize = 8;

/// How many rounds in all: fewer on a slow kernel.
fn rounds() -> u64 {
    std::env::var("GDRCOPY_KMOD_ROUNDS").map_or(2_000, |text| text.parse().expect("GDRCOPY_KMOD_ROUNDS"))
}

/// Pins, maps, looks, unmaps and unpins in every order; now and then the memory goes first, or the descriptor.
#[test]
fn pins_maps_unmaps_frees() {
    let Some(_machine) = Machine::new() else { return };
    let (left, shared) = (AtomicU64::new(rounds()), Memory::new(4 * CHUNK));
    let common = Raw::open();
    let persistent = is_persistent();
    thread::scope(|scope| {
        for thread in 0..THREADS {
            let (left, shared, common) = (&left, &shared, &common);
            scope.spawn(move || {
                let mut own = Raw::open();
                let mut memory = Memory::new(2 * CHUNK);
                while let Ok(round) =
                    left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1))
                {
                    let byte = u8::try_from(round % 251).unwrap();
                    // A pin of everybody's memory in everybody's file.
                    let handle = common.pin(shared.va, 4 * CHUNK).unwrap();
                    let map = common.map(handle, CHUNK * (1 + round % 4)).unwrap();
                    map.store(thread * 8, byte);
                    assert_eq!(map.load(thread * 8), byte);
                    if round % 3 == 0 {
                        common.unpin(handle).unwrap();
                        map.unmap().unwrap();
                    } else {
                        map.unmap().unwrap();
                        common.unpin(handle).unwrap();
                    }
                    // And one's own.
                    let handle = own.pin(memory.va + CHUNK, 1).unwrap();
                    let map = own.map(handle, 1).unwrap();
                    map.store(0, byte);
                    assert_eq!(memory.read(CHUNK, 1), [byte]);
                    if round % 16 == 0 {
                        memory.free();
                        assert_eq!(own.flag(handle), Ok(u32::from(!persistent)));
                        if persistent {
                            assert_eq!(map.load(0), byte);
                        }
                        memory = Memory::new(2 * CHUNK);
                    }
                    drop(map);
                    if round % 7 == 0 {
                        own = Raw::open();
                    } else {
                        own.unpin(handle).unwrap();
                    }
                }
            });
        }
    });
    assert_eq!(counter("pins"), 0);
}

/// What one thread plays with.
struct Toys {
    files: Vec<Raw>,
    memories: Vec<Memory>,
    buffers: Vec<OwnedFd>,
    maps: Vec<Map>,
    handles: Vec<u64>,
}

impl Toys {
    fn new() -> Self {
        let object = Object::new(4 * CHUNK, Backing::Ram).expect("memory");
        Self {
            files: (0..3).map(|_| Raw::open()).collect(),
            memories: (1..4).map(|chunks| Memory::new(chunks * CHUNK)).collect(),
            buffers: (0..2).map(|at| object.export(at * CHUNK, CHUNK, false).expect("a dma-buf")).collect(),
            maps: Vec::new(),
            handles: vec![0],
        }
    }

    /// A number that may mean something.
    fn word(&self, numbers: &mut Numbers) -> u64 {
        match numbers.below(12) {
            0 => 0,
            1 => numbers.next(),
            2 => numbers.next() >> numbers.below(64),
            3 => u64::MAX << numbers.below(64),
            4 => CHUNK * numbers.below(5) as u64,
            5 => 4096 * numbers.below(40) as u64,
            6 | 7 => self.handles[numbers.below(self.handles.len())],
            8 => self.buffers[numbers.below(self.buffers.len())].as_raw_fd().unsigned_abs().into(),
            _ => {
                let memory = &self.memories[numbers.below(self.memories.len())];
                memory.va + [0, 0, 0, CHUNK, 1][numbers.below(5)]
            }
        }
    }

    fn request(&mut self, numbers: &mut Numbers) {
        // Those that there are, one that is not, and one of another size.
        let others = [0xC008_DA09, 0xC028_DA07];
        let codes = [&REQUESTS[..], &others].concat();
        let mut code = codes[numbers.below(codes.len())];
        if numbers.below(50) == 0 {
            code ^= 1 << numbers.below(32);
        }
        let mut words: [u64; 8] = std::array::from_fn(|_| self.word(numbers));
        // Bits of flags are mostly not set.
        if numbers.below(2) == 0 {
            (words[2], words[3]) = (0, if code & 0xff == 0xC0 { words[3] } else { 0 });
        }
        let file = &self.files[numbers.below(self.files.len())];
        if file.ioctl(code, words.as_mut_ptr().cast()).is_ok() {
            let handle = match code & 0xff {
                1 => words[4],
                7 | 0xC0 => words[3],
                _ => return,
            };
            self.handles.push(handle);
            if self.handles.len() > 60 {
                self.handles.swap_remove(numbers.below(60));
            }
        }
    }

    fn map(&mut self, numbers: &mut Numbers) {
        let handle = self.word(numbers) & ((1 << 50) - 1);
        let len = (self.word(numbers) & ((1 << 30) - 1)).max(1);
        let prot = i32::try_from(numbers.below(8)).expect("small");
        let flags = [libc::MAP_SHARED, libc::MAP_PRIVATE][usize::from(numbers.below(8) == 0)];
        let file = &self.files[numbers.below(self.files.len())];
        if let Ok(map) = file.map_as(handle, len, prot, flags) {
            self.maps.push(map);
        }
        if self.maps.len() > 8 {
            drop(self.maps.swap_remove(numbers.below(8)));
        }
    }

    /// Reads through the kernel, for which a page that is gone is an error and no signal.
    fn touch(&self, numbers: &mut Numbers) {
        let Some(map) = self.maps.get(numbers.below(8)) else { return };
        let mut byte = 0_u8;
        let local = libc::iovec { iov_base: (&raw mut byte).cast(), iov_len: 1 };
        let remote = libc::iovec { iov_base: map.at(numbers.below(map.len)).cast(), iov_len: 1 };
        if let Ok((_reader, writer)) = std::io::pipe() {
            // SAFETY: the kernel checks the address of the mapping.
            unsafe { libc::writev(writer.as_raw_fd(), &raw const remote, 1) };
        }
        let this = i32::try_from(std::process::id()).expect("a PID");
        // SAFETY: the kernel checks the address of the mapping, and refuses device pages.
        unsafe { libc::process_vm_readv(this, &raw const local, 1, &raw const remote, 1, 0) };
    }

    fn spoil(&mut self, numbers: &mut Numbers) {
        let Some(map) = self.maps.get(numbers.below(8)) else { return };
        let (at, len) = (numbers.below(map.len) & !4095, numbers.below(map.len) + 1);
        match numbers.below(3) {
            // A whole mapping would be gone behind its owner's back.
            0 if at > 0 => drop(map.unmap_part(at, len.min(map.len - at))),
            1 => drop(map.protect(at, len.min(map.len - at), libc::PROT_READ)),
            _ => {
                // SAFETY: no place is given up; nothing moves.
                unsafe {
                    libc::mremap(map.ptr.as_ptr().cast(), map.len, map.len + 4096, libc::MREMAP_MAYMOVE)
                };
            }
        }
    }

    fn step(&mut self, numbers: &mut Numbers) {
        match numbers.below(100) {
            0 => {
                let at = numbers.below(self.files.len());
                self.files[at] = Raw::open();
            }
            1 => {
                let at = numbers.below(self.memories.len());
                self.memories[at] = Memory::new((1 + numbers.below(4) as u64) * CHUNK);
            }
            2 => self.maps.clear(),
            3..=25 => self.map(numbers),
            26..=45 => self.touch(numbers),
            46..=50 => self.spoil(numbers),
            _ => self.request(numbers),
        }
    }
}

#[test]
fn random_requests() {
    let Some(_machine) = Machine::new() else { return };
    let number = |name: &str| std::env::var(name).ok().map(|text| text.parse::<u64>().expect("a number"));
    let now = SystemTime::now().duration_since(UNIX_EPOCH).expect("a clock");
    let seed =
        number("GDRCOPY_KMOD_SEED").unwrap_or(u64::from(now.subsec_nanos()) << 20 | now.as_secs() & 0xfffff);
    println!("GDRCOPY_KMOD_SEED={seed}");
    let end = Instant::now() + Duration::from_secs(number("GDRCOPY_KMOD_FUZZ").unwrap_or(5));
    std::thread::scope(|scope| {
        for thread in 1..4 {
            scope.spawn(move || {
                let mut numbers = Numbers(seed.wrapping_mul(thread) | 1);
                let (mut toys, mut steps) = (Toys::new(), 0_u64);
                while Instant::now() < end {
                    (0..50).for_each(|_| toys.step(&mut numbers));
                    steps += 50;
                }
                println!("{steps} steps");
            });
        }
    });
}

const NTH_SIZE: u64 = 40 * CHUNK;
/// More places than any request has.
const MOST: usize = 500;

/// The file of the calling thread, where the kernel has it.
fn fail_nth() -> Option<File> {
    let file = File::options().read(true).write(true).open("/proc/thread-self/fail-nth");
    if file.is_err() {
        println!("skipped: no fault injection in this kernel (VMKERNEL=debug tests/vm/run kmod_debug)");
    }
    file.ok()
}

/// From now on the calling thread's place of this number fails; 0 for none. To write that is a place too.
fn arm(nth: &File, place: usize) {
    let text = place.to_string();
    (0..MOST).find(|_| nth.write_all_at(text.as_bytes(), 0).is_ok()).expect("fault injection");
}

/// Lets each place of a request fail, one after the other, each time with a file of its own.
fn each_place(name: &str, mut request: impl FnMut(&Raw, &mut Vec<Map>) -> Result<(), i32>) {
    let Some(nth) = fail_nth() else { return };
    let before = kmod::state().unwrap();
    for place in 1..MOST {
        let raw = Raw::open();
        let mut maps = Vec::with_capacity(2);
        arm(&nth, place);
        let result = request(&raw, &mut maps);
        let mut left = [0; 16];
        // The reading itself has places; then the request has had its own.
        let over = nth.read_at(&mut left, 0).map_or(true, |_| left[0] != b'0');
        arm(&nth, 0);
        let failed = matches!(result, Err(libc::ENOMEM | libc::EFAULT));
        assert!(result.is_ok() || failed, "{name}, place {place}: {result:?}");
        drop((maps, raw));
        assert_eq!(counter("pins"), 0, "{name}, place {place}");
        assert_eq!(kmod::state().unwrap(), before, "{name}, place {place}");
        if over {
            assert!(result.is_ok(), "{name}, place {place}: {result:?}");
            println!("{name}: {} places", place - 1);
            assert!(place > 1, "{name}: nothing can fail");
            return;
        }
    }
    panic!("{name}: more than {MOST} places");
}

#[test]
fn no_failure_inside_a_request_leaves_anything() {
    let Some(_machine) = Machine::new() else { return };
    let memory = Memory::new(NTH_SIZE);
    let fd = memory.object.export(0, NTH_SIZE, false).unwrap();
    let dma_bufs = Raw::open().attribute(abi::ATTR_EXTENSIONS) == Ok(abi::EXTENSION_DMABUF);
    let dma_buf = PinDmaBuf { fd: fd.as_raw_fd(), size: NTH_SIZE, ..Default::default() };
    each_place("open", |_, _| {
        // Of a terminated path, so that nothing is allocated.
        let opened = rustix::fs::open(c"/dev/gdrdrv", OFlags::RDWR, Mode::empty());
        opened.map(drop).map_err(Errno::raw_os_error)
    });
    each_place("pin", |raw, _| raw.pin(memory.va, NTH_SIZE).map(drop));
    each_place("pin and unpin", |raw, _| {
        raw.pin_v1(memory.va, NTH_SIZE).and_then(|handle| raw.unpin(handle))
    });
    each_place("info", |raw, _| {
        let handle = raw.pin(memory.va, NTH_SIZE)?;
        raw.call(&mut GetInfo { handle, ..Default::default() })
    });
    each_place("map", |raw, maps| {
        let handle = raw.pin(memory.va, NTH_SIZE)?;
        maps.push(raw.map(handle, NTH_SIZE)?);
        Ok(())
    });
    if dma_bufs {
        each_place("pin of a dma-buf", |raw, _| raw.call(&mut dma_buf.clone()));
        each_place("map of a dma-buf", |raw, maps| {
            let mut pin = dma_buf;
            raw.call(&mut pin)?;
            maps.push(raw.map(pin.handle, NTH_SIZE)?);
            Ok(())
        });
    }
}

/// Pages of a dma-buf that moved cannot be had: the access waits for no page and gets none, which the kernel's own copy
/// tells without a signal.
#[test]
fn no_failure_in_a_fault_harms() {
    let Some(_machine) = Machine::new() else { return };
    let Some(nth) = fail_nth() else { return };
    let raw = Raw::open();
    let memory = Memory::new(CHUNK);
    let fd = memory.object.export(0, CHUNK, false).unwrap();
    let mut pin = PinDmaBuf { fd: fd.as_raw_fd(), size: CHUNK, ..Default::default() };
    if raw.call(&mut pin).is_err() {
        println!("skipped: no pins of dma-bufs here");
        return;
    }
    let map = raw.map(pin.handle, CHUNK).unwrap();
    let sink = File::options().write(true).open("/dev/shm/nth");
    let sink = sink.or_else(|_| File::create("/dev/shm/nth")).unwrap();
    let mut failed = 0;
    for place in 1..30 {
        memory.object.move_to(Backing::Ram).unwrap();
        arm(&nth, place);
        // SAFETY: the kernel reads the byte, or says that it cannot.
        let written = unsafe { libc::pwrite(sink.as_raw_fd(), map.at(0).cast(), 1, 0) };
        arm(&nth, 0);
        failed += u32::from(written != 1);
        // Afterwards all is well.
        assert_eq!(map.load(0), 0);
    }
    println!("{failed} of 29 accesses failed");
}
