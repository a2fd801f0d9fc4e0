use super::captures::{RELAXED, begin, end, info};
use super::kernels::{Module, launch_add};
use super::*;
use gdrcopy::cuda::raw::layout::{KernelNodeParams, MemOpNodeParams};

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
