//! Captures, kernels, and graphs.

use super::*;

use gdrcopy::cuda::raw::layout::{KernelNodeParams, MemOpNodeParams};
use gdsync_testkit::driver::kernel;

const GLOBAL: u32 = 0;
const THREAD_LOCAL: u32 = 1;
const RELAXED: u32 = 2;

fn begin(stream: Handle, mode: u32) {
    assert_eq!(cuda!(stream_begin_capture(stream, mode)), 0);
}

/// The graph of a capture that was not spoiled.
fn end(stream: Handle) -> Handle {
    let mut graph = 0;
    assert_eq!(cuda!(stream_end_capture(stream, &mut graph)), 0);
    graph
}

/// State, graph, and last node.
fn info(stream: Handle) -> (u32, Handle, Option<Handle>) {
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
    let actions: [&dyn Fn() -> u32; 4] = [
        &|| cuda!(stream_query(stream)),
        &|| cuda!(stream_synchronize(stream)),
        &|| cuda!(stream_destroy(stream)),
        &|| cuda!(event_record(event, stream)),
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

/// Adds its second parameter to the word that the first one names.
fn add(params: &[*mut c_void]) {
    // SAFETY: the kernel is registered with these two parameters.
    let addr = unsafe { params[0].cast::<u64>().read() };
    // SAFETY: the kernel is registered with these two parameters.
    let value = unsafe { params[1].cast::<u32>().read() };
    let word = std::ptr::with_exposed_provenance_mut(usize::try_from(addr).unwrap());
    // SAFETY: the tests pass words of GPU memory.
    unsafe { AtomicU64::from_ptr(word) }.fetch_add(value.into(), Ordering::SeqCst);
}

/// Loads a module for its kernel `add`.
fn load_add() -> Handle {
    kernel("add", &[8, 4], add);
    let (mut module, mut function) = (0, 0);
    assert_eq!(cuda!(module_load_data(&mut module, c"image".as_ptr().cast())), 0);
    assert_eq!(cuda!(module_get_function(&mut function, module, c"add".as_ptr())), 0);
    function
}

/// Launches `add`. The parameters die with the call.
fn launch_add(function: Handle, stream: Handle, mut addr: u64, mut value: u32) -> u32 {
    let mut params = [std::ptr::from_mut(&mut addr).cast(), std::ptr::from_mut(&mut value).cast::<c_void>()];
    let none = std::ptr::null_mut();
    let status = cuda!(launch_kernel(function, 1, 1, 1, 32, 1, 1, 0, stream, params.as_mut_ptr(), none));
    (addr, value) = (u64::MAX, u32::MAX);
    std::hint::black_box((addr, value));
    status
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
fn nodes_keep_their_kind() {
    let rig = Rig::new();
    let (words, stream, add) = (rig.words(2), rig.stream(), load_add());
    let at = words.at(0);
    let ops = [wait(at, 1, 0), write(at, 1), MemOp::barrier()];
    let (graph, [batch_node, kernel_node]) =
        capture(stream, [&|| batch(stream, &ops), &|| launch_add(add, stream, at, 1)]);
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
        set_add(exec, batch_node, add, at, 1, 1),
        set_add(exec, kernel_node, add, at, 1, 0),
    ] {
        assert_eq!(status, INVALID_VALUE);
    }
    assert_eq!(set_add(exec, kernel_node, 5, at, 1, 1), INVALID_HANDLE);
    assert_eq!(set_ops(5, batch_node, &ops), INVALID_HANDLE);
    assert_eq!([set_ops(exec, batch_node, &ops), set_add(exec, kernel_node, add, at, 4, 1)], [0, 0]);
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
