//! GPU memory that comes and goes: on a GPU, or on the simulated driver where there is none.

use std::sync::OnceLock;

use gdsync::cuda::Gpu;
use gdsync::verbs::Access;
use gdsync_testkit::driver::{self, Control};

use super::super::{CacheConfig, CacheStats, Cached};
use super::{Bed, config};
use crate::communicator::Registration;

const LEN: usize = 2 << 20;

fn is_simulated() -> bool {
    Gpu::count().map_or(true, |count| count == 0)
}

fn gpu() -> &'static Gpu {
    static OPEN: OnceLock<Gpu> = OnceLock::new();
    OPEN.get_or_init(|| {
        if is_simulated() {
            Gpu::open_with(driver::api(), 0, Some(driver::gdr().unwrap())).unwrap()
        } else {
            Gpu::open(0).unwrap()
        }
    })
}

fn malloc(len: usize) -> u64 {
    let (gpu, mut addr) = (gpu(), 0);
    let _current = gpu.enter().unwrap();
    // SAFETY: a place for the answer.
    unsafe { gpu.api().mem_alloc(&mut addr, len) }.unwrap();
    addr
}

fn free(addr: u64) {
    let _current = gpu().enter().unwrap();
    // SAFETY: allocated above, freed once; only the cache still knows of it.
    unsafe { gpu().api().mem_free(addr) }.unwrap();
}

fn get(bed: &Bed, addr: u64, len: usize) -> Cached {
    let register = |memory: &gdsync::memory::Memory| {
        bed.pd.register(memory, Access::LOCAL_WRITE).map(|mr| Registration(mr, None))
    };
    // SAFETY: the memory is freed when the handle is gone.
    let cached = unsafe { bed.cache.get(Some(gpu()), &(addr..addr + len as u64), register) }.unwrap();
    assert_eq!((cached.memory().addr(), cached.memory().len()), (addr, len));
    cached
}

fn bed(config: CacheConfig) -> Bed {
    Bed::new(64, config)
}

/// Allocates until an address that was freed is used again. Rarely somebody else of the process has taken it.
fn is_allocated_again(addr: u64) -> bool {
    let mut others = Vec::new();
    while others.len() < 100 && !others.contains(&addr) {
        others.push(malloc(LEN));
    }
    let is_there = others.contains(&addr);
    others.into_iter().filter(|&other| other != addr).for_each(free);
    is_there
}

/// So many times: `before` with memory that is freed then, `after` with other memory at the same address.
fn with_memory_of_before(times: usize, mut before: impl FnMut(u64), mut after: impl FnMut(u64)) {
    let mut done = 0;
    for _ in 0..10 * times {
        let addr = malloc(LEN);
        before(addr);
        free(addr);
        if is_allocated_again(addr) {
            after(addr);
            done += 1;
            free(addr);
        }
        if done == times {
            return;
        }
    }
    panic!("only {done} of {times} addresses were used again");
}

#[test]
fn memory_that_was_freed_is_never_served_again() {
    let _driver = Control::take();
    let bed = bed(config(64, 1 << 30));
    let before = |addr| {
        let key = get(&bed, addr, LEN).0.lkey();
        assert_eq!(get(&bed, addr + 64, 64).0.lkey(), key, "the same memory is a hit");
    };
    let after = |addr| {
        let before = bed.cache.stats();
        get(&bed, addr + 64, 64);
        let now = bed.cache.stats();
        assert_eq!((now.hits, now.misses), (before.hits, before.misses + 1), "other memory is none");
        assert!(now.stale > before.stale, "{now:?}");
    };
    with_memory_of_before(20, before, after);
}

/// What the CPU writes through the registration is what CUDA reads from the memory that is there now.
#[test]
fn the_registration_is_of_the_memory_that_is_there() {
    let _driver = Control::take();
    let bed = bed(config(64, 1 << 30));
    let check = |addr: u64, byte: u8| {
        let cached = get(&bed, addr + 4096, 4096);
        if !cached.memory().is_mapped() {
            println!("skipped: the CPU does not reach GPU memory here");
            return;
        }
        cached.memory().write(0, &[byte; 64]).unwrap();
        cached.memory().flush().unwrap();
        drop(cached);
        let mut seen = [0u8; 64];
        let _current = gpu().enter().unwrap();
        // SAFETY: a place for 64 bytes; the memory is allocated.
        unsafe { gpu().api().memcpy_to_host_async(seen.as_mut_ptr().cast(), addr + 4096, 64, 0) }.unwrap();
        // SAFETY: the default stream.
        unsafe { gpu().api().stream_synchronize(0) }.unwrap();
        assert_eq!(seen, [byte; 64]);
    };
    with_memory_of_before(5, |addr| check(addr, 1), |addr| check(addr, 2));
}

#[test]
fn cuda_is_not_asked_where_a_handle_or_the_application_proves_the_memory() {
    if !is_simulated() {
        println!("skipped: only the simulated driver counts its calls");
        return;
    }
    let driver = Control::take();
    let asked = || driver.calls("cuPointerGetAttribute");
    let addr = malloc(LEN);
    let bed = bed(config(64, 1 << 30));
    let held = get(&bed, addr, LEN);
    let before = asked();
    drop(get(&bed, addr, LEN));
    assert_eq!(asked(), before, "a handle proves it");
    drop(held);
    drop(get(&bed, addr, LEN));
    assert_eq!(asked(), before + 1, "nothing else does");
    let message = Registration::clone(&get(&bed, addr, LEN));
    let before = asked();
    drop(get(&bed, addr, LEN));
    assert_eq!(asked(), before + 1, "a message under way may be complete, and its memory freed");
    drop(message);

    let announced = self::bed(CacheConfig { announced: true, ..config(64, 1 << 30) });
    drop(get(&announced, addr, LEN));
    let before = asked();
    drop(get(&announced, addr, LEN));
    assert_eq!(asked(), before, "the application says when it frees");
    assert_eq!(announced.cache.invalidate(addr, 1), 1);
    free(addr);
}

#[test]
fn freed_memory_is_found_by_looks() {
    let _driver = Control::take();
    let bed = bed(config(64, 1 << 30));
    let addrs: Vec<_> = (0..20).map(|_| malloc(LEN)).collect();
    addrs.iter().for_each(|&addr| drop(get(&bed, addr, LEN)));
    addrs.iter().for_each(|&addr| free(addr));
    let host = |n: usize| drop(bed.get(n * 10..n * 10 + 5));
    (0..3).for_each(host);
    let stats = bed.cache.stats();
    assert_eq!((stats.stale, stats.entries), (8 + 8 + 4, 3), "eight at every miss");
}

#[test]
fn the_window_of_a_gpu_is_bounded() {
    let _driver = Control::take();
    let bed = bed(CacheConfig { window: Some(4 << 16), ..config(64, 1 << 30) });
    let allocation = malloc(LEN);
    let addr = allocation.next_multiple_of(1 << 16);
    bed.get(0..10);
    // A page of 64 KiB each, but the last, which lies on two.
    for start in [0, 1 << 16, 2 << 16, (4 << 16) - 1] {
        drop(get(&bed, addr + start, 2));
    }
    let kept: Vec<_> = bed.cache.ranges().iter().map(|range| range.start.wrapping_sub(addr)).collect();
    let expected = [1 << 16, 2 << 16, (4 << 16) - 1];
    assert_eq!(kept.iter().filter(|start| **start < 5 << 16).copied().collect::<Vec<_>>(), expected);
    let stats = bed.cache.stats();
    assert_eq!((stats.evictions, stats.entries), (1, 4), "host memory stays: it is not in the window");
    drop(get(&bed, addr, (4 << 16) + 1));
    assert_eq!((bed.cache.stats().uncached, bed.cache.stats().entries), (1, 4));
    bed.cache.clear();
    free(allocation);
}

#[test]
fn what_cuda_does_not_know_is_refused_and_nothing_is_kept() {
    let _driver = Control::take();
    let bed = bed(config(64, 1 << 30));
    let addr = malloc(LEN);
    let refused = |addr: u64, len: usize| {
        let register = |memory: &gdsync::memory::Memory| bed.register(memory);
        // SAFETY: nothing is sent.
        let cached = unsafe { bed.cache.get(Some(gpu()), &(addr..addr + len as u64), register) };
        cached.unwrap_err().to_string()
    };
    assert!(refused(addr, LEN + 1).contains("inside one allocation"));
    free(addr);
    assert!(refused(addr, 64).contains("live memory"));
    assert_eq!(bed.cache.stats(), CacheStats::default());
}
