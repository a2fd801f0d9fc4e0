//! Copies between [`Memory`] and the CPU.

use std::slice;

use gdrcopy::copy::{Copier, copy_shared, load_fence, store_fence};

use super::{Memory, Reach, checked};
use crate::error::Result;

/// Numbers for which any bytes are a valid value: see [`Memory::write_slice`]. Sealed: integers of 8 to 64 bits, `f32` and `f64`.
pub trait Plain: sealed::Sealed + Copy {}

mod sealed {
    pub trait Sealed {}
}

macro_rules! plain {
    ($($type:ty)*) => {
        $(impl Plain for $type {}
        impl sealed::Sealed for $type {})*
    };
}

plain!(u8 i8 u16 i16 u32 i32 u64 i64 f32 f64);

impl Memory {
    /// Copies bytes at `offset` to `out`. The result may be torn if a device writes meanwhile.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`](crate::Error::OutOfBounds), [`Error::NotMapped`](crate::Error::NotMapped).
    pub fn read(&self, offset: usize, out: &mut [u8]) -> Result<()> {
        let src = self.check(offset, out.len())?;
        if let Reach::Checked = self.reach {
            return checked::load(src.as_ptr(), out);
        }
        // SAFETY: `src` is checked for the length, `out` is exclusive, and the two cannot overlap
        // because no reference to device memory exists.
        unsafe { load(self.reach, src.as_ptr(), out.as_mut_ptr(), out.len()) };
        Ok(())
    }

    /// Copies `data` to `offset`.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`](crate::Error::OutOfBounds), [`Error::NotMapped`](crate::Error::NotMapped).
    #[inline]
    pub fn write(&self, offset: usize, data: &[u8]) -> Result<()> {
        let dst = self.check(offset, data.len())?;
        if let Reach::Checked = self.reach {
            // SAFETY: the range is of this memory.
            return unsafe { checked::store(data, dst.as_ptr()) };
        }
        // SAFETY: `dst` is checked for the length, `data` is shared, and the two cannot overlap because no reference to device
        // memory exists.
        unsafe { store(self.reach, data.as_ptr(), dst.as_ptr(), data.len()) };
        Ok(())
    }

    /// Copies numbers at `offset`, in bytes, to `out`: see [`Memory::read`].
    ///
    /// # Errors
    /// As [`Memory::read`].
    pub fn read_slice<T: Plain>(&self, offset: usize, out: &mut [T]) -> Result<()> {
        // SAFETY: the bytes are those of `out`, which is exclusive; all bytes are values of the sealed `Plain` types, without padding.
        let bytes = unsafe { slice::from_raw_parts_mut(out.as_mut_ptr().cast(), size_of_val(out)) };
        self.read(offset, bytes)
    }

    /// Copies numbers to `offset`, in bytes, as this machine orders their bytes.
    ///
    /// ```
    /// # fn main() -> gdsync_device::Result<()> {
    /// let memory = gdsync_device::memory::Memory::alloc(64)?;
    /// memory.write_slice(8, &[1.5, -2.0])?;
    /// let mut numbers = [0.0; 2];
    /// memory.read_slice(8, &mut numbers)?;
    /// assert_eq!(numbers, [1.5, -2.0]);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As [`Memory::write`].
    pub fn write_slice<T: Plain>(&self, offset: usize, data: &[T]) -> Result<()> {
        // SAFETY: the bytes are those of `data`, shared as it is; the sealed `Plain` types have no padding.
        let bytes = unsafe { slice::from_raw_parts(data.as_ptr().cast(), size_of_val(data)) };
        self.write(offset, bytes)
    }

    /// As [`Memory::write`], faster for a few words.
    ///
    /// # Errors
    /// As [`Memory::write`].
    #[inline]
    pub fn write_words(&self, offset: usize, words: &[[u8; 8]]) -> Result<()> {
        let dst = self.check(offset, size_of_val(words))?.cast::<u64>();
        if !matches!(self.reach, Reach::Host) || !dst.is_aligned() {
            return self.write(offset, words.as_flattened());
        }
        for (at, word) in words.iter().enumerate() {
            let to = dst.as_ptr().wrapping_add(at);
            // SAFETY: the range was checked, and the word lies in it, aligned.
            unsafe { to.write_volatile(u64::from_ne_bytes(*word)) };
        }
        Ok(())
    }

    /// Copies from another memory, or another part of this one.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`](crate::Error::OutOfBounds), [`Error::NotMapped`](crate::Error::NotMapped).
    #[inline]
    pub fn copy_from(&self, offset: usize, src: &Memory, src_offset: usize, len: usize) -> Result<()> {
        let to = self.check(offset, len)?;
        let from = src.check(src_offset, len)?;
        let overlap =
            (to.addr().get() < from.addr().get() + len) && (from.addr().get() < to.addr().get() + len);
        if overlap {
            let mut all = vec![0; len];
            src.read(src_offset, &mut all)?;
            self.write(offset, &all)?;
        } else if let (Reach::Host | Reach::Mapped(_), Reach::Host) = (self.reach, src.reach) {
            // SAFETY: both ranges were checked, and do not overlap.
            unsafe { store(self.reach, from.as_ptr(), to.as_ptr(), len) };
        } else if let (Reach::Host, Reach::Mapped(_)) = (self.reach, src.reach) {
            // SAFETY: both ranges were checked; a mapping and host memory do not overlap.
            unsafe { load(src.reach, from.as_ptr(), to.as_ptr(), len) };
        } else {
            let mut part = [0; 4096];
            for at in (0..len).step_by(part.len()) {
                let part = &mut part[..(len - at).min(4096)];
                src.read(src_offset + at, part)?;
                self.write(offset + at, part)?;
            }
        }
        Ok(())
    }

    /// Prefetches the cache line at `offset` for writing.
    #[inline(always)]
    pub fn prefetch_to_write(&self, offset: usize) {
        #[cfg(target_arch = "x86_64")]
        if self.is_host() && offset < self.len {
            let at = self.ptr.as_ptr().wrapping_add(offset);
            // Assembly, because the intrinsic compiles to a prefetch for reading unless the target has `prefetchw`; processors without
            // it ignore the instruction.
            // SAFETY: a prefetch has no effect on memory.
            unsafe { std::arch::asm!("prefetchw [{}]", in(reg) at, options(nostack, preserves_flags)) };
        }
        #[cfg(not(target_arch = "x86_64"))]
        let _ = offset;
    }

    /// Sets `len` bytes to `byte`.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`](crate::Error::OutOfBounds), [`Error::NotMapped`](crate::Error::NotMapped).
    pub fn fill(&self, offset: usize, len: usize, byte: u8) -> Result<()> {
        self.check(offset, len)?;
        let part = [byte; 4096];
        (0..len)
            .step_by(part.len())
            .try_for_each(|at| self.write(offset + at, &part[..part.len().min(len - at)]))
    }

    /// A copy of all bytes; empty if the CPU cannot access them.
    pub fn to_vec(&self) -> Vec<u8> {
        let mut out = vec![0; self.len];
        if self.read(0, &mut out).is_err() {
            out.clear();
        }
        out
    }
}

/// Copies from host memory to any memory, with a fence after writes through a mapping.
///
/// # Safety
/// Both ranges must be valid for `len` bytes, `dst` for writing, and they must not overlap.
#[inline]
unsafe fn store(reach: Reach, src: *const u8, dst: *mut u8, len: usize) {
    match reach {
        // SAFETY: what the caller promised.
        Reach::Host | Reach::Checked | Reach::Engine => unsafe { copy(src, dst, len) },
        Reach::Mapped(kind) => {
            // SAFETY: what the caller promised; the destination is a mapping of this kind.
            unsafe { Copier::best().to_device(kind, dst, src, len) };
            store_fence(kind);
        }
    }
}

/// Copies from any memory to host memory, with fences around reads through a mapping.
///
/// # Safety
/// As [`store`].
#[inline]
unsafe fn load(reach: Reach, src: *const u8, dst: *mut u8, len: usize) {
    match reach {
        // SAFETY: what the caller promised.
        Reach::Host | Reach::Checked | Reach::Engine => unsafe { copy(src, dst, len) },
        Reach::Mapped(kind) => {
            // Orders the loads after that of the word that announced the bytes: loads from a mapping are speculative.
            load_fence(kind);
            // SAFETY: what the caller promised; the source is a mapping of this kind.
            unsafe { Copier::best().from_device(kind, dst, src, len) };
            load_fence(kind);
        }
    }
}

/// Copies an aligned word of 4 or 8 bytes by one access, and anything else by [`copy_shared`]. A device that races with it sees whole
/// words, in any order.
///
/// # Safety
/// As [`store`].
#[inline]
unsafe fn copy(src: *const u8, dst: *mut u8, len: usize) {
    if len == 8 && src.cast::<u64>().is_aligned() && dst.cast::<u64>().is_aligned() {
        // SAFETY: valid by contract, aligned by the test above.
        let word = unsafe { src.cast::<u64>().read_volatile() };
        // SAFETY: valid by contract, aligned by the test above.
        unsafe { dst.cast::<u64>().write_volatile(word) };
    } else if len == 4 && src.cast::<u32>().is_aligned() && dst.cast::<u32>().is_aligned() {
        // SAFETY: valid by contract, aligned by the test above.
        let word = unsafe { src.cast::<u32>().read_volatile() };
        // SAFETY: valid by contract, aligned by the test above.
        unsafe { dst.cast::<u32>().write_volatile(word) };
    } else {
        // SAFETY: valid and apart by contract; the other side is private or reached by this module only.
        unsafe { copy_shared(dst, src, len) };
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd as _;

    use gdrcopy::MappingType;

    use super::*;

    #[test]
    fn fills_through_every_kind_of_mapping() {
        let host = Memory::alloc(16384).unwrap();
        for kind in [MappingType::WriteCombining, MappingType::Cached, MappingType::Device] {
            let memory = Memory { reach: Reach::Mapped(kind), ..host.clone() };
            for (offset, len) in [(0, 8), (3, 0), (5, 1), (7, 90), (1, 4096), (2, 9001)] {
                host.fill(0, host.len(), 1).unwrap();
                memory.fill(offset, len, 0xab).unwrap();
                let expected = |at| if (offset..offset + len).contains(&at) { 0xab } else { 1 };
                assert!(
                    host.to_vec().into_iter().enumerate().all(|(at, byte)| byte == expected(at)),
                    "{kind:?}"
                );
            }
        }
    }

    #[test]
    fn numbers_are_copied_whole_and_in_bounds() {
        let memory = Memory::alloc(32).unwrap();
        memory.write_slice(3, &[-1_i16, 0x1234]).unwrap();
        let mut bytes = [0; 4];
        memory.read(3, &mut bytes).unwrap();
        assert_eq!(bytes, [(-1_i16).to_ne_bytes(), 0x1234_i16.to_ne_bytes()].as_flattened());
        let mut numbers = [0_u64; 5];
        for refused in [memory.read_slice(0, &mut numbers), memory.write_slice(1, &[0.0_f64; 4])] {
            assert!(matches!(refused, Err(crate::Error::OutOfBounds { .. })), "{refused:?}");
        }
        memory.read_slice::<u64>(32, &mut []).unwrap();
    }

    #[test]
    fn memory_that_its_program_unmapped_is_an_error() {
        let (host, owner) = (Memory::alloc(8192).unwrap(), Memory::alloc(8192).unwrap());
        let ptr = owner.check(0, 8192).unwrap().as_ptr();
        // SAFETY: the only other accesses are those of `owner`.
        let program = unsafe { Memory::of_program(ptr, 8192) }.unwrap();
        let slice = program.slice(96, 200).unwrap();
        slice.write(4, b"of the program").unwrap();
        host.copy_from(100, &program, 100, 14).unwrap();
        program.copy_from(4090, &host, 100, 14).unwrap();
        program.copy_from(4080, &program, 4090, 14).unwrap();
        let mut bytes = [0; 14];
        owner.read(4080, &mut bytes).unwrap();
        assert_eq!(&bytes, b"of the program");
        assert_eq!(
            program.atomic64(4080).unwrap().load(std::sync::atomic::Ordering::Relaxed).to_ne_bytes(),
            *b"of the p"
        );
        // Not unmapped: another thread could map something there.
        // SAFETY: it is the second page of `owner`, which nobody uses any more.
        assert_eq!(unsafe { libc::mprotect(ptr.wrapping_add(4096).cast(), 4096, libc::PROT_NONE) }, 0);
        let is_fault = |result: Result<()>| matches!(result, Err(crate::Error::Sys { .. }));
        assert!(is_fault(program.read(4090, &mut bytes)));
        assert!(is_fault(program.write(5000, &bytes)));
        assert!(is_fault(program.fill(4096, 8, 0)));
        assert!(is_fault(program.write_words(4096, &[[0; 8]])));
        assert!(is_fault(host.copy_from(0, &program, 4000, 200)));
        assert!(is_fault(program.copy_from(4090, &host, 0, 8)));
        assert!(is_fault(program.atomic64(4096).map(drop)));
        program.read(4080, &mut bytes).unwrap();
        // SAFETY: nobody writes to the first page of `owner` any more.
        assert_eq!(unsafe { libc::mprotect(ptr.cast(), 4096, libc::PROT_READ) }, 0);
        assert!(is_fault(program.atomic64(4080).map(drop)), "an atomic operation writes");
        program.read(4080, &mut bytes).unwrap();
        assert_eq!(&bytes[..8], b"of the p");
    }

    #[test]
    fn a_file_that_was_truncated_is_an_error() {
        let file = rustix::fs::memfd_create(c"truncated", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&file, 4096).unwrap();
        let memory = Memory::map_shared(file.as_fd(), 4096).unwrap().checked();
        memory.write(0, &[7; 16]).unwrap();
        rustix::fs::ftruncate(&file, 0).unwrap();
        let is_fault = |result: Result<()>| matches!(result, Err(crate::Error::Sys { .. }));
        assert!(is_fault(memory.read(0, &mut [0; 16])));
        assert!(is_fault(memory.write(0, &[7; 16])));
        assert!(is_fault(memory.atomic64(0).map(drop)));
    }

    #[test]
    fn overlapping_copies_move() {
        let host = Memory::alloc(8192).unwrap();
        let ptr = host.check(0, 8192).unwrap();
        // SAFETY: the guard keeps it mapped.
        let mapping = unsafe { Memory::io(ptr, 8192, std::sync::Arc::new(host.clone())) };
        let all = [(0, 3), (3, 0), (0, 2000), (5, 5)];
        for ((from, to), memory) in all.into_iter().flat_map(|at| [(at, &host), (at, &mapping)]) {
            let mut expected: Vec<u8> = (0..8192u32).map(|i| i.wrapping_mul(37).to_le_bytes()[1]).collect();
            memory.write(0, &expected).unwrap();
            memory.copy_from(to, memory, from, 6000).unwrap();
            expected.copy_within(from..from + 6000, to);
            assert!(memory.to_vec() == expected, "{from} to {to} of {memory:?}");
        }
    }
}
