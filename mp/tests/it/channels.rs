//! Channels: messages that graphs repeat, with credit for each launch.

use std::ops::Range;
use std::process::exit;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::{sleep, yield_now};
use std::time::Duration;

use crate::common::{
    DONE, LONG, buffer, bytes, failed, gpu, host_buffer, job_test, message, says, stream, syndrome, until,
};
use gdsync::mlx5::Syndrome;
use gdsync::stream::{Batch, Cond, CudaStreamConfig, Graph, HostStreamConfig, Replenish, Stream, Via};
use gdsync_testkit::tier;
use mp::{Channel, Communicator, Error, Registration};

/// Bytes of a place.
const PLACE: usize = 3000;

/// How long a stream is watched not to go on.
const HELD: Duration = Duration::from_millis(30);

fn place(n: usize) -> Range<usize> {
    n * PLACE..(n + 1) * PLACE
}

/// A channel to `peer` with the first `places` places of a buffer.
fn channel(comm: &Communicator, peer: usize, inbox: &Registration, places: usize) -> Channel {
    let places: Vec<_> = (0..places).map(|n| (inbox, place(n))).collect();
    comm.channel(peer, &places, LONG).unwrap()
}

/// Length of message `n`: those of even and of odd numbers differ.
fn len(n: usize) -> usize {
    [PLACE, 17][n % 2]
}

/// Messages `n` and `n + 1` there and back, in one submission each; in a graph, if the stream is being captured.
fn exchange_two(comm: &Communicator, s: &Stream, channel: &Channel, outbox: &Registration) {
    for n in 0..2 {
        let mut batch = Batch::new();
        channel.post_recv_in_batch(&mut batch).unwrap();
        let sent =
            channel.isend_in_batch(&mut batch, outbox, place(n).start..place(n).start + len(n)).unwrap();
        _ = channel.wait_recv_in_batch(&mut batch).unwrap();
        comm.wait_in_batch(&mut batch, &sent).unwrap();
        s.submit(&mut batch).unwrap();
    }
}

fn capture(s: &Stream, record: impl FnOnce(&Stream) -> mp::Result<()>) -> Graph {
    let captured = s.capture(|s| {
        record(s).unwrap();
        gdsync::Result::Ok(())
    });
    captured.unwrap()
}

/// Gives credit for a message, and waits for it.
fn receive(channel: &Channel, s: &Stream) -> mp::Result<()> {
    channel.post_recv_on_stream(s)?;
    channel.wait_recv_on_stream(s).map(drop)
}

fn launch(graph: &Graph, s: &Stream) {
    graph.launch(s).unwrap();
}

// Launches, eager submissions, and messages of the communicator, in random order.
job_test!(launches_and_eager_messages_mix, 2, |comm| {
    // Twice as many messages of the communicator as open the FIFO.
    let launches = tier(200, 300, 3000);
    let (me, peer) = (comm.rank(), 1 - comm.rank());
    let (outbox, inbox) = (buffer(comm, 2 * PLACE), buffer(comm, 2 * PLACE));
    let plain = host_buffer(comm, 128);
    let channel = channel(comm, peer, &inbox, 2);
    assert_eq!(channel.rank(), peer);
    let s = stream("mixed");
    let graph = capture(&s, |s| {
        exchange_two(comm, s, &channel, &outbox);
        Ok(())
    });
    let right = Arc::new(AtomicUsize::new(0));
    for n in 0..launches {
        let memory = outbox.memory().clone();
        s.host_fn(move || {
            (0..2).for_each(|i| memory.write(place(i).start, &message(me, peer, 2 * n + i, len(i))).unwrap());
        })
        .unwrap();
        if n % 7 == 3 {
            exchange_two(comm, &s, &channel, &outbox)
        } else {
            launch(&graph, &s)
        }
        let (inbox, right) = (inbox.clone(), right.clone());
        s.host_fn(move || {
            let is_right = |i: &usize| {
                bytes(&inbox, place(*i).start..place(*i).start + len(*i))
                    == message(peer, me, 2 * n + i, len(*i))
            };
            right.fetch_add((0..2).filter(is_right).count(), Ordering::Relaxed);
        })
        .unwrap();
        if n % 3 == 0 {
            // Often enough in a row to open the FIFO; by streams as well.
            let received = comm.irecv(&plain, 64..128, peer).unwrap();
            plain.memory().write(0, &message(me, peer, n, 64)).unwrap();
            let sent = match n % 500 {
                0 => comm.isend_on_stream(&s, &plain, 0..64, peer),
                _ => comm.isend(&plain, 0..64, peer),
            };
            comm.wait_all([&sent.unwrap(), &received], LONG).unwrap();
            assert_eq!(bytes(&plain, 64..128), message(peer, me, n, 64), "message {n}");
        }
        // Two host functions each: a stream of a GPU takes 24.
        if n % 10 == 9 {
            s.synchronize(LONG).unwrap();
        }
    }
    s.synchronize(LONG).unwrap();
    assert_eq!(right.load(Ordering::Relaxed), 2 * launches);
    assert!(gpu().is_some() || comm.fifo_messages(peer).unwrap().0 > 0, "some took the FIFO");
});

// The sender is launches ahead, and each waits for the receiver's launch.
job_test!(a_sender_waits_for_a_slow_receiver, 2, |comm| {
    const LAUNCHES: usize = 12;
    let peer = 1 - comm.rank();
    let memory = buffer(comm, PLACE);
    let channel = channel(comm, peer, &memory, comm.rank());
    let s = stream("slow");
    if comm.rank() == 0 {
        let graph = capture(&s, |s| comm.wait_on_stream(s, &channel.isend_on_stream(s, &memory, 0..64)?));
        for n in 0..LAUNCHES {
            let memory = memory.memory().clone();
            s.host_fn(move || memory.write(0, &message(0, 1, n, 64)).unwrap()).unwrap();
            launch(&graph, &s);
        }
        assert!(matches!(s.synchronize(HELD), Err(gdsync::Error::Deadline { .. })), "nobody receives");
        comm.barrier(LONG).unwrap();
        s.synchronize(LONG).unwrap();
    } else {
        let graph = capture(&s, |s| receive(&channel, s));
        comm.barrier(LONG).unwrap();
        for n in 0..LAUNCHES {
            sleep(HELD / 3);
            let before = if n == 0 { vec![0; 64] } else { message(0, 1, n - 1, 64) };
            assert_eq!(bytes(&memory, 0..64), before, "message {n} came before its launch");
            launch(&graph, &s);
            s.synchronize(LONG).unwrap();
            assert_eq!(bytes(&memory, 0..64), message(0, 1, n, 64), "{n}");
        }
    }
    assert_eq!(comm.context().stats().rnr_naks, 0, "no message came before its receive");
    comm.barrier(LONG).unwrap();
});

// The smallest queues, always full: launches are refused, not lost, and messages meet their receives.
job_test!(no_message_meets_a_missing_receive, 2, Communicator::builder().depth(4), |comm| {
    const LAUNCHES: usize = 400;
    let (me, peer) = (comm.rank(), 1 - comm.rank());
    let memory = buffer(comm, 2 * PLACE);
    let channel = channel(&comm.with_timeout(Duration::ZERO), peer, &memory, 2 * me);
    let s = stream("full");
    let add = |batch: &mut Batch| match me {
        // A completed wait makes room in the middle of a launch.
        0 => {
            let sent = channel.isend_in_batch(batch, &memory, 0..8);
            sent.and_then(|sent| comm.wait_in_batch(batch, &sent))
        }
        _ => channel.post_recv_in_batch(batch).and_then(|()| channel.wait_recv_in_batch(batch)).map(drop),
    };
    let graph = s.capture(|s| {
        (0..4).try_for_each(|_| {
            let mut batch = Batch::new();
            add(&mut batch).unwrap();
            s.submit(&mut batch)
        })
    });
    let graph = graph.unwrap();
    let mut refused = 0;
    for n in 0..LAUNCHES {
        if n % 40 == 39 {
            // The ranks are ahead by turns.
            sleep(HELD / 10 * u32::from(n % 80 == 39).abs_diff(u32::try_from(me).unwrap()));
        }
        loop {
            match graph.launch(&s.with_timeout(Duration::ZERO)) {
                Ok(_) => break,
                Err(gdsync::Error::QueueFull { .. } | gdsync::Error::NothingToWaitFor { .. }) => refused += 1,
                Err(gdsync::Error::StreamFull { .. }) => {}
                Err(error) => panic!("{error}"),
            }
            yield_now();
        }
        // A dropped batch takes its messages back.
        let mut dropped = Batch::new();
        let _full = add(&mut dropped);
    }
    s.synchronize(LONG).unwrap();
    assert_eq!(comm.context().stats().rnr_naks, 0, "{refused} were refused");
    comm.barrier(LONG).unwrap();
});

// Unused credit does no harm.
job_test!(credit_for_a_dropped_channel_does_no_harm, 2, |comm| {
    let (me, peer) = (comm.rank(), 1 - comm.rank());
    let memory = buffer(comm, 2 * PLACE);
    let channel = channel(comm, peer, &memory, 2 * me);
    let s = stream("gone");
    if me == 0 {
        drop(channel);
        let lost = || comm.context().stats().packets_discarded;
        let before = lost();
        comm.barrier(LONG).unwrap();
        comm.barrier(LONG).unwrap();
        sleep(HELD);
        assert_eq!(lost(), before, "nobody was there");
    } else {
        comm.barrier(LONG).unwrap();
        let mut batch = Batch::new();
        (0..2).for_each(|_| channel.post_recv_in_batch(&mut batch).unwrap());
        s.submit(&mut batch).unwrap();
        s.synchronize(LONG).unwrap();
        comm.barrier(LONG).unwrap();
    }
});

// A stream may wait for a channel that was dropped: the end of the communicator waits for the stream, and names it.
job_test!(streams_of_dropped_channels_are_unfinished, 2, |comm| {
    let over = Communicator::builder().timeout(LONG).init_over(comm.clone()).unwrap();
    let memory = buffer(&over, PLACE);
    let channel = channel(&over, 1 - comm.rank(), &memory, 1);
    let s = stream("left");
    if comm.rank() == 1 {
        receive(&channel, &s).unwrap();
    }
    drop(channel);
    comm.barrier(LONG).unwrap();
    // It waits for three quarters of this.
    let ended = over.finalize(Duration::from_secs(4));
    if comm.rank() == 1 {
        says(&ended.unwrap_err(), &["a stream that waits for rank 0"]);
    }
    s.abort();
});

// A second message would overwrite the first before a wait for it.
job_test!(receives_beyond_the_places_are_refused, 1, |comm| {
    let memory = buffer(comm, 2 * PLACE);
    let channel = channel(comm, 0, &memory, 2);
    let s = stream("beyond");
    let beyond = |batch: &mut Batch| {
        let error = channel.post_recv_in_batch(batch).unwrap_err();
        assert!(matches!(error, Error::NoFreePlace { rank: 0, places: 2 }), "{error}");
        says(&error, &["rank 0", "2 places", "Channel::wait_recv_in_batch"]);
    };
    let three = |s: &Stream| {
        let mut batch = Batch::new();
        (0..2).for_each(|_| channel.post_recv_in_batch(&mut batch).unwrap());
        beyond(&mut batch);
        let sent: Vec<_> =
            (0..2).map(|_| channel.isend_in_batch(&mut batch, &memory, 0..8).unwrap()).collect();
        _ = channel.wait_recv_in_batch(&mut batch).unwrap();
        channel.post_recv_in_batch(&mut batch).unwrap();
        beyond(&mut batch);
        let last = channel.isend_in_batch(&mut batch, &memory, 0..8).unwrap();
        (0..2).for_each(|_| drop(channel.wait_recv_in_batch(&mut batch).unwrap()));
        sent.iter().chain([&last]).for_each(|sent| comm.wait_in_batch(&mut batch, sent).unwrap());
        s.submit(&mut batch).unwrap();
    };
    let graph = capture(&s, |s| {
        three(s);
        Ok(())
    });
    for _ in 0..20 {
        launch(&graph, &s);
        three(&s);
        s.synchronize(LONG).unwrap();
    }
    // A dropped batch frees its places.
    for _ in 0..3 {
        let mut batch = Batch::new();
        (0..2).for_each(|_| channel.post_recv_in_batch(&mut batch).unwrap());
        beyond(&mut batch);
    }
});

// With peer copies only graphs ask the channel.
job_test!(batches_outlive_their_channel_but_in_captures, 1, |comm| {
    let (inbox, s, mut batch) = (buffer(comm, PLACE), stream("dropped"), Batch::new());
    let channel = channel(comm, 0, &inbox, 1);
    let is_near = channel.path_of(&inbox, 0..8).unwrap().peer_copies().is_ok();
    channel.post_recv_in_batch(&mut batch).unwrap();
    drop(channel);
    let captured = s.capture(|s| s.submit(&mut batch));
    if is_near {
        says(&captured.unwrap_err().to_string(), &["a channel that was dropped", "keep the Channel"]);
        s.submit(&mut batch).unwrap();
        s.synchronize(LONG).unwrap();
    } else {
        captured.unwrap();
    }
});

// One iteration over two places would use the other place in each second launch.
job_test!(launches_at_another_place_are_refused, 1, |comm| {
    let (outbox, inbox) = (buffer(comm, PLACE), buffer(comm, 2 * PLACE));
    let (channel, s) = (channel(comm, 0, &inbox, 2), stream("places"));
    let iteration = |s: &Stream| {
        channel.post_recv_on_stream(s)?;
        channel.isend_on_stream(s, &outbox, 0..8).map(drop)?;
        channel.wait_recv_on_stream(s).map(drop)
    };
    let (one, other) = (capture(&s, iteration), capture(&s, iteration));
    launch(&one, &s);
    let error = one.launch(&s).unwrap_err().to_string();
    says(&error, &["other places of the channel", "as many iterations as the channel has places"]);
    if gpu().is_some_and(|(_, via)| *via == Via::MemOp) {
        // Copies of the copy engine stay at the places of the capture.
        let error = other.launch(&s).unwrap_err().to_string();
        says(&error, &["copies by the copy engine are of other memory", "give the channel one place"]);
        return s.synchronize(LONG).unwrap();
    }
    // In turn each has its place.
    for _ in 0..3 {
        launch(&other, &s);
        launch(&one, &s);
    }
    iteration(&s).unwrap();
    s.synchronize(LONG).unwrap();
    // One that is refused for another reason has no place yet.
    let refusal = Arc::new(Refusal(AtomicBool::new(true)));
    let last = capture(&s, |s| {
        iteration(s)?;
        let (mut batch, hook) = (Batch::new(), refusal.clone() as Arc<dyn Replenish>);
        batch.before_launches(&hook);
        batch.write_value32(&inbox.memory().word32(0)?, 0);
        Ok(s.submit(&mut batch)?)
    });
    last.launch(&s).unwrap_err();
    iteration(&s).unwrap();
    refusal.0.store(false, Ordering::Relaxed);
    launch(&last, &s);
});

/// Refuses launches while it is set.
#[derive(Debug)]
struct Refusal(AtomicBool);

impl Replenish for Refusal {
    fn replenish(&self) -> gdsync::Result<()> {
        if self.0.load(Ordering::Relaxed) { Err(gdsync::Error::GivenUp) } else { Ok(()) }
    }
}

// A stream that waits for a place says so, and on a wait of its own nobody waits in vain.
job_test!(waits_of_channels_say_what_they_wait_for, 2, |comm| {
    let (me, peer) = (comm.rank(), 1 - comm.rank());
    let memory = buffer(comm, 2 * PLACE);
    let channel = channel(comm, peer, &memory, 2 * me);
    let soon = Duration::from_millis(30);
    let short = || match gpu() {
        Some((gpu, via)) => {
            let (via, copies) = (*via, *via);
            let config = CudaStreamConfig { via, copies, wait_limit: soon, ..CudaStreamConfig::default() };
            Stream::cuda(gpu, config).unwrap()
        }
        None => {
            let config = HostStreamConfig { wait_limit: soon, ..HostStreamConfig::default() };
            Stream::host(config).unwrap()
        }
    };
    if me == 0 {
        let sent = stream("sends");
        // Nobody takes its completion.
        _ = channel.isend_on_stream(&sent, &memory, 0..8).unwrap();
        comm.barrier(LONG).unwrap();
        sent.synchronize(LONG).unwrap();
        // The stream that fails takes the connection with it, and what is still under way there.
        comm.barrier(LONG).unwrap();
        let s = short();
        // The connection is free when the completion is there that nobody takes.
        until("the second send is queued", || channel.isend_on_stream(&s, &memory, 0..8).is_ok());
        let text = s.synchronize(LONG).unwrap_err().to_string();
        says(
            &text,
            &[
                "waited 30 ms for a free place of rank 1 in its channel (",
                "; rank 1 has freed 1; call Channel::post_recv_on_stream or post_recv_in_batch there",
            ],
        );
        // The next message would be taken for the one that is lost.
        assert!(channel.isend_on_stream(&sent, &memory, 0..8).is_err());
        comm.barrier(LONG).unwrap();
    } else {
        comm.barrier(LONG).unwrap();
        let (s, mut batch) = (stream("receives"), Batch::new());
        for _ in 0..2 {
            let error = channel.wait_recv_in_batch(&mut batch).unwrap_err();
            assert!(matches!(error, Error::NoPostedReceive { rank: 0 }), "{error}");
            says(&error, &["channel with rank 0", "post a receive before it (Channel::post_recv_in_batch"]);
            channel.post_recv_in_batch(&mut batch).unwrap();
            _ = channel.wait_recv_in_batch(&mut batch).unwrap();
        }
        // The second one is taken back.
        drop(batch);
        assert!(matches!(channel.wait_recv_on_stream(&s), Err(Error::NoPostedReceive { rank: 0 })));
        receive(&channel, &s).unwrap();
        s.synchronize(LONG).unwrap();
        comm.barrier(LONG).unwrap();
        comm.barrier(LONG).unwrap();
    }
});

// A message that does not come.
job_test!(wait_for_a_message_of_a_channel_says_so, 2, |comm| {
    let (me, peer) = (comm.rank(), 1 - comm.rank());
    let memory = buffer(comm, 2 * PLACE);
    let channel = channel(comm, peer, &memory, 2 * me);
    if me == 1 {
        let s = stream("receives");
        receive(&channel, &s).unwrap();
        until("it waits", || {
            let text = s.synchronize(Duration::from_millis(5)).unwrap_err().to_string();
            text.contains("it waits for a message from rank 0 through a channel (")
        });
        s.abort();
    }
    comm.barrier(LONG).unwrap();
});

// Also to the own rank.
job_test!(three_ranks_exchange_with_all, 3, |comm| {
    let (me, all) = (comm.rank(), comm.size());
    let (outbox, inbox) = (buffer(comm, all * PLACE), buffer(comm, all * PLACE));
    let places: Vec<_> = (0..all).map(|peer| [(&inbox, place(peer))]).collect();
    let wanted: Vec<_> = (0..all).rev().map(|peer| (peer, &places[peer][..])).collect();
    let channels = comm.channels(&wanted, LONG).unwrap();
    let s = stream("all");
    let graph = s.capture(|s| {
        let mut batch = Batch::new();
        channels.iter().for_each(|channel| channel.post_recv_in_batch(&mut batch).unwrap());
        let send = |channel: &Channel| {
            let start = place(channel.rank()).start;
            channel.isend_in_batch(&mut batch, &outbox, start..start + 100).unwrap()
        };
        let sent: Vec<_> = channels.iter().map(send).collect();
        s.submit(&mut batch)?;
        channels.iter().for_each(|channel| drop(channel.wait_recv_in_batch(&mut batch).unwrap()));
        sent.iter().for_each(|sent| comm.wait_in_batch(&mut batch, sent).unwrap());
        s.submit(&mut batch)
    });
    let graph = graph.unwrap();
    // The graph keeps what it needs.
    drop(channels);
    for n in 0..30 {
        for peer in 0..all {
            outbox.memory().write(place(peer).start, &message(me, peer, n, 100)).unwrap();
        }
        launch(&graph, &s);
        s.synchronize(LONG).unwrap();
        for peer in 0..all {
            let start = place(peer).start;
            assert!(bytes(&inbox, start..start + 100) == message(peer, me, n, 100), "from {peer}, {n}");
        }
    }
});

// Steps that no kernel runs are run by the stream.
job_test!(kernels_with_steps_have_channels, 2, |comm| {
    let (me, peer) = (comm.rank(), 1 - comm.rank());
    let (outbox, inbox) = (buffer(comm, 2 * PLACE), buffer(comm, 2 * PLACE));
    let channel = channel(comm, peer, &inbox, 2);
    let s = stream("steps");
    if gpu().is_none_or(|(_, via)| *via != Via::Kernel) {
        return;
    }
    let steps = s.record_steps(|s| {
        exchange_two(comm, s, &channel, &outbox);
        gdsync::Result::Ok(())
    });
    let steps = steps.unwrap();
    for n in 0..20 {
        (0..2).for_each(|i| {
            outbox.memory().write(place(i).start, &message(me, peer, 2 * n + i, len(i))).unwrap();
        });
        steps.launch(&s, |_| Ok::<_, gdsync::Error>(())).unwrap();
        s.synchronize(LONG).unwrap();
        for i in 0..2 {
            let came = bytes(&inbox, place(i).start..place(i).start + len(i));
            assert!(came == message(peer, me, 2 * n + i, len(i)), "{n}");
        }
    }
});

/// Rank 0 waits for credit or for a message of rank 1, which exits.
fn ends_with_its_peer(
    comm: &Communicator,
    wait: impl Fn(&Channel, &Stream, &Registration) -> mp::Result<()>,
) -> ! {
    let memory = buffer(comm, PLACE);
    let channel = channel(comm, 1 - comm.rank(), &memory, 1);
    let s = stream("bereft");
    if comm.rank() == 1 {
        comm.barrier(LONG).unwrap();
        sleep(HELD);
        // Without destructors.
        // SAFETY: the process ends.
        unsafe { libc::_exit(0) };
    }
    let graph = capture(&s, |s| wait(&channel, s, &memory));
    launch(&graph, &s);
    comm.barrier(LONG).unwrap();
    let error = s.synchronize(LONG).unwrap_err();
    assert_eq!(syndrome(&error), Some(Syndrome::RETRY_EXC_ERR), "{error}");
    let error = graph.launch(&s).unwrap_err();
    assert_eq!(syndrome(&error), Some(Syndrome::RETRY_EXC_ERR), "{error}");
    let error = wait(&channel, &s, &memory).unwrap_err();
    failed(&error, 1, &[Syndrome::RETRY_EXC_ERR]);
    exit(DONE);
}

job_test!(launches_that_send_end_with_a_dead_peer, 2, |comm| {
    ends_with_its_peer(comm, |channel, s, memory| channel.isend_on_stream(s, memory, 0..8).map(drop));
});

job_test!(launches_that_receive_end_with_a_dead_peer, 2, |comm| {
    ends_with_its_peer(comm, |channel, s, _| receive(channel, s));
});

job_test!(launches_end_when_the_rank_is_given_up, 2, |comm| {
    let memory = buffer(comm, PLACE);
    let channel = channel(comm, 1 - comm.rank(), &memory, 1);
    if comm.rank() == 0 {
        let s = stream("giving up");
        launch(&capture(&s, |s| receive(&channel, s)), &s);
        comm.give_up(1).unwrap();
        let error = s.synchronize(LONG).unwrap_err();
        says(&error, &[&gdsync::Error::GivenUp.to_string()]);
    }
    comm.barrier(LONG).unwrap();
});

// They are counted once.
job_test!(graphs_refuse_messages_of_a_communicator, 2, |comm| {
    let (me, peer) = (comm.rank(), 1 - comm.rank());
    let memory = buffer(comm, 128);
    let s = stream("refusing");
    memory.memory().write(0, &message(me, peer, 0, 64)).unwrap();
    let received = comm.irecv(&memory, 64..128, peer).unwrap();
    let mut refused = Vec::new();
    let graph = s.capture(|s| {
        let send_in_batch = || {
            let mut batch = Batch::new();
            let _taken_back = comm.isend_in_batch(&mut batch, &memory, 0..64, peer)?;
            Ok(s.submit(&mut batch)?)
        };
        let wait_in_batch = || {
            let mut batch = Batch::new();
            comm.wait_in_batch(&mut batch, &received)?;
            Ok(s.submit(&mut batch)?)
        };
        refused.push(comm.isend_on_stream(s, &memory, 0..64, peer).map(drop));
        refused.push(send_in_batch());
        refused.push(comm.wait_on_stream(s, &received));
        refused.push(wait_in_batch());
        gdsync::Result::Ok(())
    });
    assert_eq!(refused.len(), 4);
    for refused in refused {
        says(
            &refused.unwrap_err(),
            &["a message of a communicator is not supported by graphs", "mp::Channel"],
        );
    }
    drop(graph);
    // The refused messages are taken back.
    let sent = comm.isend_on_stream(&s, &memory, 0..64, peer).unwrap();
    comm.wait_all_on_stream(&s, [&received, &sent]).unwrap();
    s.synchronize(LONG).unwrap();
    assert_eq!(bytes(&memory, 64..128), message(peer, me, 0, 64));
});

job_test!(places_that_overlap_are_refused, 1, |comm| {
    let memory = buffer(comm, 128);
    let again = comm.register(memory.memory()).unwrap();
    let said = |places: &[(&Registration, Range<usize>)]| comm.channel(0, places, LONG).unwrap_err();
    let error = said(&[(&memory, 0..16), (&memory, 64..72), (&again, 8..24)]);
    says(&error, &["channel with rank 0", "bytes 0..16", "bytes 8..24", "overlap"]);
    says(&said(&[(&memory, 40..48), (&memory, 40..48)]), &["bytes 40..48"]);
    comm.channel(0, &[(&memory, 8..16), (&memory, 0..8), (&memory, 4..4)], LONG).unwrap();
});

// Another communicator has protection domains of its own.
job_test!(registrations_of_another_communicator_are_refused, 2, |comm| {
    let (peer, s) = (1 - comm.rank(), stream("another"));
    let other = Communicator::builder().timeout(LONG).init_over(comm.clone()).unwrap();
    let (own, foreign) = (buffer(comm, 128), buffer(&other, 128));
    let words = ["the buffer is registered with another communicator", "after a shrink"];
    says(&comm.isend(&foreign, 0..8, peer).unwrap_err(), &words);
    says(&comm.irecv(&foreign, 0..8, peer).unwrap_err(), &words);
    says(&comm.irecv(&foreign.slice(8, 8).unwrap(), 0..8, peer).unwrap_err(), &words);
    says(&comm.send_on_stream(&s, &foreign, 0..8, peer).unwrap_err(), &words);
    says(&comm.recv_on_stream(&s, &foreign, 0..8, peer).unwrap_err(), &words);
    says(&comm.channel(peer, &[(&foreign, 0..8)], LONG).unwrap_err(), &words);
    let channel = comm.channel(peer, &[(&own, 0..8)], LONG).unwrap();
    says(&channel.isend_on_stream(&s, &foreign, 0..8).unwrap_err(), &words);
    // The connection is whole.
    comm.sendrecv((&own, 0..8), peer, (&own, 8..16), peer, LONG).unwrap();
});

job_test!(ranks_with_other_lists_are_named, 2, |comm| {
    let (me, peer) = (comm.rank(), 1 - comm.rank());
    let memory = buffer(comm, 128);
    let places: &[_] = &[(&memory, 0..64)];
    let said = |wanted: &[(usize, &[_])]| comm.channels(wanted, LONG).unwrap_err().to_string();
    // One of the two wants more than the other.
    let both = [(peer, places), (peer, places)];
    let error = said(&both[me..]);
    let counts = format!("it lists {} channels with this rank, and this rank {} with it", 1 + me, 2 - me);
    says(&error, &[&format!("rank {peer}"), &counts]);
    // Rank 1 cannot make one.
    let outside: &[_] = &[(&memory, 100..200)];
    let error = said(&[(peer, if me == 1 { outside } else { places })]);
    says(&error, &[if me == 1 { "100" } else { "rank 1" }]);
    let error = said(&[(2, places)]);
    says(&error, &["rank 2"]);
    let many = vec![(&memory, 0..0); 1000];
    assert!(said(&[(peer, &many)]).contains("Builder::depth"));

    // Rank 0 has a small place, rank 1 none.
    let channel = comm.channel(peer, &places[..1 - me], LONG).unwrap();
    let s = stream("fitting");
    let said = |error: Error| error.to_string();
    let error = said(channel.isend_on_stream(&s, &memory, 0..[0, 65][me]).unwrap_err());
    says(&error, &[["no place", "smallest place"][me]]);
    if me == 0 {
        channel.post_recv_on_stream(&s).unwrap();
        _ = channel.wait_recv_on_stream(&s).unwrap();
    } else {
        assert!(said(channel.post_recv_on_stream(&s).unwrap_err()).contains("places of this rank"));
        assert!(matches!(
            channel.isend_on_stream(&s, &memory, 100..200),
            Err(Error::Message { cause: gdsync::Error::OutOfBounds { .. }, .. })
        ));
        _ = channel.isend_on_stream(&s, &memory, 0..64).unwrap();
    }
    s.synchronize(LONG).unwrap();
    assert!(comm.channels(&[], LONG).unwrap().is_empty());
});

job_test!(launches_that_are_refused_name_the_rank, 2, |comm| {
    let (peer, memory) = (1 - comm.rank(), buffer(comm, 128));
    let channel = comm.channel(peer, &[(&memory, 64..72)], LONG).unwrap();
    let (s, other) = (stream("graph"), stream("other"));
    let gate = memory.memory().word32(96).unwrap();
    let capture = s.begin_capture().unwrap();
    channel.post_recv_on_stream(&s).unwrap();
    let sent = channel.isend_on_stream(&s, &memory, 0..8).unwrap();
    _ = channel.wait_recv_on_stream(&s).unwrap();
    comm.wait_on_stream(&s, &sent).unwrap();
    let graph = capture.end().unwrap();
    s.wait_value32(&gate, 1, Cond::Eq).unwrap();
    graph.launch(&s).unwrap();
    let error = graph.launch(&other).unwrap_err();
    let is_busy = |reason: &gdsync::Error| matches!(reason, gdsync::Error::Busy { .. });
    assert!(matches!(&error, gdsync::Error::Rank { reason, .. } if is_busy(reason)), "{error}");
    says(
        &error,
        &[
            &format!("to rank {peer}: the "),
            "queue still belongs to stream 'graph'",
            "synchronize that first",
        ],
    );
    comm.barrier(LONG).unwrap();
    gate.store(1);
    s.synchronize(LONG).unwrap();
    comm.barrier(LONG).unwrap();
});
