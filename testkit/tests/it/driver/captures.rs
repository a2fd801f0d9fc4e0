use super::*;

pub(super) const GLOBAL: u32 = 0;
pub(super) const THREAD_LOCAL: u32 = 1;
pub(super) const RELAXED: u32 = 2;

pub(super) fn begin(stream: Handle, mode: u32) {
    assert_eq!(cuda!(stream_begin_capture(stream, mode)), 0);
}

/// The graph of a capture that was not spoiled.
pub(super) fn end(stream: Handle) -> Handle {
    let mut graph = 0;
    assert_eq!(cuda!(stream_end_capture(stream, &mut graph)), 0);
    graph
}

/// State, graph, and last node.
pub(super) fn info(stream: Handle) -> (u32, Handle, Option<Handle>) {
    let (mut state, mut id, mut graph, mut count) = (9, 0, 0, 0);
    let mut dependencies = std::ptr::null();
    let status = cuda!(stream_get_capture_info(
        stream,
        &mut state,
        &mut id,
        &mut graph,
        &mut dependencies,
        &mut count
    ));
    assert_eq!(status, 0);
    assert_eq!(id != 0, state == 1);
    // SAFETY: the driver says that there is one.
    let last = (count == 1).then(|| unsafe { dependencies.read() });
    (state, graph, last)
}

#[test]
fn what_is_captured_does_not_run() {
    let rig = Rig::new();
    let (words, stream) = (rig.words(1), rig.stream());
    assert_eq!(info(stream), (0, 0, None));
    begin(stream, THREAD_LOCAL);
    let (state, graph, none) = info(stream);
    assert_eq!((state, none), (1, None));
    assert_eq!(batch(stream, &[write(words.at(0), 1)]), 0);
    let (_, _, first) = info(stream);
    assert_eq!(batch(stream, &[write(words.at(0), 2)]), 0);
    let (_, same, second) = info(stream);
    assert!(first.is_some() && second.is_some() && first != second);
    let null = std::ptr::null_mut::<c_void>();
    let mut state = 9;
    let only_state = cuda!(stream_get_capture_info(
        stream,
        &mut state,
        null.cast(),
        null.cast(),
        null.cast(),
        null.cast()
    ));
    assert_eq!((only_state, state), (0, 1));
    let ended = end(stream);
    assert_eq!((graph, ended), (same, graph));
    assert_eq!(cuda!(stream_synchronize(stream)), 0);
    assert_eq!((words.get(0), rig.control.memops()), (0, 0));
    assert_eq!(cuda!(graph_destroy(graph)), 0);
    assert_eq!(cuda!(graph_destroy(graph)), INVALID_HANDLE);
}

#[test]
fn captures_begin_and_end_once() {
    let rig = Rig::new();
    let stream = rig.stream();
    let mut graph = 0;
    assert_eq!(cuda!(stream_end_capture(stream, &mut graph)), 401);
    assert_eq!(cuda!(stream_begin_capture(0, RELAXED)), CAPTURE_UNSUPPORTED);
    assert_eq!(cuda!(stream_begin_capture(stream, 3)), INVALID_VALUE);
    begin(stream, GLOBAL);
    assert_eq!(cuda!(stream_begin_capture(stream, GLOBAL)), 401);
    let elsewhere = std::thread::spawn(move || cuda!(stream_end_capture(stream, &mut 0)));
    assert_eq!(elsewhere.join().unwrap(), 908);
    assert_eq!(cuda!(graph_destroy(end(stream))), 0);
    begin(stream, RELAXED);
    let elsewhere = std::thread::spawn(move || end(stream));
    assert_eq!(cuda!(graph_destroy(elsewhere.join().unwrap())), 0);
    assert_eq!(rig.control.alive().graphs, 0);
}

/// Whether the capture that an action came into is spoiled now. It is ended.
fn spoils(stream: Handle, mode: u32, action: &dyn Fn() -> u32) -> bool {
    begin(stream, mode);
    let status = action();
    let (state, ..) = info(stream);
    let mut graph = 0;
    let ended = cuda!(stream_end_capture(stream, &mut graph));
    match state {
        1 => {
            assert_eq!((status, ended, cuda!(graph_destroy(graph))), (0, 0, 0));
            false
        }
        _ => {
            assert_eq!((status, ended, graph), (CAPTURE_UNSUPPORTED, CAPTURE_INVALIDATED, 0));
            true
        }
    }
}

/// With another capture mode of this thread.
fn with_mode(mut mode: u32, action: impl FnOnce() -> u32) -> u32 {
    assert_eq!(cuda!(thread_exchange_stream_capture_mode(&mut mode)), 0);
    let status = action();
    assert_eq!(cuda!(thread_exchange_stream_capture_mode(&mut mode)), 0);
    status
}

#[test]
fn unsafe_calls_spoil_captures_that_mind() {
    let rig = Rig::new();
    let (stream, other) = (rig.stream(), rig.stream());
    let context = rig.context;
    let alloc = || {
        let mut addr = 0;
        match cuda!(mem_alloc(&mut addr, 8)) {
            0 => cuda!(mem_free(addr)),
            failed => failed,
        }
    };
    let elsewhere = |mode| {
        std::thread::scope(|scope| {
            let thread = scope.spawn(|| {
                assert_eq!(cuda!(ctx_push_current(context)), 0);
                with_mode(mode, alloc)
            });
            thread.join().unwrap()
        })
    };
    for (mode, here, here_relaxed, there, there_local, there_relaxed) in [
        (GLOBAL, true, false, true, false, false),
        (THREAD_LOCAL, true, false, false, false, false),
        (RELAXED, false, false, false, false, false),
    ] {
        assert_eq!(spoils(stream, mode, &alloc), here, "{mode}");
        assert_eq!(spoils(stream, mode, &|| with_mode(THREAD_LOCAL, alloc)), here, "{mode}");
        assert_eq!(spoils(stream, mode, &|| with_mode(RELAXED, alloc)), here_relaxed, "{mode}");
        assert_eq!(spoils(stream, mode, &|| elsewhere(GLOBAL)), there, "{mode}");
        assert_eq!(spoils(stream, mode, &|| elsewhere(THREAD_LOCAL)), there_local, "{mode}");
        assert_eq!(spoils(stream, mode, &|| elsewhere(RELAXED)), there_relaxed, "{mode}");
        assert_eq!(spoils(stream, mode, &|| cuda!(stream_query(other))), here, "{mode}");
    }
    // With one's own mode relaxed, too.
    let mut event = 0;
    assert_eq!(cuda!(event_create(&mut event, 2)), 0);
    let actions: [&dyn Fn() -> u32; 5] = [
        &|| cuda!(stream_query(stream)),
        &|| cuda!(stream_synchronize(stream)),
        &|| cuda!(stream_destroy(stream)),
        &|| cuda!(event_record(event, stream)),
        &|| cuda!(stream_wait_event(stream, event, 0)),
    ];
    for action in actions {
        assert!(spoils(stream, RELAXED, &|| with_mode(RELAXED, action)));
    }
    assert_eq!(cuda!(event_query(event)), 0);
    assert_eq!(cuda!(stream_query(stream)), 0);
    let mut wrong = 3;
    assert_eq!(cuda!(thread_exchange_stream_capture_mode(&mut wrong)), INVALID_VALUE);
}

#[test]
fn a_spoiled_capture_takes_nothing_more() {
    let rig = Rig::new();
    let (words, stream) = (rig.words(1), rig.stream());
    begin(stream, RELAXED);
    assert_eq!(cuda!(stream_query(stream)), CAPTURE_UNSUPPORTED);
    assert_eq!(batch(stream, &[write(words.at(0), 1)]), CAPTURE_INVALIDATED);
    let mut pageable = [0_u64; 1];
    assert_eq!(cuda!(stream_end_capture(stream, &mut 0)), CAPTURE_INVALIDATED);
    begin(stream, RELAXED);
    let to = pageable.as_mut_ptr().cast();
    assert_eq!(cuda!(memcpy_to_host_async(to, words.at(0), 8, stream)), CAPTURE_UNSUPPORTED);
    assert_eq!(cuda!(stream_end_capture(stream, &mut 0)), CAPTURE_INVALIDATED);
    words.free();
    assert_eq!(cuda!(stream_destroy(stream)), 0);
    rig.nothing_is_left();
}

#[test]
fn the_legacy_stream_spoils_captures_of_blocking_streams() {
    let rig = Rig::new();
    let words = rig.words(1);
    let (mut blocking, other) = (0, rig.stream());
    assert_eq!(cuda!(stream_create(&mut blocking, 0, 0)), 0);
    begin(other, RELAXED);
    assert_eq!(batch(0, &[write(words.at(0), 1)]), 0);
    begin(blocking, RELAXED);
    assert_eq!(batch(0, &[write(words.at(0), 2)]), 906);
    assert_eq!(cuda!(stream_end_capture(blocking, &mut 0)), CAPTURE_INVALIDATED);
    assert_eq!(cuda!(graph_destroy(end(other))), 0);
}

#[test]
fn captures_left_behind_harm_no_later_test() {
    let rig = Rig::new();
    begin(rig.stream(), GLOBAL);
    drop(rig);
    let rig = Rig::new();
    rig.words(1).free();
    rig.nothing_is_left();
}
