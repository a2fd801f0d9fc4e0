//! Proves that a mapping shows the memory that CUDA shows. A driver that maps the wrong pages reports no error, so the proof
//! compares data.

use std::hash::{BuildHasher, RandomState};

use crate::copy::{self, Copier};
use crate::cpu_range::CpuRange;
use crate::cuda::Cuda;
use crate::error::{Error, Result, check_bounds};

/// Bytes compared at each place: one cache line.
pub(crate) const PROBE: usize = 64;
/// How often a mismatch is compared again. If CUDA shows no change in that time, the mapping is wrong; otherwise the comparison is
/// inconclusive.
const ATTEMPTS: u32 = 32;

const WRONG: &str = "this driver maps other memory than asked for; use another backend and report the driver";

/// A mapping, and the same memory as CUDA shows it.
pub(crate) struct Views<'a> {
    pub(crate) cuda: &'a dyn Cuda,
    pub(crate) device: i32,
    /// The GPU address of the range's first byte.
    pub(crate) addr: u64,
    pub(crate) range: &'a CpuRange,
}

impl Views<'_> {
    /// Writes random bytes in both directions at each of `offsets` and reads them from the other side. Overwrites [`PROBE`] bytes at
    /// each, so it is for scratch memory.
    pub(crate) fn nonce(&self, offsets: &[usize]) -> Result<()> {
        // All places are written before any is read, to find two offsets that show the same memory.
        let written: Vec<_> = offsets.iter().map(|_| random()).collect();
        for (&offset, bytes) in offsets.iter().zip(&written) {
            let dst = self.addr + offset as u64;
            // SAFETY: `bytes` has `PROBE` bytes; the driver checks the GPU side.
            unsafe { self.cuda.copy_to_device(self.device, dst, bytes.as_ptr(), PROBE) }?;
        }
        for (&offset, bytes) in offsets.iter().zip(&written) {
            let mut seen = [0; PROBE];
            load(self.range, offset, &mut seen)?;
            self.expect(offset, "the CPU does not see what CUDA wrote", &seen, bytes)?;
        }

        let written: Vec<_> = offsets.iter().map(|_| random()).collect();
        for (&offset, bytes) in offsets.iter().zip(&written) {
            store(self.range, offset, bytes)?;
        }
        for (&offset, bytes) in offsets.iter().zip(&written) {
            let mut seen = [0; PROBE];
            // The read pushes the writes ahead of itself through PCIe.
            load(self.range, offset, &mut seen)?;
            self.read_by_cuda(offset, &mut seen)?;
            self.expect(offset, "CUDA does not see what the CPU wrote", &seen, bytes)?;
        }
        Ok(())
    }

    /// Compares the first and the last [`PROBE`] of `len` bytes at `offset` of the range with what CUDA shows there. Never writes, so
    /// it is for the user's memory; it cannot detect other memory with equal bytes.
    pub(crate) fn compare(&self, offset: usize, len: usize) -> Result<()> {
        let probe = len.min(PROBE);
        let ends = [offset, offset + len - probe];
        // Mostly both are equal at once.
        let (mut seen, mut shown) = ([[0; PROBE]; 2], [[0; PROBE]; 2]);
        let src = ends.map(|offset| self.addr + offset as u64);
        // SAFETY: `shown` has room for two pieces of at most `PROBE` bytes; the driver checks the GPU side.
        unsafe { self.cuda.gather_from_device(self.device, shown.as_mut_ptr().cast(), &src, probe) }?;
        let shown = shown.as_flattened();
        for (&offset, seen) in ends.iter().zip(&mut seen) {
            load(self.range, offset, &mut seen[..probe])?;
        }
        if seen[0][..probe] == shown[..probe] && seen[1][..probe] == shown[probe..2 * probe] {
            return Ok(());
        }
        ends.iter().try_for_each(|&offset| self.compare_at(offset, probe))
    }

    fn compare_at(&self, offset: usize, len: usize) -> Result<()> {
        let (mut first, mut seen, mut now) = ([0; PROBE], [0; PROBE], [0; PROBE]);
        let (first, seen, now) = (&mut first[..len], &mut seen[..len], &mut now[..len]);
        self.read_by_cuda(offset, first)?;
        now.copy_from_slice(first);
        let mut changes = false;
        for _ in 0..ATTEMPTS {
            load(self.range, offset, seen)?;
            if seen == now {
                return Ok(());
            }
            self.read_by_cuda(offset, now)?;
            if seen == now {
                return Ok(());
            }
            changes |= now != first;
        }
        if !changes {
            return self.expect(offset, "the CPU does not see what CUDA shows", seen, now);
        }
        Err(Error::ProofFailed {
            addr: self.addr + offset as u64,
            found: format!("it changed during {ATTEMPTS} comparisons with CUDA's view"),
            fix: "map the memory before the GPU or a network card writes to it",
        })
    }

    fn read_by_cuda(&self, offset: usize, out: &mut [u8]) -> Result<()> {
        let src = self.addr + offset as u64;
        // SAFETY: `out` has `out.len()` bytes; the driver checks the GPU side.
        unsafe { self.cuda.copy_from_device(self.device, out.as_mut_ptr(), src, out.len()) }
    }

    fn expect(&self, offset: usize, what: &str, seen: &[u8], wanted: &[u8]) -> Result<()> {
        match seen.iter().zip(wanted).position(|(seen, wanted)| seen != wanted) {
            None => Ok(()),
            Some(at) => Err(Error::ProofFailed {
                addr: self.addr + (offset + at) as u64,
                found: format!("{what}: {:#04x} instead of {:#04x}", seen[at], wanted[at]),
                fix: WRONG,
            }),
        }
    }
}

fn random() -> [u8; PROBE] {
    let source = RandomState::new();
    let mut bytes = [0; PROBE];
    for (index, word) in bytes.chunks_exact_mut(8).enumerate() {
        word.copy_from_slice(&source.hash_one(index).to_ne_bytes());
    }
    bytes
}

/// Reads through the mapping.
pub(super) fn load(range: &CpuRange, offset: usize, out: &mut [u8]) -> Result<()> {
    check_bounds(offset, out.len(), range.len())?;
    copy::load_fence(range.kind());
    // SAFETY: inside the mapping, checked above.
    let src = unsafe { range.ptr().as_ptr().add(offset) };
    // SAFETY: `out.len()` bytes from `src` lie in a mapping of this kind, checked above. It consists of pages, so the blocks at the
    // ends are readable. `out` is of the host, so it does not overlap.
    unsafe { Copier::best().from_device(range.kind(), out.as_mut_ptr(), src, out.len()) };
    Ok(())
}

/// Writes through the mapping.
pub(super) fn store(range: &CpuRange, offset: usize, data: &[u8]) -> Result<()> {
    check_bounds(offset, data.len(), range.len())?;
    // SAFETY: inside the mapping, checked above.
    let dst = unsafe { range.ptr().as_ptr().add(offset) };
    // SAFETY: `data.len()` bytes from `dst` lie in a mapping of this kind, checked above. `data` is of the host, so it does not overlap.
    unsafe { Copier::best().to_device(range.kind(), dst, data.as_ptr(), data.len()) };
    copy::full_fence();
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::fd::{AsFd, OwnedFd};
    use std::os::unix::fs::FileExt;

    use rustix::mm::{MapFlags, ProtFlags, mmap};

    use super::*;
    use crate::cpu_range::memory_file;
    use crate::cuda::{AllocKind, GpuInfo, Objects, PointerInfo};
    use crate::system::{Kernel, Linux};
    use crate::types::MappingType;

    const SIZE: usize = 65_536;
    /// The GPU address of the first byte of [`Copies`].
    const ADDR: u64 = 0x7f00_0000_0000;

    macro_rules! not_called {
        ($($name:ident($($ty:ty),*) -> $ret:ty;)*) => {$(
            fn $name(&self, $(_: $ty),*) -> Result<$ret> {
                unreachable!("proofs only copy")
            }
        )*};
    }

    /// A CUDA that copies to and from a file, and does nothing else.
    #[derive(Debug)]
    struct Copies(File);

    impl Cuda for Copies {
        unsafe fn copy_to_device(&self, _: i32, dst: u64, src: *const u8, len: usize) -> Result<()> {
            // SAFETY: the caller guarantees that `src` is readable for `len` bytes.
            let bytes = unsafe { std::slice::from_raw_parts(src, len) };
            self.0.write_all_at(bytes, dst - ADDR).map_err(|e| Error::sys("pwrite", e, ""))
        }

        unsafe fn gather_from_device(&self, _: i32, dst: *mut u8, src: &[u64], len: usize) -> Result<()> {
            // SAFETY: the caller guarantees the ranges; the proofs pass initialised arrays.
            let bytes = unsafe { std::slice::from_raw_parts_mut(dst, len * src.len()) };
            let mut pieces = bytes.chunks_exact_mut(len).zip(src);
            pieces
                .try_for_each(|(bytes, src)| self.0.read_exact_at(bytes, src - ADDR))
                .map_err(|e| Error::sys("pread", e, ""))
        }

        unsafe fn free(&self, _: u64) -> Result<()> {
            unreachable!("proofs only copy")
        }

        not_called! {
            driver_version() -> u32;
            devices() -> Vec<GpuInfo>;
            device_attribute(i32, u32) -> i32;
            pointer(u64) -> PointerInfo;
            buffer_id(u64) -> u64;
            dma_buf(u64, u64, usize, bool) -> OwnedFd;
            objects(u64, u64, usize) -> Objects;
            alloc(i32, usize, AllocKind) -> u64;
            flush(i32, u64) -> ();
        }
    }

    fn views<'a>(cuda: &'a Copies, range: &'a CpuRange) -> Views<'a> {
        Views { cuda, device: 0, addr: ADDR, range }
    }

    fn pattern() -> Vec<u8> {
        (0..SIZE).map(|at| (at.wrapping_mul(0x9e37_79b9) >> 13).to_le_bytes()[0]).collect()
    }

    fn file() -> File {
        let file = memory_file(c"test", SIZE as u64).unwrap();
        file.write_all_at(&pattern(), 0).unwrap();
        file
    }

    fn map(file: &File) -> CpuRange {
        // SAFETY: no address is given.
        let ptr = unsafe { Linux.mmap(file.as_fd(), SIZE, 0, None) }.unwrap();
        // SAFETY: just mapped, nothing else knows it.
        unsafe { CpuRange::adopt(ptr, SIZE, MappingType::Cached, None) }.unwrap()
    }

    /// Memory of CUDA, and a mapping of other memory with the same bytes.
    fn impostor() -> (Copies, File, CpuRange) {
        let other = file();
        let range = map(&other);
        (Copies(file()), other, range)
    }

    #[test]
    fn a_nonce_finds_other_memory_with_the_same_bytes() {
        let (cuda, _, range) = impostor();
        let result = views(&cuda, &range).nonce(&[0]);
        assert!(matches!(result, Err(Error::ProofFailed { .. })), "{result:?}");
    }

    #[test]
    fn a_nonce_accepts_the_same_memory_and_finds_displacement() {
        let cuda = Copies(file());
        let range = map(&cuda.0);
        views(&cuda, &range).nonce(&[0, 4096 - 32, 777, SIZE - PROBE]).unwrap();
        let result = Views { addr: ADDR - 8, ..views(&cuda, &range) }.nonce(&[4096]);
        assert!(matches!(result, Err(Error::ProofFailed { .. })), "{result:?}");
        assert!(views(&cuda, &range).nonce(&[SIZE - PROBE + 1]).is_err());
    }

    #[test]
    fn a_nonce_finds_writes_that_do_not_arrive() {
        let cuda = Copies(file());
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: no address is given. A private mapping shows what others write until it is written to.
        let raw = unsafe { mmap(std::ptr::null_mut(), SIZE, prot, MapFlags::PRIVATE, &cuda.0, 0) }.unwrap();
        let ptr = std::ptr::NonNull::new(raw.cast()).unwrap();
        // SAFETY: just mapped, nothing else knows it.
        let range = unsafe { CpuRange::adopt(ptr, SIZE, MappingType::Cached, None) }.unwrap();
        views(&cuda, &range).compare(0, SIZE).unwrap();
        let result = views(&cuda, &range).nonce(&[0]);
        assert!(
            matches!(&result, Err(Error::ProofFailed { found, .. }) if found.contains("CUDA does not see"))
        );
    }

    #[test]
    fn a_comparison_reads_both_ends_and_nothing_else() {
        let (cuda, other, range) = impostor();
        for (offset, len) in [(0, SIZE), (3, 5), (1000, 64), (1001, 65), (SIZE - 1, 1)] {
            views(&cuda, &range).compare(offset, len).unwrap();
        }
        let flip = |at: usize| {
            let mut byte = [0];
            other.read_exact_at(&mut byte, at as u64).unwrap();
            other.write_all_at(&[!byte[0]], at as u64).unwrap();
        };
        for (at, offset, len) in [(0, 0, SIZE), (SIZE - 1, 0, SIZE), (1007, 1003, 5), (1063, 1000, 64)] {
            flip(at);
            let result = views(&cuda, &range).compare(offset, len);
            let Err(Error::ProofFailed { addr, .. }) = result else { panic!("{at}: {result:?}") };
            assert_eq!(addr, ADDR + at as u64);
            flip(at);
        }
        flip(SIZE / 2);
        views(&cuda, &range).compare(0, SIZE).unwrap();
        flip(SIZE / 2);
        // Nothing was written.
        for file in [&cuda.0, &other] {
            let mut bytes = vec![0; SIZE];
            file.read_exact_at(&mut bytes, 0).unwrap();
            assert!(bytes == pattern());
        }
    }
}
