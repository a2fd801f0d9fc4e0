//! Proofs that must fail where a mapping shows the wrong memory.

use std::os::fd::AsRawFd;
use std::ptr::NonNull;

use super::rig::{Rig, pattern};
use crate::backend::cuda_allocation::CudaAllocation;
use crate::backend::host::Host;
use crate::backend::{Allocation, Backend, MappingType, PinFlags, Pinned, proof};
use crate::cpu_range::CpuRange;
use crate::error::Error;
use crate::standin::Module;

const SIZE: usize = 65_536;

/// Memory of CUDA, and a mapping of other memory with the same bytes.
struct Impostor {
    rig: Rig,
    real: CudaAllocation,
    other: Box<dyn Allocation>,
    range: CpuRange,
    _pin: Box<dyn Pinned>,
}

fn impostor() -> Impostor {
    let rig = Rig::new(Module::default());
    let host = Host::open(&rig.system).unwrap();
    let other = host.allocate(0, SIZE).unwrap();
    let pin = host.pin(other.addr(), SIZE, PinFlags::empty()).unwrap();
    let range = pin.map(SIZE, None).unwrap();
    let real = CudaAllocation::new(&rig.cuda, 0, SIZE).unwrap();
    let bytes = pattern(1, SIZE);
    real.write(0, &bytes).unwrap();
    other.write(0, &bytes).unwrap();
    Impostor { rig, real, other, range, _pin: pin }
}

fn compare(it: &Impostor, offset: usize, len: usize) -> Result<(), Error> {
    proof::compare(&*it.rig.cuda, 0, it.real.addr(), &it.range, offset, len)
}

#[test]
fn a_nonce_finds_other_memory_with_the_same_bytes() {
    let it = impostor();
    let result = proof::nonce(&*it.rig.cuda, 0, it.real.addr(), &it.range, &[0]);
    assert!(matches!(result, Err(Error::ProofFailed { .. })), "{result:?}");
}

#[test]
fn a_nonce_holds_where_the_memory_is_the_same_and_finds_displacement() {
    let rig = Rig::new(Module::default());
    let gdrdrv = crate::backend::gdrdrv::Gdrdrv::open(&rig.system, false).unwrap();
    let memory = gdrdrv.allocate(0, SIZE).unwrap();
    let pin = gdrdrv.pin(memory.addr(), SIZE, PinFlags::empty()).unwrap();
    let range = pin.map(SIZE, None).unwrap();
    let offsets = [0, 4096 - 32, 777, SIZE - proof::PROBE];
    proof::nonce(&*rig.cuda, 0, pin.va(), &range, &offsets).unwrap();
    let result = proof::nonce(&*rig.cuda, 0, pin.va() - 8, &range, &[4096]);
    assert!(matches!(result, Err(Error::ProofFailed { .. })), "{result:?}");
    let result = proof::nonce(&*rig.cuda, 0, pin.va(), &range, &[SIZE - proof::PROBE + 1]);
    assert!(result.is_err());
}

#[test]
fn a_nonce_finds_writes_that_do_not_arrive() {
    let rig = Rig::new(Module::default());
    let memory = CudaAllocation::new(&rig.cuda, 0, SIZE).unwrap();
    let range = {
        let machine = rig.machine.memory.lock();
        let (found, offset) = machine.backing(memory.addr()).unwrap();
        let fd = found.object.fd().as_raw_fd();
        let (prot, offset) = (libc::PROT_READ | libc::PROT_WRITE, libc::off_t::try_from(offset).unwrap());
        // SAFETY: no place is asked for. Private: it shows what others write until it is written to.
        let raw = unsafe { libc::mmap(std::ptr::null_mut(), SIZE, prot, libc::MAP_PRIVATE, fd, offset) };
        assert_ne!(raw, libc::MAP_FAILED);
        // SAFETY: just mapped, known to nobody else.
        unsafe { CpuRange::adopt(NonNull::new(raw.cast()).unwrap(), SIZE, MappingType::Cached, None) }
            .unwrap()
    };
    proof::compare(&*rig.cuda, 0, memory.addr(), &range, 0, SIZE).unwrap();
    let result = proof::nonce(&*rig.cuda, 0, memory.addr(), &range, &[0]);
    assert!(matches!(&result, Err(Error::ProofFailed { found, .. }) if found.contains("CUDA does not see")));
}

#[test]
fn a_comparison_looks_at_both_ends_and_at_nothing_else() {
    let it = impostor();
    for (offset, len) in [(0, SIZE), (3, 5), (1000, 64), (1001, 65), (SIZE - 1, 1)] {
        compare(&it, offset, len).unwrap();
    }
    let flip = |at: usize| {
        let mut byte = [0];
        it.other.read(at, &mut byte).unwrap();
        it.other.write(at, &[!byte[0]]).unwrap();
    };
    for (at, offset, len) in [(0, 0, SIZE), (SIZE - 1, 0, SIZE), (1007, 1003, 5), (1063, 1000, 64)] {
        flip(at);
        let result = compare(&it, offset, len);
        let Err(Error::ProofFailed { addr, .. }) = result else { panic!("{at}: {result:?}") };
        assert_eq!(addr, it.real.addr() + at as u64);
        flip(at);
    }
    flip(SIZE / 2);
    compare(&it, 0, SIZE).unwrap();
}

#[test]
fn a_comparison_never_writes() {
    let it = impostor();
    compare(&it, 0, SIZE).unwrap();
    let (mut real, mut other) = (vec![0; SIZE], vec![0; SIZE]);
    it.real.read(0, &mut real).unwrap();
    it.other.read(0, &mut other).unwrap();
    assert!(real == pattern(1, SIZE) && other == real);
}
