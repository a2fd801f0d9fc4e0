use super::*;

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
fn blocked_calls_end_with_the_tests_patience() {
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
