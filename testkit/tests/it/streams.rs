//! Streams, memory operations, and memory that is registered and freed.

use super::*;

#[test]
fn host_functions_may_not_call_the_driver() {
    extern "C" fn calls(place: *mut c_void) {
        let mut addr = 0;
        let status = cuda!(mem_alloc(&mut addr, 8));
        // SAFETY: the test passes a counter that outlives the call.
        unsafe { &*place.cast::<AtomicU64>() }.store(status.into(), Ordering::SeqCst);
    }
    let rig = Rig::new();
    let (stream, got) = (rig.stream(), AtomicU64::new(0));
    assert_eq!(cuda!(launch_host_func(stream, calls, counter(&got))), 0);
    assert_eq!(cuda!(stream_synchronize(stream)), 0);
    assert_eq!(got.load(Ordering::SeqCst), 800);
}

#[test]
fn only_sound_batches_are_taken() {
    let rig = Rig::new();
    let (words, stream) = (rig.words(2), rig.stream());
    let at = words.at(0);
    let host = 0_u64;
    let unregistered = std::ptr::from_ref(&host).addr() as u64;
    for wrong in [
        wait(unregistered, 0, 0),
        write(at + 4, 0),
        MemOp::word(MemOp::WRITE_32, at + 2, 0, 0),
        write(words.at(2), 0),
        MemOp { flags: 2, ..write(at, 0) },
        wait(at, 0, 4),
        MemOp { operation: 9, ..write(at, 0) },
        MemOp { barrier: 2, ..MemOp::barrier() },
        MemOp { address: 0, ..write(at, 0) },
    ] {
        assert_eq!(batch(stream, &[write(at, 1), wrong]), INVALID_VALUE, "{wrong:?}");
    }
    assert_eq!(batch(stream, &[]), INVALID_VALUE);
    assert_eq!(batch(stream, &vec![write(at, 1); 256]), INVALID_VALUE);
    let mut one = write(at, 1);
    assert_eq!(cuda!(stream_batch_mem_op(stream, 1, &mut one, 1)), INVALID_VALUE);
    assert_eq!(cuda!(stream_batch_mem_op(77, 1, &mut one, 0)), INVALID_HANDLE);
    assert_eq!(cuda!(stream_synchronize(stream)), 0);
    // Nothing of what was refused ran.
    assert_eq!((words.get(0), rig.control.memops()), (0, 0));
    assert_eq!(batch(stream, &vec![write(at, 1); 255]), 0);
    assert_eq!(cuda!(stream_synchronize(stream)), 0);
    assert_eq!((words.get(0), rig.control.memops()), (1, 255));
}

#[test]
fn waits_end_when_their_condition_is_met() {
    let rig = Rig::new();
    let low = u64::from(u32::MAX);
    // Width, condition, value, a word that does not do, one that does.
    let cases = [
        (MemOp::WAIT_64, 0, 5, 4, 5),
        (MemOp::WAIT_64, 0, 5, 4, 6),
        // Cyclic.
        (MemOp::WAIT_64, 0, u64::MAX, u64::MAX - 1, 3),
        (MemOp::WAIT_64, EQUAL, 1 << 40, (1 << 40) + 1, 1 << 40),
        (MemOp::WAIT_64, AND, 1 << 40, 1 << 39, 3 << 40),
        (MemOp::WAIT_64, NOR, u64::MAX - 8, 8, 0),
        // The upper half does not count, neither of the word nor of the value.
        (MemOp::WAIT_32, 0, (7 << 32) | 5, 4, 6),
        (MemOp::WAIT_32, 0, low, low - 1, 3),
        (MemOp::WAIT_32, EQUAL, (7 << 32) | 5, 6, (9 << 32) | 5),
        (MemOp::WAIT_32, AND, (1 << 32) | 2, 1 | (3 << 32), 2),
        (MemOp::WAIT_32, NOR, low - 8, 8, 1 << 40),
    ];
    for case @ (operation, condition, value, unmet, met) in cases {
        let (words, stream) = (rig.words(2), rig.stream());
        words.set(0, unmet);
        let wait = MemOp::word(operation, words.at(0), value, condition);
        assert_eq!(batch(stream, &[wait, write(words.at(1), 1)]), 0);
        std::thread::sleep(Duration::from_millis(5));
        assert_eq!((cuda!(stream_query(stream)), words.get(1)), (NOT_READY, 0), "{case:x?}");
        words.set(0, met);
        assert_eq!((cuda!(stream_synchronize(stream)), words.get(1)), (0, 1), "{case:x?}");
        assert_eq!(cuda!(stream_destroy(stream)), 0);
        words.free();
    }
    rig.nothing_is_left();
}

#[test]
fn a_write_without_barrier_shows_when_something_follows() {
    let rig = Rig::new();
    let words = rig.words(3);
    let quiet = MemOp { flags: MemOp::NO_BARRIER, ..write(words.at(0), 1) };
    let hidden = |stream| {
        std::thread::sleep(Duration::from_millis(10));
        assert_eq!(words.get(0), 0);
        stream
    };
    let gpu_barrier = MemOp { barrier: 1, ..MemOp::barrier() };
    for follower in [write(words.at(1), 1), MemOp::barrier()] {
        let stream = rig.stream();
        words.set(0, 0);
        // A wait does not show it, nor does a barrier of the GPU.
        assert_eq!(batch(stream, &[quiet, gpu_barrier, wait(words.at(2), 1, 0)]), 0);
        hidden(stream);
        words.set(2, 1);
        eventually("done", || cuda!(stream_query(stream)) == 0);
        assert_eq!(batch(hidden(stream), &[follower]), 0);
        eventually("visible", || words.get(0) == 1);
        words.set(2, 0);
    }
    // Nor does the end of the queue; but a synchronization does.
    let stream = rig.stream();
    words.set(0, 0);
    assert_eq!(batch(stream, &[quiet]), 0);
    eventually("done", || cuda!(stream_query(stream)) == 0);
    assert_eq!(cuda!(stream_synchronize(hidden(stream))), 0);
    assert_eq!(words.get(0), 1);
    // The stream itself sees it.
    words.set(0, 0);
    assert_eq!(batch(stream, &[quiet, wait(words.at(0), 1, 0), write(words.at(1), 7)]), 0);
    eventually("done", || words.get(1) == 7);
}

#[test]
fn a_full_stream_blocks_until_work_is_done() {
    let rig = Rig::new();
    let (words, stream) = (rig.words(2), rig.stream());
    rig.control.depth(4);
    for value in 1..=4 {
        assert_eq!(batch(stream, &[wait(words.at(0), value, 0)]), 0);
    }
    assert_eq!(rig.control.blocked(), 0);
    std::thread::scope(|scope| {
        let context = rig.context;
        let (words, control) = (&words, &rig.control);
        let blocked = scope.spawn(move || {
            assert_eq!(cuda!(ctx_push_current(context)), 0);
            batch(stream, &[write(words.at(1), 1)])
        });
        eventually("blocked", || control.blocked() == 1);
        assert!(!blocked.is_finished());
        words.set(0, 1);
        assert_eq!(blocked.join().unwrap(), 0);
    });
    words.set(0, 4);
    assert_eq!(cuda!(stream_synchronize(stream)), 0);
    assert_eq!(words.get(1), 1);
}

#[test]
fn host_memory_is_registered_once() {
    let rig = Rig::new();
    let mut memory = vec![0_u64; 64];
    let at = |index: usize| memory.as_ptr().wrapping_add(index).cast_mut().cast::<c_void>();
    let mut addr = 0;
    assert_eq!(cuda!(mem_host_get_device_pointer(&mut addr, at(8), 0)), INVALID_VALUE);
    assert_eq!(cuda!(mem_host_register(at(8), 64, 3)), 0);
    for (index, len) in [(8, 64), (7, 16), (15, 8), (0, 512)] {
        assert_eq!(cuda!(mem_host_register(at(index), len, 3)), 712, "{index} {len}");
    }
    // Neighbours.
    assert_eq!(cuda!(mem_host_register(at(0), 64, 3)), 0);
    assert_eq!(cuda!(mem_host_register(at(16), 64, 3)), 0);
    assert_eq!(rig.control.alive().registrations, 3);
    assert_eq!(cuda!(mem_host_get_device_pointer(&mut addr, at(15), 0)), 0);
    assert_eq!(addr, at(15).addr() as u64);
    assert_eq!(cuda!(mem_host_unregister(at(9))), 713);
    for index in [8, 0, 16] {
        assert_eq!(cuda!(mem_host_unregister(at(index))), 0);
    }
    assert_eq!(cuda!(mem_host_unregister(at(8))), 713);
    memory[0] = 1;
    rig.nothing_is_left();
}

#[test]
fn memory_is_given_back_when_the_gpu_is_idle() {
    let rig = Rig::new();
    let (gate, stream) = (rig.words(1), rig.stream());
    let (mut far, mut registered) = (0, [0_u64; 1]);
    let mut pinned = std::ptr::null_mut();
    let other = application_context(1);
    assert_eq!(cuda!(ctx_push_current(other)), 0);
    assert_eq!(cuda!(mem_alloc(&mut far, 8)), 0);
    assert_eq!(cuda!(ctx_pop_current(&mut 0)), 0);
    assert_eq!(cuda!(mem_host_alloc(&mut pinned, 8, 3)), 0);
    let place: *mut c_void = registered.as_mut_ptr().cast();
    assert_eq!(cuda!(mem_host_register(place, 8, 3)), 0);
    let near = rig.words(1);
    assert_eq!(batch(stream, &[wait(gate.at(0), 1, 0)]), 0);
    // What a destroyed stream still does counts, too.
    assert_eq!(cuda!(stream_destroy(stream)), 0);
    rig.control.patience(Duration::from_millis(10));
    // Nothing runs on the other GPU.
    assert_eq!(cuda!(mem_free(far)), 0);
    assert_eq!(rig.control.stalled(), 0);
    for status in
        [cuda!(mem_free(near.addr)), cuda!(mem_free_host(pinned)), cuda!(mem_host_unregister(place))]
    {
        assert_eq!(status, 702);
    }
    assert_eq!(rig.control.stalled(), 3);
    rig.control.patience(Duration::from_secs(60));
    std::thread::scope(|scope| {
        let (gate, control) = (&gate, &rig.control);
        scope.spawn(move || {
            eventually("stalled", || control.stalled() == 4);
            gate.set(0, 1);
        });
        near.free();
    });
    assert_eq!([cuda!(mem_free_host(pinned)), cuda!(mem_host_unregister(place))], [0, 0]);
    assert_eq!(rig.control.stalled(), 4);
    gate.free();
    destroy_context(other);
    rig.nothing_is_left();
}
