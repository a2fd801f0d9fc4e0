//! Cards that read the rings themselves, and GPUs whose streams ring their doorbells.

use gdsync::cuda::{Flush, Gpu};
use gdsync::hca::Gid;
use gdsync::memory::Memory;
use gdsync::rdma::Route;
use gdsync::stream::{Batch, CudaStreamConfig, Stream};
use gdsync::verbs::{Access, Context, Mr, OnGpu, QpAddress, QpAttr, QpState, RecvWr, SendWr, Sge, Transport};
use gdsync::{Error, Result};
use rdma_core_sys::verbs::{ibv_qp_attr, ibv_qp_attr_mask as mask, ibv_qp_state};

use super::pages;
use super::setup::{Bench, DMA_BUF_SUPPORTED, assert_says, open, open_by, simulated_gpu};
use crate::child::own_process;
use crate::common::{PATIENCE, Side, bytes, connect, hca, message, pattern, received, sent};

#[test]
#[ignore = "`card` runs it on the card"]
fn all_works_on_larger_pages() {
    pages::run_again_on_larger(&[
        "card::direct::stream_of_a_gpu",
        "card::direct::payload_in_gpu",
        "card::lifecycle::streams",
    ]);
}

/// `CUDA_ERROR_NOT_PERMITTED`.
const NOT_PERMITTED: u32 = 800;
#[test]
#[ignore = "`card` runs it on the card"]
fn stream_of_a_gpu_triggers_and_waits() {
    let bench = Bench::take();
    let gpu = bench.gpu.clone();
    let side = || Side::new(&open(&gpu), 4096, |q| q.max_send_wr(4).on_gpu(&gpu, OnGpu::empty()));
    let (a, b) = connect(side(), side());
    round_trips(&gpu, &a, &b);
}

/// Messages that a stream of the GPU triggers and waits for.
fn round_trips(gpu: &Gpu, a: &Side, b: &Side) {
    let stream = Stream::cuda(gpu, CudaStreamConfig::default()).unwrap();
    for round in 0..20u8 {
        a.memory().write(0, &[round; 100]).unwrap();
        b.qp.post_recv(&[RecvWr::new(&[b.mr.sge(1000, 100).unwrap()]).id(1)]).unwrap();
        let mut batch = Batch::new();
        batch.send(&a.qp, &SendWr::send(&[a.mr.sge(0, 100).unwrap()])).unwrap();
        batch.wait_send(&a.qp).unwrap();
        batch.wait_recv(&b.qp).unwrap();
        stream.submit(&mut batch).unwrap();
        stream.synchronize(PATIENCE).unwrap();
        assert_eq!(bytes(b, 1000, 100), [round; 100]);
    }
}

/// As programs of libgdsync do, which bring their own address vectors.
#[test]
#[ignore = "`card` runs it on the card"]
fn refused_step_after_a_raw_one_names_its_state() {
    let bench = Bench::take();
    let side = Side::new(&open(&bench.gpu), 4096, |q| q);
    let mut attr = ibv_qp_attr::zeroed();
    (attr.qp_state, attr.port_num) = (ibv_qp_state::IBV_QPS_INIT, 1);
    let given = [mask::IBV_QP_STATE, mask::IBV_QP_PKEY_INDEX, mask::IBV_QP_PORT, mask::IBV_QP_ACCESS_FLAGS];
    side.qp.modify_raw(&attr, given.into_iter().collect()).unwrap();
    let nobody = QpAddress::new(Gid([0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 203, 0, 113, 9]), 0x123, 0);
    assert_says(&side.qp.connect(nobody).unwrap_err(), &["INIT to RTR"]);
}

#[test]
#[ignore = "`card` runs it on the card"]
fn datagrams_leave_and_arrive_on_streams() {
    const QKEY: u32 = 0x1111_1111;
    let bench = Bench::take();
    let gpu = bench.gpu.clone();
    let side = || {
        let side =
            Side::new(&open(&gpu), 4096, |q| q.datagrams(QKEY).max_send_wr(4).on_gpu(&gpu, OnGpu::empty()));
        side.qp.activate().unwrap();
        side
    };
    let (a, b) = (side(), side());
    let stream = Stream::cuda(&gpu, CudaStreamConfig::default()).unwrap();
    for (from, to, round) in [(&a, &b, 1u8), (&b, &a, 2), (&a, &a, 3)] {
        let address = from.pd.datagram_address(&to.qp.address(), QKEY).unwrap();
        from.memory().write(0, &[round; 100]).unwrap();
        let received = to.qp.post_recv(&[RecvWr::new(&[to.mr.sge(1000, 140).unwrap()])]).unwrap();
        let mut batch = Batch::new();
        let sges = [from.mr.sge(0, 100).unwrap()];
        batch.send(&from.qp, &SendWr::datagram(&address, &sges).imm(round.into())).unwrap();
        batch.wait_send(&from.qp).unwrap();
        batch.wait_recv(&to.qp).unwrap();
        stream.submit(&mut batch).unwrap();
        stream.synchronize(PATIENCE).unwrap();
        let wc = received.status().unwrap().unwrap();
        assert_eq!((wc.byte_len, wc.imm), (140, Some(round.into())));
        let sender = received.sender().unwrap().unwrap();
        assert_eq!((sender.qpn, sender.lid), (from.qp.qpn(), from.qp.address().lid));
        assert_eq!(bytes(to, 1040, 100), [round; 100], "behind the GRH");
    }
    // A send that fails stops the sends only: the reset moves receives, for which a stream waits, to ERR.
    let late = a.qp.post_recv(&[RecvWr::new(&[a.mr.sge(1000, 140).unwrap()])]).unwrap();
    let mut batch = Batch::new();
    batch.wait(&late).unwrap();
    stream.submit(&mut batch).unwrap();
    let address = a.pd.datagram_address(&b.qp.address(), QKEY).unwrap();
    let unknown = Sge { lkey: !a.mr.lkey(), ..a.mr.sge(0, 8).unwrap() };
    let failed = a.qp.post_send(&[SendWr::datagram(&address, &[unknown])]).unwrap();
    assert!(matches!(failed.wait(PATIENCE), Err(Error::Completion(_))));
    stream.synchronize(PATIENCE).unwrap_err();
    a.qp.modify(&QpAttr::to(QpState::RESET)).unwrap();
    a.qp.activate().unwrap();
    a.qp.post_send(&[SendWr::nop()]).unwrap().wait(PATIENCE).unwrap();
    // Operations of the other kind are refused.
    let error = a.qp.post_send(&[SendWr::send(&[])]).unwrap_err();
    assert_says(&error, &["Send {", "datagrams on a datagram queue pair"]);
    let connected = Side::new(&open(&gpu), 64, |q| q);
    assert!(matches!(connected.qp.activate().unwrap_err(), Error::Transition { .. }));
    assert!(matches!(a.qp.connect(b.qp.address()).unwrap_err(), Error::Transition { .. }));
    // A thread that reads the rings, and queues in GPU memory.
    let proxy = open_by(Some(Route::Proxy), None).unwrap().alloc_pd().unwrap();
    let on_gpu = a.pd.build_qp().on_gpu(&gpu, OnGpu::SEND_CQ);
    for refused in [proxy.build_qp(), on_gpu] {
        assert_says(&refused.datagrams(QKEY).build().unwrap_err(), &["UD", "GDSYNC_PATH=direct"]);
    }
}

#[test]
#[ignore = "`card` runs it on the card"]
fn gpu_that_may_not_ring_is_refused_with_the_fix() {
    let bench = Bench::take();
    let (gpu, control) = (bench.gpu.clone(), &bench.control);
    control.fail("cuMemHostRegister", NOT_PERMITTED);
    let refused = |error: Error| {
        assert!(matches!(error, Error::Cuda { .. }), "{error:?}");
        assert_says(&error, &["doorbell", "PeerMappingOverride=1", "root", "GDSYNC_PATH=proxy"]);
    };
    refused(open_by(Some(Route::Direct), Some(&gpu)).unwrap_err());
    // Without a GPU it is not asked for.
    let context = open_by(Some(Route::Direct), None).unwrap();
    let (a, b) = connect(Side::new(&context, 64, |q| q), Side::new(&context, 64, |q| q));
    message(&a, &b, 1);
    // Found out late, by a stream: refused then.
    let stream = Stream::cuda(&gpu, CudaStreamConfig::default());
    control.mend("cuMemHostRegister");
    let stream = stream.or_else(|_| Stream::cuda(&gpu, CudaStreamConfig::default())).unwrap();
    control.fail("cuMemHostRegister", NOT_PERMITTED);
    let mut batch = Batch::new();
    batch.send(&a.qp, &SendWr::nop()).unwrap();
    let error = stream.submit(&mut batch).unwrap_err();
    assert!(matches!(error, Error::Cuda { .. }), "{error:?}");
}

/// Where nothing else was asked for, a thread rings in place of the GPU, and the reason is kept.
#[test]
#[ignore = "`card` runs it on the card"]
fn gpu_that_may_not_ring_is_helped_by_the_proxy() {
    let bench = Bench::take();
    let (gpu, control) = (bench.gpu.clone(), &bench.control);
    let allowed = open_by(None, Some(&gpu)).unwrap();
    assert_eq!((allowed.description(), allowed.not_direct()), ("mlx5 card mlx5_0", None));
    drop(allowed);
    // The card reuses its pages at once, so CUDA must have unregistered them.
    gpu.reclaim(PATIENCE).unwrap();
    control.fail("cuMemHostRegister", NOT_PERMITTED);
    let context = open_by(None, Some(&gpu)).unwrap();
    control.mend("cuMemHostRegister");
    assert_eq!(context.description(), "CPU proxy of mlx5_0");
    let why = context.not_direct().unwrap();
    assert!(why.contains("PeerMappingOverride=1") && why.contains("CUDA_ERROR_NOT_PERMITTED"), "{why}");
    let side = || Side::new(&context, 4096, |q| q.on_gpu(&gpu, OnGpu::empty()));
    let (a, b) = connect(side(), side());
    round_trips(&gpu, &a, &b);
}

/// The driver lets the GPU have the registers, but what it writes does not arrive.
#[test]
#[ignore = "`card` runs it on the card"]
fn gpu_that_the_card_does_not_hear_is_refused_with_the_reason() {
    let bench = Bench::take();
    let (gpu, control) = (bench.gpu.clone(), &bench.control);
    // Opened before anything is known of a GPU.
    let early = open_by(Some(Route::Direct), None).unwrap().alloc_pd().unwrap();
    control.loses_io(true);
    let build = || early.build_qp().on_gpu(&gpu, OnGpu::empty()).build();
    let refused = build().unwrap_err();
    assert!(matches!(refused, Error::Device { .. }), "{refused:?}");
    let helped = open_by(None, Some(&gpu)).unwrap();
    assert_eq!(helped.description(), "CPU proxy of mlx5_0");
    for text in [refused.to_string().as_str(), helped.not_direct().unwrap()] {
        assert_says(&text, &["GPU 0", "doorbell", "ACS", "IOMMU", "GDSYNC_PATH=proxy"]);
    }
    // It is asked again, until it rings.
    control.loses_io(false);
    build().unwrap();
    control.loses_io(true);
    build().unwrap();
}

/// From GPU to GPU, from and to any byte: the card takes the memory as a dma-buf of whole pages.
#[test]
#[ignore = "`card` runs it on the card"]
fn payload_in_gpu_memory_is_sent_from_there() {
    let bench = Bench::take();
    let gpu = bench.gpu.clone();
    let context = open(&gpu);
    let (a, b) = connect(Side::new(&context, 64, |q| q), Side::new(&context, 64, |q| q));
    let from = gpu.alloc(100_000).unwrap();
    let to = gpu.alloc(100_000).unwrap();
    // Not at the beginning of its allocation.
    let part = to.slice(5003, 50_000).unwrap();
    let source = a.pd.register(&from, Access::LOCAL_WRITE).unwrap();
    let path = a.qp.transfer_path(&source, 100).unwrap();
    assert_eq!(path.transport(), Transport::CardFromGpu);
    assert!(path.to_string().contains("dma-buf"), "{path}");
    assert_eq!(a.qp.transfer_path(&a.mr, 100).unwrap().transport(), Transport::Card);
    let target = b.pd.register(&part, Access::all()).unwrap();
    let data = pattern(40_000, 3);
    from.write(77, &data).unwrap();
    b.qp.post_recv(&[RecvWr::new(&[target.sge(1000, 40_000).unwrap()]).id(1)]).unwrap();
    a.qp.post_send(&[SendWr::send(&[source.sge(77, 40_000).unwrap()])]).unwrap();
    sent(&a).ok().unwrap();
    received(&b).ok().unwrap();
    let mut got = vec![0; 40_000];
    to.read(6003, &mut got).unwrap();
    assert!(got == data);
    // By address and key, as a peer names it.
    a.qp.post_send(&[SendWr::write(target.remote(49_000).unwrap(), &[source.sge(77, 1000).unwrap()])])
        .unwrap();
    sent(&a).ok().unwrap();
    to.read(54_003, &mut got[..1000]).unwrap();
    assert!(got[..1000] == data[..1000]);
}

/// No dma-bufs from this GPU, and no peer-memory module on this machine.
#[test]
#[ignore = "`card` runs it on the card"]
fn gpu_memory_that_cannot_be_registered_names_both_ways() {
    let bench = Bench::with(|control| control.attribute(0, DMA_BUF_SUPPORTED, 0));
    let gpu = bench.gpu.clone();
    let pd = open(&gpu).alloc_pd().unwrap();
    let error = pd.register(&gpu.alloc(4096).unwrap(), Access::LOCAL_WRITE).unwrap_err();
    assert!(matches!(error, Error::Device { .. }), "{error:?}");
    assert_says(&error, &["dma-buf", "nvidia-peermem", "modprobe"]);
}

/// `CU_DEVICE_ATTRIBUTE_CAN_FLUSH_REMOTE_WRITES`
const CAN_FLUSH: u32 = 98;
/// `CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS`
const FLUSH_OPTIONS: u32 = 117;
/// `CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING`
const ORDERING: u32 = 118;

/// Two GPUs that say this of inbound writes: flush on streams, flush options, ordering.
fn flushing_bench(attributes: [[i32; 3]; 2]) -> (Bench, Gpu) {
    let bench = Bench::with(|control| {
        for (device, values) in (0..).zip(attributes) {
            for (number, value) in [CAN_FLUSH, FLUSH_OPTIONS, ORDERING].into_iter().zip(values) {
                control.attribute(device, number, value);
            }
        }
    });
    (bench, simulated_gpu(1))
}

/// A connected pair on the card, and a stream of this GPU.
struct Rig {
    a: Side,
    b: Side,
    stream: Stream,
}

impl Rig {
    fn new(gpu: &Gpu, route: Route) -> Self {
        let context = open_by(Some(route), Some(gpu)).unwrap();
        let side = || Side::new(&context, 4096, |q| q.on_gpu(gpu, OnGpu::empty()));
        let (a, b) = connect(side(), side());
        Self { a, b, stream: Stream::cuda(gpu, CudaStreamConfig::default()).unwrap() }
    }

    /// Registers memory of a GPU where `b` receives.
    fn register(&self, memory: &Memory, access: Access) -> Mr {
        self.b.pd.register(memory, access).unwrap()
    }

    /// A message from `a` that the stream waits for in `b`'s host memory: what matters is where it might have gone.
    fn receive(&self) -> Result<()> {
        self.b.qp.post_recv(&[RecvWr::new(&[self.b.mr.sge(0, 8)?]).id(1)])?;
        self.a.qp.post_send(&[SendWr::send(&[self.a.mr.sge(0, 8)?])])?;
        let waited = self.stream.wait_recv(&self.b.qp).map(drop);
        if waited.is_err() {
            // The completion is left for the CPU.
            self.b.qp.recv_cq().wait(PATIENCE)?.ok()?;
        }
        self.a.qp.send_cq().wait(PATIENCE)?.ok()?;
        self.stream.synchronize(PATIENCE)?;
        waited
    }
}

fn refused(done: Result<()>, words: &[&str]) {
    let error = done.unwrap_err();
    let text = error.to_string();
    assert!(matches!(error, Error::Unsupported { .. }), "{error:?}");
    for word in words {
        assert!(text.contains(word), "'{text}' lacks '{word}'");
    }
}

#[test]
#[ignore = "`card` runs it on the card"]
fn gpu_whose_streams_cannot_flush_waits_for_no_payload_in_its_memory() {
    for (options, flush) in [(1, Flush::OnCpu), (0, Flush::Impossible)] {
        let (bench, _) = flushing_bench([[0, options, 0]; 2]);
        let gpu = &bench.gpu;
        assert_eq!(gpu.capabilities().flush, flush);
        let rig = Rig::new(gpu, Route::Direct);
        rig.receive().unwrap();
        let memory = gpu.alloc(4096).unwrap();
        // The card writes nothing there.
        let sent_from = rig.register(&memory, Access::empty());
        rig.receive().unwrap();
        let target = rig.register(&memory, Access::LOCAL_WRITE);
        refused(rig.receive(), &["flush", "98", "GDSYNC_PATH=proxy", "Memory::flush", "host memory"]);
        let mut batch = gdsync::stream::Batch::new();
        rig.b.qp.post_recv(&[RecvWr::new(&[]).id(1)]).unwrap();
        batch.wait_recv(&rig.b.qp).unwrap();
        batch.barrier();
        refused(rig.stream.submit(&mut batch), &["flush"]);
        drop(batch);
        // Sends bring nothing, until one reads.
        rig.stream.send(&rig.b.qp, &SendWr::nop()).unwrap();
        rig.stream.wait_send(&rig.b.qp).unwrap();
        rig.stream.synchronize(PATIENCE).unwrap();
        let from = rig.a.mr.remote(0).unwrap();
        rig.stream.send(&rig.b.qp, &SendWr::read(from, &[target.sge(0, 8).unwrap()])).unwrap();
        refused(rig.stream.wait_send(&rig.b.qp).map(drop), &["flush"]);
        rig.b.qp.send_cq().wait(PATIENCE).unwrap().ok().unwrap();
        drop((sent_from, target));
        rig.stream.send(&rig.b.qp, &SendWr::nop()).unwrap();
        rig.stream.wait_send(&rig.b.qp).unwrap();
        rig.stream.synchronize(PATIENCE).unwrap();
    }
}

/// The proxy sees the completion first, and flushes.
#[test]
#[ignore = "`card` runs it on the card"]
fn proxy_flushes_for_a_gpu_whose_streams_cannot() {
    let (bench, _) = flushing_bench([[0, 1, 0]; 2]);
    let rig = Rig::new(&bench.gpu, Route::Proxy);
    let _target = rig.register(&bench.gpu.alloc(4096).unwrap(), Access::LOCAL_WRITE);
    rig.receive().unwrap();
}

#[test]
#[ignore = "`card` runs it on the card"]
fn payload_in_memory_of_another_gpu_must_be_ordered_for_all() {
    const OWNER: [i32; 3] = [0, 1, 100];
    const ALL: [i32; 3] = [0, 1, 200];
    const BY_STREAM: [i32; 3] = [1, 3, 0];
    for (of_other, is_seen) in [(OWNER, false), (ALL, true), (BY_STREAM, false)] {
        let (bench, other) = flushing_bench([OWNER, of_other]);
        let rig = Rig::new(&bench.gpu, Route::Direct);
        let _own = rig.register(&bench.gpu.alloc(4096).unwrap(), Access::all());
        rig.receive().unwrap();
        let foreign = rig.register(&other.alloc(4096).unwrap(), Access::all());
        match is_seen {
            true => rig.receive().unwrap(),
            false => refused(rig.receive(), &["another GPU", "118", "protection domain of its own"]),
        }
        drop(foreign);
        rig.receive().unwrap();
    }
}

#[test]
#[ignore = "`card` runs it on the card"]
fn domain_stays_as_long_as_something_of_it() {
    let context = hca();
    let pd = context.alloc_pd().unwrap();
    let mr = pd.register(&Memory::alloc(100).unwrap(), Access::all()).unwrap();
    let qp = pd.build_qp().build().unwrap();
    drop((pd, context));
    assert!(qp.address().mtu.is_some() && mr.lkey() != 0);
    qp.connect(qp.address()).unwrap();
}

/// Domains, registers and memory come back.
#[test]
#[ignore = "`card` runs it on the card"]
fn queue_pairs_come_and_go() {
    own_process!();
    fn once(context: &Context) {
        let (a, b) = connect(Side::new(context, 64, |q| q), Side::new(context, 64, |q| q));
        message(&a, &b, 5);
    }
    let context = hca();
    for _ in 0..64 {
        once(&context);
    }
    for _ in 0..8 {
        once(&hca());
    }
}
