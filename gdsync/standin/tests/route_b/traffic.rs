//! Everything that is sent and waited for, with queues in GPU memory.

use gdsync::Error;
use gdsync::stream::{Batch, CudaStreamConfig, Stream};
use gdsync::verbs::{Access, OnGpu, RecvWr, SendWr};

use crate::common::{PATIENCE, Side, bytes, connect, pattern, sent, stream};
use crate::setup::complaints_but_of_peers;
use crate::shared::message;
use crate::{Bench, open, pair, umems};

/// What is asked for lies on the GPU, and nothing else does; more than two laps of every ring.
#[test]
fn every_placement_works_over_laps() {
    let bench = Bench::take();
    let known = complaints_but_of_peers();
    let gpu = bench.gpu.clone();
    for bits in 1..16 {
        let what = OnGpu::from_bits(bits).unwrap();
        let before = umems();
        let (a, b) = pair(&gpu, what, 64, |q| q.max_send_wr(4).max_recv_wr(4));
        let now = umems();
        // Of each side: both completion queues and the rings, with a record each.
        assert_eq!(now[0] - before[0], 2 * 6, "{what:?}");
        let on_gpu = [OnGpu::SEND_QUEUE, OnGpu::SEND_CQ, OnGpu::RECV_CQ, OnGpu::RECORDS]
            .map(|one| usize::from(what.contains(one)));
        let expected = on_gpu[0] + on_gpu[1] + on_gpu[2] + 3 * on_gpu[3];
        assert_eq!(now[1] - before[1], 2 * expected, "{what:?}");
        for round in 0..12 {
            message(&a, &b, round);
            message(&b, &a, round + 1000);
        }
        drop((a, b));
        assert_eq!(umems(), before, "{what:?}");
    }
    assert_eq!(complaints_but_of_peers(), known);
}

#[test]
fn writes_reads_and_atomics() {
    let bench = Bench::take();
    let gpu = bench.gpu.clone();
    let (a, b) = pair(&gpu, OnGpu::all(), 4096, |q| q.max_send_wr(4).max_inline(64));
    for round in 0..12u64 {
        let data = pattern(1000, usize::try_from(round).unwrap());
        a.memory().write(0, &data).unwrap();
        a.qp.post_send(&[SendWr::write(b.mr.remote(1000).unwrap(), &[a.mr.sge(0, 1000).unwrap()])]).unwrap();
        sent(&a).ok().unwrap();
        assert!(bytes(&b, 1000, 1000) == data);
        a.qp.post_send(&[SendWr::read(b.mr.remote(1000).unwrap(), &[a.mr.sge(2000, 1000).unwrap()])])
            .unwrap();
        sent(&a).ok().unwrap();
        assert!(bytes(&a, 2000, 1000) == data);
        b.memory().write(0, &(10 * round).to_ne_bytes()).unwrap();
        let result = a.mr.sge(3000, 8).unwrap();
        a.qp.post_send(&[SendWr::fetch_add(b.mr.remote(0).unwrap(), 7, result)]).unwrap();
        sent(&a).ok().unwrap();
        assert_eq!(bytes(&a, 3000, 8), (10 * round).to_ne_bytes());
        a.qp.post_send(&[SendWr::compare_swap(b.mr.remote(0).unwrap(), 10 * round + 7, 99, result)]).unwrap();
        sent(&a).ok().unwrap();
        assert_eq!(bytes(&a, 3000, 8), (10 * round + 7).to_ne_bytes());
        assert_eq!(bytes(&b, 0, 8), 99u64.to_ne_bytes());
        a.qp.post_send(&[SendWr::write_inline(b.mr.remote(8).unwrap(), &[round.to_le_bytes()[0]; 60])])
            .unwrap();
        sent(&a).ok().unwrap();
        assert_eq!(bytes(&b, 8, 60), [round.to_le_bytes()[0]; 60]);
    }
}

/// A stream of the GPU and one of the CPU ring the doorbells, and wait by the owner bit.
#[test]
fn streams_send_and_wait_over_laps() {
    let bench = Bench::take();
    let gpu = bench.gpu.clone();
    let (a, b) = pair(&gpu, OnGpu::all(), 4096, |q| q.max_send_wr(4).max_recv_wr(4));
    let streams = [Stream::cuda(&gpu, CudaStreamConfig::default()).unwrap(), stream("of the CPU")];
    for round in 0..40usize {
        let data = pattern(1000, round);
        a.memory().write(0, &data).unwrap();
        b.qp.post_recv(&[RecvWr { wr_id: 1, sges: &[b.mr.sge(2000, 1000).unwrap()] }]).unwrap();
        let mut batch = Batch::new();
        batch.send(&a.qp, &SendWr::send(&[a.mr.sge(0, 1000).unwrap()])).unwrap();
        batch.wait_send(&a.qp).unwrap();
        batch.wait_recv(&b.qp).unwrap();
        // Each for half of the rounds: a queue has one owner at a time.
        let stream = &streams[round / 20];
        stream.submit(&mut batch).unwrap();
        stream.synchronize(PATIENCE).unwrap();
        assert!(bytes(&b, 2000, 1000) == data, "round {round}");
    }
}

/// Queue pairs of verbs and of DevX speak to each other, and share a completion queue of verbs.
#[test]
fn both_kinds_go_together() {
    let bench = Bench::take();
    let known = complaints_but_of_peers();
    let gpu = bench.gpu.clone();
    let context = open(&gpu);
    let shared = context.create_cq(64).unwrap();
    let a = Side::new(&context, 64, |q| q.on_gpu(&gpu, OnGpu::SEND_QUEUE).send_cq(&shared).recv_cq(&shared));
    let b = Side::new(&context, 64, |q| q.on_gpu(&gpu, OnGpu::empty()));
    let (a, b) = connect(a, b);
    for round in 0..200 {
        message(&a, &b, round);
        message(&b, &a, round);
    }
    // The reverse is not possible: libmlx5 knows nothing of the queue.
    let c = Side::new(&context, 64, |q| q.on_gpu(&gpu, OnGpu::SEND_CQ));
    let error = c.pd.build_qp().send_cq(&c.qp.send_cq()).build().unwrap_err();
    assert!(matches!(error, Error::Unsupported { by: "mlx5 cards", .. }), "{error:?}");
    assert_eq!(complaints_but_of_peers(), known);
}

#[test]
fn payload_and_queues_share_the_gpu() {
    let bench = Bench::take();
    let gpu = bench.gpu.clone();
    let (a, b) = pair(&gpu, OnGpu::all(), 64, |q| q);
    let (from, to) = (gpu.alloc(100_000).unwrap(), gpu.alloc(100_000).unwrap());
    let source = a.pd.register(&from, Access::LOCAL_WRITE).unwrap();
    let target = b.pd.register(&to, Access::all()).unwrap();
    let data = pattern(40_000, 3);
    from.write(77, &data).unwrap();
    a.qp.post_send(&[SendWr::write(target.remote(5003).unwrap(), &[source.sge(77, 40_000).unwrap()])])
        .unwrap();
    sent(&a).ok().unwrap();
    let mut got = vec![0; 40_000];
    to.read(5003, &mut got).unwrap();
    assert!(got == data);
}

/// Sizes at both ends of what can be asked for.
#[test]
fn queues_of_every_size_can_be_made() {
    let bench = Bench::take();
    let gpu = bench.gpu.clone();
    let context = open(&gpu);
    let before = umems();
    for (sends, receives, sges, inline) in
        [(1, 1, 1, 0), (1, 1, 32, 512), (2, 3, 3, 60), (1000, 4000, 1, 64), (32768, 32768, 1, 0)]
    {
        let side = || {
            Side::new(&context, 64, |q| {
                let q = q.max_send_wr(sends).max_recv_wr(receives).max_recv_sge(sges).max_inline(inline);
                q.on_gpu(&gpu, OnGpu::all())
            })
        };
        let (a, b) = connect(side(), side());
        for round in 0..3 {
            message(&a, &b, round);
        }
    }
    for _ in 0..16 {
        let (a, b) = pair(&gpu, OnGpu::all(), 64, |q| q);
        message(&a, &b, 1);
    }
    assert_eq!(umems(), before);
}
