//! Random requests for a bounded time (`GDRCOPY_KMOD_FUZZ`, seconds; 5). The seed is printed, and taken from
//! `GDRCOPY_KMOD_SEED`.

use std::os::fd::{AsRawFd, OwnedFd};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use super::rig::{Machine, Map, Memory, Raw};
use gdsync_testkit::kmod::{Backing, CHUNK, Object};

/// xorshift64*.
struct Numbers(u64);

impl Numbers {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D)
    }

    fn below(&mut self, end: usize) -> usize {
        usize::try_from(self.next() >> 33).expect("31 bits") % end
    }
}

/// What one thread plays with.
struct Toys {
    files: Vec<Raw>,
    memories: Vec<Memory>,
    buffers: Vec<OwnedFd>,
    maps: Vec<Map>,
    handles: Vec<u64>,
}

const CODES: [u32; 12] = [
    0xC028_DA01,
    0xC008_DA02,
    0xC008_DA03,
    0xC008_DA04,
    0xC008_DA05,
    0xC008_DA06,
    0xC020_DA07,
    0xC008_DA08,
    0xC020_DAC0,
    0xC008_DAFF,
    0xC008_DA09,
    0xC028_DA07,
];

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
        let mut code = CODES[numbers.below(CODES.len())];
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
        let mut pipe = [0; 2];
        // SAFETY: room for two descriptors.
        if unsafe { libc::pipe(pipe.as_mut_ptr()) } == 0 {
            // SAFETY: the kernel checks the address of the mapping.
            unsafe { libc::writev(pipe[1], &raw const remote, 1) };
            // SAFETY: this function's own descriptor, once.
            unsafe { libc::close(pipe[0]) };
            // SAFETY: as above.
            unsafe { libc::close(pipe[1]) };
        }
        let this = i32::try_from(std::process::id()).expect("a PID");
        // SAFETY: as above; device pages are refused.
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
