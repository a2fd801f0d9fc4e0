//! What only graphs of CUDA have: nodes, instances, contexts, and captures of the application.

use std::time::Duration;

use gdsync::error::Error;
use gdsync::stream::{Batch, Cond, Via};
use gdsync::verbs::SendWr;

use crate::common::{PATIENCE, assert_clean, gate, gates};
use crate::place::within_a_capture;
use crate::place::{Place, places};

/// Kernels do the same.
#[test]
fn host_functions_are_refused_also_repeatable_ones() {
    for place in places() {
        let stream = place.stream(PATIENCE);
        let refused = stream.capture(|stream| {
            let mut batch = Batch::new();
            batch.repeatable_host_fn(|| {});
            stream.submit(&mut batch)
        });
        let error = refused.unwrap_err();
        assert!(error.to_string().contains("host function in a graph of CUDA"), "{error}");
        let nothing = stream.capture(|_| gdsync::Result::Ok(())).unwrap();
        nothing.launch(&stream).unwrap().wait(&stream, PATIENCE).unwrap();
    }
}

/// One batch of more operations than a call of the driver takes: several nodes.
#[test]
fn long_batches_are_several_nodes() {
    for place in places() {
        let (a, b) = place.pair(4096, |q| q.max_send_wr(256));
        let stream = place.stream(PATIENCE);
        let remote = b.mr.remote(0).unwrap();
        let graph = stream
            .capture(|stream| {
                let mut batch = Batch::new();
                for id in 0..200 {
                    batch.send(&a.qp, &SendWr::fetch_add(remote, 1, a.mr.sge(0, 8)?).id(id))?;
                }
                batch.wait_all_sends(&a.qp)?;
                stream.submit(&mut batch)
            })
            .unwrap();
        for _ in 0..10 {
            let launch = graph.launch(&stream).unwrap();
            stream.synchronize(PATIENCE).unwrap();
            assert_eq!(launch.completions()[200].status().unwrap().unwrap().wr_id, 199);
        }
        assert_eq!(b.memory().word64(0).unwrap().load(), 2000);
        assert_clean(&[&a, &b]);
    }
}

/// A graph of many batches, launched again before it has run, on two streams, with eager work between; the rings go round
/// often.
#[test]
fn launches_of_many_batches_keep_apart() {
    const BATCHES: u64 = 7;
    for place in places() {
        let (a, b) = place.pair(4096, |q| q.max_send_wr(64));
        let streams = [place.stream(PATIENCE), place.stream(PATIENCE)];
        let (sum, sge) = (b.mr.remote(0).unwrap(), a.mr.sge(0, 8).unwrap());
        let add = |n| SendWr::fetch_add(sum, n, sge);
        let graph = streams[0]
            .capture(|stream| {
                (1..=BATCHES).try_for_each(|n| {
                    let mut batch = Batch::new();
                    batch.send(&a.qp, &add(n).id(n))?;
                    batch.wait_send(&a.qp)?;
                    stream.submit(&mut batch)
                })
            })
            .unwrap();
        let mut expected = 0;
        for round in 0..150usize {
            let stream = &streams[round / 10 % 2];
            let launch = graph.launch(stream).unwrap();
            assert_eq!(launch.completions().len() as u64, 2 * BATCHES);
            expected += BATCHES * (BATCHES + 1) / 2;
            if round % 7 == 3 {
                stream.send(&a.qp, &add(1000)).unwrap();
                stream.wait_send(&a.qp).unwrap();
                expected += 1000;
            }
            // A queue pair has one stream at a time.
            if round % 10 == 9 {
                launch.wait(stream, PATIENCE).unwrap();
                stream.synchronize(PATIENCE).unwrap();
                let ids: Vec<_> =
                    launch.completions().iter().map(|c| c.status().unwrap().unwrap().wr_id).collect();
                assert!(ids.iter().copied().eq((1..=BATCHES).flat_map(|n| [n, n])), "{ids:?}");
            }
        }
        assert_eq!(b.memory().word64(0).unwrap().load(), expected, "{place:?}");
        assert_clean(&[&a, &b]);
    }
}

/// Launches that no memory is left for are refused like those that no room is left for, and taken when there is.
#[test]
fn too_many_launches_of_many_batches_are_refused() {
    for place in places() {
        let stream = place.stream(PATIENCE);
        let words = gdsync::memory::Memory::alloc(256).unwrap();
        let word = |n: usize| words.word32(4 * n).unwrap();
        let gate = word(0);
        let at_once = stream.with_timeout(Duration::ZERO);
        let graph = stream
            .capture(|stream| {
                stream.wait_value32(&gate, 1, Cond::Geq)?;
                (1..10).try_for_each(|n| stream.write_value32(&word(n), 5))
            })
            .unwrap();
        for round in 0..3 {
            gate.store(0);
            let full = (0..2000).find_map(|_| graph.launch(&at_once).err()).unwrap();
            assert!(matches!(full, Error::StreamFull { .. }), "{full}");
            let pending = stream.query().pending;
            let error = graph.launch(&stream.with_timeout(Duration::from_millis(2))).unwrap_err();
            assert!(matches!(error, Error::StreamFull { .. }), "{error}");
            assert_eq!(stream.query().pending, pending, "round {round}");
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    std::thread::sleep(Duration::from_millis(2));
                    gate.store(1);
                });
                let launch = graph.launch(&stream).unwrap();
                launch.wait(&stream, PATIENCE).unwrap();
            });
            assert!((1..10).all(|n| word(n).load() == 5));
            (1..10).for_each(|n| word(n).store(0));
            graph.launch(&stream).unwrap().wait(&stream, PATIENCE).unwrap();
            assert!((1..10).all(|n| word(n).load() == 5));
        }
    }
}

#[test]
fn graph_runs_where_it_was_captured() {
    for place in places() {
        let stream = place.stream(PATIENCE);
        let graph = stream.capture(|_| gdsync::Result::Ok(())).unwrap();
        let other = Place { via: if place.via == Via::MemOp { Via::Kernel } else { Via::MemOp }, ..place };
        let error = graph.launch(&other.stream(PATIENCE)).unwrap_err();
        assert!(matches!(error, Error::Unsupported { .. }), "{error}");
        let error = graph.launch(&crate::common::stream("host")).unwrap_err();
        assert!(matches!(error, Error::InvalidArgument { .. }), "{error}");
    }
}

/// A full stream refuses launches, and takes one when there is room.
#[test]
fn full_stream_takes_a_launch_later() {
    for place in places() {
        let stream = place.stream(PATIENCE);
        let [gate, count] = gates();
        let at_once = stream.with_timeout(Duration::ZERO);
        let graph = stream.capture(|stream| stream.write_value32(&count, 1)).unwrap();
        stream.wait_value32(&gate, 1, Cond::Geq).unwrap();
        let full = (0..2000).find_map(|_| graph.launch(&at_once).err()).unwrap();
        assert!(matches!(full, Error::StreamFull { depth: 256, .. }), "{full}");
        gate.store(1);
        graph.launch(&stream).unwrap();
        stream.synchronize(PATIENCE).unwrap();
        assert_eq!(count.load(), 1);
    }
}

/// The application's own capture would repeat the same operations: it is not joined.
#[test]
fn capture_of_the_application_is_not_joined() {
    for place in places() {
        let stream = place.stream(PATIENCE);
        let word = gate();
        stream.write_value32(&word, 1).unwrap();
        // A launch would become a part of the application's graph, and never run.
        let graph = stream.capture(|stream| stream.write_value32(&word, 4)).unwrap();
        let refusals = within_a_capture(&place.gpu, &stream, || {
            [stream.write_value32(&word, 2).err(), stream.begin_capture().err(), graph.launch(&stream).err()]
        });
        for error in refusals {
            assert!(matches!(error, Some(Error::Unsupported { .. })), "{error:?}");
        }
        stream.synchronize(PATIENCE).unwrap();
        stream.write_value32(&word, 3).unwrap();
        stream.synchronize(PATIENCE).unwrap();
        assert_eq!(word.load(), 3);
        graph.launch(&stream).unwrap();
        stream.synchronize(PATIENCE).unwrap();
        assert_eq!(word.load(), 4);
    }
}

/// Copies of the application are captured with the sends, and run between them.
#[test]
fn work_of_the_application_is_captured_too() {
    for place in places() {
        let (a, b) = place.pair(256, |q| q);
        let stream = place.stream(PATIENCE);
        let memory = place.gpu.alloc(64).unwrap();
        let mr = a.pd.register(&memory, gdsync::verbs::Access::all()).unwrap();
        let address = memory.gpu_addr(&place.gpu).unwrap();
        let (api, raw) = (place.gpu.api(), stream.raw().unwrap());
        let ours = [mr.sge(0, 4).unwrap()];
        let remote = b.mr.remote(0).unwrap();
        let graph = stream
            .capture(|stream| {
                for value in [3, 4] {
                    let _current = place.gpu.enter()?;
                    // SAFETY: memory of the GPU that lives as long as the graph, and a stream of its context.
                    unsafe { api.memset_d32_async(address, value, 1, raw) }.unwrap();
                    let to = gdsync::verbs::RemoteAddr { addr: remote.addr + u64::from(value) * 4, ..remote };
                    stream.send(&a.qp, &SendWr::write(to, &ours))?;
                    stream.wait_send(&a.qp)?;
                }
                gdsync::Result::Ok(())
            })
            .unwrap();
        for _ in 0..20 {
            b.memory().fill(0, 64, 0).unwrap();
            graph.launch(&stream).unwrap();
            stream.synchronize(PATIENCE).unwrap();
            let word = |at| b.memory().word32(at).unwrap().load();
            assert_eq!([12, 16].map(word), [3, 4]);
        }
        assert_clean(&[&a, &b]);
    }
}
