//! Memory of every kind, mapped by `rm` on a real GPU.

use std::sync::MutexGuard;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use gdrcopy::{BackendKind, Error, Gdr};
use gdsync_testkit::process::{End, in_child};

use super::app::{self, Chunks};
use super::{gpu, pattern};

/// The library on `rm`, the primary context, and the GPU for this test alone.
fn rm() -> Option<(Gdr, app::PrimaryContext, MutexGuard<'static, ()>)> {
    let (_, guard) = gpu()?;
    let gdr = Gdr::builder().backend(BackendKind::Rm).open().unwrap();
    Some((gdr, app::PrimaryContext::new(), guard))
}

/// Both sides see what the other writes, in every part of the memory.
fn check(gdr: &Gdr, what: &str, base: u64, len: usize) {
    let last = len - 1;
    let ranges =
        [(0, len), (0, 65_536.min(len)), (65_536 % len, 100_000), (5, 1), (len / 2, 70_001), (last, 1)];
    for (round, (skip, want)) in (0..).zip(ranges) {
        let (addr, want) = (base + skip as u64, want.min(len - skip));
        let (by_gpu, by_cpu) = (pattern(want, 3 * round), pattern(want, 101 + round));
        app::write(addr, &by_gpu);
        let mapping = gdr.map(addr, want).unwrap_or_else(|error| panic!("{what}, {want} at {skip}: {error}"));
        assert_eq!((mapping.addr(), mapping.len()), (addr, want));
        let mut seen = vec![0; want];
        mapping.read(0, &mut seen).unwrap();
        assert!(seen == by_gpu, "{what}: the CPU sees other bytes than {want} at {skip}");
        mapping.write(0, &by_cpu).unwrap();
        mapping.flush().unwrap();
        assert!(app::read(addr, want) == by_cpu, "{what}: CUDA sees other bytes than {want} at {skip}");
    }
}

/// The median times of pin, map, unmap and unpin of 64 KiB.
fn times(gdr: &Gdr, addr: u64) -> [Duration; 5] {
    let mut all: [Vec<Duration>; 5] = Default::default();
    for _ in 0..200 {
        let mut at = vec![Instant::now()];
        let pin = gdr.pin(addr, 65_536).unwrap();
        at.push(Instant::now());
        let mapping = pin.map().unwrap();
        at.push(Instant::now());
        mapping.unmap().unwrap();
        at.push(Instant::now());
        pin.unpin().unwrap();
        at.push(Instant::now());
        at.windows(2).zip(&mut all).for_each(|(pair, times)| times.push(pair[1] - pair[0]));
        all[4].push(at[4] - at[0]);
    }
    all.map(|mut times| {
        times.sort();
        times[times.len() / 2]
    })
}

#[test]
fn memory_of_every_kind_is_mapped() {
    const NONE: u32 = 0;
    const POSIX: u32 = 1;
    let Some((gdr, _context, _gpu)) = rm() else { return };
    let try_one = |what: &str, addr: u64, len: usize| {
        check(&gdr, what, addr, len);
        if len >= 65_536 {
            println!("{what}: pin, map, unmap, unpin of 64 KiB: {:.1?}", times(&gdr, addr));
        }
    };
    for len in [64, 4096, 100_000, 2 << 20, 5_000_000, 64 << 20] {
        let [malloc, pool] = [app::malloc(len), app::malloc_from_pool(len)];
        try_one(&format!("cuMemAlloc of {len}"), malloc, len);
        try_one(&format!("cuMemAllocAsync of {len}"), pool, len);
        [malloc, pool].into_iter().for_each(app::free);
    }
    for (handles, rdma) in [(NONE, 0), (NONE, 1), (POSIX, 0), (POSIX, 1)] {
        let chunk = Chunks::new(1, handles, rdma);
        try_one(&format!("cuMemCreate, handle types {handles}, RDMA {rdma}"), chunk.base, chunk.len);
    }
    for count in [2, 3, 150] {
        let chunks = Chunks::new(count, NONE, 0);
        try_one(&format!("{count} chunks"), chunks.base, chunks.len);
        let across = chunks.base + (2 << 20) - 65_536;
        try_one("across two chunks", across, 131_072);
    }
}

#[test]
fn freed_memory_that_is_made_anew_is_not_taken_for_the_old() {
    let Some((gdr, _context, _gpu)) = rm() else { return };
    type Kind = (&'static str, fn(usize) -> u64);
    let kinds: [Kind; 2] = [("cuMemAlloc", app::malloc), ("cuMemAllocAsync", app::malloc_from_pool)];
    for (what, make) in kinds {
        let len = 4 << 20;
        for _ in 0..20 {
            let old = make(len);
            app::write(old, b"old");
            let (mapped, unmapped) = (gdr.pin(old, len).unwrap(), gdr.pin(old, len).unwrap());
            let mapping = mapped.map().unwrap();
            app::free(old);
            let new = make(len);
            app::write(new, b"new");
            let mut seen = [0; 3];
            mapping.read(0, &mut seen).unwrap();
            // A pool gives the same memory again: that is no other memory.
            println!(
                "{what}: {}, {}",
                String::from_utf8_lossy(&seen),
                if old == new { "same" } else { "other" }
            );
            assert!(matches!(unmapped.map(), Err(Error::Invalidated)), "{what}");
            check(&gdr, what, new, len);
            app::free(new);
        }
    }
}

#[test]
fn other_threads_in_libcuda_are_not_disturbed() {
    let Some((gdr, _context, _gpu)) = rm() else { return };
    let (stop, len) = (AtomicBool::new(false), 1 << 20);
    let memory = app::malloc(len);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let _context = app::PrimaryContext::new();
                while !stop.load(Ordering::Relaxed) {
                    let chunk = Chunks::new(2, 0, 0);
                    app::write(chunk.base + 7, b"others");
                    assert_eq!(app::read(chunk.base + 7, 6), b"others");
                }
            });
        }
        let askers = [(); 2].map(|()| {
            scope.spawn(|| {
                let _context = app::PrimaryContext::new();
                for _ in 0..100 {
                    let own = app::malloc_from_pool(200_000);
                    check(&gdr, "own memory", own, 200_000);
                    app::free(own);
                }
            })
        });
        let ended = askers.map(|asker| asker.join());
        stop.store(true, Ordering::Relaxed);
        ended.into_iter().for_each(|ended| ended.unwrap());
    });
    assert_eq!(in_child(|| matches!(gdr.pin(memory, len), Err(Error::OtherProcess { .. }))), End::Said(true));
    check(&gdr, "after a fork", memory, len);
    app::free(memory);
}
