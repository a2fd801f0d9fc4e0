//! The C functions on simulated machines, the first use, and callers that round to GPU pages.

use std::ffi::{CStr, c_int, c_void};
use std::ptr::null_mut;
use std::sync::Arc;

use gdrapi::{GPU_PAGE_SIZE, gdr_info_v2_t, gdr_mh_t, gdr_t};
use gdrcopy::Gdr;
use gdrcopy::cuda::MemoryKind;
use gdrcopy::system::System;
use gdsync_testkit::{Gdrdrv, Machine, Module, RmSettings, SimulatedKernel, SimulatedRm, UninitialisedCuda};

/// Larger than the blocks that small allocations share; not a multiple of GPU pages.
pub(crate) const SIZE: usize = (4 << 20) + 4096;

pub(crate) type Answer<T> = Result<T, c_int>;

fn answer(status: c_int) -> Answer<()> {
    if status == 0 { Ok(()) } else { Err(status) }
}

/// What a call writes to the place that it gets.
fn given<T>(before: T, call: impl FnOnce(*mut T) -> c_int) -> Answer<T> {
    let mut place = before;
    answer(call(&raw mut place)).map(|()| place)
}

/// What may serve on a machine.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Driver {
    Gdrdrv(Module),
    /// CUDA 13.3.
    DmaBuf,
    Rm(RmSettings),
}

/// A machine, with the end of each driver that looks after what is left behind.
pub(crate) struct Computer {
    pub(crate) machine: Arc<Machine>,
    pub(crate) gdrdrv: Option<Arc<Gdrdrv>>,
    pub(crate) rm: Option<Arc<SimulatedRm>>,
    pub(crate) cuda: UninitialisedCuda,
    system: System,
}

impl Computer {
    pub(crate) fn new(driver: Driver) -> Self {
        let machine = Machine::new(2);
        let mut kernel = SimulatedKernel::new(machine.clone());
        let (mut gdrdrv, mut rm) = (None, None);
        match driver {
            Driver::Gdrdrv(module) => {
                let device = gdrdrv.insert(Gdrdrv::new(&machine, module));
                kernel = kernel.with_device("/dev/gdrdrv", device.clone());
            }
            Driver::DmaBuf => machine.cuda.lock().driver_version = 13030,
            Driver::Rm(settings) => kernel = rm.insert(SimulatedRm::new(&machine, settings)).install(kernel),
        }
        let cuda = UninitialisedCuda::new(&machine);
        let system = System::new(Arc::new(kernel), cuda.clone());
        Self { machine, gdrdrv, rm, cuda, system }
    }

    /// `gdr_open`.
    pub(crate) fn open(&self) -> Answer<Library> {
        let chosen = ["GDRCOPY_BACKEND", "GDRCOPY_USE_DMABUF_MMAP"].map(std::env::var_os);
        assert_eq!(chosen, [None, None], "unset it: these tests are of all backends");
        let builder = Gdr::builder().allow_volatile().require_gpu();
        let g = gdrapi::open_with(builder.system(self.system.clone()));
        let errno = std::io::Error::last_os_error().raw_os_error();
        if g.is_null() { Err(errno.unwrap()) } else { Ok(Library(g)) }
    }

    /// Nothing is left of what was opened, and nothing was done in a wrong order.
    pub(crate) fn check_clean(&self) {
        if let Some(gdrdrv) = &self.gdrdrv {
            assert_eq!((gdrdrv.open_files(), gdrdrv.live_pins()), (0, 0));
        }
        if let Some(rm) = &self.rm {
            assert_eq!(rm.live(), Default::default());
            assert_eq!(rm.violations(), [""; 0]);
        }
    }

    /// Does something while an operation fails.
    pub(crate) fn failing<T>(&self, operation: &str, code: i32, act: impl FnOnce() -> T) -> T {
        self.machine.fail(operation, code);
        let result = act();
        self.machine.fail(operation, 0);
        result
    }
}

/// A `gdr_t`. Not closed by itself.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Library(pub(crate) gdr_t);

impl Library {
    pub(crate) fn close(self) -> Answer<()> {
        answer(gdrapi::gdr_close(self.0))
    }

    pub(crate) fn alloc(self, size: usize) -> Answer<u64> {
        // SAFETY: a place for the address.
        given(0, |place| unsafe { gdrapi::gdrx_alloc(self.0, 0, size, place) })
    }

    pub(crate) fn free(self, addr: u64) -> Answer<()> {
        answer(gdrapi::gdrx_free(self.0, addr))
    }

    pub(crate) fn copy_in(self, addr: u64, bytes: &[u8]) -> Answer<()> {
        // SAFETY: a whole slice.
        answer(unsafe { gdrapi::gdrx_copy_in(self.0, addr, bytes.as_ptr().cast(), bytes.len()) })
    }

    pub(crate) fn copy_out(self, addr: u64, len: usize) -> Answer<Vec<u8>> {
        let mut bytes = vec![0xee; len];
        // SAFETY: a whole vector.
        answer(unsafe { gdrapi::gdrx_copy_out(self.0, bytes.as_mut_ptr().cast(), addr, len) }).map(|()| bytes)
    }

    pub(crate) fn describe(self) -> String {
        let mut line = [0_u8; 1000];
        // SAFETY: a whole array.
        answer(unsafe { gdrapi::gdrx_describe(self.0, line.as_mut_ptr().cast(), line.len()) }).unwrap();
        CStr::from_bytes_until_nul(&line).unwrap().to_str().unwrap().to_owned()
    }

    pub(crate) fn pin(self, addr: u64, size: usize) -> Answer<gdr_mh_t> {
        // SAFETY: a place for the handle.
        given(gdr_mh_t::default(), |place| unsafe { gdrapi::gdr_pin_buffer(self.0, addr, size, 0, 0, place) })
    }

    pub(crate) fn pin_v2(self, addr: u64, size: usize, flags: u32) -> Answer<gdr_mh_t> {
        // SAFETY: a place for the handle.
        given(gdr_mh_t::default(), |place| unsafe {
            gdrapi::gdr_pin_buffer_v2(self.0, addr, size, flags, place)
        })
    }

    pub(crate) fn unpin(self, mh: gdr_mh_t) -> Answer<()> {
        answer(gdrapi::gdr_unpin_buffer(self.0, mh))
    }

    pub(crate) fn callback_flag(self, mh: gdr_mh_t) -> Answer<c_int> {
        // SAFETY: a place for the flag.
        given(-1, |place| unsafe { gdrapi::gdr_get_callback_flag(self.0, mh, place) })
    }

    pub(crate) fn info(self, mh: gdr_mh_t) -> Answer<gdr_info_v2_t> {
        // SAFETY: a place for the structure.
        given(gdr_info_v2_t::default(), |place| unsafe { gdrapi::gdr_get_info_v2(self.0, mh, place) })
    }

    pub(crate) fn map_as(self, mh: gdr_mh_t, size: usize, flags: c_int) -> Answer<*mut c_void> {
        // SAFETY: a place for the address.
        given(null_mut(), |place| unsafe { gdrapi::gdr_map_v2(self.0, mh, place, size, flags) })
    }

    pub(crate) fn map(self, mh: gdr_mh_t, size: usize) -> Answer<*mut c_void> {
        // SAFETY: a place for the address.
        given(null_mut(), |place| unsafe { gdrapi::gdr_map(self.0, mh, place, size) })
    }

    pub(crate) fn unmap(self, mh: gdr_mh_t, va: *mut c_void, size: usize) -> Answer<()> {
        answer(gdrapi::gdr_unmap(self.0, mh, va, size))
    }

    pub(crate) fn attribute(self, attr: u32) -> Answer<c_int> {
        // SAFETY: a place for the value.
        given(-1, |place| unsafe { gdrapi::gdr_get_attribute(self.0, attr, place) })
    }

    pub(crate) fn version(self) -> Answer<(c_int, c_int)> {
        let (mut major, mut minor) = (-1, -1);
        // SAFETY: places for both.
        answer(unsafe { gdrapi::gdr_driver_get_version(self.0, &raw mut major, &raw mut minor) })
            .map(|()| (major, minor))
    }

    /// Pins, maps, copies both ways, unmaps and unpins; looks at the memory by the copy engine.
    pub(crate) fn works_at(self, addr: u64, size: usize) {
        let mh = self.pin(addr, size).unwrap();
        let base = self.map(mh, size).unwrap();
        let info = self.info(mh).unwrap();
        let skip = usize::try_from(addr - info.v1.va).unwrap();
        for (at, bytes) in [(0, &b"first"[..]), (size / 2, b"middle"), (size - 4, b"last")] {
            let place = base.wrapping_byte_add(skip + at);
            assert_eq!(store(mh, place, bytes), Ok(()));
            assert_eq!(self.copy_out(addr + at as u64, bytes.len()).unwrap(), bytes);
            self.copy_in(addr + at as u64, &bytes.to_ascii_uppercase()).unwrap();
            assert_eq!(load(mh, place, bytes.len()).unwrap(), bytes.to_ascii_uppercase());
        }
        self.unmap(mh, base, size).unwrap();
        assert_eq!(load(mh, base, 1), Err(libc::EINVAL));
        self.unpin(mh).unwrap();
    }
}

/// `gdr_copy_to_mapping`.
pub(crate) fn store(mh: gdr_mh_t, place: *mut c_void, bytes: &[u8]) -> Answer<()> {
    // SAFETY: a whole slice; the library checks `place`, which no other thread unmaps.
    answer(unsafe { gdrapi::gdr_copy_to_mapping(mh, place, bytes.as_ptr().cast(), bytes.len()) })
}

/// `gdr_copy_from_mapping`.
pub(crate) fn load(mh: gdr_mh_t, place: *mut c_void, len: usize) -> Answer<Vec<u8>> {
    let mut bytes = vec![0; len];
    // SAFETY: a whole vector; the library checks `place`, which no other thread unmaps.
    answer(unsafe { gdrapi::gdr_copy_from_mapping(mh, bytes.as_mut_ptr().cast(), place, len) })
        .map(|()| bytes)
}

fn memory(computer: &Computer) -> u64 {
    computer.machine.memory.lock().alloc(0, SIZE, MemoryKind::Malloc).unwrap()
}

#[test]
fn cuda_waits_for_the_first_pin() {
    let drivers = [
        (Driver::Gdrdrv(Module::default()), "gdrdrv", [1, 1, 0]),
        (Driver::DmaBuf, "dmabuf", [1, 1, 1]),
        (Driver::Rm(RmSettings::default()), "rm", [1, 1, 0]),
    ];
    for (driver, name, attributes) in drivers {
        let computer = Computer::new(driver);
        let library = computer.open().unwrap();
        let addr = memory(&computer);
        assert_eq!(library.version(), Ok((2, 6)));
        assert_eq!([1, 2, 3].map(|attribute| library.attribute(attribute)), attributes.map(Ok));
        let line = library.describe();
        assert!(line.starts_with(name), "{line}");
        assert_eq!(line.contains("(to be opened at first use)"), name != "gdrdrv", "{line}");
        computer.open().unwrap().close().unwrap();
        assert_eq!(computer.cuda.initialised(), 0, "{name}");

        let mh = library.pin(addr, SIZE).unwrap();
        assert_eq!(computer.cuda.initialised(), 1, "{name}");
        library.map(mh, SIZE).unwrap();
        let line = library.describe();
        assert!(line.starts_with(name) && !line.contains("first use"), "{line}");
        library.pin(addr, SIZE).unwrap();
        assert_eq!(computer.cuda.initialised(), 1, "{name}");
        library.close().unwrap();
        computer.check_clean();
    }
}

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
        for at in [0, len / 2, len - 4] {
            store(mh, user.wrapping_byte_add(at), b"user").unwrap();
            let seen = range.object.read(range.offset + at, 4).unwrap();
            assert_eq!(seen, b"user", "{caller:?}, {len} bytes");
            range.object.write(range.offset + at, b"CUDA").unwrap();
            assert_eq!(load(mh, user.wrapping_byte_add(at), 4).unwrap(), b"CUDA");
        }
        library.unmap(mh, base, size).unwrap();
        library.unpin(mh).unwrap();
    }
    computer.machine.memory.lock().free(addr).unwrap();
}

#[test]
fn callers_that_round_to_pages_find_their_bytes() {
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
