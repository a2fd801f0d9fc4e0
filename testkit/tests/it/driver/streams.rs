//! Streams, memory operations, and full streams.

use super::*;

#[test]
fn work_runs_in_order_and_destroyed_streams_finish() {
    let rig = Rig::new();
    let (words, stream, counted) = (rig.words(3), rig.stream(), AtomicU64::new(0));
    assert_eq!(batch(stream, &[wait(words.at(0), 1, 0)]), 0);
    assert_eq!(cuda!(launch_host_func(stream, count, counter(&counted))), 0);
    assert_eq!(batch(stream, &[write(words.at(1), 1)]), 0);
    assert_eq!(cuda!(stream_destroy(stream)), 0);
    assert_eq!(cuda!(stream_destroy(stream)), INVALID_HANDLE);
    assert_eq!(cuda!(stream_query(stream)), INVALID_HANDLE);
    std::thread::sleep(Duration::from_millis(5));
    assert_eq!((counted.load(Ordering::SeqCst), words.get(1)), (0, 0));
    words.set(0, 1);
    eventually("finished", || words.get(1) == 1);
    assert_eq!(counted.load(Ordering::SeqCst), 1);
    words.free();
    rig.nothing_is_left();
}

#[test]
fn streams_have_flags_and_a_context() {
    let rig = Rig::new();
    let (mut stream, mut context) = (0, 0);
    assert_eq!(cuda!(stream_create(&mut stream, 2, 0)), INVALID_VALUE);
    assert_eq!(cuda!(stream_create(std::ptr::null_mut(), 1, 0)), INVALID_VALUE);
    assert_eq!(cuda!(stream_create(&mut stream, 0, -9)), 0);
    for handle in [stream, 0, 1, 2] {
        assert_eq!(cuda!(stream_get_ctx(handle, &mut context)), 0);
        assert_eq!(context, rig.context);
    }
    assert_eq!(cuda!(stream_get_ctx(5, &mut context)), INVALID_HANDLE);
    assert_eq!(cuda!(stream_destroy(0)), INVALID_HANDLE);
    assert_eq!(cuda!(stream_destroy(stream)), 0);
    rig.nothing_is_left();
}

#[test]
fn default_streams_are_the_contexts_and_the_threads() {
    let rig = Rig::new();
    let words = rig.words(2);
    assert_eq!(batch(0, &[wait(words.at(0), 1, 0)]), 0);
    assert_eq!(batch(2, &[wait(words.at(1), 1, 0)]), 0);
    let context = rig.context;
    std::thread::scope(|scope| {
        scope.spawn(|| {
            assert_eq!(cuda!(ctx_push_current(context)), 0);
            assert_eq!([0, 1, 2].map(|stream| cuda!(stream_query(stream))), [NOT_READY, NOT_READY, 0]);
        });
    });
    assert_eq!([0, 1, 2].map(|stream| cuda!(stream_query(stream))), [NOT_READY; 3]);
    words.set(0, 1);
    assert_eq!(cuda!(stream_synchronize(1)), 0);
    assert_eq!(cuda!(stream_query(2)), NOT_READY);
    words.set(1, 1);
    assert_eq!(cuda!(stream_synchronize(2)), 0);
}

#[test]
fn events_mark_places_in_streams() {
    let rig = Rig::new();
    let (words, streams) = (rig.words(3), [rig.stream(), rig.stream()]);
    let mut event = 0;
    assert_eq!(cuda!(event_create(&mut event, 4)), INVALID_VALUE);
    assert_eq!(cuda!(event_create(&mut event, 2)), 0);
    assert_eq!([cuda!(event_query(event)), cuda!(event_synchronize(event))], [0, 0]);
    assert_eq!(cuda!(stream_wait_event(streams[1], event, 0)), 0);
    assert_eq!(batch(streams[0], &[wait(words.at(0), 1, 0)]), 0);
    assert_eq!(cuda!(event_record(event, streams[0])), 0);
    assert_eq!(batch(streams[0], &[wait(words.at(0), 2, 0)]), 0);
    assert_eq!(cuda!(stream_wait_event(streams[1], event, 0)), 0);
    assert_eq!(batch(streams[1], &[write(words.at(1), 1)]), 0);
    std::thread::sleep(Duration::from_millis(5));
    assert_eq!((cuda!(event_query(event)), words.get(1)), (NOT_READY, 0));
    words.set(0, 1);
    assert_eq!(cuda!(event_synchronize(event)), 0);
    assert_eq!(cuda!(stream_synchronize(streams[1])), 0);
    assert_eq!((cuda!(event_query(event)), words.get(1)), (0, 1));
    assert_eq!(cuda!(stream_query(streams[0])), NOT_READY);
    assert_eq!(cuda!(event_destroy(event)), 0);
    for status in [
        cuda!(event_query(event)),
        cuda!(event_synchronize(event)),
        cuda!(event_record(event, streams[0])),
        cuda!(stream_wait_event(streams[0], event, 0)),
        cuda!(event_destroy(event)),
    ] {
        assert_eq!(status, INVALID_HANDLE);
    }
    words.set(0, 2);
    assert_eq!(cuda!(stream_synchronize(streams[0])), 0);
}

#[test]
fn events_belong_to_their_context() {
    let rig = Rig::new();
    let (mut event, other) = (0, application_context(0));
    assert_eq!(cuda!(event_create(&mut event, 0)), 0);
    assert_eq!(cuda!(ctx_push_current(other)), 0);
    let stream = rig.stream();
    assert_eq!(cuda!(event_record(event, stream)), INVALID_HANDLE);
    assert_eq!(cuda!(stream_wait_event(stream, event, 0)), 0);
    let mut popped = 0;
    assert_eq!(cuda!(ctx_pop_current(&mut popped)), 0);
    destroy_context(other);
}

#[test]
fn bytes_are_copied_and_filled() {
    let rig = Rig::new();
    let (words, stream) = (rig.words(8), rig.stream());
    let mut from = [7_u64, 8, 9];
    let mut to = [0_u64; 3];
    // Pageable memory is read before the call returns, and written.
    assert_eq!(batch(stream, &[wait(words.at(7), 1, 0)]), 0);
    assert_eq!(cuda!(memcpy_to_device_async(words.at(0), from.as_ptr().cast(), 24, stream)), 0);
    from = [0; 3];
    assert_eq!(words.get(0), 0);
    words.set(7, 1);
    assert_eq!(cuda!(memcpy_async(words.at(3), words.at(0), 24, stream)), 0);
    assert_eq!(cuda!(memcpy_to_host_async(to.as_mut_ptr().cast(), words.at(3), 24, stream)), 0);
    assert_eq!((from, to), ([0; 3], [7, 8, 9]));
    assert_eq!(cuda!(memset_d32_async(words.at(1), 0xabcd_ef01, 3, stream)), 0);
    assert_eq!(cuda!(stream_synchronize(stream)), 0);
    assert_eq!((words.get(1), words.get(2)), (0xabcd_ef01_abcd_ef01, 0xabcd_ef01));

    // Registered memory: in the stream's order.
    let mut pinned = vec![5_u64; 2];
    let place: *mut u64 = pinned.as_mut_ptr();
    assert_eq!(cuda!(mem_host_register(place.cast(), 16, 3)), 0);
    assert_eq!(batch(stream, &[wait(words.at(7), 2, 0)]), 0);
    assert_eq!(cuda!(memcpy_to_host_async(place.cast(), words.at(1), 8, stream)), 0);
    words.set(1, 55);
    words.set(7, 2);
    assert_eq!(cuda!(stream_synchronize(stream)), 0);
    assert_eq!(cuda!(mem_host_unregister(place.cast())), 0);
    assert_eq!(pinned, [55, 5]);

    for status in [
        cuda!(memcpy_to_device_async(words.at(6), from.as_ptr().cast(), 24, stream)),
        cuda!(memcpy_to_host_async(to.as_mut_ptr().cast(), 8, 24, stream)),
        cuda!(memcpy_async(words.at(6), words.at(0), 24, stream)),
        cuda!(memset_d32_async(words.at(0) + 2, 0, 1, stream)),
        cuda!(memset_d32_async(words.at(0), 0, usize::MAX, stream)),
        cuda!(memset_d32_async(words.at(0), 0, 17, stream)),
    ] {
        assert_eq!(status, INVALID_VALUE);
    }
    assert_eq!(cuda!(memcpy_to_device_async(0, std::ptr::null(), 0, stream)), 0);
}

#[test]
fn bytes_go_from_one_gpu_to_the_other() {
    let rig = Rig::new();
    let (near, stream, other) = (rig.words(1), rig.stream(), application_context(1));
    assert_eq!(cuda!(ctx_push_current(other)), 0);
    let far = rig.words(1);
    let mut popped = 0;
    assert_eq!(cuda!(ctx_pop_current(&mut popped)), 0);
    near.set(0, 6);
    assert_eq!(cuda!(memcpy_peer_async(far.addr, other, near.addr, rig.context, 8, stream)), 0);
    assert_eq!(cuda!(stream_synchronize(stream)), 0);
    assert_eq!(far.get(0), 6);
    assert_eq!(cuda!(memcpy_peer_async(far.addr, 3, near.addr, rig.context, 8, stream)), INVALID_CONTEXT);
    destroy_context(other);
}

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
        write(at, 0).with_flags(2),
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
fn what_the_device_lacks_is_not_supported() {
    let rig = Rig::new();
    let (words, stream) = (rig.words(1), rig.stream());
    let flush = MemOp { operation: MemOp::FLUSH, ..MemOp::default() };
    let flushing = wait(words.at(0), 0, 1 << 30);
    let narrow = |condition| MemOp::word(MemOp::WAIT_32, words.at(0), 0, condition);
    assert_eq!([batch(stream, &[flush]), batch(stream, &[flushing])], [NOT_SUPPORTED; 2]);
    rig.control.attribute(0, 98, 1);
    assert_eq!([batch(stream, &[flush]), batch(stream, &[flushing])], [0; 2]);
    rig.control.attribute(0, 122, 0);
    assert_eq!([batch(stream, &[write(words.at(0), 1)]), batch(stream, &[narrow(0)])], [NOT_SUPPORTED, 0]);
    rig.control.attribute(0, 123, 0);
    assert_eq!([batch(stream, &[narrow(NOR)]), batch(stream, &[narrow(EQUAL)])], [NOT_SUPPORTED, 0]);
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
fn narrow_writes_leave_the_other_half() {
    let rig = Rig::new();
    let (words, stream) = (rig.words(1), rig.stream());
    words.set(0, u64::MAX);
    assert_eq!(batch(stream, &[MemOp::word(MemOp::WRITE_32, words.at(0) + 4, (9 << 32) | 3, 0)]), 0);
    assert_eq!(cuda!(stream_synchronize(stream)), 0);
    assert_eq!(words.get(0), (3 << 32) | u64::from(u32::MAX));
}

#[test]
fn a_write_without_barrier_shows_when_something_follows() {
    let rig = Rig::new();
    let words = rig.words(3);
    let quiet = write(words.at(0), 1).with_flags(MemOp::NO_BARRIER);
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
fn two_streams_play_ping_pong() {
    const ROUNDS: u64 = 500;
    let rig = Rig::new();
    let words = rig.words(2);
    let mut host = [0_u64; 1];
    let place = host.as_mut_ptr().cast();
    assert_eq!(cuda!(mem_host_register(place, 8, 3)), 0);
    let pong = place.expose_provenance() as u64;
    let streams = [rig.stream(), rig.stream()];
    for round in 1..=ROUNDS {
        assert_eq!(batch(streams[0], &[write(words.at(0), round), wait(pong, round, 0)]), 0);
        assert_eq!(batch(streams[1], &[wait(words.at(0), round, 0), write(pong, round)]), 0);
    }
    for stream in streams {
        assert_eq!(cuda!(stream_synchronize(stream)), 0);
        assert_eq!(cuda!(stream_destroy(stream)), 0);
    }
    assert_eq!((words.get(0), rig.control.memops(), rig.control.blocked()), (ROUNDS, 4 * ROUNDS, 0));
    assert_eq!(cuda!(mem_host_unregister(place)), 0);
    assert_eq!(host, [ROUNDS]);
    words.free();
    rig.nothing_is_left();
}

#[test]
fn memory_freed_under_running_work_fails_the_context() {
    let rig = Rig::new();
    rig.control.frees_wait(false);
    let (words, stream, other) = (rig.words(1), rig.stream(), rig.stream());
    assert_eq!(batch(stream, &[wait(words.at(0), 1, 0)]), 0);
    words.free();
    assert_eq!(cuda!(stream_synchronize(stream)), ILLEGAL_ADDRESS);
    assert_eq!(cuda!(stream_query(other)), ILLEGAL_ADDRESS);
    assert_eq!(batch(other, &[MemOp::barrier()]), ILLEGAL_ADDRESS);
    // Destroying still works.
    assert_eq!(cuda!(stream_destroy(stream)), 0);
}

#[test]
fn a_destroyed_context_ends_its_waits() {
    let rig = Rig::new();
    let (words, other) = (rig.words(1), application_context(0));
    assert_eq!(cuda!(ctx_push_current(other)), 0);
    let stream = rig.stream();
    assert_eq!(batch(stream, &[wait(words.at(0), 1, 0)]), 0);
    let mut popped = 0;
    assert_eq!(cuda!(ctx_pop_current(&mut popped)), 0);
    let threads = rig.control.threads();
    destroy_context(other);
    eventually("over", || rig.control.threads() < threads);
    assert_eq!(words.get(0), 0);
    words.free();
    rig.nothing_is_left();
}

trait WithFlags {
    fn with_flags(self, flags: u32) -> Self;
}

impl WithFlags for MemOp {
    fn with_flags(self, flags: u32) -> Self {
        Self { flags, ..self }
    }
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
fn blocked_calls_end_with_the_configured_timeout() {
    let rig = Rig::new();
    let (words, stream, counted) = (rig.words(1), rig.stream(), AtomicU64::new(0));
    for _ in 0..55 {
        assert_eq!(batch(stream, &[wait(words.at(0), 1, 0)]), 0);
        assert_eq!(cuda!(launch_host_func(stream, count, counter(&counted))), 0);
    }
    rig.control.patience(Duration::from_millis(20));
    // Of host functions there may be fewer.
    assert_eq!(cuda!(launch_host_func(stream, count, counter(&counted))), 702);
    for _ in 110..1024 {
        assert_eq!(batch(stream, &[MemOp::barrier()]), 0);
    }
    assert_eq!(rig.control.blocked(), 1);
    assert_eq!(batch(stream, &[MemOp::barrier()]), 702);
    assert_eq!(cuda!(stream_synchronize(stream)), 702);
    assert_eq!(rig.control.blocked(), 2);
    rig.control.patience(Duration::from_secs(60));
    words.set(0, 1);
    assert_eq!(cuda!(stream_synchronize(stream)), 0);
    // What was refused never ran.
    assert_eq!((counted.load(Ordering::SeqCst), rig.control.memops()), (55, 969));
    assert_eq!(batch(stream, &[MemOp::barrier()]), 0);
    assert_eq!(cuda!(stream_synchronize(stream)), 0);
}
