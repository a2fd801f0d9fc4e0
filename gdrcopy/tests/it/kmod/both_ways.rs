//! The backend where the GPU driver does not serve modules, or not on this GPU: by dma-bufs.

use super::rig::{Failing, Machine, Raw, counter};
use gdrcopy::{Error, PinFlags};
use gdsync_testkit::Module;
use gdsync_testkit::kmod::{self, Fault};

use crate::gdrdrv_abi as abi;
use crate::rig::{Backend, Rig, pattern, peek, poke};

const NONE: PinFlags = PinFlags::empty();
const SIZE: usize = 300_000;

/// The emulated GPU under a simulated CUDA.
fn rig() -> Option<(Machine, Rig)> {
    let machine = Machine::new()?;
    let there = kmod::is_wanted() && Raw::open().attribute(abi::ATTR_EXTENSIONS) == Ok(abi::EXTENSION_DMABUF);
    if !there {
        println!("skipped: no pins of dma-bufs here, or GDRCOPY_TEST_KMOD is not set");
        return None;
    }
    Some((machine, Rig::new(Module::default())))
}

#[test]
fn every_range_is_read_and_written_where_it_lies() {
    let Some((_machine, rig)) = rig() else { return };
    let gdrdrv = Backend::volatile_gdrdrv(&rig.system).unwrap();
    let memory = gdrdrv.allocate(0, SIZE).unwrap();
    let mut model = pattern(1, SIZE);
    memory.write(0, &model).unwrap();
    for errno in [libc::ENODEV, libc::EOPNOTSUPP, 524] {
        let _failing = Failing::new(Fault::Get, errno);
        for (seed, (offset, len)) in
            (2..).zip([(0, SIZE), (0, 1), (5000, 1), (65_535, 70_000), (SIZE - 5, 5)])
        {
            let pin = gdrdrv.pin(memory.addr() + offset as u64, len, NONE).unwrap();
            assert_eq!((pin.page_size(), counter("dmabuf_attachments")), (4096, 1));
            let skip = usize::try_from(memory.addr() + offset as u64 - pin.va()).unwrap();
            assert!(skip < 4096 && skip + len <= pin.pinned_len());
            let range = pin.map(skip + len, None).unwrap();
            assert_eq!(peek(&range, skip, len), model[offset..][..len], "{offset}");
            let news = pattern(seed, len);
            poke(&range, skip, &news);
            model[offset..][..len].copy_from_slice(&news);
            let mut whole = vec![0; SIZE];
            memory.read(0, &mut whole).unwrap();
            assert!(whole == model, "{len} bytes at {offset} went elsewhere");
            assert!(!pin.invalidated().unwrap());
            drop(range);
            pin.unpin().unwrap();
        }
    }
}

#[test]
fn freed_memory_stays_and_is_not_mapped_anew() {
    let Some((_machine, rig)) = rig() else { return };
    let gdrdrv = Backend::volatile_gdrdrv(&rig.system).unwrap();
    let _failing = Failing::new(Fault::Get, 524);
    let size = 3 << 20;
    let memory = gdrdrv.allocate(0, size).unwrap();
    memory.write(7, b"kept").unwrap();
    let pin = gdrdrv.pin(memory.addr(), size, NONE).unwrap();
    let range = pin.map(size, None).unwrap();
    drop(memory);
    let _other = gdrdrv.allocate(0, size).unwrap();
    assert_eq!(peek(&range, 7, 4), b"kept");
    drop(range);
    assert!(matches!(pin.map(size, None), Err(Error::Invalidated)));
    pin.unpin().unwrap();
}

#[test]
fn what_both_ways_refuse_is_told_by_its_cause() {
    let Some((_machine, rig)) = rig() else { return };
    let gdrdrv = Backend::volatile_gdrdrv(&rig.system).unwrap();
    let memory = gdrdrv.allocate(0, SIZE).unwrap();
    // What is wrong with the address or the memory is not tried another way.
    let failing = Failing::new(Fault::Get, libc::ENOMEM);
    assert!(matches!(gdrdrv.pin(memory.addr(), 1, NONE), Err(Error::Exhausted { .. })));
    drop(failing);
    let _failing = Failing::new(Fault::Get, libc::ENODEV);
    rig.machine.fail("cuMemGetHandleForAddressRange", 801);
    assert_eq!(gdrdrv.pin(memory.addr(), 1, NONE).unwrap_err().errno(), libc::ENODEV);
    rig.machine.fail("cuMemGetHandleForAddressRange", 0);
    let _peers = Failing::new(Fault::Attach, libc::EOPNOTSUPP);
    let error = gdrdrv.pin(memory.addr(), 1, NONE).unwrap_err();
    assert!(error.to_string().contains("PIN_DMABUF"), "{error}");
}
