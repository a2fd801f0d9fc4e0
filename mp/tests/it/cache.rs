//! Messages from and into the application's own memory, through the registration cache.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ptr::NonNull;

use crate::common::{LONG, bytes, is_part_of, job_test, job_with, message, myself, prints, says};
use gdsync::hca::SoftHcaConfig;
use gdsync::verbs::Context;
use mp::Communicator;
use mp::cache::{CacheConfig, Cached};

/// Memory of the system's allocator.
struct Plain {
    ptr: NonNull<u8>,
    layout: Layout,
}

impl Plain {
    fn new(len: usize) -> Self {
        let layout = Layout::from_size_align(len, 8).unwrap();
        // SAFETY: a length that is not 0.
        let ptr = unsafe { alloc_zeroed(layout) };
        Self { ptr: NonNull::new(ptr).unwrap(), layout }
    }

    fn cached(&self, comm: &Communicator, start: usize, len: usize) -> Cached {
        assert!(start + len <= self.layout.size());
        // SAFETY: inside.
        let ptr = unsafe { self.ptr.add(start) };
        // SAFETY: it stays allocated until it is invalidated below, and no reference to it is used.
        unsafe { comm.register_cached(ptr.as_ptr(), len) }.unwrap()
    }

    fn free(self, comm: &Communicator) {
        comm.progress();
        comm.cache().invalidate(self.ptr.as_ptr().addr() as u64, self.layout.size());
        // SAFETY: allocated with this layout; the cache has forgotten it.
        unsafe { dealloc(self.ptr.as_ptr(), self.layout) };
    }
}

fn exchange(comm: &Communicator) {
    let (me, peer) = (comm.rank(), 1 - comm.rank());
    for round in 0..20 {
        let (outbox, inbox) = (Plain::new(100_000), Plain::new(100_000));
        for n in 0..20 {
            let (start, len) = (n * 977, 1 + (round * 20 + n) * 37 % 9000);
            let (out, into) = (outbox.cached(comm, start, len), inbox.cached(comm, start, len));
            out.memory().write(0, &message(me, peer, n, len)).unwrap();
            comm.barrier(LONG).unwrap();
            let received = comm.irecv(&into, 0..len, peer).unwrap();
            comm.barrier(LONG).unwrap();
            let sent = comm.isend(&out, 0..len, peer).unwrap();
            assert_eq!(comm.wait(&received, LONG).unwrap().bytes, len);
            comm.wait(&sent, LONG).unwrap();
            assert!(into.memory().to_vec() == message(peer, me, n, len), "{len} bytes at {start}");
        }
        outbox.free(comm);
        inbox.free(comm);
    }
}

job_test!(plain_memory_is_sent_and_received, 2, Communicator::builder(), |comm| {
    exchange(comm);
    let again = Plain::new(4096);
    let before = comm.cache().stats();
    for _ in 0..10 {
        again.cached(comm, 100, 1000);
    }
    let stats = comm.cache().stats();
    assert_eq!((stats.hits - before.hits, stats.misses - before.misses), (9, 1));
    again.free(comm);
    assert_eq!(comm.cache().stats().entries, 0);
});

// A cached registration outlives its handle, and so would the access of peers.
job_test!(a_window_needs_a_registration_of_its_own, 1, Communicator::builder(), |comm| {
    let memory = Plain::new(4096);
    let cached = memory.cached(comm, 0, 4096);
    says(&comm.window(&cached, 0..64, LONG).unwrap_err(), &["from the cache", "Communicator::register"]);
    drop(cached);
    memory.free(comm);
});

#[test]
fn devices_with_few_regions_suffice() {
    let config = SoftHcaConfig { max_regions: 16, ..SoftHcaConfig::default() };
    let context = Context::soft(&config).unwrap();
    let comm = Communicator::builder().context(&context);
    job_with("devices_with_few_regions_suffice", 2, comm, |comm| {
        let (me, peer) = (comm.rank(), 1 - comm.rank());
        let buffers: Vec<_> = (0..40).map(|_| Plain::new(100)).collect();
        for (n, buffer) in buffers.iter().enumerate() {
            let cached = buffer.cached(comm, 0, 100);
            cached.memory().write(0, &message(me, peer, n, 50)).unwrap();
            let received = comm.irecv(&cached, 50..100, peer).unwrap();
            comm.barrier(LONG).unwrap();
            let sent = comm.isend(&cached, 0..50, peer).unwrap();
            comm.wait_all([&received, &sent], LONG).unwrap();
            assert!(bytes(&cached, 50..100) == message(peer, me, n, 50), "message {n}");
        }
        let stats = comm.cache().stats();
        assert!(stats.misses == 40 && stats.evictions >= 24, "{stats:?}");
        buffers.into_iter().for_each(|buffer| buffer.free(comm));
    });
}

#[test]
fn the_environment_switches_it_off() {
    const NAME: &str = "the_environment_switches_it_off";
    if !is_part_of(NAME) {
        for (value, words) in [("off", "uncached: 2"), ("on", "misses: 1"), ("perhaps", "on, gpu or off")] {
            prints(myself(NAME).env("MP_REG_CACHE", value), words);
        }
        return;
    }
    match Communicator::builder().spawn(1).timeout(LONG).cache(CacheConfig::default()).init() {
        Ok(comm) => {
            let memory = Plain::new(64);
            drop([memory.cached(&comm, 0, 64), memory.cached(&comm, 8, 8)]);
            println!("{:?}", comm.cache().stats());
            memory.free(&comm);
        }
        Err(error) => println!("{error}"),
    }
}

job_test!(bad_ranges_are_refused, 1, Communicator::builder(), |comm| {
    for (addr, len) in [(0, 64), (4096, 0), (usize::MAX - 8, 64), (4096, usize::MAX)] {
        let ptr = std::ptr::without_provenance_mut(addr);
        // SAFETY: refused before anybody looks.
        says(&unsafe { comm.register_cached(ptr, len) }.unwrap_err(), &["memory range"]);
    }
});
