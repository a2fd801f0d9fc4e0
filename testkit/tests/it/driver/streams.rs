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
