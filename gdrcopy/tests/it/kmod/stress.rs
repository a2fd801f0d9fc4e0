//! Many threads at once.

use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use super::rig::{Machine, Memory, Raw, counter, is_persistent};
use crate::gdrdrv_abi::PinDmaBuf;
use gdsync_testkit::kmod::CHUNK;
use std::os::fd::AsRawFd;

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

/// dma-bufs that are exported, pinned, moved and closed by many threads.
#[test]
fn dmabufs_come_and_go() {
    let Some(_machine) = Machine::new() else { return };
    let raw = Raw::open();
    if raw.attribute(0x1000) != Ok(1) {
        println!("skipped: no pins of dma-bufs here");
        return;
    }
    let memory = Memory::new(2 * CHUNK);
    thread::scope(|scope| {
        for thread in 0..4_u64 {
            let (raw, memory) = (&raw, &memory);
            scope.spawn(move || {
                for round in 0..rounds() / 20 {
                    let fd = memory.object.export(0, 2 * CHUNK, false).unwrap();
                    let mut pin = PinDmaBuf { fd: fd.as_raw_fd(), size: CHUNK, ..Default::default() };
                    raw.call(&mut pin).unwrap();
                    let map = raw.map(pin.handle, CHUNK).unwrap();
                    let offset = usize::try_from(thread).unwrap();
                    map.store(offset, 1);
                    if round % 4 == thread {
                        memory.object.move_to(gdsync_testkit::kmod::Backing::Ram).unwrap();
                    }
                    assert_eq!(map.load(offset), 1);
                    drop(map);
                    raw.unpin(pin.handle).unwrap();
                }
            });
        }
    });
}
