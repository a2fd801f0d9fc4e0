//! Callers that round what they pin to GPU pages themselves, so that it leaves the CUDA allocation.

use gdrapi::{GPU_PAGE_SIZE, gdr_mh_t};
use gdrcopy::cuda::MemoryKind;
use gdsync_testkit::{Module, RmSettings};

use crate::library::{Answer, Computer, Driver, Library, load, store};

const PAGE: u64 = GPU_PAGE_SIZE as u64;
/// What small allocations share, bytes.
const BLOCK: usize = 2 << 20;

/// How a caller pins the pages around `len` bytes at `addr`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Caller {
    /// UCX, `gdr_copy_md.c`.
    Ucx,
    /// libfabric, `hmem_cuda_gdrcopy.c`: one page more behind an end that is aligned already.
    Libfabric,
    /// aws-ofi-nccl, `nccl_ofi_gdrcopy.cpp`: through PCIe, or else without flags.
    AwsOfi,
}

impl Caller {
    fn pin(self, library: Library, addr: u64, len: usize) -> Answer<(gdr_mh_t, usize)> {
        let (start, end) = (addr - addr % PAGE, addr + len as u64);
        let end = match self {
            Self::Libfabric => end - end % PAGE + PAGE,
            _ => end.next_multiple_of(PAGE),
        };
        let size = usize::try_from(end - start).unwrap();
        let pinned = match self {
            Self::Ucx => library.pin_v2(start, size, 0),
            Self::Libfabric => library.pin(start, size),
            Self::AwsOfi => library.pin_v2(start, size, 1).or_else(|_| library.pin_v2(start, size, 0)),
        };
        pinned.map(|mh| (mh, size))
    }
}

fn works(computer: &Computer, library: Library, caller: Caller, len: usize) {
    let addr = computer.machine.memory.lock().alloc(0, len, MemoryKind::Malloc).unwrap();
    let range = computer.machine.memory.lock().find(addr).unwrap().clone();
    let pinned = caller.pin(library, addr, len);
    // Behind the last page of a block is nothing: the module refuses, the resource manager's mappings have a hole there.
    let beyond = caller == Caller::Libfabric && len.is_multiple_of(BLOCK);
    if !(beyond && matches!(pinned, Err(libc::EINVAL))) {
        let (mh, size) =
            pinned.unwrap_or_else(|errno| panic!("{caller:?}, {len} bytes at {addr:#x}: {errno}"));
        let base = library.map(mh, size).unwrap();
        let info = library.info(mh).unwrap().v1;
        assert_eq!((info.va, info.mapped_size), (addr - addr % PAGE, size as u64));
        let user = base.wrapping_byte_add(usize::try_from(addr - info.va).unwrap());
        let mut seen = [0; 4];
        for at in [0, len / 2, len - 4] {
            store(mh, user.wrapping_byte_add(at), b"user").unwrap();
            range.object.read(range.offset + at, &mut seen).unwrap();
            assert_eq!(&seen, b"user", "{caller:?}, {len} bytes");
            range.object.write(range.offset + at, b"CUDA").unwrap();
            assert_eq!(load(mh, user.wrapping_byte_add(at), 4).unwrap(), b"CUDA");
        }
        library.unmap(mh, base, size).unwrap();
        library.unpin(mh).unwrap();
    }
    computer.machine.memory.lock().free(addr).unwrap();
}

#[test]
fn they_pin_and_find_their_bytes() {
    let sizes = [8, 1000, 4096, 65536, 65537, 100_000, 1 << 20, (1 << 20) + 8, BLOCK, 3 << 20, 5_000_000];
    let drivers = [
        Driver::Gdrdrv(Module::default()),
        Driver::Gdrdrv(Module { force_pcie: false, ..Module::default() }),
        Driver::Rm(RmSettings::default()),
    ];
    for driver in drivers {
        for caller in [Caller::Ucx, Caller::Libfabric, Caller::AwsOfi] {
            let computer = Computer::new(driver);
            let library = computer.open().unwrap();
            // So that small allocations do not begin at a page.
            computer.machine.memory.lock().alloc(0, 700, MemoryKind::Malloc).unwrap();
            for len in sizes {
                works(&computer, library, caller, len);
            }
            library.close().unwrap();
            computer.check_clean();
        }
    }
}
