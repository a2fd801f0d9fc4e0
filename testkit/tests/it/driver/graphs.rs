//! Captures, kernels, and graphs.

use super::*;

use gdrcopy::cuda::raw::layout::{KernelNodeParams, MemOpNodeParams};
use gdsync_testkit::driver::kernel;

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
fn unsafe_calls_invalidate_captures_by_their_mode() {
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
fn an_invalidated_capture_takes_no_more_work() {
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
fn the_legacy_stream_invalidates_captures_of_blocking_streams() {
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

/// Adds its second parameter to the word that the first one names.
fn add(params: &[*mut c_void]) {
    // SAFETY: as registered below.
    let addr = unsafe { params[0].cast::<u64>().read() };
    // SAFETY: as above.
    let value = unsafe { params[1].cast::<u32>().read() };
    let word = std::ptr::with_exposed_provenance_mut(usize::try_from(addr).unwrap());
    // SAFETY: the tests pass words of GPU memory.
    unsafe { AtomicU64::from_ptr(word) }.fetch_add(value.into(), Ordering::SeqCst);
}

/// A module with the kernels of these tests.
pub(super) struct Module {
    pub(super) module: Handle,
    pub(super) add: Handle,
    pub(super) fails: Handle,
}

impl Module {
    pub(super) fn load() -> Self {
        kernel("add", &[8, 4], add);
        kernel("fails", &[], |_| panic!("a kernel that fails, as it should"));
        let (mut module, mut functions) = (0, [0; 2]);
        assert_eq!(cuda!(module_load_data(&mut module, c"image".as_ptr().cast())), 0);
        for (function, name) in functions.iter_mut().zip([c"add", c"fails"]) {
            assert_eq!(cuda!(module_get_function(function, module, name.as_ptr())), 0);
        }
        let [add, fails] = functions;
        Self { module, add, fails }
    }
}

/// Launches `add`. The parameters die with the call.
pub(super) fn launch_add(function: Handle, stream: Handle, mut addr: u64, mut value: u32) -> u32 {
    let mut params = [std::ptr::from_mut(&mut addr).cast(), std::ptr::from_mut(&mut value).cast::<c_void>()];
    let none = std::ptr::null_mut();
    let status = cuda!(launch_kernel(function, 1, 1, 1, 32, 1, 1, 0, stream, params.as_mut_ptr(), none));
    (addr, value) = (u64::MAX, u32::MAX);
    std::hint::black_box((addr, value));
    status
}

#[test]
fn kernels_get_copies_of_their_parameters() {
    let rig = Rig::new();
    let (words, stream, module) = (rig.words(2), rig.stream(), Module::load());
    assert_eq!(batch(stream, &[wait(words.at(1), 1, 0)]), 0);
    for value in 1..=10 {
        assert_eq!(launch_add(module.add, stream, words.at(0), value), 0);
    }
    words.set(1, 1);
    assert_eq!(cuda!(stream_synchronize(stream)), 0);
    assert_eq!(words.get(0), 55);
    assert_eq!(cuda!(func_load(module.add)), 0);
    assert_eq!(cuda!(stream_destroy(stream)), 0);
    words.free();
    assert_eq!(cuda!(module_unload(module.module)), 0);
    rig.nothing_is_left();
    for status in
        [cuda!(func_load(module.add)), cuda!(module_unload(module.module)), launch_add(module.add, 0, 0, 0)]
    {
        assert_eq!(status, INVALID_HANDLE);
    }
}

#[test]
fn modules_come_and_go_when_the_gpu_is_idle() {
    let rig = Rig::new();
    let (gate, stream, module) = (rig.words(1), rig.stream(), Module::load());
    assert_eq!(batch(stream, &[wait(gate.at(0), 1, 0)]), 0);
    rig.control.patience(Duration::from_millis(10));
    let mut another = 0;
    let mut load = || cuda!(module_load_data(&mut another, c"image".as_ptr().cast()));
    assert_eq!([load(), cuda!(module_unload(module.module))], [702; 2]);
    assert_eq!((rig.control.stalled(), rig.control.alive().modules), (2, 1));
    // Its kernels run meanwhile.
    assert_eq!(launch_add(module.add, 0, gate.at(0), 0), 0);
    rig.control.frees_wait(false);
    assert_eq!(load(), 0);
    rig.control.frees_wait(true);
    rig.control.patience(Duration::from_secs(60));
    gate.set(0, 1);
    assert_eq!([cuda!(module_unload(module.module)), cuda!(module_unload(another))], [0; 2]);
    assert_eq!(cuda!(stream_destroy(stream)), 0);
    gate.free();
    rig.nothing_is_left();
}

#[test]
fn wrong_modules_kernels_and_launches_are_refused() {
    let rig = Rig::new();
    let (stream, module) = (rig.stream(), Module::load());
    let mut handle = 0;
    assert_eq!(cuda!(module_get_function(&mut handle, module.module, c"unheard of".as_ptr())), 500);
    assert_eq!(cuda!(module_get_function(&mut handle, 5, c"add".as_ptr())), INVALID_HANDLE);
    assert_eq!(cuda!(module_load_data(&mut handle, std::ptr::null())), 200);
    let none = std::ptr::null_mut();
    let launch = |grid, block, params, extra, stream| {
        cuda!(launch_kernel(module.add, grid, 1, 1, block, 1, 1, 0, stream, params, extra))
    };
    let mut nulls = [std::ptr::null_mut(); 2];
    let params = nulls.as_mut_ptr();
    for status in [
        launch(0, 1, params, none, stream),
        launch(1, 1025, params, none, stream),
        launch(1, 1, none, none, stream),
        launch(1, 1, params, none, stream),
        launch(1, 1, params, params, stream),
    ] {
        assert_eq!(status, INVALID_VALUE);
    }
    assert_eq!(launch(1, 1, params, none, 77), INVALID_HANDLE);
    let other = application_context(0);
    assert_eq!(cuda!(ctx_push_current(other)), 0);
    assert_eq!(launch_add(module.add, 0, 0, 0), INVALID_HANDLE, "a function of another context");
    assert_eq!(cuda!(ctx_pop_current(&mut handle)), 0);
    destroy_context(other);
}

#[test]
fn a_kernel_that_fails_fails_its_context() {
    let rig = Rig::new();
    let (words, stream, module) = (rig.words(1), rig.stream(), Module::load());
    let none = std::ptr::null_mut();
    assert_eq!(cuda!(launch_kernel(module.fails, 1, 1, 1, 1, 1, 1, 0, stream, none, none)), 0);
    eventually("failed", || cuda!(stream_query(stream)) == LAUNCH_FAILED);
    assert_eq!(batch(stream, &[write(words.at(0), 1)]), LAUNCH_FAILED);
    assert_eq!(cuda!(stream_synchronize(stream)), LAUNCH_FAILED);
    assert_eq!(words.get(0), 0);
}

/// Captures; gives the graph and the node after each action.
fn capture<const N: usize>(stream: Handle, actions: [&dyn Fn() -> u32; N]) -> (Handle, [Handle; N]) {
    begin(stream, RELAXED);
    let nodes = actions.map(|action| {
        assert_eq!(action(), 0);
        info(stream).2.unwrap()
    });
    (end(stream), nodes)
}

fn instantiate(graph: Handle) -> Handle {
    let mut exec = 0;
    assert_eq!(cuda!(graph_instantiate(&mut exec, graph, 0)), 0);
    exec
}

fn set_ops(exec: Handle, node: Handle, ops: &[MemOp]) -> u32 {
    let mut ops = ops.to_vec();
    let count = u32::try_from(ops.len()).unwrap();
    let params = MemOpNodeParams { context: 0, count, ops: ops.as_mut_ptr(), flags: 0 };
    cuda!(graph_exec_mem_op_node_set_params(exec, node, &params))
}

fn set_add(exec: Handle, node: Handle, function: Handle, mut addr: u64, mut value: u32, blocks: u32) -> u32 {
    let mut params = [std::ptr::from_mut(&mut addr).cast(), std::ptr::from_mut(&mut value).cast::<c_void>()];
    let (grid, block, none) = ([blocks, 1, 1], [1, 1, 1], std::ptr::null_mut());
    let params = KernelNodeParams {
        function,
        grid,
        block,
        shared: 0,
        params: params.as_mut_ptr(),
        extra: none,
        kernel: 0,
        context: 0,
    };
    cuda!(graph_exec_kernel_node_set_params(exec, node, &params))
}

#[test]
fn a_graph_replays_with_the_parameters_of_the_launch() {
    let rig = Rig::new();
    let (words, stream, module, counted) = (rig.words(4), rig.stream(), Module::load(), AtomicU64::new(0));
    let (gate, sum, out) = (words.at(0), words.at(1), words.at(2));
    let (graph, nodes) = capture(
        stream,
        [
            &|| batch(stream, &[wait(gate, 1, EQUAL), write(out, 1)]),
            &|| launch_add(module.add, stream, sum, 1),
            &|| cuda!(launch_host_func(stream, count, counter(&counted))),
            &|| cuda!(memcpy_async(words.at(3), sum, 8, stream)),
            &|| cuda!(memset_d32_async(out + 4, 1, 1, stream)),
        ],
    );
    let exec = instantiate(graph);
    for round in 1..=5_u32 {
        let value = u64::from(round);
        assert_eq!(set_ops(exec, nodes[0], &[wait(gate, value, 0), write(out, 10 * value)]), 0);
        assert_eq!(set_add(exec, nodes[1], module.add, sum, round, 1), 0);
        assert_eq!(cuda!(graph_launch(exec, stream)), 0);
    }
    for (round, sum) in [(1, 1), (2, 3), (5, 15)] {
        words.set(0, round);
        eventually("replayed", || words.get(3) == sum && counted.load(Ordering::SeqCst) == round);
        eventually("written", || words.get(2) == (1 << 32) | (10 * round));
    }
    // Of the graph itself nothing was changed.
    let other = instantiate(graph);
    words.set(0, 1);
    assert_eq!(cuda!(graph_launch(other, stream)), 0);
    assert_eq!(cuda!(stream_synchronize(stream)), 0);
    assert_eq!((words.get(1), words.get(2), rig.control.memops()), (16, (1 << 32) | 1, 12));
    for exec in [exec, other] {
        assert_eq!(cuda!(graph_exec_destroy(exec)), 0);
    }
    assert_eq!(cuda!(graph_destroy(graph)), 0);
    assert_eq!(cuda!(module_unload(module.module)), 0);
    assert_eq!(cuda!(stream_destroy(stream)), 0);
    words.free();
    rig.nothing_is_left();
}

#[test]
fn nodes_keep_their_kind() {
    let rig = Rig::new();
    let (words, stream, module) = (rig.words(2), rig.stream(), Module::load());
    let at = words.at(0);
    let ops = [wait(at, 1, 0), write(at, 1), MemOp::barrier()];
    let (graph, [batch_node, kernel_node]) =
        capture(stream, [&|| batch(stream, &ops), &|| launch_add(module.add, stream, at, 1)]);
    let exec = instantiate(graph);
    let with = |index: usize, op: MemOp| {
        let mut ops = ops;
        ops[index] = op;
        set_ops(exec, batch_node, &ops)
    };
    assert_eq!(with(0, wait(words.at(1), 9, NOR)), 0);
    assert_eq!(with(1, write(words.at(1), 9)), 0);
    for status in [
        set_ops(exec, batch_node, &ops[..2]),
        with(0, write(at, 1)),
        with(0, MemOp::word(MemOp::WAIT_32, at, 1, 0)),
        with(1, MemOp { flags: MemOp::NO_BARRIER, ..write(at, 1) }),
        with(2, MemOp { barrier: 1, ..MemOp::barrier() }),
        with(1, write(8, 1)),
        set_ops(exec, kernel_node, &ops),
        set_ops(exec, 5, &ops),
        set_add(exec, batch_node, module.add, at, 1, 1),
        set_add(exec, kernel_node, module.add, at, 1, 0),
    ] {
        assert_eq!(status, INVALID_VALUE);
    }
    assert_eq!(set_add(exec, kernel_node, 5, at, 1, 1), INVALID_HANDLE);
    assert_eq!(set_ops(5, batch_node, &ops), INVALID_HANDLE);
    assert_eq!([set_ops(exec, batch_node, &ops), set_add(exec, kernel_node, module.add, at, 4, 1)], [0, 0]);
    // Without the graph its nodes have no names.
    assert_eq!(cuda!(graph_destroy(graph)), 0);
    assert_eq!(set_ops(exec, batch_node, &ops), INVALID_VALUE);
    words.set(0, 1);
    assert_eq!(cuda!(graph_launch(exec, stream)), 0);
    assert_eq!(cuda!(stream_synchronize(stream)), 0);
    assert_eq!(words.get(0), 5);
}

#[test]
fn launches_of_one_graph_follow_each_other() {
    let rig = Rig::new();
    let (words, streams) = (rig.words(2), [rig.stream(), rig.stream()]);
    let (graph, [node]) = capture(streams[0], [&|| batch(streams[0], &[wait(words.at(0), 1, 0)])]);
    let exec = instantiate(graph);
    assert_eq!(cuda!(graph_launch(exec, streams[0])), 0);
    assert_eq!(set_ops(exec, node, &[wait(words.at(1), 0, 0)]), 0);
    assert_eq!(cuda!(graph_launch(exec, streams[1])), 0);
    // An executable graph may go before its launches are over.
    assert_eq!(cuda!(graph_exec_destroy(exec)), 0);
    assert_eq!(cuda!(graph_launch(exec, streams[0])), INVALID_HANDLE);
    std::thread::sleep(Duration::from_millis(5));
    assert_eq!(streams.map(|stream| cuda!(stream_query(stream))), [NOT_READY; 2]);
    words.set(0, 1);
    assert_eq!(streams.map(|stream| cuda!(stream_synchronize(stream))), [0; 2]);
    assert_eq!(rig.control.memops(), 2);
}

#[test]
fn graphs_are_not_captured_and_must_exist() {
    let rig = Rig::new();
    let (words, stream) = (rig.words(1), rig.stream());
    let (graph, _) = capture(stream, [&|| batch(stream, &[write(words.at(0), 1)])]);
    let exec = instantiate(graph);
    begin(stream, RELAXED);
    assert_eq!(cuda!(graph_launch(exec, stream)), CAPTURE_UNSUPPORTED);
    assert_eq!(cuda!(stream_end_capture(stream, &mut 0)), CAPTURE_INVALIDATED);
    let mut other = 0;
    assert_eq!(cuda!(graph_instantiate(&mut other, graph, 4)), INVALID_VALUE);
    assert_eq!(cuda!(graph_instantiate(&mut other, exec, 0)), INVALID_HANDLE);
    assert_eq!(cuda!(graph_exec_destroy(graph)), INVALID_HANDLE);
    assert_eq!((rig.control.alive().graphs, rig.control.alive().execs), (1, 1));
}
